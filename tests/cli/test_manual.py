"""The manual page and the completion of shells are made from the commands themselves."""

from __future__ import annotations

import itertools
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from support.missing_parts import missing_part
from trainshed.cli import VERBS, build_app, run_cli
from trainshed.cli.examples import EXAMPLES
from trainshed.cli.manual import manual_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainshed.1"


def test_the_page_of_the_package_is_that_of_the_commands() -> None:
    written = manual_page(build_app())
    assert PAGE.read_text(encoding="utf-8") == written, "write it again: trainshed man > docs/trainshed.1"
    headings = [line.split()[2] for line in written.splitlines() if line.startswith(".SS ")]
    nouns = {"storage", "image"}
    assert set(headings) >= {name.replace("-", r"\-") for name in VERBS if name not in nouns}
    assert written.isascii()


def test_roff_takes_the_page_without_a_warning() -> None:
    if shutil.which("groff") is None:
        missing_part("groff is not installed: apt-get install groff")
    done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", str(PAGE)], capture_output=True, check=True)
    assert done.stderr == b""
    assert b"interrupted" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_verbs_and_their_options(shell: str) -> None:
    script = build_app().generate_completion(shell=shell)  # type: ignore[arg-type]
    for word in ("clusters", "submit", "despite-memory", "prepare"):
        assert word in script


def test_every_command_has_examples_and_all_of_them_can_be_parsed() -> None:
    assert set(VERBS) - set(EXAMPLES) == {"storage", "image"}, "their only verbs say what they do"
    for command, examples in EXAMPLES.items():
        for example in examples:
            # What a shell would take away: a pipe, a redirection.
            words = list(itertools.takewhile(lambda word: word not in "|>", shlex.split(example)))
            assert words[: 1 + len(command.split())] == ["trainshed", *command.split()]
            build_app().parse_args(words[1:], exit_on_error=False, print_error=False)


def test_help_shows_a_glob_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    run_cli(["init", "--help"])
    assert "data/*.jsonl" in capsys.readouterr().out.split("Examples")[0]


def test_a_flag_that_is_off_by_default_has_no_opposite(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("sweep", "submit", "render", "open", "exec", "checkpoints", "doctor", "metrics", "schema"):
        run_cli([command, "--help"])
        assert "--no-" not in capsys.readouterr().out, command
