"""A stage on CPUs under its agent: one worker, its log and exit code kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import yaml

import trainshed
from support.recipes.small_recipes import recipe_text
from support.recipes.text_recipes import write_recipe, write_script
from trainshed.errors import InputError
from trainshed.launch.agent import run_agent
from trainshed.launch.agent.main import last_error_line
from trainshed.launch.job import JobFile, Stage
from trainshed.observe.event_log import read_events
from trainshed.observe.stages import stage_records
from trainshed.storage import LocalStore


def job_folder(folder: Path, recipe: str, *stages: Stage) -> Path:
    job = folder / "job"
    job.mkdir()
    run = folder / "store" / "runs" / "proof" / "1"
    (job / "job.json").write_text(JobFile("proof-1", str(run), stages, 60, "fp64", trainshed.__version__).to_text())
    (job / "recipe.yaml").write_text(recipe)
    cluster = {"trainshed": 1, "name": "c", "target": "slurm", "machine": "cpu", "store": str(folder / "store")}
    (job / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    return job


def agent(job: Path, stage: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "trainshed", "agent", stage, "--job", str(job)],
        env={**os.environ, "TRAINSHED_START": "start-1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def recorded(run: Path) -> list[tuple[str, str, str | None]]:
    records = stage_records(read_events(LocalStore(run), ""))
    return [(record.name, record.state, record.what) for record in records]


def test_a_stage_is_done_and_its_end_written_down(tmp_path: Path) -> None:
    job = job_folder(tmp_path, recipe_text("dense"), Stage("prepare"))
    done = agent(job, "prepare")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "store" / "runs" / "proof" / "1"
    assert (run / "prepared.json").exists()
    assert (run / "logs" / "prepare" / "part-0000.log").exists()
    assert (run / "starts" / "start-1" / "exit-code").read_text() == "0\n"
    assert recorded(run) == [("prepare", "done", "synthetic tokens, order of 20 steps")]


def test_a_stage_that_fails_keeps_the_workers_exit_code_and_repeats_its_error(tmp_path: Path) -> None:
    # Nothing travelled that could be converted.
    job = job_folder(tmp_path, recipe_text("dense"), Stage("convert", parts=2))
    done = agent(job, "convert", SLURM_ARRAY_TASK_ID="1")
    assert done.returncode == 2
    assert "there are no base weights to convert" in done.stderr
    run = tmp_path / "store" / "runs" / "proof" / "1"
    order = orjson.loads((run / "starts" / "start-1-part-0001" / "order.json").read_bytes())
    assert order["exit_code"] == 2
    assert "there are no base weights to convert" in order["what"]
    assert order["where"] == str(run / "logs" / "convert" / "part-0001.log")
    assert "there are no base weights" in (run / "logs" / "convert" / "part-0001.log").read_text()
    assert recorded(run) == [("convert 2/2", "failed", "there are no base weights to convert")]


def test_a_stage_that_is_killed_is_recorded_by_its_agent(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "{script: numbers.py}").read_text().replace("name: small", "name: proof")
    job = job_folder(tmp_path, recipe, Stage("prepare"))
    write_script(job, "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n")
    assert agent(job, "prepare").returncode != 0
    run = tmp_path / "store" / "runs" / "proof" / "1"
    assert recorded(run) == [("prepare", "failed", "was killed by SIGKILL")]


def test_a_job_or_stage_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there are no files of a job"):
        run_agent("prepare", tmp_path)
    job = job_folder(tmp_path, recipe_text("dense"), Stage("prepare"))
    with pytest.raises(InputError, match="this job has no stage `export`") as raised:
        run_agent("export", job)
    assert raised.value.hint == "it has prepare"


def test_the_agent_itself_needs_no_torch() -> None:
    code = "import sys, trainshed.launch.agent, trainshed.launch.slurm.target; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_last_words_of_a_log_are_its_last_error() -> None:
    assert last_error_line("a\nerror: recipe.yaml:3: wrong\n       write it so\n") == "recipe.yaml:3: wrong"
    assert last_error_line("a\n\n  b  \n\n") == "b"
    assert last_error_line("") == ""
