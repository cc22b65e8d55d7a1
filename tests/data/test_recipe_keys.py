"""Whoever comes from a recipe is told its keys, never the flags of another command."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import trainshed.data
from support.recipes.text_recipes import write_recipe
from trainshed.cli import run_cli
from trainshed.data.recipe_keys import RECIPE_KEYS, flags_to_recipe_keys
from trainshed.errors import InputError
from trainshed.recipe import load_recipe
from trainshed.workflow import prepare_run

ROOM = Path(trainshed.data.__file__).parent
# A recipe never merges.
ELSEWHERE = {"merge.py"}
TABLE = {text for pair in RECIPE_KEYS for text in pair}
OF_RUN = {"--workers", "--id", "--target-dir"}
# Two preparations into one prefix: a recipe's artefacts are found by their hash, and waited for.
ONLY_BY_COMMAND = {"--output", "--overwrite", "--encoder gigatoken", "--encoder"}


def messages() -> list[tuple[str, str]]:
    """Every text of the data room that names a flag, with the file it stands in."""
    found = []
    for path in ROOM.rglob("*.py"):
        if path.name in ELSEWHERE:
            continue
        tree = ast.parse(path.read_text())
        documented = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if _has_docstring(node)}
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if id(node) in parts:
                continue
            text = _text(node)
            if text is not None and text not in documented | TABLE and re.search(r"(?<![\w-])--[a-z]", text):
                found.append((path.name, text))
    return found


def _text(node: ast.AST) -> str | None:
    """A text as it is written; what is filled in stands as a number."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _has_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)


def test_every_flag_that_the_data_room_names_has_a_key() -> None:
    assert messages()
    for name, text in messages():
        said = re.sub(r"`trainshed [^`]*`", "", flags_to_recipe_keys(text))
        left = set(re.findall(r"--[a-z-]+", said)) - OF_RUN - ONLY_BY_COMMAND
        assert not left, f"{name}: {text!r} is not said in the words of a recipe"


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ("write --key with the right one", "write `key` with the right one"),
        ("or write --on-bad-line skip to leave", "or write `data.on_bad_line: skip` to leave"),
        ("write --shards 3 or less", "write `data.shards: 3` or less"),
        ("--eod asks for the token", "`data.eod` asks for the token"),
        ("or --no-eod (documents", "or `data.eod: false` (documents"),
        ("known: --keys and x--key", "known: --keys and x--key"),
    ],
)
def test_a_flag_becomes_the_key_that_stands_for_it(flags: str, keys: str) -> None:
    assert flags_to_recipe_keys(flags) == keys


@pytest.mark.parametrize(
    ("source", "content", "overrides", "what", "hint"),
    [
        ("{path: a.dat}", "x", (), "cannot tell from its name", "or write `format` with one of jsonl, json, csv,"),
        ("{path: a.html}", "x", (), "a .html file holds markup beside its text", "or write `format: text` to take it"),
        ("{path: a.csv}", "id,body\n1,x\n", (), "there is no column 'text'", "write `key` with one of its columns"),
        ("{path: a.json}", '[{"text": "x"}]', (), "this is a JSON array", "write `format: json` to read it as one"),
        (
            "{path: a.jsonl}",
            '{"body": "x"}\n',
            (),
            "no key 'text'",
            "its keys are 'body': write `key` with the right one, or write `data.on_bad_line: skip` to leave",
        ),
        ("{path: a.txt, key: body}", "x", (), "`key` is not read: plain text has no fields", "delete `key`"),
        (
            "{path: a.jsonl, documents: line}",
            '{"text": "x"}',
            (),
            "`documents` is not read: it is for plain text, and this is jsonl",
            "a line or a row is a document",
        ),
        ("{path: a.txt}", "x", ("data.shards=3",), "3 shards are asked for", "write `data.shards: 1` or less"),
    ],
)
def test_errors_about_text_name_the_keys_of_the_recipe_and_where_they_stand(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: str,
    content: str,
    overrides: tuple[str, ...],
    what: str,
    hint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / source.removeprefix("{path: ").rstrip("}").partition(",")[0]).write_text(content)
    write_recipe(tmp_path, source, tokenizer="{train: {vocab_size: 257}}")
    assert run_cli(["run", "recipe.yaml", *overrides]) == 2
    said = capsys.readouterr().err
    assert what in said
    assert hint in said
    assert "(data.train" in said or "data.shards=" in said
    assert "--" not in said


def test_a_token_that_the_tokenizer_lacks_is_a_key_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text that is long enough to be a sample or two of it, and more of it")
    recipe = load_recipe(str(write_recipe(tmp_path, "{path: a.txt}", tokenizer="{train: {vocab_size: 257}}")))
    with pytest.raises(InputError, match=r"`data\.eod` asks for the token '<none>'"):
        prepare_run(recipe.model_copy(update={"data": recipe.data.model_copy(update={"eod": "<none>"})}))


def test_a_format_is_read_from_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.dat").write_text("text\n" + "some text that is long enough to be a sample\n" * 3)
    recipe = write_recipe(tmp_path, "{path: a.dat, format: csv}", tokenizer="{train: {vocab_size: 257}}")
    assert prepare_run(load_recipe(str(recipe))).sources[0].documents == 3
