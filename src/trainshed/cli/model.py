"""The verbs of `trainshed model`: weights fetched, converted with a proof, compared, inspected, merged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from trainshed.cli.completion import ClusterName, RunName
from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.checkpoints.convert.convert import Conversion
    from trainshed.checkpoints.inspection import WeightsInspection
    from trainshed.checkpoints.prove.compare import WeightsComparison
    from trainshed.checkpoints.prove.logits import PromptBatch
    from trainshed.checkpoints.weights import Weights
    from trainshed.observe.evaluations import EvaluationRecord
    from trainshed.serve.loading import RunTokenizerFolder


# The same weights a second time, as the authors' own code reads them (Llama, Mistral); the seeds leave them out too.
_ORIGINAL_WEIGHTS = "original"


def fetch(
    src: str,
    dst: str,
    *,
    include: Annotated[list[str] | None, Parameter(negative="")] = None,
    exclude: Annotated[list[str] | None, Parameter(negative="")] = None,
    task: str | None = None,
    workers: int = 16,
    output: Annotated[Output, Parameter(name=["--output", "-o"])] = "text",
) -> int:
    """Copy a model into a store: its revision pinned, checksummed, and moving only what is missing when run again.

    The copy is complete when DST/.trainshed/manifest.json is there; killed at any moment, the same command goes on
    where it stopped. `original/*`, the weights in their authors' own format, is left out unless --include names it.

    Parameters
    ----------
    src
        A folder in any store (hf://org/name[@revision], s3://…, gs://…, az://…, a path).
    dst
        The folder to copy into, local or in a bucket.
    include
        Copy only what matches this glob; may be repeated. A glob without a slash matches file names.
    exclude
        Leave out what matches this glob; may be repeated.
    task
        Copy part i of N, written i/N and counted from 0: for Slurm arrays and Kubernetes indexed jobs.
    workers
        How many files to copy at a time.
    output
        Report as text or json.
    """
    from trainshed.cli.console import parse_task, report_copy, reporter
    from trainshed.storage import copy_tree

    result = copy_tree(
        src,
        dst,
        include=include or (),
        exclude=_excluded_patterns(include or (), exclude or ()),
        task=parse_task(task) if task else None,
        workers=workers,
        reporter=reporter(),
    )
    report_copy(result, "trainshed.model.fetch/1", output)
    return 0


def _excluded_patterns(include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    asked_for = any(pattern.strip("/").partition("/")[0] == _ORIGINAL_WEIGHTS for pattern in include)
    return [*exclude, *([] if asked_for else [f"{_ORIGINAL_WEIGHTS}/**"])]


def convert(
    src: RunName,
    dst: str,
    *,
    to: Literal["hf", "native", "megatron", "gguf"],
    format: Literal["torch", "torch_dist"] | None = None,
    tp: int = 1,
    pp: int = 1,
    vp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    spec: Literal["te", "local"] | None = None,
    vocab_divisible_by: int | None = None,
    vocab_size: int | None = None,
    dtype: Literal["bf16", "fp32", "fp16", "fp8", "q8_0"] | None = None,
    tokenizer: str | None = None,
    logits: bool = True,
    workers: int = 4,
    scratch: Path | None = None,
    output: Annotated[Output, Parameter(name=["--output", "-o"])] = "text",
) -> int:
    """Convert weights between Hugging Face, Megatron, native checkpoints and to GGUF, and prove that nothing changed.

    The format of SRC is found by its files. DST appears when it is complete and proven: every tensor is read back and
    compared bit by bit, the logits are compared, and the verdict is stored as DST/verdict.json. Killed at any moment,
    the same command goes on where it stopped. Exit code 1 if the proof fails.

    Parameters
    ----------
    src
        The weights: a folder for transformers, a Megatron checkpoint, a run (its name, name/id, folder or recipe file:
        the latest checkpoint) or one of its checkpoints; a path, or an address in any store (hf://org/name[@revision],
        s3://…).
    dst
        The folder to make, local or in a bucket.
    to
        The format to write.
    format
        Megatron's: torch_dist (the default; reads on every layout) or the legacy torch (cut for one layout).
    tp
        Tensor-parallel size of Megatron's legacy files.
    pp
        Pipeline-parallel size of Megatron's legacy files.
    vp
        Virtual pipeline stages per rank of Megatron's legacy files.
    ep
        Expert-parallel size of Megatron's legacy files.
    etp
        Expert-tensor-parallel size of Megatron's legacy files (default: tp, as Megatron has it).
    spec
        Which layers of Megatron's will load it: te (Transformer Engine, the default) or local.
    vocab_divisible_by
        Megatron's --make-vocab-size-divisible-by: what its vocabulary is padded to (default: 128).
    vocab_size
        The true vocabulary of a Megatron source whose args do not say it.
    dtype
        Cast the weights (default: as they are stored). fp8 is for hf (compressed-tensors, which vLLM reads), fp16 and
        q8_0 are for gguf.
    tokenizer
        A folder in any store whose tokenizer and chat template go with the weights (default: the source's own, else
        that of its run).
    logits
        Compare logits too, besides every tensor.
    workers
        How many files to write at a time.
    scratch
        Where a target in a bucket is made before it is uploaded (default: the system's temporary folder).
    output
        Report as text or json.
    """
    import os

    from trainshed.checkpoints.formats import TargetFormat
    from trainshed.cli.console import print_report, reporter
    from trainshed.errors import MissingExtra

    target = TargetFormat(to, format, tp, pp, vp, ep, etp, spec, vocab_divisible_by)
    # PyTorch reads it when it is loaded: large tensors in huge pages, without which half the time goes to page faults.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        from trainshed.checkpoints.convert.convert import convert_weights
    except ImportError as error:
        if error.name != "torch":
            raise
        raise MissingExtra.named("train", "converting weights") from None
    from trainshed.workflow.known_runs import checkpoint_address

    src = checkpoint_address(src)
    chat_template, end_tokens = None, ()
    if tokenizer is None and (own := _tokenizer_of_run(src)) is not None:
        tokenizer, chat_template, end_tokens = own.folder, own.chat_template, own.end_tokens
    made = convert_weights(
        src,
        dst,
        target,
        dtype=dtype,
        tokenizer=tokenizer,
        chat_template=chat_template,
        end_tokens=end_tokens,
        vocab_size=vocab_size,
        logits=logits,
        workers=workers,
        scratch=scratch,
        reporter=reporter(),
    )
    print_report(_conversion_report(made), output, _conversion_text(made))
    return 0 if made.verdict.passed else 1


def _tokenizer_of_run(src: str) -> RunTokenizerFolder | None:
    """The tokenizer of the run that weights belong to, where they bring none themselves."""
    from trainshed.checkpoints.formats import detect_format
    from trainshed.checkpoints.hf.companion_files import has_tokenizer, read_companions
    from trainshed.checkpoints.lora.checkpoint_spec import run_folder_of

    if run_folder_of(src) is None or has_tokenizer(read_companions(src, detect_format(src))):
        return None
    from trainshed.serve.loading import run_tokenizer_folder

    return run_tokenizer_folder(src)


def _conversion_report(made: Conversion) -> dict[str, object]:
    from dataclasses import asdict

    return {"schema": "trainshed.model.convert/1", **asdict(made)}


def _conversion_text(made: Conversion) -> str:
    from trainshed.cli.console import format_amount

    files = "1 file" if made.units == 1 else f"{made.units} files"
    kept = f", {made.kept} from an earlier start" if made.kept else ""
    lines = [
        f"{made.family}, {made.parameters:,} parameters in {made.dtype}: {files} of weights{kept}, "
        f"{format_amount(made.bytes, 'B')}",
        f"from     {made.source} ({made.source_format})",
        f"to       {made.target} ({made.format})",
        *made.verdict.lines(),
        "verdict  " + ("passed" if made.verdict.passed else "FAILED"),
    ]
    return "\n".join(lines)


SHOWN_DIFFERENCES = 20


def compare(
    a: RunName,
    b: RunName,
    *,
    logits: Annotated[bool, Parameter(negative="")] = False,
    prompts: Path | None = None,
    tokenizer: str | None = None,
    workers: int = 4,
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Compare two models, each in any format: tensors and shapes, dtypes, architecture, every value.

    With --logits both also answer the same tokens: Hugging Face weights through transformers and Megatron's through
    megatron-core, where these are installed, all others through our decoder, layer by layer. The report says who
    answered for each side. Exit code 0 if they are equal, 1 if they differ.

    Parameters
    ----------
    a
        A folder for transformers, a Megatron checkpoint, a run (its name, name/id, folder or recipe file: the latest
        checkpoint) or one of its checkpoints.
    b
        The other one.
    logits
        Also compare their logits: cosine, largest error, greedy tokens, and where these diverge.
    prompts
        A text file with one prompt a line, in place of fixed token ids; asks for --logits.
    tokenizer
        The tokenizer of the prompts (default: the one beside A, else beside B).
    workers
        How many boxes of a tensor to compare at a time.
    output
        Report as text or json.
    """
    from trainshed.checkpoints.formats import open_weights
    from trainshed.checkpoints.hf.weights import HfWeights
    from trainshed.cli.console import print_report, reporter
    from trainshed.errors import InputError, MissingExtra

    if prompts is not None and not logits:
        raise InputError("--prompts are for --logits", hint="write --logits as well")
    if workers < 1:
        raise InputError(f"--workers {workers} is less than one", hint="write --workers 1 or more")
    try:
        from trainshed.checkpoints.prove.compare import compare_weights
    except ImportError as error:
        if error.name != "torch":
            raise
        raise MissingExtra.named("train", "comparing weights") from None
    from trainshed.workflow.known_runs import checkpoint_address

    a, b = checkpoint_address(a), checkpoint_address(b)
    report = reporter()
    with open_weights(a, reporter=report) as one, open_weights(b, reporter=report) as two:
        for weights in (one, two):
            if isinstance(weights, HfWeights):
                weights.check_tied_head()
        asked = _read_prompts(prompts, tokenizer, (a, b), one, two) if prompts is not None else None
        comparison = compare_weights(one, two, workers=workers, reporter=report)
        answered = _logits_report(one, two, asked, report) if logits else None
    equal = comparison.equal and (answered is None or answered.get("passed", False))
    data = {
        "schema": "trainshed.model.compare/1",
        "a": a,
        "b": b,
        "equal": equal,
        "tensors": comparison.to_plain(),
        "logits": answered,
    }
    print_report(data, output, _comparison_text(comparison, answered, equal=equal))
    return 0 if equal else 1


def _logits_report(one: Weights, two: Weights, asked: PromptBatch | None, report: Any) -> dict[str, Any]:
    from trainshed.checkpoints.prove.logits import LogitsNotRun, PromptBatch, compare_logits

    answers = compare_logits(one, two, asked or PromptBatch.probe(one.config.vocab_size), reporter=report)
    return answers.to_plain() if isinstance(answers, LogitsNotRun) else answers.comparison.to_plain()


def _read_prompts(file: Path, tokenizer: str | None, sides: tuple[str, str], one: Weights, two: Weights) -> PromptBatch:
    """The prompts of a file as token ids."""
    from trainshed.checkpoints.formats import detect_format
    from trainshed.checkpoints.inspection import tokenizer_address
    from trainshed.checkpoints.prove.logits import PromptBatch
    from trainshed.data.tokenize.tokenizer import load_tokenizer
    from trainshed.errors import InputError, NoSuchName, TokenizerError

    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError:
        raise NoSuchName("there is no such file", where=str(file)) from None
    if not lines:
        raise InputError("there are no prompts", where=str(file), hint="write one a line")
    places = [tokenizer] if tokenizer else [tokenizer_address(side, detect_format(side)) for side in sides]
    for place in places:
        try:
            backend = load_tokenizer(place).backend
        except TokenizerError:
            if place == places[-1]:
                raise
            continue
        rows = [backend.encode(line).ids for line in lines]
        return PromptBatch.of(rows, min(one.config.vocab_size, two.config.vocab_size))
    raise AssertionError("unreachable")


def _comparison_text(comparison: WeightsComparison, answered: dict[str, Any] | None, *, equal: bool) -> str:
    from trainshed.checkpoints.prove.verdict import describe_logits

    same = comparison.compared - len(comparison.differences)
    lines = [
        f"{'equal' if equal else 'DIFFERENT'}: {same:,} of {comparison.compared:,} tensors the same, "
        f"{comparison.elements:,} weights compared",
        f"  dtypes  {', '.join(comparison.dtypes_a)} and {', '.join(comparison.dtypes_b)}",
    ]
    words = list(comparison.lines())
    lines += [f"  {line}" for line in words[:SHOWN_DIFFERENCES]]
    if len(words) > SHOWN_DIFFERENCES:
        lines.append(f"  and {len(words) - SHOWN_DIFFERENCES} more (-o json lists all)")
    if answered is not None:
        lines.append(f"  logits  {describe_logits(answered)}")
    return "\n".join(lines)


SHOWN_FILES = 12


def inspect(
    path: RunName, *, on: ClusterName = "local", output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text"
) -> int:
    """Show what weights are: format, family, parameters of each part, dtype, vocabulary, layout, files, verdict.

    Scores of `trainshed eval` are shown with them.

    Looks at headers and manifests; only Megatron's checkpoints need torch for that.

    Parameters
    ----------
    path
        A folder for transformers, a Megatron checkpoint, a run (its name, name/id, folder or recipe file: the latest
        checkpoint) or one of its checkpoints.
    on
        The cluster whose store is searched for the run.
    output
        Report as text or json.
    """
    from trainshed.checkpoints.inspection import inspect_weights
    from trainshed.cli.console import print_report
    from trainshed.workflow.known_runs import checkpoint_address

    inspection = inspect_weights(checkpoint_address(path, on))
    evaluations = _evaluations(inspection)
    data = {"schema": "trainshed.model.inspect/1", **inspection.to_plain()}
    data["evaluations"] = [record.to_plain() for record in evaluations]
    lines = [_inspection_text(inspection), *([] if not evaluations else ["  scores"])]
    lines += [f"    {record.label}: {record.scores_text()}" for record in evaluations]
    print_report(data, output, "\n".join(lines))
    return 0


def _evaluations(inspection: WeightsInspection) -> list[EvaluationRecord]:
    """The scores of these weights: beside them, or in their run."""
    from trainshed.checkpoints.lora.checkpoint_spec import run_folder_of
    from trainshed.observe.evaluations import list_evaluations
    from trainshed.storage import LocalStore, parse

    if parse(inspection.address).scheme != "file":
        return []
    run = run_folder_of(inspection.address) if inspection.step is not None else None
    records = list_evaluations(LocalStore(run or str(parse(inspection.address))))
    return [record for record in records if record.step == inspection.step]


def _inspection_text(inspection: WeightsInspection) -> str:
    from trainshed.cli.console import format_amount

    config = inspection.config
    size = format_amount(inspection.bytes, "B")
    lines = [
        f"{inspection.address}  ({inspection.format}, {size} in {len(inspection.files)} files)",
        f"  family      {config.family}: {config.layers} layers, hidden {config.hidden:,}, {config.heads} heads "
        f"({config.kv_heads} for keys and values)",
        f"  dtype       {', '.join(inspection.dtypes)}",
        f"  vocabulary  {_vocabulary(inspection)}",
        f"  parameters  {inspection.parameters:>18,}",
    ]
    for part, count in inspection.parts.items():
        tied = " (and head: they are one)" if part == "embedding" and config.tied_embeddings else ""
        lines.append(f"    {part:<10}{count:>18,}  {count / inspection.parameters:>6.1%}{tied}")
    if (adapters := inspection.adapters) is not None:
        lines.append(
            f"  adapters    {adapters.parameters:,} weights of rank {adapters.rank} on {', '.join(adapters.targets)}"
            + (f", rows of {adapters.added_tokens} added tokens among them" if adapters.added_tokens else "")
            + f"; the others are in {adapters.base}"
        )
    if inspection.step is not None:
        lines.append(f"  step        {inspection.step:,}")
    if inspection.layout is not None:
        lines.append(f"  layout      {', '.join(f'{key} {size}' for key, size in inspection.layout.items())}")
    lines.append("  files")
    lines += [f"    {format_amount(file.bytes, 'B'):>10}  {file.path}" for file in inspection.files[:SHOWN_FILES]]
    if len(inspection.files) > SHOWN_FILES:
        lines.append(f"    and {len(inspection.files) - SHOWN_FILES} more")
    if inspection.verdict is None:
        lines.append("  verdict     none: these weights were not converted here")
    else:
        lines.append(f"  verdict     {'passed' if inspection.verdict.passed else 'FAILED'}")
        lines += [f"    {line}" for line in inspection.verdict.lines()]
    return "\n".join(lines)


def _vocabulary(inspection: WeightsInspection) -> str:
    rows = f"{inspection.config.vocab_size:,}"
    if inspection.padded_vocab_size != inspection.config.vocab_size:
        rows += f", padded to {inspection.padded_vocab_size:,} rows"
    return rows if inspection.tokens is None else f"{rows}; the tokenizer knows {inspection.tokens:,} tokens"


def merge(
    base: str,
    adapter: str,
    out: str,
    *,
    logits: bool = True,
    on: ClusterName = "local",
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Merge a LoRA adapter into Hugging Face weights: the weights that PEFT's own merge_and_unload gives.

    Goes through the base shard by shard, in the memory of one tensor. OUT appears when it is complete and proven: every
    tensor is read back and compared with base and adapter, the logits are compared, and the verdict is stored as
    OUT/verdict.json. Killed at any moment, the same command goes on where it stopped. Exit code 1 if the proof fails.

    Parameters
    ----------
    base
        The folder of the base model, as transformers saves it.
    adapter
        LoRA or DoRA: PEFT's folder (adapter_config.json and adapter_model.safetensors), a LoRA run (its name, name/id,
        folder or recipe file: the newest checkpoint) or one of its checkpoints.
    out
        The folder to make.
    logits
        Compare logits too, besides every tensor.
    on
        The cluster whose store is searched for the run.
    output
        Report as text or json.
    """
    from trainshed.checkpoints.formats import local_folder
    from trainshed.cli.console import format_amount, print_report, reporter
    from trainshed.errors import MissingExtra
    from trainshed.workflow.known_runs import checkpoint_address

    try:
        from trainshed.checkpoints.lora.merge import merge_adapter
    except ImportError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        raise MissingExtra.named("train", "merging adapters") from None
    made = merge_adapter(
        local_folder(base), checkpoint_address(adapter, on), local_folder(out), logits=logits, reporter=reporter()
    )
    lines = [
        f"{made.family}: {made.changed} of {made.tensors} tensors changed (rank {made.rank}), {made.files} files, "
        f"{format_amount(made.bytes, 'B')}",
        f"base     {made.base}",
        f"adapter  {made.adapter}",
        f"to       {made.target}",
        *made.verdict.lines(),
        "verdict  " + ("passed" if made.verdict.passed else "FAILED"),
    ]
    print_report({"schema": "trainshed.model.merge/1", **made.to_plain()}, output, "\n".join(lines))
    return 0 if made.verdict.passed else 1
