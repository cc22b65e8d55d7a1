"""The page about evaluating: what it shows is run, in its order, in an empty folder."""

from __future__ import annotations

import glob
import json
import re
import shlex
from pathlib import Path

import pytest

from trainshed.cli import run_cli

PAGE = Path(__file__).parents[2] / "docs" / "evaluating.md"
FILES = ("questions.yaml", "tasks/capitals.yaml", "tasks/capitals.jsonl")


def write_shown_files(page: str, folder: Path) -> None:
    """Write the files that the page shows: each stands in the block after its name."""
    for name in FILES:
        shown = re.search(rf"`{re.escape(name)}`:\n\n```\w+\n(.*?)```", page, re.DOTALL)
        assert shown is not None, name
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(shown[1])


@pytest.mark.full
def test_every_command_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()
    write_shown_files(page, tmp_path)
    lines = (f"line {number} of a text that nobody trained on, about lists and numbers" for number in range(40))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    blocks = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    commands = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    assert len(commands) == 7
    for command in commands:
        words = [path for word in shlex.split(command)[1:] for path in (glob.glob(word) if "*" in word else [word])]
        assert run_cli(words) == 0, (command, capfd.readouterr().err)
    shown = capfd.readouterr().out
    for score in ("perplexity validation", "perplexity held-out", "questions", "capitals"):
        assert score in shown
