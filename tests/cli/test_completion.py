"""Completion in the shells themselves: a line is typed in a terminal, TAB is pressed, and what stands there is read."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from support.missing_parts import missing_part
from trainshed.cli import run_cli
from trainshed.cli.completion import Shell

SHELLS: tuple[Shell, ...] = ("bash", "zsh", "fish")
TYPED = {
    "trainshed clust": "trainshed clusters",
    "trainshed data prep": "trainshed data prepare",
    "trainshed submit --despite-m": "trainshed submit --despite-memory",
    "trainshed run my-own": "trainshed run my-own.yaml",
    "trainshed run recipe.yaml --on gke-a3-m": "trainshed run recipe.yaml --on gke-a3-mega",
    "trainshed plan --gpu mi300": "trainshed plan --gpu mi300x",
    "trainshed watch nightl": "trainshed watch nightly",
    "trainshed logs nightly/0": "trainshed logs nightly/0123abcd",
    "trainshed model inspect weig": "trainshed model inspect weights.safetensors",
}
SECONDS = 120.0


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> Shell:
    if shutil.which(request.param) is None:
        missing_part(f"{request.param} is not installed: apt-get install {request.param}")
    return request.param


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's home without any settings, in which `trainshed` is a program."""
    program = tmp_path / "bin" / "trainshed"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m trainshed "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    for name in ("my-own.yaml", "weights.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "store" / "runs" / "nightly" / "0123abcd").mkdir(parents=True)
    (tmp_path / "store" / "runs" / "nightly" / "0123abcd" / "recipe.yaml").touch()
    for name in ("ZSH", "ZSH_CUSTOM", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_shell_completes_commands_options_names_and_files(shell: Shell, home: Path) -> None:
    assert run_cli(["--install-completion", "--shell", shell]) == 0
    assert completed_by(shell, home / "line.txt", list(TYPED)) == TYPED


def completed_by(shell: Shell, result: Path, lines: list[str]) -> dict[str, str]:
    """Type each line and TAB into a new shell; return what then stands on the line."""
    process, terminal = pty.fork()
    if process == 0:
        os.execvp(shell, [shell, "-i"])
    completed = {}
    try:
        # What is typed before the shell reads keys itself is not a TAB to it.
        os.write(terminal, f"touch {result}\r".encode())
        for line in lines:
            wait_for(result, terminal)
            # Ctrl-A goes to the start of the line and Ctrl-E to its end: the line becomes the words of `printf`.
            keys = f"{line}\t\x01printf '%s\\n' \x05 > {result}.part; mv {result}.part {result}\r"
            os.write(terminal, keys.encode())
            wait_for(result, terminal, keep=True)
            completed[line] = " ".join(result.read_text(encoding="utf-8").split())
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)
    return completed


def wait_for(file: Path, terminal: int, *, keep: bool = False) -> None:
    """Wait until the shell has made a file, and read what it shows meanwhile; then remove the file, or keep it."""
    shown = b""
    end = time.monotonic() + SECONDS
    while not file.exists():
        assert time.monotonic() < end, shown.decode(errors="replace")
        if select.select([terminal], [], [], 0.05)[0]:
            shown += os.read(terminal, 65536)
    if not keep:
        file.unlink()


def test_settings_that_are_there_stay_and_a_second_installation_adds_nothing(home: Path) -> None:
    startup = home / ".zshrc"
    startup.write_text("alias l=ls", encoding="utf-8")
    assert run_cli(["--install-completion", "--shell", "zsh"]) == 0
    once = startup.read_text(encoding="utf-8")
    assert once.splitlines()[-2:] == ["alias l=ls", "autoload -Uz compinit && compinit"]
    assert run_cli(["--install-completion", "--shell", "zsh"]) == 0
    assert startup.read_text(encoding="utf-8") == once


def test_the_script_alone_can_be_had(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["--install-completion", "--shell", "bash", "--to", "completions/trainshed.bash"]) == 0
    assert capsys.readouterr().out == f"wrote {Path('completions/trainshed.bash')}\n"
    assert not (home / ".bashrc").exists()


def test_an_unknown_shell_is_asked_for(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SHELL", "BASH_VERSION", "ZSH_VERSION", "FISH_VERSION", "PSModulePath"):
        monkeypatch.delenv(name, raising=False)
    # No program of this path runs under a shell that can be told.
    monkeypatch.setattr("cyclopts.completion.detect.os.getppid", lambda: 0)
    assert run_cli(["--install-completion"]) == 2
    assert "write --shell bash or zsh or fish or powershell" in capsys.readouterr().err
