"""The page of every command and flag is written from the application, and holds all of it."""

from __future__ import annotations

import re
from pathlib import Path

from trainshed.cli import DATA_VERBS, MODEL_VERBS, VERBS
from trainshed.cli.reference import command_reference

PAGE = Path(__file__).parents[2] / "docs" / "cli-reference.md"


def test_the_reference_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == command_reference(), "run: python docs/write_reference.py"


def test_it_has_every_verb_and_explains_every_flag() -> None:
    page = command_reference()
    titles = set(re.findall(r"^## trainshed (.+)$", page, re.MULTILINE))
    nouns_without_a_default = {"storage", "image"}
    verbs = {*VERBS} - nouns_without_a_default
    assert titles >= verbs | {f"data {verb}" for verb in DATA_VERBS} | {f"model {verb}" for verb in MODEL_VERBS}
    assert "trainshed worker" not in page, "what only our own jobs call is not shown"
    rows = re.findall(r"^\| `[^\n]*", page, re.MULTILINE)
    assert [row for row in rows if row.endswith("|  |")] == []
