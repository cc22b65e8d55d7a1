"""Keys that a recipe writes and that nothing reads by what else it says: about text without text, for example.

Only values that differ from the default count as written: a resolved recipe has them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainshed.recipe.section import Problem

if TYPE_CHECKING:
    from trainshed.recipe.schema import Recipe

_TEXT_KEYS = ("shards", "eod", "bos", "on_bad_line")


def unread_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the keys of a recipe that would have no effect."""
    yield from _checkpoint_problems(recipe)
    yield from _text_problems(recipe)
    measured, budgets = bool(recipe.data.validations), recipe.budgets
    if recipe.train.ema is not None and recipe.train.ema.validation and not measured:
        yield Problem(
            ("train", "ema", "validation"), "no validation loss is measured", "write `data.validation`, or delete it"
        )
    if budgets is None or recipe.engine.name != "torch":  # Megatron's one limit is the longest of them
        return
    if budgets.validation is not None and not measured:
        yield Problem(
            ("budgets", "validation"), "no validation loss is measured", "write `data.validation`, or delete it"
        )
    if budgets.checkpoint is not None and not recipe.checkpoint.save:
        yield Problem(("budgets", "checkpoint"), "no checkpoint is written (`checkpoint: off`)", "delete it")


def _checkpoint_problems(recipe: Recipe) -> Iterator[Problem]:
    saving = recipe.checkpoint
    if saving.save:
        return
    for key in ("every", "keep"):
        if getattr(saving, key) not in (None, type(saving).model_fields[key].default):
            yield Problem(
                ("checkpoint", key),
                "is not read: no checkpoint is written (`save: false`)",
                "delete one of the two; on the command line: checkpoint=off",
            )
    if not saving.async_ and recipe.engine.name != "torchtune":  # torchtune has no other way
        yield Problem(
            ("checkpoint", "async"), "is not read: no checkpoint is written (`save: false`)", "delete one of the two"
        )


def _text_problems(recipe: Recipe) -> Iterator[Problem]:
    if any(source.kind in ("path", "script") for _, source in recipe.sources()):
        return
    why = "synthetic data has no text" if recipe.data.synthetic else "all tokens are prepared already"
    for key in _TEXT_KEYS:
        if getattr(recipe.data, key) != type(recipe.data).model_fields[key].default:
            yield Problem(("data", key), f"is not read: {why}", "delete it")
