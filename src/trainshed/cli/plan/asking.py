"""From what a person wrote (a recipe and a cluster, or flags) to a question the planner can answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from trainshed.catalog.models import model_preset
from trainshed.cli.plan.flags import Flags
from trainshed.cli.plan.place import asked_gpu_counts, asked_machine, named
from trainshed.data.sampling.schedule import BatchSchedule
from trainshed.errors import InputError, RecipeError, TrainshedError
from trainshed.plan.layout import parse_layout
from trainshed.plan.planner import PlannedModel, question
from trainshed.plan.question import Question
from trainshed.recipe import Cluster, Layout, ModelConfig, Recipe, load_cluster, load_recipe, split_overrides
from trainshed.recipe.cluster import DEFAULT_CLUSTER
from trainshed.recipe.messages import validate
from trainshed.recipe.places import Document, Places
from trainshed.recipe.section import Count
from trainshed.workflow.layout import address_architecture, planned_model
from trainshed.workflow.runnable import check_runnable

DEFAULT_PRECISION = "bf16"
DEFAULT_ENGINE = "torch"


def ask(flags: Flags) -> Question:
    """Put a question together; raises `InputError` where it contradicts itself or leaves something open."""
    flags.check()
    for_recipe, for_cluster = split_overrides(flags.overrides)
    cluster = load_cluster(flags.on or DEFAULT_CLUSTER, for_cluster)
    recipe = None
    if flags.recipe is not None:
        recipe = load_recipe(flags.recipe, for_recipe)
        model = planned_model(recipe, cluster)
        if flags.on is not None:
            model = replace(model, notes=(*model.notes, *_refusal(recipe, cluster)))
    else:
        model = _from_flags(flags, cluster)
    model_layout = _layout(flags, model.layout)
    machine, hardware = asked_machine(flags, cluster)
    return question(
        replace(model, layout=model_layout),
        hardware,
        asked_gpu_counts(flags, cluster, recipe, hardware, model_layout),
        cluster,
        machine=machine,
        recipe=recipe,
        layout_flag=flags.layout is not None,
        calibration=flags.calibration,
        price=flags.price,
    )


def _refusal(recipe: Recipe, cluster: Cluster) -> tuple[str, ...]:
    """A plan may be made of what cannot be run there yet; then it says so."""
    try:
        check_runnable(recipe, cluster)
    except RecipeError as error:
        return (f"planned, but {cluster.name} would not run this recipe: {error}",)
    return ()


def _from_flags(flags: Flags, cluster: Cluster) -> PlannedModel:
    assert flags.model is not None, "`Flags.check` asks for it"
    assert flags.seq is not None, "likewise"
    assert flags.global_batch is not None, "likewise"
    config = _model(flags.model, cluster)
    schedule = BatchSchedule(flags.global_batch)
    notes = []
    if config.positions == "learned" and flags.seq > config.max_positions:
        raise InputError(
            f"{flags.seq} is more than the {config.max_positions} positions {flags.model} learns",
            where="--seq",
            hint=f"write {config.max_positions} or less",
        )
    steps = flags.steps
    if flags.tokens is not None:
        steps = schedule.steps_for(-(-_count(flags.tokens) // flags.seq))
    if flags.precision is None:
        notes.append(f"products in {DEFAULT_PRECISION}: no --precision was given")
    if flags.engine is None:
        notes.append(f"planned for the engine {DEFAULT_ENGINE}: no --engine was given")
    return PlannedModel(
        name=flags.model,
        config=config,
        preset=flags.model,
        sequence_length=flags.seq,
        batch_sizes=tuple(schedule.sizes),
        precision=flags.precision or DEFAULT_PRECISION,
        engine=flags.engine or DEFAULT_ENGINE,
        layout=None,
        steps=steps,
        notes=tuple(notes),
    )


def _model(written: str, cluster: Cluster) -> ModelConfig:
    """A model by its name in the catalog, or by the folder that has its config.json: here, in a store, on the Hub."""
    if "/" not in written and not Path(written).is_dir():
        return named("--model", model_preset, written)
    try:
        return address_architecture(written, cluster)
    except TrainshedError as error:
        hint = error.hint
        if "://" not in written and not Path(written).exists():
            hint = f"write hf://{written} for the Hub, the path of a folder, or a model of the catalog"
        raise InputError(f"{written} cannot be read: {error.what}", where="--model", hint=hint) from None


def _count(text: str) -> int:
    try:
        return TypeAdapter(Count).validate_python(int(text) if text.isdecimal() else text)
    except ValidationError:
        raise InputError(
            f"`{text}` is not a number of tokens", where="--tokens", hint="write for example 15T"
        ) from None


def _layout(flags: Flags, written: Layout | None) -> Layout | None:
    """The layout to judge: the recipe's with `--layout` over it; None: search."""
    if flags.layout is None:
        return written
    plain = {} if written is None else written.model_dump(exclude_unset=True)
    return validate(Layout, Document(plain | parse_layout(flags.layout), Places("--layout")))
