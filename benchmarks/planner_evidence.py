"""What `evidence.yaml` says: how far off predictions of left-out models are, and which GPUs were measured how well.

No constant is fitted to `measurements/finetuning.csv`: its rows of LoRA say how far off plans with adapters may be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from planner_fits import OWN_ENGINE_TABLE, FitRow
from trainshed.plan.published.cases import PublishedCase
from trainshed.plan.published.rows import read_tables, shipped_tables
from trainshed.plan.published.validation import JudgedRow, validate_rows

FINE_TUNING_TABLE = "finetuning.csv"
_ALL_BELOW = 20
"""Rows below which an interval has all of them, not eight of ten."""


def held_out_intervals(errors: Mapping[str, Sequence[tuple[FitRow, float]]]) -> dict[str, object]:
    """Return the intervals of engines; `errors` are left-out rows, with logarithms of predicted over measured."""
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for engine, rows in errors.items():
        for one, error in rows:
            ratios[engine.removesuffix("-fsdp")][_model_kind(one.case)].append(float(np.exp(-error)))
    return {name: {kind: _interval(kinds[kind]) for kind in sorted(kinds)} for name, kinds in ratios.items()}


def evidence(held_out: Mapping[str, object]) -> dict[str, object]:
    """Return the file's content: the intervals of engines, that of rows with adapters, and all that was measured."""
    return {"held_out": dict(held_out), "adapters": _adapter_interval(), "measured": _measured_kinds()}


def _adapter_interval() -> dict[str, float | int]:
    (table,) = (path for path in shipped_tables() if path.name == FINE_TUNING_TABLE)
    judged = [one for one in validate_rows(read_tables([table])).judged if one.case.training.lora is not None]
    return _interval([one.step_seconds / one.prediction.step_seconds for one in judged if one.step_seconds is not None])


def _model_kind(case: PublishedCase) -> str:
    return "dense" if case.training.model.experts is None else "experts"


def _interval(ratios: Sequence[float]) -> dict[str, float | int]:
    edges = (0.0, 1.0) if len(ratios) < _ALL_BELOW else (0.1, 0.9)
    low, high = (float(f"{np.quantile(ratios, edge):.3g}") for edge in edges)
    return {"rows": len(ratios), "low": low, "high": high}


def _measured_kinds() -> list[dict[str, object]]:
    groups: dict[tuple[str, str, str, str], list[JudgedRow]] = defaultdict(list)
    for one in validate_rows(read_tables([*shipped_tables(), OWN_ENGINE_TABLE])).judged:
        if one.step_seconds is not None:
            training = one.case.training
            key = (training.hardware.gpu_name, training.precision, training.constants.name, _model_kind(one.case))
            groups[key].append(one)
    entries: list[dict[str, object]] = []
    for (gpu, precision, engine, kind), rows in sorted(groups.items()):
        best = max(rows, key=_measured_mfu)
        entries.append(
            {
                "gpu": gpu,
                "precision": precision,
                "engine": engine,
                "kind": kind,
                "rows": len(rows),
                "most_gpus": max(one.case.training.gpus for one in rows),
                "best_mfu": float(f"{_measured_mfu(best):.3g}"),
                "best": f"{best.row.model}, {best.row.source.partition(':')[0]}",
            }
        )
    return entries


def _measured_mfu(one: JudgedRow) -> float:
    return one.measured_tflops / one.prediction.peak_tflops
