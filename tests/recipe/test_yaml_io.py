"""Traps of YAML, each with what we make of it. Both of PyYAML's parsers must agree."""

from typing import Any

import pytest

from trainshed.errors import RecipeError
from trainshed.recipe.yaml_io import FAST_LOADER, PURE_LOADER, decode_utf8, parse_yaml


@pytest.fixture(params=["fast", "pure"])
def load(request: pytest.FixtureRequest) -> Any:
    loader = FAST_LOADER if request.param == "fast" else PURE_LOADER
    return lambda text: parse_yaml(text, "r.yaml", loader=loader)


def refusal(load: Any, text: str) -> tuple[str | None, str, str | None]:
    with pytest.raises(RecipeError) as caught:
        load(text)
    return caught.value.where, caught.value.what, caught.value.hint


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-4", 1e-4),
        ("3.0e-4", 3e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-2.", -2.0),
        (".inf", float("inf")),
        ("-.inf", float("-inf")),
        ("12", 12),
        ("-3", -3),
        ("1_000_000", 1_000_000),
        ("0x1f", 31),
        ("0o17", 15),
        ("0", 0),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("OFF", "OFF"),
        ("y", "y"),
        ("010", "010"),
        ("0_7", "0_7"),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"),
        ("2024-01-01T10:00:00Z", "2024-01-01T10:00:00Z"),
        ("=", "="),
        ("20B", "20B"),
        ("1.2.3", "1.2.3"),
        ("'1e-4'", "1e-4"),
        ('"null"', "null"),
        ("!!str 12", "12"),
    ],
)
def test_an_unquoted_word_means_what_people_expect(load: Any, written: str, value: object) -> None:
    read = load(f"key: {written}\n").value["key"]
    assert read == value
    assert type(read) is type(value)


def test_nan_is_read_as_a_number(load: Any) -> None:
    read = load("key: .nan").value["key"]
    assert read != read


def test_every_key_and_value_has_line_and_column(load: Any) -> None:
    places = load("a: 1\nb:\n  c: [x,\n      y]\n").places
    assert (places.keys["b", "c"].line, places.keys["b", "c"].column) == (3, 3)
    assert (places.values["b", "c", 1].line, places.values["b", "c", 1].column) == (4, 7)
    assert places.where(("b", "c", 1)) == "r.yaml:4 (b.c.1)"
    assert places.where(("b", "missing")) == "r.yaml:2 (b.missing)"
    assert places.where(("missing",)) == "r.yaml (missing)"


def test_a_key_written_twice_names_both_lines(load: Any) -> None:
    assert refusal(load, "train:\n  steps: 1\n  lr: 2\n  steps: 3\n") == (
        "r.yaml:4",
        "the key `steps` is written twice, on lines 2 and 4",
        "keep one of them",
    )


@pytest.mark.parametrize("text", ["a:\n\tb: 1\n", "a:\n  b: 1\n\tc: 2\n", "a:\n \tb: 1\n"])
def test_a_tab_in_the_indentation_is_named_with_its_line(load: Any, text: str) -> None:
    line = next(number for number, row in enumerate(text.splitlines(), 1) if "\t" in row)
    assert refusal(load, text) == (
        f"r.yaml:{line}",
        "a tab indents this line; YAML wants spaces",
        "replace the tab by spaces",
    )


def test_a_tab_before_a_comment_is_no_trouble() -> None:
    # PyYAML's own parser, which we use only where libyaml is missing, is stricter here than YAML
    assert parse_yaml("a: 1\t# why\n", "r.yaml", loader=FAST_LOADER).value == {"a": 1}


def test_anchors_and_aliases_work(load: Any) -> None:
    assert load("a: &x {n: 1}\nb: *x\n").value == {"a": {"n": 1}, "b": {"n": 1}}


def test_merge_keys_are_refused(load: Any) -> None:
    where, what, hint = refusal(load, "a: &x {n: 1}\nb:\n  <<: *x\n")
    assert where == "r.yaml:3"
    assert what == "merge keys (`<<`) are not supported: each key of a recipe stands where it is read"
    assert hint == "write the keys out; an alias (*name) for a whole value is fine"


def test_an_alias_of_itself_is_refused(load: Any) -> None:
    assert refusal(load, "a: &x\n  b: *x\n")[1] == "an alias refers to the value it stands in"


def test_a_billion_laughs_are_refused(load: Any) -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    assert refusal(load, "\n".join(rows))[1] == "more than 100000 values"


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_an_empty_file_is_said_to_be_empty(load: Any, text: str) -> None:
    assert refusal(load, text) == ("r.yaml", "the file is empty", "`trainshed recipes` lists files to start from")


@pytest.mark.parametrize(("text", "kind"), [("- a\n- b\n", "a list"), ("word\n", "a single value"), ("~\n", "nothing")])
def test_a_file_that_is_no_mapping_is_refused(load: Any, text: str, kind: str) -> None:
    assert refusal(load, text) == (
        "r.yaml:1",
        f"the file holds {kind}, not keys and values",
        "write lines like `name: my-run`",
    )


def test_a_second_document_is_refused(load: Any) -> None:
    assert refusal(load, "a: 1\n---\nb: 2\n") == (
        "r.yaml:2",
        "a second document begins here (`---`)",
        "keep one document in the file",
    )


@pytest.mark.parametrize(
    "text", ["a: !!python/object:os.system x\n", "a: !thing x\n", "a: !!set {x}\n", "a: !!int x\n"]
)
def test_tags_are_refused(load: Any, text: str) -> None:
    where, what, hint = refusal(load, text)
    assert where == "r.yaml:1"
    assert what.startswith("the tag `!")
    assert hint == "recipes hold plain values: delete the tag"


@pytest.mark.parametrize("key", ["1", "true", "null", "1.5"])
def test_a_key_that_is_no_word_is_refused(load: Any, key: str) -> None:
    assert refusal(load, f"a:\n  {key}: x\n") == (
        "r.yaml:2",
        f"the key `{key}` is not a word",
        f'write it in quotes: "{key}"',
    )


def test_a_key_that_is_a_list_is_refused(load: Any) -> None:
    assert refusal(load, "? [a, b]\n: x\n")[1] == "a key must be a word"


@pytest.mark.parametrize(("text", "line"), [("a: [1, 2\nb: 3\n", 2), ("a: 'x\n", 2), ("a: b: c\n", 1), ("a: @x\n", 1)])
def test_broken_yaml_says_where_to_look(load: Any, text: str, line: int) -> None:
    where, what, hint = refusal(load, text)
    assert where == f"r.yaml:{line}"
    assert what.startswith("this is not YAML: ")
    assert hint == "look for a missing colon, quote, bracket or comma here or on the line above"


def test_a_control_character_is_named_with_its_line(load: Any) -> None:
    assert refusal(load, "a: 1\nb: x\x07y\n")[:2] == ("r.yaml:2", "a control character stands in the file")


def test_half_a_character_is_refused() -> None:
    # libyaml refuses the escape itself
    with pytest.raises(RecipeError, match="half a Unicode character"):
        parse_yaml('a: "\\ud800"\n', "r.yaml", loader=PURE_LOADER)


def test_bytes_that_are_not_utf8_are_named_with_their_line() -> None:
    with pytest.raises(RecipeError) as caught:
        decode_utf8("name: caf\n# Ü".encode("latin-1"), "r.yaml")
    assert (caught.value.where, caught.value.what) == ("r.yaml:2", "the file is not UTF-8 text")


def test_a_byte_order_mark_is_no_trouble() -> None:
    assert decode_utf8(b"\xef\xbb\xbfname: x", "r.yaml") == "name: x"


@pytest.mark.parametrize("digits", ["9223372036854775808", "-9223372036854775808", "0x8000000000000000", "9" * 5000])
def test_a_number_of_more_than_64_bits_is_refused_at_its_line(load: Any, digits: str) -> None:
    where, what, hint = refusal(load, f"a: 1\nb: {digits}\n")
    assert (where, what) == ("r.yaml:2", f"{digits} is more than the 64 bits that a number has")
    assert hint == "write a smaller one; digits that are not a number stand in quotes"
    assert load(f"b: '{digits}'\nc: 9223372036854775807").value == {"b": digits, "c": 2**63 - 1}
