"""A plain terminal: any encoding, sixty columns, no colours, Ctrl-C at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from support.models.made_tokenizers import gpt2, save
from trainshed import __main__ as program
from trainshed.cli import run_cli
from trainshed.signals import delayed_interrupt

PLAN = ["plan", "--model", "llama3-8b", "--gpu", "h100", "--gpus", "8", "--seq", "8192", "--global-batch", "64"]


def printed_in(environment: dict[str, str], *arguments: str) -> bytes:
    done = subprocess.run(
        [sys.executable, "-m", "trainshed", *arguments], env=os.environ | environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_report_is_written_in_plain_letters_where_the_terminal_has_no_others() -> None:
    shown = printed_in({"PYTHONIOENCODING": "ascii", "COLUMNS": "100"}, *PLAN).decode("ascii")
    assert shown.startswith("llama3-8b on 8 x h100-sxm\n")
    assert "?" not in shown


def test_in_the_c_locale_signs_become_plain_letters_and_other_text_stays(tmp_path: Path) -> None:
    plain = {"LC_ALL": "C", "COLUMNS": "60"}
    assert printed_in(plain, *PLAN).isascii()
    assert printed_in(plain, "run", "--help").isascii()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("# Etüde\ntrainshed: 1\nname: etude\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "trainshed", "run", str(recipe), "train.stepsé=1"],
        env=os.environ | plain,
        capture_output=True,
        check=False,
    )
    assert "stepsé".encode() in done.stderr, "a person's own words are not lost"


def test_no_colours_where_nobody_wants_them() -> None:
    assert b"\x1b" not in printed_in({"NO_COLOR": "1", "COLUMNS": "60"}, *PLAN)


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], PLAN, ["recipes"]], ids=" ".join)
def test_sixty_columns_are_enough(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert run_cli(arguments) == 0
    wide = [line for line in capsys.readouterr().out.splitlines() if len(line) > 60]
    assert wide == []


def test_ctrl_c_while_the_program_is_loaded_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "trainshed.cli", Interrupted("trainshed.cli"))
    with pytest.raises(SystemExit) as left:
        program.main()
    assert left.value.code == 130


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["data", "prepare"], "stopped by Ctrl-C; the same command goes on where it was\n"),
        (["plan"], "stopped by Ctrl-C\n"),
    ],
)
def test_ctrl_c_is_answered_in_a_sentence(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainshed.cli.build_app", interrupted)
    assert run_cli(arguments) == 130
    assert capsys.readouterr().err == said


def test_ctrl_c_at_a_terminal_leaves_no_traceback_of_worker_processes(tmp_path: Path) -> None:
    """Five workers are processes of their own, and a terminal sends Ctrl-C to all of them."""
    save(gpt2(), {"eos_token": "<|endoftext|>"}, tmp_path / "tokenizer")
    (tmp_path / "text.jsonl").write_text((json.dumps({"text": "a train leaves the shed " * 40}) + "\n") * 20_000)
    places = ["--tokenizer", "tokenizer", "--input", "text.jsonl", "--output", "tokens/t"]
    process = subprocess.Popen(
        [sys.executable, "-m", "trainshed", "data", "prepare", *places, "--workers", "5"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    first = process.stderr.readline()  # the worker processes are being started
    os.killpg(process.pid, signal.SIGINT)
    said = first + process.communicate(timeout=300)[1]
    assert "Traceback" not in said
    assert process.returncode == 130, said
    assert said.endswith("stopped by Ctrl-C; the same command goes on where it was\n")


def test_ctrl_c_ends_a_check_of_a_layout_by_its_name(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "trainshed", "verify", "quickstart", "--layout", "tp=2", "--steps", "5000"],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    while not any('"kind":"step"' in path.read_text() for path in tmp_path.glob("*/**/events/*/*.jsonl")):
        assert process.poll() is None
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=300)[1]
    assert process.returncode == 130, said
    assert said.endswith("error: the check was stopped by Ctrl-C\n")


def test_ctrl_c_waits_while_torch_is_imported() -> None:
    done: list[str] = []

    def interrupted_import() -> None:
        with delayed_interrupt():
            signal.raise_signal(signal.SIGINT)
            done.append("imported")

    with pytest.raises(KeyboardInterrupt):
        interrupted_import()
    assert done == ["imported"]
