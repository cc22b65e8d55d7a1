"""`trainshed model compare`: two models against each other, tensor by tensor and by what they answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.checkpoints.proving.compare import Comparison
    from trainshed.checkpoints.proving.logits import Prompts
    from trainshed.checkpoints.weights import Weights

SHOWN_DIFFERENCES = 20


def compare(
    a: str,
    b: str,
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
        A folder for transformers, a Megatron checkpoint, a run's folder (its latest checkpoint) or one of its
        checkpoints.
    b
        The other one.
    logits
        Compare what they answer too: cosine, largest error, greedy tokens, and where they part.
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
    from trainshed.cli.console import print_report, reporter
    from trainshed.errors import InputError, MissingExtra

    if prompts is not None and not logits:
        raise InputError("--prompts are for --logits", hint="write --logits as well")
    if workers < 1:
        raise InputError(f"--workers {workers} is less than one", hint="write --workers 1 or more")
    try:
        from trainshed.checkpoints.proving.compare import compare as compare_weights
    except ImportError as error:
        if error.name != "torch":
            raise
        raise MissingExtra.named("train", "comparing weights") from None
    report = reporter()
    with open_weights(a, reporter=report) as one, open_weights(b, reporter=report) as two:
        asked = _prompts(prompts, tokenizer, (a, b), one, two) if prompts is not None else None
        found = compare_weights(one, two, workers=workers, reporter=report)
        answered = _answered(one, two, asked, report) if logits else None
    equal = found.equal and (answered is None or answered.get("passed", False))
    data = {
        "schema": "trainshed.model.compare/1",
        "a": a,
        "b": b,
        "equal": equal,
        "tensors": found.to_plain(),
        "logits": answered,
    }
    print_report(data, output, _text(found, answered, equal=equal))
    return 0 if equal else 1


def _answered(one: Weights, two: Weights, asked: Prompts | None, report: Any) -> dict[str, Any]:
    from trainshed.checkpoints.proving.logits import NotRun, Prompts, compare_logits

    answers = compare_logits(one, two, asked or Prompts.probe(one.config.vocab_size), reporter=report)
    return answers.to_plain() if isinstance(answers, NotRun) else answers.comparison.to_plain()


def _prompts(file: Path, tokenizer: str | None, sides: tuple[str, str], one: Weights, two: Weights) -> Prompts:
    """The prompts of a file as token ids."""
    from trainshed.checkpoints.formats import detect
    from trainshed.checkpoints.inspection import tokenizer_address
    from trainshed.checkpoints.proving.logits import Prompts
    from trainshed.data.encode.tokenizer import load_tokenizer
    from trainshed.errors import InputError, NotFound, TokenizerError

    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError:
        raise NotFound("there is no such file", where=str(file)) from None
    if not lines:
        raise InputError("there are no prompts", where=str(file), hint="write one a line")
    places = [tokenizer] if tokenizer else [tokenizer_address(side, detect(side)) for side in sides]
    for place in places:
        try:
            backend = load_tokenizer(place).backend
        except TokenizerError:
            if place == places[-1]:
                raise
            continue
        rows = [backend.encode(line).ids for line in lines]
        return Prompts.of(rows, min(one.config.vocab_size, two.config.vocab_size))
    raise AssertionError("unreachable")


def _text(found: Comparison, answered: dict[str, Any] | None, *, equal: bool) -> str:
    from trainshed.checkpoints.proving.verdict import logits_words

    same = found.compared - len(found.differences)
    lines = [
        f"{'equal' if equal else 'DIFFERENT'}: {same:,} of {found.compared:,} tensors the same, {found.elements:,} "
        "weights compared",
        f"  dtypes  {', '.join(found.dtypes_a)} and {', '.join(found.dtypes_b)}",
    ]
    words = list(found.words())
    lines += [f"  {line}" for line in words[:SHOWN_DIFFERENCES]]
    if len(words) > SHOWN_DIFFERENCES:
        lines.append(f"  and {len(words) - SHOWN_DIFFERENCES} more (-o json lists all)")
    if answered is not None:
        lines.append(f"  logits  {logits_words(answered)}")
    return "\n".join(lines)
