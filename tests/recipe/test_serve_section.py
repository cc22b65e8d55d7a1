"""`serve` in a recipe: what is refused, where, and what to write instead."""

from __future__ import annotations

import pytest

from support.recipes.small_recipes import recipe_text
from trainshed.errors import RecipeError
from trainshed.recipe import parse_recipe, run_id

EXPORT = "export={format: hf}"
WORDS = "tokenizer=/models/tiny"


def test_serving_is_asked_for_by_one_line_and_does_not_rename_the_run() -> None:
    served = parse_recipe(recipe_text("dense"), ["serve={}", EXPORT, WORDS])
    assert served.serve is not None
    assert (served.serve.engine, served.serve.gpus, served.serve.replicas) == ("torch", 1, 1)
    assert run_id(served) == run_id(parse_recipe(recipe_text("dense"), [WORDS]))


@pytest.mark.parametrize(
    ("overrides", "key", "what", "hint"),
    [
        (["serve={}"], "serve", "there is nothing to serve: the recipe exports no weights", "`export: {format: hf}`"),
        (["serve={}", "export={format: megatron}"], "serve", "megatron is not served", "export: {format: hf}"),
        (["serve={gpus: 4}", EXPORT], "serve.gpus", "is one process on one GPU, and 4 are asked for", "engine: vllm"),
        (["serve={args: {seed: 1}}", EXPORT], "serve.args", "the torch server takes no `args`", "delete it"),
        (["serve={engine: vllm, gpus: 0}", EXPORT], "serve.gpus", "vLLM serves on GPUs", "`engine: torch`"),
        (["serve={}", EXPORT], "tokenizer", "a server must know the model's words", "tokenizer: hf://org/name"),
        (["serve={port: 70000}", EXPORT], "serve.port", "must be at most 65535", ""),
        (["serve={engine: vlm}", EXPORT], "serve.engine", "not one of torch, vllm", "did you mean vllm?"),
        (["serve={replica: 2}", EXPORT], "serve.replica", "unknown key `replica`", "did you mean serve.replicas?"),
    ],
)
def test_what_cannot_be_served_is_refused_where_it_is_written(
    overrides: list[str], key: str, what: str, hint: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(recipe_text("dense"), overrides if key == "tokenizer" else [*overrides, WORDS])
    assert what in caught.value.what
    assert hint in (caught.value.hint or "")
    assert key in (caught.value.where or "")
