"""Checkpoints that are held until they are evaluated (`eval.every`): hard links in `<run>/evaluating/`.

Rank 0 holds a checkpoint as soon as it is committed, before it removes others, so that none is pruned unevaluated.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from trainshed.recipe import Recipe
from trainshed.run_folder import CHECKPOINTS, EVALUATING, held_checkpoint, step_name
from trainshed.storage.manifest import MANIFEST


def is_due(recipe: Recipe, step: int) -> bool:
    """Whether the checkpoint of a step is one that `eval.every` names."""
    return recipe.eval is not None and recipe.eval.every is not None and step % recipe.eval.every == 0


def must_be_held(recipe: Recipe, step: int) -> bool:
    """Whether it could be pruned before it is evaluated."""
    return is_due(recipe, step) and recipe.checkpoint.keep is not None and recipe.checkpoint.to is None


def hold_checkpoint(run: Path, step: int) -> bool:
    """Hold a committed checkpoint by hard links until it is evaluated; False where it is gone already."""
    source, target = run / CHECKPOINTS / step_name(step), run / held_checkpoint(step)
    if (target / MANIFEST).is_file() and _same_manifest(source, target):
        return True
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(source, partial, copy_function=_link_or_copy)
    except (FileNotFoundError, shutil.Error):  # pruned in the meantime
        shutil.rmtree(partial, ignore_errors=True)
        return False
    shutil.rmtree(target, ignore_errors=True)
    partial.replace(target)
    return True


def release_checkpoint(run: Path, step: int) -> None:
    """Let go of a checkpoint that was held."""
    shutil.rmtree(run / held_checkpoint(step), ignore_errors=True)
    with suppress(OSError):
        (run / EVALUATING).rmdir()


def _same_manifest(one: Path, other: Path) -> bool:
    """Whether two checkpoints are the same; one that is gone counts as the same."""
    try:
        return (one / MANIFEST).read_bytes() == (other / MANIFEST).read_bytes()
    except FileNotFoundError:
        return True


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a mount without hard links
        shutil.copy2(source, target)
