"""The verdict: what was proven of converted weights, stored beside them as `verdict.json`.

A conversion ends with it. It says whether every native tensor of the target, read back with the target's own reader, is
bit by bit the source's; whether the target's files describe the same architecture; and whether both give the same
logits. It also holds their loss on the probe batch, which a run computes again before step 0. `train` refuses weights
whose verdict failed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trainshed
from trainshed.checkpoints.megatron.iterations import is_iteration_name
from trainshed.checkpoints.prove.probe import LossProbe
from trainshed.checkpoints.weights import Weights, dtype_name
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.reporting import SILENT, Reporter
from trainshed.run_folder import step_number
from trainshed.storage import LocalStore

if TYPE_CHECKING:
    import torch

    from trainshed.checkpoints.prove.compare import WeightsComparison
    from trainshed.checkpoints.prove.logits import LogitsComparison, LogitsNotRun
    from trainshed.checkpoints.quantization import WeightQuantization


SCHEMA = "trainshed.verdict/1"
VERDICT = "verdict.json"
LOGITS_NOT_ASKED = "nobody asked for them"


@dataclass(frozen=True)
class TensorProof:
    """The comparison of tensors: how many were compared, how many are equal, what differs first."""

    compared: int
    equal: int
    first_difference: str | None
    dtype: str | None
    """What the source was cast to first; None without a cast."""


@dataclass(frozen=True)
class Verdict:
    """What was proven; `logits` holds `ran`, and the figures or the `reason` why they were not computed."""

    passed: bool
    tensors: TensorProof
    logits: Mapping[str, Any]
    probe: LossProbe | None
    versions: Mapping[str, str]
    quantization: Mapping[str, Any] | None = None
    """Of weights in 8 bits: the scheme, its bound, the worst value as a share of it, and what it does to the logits."""

    def to_bytes(self) -> bytes:
        """The verdict as it is stored; the same proof gives the same bytes."""
        body = {"schema": SCHEMA, **asdict(self)}
        if self.quantization is None:
            del body["quantization"]
        return json.dumps(body, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Verdict:
        """Read a verdict."""
        try:
            body = json.loads(data)
            if body.pop("schema") != SCHEMA or type(body["passed"]) is not bool:
                raise ValueError
            tensors = TensorProof(**body.pop("tensors"))
            probe = body.pop("probe")
            return cls(tensors=tensors, probe=None if probe is None else LossProbe(**probe), **body)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise CorruptData(
                "is not a verdict that this Trainshed reads", where=where, hint="convert again, or remove it"
            ) from None

    def lines(self) -> list[str]:
        """The verdict as lines for people."""
        tensors = self.tensors
        cast = f" after the cast to {tensors.dtype}" if tensors.dtype else ""
        lines = [f"tensors  {tensors.equal:,} of {tensors.compared:,} equal bit by bit{cast}"]
        if tensors.first_difference:
            lines.append(f"         {tensors.first_difference}")
        lines.append(f"logits   {describe_logits(self.logits)}")
        if self.probe is not None:
            lines.append(f"probe    loss {self.probe.loss:.6f}")
        if (quantization := self.quantization) is not None:
            cosine = quantization["logits_cosine"]
            lines.append(
                f"8 bits   {quantization['scheme']}: the worst value is off by {quantization['largest_error']:.0%} of "
                f"the bound ({quantization['bound']})"
                + ("" if cosine is None else f"; logits of the unquantised weights: cosine {cosine:.6f}")
            )
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
    """Compare a target with the source it was made from; `dtype` is what it was cast to.

    Both are read with their own readers, so anything that the target's files lack is noticed.
    """
    from trainshed.checkpoints.prove.compare import compare_weights
    from trainshed.checkpoints.prove.layerwise import probe_loss, to_probe
    from trainshed.checkpoints.prove.logits import LogitsNotRun, PromptBatch, compare_logits

    comparison = compare_weights(source, target, dtype=dtype, workers=workers, reporter=reporter)
    vocab_size = target.config.vocab_size
    logits_result = LogitsNotRun(LOGITS_NOT_ASKED)
    if logits:
        logits_result = compare_logits(source, target, PromptBatch.probe(vocab_size), dtype=dtype, reporter=reporter)
    cast = dtype_name(dtype) if dtype is not None else None
    cast = None if [cast] == source.dtypes else cast
    if isinstance(logits_result, LogitsNotRun):
        return _verdict(comparison, logits_result, None, cast)
    loss = probe_loss(logits_result.logits, vocab_size)
    probe = to_probe(loss, vocab_size) if loss - loss == 0 else None  # no probe where the loss is NaN or infinite
    return _verdict(comparison, logits_result.comparison, probe, cast)


def prove_quantized(
    source: Weights,
    target: Weights,
    scheme: WeightQuantization,
    *,
    logits: bool = True,
    workers: int = 4,
    reporter: Reporter = SILENT,
) -> Verdict:
    """Compare a target in 8 bits with what its source is after the same rounding, and the rounding with its bound."""
    from trainshed.checkpoints.prove.logits import LogitsNotRun, PromptBatch, compare_logits
    from trainshed.checkpoints.quantization import RoundedWeights

    rounded = RoundedWeights(source, scheme)
    verdict = prove(rounded, target, logits=logits, workers=workers, reporter=reporter)
    cosine = None
    if logits and verdict.logits["ran"]:
        compared = compare_logits(source, target, PromptBatch.probe(target.config.vocab_size), reporter=reporter)
        cosine = None if isinstance(compared, LogitsNotRun) else compared.comparison.cosine
    quantization = {
        "scheme": scheme.name,
        "bound": scheme.bound_text,
        "largest_error": rounded.largest_share,
        "logits_cosine": cosine,
    }
    tensors, passed = replace(verdict.tensors, dtype=scheme.name), verdict.passed
    if not rounded.largest_share <= 1:
        passed = False
        first = f"a value is off by {rounded.largest_share:.3g} times the bound of {scheme.name}"
        tensors = replace(tensors, first_difference=tensors.first_difference or first)
    return replace(verdict, passed=passed, tensors=tensors, quantization=quantization)


def verdict_of_tensors(tensors: TensorProof, why_no_logits: str) -> Verdict:
    """Return the verdict of a comparison of tensors alone."""
    logits = {"ran": False, "reason": why_no_logits}
    return Verdict(tensors.first_difference is None, tensors, logits, None, _versions())


def write_verdict(folder: Path, verdict: Verdict) -> None:
    """Store a verdict beside its weights."""
    LocalStore(folder).put(VERDICT, verdict.to_bytes())


def read_verdict(folder: Path) -> Verdict | None:
    """Return the verdict beside weights, None for weights without one, which were not converted by us.

    For one step of a checkpoint, or one iteration, it is in the folder of the whole checkpoint.
    """
    for candidate in _verdict_folders(folder.absolute()):
        try:
            return Verdict.from_bytes(LocalStore(candidate).read(VERDICT), str(candidate / VERDICT))
        except NotFound:
            continue
    return None


def _verdict_folders(folder: Path) -> Iterator[Path]:
    yield folder
    if step_number(folder.name) is not None:
        yield from folder.parents[1:2]
    elif is_iteration_name(folder.name):
        yield folder.parent


def refuse_failed_verdict(folder: Path, *, where: str | None = None) -> None:
    """Raise `InputError` where the verdict beside weights says that their conversion failed."""
    verdict = read_verdict(folder)
    if verdict is None or verdict.passed:
        return
    reasons = [verdict.tensors.first_difference] if verdict.tensors.first_difference else []
    if not verdict.logits.get("passed", True):
        reasons.append(f"logits {describe_logits(verdict.logits)}")
    raise InputError(
        f"the base weights failed the proof of their conversion: {'; '.join(reasons)} ({VERDICT} in {folder})",
        where=where,
        hint="convert them again, or write `verdict: ignore` under `model` to train on them all the same",
    )


def describe_logits(logits: Mapping[str, Any]) -> str:
    """Return the logits of a verdict or a comparison as one line."""
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
    comparison: WeightsComparison, logits: LogitsComparison | LogitsNotRun, probe: LossProbe | None, cast: str | None
) -> Verdict:
    tensors = TensorProof(
        compared=comparison.compared,
        equal=comparison.compared - len(comparison.differences),
        first_difference=comparison.first_difference,
        dtype=cast,
    )
    return Verdict(comparison.equal and logits.passed, tensors, logits.to_plain(), probe, _versions())


def _versions() -> dict[str, str]:
    versions = {"trainshed": trainshed.__version__}
    for name in ("torch", "transformers", "megatron-core"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
