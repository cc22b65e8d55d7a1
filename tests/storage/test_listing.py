from __future__ import annotations

import fnmatch
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainshed.errors import AddressError, NotFound
from trainshed.storage import copy_tree, expand
from trainshed.storage.listing import compile_glob, is_selected, literal_folder

FILES = [
    "a.jsonl",
    "b.jsonl",
    "b.txt",
    "deep/c.jsonl",
    "deep/er/d.jsonl",
    "deep/er/e[1].txt",
    ".trainshed/manifest.json",
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.jsonl", ["a.jsonl", "b.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "b.jsonl", "deep/c.jsonl", "deep/er/d.jsonl"]),
        ("deep/**", ["deep/c.jsonl", "deep/er/d.jsonl", "deep/er/e[1].txt"]),
        ("?.txt", ["b.txt"]),
        ("[a]*", ["a.jsonl"]),
        ("[!a].jsonl", ["b.jsonl"]),
        ("[a-b].jsonl", ["a.jsonl", "b.jsonl"]),
        ("d*/c.*", ["deep/c.jsonl"]),
        ("deep/er/e[1].txt", ["deep/er/e[1].txt"]),
        ("deep", ["deep/c.jsonl", "deep/er/d.jsonl", "deep/er/e[1].txt"]),
        ("a.jsonl", ["a.jsonl"]),
        ("", FILES[:-1]),
        (".trainshed/*", [".trainshed/manifest.json"]),
    ],
)
def test_what_a_pattern_finds(tree: Path, pattern: str, expected: list[str]) -> None:
    found = expand(f"{tree}/{pattern}")
    assert [each.address for each in found] == [f"{tree}/{name}" for name in expected]
    assert [each.info.size for each in found] == [len(name) for name in expected]


def test_relative_addresses_stay_relative(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    assert [each.address for each in expand("deep/*.jsonl")] == ["deep/c.jsonl"]
    monkeypatch.chdir(tree / "deep")
    assert [each.address for each in expand("../*.txt")] == ["../b.txt"]


def test_nothing_found_says_where_to_look(tree: Path) -> None:
    with pytest.raises(NotFound, match=r"look into .* does not cross folders, '\*\*' does"):
        expand(f"{tree}/*.parquet")
    with pytest.raises(NotFound, match="check the path"):
        expand(f"{tree}/nope")


def test_a_file_name_that_no_manifest_can_hold_is_refused(tmp_path: Path) -> None:
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).touch()
    except OSError:
        pytest.skip("this system has no such names")
    for asked in (str(tmp_path), f"{tmp_path}/*.txt"):
        with pytest.raises(AddressError, match="the name of a file is not UTF-8") as error:
            expand(asked)
        assert (error.value.where or "").endswith(r"/caf\xe9.txt")
    with pytest.raises(AddressError, match="the name of a file is not UTF-8"):
        copy_tree(str(tmp_path), f"{tmp_path}-copy")


def test_a_pattern_on_a_web_server_is_refused() -> None:
    with pytest.raises(AddressError, match="a web server has none"):
        expand("https://example.invalid/*.jsonl")


def test_only_the_folder_before_the_first_glob_character_is_listed() -> None:
    assert literal_folder("a/b/c*/d") == "a/b"
    assert literal_folder("a[1]") == ""
    assert literal_folder("a/b") == "a"


def test_include_and_exclude() -> None:
    assert is_selected("a/b.jsonl", ["*.jsonl"], [])
    assert not is_selected("a/b.jsonl", ["*.txt"], [])
    assert is_selected("a/b.jsonl", ["a/*"], [])
    assert not is_selected("x/a/b.jsonl", ["a/*"], [])
    assert not is_selected("a/b.jsonl", [], ["b.*"])
    assert is_selected("a/b.jsonl", ["*.txt", "*.jsonl"], ["*.gz"])


@given(st.text("ab[]!-*?.^\\", max_size=8), st.text("ab.-!^[]\\", max_size=5))
def test_within_one_name_we_match_as_fnmatch_does(pattern: str, name: str) -> None:
    if "**" in pattern or "[^" in pattern:  # fnmatch has no '**', and takes '^' literally
        return
    try:
        ours = bool(compile_glob(pattern).fullmatch(name))
    except AddressError:
        return
    assert ours == fnmatch.fnmatchcase(name, pattern)
