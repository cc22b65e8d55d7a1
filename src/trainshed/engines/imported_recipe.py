"""An imported configuration as the text of a recipe, with a comment where something is left open."""

from __future__ import annotations

import re
from typing import Any

from trainshed.engines.imported import Imported
from trainshed.errors import InputError
from trainshed.recipe import parse_recipe
from trainshed.recipe.schema import Recipe
from trainshed.recipe.yaml_text import dump

_SECTIONS = "|".join(field.alias or name for name, field in Recipe.model_fields.items())
_KEY = re.compile(rf"(?<![\w.])({_SECTIONS})(?:\.[\w.]+|:)")
_WIDTH = 110


def recipe_text(imported: Imported, source: str) -> str:
    """Return the recipe as YAML; every open question stands above the section that it is about."""
    asked: dict[str, list[str]] = {}
    for question in imported.open_questions:
        asked.setdefault(_section(question, imported.recipe), []).append(question)
    lines = [f"# Imported from {source} ({imported.kind}) by `trainshed import`.", *_comments(asked.pop("", []))]
    lines.append("trainshed: 1")
    for key, value in imported.recipe.items():
        lines += _comments(asked.get(key, []))
        lines.append(_dump({key: value}))
    if imported.cluster:
        lines.append("# For the cluster file:")
        lines += [f"#   {line}" for line in _dump(imported.cluster).splitlines()]
    return "\n".join(lines) + "\n"


def cluster_text(imported: Imported, source: str) -> str:
    """Return what the file says about the cluster, as the beginning of a cluster file."""
    head = [
        f"# What {source} says about where it runs; see clusters/ for whole files.",
        "# open: name, target, store and machine",
    ]
    return "\n".join([*head, "trainshed: 1", _dump(imported.cluster) if imported.cluster else "# nothing"]) + "\n"


def load_problem(text: str) -> str | None:
    """Return why a recipe does not load yet, None where it does."""
    try:
        parse_recipe(text)
    except InputError as error:
        return str(error)
    return None


def _section(question: str, recipe: dict[str, Any]) -> str:
    """The section that a question is about: the last key of ours that it names (what is to be written)."""
    named = [section for section in _KEY.findall(question) if section in recipe]
    return named[-1] if named else ""


def _comments(questions: list[str]) -> list[str]:
    return [f"# open: {question}" for question in questions]


def _dump(value: dict[str, Any]) -> str:
    # One key to a line at the top; below it, mappings of plain values stay on one.
    parts = (dump({key: item}) for key, item in value.items())
    return "".join(parts).rstrip("\n")
