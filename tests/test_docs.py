"""What pages and messages show is true: recipes load, commands exist and take their flags, links lead somewhere."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from trainshed.cli import build_app, run_cli
from trainshed.recipe import parse_recipe

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "AGENTS.md", *(ROOT / "docs").rglob("*.md")])
COMMAND = re.compile(r"^(?:\$ )?(trainshed [^#\n]+)", re.MULTILINE)
FENCED = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
# A command inside a sentence: up to where its backticks, its line or its half of the sentence end.
NAMED = re.compile(r"(?<![\w./@:-])trainshed ([a-z](?:(?!  )[^`\n;…|])*)")
FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z-]+|-[a-z])(?![\w-])")
NOT_A_COMMAND = {"as", "tokens/s"}
"""Of `import trainshed as ts`, and a column of a table."""
LINK = re.compile(r"\]\(([^)#:]+)\)")


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in FENCED.findall(page.read_text()) if language in languages]


def commands() -> list[str]:
    shown = [
        text
        for page in PAGES
        for block in blocks(page, "console", "sh", "")
        for text in COMMAND.findall(block.replace("\\\n", " "))
    ]
    return sorted({text.split(" > ")[0].strip() for text in shown})


def test_there_is_something_to_check() -> None:
    assert len(commands()) >= 10


@pytest.mark.parametrize("command", commands())
def test_a_command_that_is_shown_parses(command: str) -> None:
    app = build_app()
    tokens = shlex.split(command)[1:]
    app.parse_args(tokens, exit_on_error=False, print_error=False)


MADE = re.findall(r"\$\(BIN\)/(trainshed .+)", (ROOT / "Makefile").read_text())


@pytest.mark.parametrize("command", MADE)
def test_a_command_of_the_makefile_parses(command: str) -> None:
    build_app().parse_args(shlex.split(command)[1:], exit_on_error=False, print_error=False)


def string_literals(source: str) -> Iterator[str]:
    """Every text in a Python file, its messages and docstrings among them; what an f-string fills in is left open."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def named_commands() -> list[tuple[str, str]]:
    """Every command that a message, a note, a hint, a shipped file or a page names, and where."""
    source = {file: list(string_literals(file.read_text())) for file in (ROOT / "src").rglob("*.py")}
    shipped = [*(ROOT / "recipes").rglob("*.*"), *(ROOT / "clusters").glob("*.yaml"), *(ROOT / "src").rglob("*.yaml")]
    source |= {file: [file.read_text()] for file in (*PAGES, *shipped, ROOT / "Makefile")}
    return sorted(
        {
            (text.strip(), str(file.relative_to(ROOT)))
            for file, texts in source.items()
            for each in texts
            for text in NAMED.findall(each)
        }
    )


@cache
def flags_of(*command: str) -> frozenset[str] | None:
    """The flags of a command, None where there is no such command."""
    app = build_app()
    for word in command:
        if word not in app:
            return None
        app = app[word]
    if app.default_command is None:  # a noun, which only has verbs
        return frozenset({"--help"})
    arguments = app.assemble_argument_collection(parse_docstring=False)
    return frozenset({"--help", "--debug", *(name for argument in arguments for name in argument.names)})


def test_every_command_that_is_named_exists_and_takes_the_flags_beside_it() -> None:
    wrong = []
    for text, file in named_commands():
        words = text.split()
        first = words[0].rstrip(".,:)'\"")
        if first in NOT_A_COMMAND:
            continue
        pair = flags_of(first, words[1].rstrip(".,:)'\"")) if len(words) > 1 else None
        flags = pair if pair is not None else flags_of(first)
        if flags is None:
            wrong.append(f"{file}: there is no `trainshed {first}`")
            continue
        wrong += [f"{file}: `trainshed {text}` has no {flag}" for flag in FLAG.findall(text) if flag not in flags]
    assert wrong == []


def test_what_a_tunnel_is_offered_to_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for service in ("metrics", "grafana"):
        assert run_cli(["open", "some-run", service]) == 2
        error = capsys.readouterr().err
        assert all(page in error for page in ("serve", "dash", "tensorboard"))


def test_the_recipes_of_the_readme_load() -> None:
    names = [parse_recipe(recipe).name for recipe in blocks(ROOT / "README.md", "yaml")]
    assert names == ["llama3-8b-tech"]


SUBMITTED = re.findall(r"^\$ trainshed submit (recipe\.yaml [^#\n]+)", (ROOT / "README.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("arguments", SUBMITTED)
def test_the_recipe_of_the_readme_is_rendered_for_every_target_it_names(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(blocks(ROOT / "README.md", "yaml")[0])
    assert run_cli(["render", *shlex.split(arguments), "--offline"]) == 0
    assert "llama3-8b-tech" in capsys.readouterr().out


def test_the_recipe_of_the_fine_tuning_page_loads() -> None:
    recipe = parse_recipe(blocks(ROOT / "docs" / "finetuning.md", "yaml")[0])
    assert (recipe.name, recipe.train.mode) == ("my-chats", "finetune")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert broken == []


WALKED = re.findall(r"^\| `([\w/]+\.py)` \| `(\w+)` \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("file", "name"), WALKED)
def test_the_walks_lead_through_functions_that_are_there(file: str, name: str) -> None:
    text = (ROOT / "src" / "trainshed" / file).read_text()
    assert re.search(rf"^(def|class) {name}\b", text, re.MULTILINE), f"{file} has no {name}"
