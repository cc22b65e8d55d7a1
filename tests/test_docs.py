"""What the documentation shows is true: its recipes load, its commands parse, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from trainshed.cli import build_app
from trainshed.recipe import parse_recipe

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "AGENTS.md", *(ROOT / "docs").glob("*.md")])
COMMAND = re.compile(r"^(?:\$ )?(trainshed [^#\n]+)", re.MULTILINE)
FENCED = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)\)")


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in FENCED.findall(page.read_text()) if language in languages]


def commands() -> list[str]:
    shown = [text for page in PAGES for block in blocks(page, "console", "sh", "") for text in COMMAND.findall(block)]
    return sorted({text.split(" > ")[0].strip() for text in shown})


def test_there_is_something_to_check() -> None:
    assert len(commands()) >= 10


@pytest.mark.parametrize("command", commands())
def test_a_command_that_is_shown_parses(command: str) -> None:
    app = build_app()
    tokens = shlex.split(command)[1:]
    app.parse_args(tokens, exit_on_error=False, print_error=False)


def test_the_recipe_of_the_readme_loads() -> None:
    (recipe,) = blocks(ROOT / "README.md", "yaml")
    assert parse_recipe(recipe).name == "llama3-8b-tech"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert broken == []
