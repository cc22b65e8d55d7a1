"""The resolved recipe loads back equal, and the id follows what is trained, not where or how long."""

from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from trainshed.recipe import Recipe, load_recipe, parse_recipe, run_id, shipped_recipes, to_yaml


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_loads_back_equal(name: str) -> None:
    recipe = load_recipe(name)
    again = parse_recipe(to_yaml(recipe))
    assert again == recipe
    assert to_yaml(again) == to_yaml(recipe)
    assert run_id(again) == run_id(recipe)


def test_the_resolved_quickstart_is_pinned(golden: Callable[[str, str], None]) -> None:
    recipe = load_recipe("quickstart")
    golden("quickstart.resolved.yaml", f"# id {run_id(recipe)}\n{to_yaml(recipe)}")


def test_plain_yaml_readers_see_the_same_numbers(recipe: Callable[..., Recipe]) -> None:
    # PyYAML takes 1e-08 for text; the dump must not write it so
    plain = yaml.safe_load(to_yaml(recipe("train.optimizer.eps=1e-8", "train.optimizer.lr=1e-22")))
    assert plain["train"]["optimizer"]["eps"] == 1e-8
    assert plain["train"]["optimizer"]["lr"] == 1e-22


@pytest.mark.parametrize("mark", ["\x85", "\u2028", "\u2029", "\ufeff", "\x7f", "\t", "\n", "#", ": "])
def test_odd_characters_in_a_path_survive(recipe: Callable[..., Recipe], mark: str) -> None:
    first = recipe(f'data.train.0.path="a{mark.encode("unicode_escape").decode()}b"')
    assert first.data.train[0].path == (f"a{mark}b",)
    assert parse_recipe(to_yaml(first)) == first


def test_null_is_kept_where_it_says_something(recipe: Callable[..., Recipe]) -> None:
    text = to_yaml(recipe("checkpoint.keep=null", "train.optimizer.clip=null"))
    assert "keep: null" in text
    assert "clip: null" in text
    assert "tokens:" not in text


@pytest.mark.parametrize(
    "change",
    [
        ("train.steps=99",),
        ("train.steps=null", "train.tokens=20B"),
        ("train.steps=null", "train.epochs=2"),
        ("layout.tp=2",),
        ("observe.tensorboard=false",),
        ("checkpoint.every=7",),
        ("engine=megatron",),
        ("resources.nodes=4",),
        ("store=s3://bucket",),
        ("name=other",),
        ("data.skip=[[5, 9]]",),
        ("data.stage=nvme",),
        ("train.precision=bf16",),  # defaults, written out
        ("data.train.0.key=text", "data.train.0.documents=file"),
    ],
)
def test_the_id_stays_where_the_same_training_goes_on(recipe: Callable[..., Recipe], change: tuple[str, ...]) -> None:
    assert run_id(recipe(*change)) == run_id(recipe())


@pytest.mark.parametrize(
    "change",
    [
        "model.preset=tiny-moe",
        "tokenizer=hf://org/other",
        "data.seed=1",
        "data.sequence_length=128",
        "data.train.0.path=other",
        "data.bos=true",
        "data.shards=2",
        "train.global_batch=16",
        "train.optimizer.lr=2e-3",
        "train.precision=fp32",
        "seed=1",
    ],
)
def test_the_id_changes_with_what_is_trained(recipe: Callable[..., Recipe], change: str) -> None:
    assert run_id(recipe(change)) != run_id(recipe())
    assert len(run_id(recipe(change))) == 8


def test_what_is_asked_between_steps_is_not_what_is_trained(recipe: Callable[..., Recipe]) -> None:
    measured = "data.validation={path: v.jsonl}"
    asked = ("train.early_stop={patience: 3}", "data.validation.prompts=[Why?]", "data.validation.answer_tokens=8")
    assert run_id(recipe(measured, *asked, "checkpoint.best={}")) == run_id(recipe(measured))
    assert run_id(recipe(measured)) != run_id(recipe())


def test_a_decay_that_is_stretched_keeps_the_id_and_one_that_is_a_length_does_not(
    recipe: Callable[..., Recipe],
) -> None:
    for name in ("cosine", "linear"):
        schedule = f"train.schedule.name={name}"
        assert run_id(recipe(schedule)) == run_id(recipe(schedule, "train.schedule.decay=40"))
        assert run_id(recipe(schedule)) != run_id(recipe())
    lengths = {run_id(recipe("train.schedule.name=wsd", f"train.schedule.decay={length}")) for length in (3, 4)}
    assert len(lengths) == 2


def test_the_id_of_an_architecture_ignores_what_its_family_fills_in(recipe: Callable[..., Recipe]) -> None:
    sizes = (
        "family: llama, layers: 2, hidden: 64, heads: 4, ffn: 9, vocab_size: 99, max_positions: 512, rope: {base: 1}"
    )
    short = recipe(f"model={{init: random, config: {{{sizes}}}}}")
    long = recipe(f"model={{init: random, config: {{{sizes}, norm: rms, head_dim: 16, kv_heads: 4}}}}")
    assert run_id(short) == run_id(long)
    assert run_id(short) != run_id(recipe(f"model={{init: random, config: {{{sizes}, kv_heads: 2}}}}"))


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda value: value.strip() != "")
tricky = st.sampled_from(
    [
        "no",
        "1e-4",
        "010",
        "null",
        "~",
        "true",
        "1_000",
        "0x1f",
        ".inf",
        "12:30",
        "=",
        "<<",
        "- a",
        "a: b",
        "#x",
        "2024-01-01",
    ]
)
word = text | tricky
paths = word.filter(lambda value: value.strip() != "").map(lambda value: f"./{value}")
positive = st.floats(min_value=1e-300, max_value=1e300)
count = st.integers(1, 10**15)


def sources() -> SearchStrategy[list[dict[str, Any]]]:
    one = st.one_of(
        st.fixed_dictionaries({"path": paths}, optional={"key": word}),
        st.fixed_dictionaries({"path": st.lists(paths, min_size=1, max_size=3), "documents": st.just("line")}),
        st.fixed_dictionaries({"script": word}, optional={"args": st.lists(word, max_size=3)}),
        st.fixed_dictionaries({"tokens": paths}),
    )
    return st.lists(one, min_size=1, max_size=3)


def _without_unread(data: dict[str, Any]) -> dict[str, Any]:
    """Prepared tokens end their documents as they do: `eod` is for text."""
    has_text = any("tokens" not in source for source in data["train"])
    return data if has_text else {key: value for key, value in data.items() if key != "eod"}


def recipes() -> SearchStrategy[dict[str, Any]]:
    optimizer = st.fixed_dictionaries({"lr": positive}, optional={"clip": st.none() | positive, "eps": positive})
    length = st.one_of(
        *(st.fixed_dictionaries({key: count}) for key in ("steps", "tokens")),
        st.fixed_dictionaries({"epochs": positive}),
    )
    train = st.tuples(length, st.fixed_dictionaries({"global_batch": count, "optimizer": optimizer}))
    layout = st.just("auto") | st.fixed_dictionaries(
        {}, optional={"tp": count, "dp": count, "recompute": st.just("full")}
    )
    args = st.dictionaries(
        word.filter(lambda key: key != "<<"), st.none() | st.booleans() | count | positive | word, max_size=3
    )
    return st.fixed_dictionaries(
        {
            "name": st.from_regex(r"[a-z]([-a-z0-9]{0,10}[a-z0-9])?", fullmatch=True),
            "model": st.fixed_dictionaries({"preset": word, "init": st.just("random")}),
            "tokenizer": paths,
            "data": st.fixed_dictionaries(
                {"sequence_length": count, "train": sources()}, optional={"eod": word | st.booleans()}
            ).map(_without_unread),
            "train": train.map(lambda parts: parts[0] | parts[1]),
            "layout": layout,
            "engine": st.fixed_dictionaries({"name": st.just("megatron"), "args": args}),
        },
        optional={"seed": st.integers(0, 2**63), "checkpoint": st.just({"every": None, "async": False})},
    )


@given(recipes())
def test_any_recipe_loads_back_equal(values: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(values)
    dumped = to_yaml(recipe)
    again = parse_recipe(dumped)
    assert again == recipe
    assert to_yaml(again) == dumped


def test_the_best_checkpoint_is_kept_beside_the_newest(recipe: Callable[..., Recipe]) -> None:
    measured = "data.validation={path: v.jsonl}"
    assert recipe().checkpoint.kept == 3
    assert recipe(measured, "checkpoint.best={}").checkpoint.kept == 4
    assert recipe(measured, "checkpoint.best={}", "checkpoint.keep=null").checkpoint.kept is None
