"""What a rank of a small run with plugins does: it reads the recipe from its file, as every rank does."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from support import TESTS
from support.recipes.small_recipes import recipe_text, small_job
from trainshed.engines.torch.rank import train_rank
from trainshed.recipe import load_recipe

EXAMPLES = TESTS.parent / "docs" / "examples"


def write_plugged(folder: Path, plugin: str, keys: str = "", *, model: str = "dense") -> Path:
    """Write the small recipe with an example plugin beside it; `keys` are overrides that it is written with."""
    shutil.copy(EXAMPLES / f"{plugin}.py", folder / f"{plugin}.py")
    file = folder / "plugged.yaml"
    file.write_text(recipe_text(model) + f"plugins: [{plugin}]\n{keys}")
    return file


def train_plugged(folder: Path, file: Path, layout: str, overrides: Sequence[str]) -> int:
    """Train as one rank; returns the exit code."""
    return train_rank(small_job(folder, load_recipe(file, overrides), layout), run_folder=folder)
