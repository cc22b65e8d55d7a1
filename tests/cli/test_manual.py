"""The manual page and the completion of shells are made from the commands themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from support.missing_parts import missing_part
from trainshed.cli import VERBS, build_app
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


def test_examples_are_of_commands_that_exist() -> None:
    assert set(EXAMPLES) <= set(VERBS)
