"""Architectures by name, from `models.yaml`."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path

from pydantic import Field

from trainshed.errors import InputError, RecipeError
from trainshed.recipe import ModelConfig, Recipe, fit_problems
from trainshed.recipe.section import PositiveInt, Section, Text
from trainshed.recipe.validation import recipe_error, validate
from trainshed.recipe.yaml_io import SourceMap, YamlDocument, parse_yaml

_FILE = Path(__file__).with_name("models.yaml")


class ModelEntry(Section):
    """One published architecture."""

    source: Text = Field(description="Where the sizes are published")
    parameters: PositiveInt = Field(description="Exact number of weights, tied ones counted once")
    config: ModelConfig = Field(description="The architecture")


@cache
def _document() -> YamlDocument:
    return parse_yaml(_FILE.read_text(encoding="utf-8"), _FILE.name)


def preset_names() -> list[str]:
    """Return the names of all presets, in the order of the catalog."""
    return list(_document().value)


@cache
def model_entry(name: str) -> ModelEntry:
    """Return a catalog entry with its source and size."""
    names = preset_names()
    if name not in names:
        near = difflib.get_close_matches(name.lower().replace("_", "-"), names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known presets: {', '.join(names)}"
        raise InputError(f"there is no model preset `{name}`", hint=hint)
    # Each entry is checked when it is first used: to build all of them would slow down every command.
    entry = YamlDocument(_document().value[name], SourceMap(f"{_FILE.name}, {name}"))
    return validate(ModelEntry, entry)


def model_preset(name: str) -> ModelConfig:
    """Return the architecture of a preset."""
    return model_entry(name).config


def architecture(recipe: Recipe) -> ModelConfig | None:
    """Return the architecture that a recipe names; None if it is read from the weights (`model.from`).

    Raises `RecipeError` for an unknown preset, and for one that is too small for the recipe.
    """
    if recipe.model.config is not None or recipe.model.preset is None:
        return recipe.model.config
    try:
        config = model_preset(recipe.model.preset)
    except InputError as error:
        raise RecipeError(error.what, where=recipe.where("model.preset"), hint=error.hint) from None
    problems = list(fit_problems(recipe, config))
    if problems:
        raise recipe_error(problems, recipe.places)
    return config
