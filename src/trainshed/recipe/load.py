"""From a file, a shipped name or text to a checked recipe."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainshed.errors import RecipeError
from trainshed.recipe.messages import validate
from trainshed.recipe.overrides import apply_overrides
from trainshed.recipe.places import Document
from trainshed.recipe.schema import FORMAT, Recipe
from trainshed.recipe.yaml_source import decode, parse
from trainshed.shipped import shipped_folder

SUFFIXES = (".yaml", ".yml")


def load_recipe(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Recipe:
    """Load a recipe from a file, or a shipped one by name, with overrides (`train.steps=100`)."""
    file = find_recipe(path)
    return parse_recipe(_read(file), overrides, source=_as_shown(file), folder=file.parent)


def parse_recipe(
    text: str | bytes,
    overrides: Iterable[str] = (),
    *,
    source: str = "recipe.yaml",
    folder: Path | None = None,
) -> Recipe:
    """Load a recipe from text; errors call it `source`, and `script` paths are relative to `folder`."""
    document = parse(decode(text, source) if isinstance(text, bytes) else text, source)
    apply_overrides(document, overrides)
    check_format(document)
    recipe = validate(Recipe, document)
    document.places.folder = folder or Path()
    recipe._places = document.places
    return recipe


def check_format(document: Document) -> None:
    """Stop at a newer format before its keys are called unknown."""
    written: Any = document.value.get("trainshed", FORMAT)
    if isinstance(written, int) and not isinstance(written, bool) and written > FORMAT:
        raise RecipeError(
            f"the file has format {written}, and this Trainshed reads up to {FORMAT}",
            where=document.places.where(("trainshed",)),
            hint="pip install --upgrade trainshed",
        )


def find_recipe(path: str | os.PathLike[str]) -> Path:
    """Return the file of a recipe: a path, or the name of a shipped one."""
    file = Path(path)
    if file.is_file():
        return file
    if file.is_dir():
        raise RecipeError("is a folder, not a recipe", where=str(path), hint=f"write the file: {file}/recipe.yaml")
    shipped = shipped_recipes()
    name = os.fspath(path)
    if name in shipped:
        return shipped[name]
    beside = sorted(str(other) for other in _listing(file.parent) if other.suffix in SUFFIXES)
    near = difflib.get_close_matches(name, [*beside, *shipped], n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"shipped recipes: {', '.join(shipped) or 'none'}"
    raise RecipeError("there is no such recipe", where=name, hint=hint)


def shipped_recipes() -> dict[str, Path]:
    """Return the shipped recipes by name."""
    return {file.stem: file for file in _listing(shipped_folder("recipes")) if file.suffix in SUFFIXES}


def _listing(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}", where=str(file)) from None


def _as_shown(file: Path) -> str:
    """Name a file as a person would type it: relative where it lies below the current directory."""
    if file.is_absolute() and file.is_relative_to(Path.cwd()):
        return str(file.relative_to(Path.cwd()))
    return str(file)
