"""The planner's one entrance: `plan`, `render`, `submit`, `run` and `train` all ask here.

`question` is the only place where a training, a cluster and its GPUs become a job to predict, so that the same recipe,
cluster and calibration give the same plan whoever asks. `answer` finds the layout, and what follows from its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trainshed.catalog.machines import Machine
from trainshed.errors import InputError
from trainshed.plan.budget.budget import Terms, budget
from trainshed.plan.budget.planned_storage import storage_of
from trainshed.plan.layout import RankLayout, resolve_layout
from trainshed.plan.legality import layout_problems
from trainshed.plan.measured.calibration import read_calibrations
from trainshed.plan.performance.anatomy import anatomy_of
from trainshed.plan.performance.evidence import evidence
from trainshed.plan.performance.hardware import Hardware
from trainshed.plan.performance.prediction import Job, Prediction
from trainshed.plan.performance.stacks import Habits, stack
from trainshed.plan.question import Question, check_precision
from trainshed.plan.report.answer import Answer
from trainshed.plan.report.explain import explain, percent, seconds
from trainshed.plan.searching.scaling import ScalingCurve, scaling_curve
from trainshed.plan.searching.search import Search, best_that_fits, evaluate, search
from trainshed.recipe import Cluster, Layout, ModelConfig, Recipe


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
    habits: Habits = field(default_factory=Habits)
    """What the run does otherwise than the usual of its engine: adapters, and what `engine.args` ask for."""


def question(
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
) -> Question:
    """Put a question to the planner: a model on GPUs of a cluster.

    More than one number of GPUs, smallest first, ask for a scaling curve. `layout_flag` says that the layout is not
    the recipe's own. `calibration` is a file that wins over the one the cluster names; nothing else is calibrated by.
    """
    where = recipe.where("train.precision") if recipe is not None else "--precision"
    check_precision(model.precision, hardware, model.engine, where=where)
    file = calibration or cluster.calibration
    job = Job(
        model=anatomy_of(model.config, model.preset),
        sequence_length=model.sequence_length,
        global_batch=max(model.batch_sizes),
        precision=model.precision,
        hardware=hardware,
        gpus=gpus[-1],
        stack=stack(model.engine),
        habits=model.habits,
    )
    return Question(
        name=model.name,
        job=job,
        config=model.config,
        engine=model.engine,
        layout=model.layout,
        places=recipe.places if recipe is not None and not layout_flag else None,
        calibrations=read_calibrations(file) if file is not None else None,
        batch_sizes=model.batch_sizes,
        gpu_counts=tuple(gpus) if len(gpus) > 1 else (),
        terms=_terms(model, recipe, cluster, machine, price),
        notes=model.notes,
    )


def _terms(
    model: PlannedModel, recipe: Recipe | None, cluster: Cluster, machine: Machine | None, price: float | None
) -> Terms:
    """What bears on a run beside its job and layout."""
    saved = recipe.checkpoint if recipe is not None else None
    return Terms(
        engine=model.engine,
        machine=machine,
        storage=storage_of(cluster),
        steps=model.steps,
        checkpoint_every=saved.every if saved is not None else None,
        keep=saved.keep if saved is not None else 3,
        asynchronous=saved.async_ if saved is not None else True,
        mtbf_hours=cluster.mtbf_hours,
        price_per_gpu_hour=price or cluster.price_per_gpu_hour,
    )


def answer(question: Question, *, top: int = 5, explained: bool = False) -> Answer:
    """Search the best layout, or judge the given one, and say what the run would take."""
    question = _calibrated(question)
    notes = [] if (used := calibration_note(question)) is None else [used]
    curve = _curve(question)
    if curve is not None:
        question, more = _at_the_end(question, curve)
        notes += more
    found = _found(question, top)
    beyond = budget(question.job, found.chosen, question.terms)
    calibration = _used(question)
    held = evidence(
        question.job, question.engine, found.chosen, calibrated=calibration is not None and bool(calibration["entry"])
    )
    return Answer(
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


def calibration_note(question: Question) -> str | None:
    """Say which entry of the calibration file a plan uses, or that it has none; None where no file was named."""
    known, gpu = question.calibrations, question.job.hardware.gpu_name
    if known is None:
        return None
    entry = known.entry_for(gpu, question.engine)
    return known.why_none(gpu, question.engine) if entry is None else f"calibrated: {entry.words}"


def _calibrated(question: Question) -> Question:
    """Apply the entry of the GPU and the engine, where a calibration file was named."""
    known, job = question.calibrations, question.job
    entry = None if known is None else known.entry_for(job.hardware.gpu_name, question.engine)
    if entry is None:
        return question
    learnt = replace(job, calibration=entry.factor, memory_calibration=entry.memory_factor or 1.0)
    return replace(question, job=learnt)


def _used(question: Question) -> dict[str, object] | None:
    known, job = question.calibrations, question.job
    return None if known is None else known.used(known.entry_for(job.hardware.gpu_name, question.engine))


def _found(question: Question, top: int) -> Search:
    job = question.job
    if question.layout is None:
        return search(job, engine=question.engine, batch_sizes=question.batches, top=top)
    return evaluate(
        job,
        resolve_layout(question.layout, question.config, world_size=job.gpus),
        engine=question.engine,
        batch_sizes=question.batches,
        stages_written=question.layout.stages is not None,
        places=question.places,
    )


def _curve(question: Question) -> ScalingCurve | None:
    if not question.gpu_counts:
        return None
    fixed = None if question.layout is None else question.layout.model_dump(exclude_unset=True, exclude={"dp"})
    return scaling_curve(
        question.job, question.gpu_counts, engine=question.engine, fixed=fixed, batch_sizes=question.batches
    )


def _at_the_end(question: Question, curve: ScalingCurve) -> tuple[Question, list[str]]:
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


def _explanation(question: Question, chosen: Prediction) -> list[str]:
    """Words for the chosen layout; for a given one also what the search would have taken."""
    job = question.job

    def complaint(layout: RankLayout, asked: Job = job) -> str | None:
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

    def best_with(fixed: dict[str, int | str]) -> Prediction | None:
        return best_that_fits(job, engine=question.engine, fixed=fixed, batch_sizes=question.batches)

    if question.layout is None:
        return explain(job, chosen, complaint, best_with)
    said = explain(job, chosen, complaint)
    try:
        best = search(job, engine=question.engine, batch_sizes=question.batches, top=1).chosen
    except InputError as refused:
        return [*said, f"The search finds nothing better: {refused.what}."]
    gain = 1 - best.step_seconds / chosen.step_seconds
    if chosen.fits and gain <= 0.01:
        return [*said, "The search finds no layout that is more than 1% faster."]
    micro = f"micro_batch {best.layout.micro_batch}, recompute {best.layout.recompute}"
    faster = f"{percent(gain)} {'faster' if gain > 0 else 'slower'}"
    return [*said, f"The search would take {best.layout} ({micro}): {seconds(best.step_seconds)} a step, {faster}."]
