"""Errors of the data room in the words of a recipe.

What reads text names the flags of `data prepare`, the door that leads straight to it. Whoever comes from a recipe has
keys instead of flags, and is told these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from trainshed.errors import InputError, RecipeError

KEYS = (
    (r"--format with", "`format` with"),
    (r"--format (\w+)", r"`format: \1`"),
    (r"--key", "`key`"),
    (r"--on-bad-line (\w+)", r"`data.on_bad_line: \1`"),
    (r"--shards (\d+)", r"`data.shards: \1`"),
    (r"--no-eod", "`data.eod: false`"),
    (r"--eod (TOKEN)", r"`data.eod: \1`"),
    (r"--eod", "`data.eod`"),
    (r"no --bos", "`data.bos: false`"),
    (r"--bos", "`data.bos`"),
    (
        r"write --encoder tokenizers",
        "prepare the text by `trainshed data prepare --encoder tokenizers` and name it as `tokens: PREFIX`",
    ),
)
"""Flags of `data prepare` and the keys that stand for them."""


def as_keys(text: str) -> str:
    """Write the keys of a recipe in place of flags."""
    for flag, key in KEYS:
        text = re.sub(rf"(?<![\w-]){flag}(?![\w-])", key, text)
    return text


@contextmanager
def in_recipe_words(place: str) -> Iterator[None]:
    """Let errors about text name keys; `place` says where in the recipe the source or the section stands."""
    try:
        yield
    except RecipeError:
        raise
    except InputError as error:
        what, hint = as_keys(error.what), as_keys(error.hint or "")
        if (what, hint) == (error.what, error.hint or ""):
            raise
        raise type(error)(what, where=error.where, hint=f"{hint} ({place})" if hint else f"see {place}") from None
