"""The planner's one entrance, for `plan`, `render`, `submit`, `run` and `train` alike.

`build_request` is the only place where a training, a cluster and its GPUs become a `PlanRequest`, so the same recipe,
cluster and calibration give the same plan in every command. `make_plan` searches the layout, or evaluates a given one,
and returns the `Plan`: the layout, its prediction, the next best, and what the whole run takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainshed.catalog.machines import Machine
from trainshed.errors import InputError
from trainshed.plan.budget.budget import RunBudget, RunTerms, run_budget
from trainshed.plan.budget.storage import cluster_storage
from trainshed.plan.budget.volume import volume_terms
from trainshed.plan.calibration import Calibrations, read_calibrations
from trainshed.plan.layout import RankLayout, distinct_names, format_layout, layout_plain, resolve_layout
from trainshed.plan.legality import layout_problems
from trainshed.plan.lora_shape import LoraShape
from trainshed.plan.model_shape import model_shape
from trainshed.plan.performance.engine_constants import EngineOptions, engine_constants
from trainshed.plan.performance.evidence import PredictionEvidence, evidence_for
from trainshed.plan.performance.memory import GpuMemory
from trainshed.plan.performance.prediction import LayoutPrediction, StagePrediction
from trainshed.plan.phase_plan import PhasePrediction, PlannedPhase, mean_step_seconds, predict_phases
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
"""The dtypes of matmuls that can be planned; fp64 is for proofs, on one process."""
_ENGINE_PRECISIONS = {"torch": ("fp32", "bf16", "fp8")}
"""The dtypes that an engine trains in, if it does not have them all."""
_PEAK_DTYPES = {"fp32": ("tf32", "fp32"), "mxfp8": ("fp8",), "nvfp4": ("fp4",)}


@dataclass(frozen=True)
class PlanRequest:
    """Everything a plan depends on: the training, the engine, the layout if one is given, and the terms of the run."""

    name: str
    """Of the recipe, or of the model if there is no recipe."""
    training: TrainingShape
    config: ModelConfig
    engine: str
    layout: Layout | None = None
    """The layout to evaluate; None: search."""
    places: SourceMap | None = None
    """Where in a recipe the layout is written; None: on the command line."""
    calibrations: Calibrations | None = None
    batch_sizes: tuple[int, ...] = ()
    """Every global batch size of the run; empty: that of the training alone."""
    gpu_counts: tuple[int, ...] = ()
    """For a scaling curve: every number of GPUs in it."""
    terms: RunTerms = field(default_factory=RunTerms)
    """How long it runs, how often it saves, what it costs."""
    phases: tuple[PlannedPhase, ...] = ()
    """The phases of `train.phases`; the training is the one with the longest sequences."""
    notes: tuple[str, ...] = field(default=())
    """What was chosen for the person who wrote the recipe or the flags, and why."""

    @property
    def batches(self) -> tuple[int, ...]:
        """Every global batch size of the run."""
        return self.batch_sizes or (self.training.global_batch,)


def check_precision(precision: str, hardware: Hardware, engine: str, *, where: str = "--precision") -> None:
    """Refuse a dtype that cannot be planned, that the engine does not have, or that the GPU has no peak for."""
    if precision not in PLANNED_PRECISIONS:
        hint = "fp64 is for proofs: write bf16" if precision == "fp64" else f"one of {_join_or(PLANNED_PRECISIONS)}"
        raise InputError(f"there is no plan for products in `{precision}`", where=where, hint=hint)
    trained_in = _ENGINE_PRECISIONS.get(engine, PLANNED_PRECISIONS)
    possible = [dtype for dtype in PLANNED_PRECISIONS if _has_peak(dtype, hardware) and dtype in trained_in]
    if precision == "fp16" and precision not in trained_in:
        raise InputError(
            f"the engine {engine} does not train in fp16: it has no loss scale",
            where=where,
            hint=f"write {_join_or(possible)}, or another engine: megatron",
        )
    if not _has_peak(precision, hardware):
        other = "; fp16 with the engine megatron" if "fp16" not in possible and _has_peak("fp16", hardware) else ""
        raise InputError(
            f"{hardware.gpu_name} has no published peak for products in {precision}",
            where=where,
            hint=f"write {_join_or(possible)}{other}",
        )


def _has_peak(precision: str, hardware: Hardware) -> bool:
    peaks = hardware.gpu.dense_tflops
    if precision == "mxfp8" and peaks.peak("fp4") is None:
        # Only matrix units that have fp4 have block scales: Blackwell, CDNA 4.
        return False
    return any(peaks.peak(dtype) is not None for dtype in _PEAK_DTYPES.get(precision, (precision,)))


def _join_or(words: tuple[str, ...] | list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


@dataclass(frozen=True)
class PlannedModel:
    """What is trained, from a recipe or from flags."""

    name: str
    config: ModelConfig
    preset: str
    """Name of the model in a plan."""
    sequence_length: int
    batch_sizes: tuple[int, ...]
    """Every global batch size of the run; the plan is for the largest."""
    precision: str
    engine: str
    layout: Layout | None
    """The layout to evaluate; None: search."""
    steps: int | None
    notes: tuple[str, ...] = ()
    options: EngineOptions = field(default_factory=EngineOptions)
    """Options of the run: what `engine.args` set, and the precision of optimizer states."""
    lora: LoraShape | None = None
    """The adapters; None: all weights are trained."""
    document_length: float | None = None
    """Length of the document that an average token is in, where documents are kept apart; None: they are not."""
    preference: bool = False
    """Whether it is DPO, which runs a reference forward."""
    phases: tuple[PlannedPhase, ...] = ()
    """The phases of `train.phases`; the other fields are those of the one with the longest sequences."""

    @property
    def layout_batch_sizes(self) -> tuple[int, ...]:
        """Every global batch size that the layout must divide: also those of other phases that have no own layout."""
        others = (phase.global_batch for phase in self.phases if phase.layout is None)
        return tuple(sorted({*self.batch_sizes, *others}))

    @property
    def quantized(self) -> bool:
        """Whether frozen weights are held in 8 or 4 bits."""
        return self.lora is not None and self.lora.quantized


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
    """Build the request for a model on GPUs of a cluster.

    More than one number of GPUs, smallest first, means a scaling curve. `layout_flag` says that the layout is not the
    recipe's own. `calibration` is a file that wins over the one that the cluster names; no other file is used.
    """
    where = recipe.where("train.precision") if recipe is not None else "--precision"
    check_precision(model.precision, hardware, model.engine, where=where)
    file = calibration or cluster.calibration
    training = TrainingShape(
        model=model_shape(model.config, model.preset),
        sequence_length=model.sequence_length,
        global_batch=max(model.batch_sizes),
        precision=model.precision,
        hardware=hardware,
        gpus=gpus[-1],
        constants=engine_constants(model.engine),
        options=model.options,
        lora=model.lora,
        document_length=model.document_length,
        preference=model.preference,
    )
    return PlanRequest(
        name=model.name,
        training=training,
        config=model.config,
        engine=model.engine,
        layout=model.layout,
        places=recipe.places if recipe is not None and not layout_flag else None,
        calibrations=read_calibrations(file) if file is not None else None,
        batch_sizes=model.layout_batch_sizes,
        gpu_counts=tuple(gpus) if len(gpus) > 1 else (),
        terms=_run_terms(model, recipe, cluster, machine, price),
        phases=model.phases,
        notes=model.notes,
    )


def _run_terms(
    model: PlannedModel, recipe: Recipe | None, cluster: Cluster, machine: Machine | None, price: float | None
) -> RunTerms:
    """What a run depends on besides its training and layout."""
    checkpoint = recipe.checkpoint if recipe is not None else None
    return RunTerms(
        engine=model.engine,
        machine=machine,
        storage=cluster_storage(cluster),
        steps=model.steps,
        checkpoint_every=recipe.checkpoint.every if recipe is not None and recipe.saves_by_steps else None,
        keep=checkpoint.kept if checkpoint is not None else 3,
        asynchronous=checkpoint.async_ if checkpoint is not None else True,
        mtbf_hours=cluster.mtbf_hours,
        price_per_gpu_hour=price or cluster.price_per_gpu_hour,
        volume=volume_terms(recipe, cluster) if recipe is not None else None,
    )


PLAN_SCHEMA = "trainshed.plan-report/1"


@dataclass(frozen=True)
class Plan:
    """What `trainshed plan` reports."""

    request: PlanRequest
    chosen: LayoutPrediction
    runners_up: tuple[LayoutPrediction, ...] = ()
    rejected: tuple[RejectedLayout, ...] = ()
    searched: bool = True
    """Whether the layout was chosen among others; False: it was given."""
    considered: int = 1
    notes: tuple[str, ...] = ()
    explanation: tuple[str, ...] = ()
    calibration: dict[str, Any] | None = None
    """The file, its hash and the entry that was used; None if no file was given."""
    evidence: PredictionEvidence | None = None
    """How far off the step may be, and the best MFU that was measured."""
    budget: RunBudget | None = None
    """Hours, money, checkpoints, failures, host memory and data."""
    scaling: ScalingCurve | None = None
    phases: tuple[PhasePrediction, ...] = ()
    """What is predicted of each phase; `chosen` is that of the one with the longest sequences."""

    @property
    def layout(self) -> RankLayout:
        """The layout: chosen, or the one that was given."""
        return self.chosen.layout

    @property
    def fits(self) -> bool:
        """Whether every stage fits its GPU."""
        return self.chosen.fits

    @property
    def step_seconds(self) -> float:
        """How long a step takes."""
        return self.chosen.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs of a second, relative to the dense peak of the GPUs."""
        return self.chosen.mfu

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all GPUs together train on in a second."""
        return self.chosen.tokens_per_second_per_gpu * self.gpus

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens that each GPU trains on in a second."""
        return self.chosen.tokens_per_second_per_gpu

    @property
    def memory_gib(self) -> float:
        """What the fullest GPU holds."""
        return self.chosen.memory.total

    @property
    def gpus(self) -> int:
        """How many GPUs."""
        return self.request.training.gpus

    @property
    def hours(self) -> float | None:
        """How long the run takes; None where its length is not known."""
        return self.to_plain()["chosen"]["hours"]

    @property
    def cost(self) -> float | None:
        """What the run costs in dollars; None where its length or a price is not known."""
        return self.to_plain()["chosen"]["cost"]

    def __str__(self) -> str:
        from trainshed.plan.report.page import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        """Show the plan in a notebook."""
        from trainshed.plan.report.page import notebook_html

        return notebook_html(self)

    def predicted_figures(self) -> dict[str, Any]:
        """Return what is stored with an attempt, for comparison with its measured steps."""
        return {
            "step_seconds": self.chosen.step_seconds,
            "mfu": self.chosen.mfu,
            "memory_gib": self.chosen.memory.total,
            "step_seconds_range": self.evidence.seconds if self.evidence is not None else None,
        }

    def to_plain(self) -> dict[str, Any]:
        """Return the plan as JSON has it; the keys are stable."""
        budget = {} if self.budget is None else self.budget.to_plain()
        run = budget.get("run") or {}
        return {
            "schema": PLAN_SCHEMA,
            "job": self._training_plain(),
            "chosen": prediction_plain(self.chosen)
            | {"stages": [_stage_plain(stage) for stage in self.chosen.stages]}
            | {"hours": run.get("hours"), "cost": run.get("cost")},
            "layout_flag": format_layout(self.chosen.layout),
            "runners_up": [prediction_plain(prediction) for prediction in self.runners_up],
            "rejected": [
                {"layout": layout_plain(layout.layout), "reason": layout.reason, "alike": layout.alike}
                for layout in self.rejected
            ],
            "notes": list(self.notes),
            "explanation": list(self.explanation),
            "searched": self.searched,
            "considered": self.considered,
            "calibration": self.calibration,
            "evidence": None if self.evidence is None else self.evidence.to_plain(),
            "checkpoint": budget.get("checkpoint"),
            "goodput": budget.get("goodput"),
            "data": budget.get("data"),
            "host_memory": budget.get("host_memory"),
            "run": run or None,
            "energy_kwh": run.get("energy_kwh"),
            "scaling": None if self.scaling is None else scaling_plain(self.scaling),
            **({"phases": [phase.to_plain() for phase in self.phases]} if self.phases else {}),
        }

    def _training_plain(self) -> dict[str, Any]:
        training, request = self.request.training, self.request
        hardware = training.hardware
        return {
            "name": request.name,
            "model": training.model.name,
            "parameters": training.model.weights,
            "trained_parameters": training.trained_weights,
            "sequence_length": training.sequence_length,
            "document_length": training.document_length,
            "global_batch": training.global_batch,
            "tokens_per_step": training.tokens_per_step,
            "precision": training.precision,
            "engine": request.engine,
            "gpus": training.gpus,
            "steps": request.terms.steps,
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
        "states_gib": {"trained": prediction.memory.trained, "frozen": prediction.memory.frozen},
        "time": asdict(prediction.times),
    }


def memory_plain(memory: GpuMemory) -> dict[str, float]:
    """Return the parts, their sum and the memory of the GPU."""
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


def make_plan(request: PlanRequest, *, top: int = 5, explained: bool = False) -> Plan:
    """Search the best layout, or evaluate the given one, and predict what the run takes."""
    request = _calibrated(request)
    notes = [] if (used := calibration_note(request)) is None else [used]
    curve = _requested_curve(request)
    if curve is not None:
        request, more = _at_most_gpus(request, curve)
        notes += more
    result = _search_or_evaluate(request, top)
    phases = predict_phases(request.phases, request.training, result.chosen.layout, request.engine, request.places)
    budget = run_budget(request.training, result.chosen, request.terms, step_seconds=mean_step_seconds(phases))
    calibration = _used_calibration(request)
    calibrated = calibration is not None and bool(calibration["entry"])
    evidence = evidence_for(request.training, request.engine, result.chosen, calibrated=calibrated)
    return Plan(
        request=request,
        chosen=result.chosen,
        runners_up=result.runners_up,
        rejected=result.rejected,
        searched=request.layout is None,
        considered=result.considered,
        notes=(
            *budget.warnings,
            *result.notes,
            *(phase.text() for phase in phases),
            *evidence.notes,
            *request.notes,
            *notes,
            *budget.notes,
        ),
        explanation=tuple(_explanation(request, result.chosen)) if explained else (),
        calibration=calibration,
        evidence=evidence,
        budget=budget,
        scaling=curve,
        phases=phases,
    )


def calibration_note(request: PlanRequest) -> str | None:
    """Say which entry of the calibration file a plan uses, or that it has none; None where no file was named."""
    calibrations, gpu = request.calibrations, request.training.hardware.gpu_name
    if calibrations is None:
        return None
    entry = calibrations.entry_for(gpu, request.engine)
    return calibrations.missing_note(gpu, request.engine) if entry is None else f"calibrated: {entry.description}"


def _calibrated(request: PlanRequest) -> PlanRequest:
    """Apply the entry of the GPU and the engine, where a calibration file was named."""
    calibrations, training = request.calibrations, request.training
    entry = None if calibrations is None else calibrations.entry_for(training.hardware.gpu_name, request.engine)
    if entry is None:
        return request
    calibrated = replace(training, calibration=entry.factor, memory_calibration=entry.memory_factor or 1.0)
    return replace(request, training=calibrated)


def _used_calibration(request: PlanRequest) -> dict[str, object] | None:
    calibrations, gpu = request.calibrations, request.training.hardware.gpu_name
    return None if calibrations is None else calibrations.to_plain(calibrations.entry_for(gpu, request.engine))


def _search_or_evaluate(request: PlanRequest, top: int) -> SearchResult:
    training = request.training
    if request.layout is None:
        return search_layouts(training, engine=request.engine, batch_sizes=request.batches, top=top)
    return evaluate_layout(
        training,
        resolve_layout(request.layout, request.config, world_size=training.gpus),
        engine=request.engine,
        batch_sizes=request.batches,
        stages_written=request.layout.stages is not None,
        places=request.places,
    )


def _requested_curve(request: PlanRequest) -> ScalingCurve | None:
    if not request.gpu_counts:
        return None
    fixed = None if request.layout is None else request.layout.model_dump(exclude_unset=True, exclude={"dp"})
    return scaling_curve(
        request.training, request.gpu_counts, engine=request.engine, fixed=fixed, batch_sizes=request.batches
    )


def _at_most_gpus(request: PlanRequest, curve: ScalingCurve) -> tuple[PlanRequest, list[str]]:
    """The request for the most GPUs that have a layout: its plan is shown beside the curve."""
    planned = [point.gpus for point in curve.points if point.prediction is not None]
    if not planned:
        reason = curve.points[-1].reason or "no layout is legal"
        raise InputError(f"none of {curve.points[0].gpus} to {curve.points[-1].gpus} GPUs has a layout: {reason}")
    shown = f"the layout shown is the one for {planned[-1]:,} GPUs"
    if planned[-1] != request.training.gpus:
        shown += f": {curve.points[-1].reason}"
    above = [] if curve.above is None else [f"efficiency above 100%: {curve.above}"]
    return replace(request, training=replace(request.training, gpus=planned[-1])), [shown, *above]


def _explanation(request: PlanRequest, chosen: LayoutPrediction) -> list[str]:
    """Sentences about the chosen layout; for a given one also what the search would have chosen."""
    training = request.training

    def find_problem(layout: RankLayout) -> str | None:
        problems = layout_problems(
            layout,
            training.model,
            sequence_length=training.sequence_length,
            batch_sizes=request.batches,
            engine=request.engine,
            lora=training.lora is not None,
            quantized=training.quantized,
            stages_written=True,
        )
        return problems[0].what if problems else None

    def best_with(fixed: dict[str, int | str]) -> LayoutPrediction | None:
        return best_fitting_layout(training, engine=request.engine, fixed=fixed, batch_sizes=request.batches)

    if request.layout is None:
        return explain_layout(training, chosen, find_problem, best_with)
    sentences = explain_layout(training, chosen, find_problem)
    try:
        best = search_layouts(training, engine=request.engine, batch_sizes=request.batches, top=1).chosen
    except InputError as refused:
        return [*sentences, f"The search finds nothing better: {refused.what}."]
    gain = 1 - best.step_seconds / chosen.step_seconds
    if chosen.fits and gain <= 0.01:
        return [*sentences, "The search finds no layout that is more than 1% faster."]
    name, _ = distinct_names(
        best.layout,
        chosen.layout,
        describe=lambda layout: f"{layout} (micro_batch {layout.micro_batch}, recompute {layout.recompute})",
    )
    faster = f"{format_percent(gain)} {'faster' if gain > 0 else 'slower'}"
    return [*sentences, f"The search would take {name}: {format_seconds(best.step_seconds)} a step, {faster}."]
