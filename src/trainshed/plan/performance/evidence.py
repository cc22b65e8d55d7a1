"""How far a prediction may be off: errors on models that no constant was fitted to, and the best measured MFU.

The figures are in `evidence.yaml`, computed from the published tables and our own runs by
`benchmarks/fit_planner.py --evidence`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trainshed.plan.performance.prediction import LayoutPrediction
from trainshed.plan.training_shape import TrainingShape
from trainshed.recipe.yaml_io import parse_yaml

_FILE = Path(__file__).with_name("evidence.yaml")
_MEGATRON = ("megatron", "megatron-fsdp", "megatron-26.06")
_MEASURED_AS = {"megatron": _MEGATRON, "nemo": _MEGATRON}
"""Names in the tables that are this engine; other engines have the same name there."""
_BETWEEN_GPUS = {"torch": "torchtitan"}
"""The engine whose communication is used where an engine was never measured on several GPUs."""
_KINDS = {"dense": "a dense model", "experts": "a model with experts"}


@dataclass(frozen=True)
class HeldOutErrors:
    """Measured divided by predicted step times, for models that no constant was fitted to."""

    engine: str
    kind: str
    rows: int
    low: float
    """Eight of ten rows are between `low` and `high`; all rows where there are fewer than 20."""
    high: float


@dataclass(frozen=True)
class MeasuredKind:
    """All rows of one GPU, precision, engine and kind of model."""

    gpu: str
    precision: str
    engine: str
    kind: str
    rows: int
    most_gpus: int
    best_mfu: float
    best: str
    """The model and the source of the row with the best MFU."""


@dataclass(frozen=True)
class PredictionEvidence:
    """What measurements say about one prediction."""

    held_out: HeldOutErrors | None
    """None where there are no such rows."""
    seconds: tuple[float, float] | None
    """The expected range of a step."""
    best: MeasuredKind | None
    """The best MFU of the same GPU, precision and kind of model on any engine; None where nothing was measured."""
    notes: tuple[str, ...]

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        low, high = self.seconds or (None, None)
        return {
            "step_seconds_low": low,
            "step_seconds_high": high,
            "held_out_rows": None if self.held_out is None else self.held_out.rows,
            "held_out_engine": None if self.held_out is None else self.held_out.engine,
            "best_measured_mfu": None if self.best is None else self.best.best_mfu,
            "best_measured": None if self.best is None else self.best.best,
            "notes": list(self.notes),
        }


@cache
def _document() -> dict[str, Any]:
    return dict(parse_yaml(_FILE.read_text(encoding="utf-8"), _FILE.name).value)


@cache
def measured_kinds() -> tuple[MeasuredKind, ...]:
    """Return all that was measured."""
    return tuple(MeasuredKind(**entry) for entry in _document()["measured"])


def held_out_errors(engine: str, kind: str) -> HeldOutErrors | None:
    """Return the errors on rows of an engine that no constant was fitted to; None where there are none."""
    errors = _document()["held_out"].get(engine, {}).get(kind)
    return None if errors is None else HeldOutErrors(engine, kind, **errors)


def adapter_errors() -> HeldOutErrors:
    """Return the errors on all rows with adapters, none of which a constant was fitted to."""
    return HeldOutErrors("any engine", "adapters", **_document()["adapters"])


def evidence_for(
    training: TrainingShape, engine: str, chosen: LayoutPrediction, *, calibrated: bool = False
) -> PredictionEvidence:
    """Compare a prediction with measurements; `calibrated` says that a run of this GPU and engine was measured."""
    kind = "dense" if training.model.experts is None else "experts"
    own = [rows for rows in measured_kinds() if rows.engine in _MEASURED_AS.get(engine, (engine,))]
    only_one_gpu = training.gpus > 1 and all(rows.most_gpus == 1 for rows in own)
    like = _BETWEEN_GPUS.get(engine, engine) if only_one_gpu else _MEASURED_AS.get(engine, (engine,))[0]
    gpu = training.hardware.gpu_name
    known = any(rows.gpu == gpu for rows in measured_kinds())
    errors = None
    if known:
        errors = held_out_errors(like, kind) if training.lora is None else adapter_errors()
    seconds = None if errors is None else (errors.low * chosen.step_seconds, errors.high * chosen.step_seconds)
    wanted = (gpu, training.precision, kind)
    same = [rows for rows in measured_kinds() if (rows.gpu, rows.precision, rows.kind) == wanted]
    best = max(same, key=lambda rows: rows.best_mfu, default=None)
    rows_like = f"of {like} with {_KINDS[kind]}" if training.lora is None else "of LoRA on Megatron and AutoModel"
    notes = [_expected_range(errors, seconds, rows_like if known else f"on {gpu}")]
    if not calibrated:
        notes += _never_measured(training, engine, own, like if only_one_gpu else None)
    notes += _above_measured(training, kind, chosen, best, sum(kind_rows.rows for kind_rows in same))
    return PredictionEvidence(errors, seconds, best, tuple(notes))


def _expected_range(errors: HeldOutErrors | None, seconds: tuple[float, float] | None, like: str) -> str:
    if errors is None or seconds is None:
        return f"how far off the step may be is not known: there are no rows {like} to tell by"
    most = "8 in 10" if errors.rows >= 20 else "all"
    return (
        f"expect {seconds[0]:.3g} to {seconds[1]:.3g} s a step: {most} of {errors.rows} rows {like} that no constant "
        f"was fitted to took {errors.low:.2f} to {errors.high:.2f} times the prediction"
    )


def _never_measured(training: TrainingShape, engine: str, own: list[MeasuredKind], stand_in: str | None) -> list[str]:
    """Say where the engine itself was never measured: on this GPU, on several of them."""
    gpus, wanted = sorted({rows.gpu for rows in own}), training.hardware.gpu_name
    missing = []
    if wanted not in gpus:
        missing.append(f"on {wanted} (only on {', '.join(gpus)})")
    if stand_in is not None:
        missing.append(f"on more than one GPU (what it says between them is planned as {stand_in}'s)")
    return [f"the engine {engine} was never measured {' nor '.join(missing)}"] if missing else []


def _above_measured(
    training: TrainingShape, kind: str, chosen: LayoutPrediction, best: MeasuredKind | None, rows: int
) -> list[str]:
    where = f"{training.hardware.gpu_name} in {training.precision} with {_KINDS[kind]}"
    if best is None:
        return [f"no measurement of {where} is known, on any engine: the MFU has nothing to be held against"]
    if chosen.mfu <= best.best_mfu:
        return []
    return [
        f"{chosen.mfu:.1%} MFU is more than was ever measured on {where}: the best of {rows} rows is "
        f"{best.best_mfu:.1%} ({best.best}); expect no more than that"
    ]
