"""The planner's one entrance: `plan`, `render`, `submit`, `run` and `train` all ask here.

`build_request` is the only place where a training, a cluster and its GPUs become a `PlanRequest`, so that the same
recipe, cluster and calibration give the same plan whoever asks. `make_plan` searches the layout, or judges a given
one, and returns the `Plan`: the layout, its prediction, the next best, and what the whole run takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainshed.catalog.machines import Machine
from trainshed.errors import InputError
from trainshed.plan.budget.budget import RunBudget, RunTerms, run_budget
from trainshed.plan.budget.storage import cluster_storage
from trainshed.plan.calibration import Calibrations, read_calibrations
from trainshed.plan.layout import RankLayout, format_layout, layout_plain, resolve_layout
from trainshed.plan.legality import layout_problems
from trainshed.plan.model_shape import model_shape
from trainshed.plan.performance.engine_constants import EngineOptions, engine_constants
from trainshed.plan.performance.evidence import PredictionEvidence, evidence_for
from trainshed.plan.performance.memory import GpuMemory
from trainshed.plan.performance.prediction import LayoutPrediction, StagePrediction
from trainshed.plan.report.text import MEMORY_PARTS, explain_layout, format_percent, format_seconds
from trainshed.plan.search.scaling import ScalingCurve, ScalingPoint, scaling_curve
from trainshed.plan.search.search import (
    RejectedLayout,
    SearchResult,
    best_fitting_layout,
    evaluate_layout,
    search_layouts,
)
from trainshed.plan.training_shape import Hardware, TrainingShape
from trainshed.recipe import Cluster, Layout, ModelConfig, Recipe
from trainshed.recipe.yaml_io import SourceMap

PLANNED_PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")
"""The dtypes of matrix products that a plan can be asked for; fp64 is for proofs, on one process."""
_ENGINE_PRECISIONS = {"torch": ("fp32", "bf16", "fp8")}
"""The dtypes that an engine trains in, where they are not all of them."""
_PEAK_DTYPES = {"fp32": ("tf32", "fp32"), "mxfp8": ("fp8",), "nvfp4": ("fp4",)}


@dataclass(frozen=True)
class PlanRequest:
    """A job and all that bears on the answer."""

    name: str
    """Of the recipe, or of the model where there is none."""
    job: TrainingShape
    config: ModelConfig
    engine: str
    layout: Layout | None = None
    """The layout to judge; None: search."""
    places: SourceMap | None = None
    """Where in a recipe the layout is written; None: on the command line."""
    calibrations: Calibrations | None = None
    batch_sizes: tuple[int, ...] = ()
    """Every global batch the run passes; empty: that of the job alone."""
    gpu_counts: tuple[int, ...] = ()
    """For a scaling curve: every number of GPUs that is asked about."""
    terms: RunTerms = field(default_factory=RunTerms)
    """How long it runs, how it is saved, what it costs."""
    notes: tuple[str, ...] = field(default=())
    """What was chosen on the way from what a person wrote to this, and why."""

    @property
    def batches(self) -> tuple[int, ...]:
        """Every global batch the run passes."""
        return self.batch_sizes or (self.job.global_batch,)


def check_precision(precision: str, hardware: Hardware, engine: str, *, where: str = "--precision") -> None:
    """Refuse a dtype that no plan is made for, one that the engine has not, and one that the GPU has no peak for."""
    if precision not in PLANNED_PRECISIONS:
        hint = "fp64 is for proofs: write bf16" if precision == "fp64" else f"one of {_join_or(PLANNED_PRECISIONS)}"
        raise InputError(f"there is no plan for products in `{precision}`", where=where, hint=hint)
    able = [
        each
        for each in PLANNED_PRECISIONS
        if _has_peak(each, hardware) and each in _ENGINE_PRECISIONS.get(engine, PLANNED_PRECISIONS)
    ]
    if precision == "fp16" and precision not in _ENGINE_PRECISIONS.get(engine, PLANNED_PRECISIONS):
        raise InputError(
            f"the engine {engine} does not train in fp16: it has no loss scale",
            where=where,
            hint=f"write {_join_or(able)}, or another engine: megatron",
        )
    if not _has_peak(precision, hardware):
        other = "; fp16 with the engine megatron" if "fp16" not in able and _has_peak("fp16", hardware) else ""
        raise InputError(
            f"{hardware.gpu_name} has no published peak for products in {precision}",
            where=where,
            hint=f"write {_join_or(able)}{other}",
        )


def _has_peak(precision: str, hardware: Hardware) -> bool:
    peaks = hardware.gpu.dense_tflops
    if precision == "mxfp8" and peaks.peak("fp4") is None:
        # Block scales are the work of the same matrix units that have fp4: Blackwell, CDNA 4.
        return False
    return any(peaks.peak(dtype) is not None for dtype in _PEAK_DTYPES.get(precision, (precision,)))


def _join_or(words: tuple[str, ...] | list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


@dataclass(frozen=True)
class PlannedModel:
    """What is trained, whether a recipe says it or flags do."""

    name: str
    config: ModelConfig
    preset: str
    """What the model is called in a plan."""
    sequence_length: int
    batch_sizes: tuple[int, ...]
    """Every global batch the run passes; a plan is for the largest."""
    precision: str
    engine: str
    layout: Layout | None
    """The layout to judge; None: search."""
    steps: int | None
    notes: tuple[str, ...] = ()
    habits: EngineOptions = field(default_factory=EngineOptions)
    """What the run does otherwise than the usual of its engine: adapters, and what `engine.args` ask for."""


def build_request(
    model: PlannedModel,
    hardware: Hardware,
    gpus: Sequence[int],
    cluster: Cluster,
    *,
    machine: Machine | None = None,
    recipe: Recipe | None = None,
    layout_flag: bool = False,
    calibration: str | None = None,
    price: float | None = None,
) -> PlanRequest:
    """Put a question to the planner: a model on GPUs of a cluster.

    More than one number of GPUs, smallest first, ask for a scaling curve. `format_layout` says that the layout is not
    the recipe's own. `calibration` is a file that wins over the one the cluster names; nothing else is calibrated by.
    """
    where = recipe.where("train.precision") if recipe is not None else "--precision"
    check_precision(model.precision, hardware, model.engine, where=where)
    file = calibration or cluster.calibration
    job = TrainingShape(
        model=model_shape(model.config, model.preset),
        sequence_length=model.sequence_length,
        global_batch=max(model.batch_sizes),
        precision=model.precision,
        hardware=hardware,
        gpus=gpus[-1],
        stack=engine_constants(model.engine),
        habits=model.habits,
    )
    return PlanRequest(
        name=model.name,
        job=job,
        config=model.config,
        engine=model.engine,
        layout=model.layout,
        places=recipe.places if recipe is not None and not layout_flag else None,
        calibrations=read_calibrations(file) if file is not None else None,
        batch_sizes=model.batch_sizes,
        gpu_counts=tuple(gpus) if len(gpus) > 1 else (),
        terms=_run_terms(model, recipe, cluster, machine, price),
        notes=model.notes,
    )


def _run_terms(
    model: PlannedModel, recipe: Recipe | None, cluster: Cluster, machine: Machine | None, price: float | None
) -> RunTerms:
    """What bears on a run beside its job and layout."""
    saved = recipe.checkpoint if recipe is not None else None
    return RunTerms(
        engine=model.engine,
        machine=machine,
        storage=cluster_storage(cluster),
        steps=model.steps,
        checkpoint_every=saved.every if saved is not None else None,
        keep=saved.keep if saved is not None else 3,
        asynchronous=saved.async_ if saved is not None else True,
        mtbf_hours=cluster.mtbf_hours,
        price_per_gpu_hour=price or cluster.price_per_gpu_hour,
    )


PLAN_SCHEMA = "trainshed.plan-report/1"


@dataclass(frozen=True)
class Plan:
    """What `trainshed plan` reports."""

    question: PlanRequest
    chosen: LayoutPrediction
    runners_up: tuple[LayoutPrediction, ...] = ()
    rejected: tuple[RejectedLayout, ...] = ()
    searched: bool = True
    """Whether the layout was chosen among others; False: it was given."""
    considered: int = 1
    notes: tuple[str, ...] = ()
    explanation: tuple[str, ...] = ()
    calibration: dict[str, Any] | None = None
    """The file, its hash and the entry that was used; None where no file was given."""
    evidence: PredictionEvidence | None = None
    """How far off the step may be, and what was ever measured like it."""
    budget: RunBudget | None = None
    """Hours, money, checkpoints, failures, the hosts and the data."""
    scaling: ScalingCurve | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return the report as JSON has it; the keys are stable."""
        beyond = {} if self.budget is None else self.budget.to_plain()
        run = beyond.get("run") or {}
        return {
            "schema": PLAN_SCHEMA,
            "job": self._job(),
            "chosen": prediction_plain(self.chosen)
            | {"stages": [_stage_plain(stage) for stage in self.chosen.stages]}
            | {"hours": run.get("hours"), "cost": run.get("cost")},
            "layout_flag": format_layout(self.chosen.layout),
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


def prediction_plain(prediction: LayoutPrediction) -> dict[str, Any]:
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


def memory_plain(memory: GpuMemory) -> dict[str, float]:
    """Return the parts, their sum and what the card has."""
    parts = {part.key: getattr(memory, part.key) for part in MEMORY_PARTS}
    return parts | {"total": memory.total, "capacity": memory.capacity}


def _stage_plain(stage: StagePrediction) -> dict[str, Any]:
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
        "points": [_point_plain(point) for point in curve.points],
        "breaks_at": curve.breaks_at,
        "reason": curve.reason,
        "above": curve.above,
    }


def _point_plain(point: ScalingPoint) -> dict[str, Any]:
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


def make_plan(question: PlanRequest, *, top: int = 5, explained: bool = False) -> Plan:
    """Search the best layout, or judge the given one, and say what the run would take."""
    question = _calibrated(question)
    notes = [] if (used := calibration_note(question)) is None else [used]
    curve = _requested_curve(question)
    if curve is not None:
        question, more = _at_most_gpus(question, curve)
        notes += more
    found = _search_or_evaluate(question, top)
    beyond = run_budget(question.job, found.chosen, question.terms)
    calibration = _used_calibration(question)
    held = evidence_for(
        question.job, question.engine, found.chosen, calibrated=calibration is not None and bool(calibration["entry"])
    )
    return Plan(
        question=question,
        chosen=found.chosen,
        runners_up=found.runners_up,
        rejected=found.rejected,
        searched=question.layout is None,
        considered=found.considered,
        notes=(*beyond.warnings, *found.notes, *held.notes, *question.notes, *notes, *beyond.notes),
        explanation=tuple(_explanation(question, found.chosen)) if explained else (),
        calibration=calibration,
        evidence=held,
        budget=beyond,
        scaling=curve,
    )


def calibration_note(question: PlanRequest) -> str | None:
    """Say which entry of the calibration file a plan uses, or that it has none; None where no file was named."""
    known, gpu = question.calibrations, question.job.hardware.gpu_name
    if known is None:
        return None
    entry = known.entry_for(gpu, question.engine)
    return known.why_none(gpu, question.engine) if entry is None else f"calibrated: {entry.words}"


def _calibrated(question: PlanRequest) -> PlanRequest:
    """Apply the entry of the GPU and the engine, where a calibration file was named."""
    known, job = question.calibrations, question.job
    entry = None if known is None else known.entry_for(job.hardware.gpu_name, question.engine)
    if entry is None:
        return question
    learnt = replace(job, calibration=entry.factor, memory_calibration=entry.memory_factor or 1.0)
    return replace(question, job=learnt)


def _used_calibration(question: PlanRequest) -> dict[str, object] | None:
    known, job = question.calibrations, question.job
    return None if known is None else known.used(known.entry_for(job.hardware.gpu_name, question.engine))


def _search_or_evaluate(question: PlanRequest, top: int) -> SearchResult:
    job = question.job
    if question.layout is None:
        return search_layouts(job, engine=question.engine, batch_sizes=question.batches, top=top)
    return evaluate_layout(
        job,
        resolve_layout(question.layout, question.config, world_size=job.gpus),
        engine=question.engine,
        batch_sizes=question.batches,
        stages_written=question.layout.stages is not None,
        places=question.places,
    )


def _requested_curve(question: PlanRequest) -> ScalingCurve | None:
    if not question.gpu_counts:
        return None
    fixed = None if question.layout is None else question.layout.model_dump(exclude_unset=True, exclude={"dp"})
    return scaling_curve(
        question.job, question.gpu_counts, engine=question.engine, fixed=fixed, batch_sizes=question.batches
    )


def _at_most_gpus(question: PlanRequest, curve: ScalingCurve) -> tuple[PlanRequest, list[str]]:
    """The plan that is shown beside a curve: of the most GPUs that have one."""
    able = [point.gpus for point in curve.points if point.prediction is not None]
    if not able:
        reason = curve.points[-1].reason or "no layout is legal"
        raise InputError(f"none of {curve.points[0].gpus} to {curve.points[-1].gpus} GPUs has a layout: {reason}")
    shown = f"the layout shown is the one for {able[-1]:,} GPUs"
    if able[-1] != question.job.gpus:
        shown += f": {curve.points[-1].reason}"
    above = [] if curve.above is None else [f"efficiency above 100%: {curve.above}"]
    return replace(question, job=replace(question.job, gpus=able[-1])), [shown, *above]


def _explanation(question: PlanRequest, chosen: LayoutPrediction) -> list[str]:
    """Words for the chosen layout; for a given one also what the search would have taken."""
    job = question.job

    def complaint(layout: RankLayout, asked: TrainingShape = job) -> str | None:
        problems = layout_problems(
            layout,
            asked.model,
            sequence_length=asked.sequence_length,
            batch_sizes=question.batches,
            engine=question.engine,
            lora=asked.habits.adapters,
            stages_written=True,
        )
        return problems[0].what if problems else None

    def best_with(fixed: dict[str, int | str]) -> LayoutPrediction | None:
        return best_fitting_layout(job, engine=question.engine, fixed=fixed, batch_sizes=question.batches)

    if question.layout is None:
        return explain_layout(job, chosen, complaint, best_with)
    said = explain_layout(job, chosen, complaint)
    try:
        best = search_layouts(job, engine=question.engine, batch_sizes=question.batches, top=1).chosen
    except InputError as refused:
        return [*said, f"The search finds nothing better: {refused.what}."]
    gain = 1 - best.step_seconds / chosen.step_seconds
    if chosen.fits and gain <= 0.01:
        return [*said, "The search finds no layout that is more than 1% faster."]
    micro = f"micro_batch {best.layout.micro_batch}, recompute {best.layout.recompute}"
    faster = f"{format_percent(gain)} {'faster' if gain > 0 else 'slower'}"
    return [
        *said,
        f"The search would take {best.layout} ({micro}): {format_seconds(best.step_seconds)} a step, {faster}.",
    ]
