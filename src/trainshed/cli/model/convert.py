"""`trainshed model convert`: weights from one format into another, with a proof."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.checkpoints.converting.convert import Conversion


def convert(
    src: str,
    dst: str,
    *,
    to: Literal["hf", "native", "megatron"],
    format: Literal["torch", "torch_dist"] | None = None,
    tp: int = 1,
    pp: int = 1,
    vp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    spec: Literal["te", "local"] | None = None,
    vocab_divisible_by: int | None = None,
    vocab_size: int | None = None,
    dtype: Literal["bf16", "fp32"] | None = None,
    tokenizer: str | None = None,
    logits: bool = True,
    workers: int = 4,
    scratch: Path | None = None,
    output: Annotated[Output, Parameter(name=["--output", "-o"])] = "text",
) -> int:
    """Convert weights between Hugging Face, Megatron and native checkpoints, and prove that nothing changed.

    The format of SRC is found by its files. DST appears when it is complete and proven: every tensor is read back and
    compared bit by bit, the logits are compared, and the verdict is stored as DST/verdict.json. Killed at any moment,
    the same command goes on where it stopped. Exit code 1 if the proof fails.

    Parameters
    ----------
    src
        The weights: a folder for transformers, a Megatron checkpoint, a run's folder (its latest checkpoint) or one of
        its checkpoints; a path, or an address in any store (hf://org/name[@revision], s3://…).
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
        Cast the weights (default: as they are stored).
    tokenizer
        A folder in any store whose tokenizer and chat template go with the weights (default: the source's own).
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

    from trainshed.checkpoints.formats import Target
    from trainshed.cli.console import print_report, reporter
    from trainshed.errors import MissingExtra

    target = Target(to, format, tp, pp, vp, ep, etp, spec, vocab_divisible_by)
    # PyTorch reads it when it is loaded: large tensors in huge pages, without which half the time goes to page faults.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        from trainshed.checkpoints.converting.convert import convert as convert_weights
    except ImportError as error:
        if error.name != "torch":
            raise
        raise MissingExtra.named("train", "converting weights") from None
    made = convert_weights(
        src,
        dst,
        target,
        dtype=dtype,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        logits=logits,
        workers=workers,
        scratch=scratch,
        reporter=reporter(),
    )
    print_report(_data(made), output, _text(made))
    return 0 if made.verdict.passed else 1


def _data(made: Conversion) -> dict[str, object]:
    from dataclasses import asdict

    return {"schema": "trainshed.model.convert/1", **asdict(made)}


def _text(made: Conversion) -> str:
    from trainshed.cli.console import human

    kept = f", {made.kept} from an earlier start" if made.kept else ""
    lines = [
        f"{made.family}, {made.parameters:,} parameters in {made.dtype}: {made.units} files of weights{kept}, "
        f"{human(made.bytes, 'B')}",
        f"from     {made.source} ({made.source_format})",
        f"to       {made.target} ({made.format})",
        *made.verdict.words(),
        "verdict  " + ("passed" if made.verdict.passed else "FAILED"),
    ]
    return "\n".join(lines)
