"""From a recipe and a cluster to what the planner is asked."""

from __future__ import annotations

import orjson

from trainshed.catalog.models import architecture
from trainshed.data.sampling.schedule import BatchSchedule, RampUp
from trainshed.engines.planned_habits import planned_habits
from trainshed.errors import InputError, RecipeError, TrainshedError
from trainshed.line.preparing import store_options
from trainshed.models.adapters import trained_share
from trainshed.models.hf_config import read_hf_config
from trainshed.plan.performance.stacks import Habits
from trainshed.plan.planner import PlannedModel
from trainshed.recipe import Cluster, ModelConfig, Recipe
from trainshed.storage import join, open_store, parse


def planned_model(recipe: Recipe, cluster: Cluster) -> PlannedModel:
    """Read what a plan must know out of a recipe; the architecture may be that of its base weights."""
    config = architecture(recipe) or weights_architecture(recipe, cluster)
    train, ramp = recipe.train, recipe.train.batch_ramp
    schedule = BatchSchedule(
        train.global_batch, RampUp(ramp.start, ramp.increment, ramp.samples) if ramp is not None else None
    )
    length = recipe.data.sequence_length or config.max_positions
    notes = []
    steps = train.steps
    if train.tokens is not None:
        steps = schedule.steps_for(-(-train.tokens // length))
    if train.epochs is not None:
        notes.append("hours and cost are left out: `epochs` has a length only once the data is prepared")
    if ramp is not None:
        notes.append(f"planned for the full batch of {train.global_batch:,}: steps of the ramp are shorter")
    share = trained_share(config, train.lora)
    if train.lora is not None:
        notes.append(f"planned for adapters: {share:.2%} of the weights are trained and saved, the rest are read only")
    habits, counted = planned_habits(recipe.engine.args, Habits(trained_share=share))
    if counted:
        notes.append(f"counted of engine.args: {', '.join(counted)}")
    layout = None if isinstance(recipe.layout, str) else recipe.layout
    preset = recipe.model.preset or recipe.model.from_ or config.family
    return PlannedModel(
        recipe.name,
        config,
        preset,
        length,
        tuple(schedule.sizes),
        train.precision,
        recipe.engine.name,
        layout,
        steps,
        tuple(notes),
        habits,
    )


def weights_architecture(recipe: Recipe, cluster: Cluster) -> ModelConfig:
    """Return the architecture that base weights bring: their config.json is read, not they."""
    address = recipe.model.from_
    assert address is not None, "a model without an architecture has weights"
    try:
        return address_architecture(address, cluster)
    except TrainshedError as error:
        raise RecipeError(
            f"the architecture is that of {address}, which cannot be read: {error.what}",
            where=recipe.where("model.from"),
            hint="name it besides: model.preset=NAME",
        ) from None


def address_architecture(address: str, cluster: Cluster) -> ModelConfig:
    """Return the architecture in the config.json of a folder, here, in a store or on the Hub; no weights are needed."""
    store, path = open_store(parse(address), store_options(cluster))
    content = store.read(join(path, "config.json"))
    try:
        body = orjson.loads(content)
    except ValueError:
        raise InputError("its config.json is not JSON", where=f"{address}/config.json") from None
    return read_hf_config(body, f"{address}/config.json")
