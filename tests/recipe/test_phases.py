"""`train.phases` and named validation sets in a recipe: what is refused, what makes another run, what a phase is."""

from __future__ import annotations

import pytest

from trainshed.errors import RecipeError
from trainshed.recipe import Recipe, parse_recipe, run_id, to_yaml
from trainshed.recipe.phase_spans import phase_spans, written_steps

RECIPE = """
name: phased
model: {preset: tiny, init: random}
tokenizer: hf://org/tokenizer
data: {sequence_length: 32, train: [{path: a.jsonl}], validation: {one: {path: v.jsonl}, two: {path: w.jsonl}}}
train:
  global_batch: 4
  optimizer: {lr: 1.0e-3}
  phases: [{steps: 3}, {name: long, tokens: 1k, sequence_length: 64, data: {train: [{path: b.jsonl}]}}]
"""


def recipe_with(*overrides: str) -> Recipe:
    return parse_recipe(RECIPE, overrides)


@pytest.mark.parametrize(
    ("override", "where", "what"),
    [
        ("train.steps=5", "train.steps", "is not read with `phases`"),
        ("train.schedule={name: cosine}", "train.schedule", "is not read with `phases`"),
        ("train.batch_ramp={start: 2, increment: 2, samples: 8}", "train.batch_ramp", "is not read with `phases`"),
        ("train.phases.0.tokens=1k", "train.phases.0.tokens", "both say how long"),
        ("train.phases.0.steps=null", "train.phases.0", "says nothing about the length"),
        ("train.phases.0.lr=0.0", "train.phases.0.lr", "nothing would be learned"),
        ("train.phases.0.name=long", "train.phases.0.name", "two phases are called `long`"),
        ("train.phases.1.name=phase-1", "train.phases.1.name", "two phases are called `phase-1`"),
        ("train.phases.0.data={skip: [[5, 3]]}", "train.phases.0.data.skip.0", "is empty"),
        (
            "train.phases.0.data={skip: [[0, 6], [2, 8]]}",
            "train.phases.0.data.skip.1",
            "begins before the range",
        ),
        ("engine=megatron", "train.phases", "megatron does not train in phases"),
        ("engine=torchtune", "train.phases", "torchtune does not train in phases"),
        ("elastic={min_nodes: 1}", "elastic", "does not go on with fewer nodes"),
        ("data.validation.two.every=700", "data.validation.two.every", "is not a multiple of 500"),
        ("data.validation.two={}", "data.validation.two", "has no documents"),
        ("data.validation.two.pth=x", "data.validation.two.pth", "unknown key"),
    ],
)
def test_what_contradicts_phases_or_sets_is_refused_at_its_line(override: str, where: str, what: str) -> None:
    with pytest.raises(RecipeError, match=what) as refused:
        recipe_with(override)
    assert where in str(refused.value)


def test_lengths_names_layouts_and_skips_of_phases_continue_the_same_run() -> None:
    id = run_id(recipe_with())
    same = ("train.phases.1.tokens=2k", "train.phases.1.name=longer", "train.phases.0.layout={tp: 2}")
    assert {run_id(recipe_with(override)) for override in (*same, "train.phases.1.data.skip=[[0, 4]]")} == {id}
    others = ("train.phases.1.lr=1e-4", "train.phases.1.sequence_length=16", "train.phases.1.data.seed=7")
    assert len({id, *(run_id(recipe_with(override)) for override in others)}) == 4


def test_a_recipe_without_phases_has_none_and_its_old_id() -> None:
    recipe = recipe_with("train.phases=null", "train.steps=5", "data.validation={path: v.jsonl}")
    assert phase_spans(recipe) == ()
    assert written_steps(recipe) == 5
    assert run_id(recipe) == "bede10ec"


def test_phases_are_written_and_read_back() -> None:
    recipe = recipe_with("train.phases.1.rope_base=2e4", "train.phases.1.layout={cp: 2}")
    again = parse_recipe(to_yaml(recipe))
    assert again.train.phases == recipe.train.phases
    assert list(again.data.validations) == ["one", "two"]
    long = phase_spans(again)[1]
    assert (long.name, long.start, long.end, long.run_samples, long.run_tokens) == ("long", 3, 7, 12, 384)
    assert (long.sequence_length, long.own_sources, long.own_layout, long.first_sample) == (64, True, True, 0)


def test_phases_ask_for_no_more_positions_than_the_model_has() -> None:
    sizes = "layers: 1, hidden: 8, heads: 1, kv_heads: 1, ffn: 8, vocab_size: 64, max_positions: 48"
    with pytest.raises(RecipeError, match="64 is more than the 48 positions"):
        recipe_with(f"model={{config: {{family: llama, {sizes}, rope: {{base: 1.0e4}}}}, init: random}}")
