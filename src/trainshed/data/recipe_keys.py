"""Errors about text in the words of a recipe.

The code that reads text names the flags of `data prepare` in its errors. A person who runs a recipe writes keys
instead of flags, so errors are rewritten to name the keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from trainshed.errors import InputError, RecipeError

RECIPE_KEYS = (
    (r"--format with", "`format` with"),
    (r"--format (\w+)", r"`format: \1`"),
    (r"--key", "`key`"),
    (r"--documents", "`documents`"),
    (r"--on-bad-line (\w+)", r"`data.on_bad_line: \1`"),
    (r"--shards (\d+)", r"`data.shards: \1`"),
    (r"--no-eod", "`data.eod: false`"),
    (r"--eod (TOKEN)", r"`data.eod: \1`"),
    (r"--eod", "`data.eod`"),
    (r"no --bos", "`data.bos: false`"),
    (r"--bos", "`data.bos`"),
    (r"--thinking (\w+)", r"`data.thinking: \1`"),
    (r"--train-on (\w+)", r"`data.train_on: \1`"),
    (r"--on-too-long (\w+) or (\w+)", r"`data.on_too_long: \1` or `\2`"),
    (r"--sequence-length", "`data.sequence_length`"),
    (r"--template", "`data.template`"),
    (r"--split (\S+?)(,?)(?=\s|$)", r"`split: \1`\2"),
    (r"--columns (\w+)=NAME", r"`columns: {\1: NAME}`"),
    (r"--columns", "`columns`"),
    (
        r"write --encoder tokenizers",
        "prepare the text by `trainshed data prepare --encoder tokenizers` and name it as `tokens: PREFIX`",
    ),
)
"""Flags of `data prepare` and the keys that stand for them."""


def flags_to_recipe_keys(text: str) -> str:
    """Write the keys of a recipe in place of flags."""
    for flag, key in RECIPE_KEYS:
        text = re.sub(rf"(?<![\w-]){flag}(?![\w-])", key, text)
    return text


@contextmanager
def errors_with_recipe_keys(location: str) -> Iterator[None]:
    """Let errors about text name keys; `location` is where in the recipe the source or the section is."""
    try:
        yield
    except RecipeError:
        raise
    except InputError as error:
        what, hint = flags_to_recipe_keys(error.what), flags_to_recipe_keys(error.hint or "")
        if (what, hint) == (error.what, error.hint or ""):
            raise
        raise type(error)(what, where=error.where, hint=f"{hint} ({location})" if hint else f"see {location}") from None
