"""The planner's answer, whole: what was asked, what was chosen, what came close, what was refused, what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from trainshed.plan.layout import RankLayout
from trainshed.plan.prediction import Memory, Prediction, StagePrediction
from trainshed.plan.question import Question
from trainshed.plan.report.parts import MEMORY_PARTS

SCHEMA = "trainshed.plan-report/1"


class Plain(Protocol):
    """Anything that can say itself in plain values."""

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON would have it."""
        ...


@dataclass(frozen=True)
class Answer:
    """What `trainshed plan` reports."""

    question: Question
    chosen: Prediction
    runners_up: tuple[Prediction, ...] = ()
    rejected: tuple[tuple[RankLayout, str], ...] = ()
    """Layouts that were refused, each with its reason in a sentence."""
    searched: bool = True
    """Whether the layout was chosen among others; False: it was given."""
    considered: int = 1
    notes: tuple[str, ...] = ()
    explanation: tuple[str, ...] = ()
    calibration: Plain | None = None
    run: Plain | None = None
    """Hours, money and energy; None where nobody said how long the run is."""
    checkpoint: Plain | None = None
    goodput: Plain | None = None
    data: Plain | None = None
    host_memory: Plain | None = None
    scaling: Plain | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return the report as JSON has it; the keys are stable."""
        run = _plain(self.run) or {}
        return {
            "schema": SCHEMA,
            "job": self._job(),
            "chosen": prediction_plain(self.chosen)
            | {"stages": [_stage(stage) for stage in self.chosen.stages]}
            | {"hours": run.get("hours"), "cost": run.get("cost")},
            "runners_up": [prediction_plain(each) for each in self.runners_up],
            "rejected": [{"layout": layout_plain(layout), "reason": reason} for layout, reason in self.rejected],
            "notes": list(self.notes),
            "explanation": list(self.explanation),
            "searched": self.searched,
            "considered": self.considered,
            "calibration": _plain(self.calibration),
            "checkpoint": _plain(self.checkpoint),
            "goodput": _plain(self.goodput),
            "data": _plain(self.data),
            "host_memory": _plain(self.host_memory),
            "energy_kwh": run.get("energy_kwh"),
            "scaling": _plain(self.scaling),
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
            "steps": question.steps,
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
    return asdict(layout) | {"stages": list(layout.stages)}


def memory_plain(memory: Memory) -> dict[str, float]:
    """Return the parts, their sum and what the card has."""
    parts = {part.key: getattr(memory, part.key) for part in MEMORY_PARTS}
    return parts | {"total": memory.total, "capacity": memory.capacity}


def layout_words(layout: RankLayout, *, short: bool = False) -> str:
    """Write a layout with its micro-batch and recomputation: `tp4 pp4 dp8 zero1, micro_batch 1`."""
    parts = [str(layout), f"micro_batch {layout.micro_batch}"]
    if layout.recompute != "none" or not short:
        parts.append(f"recompute {layout.recompute}")
    if layout.schedule not in (None, "1f1b", "interleaved"):
        parts.append(f"schedule {layout.schedule}")
    return ", ".join(parts)


def _stage(stage: StagePrediction) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "layers": stage.layers,
        "forward_seconds": stage.forward_seconds,
        "backward_seconds": stage.backward_seconds,
        "memory_gib": memory_plain(stage.memory),
    }


def _plain(part: Plain | None) -> dict[str, Any] | None:
    return None if part is None else part.to_plain()


def best_first(chosen: Prediction, runners_up: Sequence[Prediction], count: int) -> list[Prediction]:
    """Return the layouts a table shows: the chosen, then the others as they came."""
    return [chosen, *runners_up][:count]
