"""From a question to the whole answer: the layout, then what follows from its step for the run."""

from __future__ import annotations

from dataclasses import replace

from trainshed.errors import InputError
from trainshed.plan.budget.budget import budget
from trainshed.plan.layout import RankLayout, resolve_layout
from trainshed.plan.legality import layout_problems
from trainshed.plan.performance.prediction import Job, Prediction
from trainshed.plan.question import Question
from trainshed.plan.report.answer import Answer
from trainshed.plan.report.explain import explain, percent, seconds
from trainshed.plan.searching.scaling import ScalingCurve, scaling_curve
from trainshed.plan.searching.search import Search, evaluate, search


def answer(question: Question, *, top: int = 5, explained: bool = False) -> Answer:
    """Search the best layout, or judge the given one, and say what the run would take."""
    question, notes = _calibrated(question)
    curve = _curve(question)
    if curve is not None:
        question, more = _at_the_end(question, curve)
        notes += more
    found = _found(question, top)
    beyond = budget(question.job, found.chosen, question.terms)
    return Answer(
        question=question,
        chosen=found.chosen,
        runners_up=found.runners_up,
        rejected=found.rejected,
        searched=question.layout is None,
        considered=found.considered,
        notes=(*beyond.warnings, *found.notes, *question.notes, *notes, *beyond.notes),
        explanation=tuple(_explanation(question, found.chosen)) if explained else (),
        calibration=_used(question),
        budget=beyond,
        scaling=curve,
    )


def _calibrated(question: Question) -> tuple[Question, list[str]]:
    """Apply the entry of the GPU and the engine, where a calibration file was given."""
    known, job = question.calibrations, question.job
    if known is None:
        return question, []
    entry = known.entry_for(job.hardware.gpu_name, question.engine)
    if entry is None:
        return question, [known.why_none(job.hardware.gpu_name, question.engine)]
    learnt = replace(job, calibration=entry.factor, memory_calibration=entry.memory_factor or 1.0)
    return replace(question, job=learnt), [f"calibrated: {entry.words}"]


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
    return replace(question, job=replace(question.job, gpus=able[-1])), [shown]


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

    said = explain(job, chosen, complaint)
    if question.layout is None:
        return said
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
