"""Runs of this machine: listed, told, logged, started once at a time, and removed with nothing that others need."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.recipes.text_recipes import write_script, write_small_recipe
from support.runs.small_generators import Notes
from trainshed.cli import run_cli
from trainshed.launch.local import LocalRun, local_runs, lock_run, run_holder
from trainshed.launch.stored_run import stored_run_status
from trainshed.launch.submissions import record_submission, submissions
from trainshed.launch.target import SubmittedJob
from trainshed.recipe import load_cluster, load_recipe
from trainshed.storage import LocalStore
from trainshed.workflow import find_start, note_other_runs, open_run_folder, prepare_run
from trainshed.workflow.run_checkpoints import refuse_other_checkpoints

HOLD = """
import sys, time
from pathlib import Path
from trainshed.launch.local import lock_run
with lock_run(Path(sys.argv[1]), "small/x"):
    print("held", flush=True)
    time.sleep(600)
"""
PATIENCE_SECONDS = 120


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a recipe of six steps was run."""
    return run_in(tmp_path_factory.mktemp("work"), "train.steps=6")


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """That folder as the current one; its runs and its recipe are afterwards as they were."""
    recipe = (trained / "recipe.yaml").read_text()
    shutil.copytree(trained / "store" / "runs", tmp_path / "runs")
    monkeypatch.chdir(trained)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield trained
    shutil.rmtree(trained / "store" / "runs")
    shutil.copytree(tmp_path / "runs", trained / "store" / "runs")
    (trained / "recipe.yaml").write_text(recipe)
    for made in ("small", "apart"):
        shutil.rmtree(trained / made, ignore_errors=True)


def run_in(folder: Path, *overrides: str) -> Path:
    write_script(folder)
    write_small_recipe(folder)
    done = trainshed(folder, "run", "recipe.yaml", *overrides)
    assert done.returncode == 0, done.stderr
    return folder


def trainshed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"XDG_STATE_HOME": str(folder / "state")}
    command = [sys.executable, "-P", "-m", "trainshed", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def only_run(folder: Path) -> LocalRun:
    (run,) = local_runs(folder / "store")
    return run


def report(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert run_cli([*arguments, "-o", "json"]) == code
    return json.loads(capsys.readouterr().out)


@contextmanager
def held(run: Path) -> Iterator[subprocess.Popen[str]]:
    """Somebody else who works on a run."""
    with subprocess.Popen([sys.executable, "-P", "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_a_run_of_this_machine_is_listed_told_and_logged(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = only_run(here)
    (listed,) = report(capsys, "ls")["runs"]
    assert (listed["run"], listed["cluster"], listed["state"]) == (run.run, "local", "done")
    told = report(capsys, "status", "small")
    assert told["schema"] == "trainshed.status/1"
    assert (told["progress"]["step"], told["progress"]["steps"], told["process"]) == (6, 6, None)
    assert run_cli(["status", "small"]) == 0
    assert capsys.readouterr().out.startswith(f"{run.run} here: done, step 6 of 6, loss ")
    assert run_cli(["logs", "small", "--grep", "step 6/6"]) == 0
    assert capsys.readouterr().out.startswith("step 6/6  100%")
    for wrong, said in ((["--rank", "7"], "rank 7 of attempt 1 left no log"), (["--attempt", "4"], "no attempt 4")):
        assert run_cli(["logs", "small", *wrong]) == 1
        assert said in capsys.readouterr().err
    assert run_cli(["cancel", "small"]) == 0
    assert "had already ended" in capsys.readouterr().out
    assert run_cli(["exec", "small", "ls"]) == 2
    assert "was not submitted from here" in capsys.readouterr().err


@pytest.mark.parametrize("called", ["small", "{run}", "{job}", "{folder}", "recipe.yaml"])
@pytest.mark.parametrize(
    "verb", [["status"], ["logs"], ["cancel"], ["checkpoints"], ["model", "inspect"], ["generate"], ["rm", "--yes"]]
)
def test_every_verb_takes_the_same_names_of_a_run(
    verb: list[str], called: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = only_run(here)
    name = called.format(run=run.run, job=f"{run.name}-{run.id}", folder=run.folder)
    # A folder of that name which is not a run, as `recipes copy` makes one for a recipe's scripts.
    (here / "small").mkdir()
    more = ["--prompt", "one two", "--max-tokens", "2", "--device", "cpu"] if verb == ["generate"] else []
    assert run_cli([*verb, name, *more]) == 0
    assert run.folder.exists() == (verb[0] != "rm")


@pytest.mark.parametrize("verb", [["status"], ["logs"], ["checkpoints"], ["model", "inspect"], ["rm"], ["cancel"]])
def test_a_name_that_nobody_knows_is_2_and_names_those_that_are(
    verb: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli([*verb, "nothing"]) == 2
    assert only_run(here).run in capsys.readouterr().err


def test_a_recipe_that_was_changed_since_names_the_runs_there_are(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (here / "recipe.yaml").read_text()
    (here / "recipe.yaml").write_text(text.replace("lr: 1.0e-3", "lr: 2.0e-3"))
    assert run_cli(["status", "recipe.yaml"]) == 2
    assert f"runs of this name: {only_run(here).run}" in capsys.readouterr().err


def test_another_store_is_looked_through_by_its_cluster_file(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(f"name: mine\ntarget: local\nstore: {here}/store\n")
    monkeypatch.chdir(tmp_path)
    assert report(capsys, "ls")["runs"] == []
    assert [each["state"] for each in report(capsys, "ls", "--on", "mine.yaml")["runs"]] == ["done"]
    assert report(capsys, "status", "small", "--on", "mine.yaml")["state"] == "done"


def test_a_run_that_goes_on_is_told_followed_and_stopped_from_elsewhere(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-P", "-m", "trainshed", "run", "recipe.yaml", "train.steps=1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        run = only_run(here)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (stored_run_status(LocalStore(run.folder)).progress.step or 0) <= 6:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        told = report(capsys, "status", "small")
        assert (told["state"], told["process"]["pid"]) == ("running", process.pid)
        assert told["progress"]["eta_seconds"] > 0
        assert told["why"].startswith("step ")
        assert "attempt 2, process" in told["why"]
        # A second start is told who is there, and disturbs nobody.
        assert run_cli(["run", "recipe.yaml", "train.steps=1000000"]) == 2
        said = capsys.readouterr().err
        assert f"small/{run.id} is being worked on already: attempt 2, process {process.pid} on " in said
        assert f"`trainshed cancel small/{run.id}`" in said
        assert run_cli(["rm", "small", "--yes"]) == 2
        assert "is running: attempt 2" in capsys.readouterr().err
        assert process.poll() is None
        assert run_cli(["cancel", "small"]) == 0
        assert "stopped after its checkpoint" in capsys.readouterr().out
        _, lines = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "asked to stop by SIGTERM" in lines
    told = report(capsys, "status", "small")
    assert (told["state"], told["progress"]["eta_seconds"]) == ("stopped", None)


def test_a_holder_that_was_killed_holds_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = only_run(here)
    with held(run.folder) as process:
        found = run_holder(run.folder)
        assert found is not None
        assert (found.pid, found.is_here) == (process.pid, True)
        assert run_cli(["train", "recipe.yaml", "train.steps=7"]) == 2
        assert f"process {process.pid}" in capsys.readouterr().err
        process.kill()
        process.wait()
        assert run_holder(run.folder) is None
        with lock_run(run.folder, run.run):
            found = run_holder(run.folder)
            assert found is not None
            assert found.pid == os.getpid()
    assert run_holder(run.folder) is None


def test_a_run_that_was_killed_is_not_called_running(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = next((only_run(here).folder / "events").rglob("*.jsonl"))
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join(line for line in lines if json.loads(line)["kind"] != "end"))
    told = report(capsys, "status", "small", code=1)
    assert (told["state"], told["progress"]["step"]) == ("failed", 6)
    assert "attempt 1 was killed" in told["why"]


def test_a_changed_key_names_the_run_that_exists_and_what_differs(here: Path) -> None:
    def said(*overrides: str) -> str:
        notes = Notes()
        note_other_runs(find_start(load_recipe("recipe.yaml", overrides), load_cluster()), notes)
        return " ".join(notes.said)

    before = only_run(here)
    note = said("train.optimizer.lr=0.002")
    assert f"{before.run} exists at step 6 and differs in train.optimizer.lr (0.001 there, 0.002 here)" in note
    assert "begins at step 0" in note
    assert "seed (the default there, 7 here), data.seed (the default there, 5 here)" in said("data.seed=5", "seed=7")
    # Of a run that goes on, and of another recipe, there is nothing to say.
    assert said("train.steps=9") == said("name=other") == ""
    renamed = before.folder.rename(before.folder.with_name("0fa0c8fa"))
    assert "small/0fa0c8fa exists and is of the same recipe" in (note := said())
    assert "write --id 0fa0c8fa" in note
    renamed.rename(before.folder)


@pytest.mark.parametrize("verb", ["run", "train"])
def test_fewer_steps_than_are_done_is_an_error(verb: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli([verb, "recipe.yaml", "train.steps=4"]) == 2
    said = capsys.readouterr().err
    assert f"6 steps of {only_run(here).run} are done already, and train.steps is 4" in said
    assert "write train.steps=6 or more, or --id NAME" in said
    assert run_cli([verb, "recipe.yaml", "train.steps=null", "train.tokens=256"]) == 2
    assert "train.tokens comes to 4 steps" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["run", "train"])
def test_checkpoints_kept_elsewhere_from_now_on_are_moved_first_or_the_run_would_begin_again(
    verb: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = only_run(here)
    assert run_cli([verb, "recipe.yaml", "checkpoint.to=elsewhere"]) == 2
    said = capsys.readouterr().err
    assert "checkpoint.to" in said
    assert f"the checkpoints of {run.run} are in" in said
    assert "up to step 6, and in elsewhere/small/" in said
    assert "there is none: it would begin again there" in said
    assert "write no `checkpoint.to` to go on" in said
    assert not (here / "elsewhere").exists()
    shutil.copytree(run.folder / "checkpoints", here / "elsewhere" / run.run / "checkpoints")
    refuse_other_checkpoints(load_recipe("recipe.yaml", ["checkpoint.to=elsewhere"]), run.folder)
    shutil.rmtree(here / "elsewhere")


def test_removing_asks_first_says_how_much_and_leaves_what_is_shared(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = only_run(here)
    artefacts = sorted((here / "store" / "artefacts").rglob("*"))
    assert run_cli(["rm", "small"]) == 2
    said = capsys.readouterr().err
    assert str(Path("store/runs") / run.run) in said
    assert "write --yes" in said
    assert run.folder.is_dir()
    data = report(capsys, "rm", "small", "--yes")
    assert (data["run"], data["removed"][0]["kind"]) == (run.run, "run")
    assert data["bytes"] > 10_000
    assert not run.folder.exists()
    assert sorted((here / "store" / "artefacts").rglob("*")) == artefacts
    assert report(capsys, "ls")["runs"] == []


def test_the_record_of_a_submission_goes_with_its_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = only_run(here)
    cluster = "name: mine\ntarget: slurm\nstore: /shared\n"
    record_submission("gone", "0001", 6, SubmittedJob("gone-0001", "/shared/runs/gone/0001", "slurm", {}), cluster)
    record_submission(
        run.name, run.id, 6, SubmittedJob(f"small-{run.id}", str(run.folder.absolute()), "slurm", {}), cluster
    )
    assert len(submissions()) == 2
    assert report(capsys, "rm", "small", "--yes")["record"] is True
    assert not run.folder.exists()
    assert "is not seen here, and stays" in _text(capsys, "rm", "gone", "--yes")
    assert submissions() == []


def _text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert run_cli(list(arguments)) == 0
    return capsys.readouterr().out


def test_cleaning_takes_only_what_no_run_refers_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = run_in(tmp_path, "train.steps=1")
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    first = only_run(here)
    assert run_cli(["run", "recipe.yaml", "train.optimizer.lr=0.002", "train.steps=1"]) == 0
    assert f"{first.run} exists at step 1 and differs in train.optimizer.lr" in capsys.readouterr().err
    # What killed processes leave: an artefact without a manifest, one that was being made, a run half removed.
    left = [here / "store" / path for path in ("artefacts/tokens/0123456789abcdef", "artefacts/text/fed.partial")]
    left.append(here / "store" / "runs" / "small" / ".removed-1")
    for folder in left:
        folder.mkdir()
        (folder / "half").write_bytes(b"x" * 1000)
    data = report(capsys, "clean")
    assert {each["kind"] for each in data["unneeded"]} == {"leftover"}
    assert (data["removed"], data["bytes"]) == (False, 3000)
    assert all(folder.is_dir() for folder in left)
    assert report(capsys, "clean", "--yes")["removed"] is True
    assert not any(folder.exists() for folder in left)
    # Both runs share every artefact: with one of them gone, the other still needs all.
    assert run_cli(["rm", first.run, "--yes"]) == 0
    assert report(capsys, "clean", "--yes")["unneeded"] == []
    other = only_run(here)
    assert open_run_folder(other.folder).steps == 1
    assert run_cli(["generate", other.run, "--prompt", "one", "--max-tokens", "1", "--device", "cpu"]) == 0
    assert run_cli(["rm", other.run, "--yes"]) == 0
    kinds = {Path(each["path"]).parent.name for each in report(capsys, "clean", "--yes")["unneeded"]}
    assert kinds == {"index", "text", "tokenizer", "tokens"}
    assert not [file for file in (here / "store" / "artefacts").rglob("*") if file.is_file() and file.suffix != ".lock"]


def test_nothing_is_cleaned_while_it_is_not_known_what_a_run_needs(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = only_run(here)
    with held(run.folder):
        assert run_cli(["clean", "--yes"]) == 2
        assert "is being prepared" in capsys.readouterr().err
    unprepared = here / "store" / "runs" / "small" / "unprepared"
    unprepared.mkdir()
    (unprepared / "recipe.yaml").write_text((run.folder / "recipe.yaml").read_text())
    assert run_cli(["clean", "--yes"]) == 2
    assert "trainshed rm small/unprepared" in capsys.readouterr().err


def test_a_run_that_another_began_from_is_not_removed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = only_run(here)
    child = here / "store" / "runs" / "child" / "0001"
    child.mkdir(parents=True)
    recipe = (run.folder / "recipe.yaml").read_text().replace("init: random", f"from: {run.folder.absolute()}")
    (child / "recipe.yaml").write_text(recipe)
    assert run_cli(["rm", run.run, "--yes"]) == 2
    assert "is what child/0001 began from" in capsys.readouterr().err
    assert run.folder.is_dir()


def test_checkpoints_that_are_kept_apart_go_with_their_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["run", "recipe.yaml", "train.steps=1", "checkpoint.to=apart", "--id", "far"]) == 0
    assert len(list((here / "apart" / "small" / "far").rglob("manifest.json"))) == 1
    assert run_cli(["checkpoints", "small/far"]) == 0
    data = report(capsys, "rm", "small/far", "--yes")
    assert [each["kind"] for each in data["removed"]] == ["run", "checkpoints"]
    assert not [file for file in (here / "apart").rglob("*") if file.is_file()]


def test_a_broken_manifest_says_what_to_do_and_that_helps(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (manifest,) = (here / "store" / "artefacts" / "tokens").rglob("*.manifest.json")
    manifest.write_text("{")
    error = report(capsys, "run", "recipe.yaml", "train.steps=6", code=1)
    assert "a manifest that cannot be read" in error["what"]
    assert error["hint"].startswith(f"remove it (`rm {manifest.relative_to(here)}`), then run the same command again")
    manifest.unlink()
    assert prepare_run(load_recipe("recipe.yaml", ["train.steps=6"])).sources[0].tokens > 0


def test_a_damaged_record_of_an_attempt_hides_no_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = only_run(here)
    (run.folder / "attempts" / "0001.json").write_bytes(b'{"attempt": 1, "ho')
    (listed,) = report(capsys, "ls")["runs"]
    assert (listed["run"], listed["state"]) == (run.run, "done")
    assert report(capsys, "status", "small")["progress"]["step"] == 6


def test_a_run_that_does_not_say_what_it_began_with_stops_and_says_what_to_do(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = only_run(here).folder / "prepared.json"
    for damage in (b"", b'{"data": {', b"\xff\x00", b"[]", b'{"data": {}}'):
        prepared.write_bytes(damage)
        error = report(capsys, "run", "recipe.yaml", "train.steps=6", code=1)
        assert error["where"] == str(prepared.relative_to(here))
        assert error["what"].startswith("this file is damaged")
        assert "without one delete it, and `trainshed run RECIPE` writes it" in error["hint"]
    assert run_cli(["clean"]) == 1, "what the run needs is not known"
    prepared.unlink()
    assert run_cli(["train", "recipe.yaml", "train.steps=6"]) == 0
    assert prepared.is_file()
