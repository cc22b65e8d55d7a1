"""`key.sub=value`: read by the rules of the file, refused with the command line as the place."""

from collections.abc import Callable

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainshed.errors import RecipeError
from trainshed.recipe import Layout, Recipe, load_cluster, parse_recipe, split_overrides
from trainshed.recipe.overrides import apply_overrides
from trainshed.recipe.yaml_io import SourceMap, YamlDocument, dotted_key, parse_yaml


def apply(value: dict[str, object], *overrides: str) -> dict[str, object]:
    document = YamlDocument(value, SourceMap())
    apply_overrides(document, overrides)
    return document.value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-4", 1e-4),
        ("100", 100),
        ("true", True),
        ("no", "no"),
        ("null", None),
        ("", None),
        ("[0.9, 0.95]", [0.9, 0.95]),
        ("{a: 1e-4, b: no}", {"a": 1e-4, "b": "no"}),
        ('"100"', "100"),
        ("'no'", "no"),
        ("*.jsonl", "*.jsonl"),
        ("s3://b/*.jsonl#x", "s3://b/*.jsonl#x"),
        ("a: b", "a: b"),
        ("a=b=c", "a=b=c"),
        ("@x", "@x"),
        ("!x", "!x"),
        ("  12 ", 12),
    ],
)
def test_a_value_is_read_by_the_rules_of_the_file(written: str, value: object) -> None:
    assert apply({}, f"key={written}") == {"key": value}


def test_a_path_is_made_where_there_was_none() -> None:
    assert apply({"a": None}, "a.b.c=1", "a.b.d=2") == {"a": {"b": {"c": 1, "d": 2}}}


def test_list_elements_are_counted_from_zero_and_may_be_appended() -> None:
    value = {"data": {"train": [{"path": "a"}]}}
    changed = apply(value, "data.train.0.weight=0.5", "data.train.1={path: b}", "data.train.1.weight=0.5")
    assert changed == {"data": {"train": [{"path": "a", "weight": 0.5}, {"path": "b", "weight": 0.5}]}}


def test_a_single_source_is_the_first_of_a_list(base: str) -> None:
    text = base.replace("    - path: corpus/*.jsonl", "    path: corpus/*.jsonl")
    recipe = parse_recipe(text, ["data.train.0.weight=0.5", "data.train.1={path: b, weight: 2}"])
    assert [source.weight for source in recipe.data.train] == [0.5, 2]
    assert recipe.where("data.train.0.path") == "recipe.yaml:9 (data.train.0.path)"
    assert recipe.where("data.train.0.weight") == "command line: data.train.0.weight=…"


def test_quotes_hold_a_step_with_dots_together() -> None:
    assert apply({}, 'stores."s3://my.bucket".region=eu') == {"stores": {"s3://my.bucket": {"region": "eu"}}}
    assert dotted_key(("stores", "s3://my.bucket")) == 'stores."s3://my.bucket"'


def test_short_forms_become_mappings_when_a_key_below_is_set(recipe: Callable[..., Recipe]) -> None:
    assert recipe("layout=auto", "layout.tp=2").layout == Layout(tp=2)
    assert recipe("engine=megatron", "engine.image=x").engine.name == "megatron"
    assert recipe("data=synthetic", "data.sequence_length=64").data.synthetic
    trained = recipe("tokenizer.train.vocab_size=300").tokenizer
    assert not isinstance(trained, str)


def test_a_later_override_wins(recipe: Callable[..., Recipe]) -> None:
    assert recipe("train.steps=5", "train.steps=6").train.steps == 6


def test_an_alias_is_not_changed_through_its_twin() -> None:
    document = parse_yaml("a: &x {n: 1}\nb: *x\n", "r.yaml")
    apply_overrides(document, ["a.n=2"])
    assert document.value == {"a": {"n": 2}, "b": {"n": 1}}


@pytest.mark.parametrize(
    "text", ["train.steps", "=5", "train..steps=5", ".steps=5", "--steps=5=", "a b=5", "", 'a"b=1']
)
def test_what_is_no_override_is_refused(error: Callable[..., RecipeError], text: str) -> None:
    found = error(text)
    if text == "--steps=5=":
        assert found.what == "unknown key `--steps`"
    else:
        assert (found.what, found.where) == (f"`{text}` is not an override", "command line")
        assert found.hint == "write key.sub=value, e.g. train.steps=100"


@pytest.mark.parametrize(
    ("override", "what", "hint"),
    [
        ("data.train.path=x", "data.train is a list of 1", "say which element: data.train.0.path=…"),
        ("data.train.x.path=y", "data.train is a list of 1", "say which element: data.train.0.path=…"),
        ("data.train.path.x=y", "data.train is a list of 1", "say which element: data.train.0.path.x=…"),
        ("data.train.2.path=x", "data.train has 1 element, counted from 0", "data.train.1=… would add one"),
        ("data.skip.1=[1,2]", "data.skip has 0 elements, counted from 0", "data.skip.0=… would add one"),
        ("train.optimizer.betas=[1", "this is not YAML: ", None),
        ("train.steps=9223372036854775808", "9223372036854775808 is more than the 64 bits", "write a smaller one; "),
        ("engine.name=[torch]", "a list is not one of torch, megatron", None),
        ("engine.name={}", "a mapping is not one of torch, megatron", None),
    ],
)
def test_a_wrong_override_names_itself(
    error: Callable[..., RecipeError], override: str, what: str, hint: str | None
) -> None:
    found = error("data.skip=[]", override)
    assert found.what.startswith(what)
    assert found.where == f"command line: {override.split('=')[0]}=…"
    if hint:
        assert (found.hint or "").startswith(hint)


def test_a_value_that_is_not_utf8_is_refused(error: Callable[..., RecipeError]) -> None:
    # how Python hands over a byte of the command line that is not UTF-8
    assert error("data.train.0.path=caf\udce9").what == "the value is not UTF-8 text"


def test_a_key_below_a_word_makes_it_a_mapping_where_text_is_wanted(error: Callable[..., RecipeError]) -> None:
    assert str(error("name.first=x")) == "command line: name.first=… (name): expected text, got a mapping"


def test_cluster_overrides_are_set_apart() -> None:
    assert split_overrides(["train.steps=1", "cluster.store=s3://b", "cluster=x"]) == (
        ["train.steps=1", "cluster=x"],
        ["store=s3://b"],
    )


def test_a_cluster_override_shows_its_prefix_in_errors() -> None:
    with pytest.raises(RecipeError) as caught:
        load_cluster("local", ["nodes.max=0"])
    assert caught.value.where == "command line: cluster.nodes.max=…"


scalars = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)


@given(scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), scalars))
def test_any_value_written_in_flow_style_comes_back(value: object) -> None:
    written = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("...").strip()
    assert apply({}, f"key={written}") == {"key": value}
