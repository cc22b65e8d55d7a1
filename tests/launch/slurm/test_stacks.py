"""`trainshed stacks` on a real Slurm: an overlapping step reads the ranks of all nodes, and they go on."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import orjson
import pytest

from support.clusters.slurm_runs import SlurmRuns
from trainshed.cli import run_cli
from trainshed.launch.job import Stage
from trainshed.launch.submissions import record_submission
from trainshed.recipe import to_yaml

pytestmark = pytest.mark.slurm

RANK = """
import os, time
def stands_here():
    open(f"up-{os.environ['RANK']}", "w").close()
    while True:
        time.sleep(0.1)
stands_here()
"""


def test_the_ranks_of_all_nodes_are_read_by_a_step_beside_them(
    slurm_runs: SlurmRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "store/runs/scripts/1"
    variables = f'RANK="$SLURM_NODEID" TRAINSHED_RUN_FOLDER={shlex.quote(str(folder))}'
    script = f"cd {shlex.quote(str(folder))}\n{variables} exec {sys.executable} -c {shlex.quote(RANK)}\n"
    job = slurm_runs.script_job((Stage("train", nodes=2), script))
    run = slurm_runs.submit(job)
    record_submission("scripts", "1", None, run.submitted, to_yaml(job.cluster))
    run.until(lambda: len(list(folder.glob("up-*"))) == 2, "both ranks")
    capfd.readouterr()
    assert run_cli(["stacks", "scripts/1", "-o", "json"]) == 0
    report = orjson.loads(capfd.readouterr().out)
    assert report["live"]
    assert [group["ranks"] for group in report["groups"]] == [[0, 1]]
    assert report["groups"][0]["stack"][-1].endswith("in stands_here")
    assert run_cli(["stacks", "scripts/1", "--rank", "1"]) == 0
    assert "rank 1 on " in capfd.readouterr().out
    assert run_cli(["stacks", "scripts/1", "--dry-run"]) == 0
    printed = capfd.readouterr().out
    assert printed.startswith(f"srun --jobid={run.id()} --overlap --ntasks-per-node=1 python3 - ")
    assert run.states()["train"].state == "running"
