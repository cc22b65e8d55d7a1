"""How every command ends: its exit code, what it says, and when there is a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from trainshed import __version__
from trainshed.cli import build_app, run_cli
from trainshed.cli.console import print_error
from trainshed.errors import TrainshedError


def trainshed(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainshed", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_python_m_trainshed_is_trainshed(tmp_path: Path) -> None:
    done = trainshed("recipes", cwd=tmp_path)
    assert done.returncode == 0
    assert "quickstart" in done.stdout
    script = Path(sys.executable).with_name("trainshed")
    if script.exists():
        same = subprocess.run([str(script), "recipes"], capture_output=True, text=True, check=True, cwd=tmp_path)
        assert same.stdout == done.stdout
    assert trainshed("--version").stdout.strip() == __version__


def test_wrong_input_is_2_failed_work_is_1_and_neither_shows_a_traceback(tmp_path: Path) -> None:
    wrong = trainshed("run", str(tmp_path / "none.yaml"))
    for ending in ("bin", "idx"):
        (tmp_path / f"cut.{ending}").write_bytes(b"MMID")
    failed = trainshed("data", "inspect", str(tmp_path / "cut"))
    assert (wrong.returncode, failed.returncode) == (2, 1)
    for done in (wrong, failed):
        assert done.stdout == ""
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr
    assert "there is no such recipe" in wrong.stderr
    assert "cut.idx: 4 bytes are too few" in failed.stderr


@pytest.mark.parametrize("place", [0, 1, 3])
def test_debug_adds_the_traceback_and_keeps_the_exit_code(tmp_path: Path, place: int) -> None:
    arguments = ["run", str(tmp_path / "none.yaml"), "-o", "json"]
    done = trainshed(*arguments[:place], "--debug", *arguments[place:])
    assert done.returncode == 2
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert "error: " in done.stderr.splitlines()[-2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], 'Unknown command "nonsense". Available commands: run,'),
        (["recipe"], 'Did you mean "recipes"?'),
        (["data", "prepair"], 'Did you mean "prepare"?'),
        (["data", "verify", "x", "-o", "yaml"], 'Choose from: "text", "json"'),
        (["data", "verify", "x", "--tokeniser", "y"], "Did you mean --tokenizer?"),
        (["data", "verify"], "PREFIX is missing"),
        (["schema", "--cluster=perhaps"], "perhaps"),
        (["data", "prepare"], "--input"),
        (["data", "prepare", "--input", "x", "--tokenizer", "t", "--output", "o", "--task", "3/3"], "--task 0/3"),
        (["data", "prepare", "--input", "x", "--tokenizer", "t", "--output", "o", "--task", "half"], "is not i/N"),
        (["run", "quickstart", "--workers", "0"], "--workers 0 is less than one"),
        (["run", "quickstart", "trian.steps=4"], "train"),
    ],
)
def test_what_nobody_understands_is_2_with_what_to_write(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert said in shown.err


def reporting_commands() -> list[list[str]]:
    """Every command that takes `-o json`."""

    def walk(app: App, path: list[str]) -> list[list[str]]:
        nested = [each for name in app if not name.startswith("-") for each in walk(app[name], [*path, name])]
        if app.default_command is None:
            return nested
        arguments = app.assemble_argument_collection(parse_docstring=False)
        return nested + ([path] if any("-o" in argument.names for argument in arguments) else [])

    return walk(build_app(), [])


def test_an_error_is_json_for_every_command_that_reports_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(reporting_commands()) >= 25
    for command in reporting_commands():
        assert run_cli([*command, "--no-such-flag", "-o", "json"]) == 2, command
        shown = capsys.readouterr()
        error = json.loads(shown.out)
        assert (error["schema"], error["exit_code"]) == ("trainshed.error/1", 2), command
        assert error["hint"], command
        assert shown.err.startswith("error: "), command


@pytest.mark.parametrize("asked", [["-o", "json"], ["-o=json"], ["--output", "json"], ["--output=json"]])
def test_what_went_wrong_is_the_report_of_a_command_that_was_asked_for_json(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "none.yaml")
    assert run_cli(["run", missing, *asked]) == 2
    shown = capsys.readouterr()
    error = json.loads(shown.out)
    assert error.keys() == {"schema", "what", "where", "hint", "exit_code"}
    assert (error["what"], error["where"]) == ("there is no such recipe", missing)
    assert "there is no such recipe" in shown.err


def test_where_output_is_a_place_it_asks_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["data", "prepare", "--output", "json", "--tokenizer", "t"]) == 2
    assert capsys.readouterr().out == ""


def test_what_the_system_refuses_is_told_with_its_path_and_is_no_fault_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Nobody makes a folder in /sys, not even root.
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("/mnt/unmounted")
    refused = {
        "/sys/trainshed": "cluster.store=PATH",
        str(tmp_path / "file"): "a file stands where a folder is needed",
        str(tmp_path / "link"): "it is a link to /mnt/unmounted, which is not there",
    }
    for store, hint in refused.items():
        assert run_cli(["run", "quickstart", f"cluster.store={store}"]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"error: {store}")
        assert hint in said
        assert "fault of Trainshed" not in said


def test_a_full_disk_is_no_fault_of_ours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: object, **__: object) -> None:
        Path("/dev/full").write_text("more than it takes")

    monkeypatch.setattr("trainshed.recipe.shipped_recipes", full)
    assert run_cli(["recipes"]) == 1
    said = capsys.readouterr().err
    assert "no space left on device" in said
    assert "free some space" in said
    assert "fault of Trainshed" not in said


@pytest.mark.parametrize("place", ["none", "empty"])
def test_weights_that_are_not_there_are_2_at_every_door(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    weights = str(tmp_path / place)
    (tmp_path / "recipe.yaml").write_text(
        f"name: based\nmodel: {{from: {weights}}}\ntokenizer: {weights}\nlayout: {{dp: 1}}\n"
        "data: {sequence_length: 32, train: [{path: corpus.jsonl}]}\n"
        "train: {steps: 3, global_batch: 2, precision: fp32, optimizer: {lr: 1.0e-3}}\n"
    )
    doors = [[verb, "recipe.yaml"] for verb in ("run", "train", "verify", "plan")]
    doors += [["model", "inspect", weights], ["generate", weights, "--prompt", "a"]]
    doors += [["model", "convert", weights, "out", "--to", "hf"], ["model", "compare", weights, weights]]
    for door in doors:
        assert run_cli(door) == 2, door
        assert weights in capsys.readouterr().err, door


def test_nothing_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli([]) == 0
    assert "Usage: trainshed COMMAND" in capsys.readouterr().out


def test_a_fault_of_ours_is_1_with_a_way_to_tell_us(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("trainshed.recipe.shipped_recipes", broken)
    assert run_cli(["recipes"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ZeroDivisionError: division by zero\n")
    assert "run it again with --debug" in said
    assert "Traceback" not in said
    assert run_cli(["recipes", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_broken_pipe_that_is_not_our_readers_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("trainshed.recipe.shipped_recipes", broken)
    assert run_cli(["recipes"]) == 1
    assert "BrokenPipeError" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_failure() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([sys.executable, "-m", "trainshed", "schema"], stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_interrupting_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainshed.recipe.shipped_recipes", interrupted)
    assert run_cli(["recipes"]) == 130


def test_an_error_is_printed_as_where_what_and_what_to_write(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise TrainshedError("[bold]it[/bold] failed", where="file.yaml:3", hint="write [x] instead")

    monkeypatch.setattr("trainshed.recipe.shipped_recipes", failing)
    assert run_cli(["recipes"]) == 1
    assert capsys.readouterr().err == "error: file.yaml:3: [bold]it[/bold] failed\n       write [x] instead\n"


def test_every_line_of_a_hint_is_indented(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(TrainshedError("it failed", hint="write this\nor that"))
    assert capsys.readouterr().err == "error: it failed\n       write this\n       or that\n"


@pytest.mark.parametrize(
    ("command", "name"),
    [("run", "RECIPE"), ("model compare", "A"), ("metrics", "RUN_OR_LOG"), ("render quickstart", "--on")],
)
def test_a_missing_argument_has_the_name_that_the_help_gives_it(
    command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(command.split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {name} is missing\n")


def test_a_word_that_a_command_does_not_take_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["recipes", "quickstart"]) == 2
    assert capsys.readouterr().err.startswith("error: `quickstart` is more than `trainshed recipes` takes\n")
    assert run_cli(["man", "a", "b"]) == 2
    assert capsys.readouterr().err.startswith("error: `a`, `b` are more than `trainshed man` takes\n")


def test_an_empty_name_is_not_the_folder_that_one_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    doors = [[verb, ""] for verb in ("status", "metrics", "checkpoints", "cancel", "rm", "stacks", "watch", "logs")]
    doors += [["eval", "", "--perplexity", "validation"], ["generate", "", "--prompt", "a"], ["model", "inspect", ""]]
    doors += [["dash", "", "--save", "runs.html"]]
    for door in doors:
        assert run_cli(door) == 2, door
        assert "the name of the run is empty" in capsys.readouterr().err, door
