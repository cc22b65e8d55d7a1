"""Copying a shipped recipe together with the scripts it runs, so that the copy works where it lands."""

from __future__ import annotations

import shutil
from pathlib import Path

from trainshed.errors import InputError
from trainshed.recipe.load import SUFFIXES, find_recipe, load_recipe, shipped_recipes


def copy_shipped_recipe(name: str, destination: Path) -> list[Path]:
    """Copy a recipe to a folder or a new file, its scripts beside it; return the files, the recipe first.

    Nothing is overwritten: if any of the files exists, none is written.
    """
    source = shipped_recipes().get(name) or find_recipe(name)
    recipe = load_recipe(source)
    target = destination if destination.suffix in SUFFIXES else destination / source.name
    copies = {target: source}
    for entry in (*recipe.data.train, recipe.data.validation):
        if entry is not None and entry.script is not None and not Path(entry.script).is_absolute():
            copies[target.parent / entry.script] = source.parent / entry.script
    for copy in copies:
        if copy.exists():
            raise InputError("is there already, and nothing is overwritten", where=str(copy), hint="name another file")
    for copy, original in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(original, copy)
    return list(copies)
