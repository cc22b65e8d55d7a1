"""A prepared run made ready for its ranks: whether it could train here, and what each rank is asked."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from trainshed.catalog.models import architecture
from trainshed.errors import MissingExtra, RecipeError
from trainshed.plan import RankLayout
from trainshed.recipe import Cluster, Recipe
from trainshed.storage import LocalStore, StoreOptions
from trainshed.workflow.layout import planned_layout, weights_architecture
from trainshed.workflow.prepare import PreparedRun, checkpoint_home
from trainshed.workflow.runnable import check_runnable

if TYPE_CHECKING:
    from trainshed.engines.torch.job import TrainJob


def check_trainable(recipe: Recipe, cluster: Cluster, *, keys: dict[str, object] | None = None) -> None:
    """Refuse what could not train here before anything is fetched or prepared; `keys` are those of `--layout`."""
    check_runnable(recipe, cluster)
    if find_spec("torch") is None:
        raise MissingExtra.named("train", "training")
    try:
        config = architecture(recipe) or weights_architecture(recipe, cluster)
    except RecipeError:
        return  # weights in a format that only they themselves explain: the layout is checked once they are here
    model = recipe.model.model_copy(update={"config": config, "preset": None})
    planned_layout(recipe.model_copy(update={"model": model}), cluster, keys=keys)


def train_job(run: PreparedRun, layout: RankLayout, options: StoreOptions | None = None) -> TrainJob:
    """Return what a rank of this run is asked to train."""
    from trainshed.engines.torch.job import TrainJob

    return TrainJob(
        recipe=run.recipe,
        config=run.config,
        layout=layout,
        name=run.id,
        steps=run.steps,
        order=run.order,
        validation=run.validation,
        store=LocalStore(run.folder),
        folder="",
        base=run.base,
        checkpoint_home=checkpoint_home(run.recipe, run.id, options),
    )
