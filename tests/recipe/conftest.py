"""A small valid recipe to break in many ways, and golden files."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainshed.errors import RecipeError
from trainshed.recipe import Recipe, parse_recipe

GOLDEN = Path(__file__).parents[1] / "golden" / "recipe"

BASE = """\
name: small
model:
  preset: tiny
  init: random
tokenizer: hf://org/tokenizer@abc
data:
  sequence_length: 256
  train:
    - path: corpus/*.jsonl
train:
  steps: 10
  global_batch: 8
  optimizer:
    lr: 1e-3
"""


@pytest.fixture
def base() -> str:
    return BASE


@pytest.fixture
def recipe() -> Callable[..., Recipe]:
    """Build the small recipe with overrides."""

    def build(*overrides: str) -> Recipe:
        return parse_recipe(BASE, overrides)

    return build


@pytest.fixture
def error() -> Callable[..., RecipeError]:
    """Return the error of the small recipe with overrides."""

    def fail(*overrides: str) -> RecipeError:
        with pytest.raises(RecipeError) as caught:
            parse_recipe(BASE, overrides)
        return caught.value

    return fail


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compare text with a golden file; `UPDATE_GOLDEN=1 pytest` writes it."""

    def compare(name: str, text: str) -> None:
        file = GOLDEN / name
        if os.environ.get("UPDATE_GOLDEN"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert text == file.read_text(encoding="utf-8")

    return compare
