"""The planner's answer, whole: what was asked, what was chosen, what came close, what was refused, what it costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainshed.plan.budget.budget import Budget
from trainshed.plan.layout import RankLayout
from trainshed.plan.performance.evidence import Evidence
from trainshed.plan.performance.prediction import Memory, Prediction, StagePrediction
from trainshed.plan.question import Question
from trainshed.plan.report.parts import MEMORY_PARTS
from trainshed.plan.searching.rejections import Rejected
from trainshed.plan.searching.scaling import ScalingCurve, ScalingPoint
from trainshed.recipe import Layout

SCHEMA = "trainshed.plan-report/1"


@dataclass(frozen=True)
class Answer:
    """What `trainshed plan` reports."""

    question: Question
    chosen: Prediction
    runners_up: tuple[Prediction, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    searched: bool = True
    """Whether the layout was chosen among others; False: it was given."""
    considered: int = 1
    notes: tuple[str, ...] = ()
    explanation: tuple[str, ...] = ()
    calibration: dict[str, Any] | None = None
    """The file, its hash and the entry that was used; None where no file was given."""
    evidence: Evidence | None = None
    """How far off the step may be, and what was ever measured like it."""
    budget: Budget | None = None
    """Hours, money, checkpoints, failures, the hosts and the data."""
    scaling: ScalingCurve | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return the report as JSON has it; the keys are stable."""
        beyond = {} if self.budget is None else self.budget.to_plain()
        run = beyond.get("run") or {}
        return {
            "schema": SCHEMA,
            "job": self._job(),
            "chosen": prediction_plain(self.chosen)
            | {"stages": [_stage(stage) for stage in self.chosen.stages]}
            | {"hours": run.get("hours"), "cost": run.get("cost")},
            "layout_flag": layout_flag(self.chosen.layout),
            "runners_up": [prediction_plain(each) for each in self.runners_up],
            "rejected": [
                {"layout": layout_plain(each.layout), "reason": each.reason, "alike": each.alike}
                for each in self.rejected
            ],
            "notes": list(self.notes),
            "explanation": list(self.explanation),
            "searched": self.searched,
            "considered": self.considered,
            "calibration": self.calibration,
            "evidence": None if self.evidence is None else self.evidence.to_plain(),
            "checkpoint": beyond.get("checkpoint"),
            "goodput": beyond.get("goodput"),
            "data": beyond.get("data"),
            "host_memory": beyond.get("host_memory"),
            "run": run or None,
            "energy_kwh": run.get("energy_kwh"),
            "scaling": None if self.scaling is None else scaling_plain(self.scaling),
        }

    def _job(self) -> dict[str, Any]:
        job, question = self.question.job, self.question
        hardware = job.hardware
        return {
            "name": question.name,
            "model": job.model.name,
            "parameters": job.model.weights,
            "sequence_length": job.sequence_length,
            "global_batch": job.global_batch,
            "tokens_per_step": job.tokens_per_step,
            "precision": job.precision,
            "engine": question.engine,
            "gpus": job.gpus,
            "steps": question.terms.steps,
            "hardware": {
                "gpu": hardware.gpu_name,
                "machine": hardware.machine,
                "gpus_per_node": hardware.gpus_per_node,
                "link_domain": hardware.link_domain,
                "link_gb_per_s": hardware.link_gb_per_s,
                "network_gb_per_s": hardware.network_gb_per_s,
                "fabric": hardware.fabric,
                "memory_gib": hardware.memory_gib,
                "peak_tflops": self.chosen.peak_tflops,
                "source": hardware.gpu.source,
            },
        }


def prediction_plain(prediction: Prediction) -> dict[str, Any]:
    """Return one layout and its figures."""
    return {
        "layout": layout_plain(prediction.layout),
        "step_seconds": prediction.step_seconds,
        "tokens_per_second_per_gpu": prediction.tokens_per_second_per_gpu,
        "tflops_per_gpu": prediction.tflops_per_gpu,
        "mfu": prediction.mfu,
        "fits": prediction.fits,
        "memory_gib": memory_plain(prediction.memory),
        "time": asdict(prediction.times),
    }


def layout_plain(layout: RankLayout) -> dict[str, Any]:
    """Return every key of a layout."""
    return layout.recipe_keys() | {"stages": list(layout.stages)}


def memory_plain(memory: Memory) -> dict[str, float]:
    """Return the parts, their sum and what the card has."""
    parts = {part.key: getattr(memory, part.key) for part in MEMORY_PARTS}
    return parts | {"total": memory.total, "capacity": memory.capacity}


def layout_words(layout: RankLayout) -> str:
    """Write a layout with its micro-batch and recomputation: `tp4 pp4 dp8 zero1, micro_batch 1`."""
    parts = [str(layout), f"micro_batch {layout.micro_batch}", f"recompute {layout.recompute}"]
    if layout.schedule not in (None, "1f1b", "interleaved"):
        parts.append(f"schedule {layout.schedule}")
    return ", ".join(parts)


def layout_flag(layout: RankLayout) -> str:
    """Write a layout so that `--layout` gives it again: `tp=4,pp=4,micro_batch=2`, without keys at their default.

    Unequal chunks are written out: Megatron asks for it.
    """
    keys = Layout.model_fields
    names = ("tp", "pp", "vp", "cp", "ep", "etp", "replicate", "shard", "micro_batch", "recompute")
    parts = [f"{name}={getattr(layout, name)}" for name in names if getattr(layout, name) != keys[name].default]
    if layout.schedule not in (None, "interleaved" if layout.vp > 1 else "1f1b"):
        parts.append(f"schedule={layout.schedule}")
    if len(set(layout.stages)) > 1:
        parts.append(f"stages={'+'.join(map(str, layout.stages))}")
    # At least one key: an empty text would be no layout, and be searched.
    return ",".join(parts or [f"tp={layout.tp}"])


def _stage(stage: StagePrediction) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "layers": stage.layers,
        "forward_seconds": stage.forward_seconds,
        "backward_seconds": stage.backward_seconds,
        "memory_gib": memory_plain(stage.memory),
    }


def scaling_plain(curve: ScalingCurve) -> dict[str, Any]:
    """Return a scaling curve."""
    return {
        "points": [_point(point) for point in curve.points],
        "breaks_at": curve.breaks_at,
        "reason": curve.reason,
        "above": curve.above,
    }


def _point(point: ScalingPoint) -> dict[str, Any]:
    best = point.prediction
    return {
        "gpus": point.gpus,
        "layout": best and layout_plain(best.layout),
        "step_seconds": best and best.step_seconds,
        "tokens_per_second": point.tokens_per_second,
        "tokens_per_second_per_gpu": best and best.tokens_per_second_per_gpu,
        "mfu": best and best.mfu,
        "efficiency": point.efficiency,
        "reason": point.reason,
    }
