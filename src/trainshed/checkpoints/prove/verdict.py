"""The verdict: what was proven of converted weights, stored beside them as `verdict.json`.

A conversion ends with it: every native tensor of the target, read back with the target's own reader, is bit by bit the
source's; the architecture that the target's files describe is the source's; both give the same logits; and this is
their loss on the probe batch, which a run computes again before step 0. `train` refuses weights whose verdict failed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trainshed
from trainshed.checkpoints.prove.probe import LossProbe
from trainshed.checkpoints.weights import Weights
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import LocalStore

if TYPE_CHECKING:
    import torch

    from trainshed.checkpoints.prove.compare import WeightsComparison
    from trainshed.checkpoints.prove.logits import LogitsComparison, LogitsNotRun


SCHEMA = "trainshed.verdict/1"
VERDICT = "verdict.json"
LOGITS_NOT_ASKED = "nobody asked for them"


@dataclass(frozen=True)
class TensorProof:
    """The exact round trip: how many native tensors were compared, how many are equal, what differs first."""

    compared: int
    equal: int
    first_difference: str | None
    dtype: str | None
    """What the source was cast to first; None: it was that already."""


@dataclass(frozen=True)
class Verdict:
    """What was proven; `logits` holds `ran` and either its figures or the `reason` why it was not run."""

    passed: bool
    tensors: TensorProof
    logits: Mapping[str, Any]
    probe: LossProbe | None
    versions: Mapping[str, str]

    def to_bytes(self) -> bytes:
        """The verdict as it is stored: the same proof gives the same bytes."""
        body = {"schema": SCHEMA, **asdict(self)}
        return json.dumps(body, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Verdict:
        """Read a verdict, or say that it is none."""
        try:
            body = json.loads(data)
            if body.pop("schema") != SCHEMA or type(body["passed"]) is not bool:
                raise ValueError
            tensors = TensorProof(**body.pop("tensors"))
            probe = body.pop("probe")
            return cls(tensors=tensors, probe=None if probe is None else LossProbe(**probe), **body)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise CorruptData(
                "is no verdict that this Trainshed reads", where=where, hint="convert again, or remove it"
            ) from None

    def words(self) -> list[str]:
        """The verdict for people, a line each."""
        tensors = self.tensors
        cast = f" after the cast to {tensors.dtype}" if tensors.dtype else ""
        lines = [f"tensors  {tensors.equal:,} of {tensors.compared:,} equal bit by bit{cast}"]
        if tensors.first_difference:
            lines.append(f"         {tensors.first_difference}")
        lines.append(f"logits   {describe_logits(self.logits)}")
        if self.probe is not None:
            lines.append(f"probe    loss {self.probe.loss:.6f}")
        return lines


def prove(
    source: Weights,
    target: Weights,
    *,
    dtype: torch.dtype | None = None,
    logits: bool = True,
    workers: int = 4,
    reporter: Reporter = SILENT,
) -> Verdict:
    """Hold a target against the source it was made from; `dtype` is what it was cast to on the way.

    Both are read with their own readers, so whatever the target's files do not say is found missing.
    """
    from trainshed.checkpoints.prove.compare import compare_weights
    from trainshed.checkpoints.prove.layerwise import probe_loss, to_probe
    from trainshed.checkpoints.prove.logits import LogitsNotRun, PromptBatch, compare_logits

    found = compare_weights(source, target, dtype=dtype, workers=workers, reporter=reporter)
    vocab_size = target.config.vocab_size
    answers = LogitsNotRun(LOGITS_NOT_ASKED)
    if logits:
        answers = compare_logits(source, target, PromptBatch.probe(vocab_size), dtype=dtype, reporter=reporter)
    cast = str(dtype).removeprefix("torch.") if dtype is not None else None
    cast = None if [cast] == source.dtypes else cast
    if isinstance(answers, LogitsNotRun):
        return _verdict(found, answers, None, cast)
    loss = probe_loss(answers.logits, vocab_size)
    probe = to_probe(loss, vocab_size) if loss - loss == 0 else None  # a loss that is no number is no probe
    return _verdict(found, answers.comparison, probe, cast)


def write_verdict(folder: Path, verdict: Verdict) -> None:
    """Store a verdict beside the weights it is about."""
    LocalStore(folder).put(VERDICT, verdict.to_bytes())


def read_verdict(folder: Path) -> Verdict | None:
    """Return the verdict beside weights, None where there is none: they come from elsewhere.

    One step of a checkpoint is judged with the whole, whose folder holds the verdict.
    """
    for home in _verdict_folders(folder.absolute()):
        try:
            return Verdict.from_bytes(LocalStore(home).read(VERDICT), str(home / VERDICT))
        except NotFound:
            continue
    return None


def _verdict_folders(folder: Path) -> Iterator[Path]:
    yield folder
    if folder.name.startswith("step-"):
        yield from folder.parents[1:2]
    elif folder.name == "release" or folder.name.startswith("iter_"):
        yield folder.parent


def refuse_failed_verdict(folder: Path, *, where: str | None = None) -> None:
    """Raise `InputError` where the verdict beside weights says that their conversion failed."""
    verdict = read_verdict(folder)
    if verdict is None or verdict.passed:
        return
    why = [verdict.tensors.first_difference] if verdict.tensors.first_difference else []
    if not verdict.logits.get("passed", True):
        why.append(f"logits {describe_logits(verdict.logits)}")
    raise InputError(
        f"the base weights failed the proof of their conversion: {'; '.join(why)} ({VERDICT} in {folder})",
        where=where,
        hint="convert them again, or write `verdict: ignore` under `model` to train on them all the same",
    )


def describe_logits(logits: Mapping[str, Any]) -> str:
    """Logits of a verdict or a comparison in one line."""
    if not logits["ran"]:
        return f"not run: {logits['reason']}"
    numbers = ", ".join(
        f"{label} {'not a number' if logits[key] is None else format(logits[key], '.3g')}"
        for label, key in (("largest error", "max_error"), ("bound", "bound"))
    )
    cosine = "not a number" if logits["cosine"] is None else f"{logits['cosine']:.8f}"
    apart = f", apart from {logits['first_diverging']} on" if logits["first_diverging"] else ""
    return (
        f"{'equal' if logits['passed'] else 'DIFFERENT'}{apart}: cosine {cosine}, {numbers}, greedy tokens "
        f"{logits['greedy_equal']} of {logits['tokens']} ({' against '.join(logits['computed_by'])})"
    )


def _verdict(
    found: WeightsComparison, logits: LogitsComparison | LogitsNotRun, probe: LossProbe | None, cast: str | None
) -> Verdict:
    tensors = TensorProof(
        compared=found.compared,
        equal=found.compared - len(found.differences),
        first_difference=found.first_difference,
        dtype=cast,
    )
    return Verdict(found.equal and logits.passed, tensors, logits.to_plain(), probe, _versions())


def _versions() -> dict[str, str]:
    found = {"trainshed": trainshed.__version__}
    for name in ("torch", "transformers", "megatron-core"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
