"""`--help` of every verb: light, complete, and without importing what only the work needs."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest
from cyclopts import App

from trainshed.cli import DATA_VERBS, VERBS, build_app, run_cli

HEAVY = {"torch", "numpy", "obstore", "pyarrow", "tokenizers", "huggingface_hub", "gigatoken", "transformers", "httpx2"}

WALK = """
import contextlib, io, sys
from trainshed.cli import run_cli
for command in {commands!r}:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        code = run_cli([*command.split(), "--help"])
    assert code == 0 and "Usage: trainshed " + command in shown.getvalue(), (command, code, shown.getvalue())
    loaded = sorted(set(sys.modules) & {heavy!r})
    assert not loaded, f"trainshed {{command}} --help imports {{loaded}}"
"""


def commands() -> list[str]:
    """Every verb and group, found by walking the application itself."""

    def walk(app: App, path: str) -> list[str]:
        found = [path]
        for name in app:
            if not name.startswith("-"):
                found += walk(app[name], f"{path} {name}".strip())
        return found

    return walk(build_app(), "")


def test_the_walk_finds_every_verb() -> None:
    assert set(commands()) >= {"", *VERBS, *(f"data {verb}" for verb in DATA_VERBS), "recipes copy"}


def test_no_help_imports_what_only_the_work_needs() -> None:
    code = WALK.format(commands=commands(), heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", commands())
def test_every_parameter_of_every_verb_is_explained(command: str) -> None:
    app = build_app()
    for name in command.split():
        app = app[name]
    assert app.help
    if app.default_command is not None:
        described = re.findall(r"^ {4}(\w+)\n {8}\S", app.default_command.__doc__ or "", re.MULTILINE)
        assert described == list(inspect.signature(app.default_command).parameters)


def test_help_lists_the_verbs_with_their_summaries(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, (_, summary) in VERBS.items():
        assert name in shown
        assert summary[:40] in shown
    assert run_cli(["data", "--help"]) == 0
    shown = capsys.readouterr().out
    for name, (_, summary) in DATA_VERBS.items():
        assert name in shown
        assert summary[:40] in shown


@pytest.mark.parametrize("command", ["plan", "generate", "dash", "submit"])
def test_help_has_no_flag_that_nobody_needs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--empty-" not in shown
    assert "[default: False]" not in shown
