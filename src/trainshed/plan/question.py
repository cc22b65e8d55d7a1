"""What is asked of the planner: a job, the layout it must have if any, how long it runs, and where it is kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainshed.errors import InputError
from trainshed.plan.budget.budget import Terms
from trainshed.plan.measured.calibration import Calibrations
from trainshed.plan.performance.hardware import Hardware
from trainshed.plan.performance.prediction import Job
from trainshed.recipe import Layout, ModelConfig
from trainshed.recipe.places import Places

PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")
"""The dtypes of matrix products that a plan can be asked for; fp64 is for proofs, on one process."""
_OF_ENGINES = {"torch": ("fp32", "bf16", "fp8")}
"""The dtypes that an engine trains in, where they are not all of them."""
_PEAKS = {"fp32": ("tf32", "fp32"), "mxfp8": ("fp8",), "nvfp4": ("fp4",)}


@dataclass(frozen=True)
class Question:
    """A job and all that bears on the answer."""

    name: str
    """Of the recipe, or of the model where there is none."""
    job: Job
    config: ModelConfig
    engine: str
    layout: Layout | None = None
    """The layout to judge; None: search."""
    places: Places | None = None
    """Where in a recipe the layout is written; None: on the command line."""
    calibrations: Calibrations | None = None
    batch_sizes: tuple[int, ...] = ()
    """Every global batch the run passes; empty: that of the job alone."""
    gpu_counts: tuple[int, ...] = ()
    """For a scaling curve: every number of GPUs that is asked about."""
    terms: Terms = field(default_factory=Terms)
    """How long it runs, how it is saved, what it costs."""
    notes: tuple[str, ...] = field(default=())
    """What was chosen on the way from what a person wrote to this, and why."""

    @property
    def batches(self) -> tuple[int, ...]:
        """Every global batch the run passes."""
        return self.batch_sizes or (self.job.global_batch,)


def check_precision(precision: str, hardware: Hardware, engine: str, *, where: str = "--precision") -> None:
    """Refuse a dtype that no plan is made for, one that the engine has not, and one that the GPU has no peak for."""
    if precision not in PRECISIONS:
        hint = "fp64 is for proofs: write bf16" if precision == "fp64" else f"one of {_either(PRECISIONS)}"
        raise InputError(f"there is no plan for products in `{precision}`", where=where, hint=hint)
    able = [each for each in PRECISIONS if _has_peak(each, hardware) and each in _OF_ENGINES.get(engine, PRECISIONS)]
    if precision == "fp16" and precision not in _OF_ENGINES.get(engine, PRECISIONS):
        raise InputError(
            f"the engine {engine} does not train in fp16: it has no loss scale",
            where=where,
            hint=f"write {_either(able)}, or another engine: megatron",
        )
    if not _has_peak(precision, hardware):
        other = "; fp16 with the engine megatron" if "fp16" not in able and _has_peak("fp16", hardware) else ""
        raise InputError(
            f"{hardware.gpu_name} has no published peak for products in {precision}",
            where=where,
            hint=f"write {_either(able)}{other}",
        )


def _has_peak(precision: str, hardware: Hardware) -> bool:
    peaks = hardware.gpu.dense_tflops
    if precision == "mxfp8" and peaks.peak("fp4") is None:
        # Block scales are the work of the same matrix units that have fp4: Blackwell, CDNA 4.
        return False
    return any(peaks.peak(dtype) is not None for dtype in _PEAKS.get(precision, (precision,)))


def _either(words: tuple[str, ...] | list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
