"""Recipes that go through a foreign engine's configuration and back: what must come back, and what cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import yaml
from hypothesis import strategies as st

from trainshed.catalog import architecture
from trainshed.engines.importing import ImportedConfig, recipe_text
from trainshed.engines.key_table import KeyTable
from trainshed.engines.keys import flatten, nest
from trainshed.recipe import Recipe, parse_recipe, to_plain
from trainshed.recipe.model import FIXED_BY_FAMILY
from trainshed.recipe.schema_export import key_list

Alike = Mapping[str, tuple[str, Callable[[dict[str, Any]], Any]]]
"""Recipes that an engine is told in the same words: the key, why, and what stands for all of its values."""


def _decay(flat: dict[str, Any]) -> Any:
    decay = flat.get("train.schedule.decay")
    return decay if flat["train.schedule.name"] == "wsd" or decay != flat["train.steps"] else None


def _of_router(key: str, default: float) -> Callable[[dict[str, Any]], Any]:
    return lambda flat: flat.get(f"train.moe.{key}", default) if "model.config.moe.experts" in flat else None


_ROUTER = "null is what the schema defaults it to, for a model with experts"
PRETRAINING_ALIKE: Alike = {
    "train.schedule.decay": ("a decay that ends with the run need not be written", _decay),
    "train.moe.balance_loss": (_ROUTER, _of_router("balance_loss", 0.001)),
    "train.moe.z_loss": (_ROUTER, _of_router("z_loss", 0.0)),
}


def recipe_of(keys: Mapping[str, Any]) -> Recipe:
    """Return a recipe from dotted keys."""
    return parse_recipe(yaml.safe_dump(nest(keys), sort_keys=False))


def said_keys(recipe: Recipe, unsaid: Mapping[str, str], alike: Alike) -> dict[str, Any]:
    """Return every key of a recipe that an engine is told, defaults included."""
    tree = to_plain(recipe)
    config = architecture(recipe)
    if "model.preset" in unsaid and config is not None:
        tree["model"] = {"config": to_plain(config)}
    flat = flatten(tree)
    said = {key: value for key, value in flat.items() if value not in (None, {}) and not _below(key, unsaid)}
    for key, (_, stands_for) in alike.items():
        if (value := stands_for(flat)) is None:
            said.pop(key, None)
        else:
            said[key] = value
    return said


def read_back(imported: ImportedConfig) -> Recipe:
    """Return the recipe that a configuration was imported as, through its text."""
    return parse_recipe(recipe_text(imported, "imported"))


def forgotten_keys(table: KeyTable) -> list[str]:
    """Return the keys of a recipe that no row reads and that are not listed as unsaid."""
    every = key_list(Recipe)
    leaves = [key for key in every if not any(other.startswith(f"{key}.") for other in every)]
    read = [row.path for row in table.rows if row.read is not None and not row.chosen] + ["engine.args"]
    if "model.config.family" in read:
        read += [f"model.config.{key}" for key in FIXED_BY_FAMILY["mistral"]]
    return [key for key in leaves if not _below(key, table.unsaid) and not any(_is_below(key, path) for path in read)]


def _below(key: str, parents: Mapping[str, str]) -> bool:
    return any(_is_below(key, parent) for parent in parents)


def _is_below(key: str, parent: str) -> bool:
    return key == parent or key.startswith(f"{parent}.")


def schedules(*, largest_min_lr: float) -> st.SearchStrategy[dict[str, Any]]:
    """Learning-rate schedules that engines which pretrain can take."""
    return st.one_of(
        st.fixed_dictionaries({"name": st.just("constant"), "warmup": st.integers(0, 40)}),
        st.fixed_dictionaries(
            {
                "name": st.sampled_from(["cosine", "linear"]),
                "warmup": st.integers(0, 40),
                "min_lr": st.floats(0, largest_min_lr),
            },
            optional={"decay": st.integers(41, 50)},
        ),
        st.fixed_dictionaries(
            {
                "name": st.just("wsd"),
                "warmup": st.integers(0, 20),
                "decay": st.integers(1, 30),
                "min_lr": st.floats(0, largest_min_lr),
            }
        ),
    )
