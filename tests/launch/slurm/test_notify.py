"""Messages from a real Slurm job: the secret reaches the agent of the first node, and nothing that stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.clusters.slurm_cluster import SlurmCluster
from support.clusters.slurm_runs import SlurmRuns
from support.servers.webhook_server import PATH, webhook_server

pytestmark = pytest.mark.slurm


def test_the_agent_of_a_job_tells_by_a_secret_that_stays_one(slurm: SlurmCluster, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with webhook_server() as webhook:
        (home / "hook").write_text(webhook.address + "\n")
        runs = SlurmRuns(slurm, tmp_path)
        run = runs.submit(
            runs.job(
                *("layout.dp=2", "train.steps=3", "checkpoint.every=null"),
                notify=[{"webhook": {"secret": "HOOK"}, "on": ["start", "first_step", "end"]}],
                secrets={"HOOK": {"file": str(home / "hook")}},
            )
        )
        state = run.wait()
        runs.end()
        assert state.state == "done", run.all_logs()
        assert webhook.kinds == ["start", "first_step", "end"]
        assert webhook.messages[-1]["run"] == f"proof/{run.folder.name}"
    left = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and home not in path.parents}
    assert [path for path, data in left.items() if PATH.encode() in data] == []
