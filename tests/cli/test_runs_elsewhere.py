"""Runs of clusters that cannot be asked: what their folder says is shown, with a line that the scheduler is silent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from support.runs.written_runs import write_run, write_training
from trainshed.cli import run_cli
from trainshed.launch.stored_run import SILENT_SECONDS, stored_run_status
from trainshed.launch.submissions import find_submission, record_submission
from trainshed.launch.target import SubmittedJob
from trainshed.storage import LocalStore
from trainshed.workflow.known_runs import find_run, submitted_run

GONE = {
    "slurm": "name: far\ntarget: slurm\nmachine: cpu\nstore: {store}\n",
    "kubernetes": "name: far\ntarget: kubernetes\nmachine: cpu\nstore: {store}\nkubernetes: {{namespace: team}}\n",
    "ray": "name: far\ntarget: ray\nmachine: cpu\nstore: {store}\nray: {{address: 'http://127.0.0.1:9'}}\n",
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run in a store that no cluster has by default, without a scheduler's program or a kubeconfig."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return write_run(tmp_path / "shared")


def submit(run: Path, target: str, cluster: str | None = None) -> None:
    job = SubmittedJob("proof-x", str(run), target, {"prepare": "16", "train": "17"})
    text = cluster or GONE[target].format(store=run.parents[2])
    record_submission("proof", "x", 6, job, text)


@pytest.mark.parametrize("target", sorted(GONE))
def test_the_folder_says_how_a_run_stands_whose_scheduler_is_gone(
    target: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_training(run)
    submit(run, target)
    (run / "logs" / "attempt-0001").mkdir(parents=True)
    (run / "logs" / "attempt-0001" / "rank-00000.log").write_text("step 6/6\n")
    assert run_cli(["status", "proof"]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("proof/x on far: done, step 6 of 6, loss 2.5000")
    assert last.startswith(f"  {target} cannot be asked: ")
    assert last.endswith("; this is what the run's folder says")
    assert run_cli(["ls", "-o", "json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["runs"]
    assert (listed["run"], listed["cluster"], listed["state"]) == ("proof/x", "far", "done")
    assert run_cli(["logs", "proof"]) == 0
    assert capsys.readouterr().out == "step 6/6\n"
    assert run_cli(["watch", "proof", "--once"]) == 0
    shown = capsys.readouterr().out
    assert "proof/x on far: done, attempt 1" in shown
    assert f"{target} cannot be asked" in shown


def test_without_folder_and_scheduler_it_says_both(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submit(Path("/nowhere/runs/proof/x"), "slurm")
    for verb in ("status", "watch"):
        assert run_cli([verb, "proof", *(["--once"] if verb == "watch" else [])]) in (1, 2)
        assert "there is no `" in capsys.readouterr().err
    assert run_cli(["ls", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["state"] == "unknown"


def change_times(run: Path, seconds: float) -> None:
    for file in (run / "events").rglob("*.jsonl"):
        events: list[dict[str, Any]] = [orjson.loads(line) for line in file.read_bytes().splitlines()]
        lines = [orjson.dumps(event | {"time": event["time"] + seconds}) + b"\n" for event in events]
        file.write_bytes(b"".join(lines))


def test_a_run_of_other_hosts_is_running_while_it_writes_events_and_unknown_when_it_is_silent(run: Path) -> None:
    write_training(run, end=None)
    (run / "health" / "attempt-0001").mkdir(parents=True)
    (run / "health" / "attempt-0001" / "hosts.json").write_text("{}")
    status = stored_run_status(LocalStore(run), 20)
    assert status.state == "running"
    assert "its last event was " in status.reason
    assert status.progress.eta_seconds
    change_times(run, -2 * SILENT_SECONDS)
    status = stored_run_status(LocalStore(run), 20)
    assert (status.state, status.progress.eta_seconds) == ("unknown", None)
    assert "whether it still runs cannot be seen from here" in status.reason


def test_a_bucket_that_pods_mount_is_read_as_a_bucket(run: Path) -> None:
    cluster = (
        "name: gke\ntarget: kubernetes\nmachine: cpu\nstore: /gcs/team\n"
        "volumes: [{mount: /scratch, host: /mnt}, {mount: /gcs, bucket: my-bucket, options: [only-dir=shared/a]}]\n"
    )
    submit(Path("/gcs/team/runs/proof/x"), "kubernetes", cluster)
    submission = find_submission("proof")
    assert submitted_run(submission).home == "gs://my-bucket/shared/a/team/runs/proof/x"
    assert submission.cluster.bucket_address("/gcs") == "gs://my-bucket/shared/a"
    assert submission.cluster.bucket_address("/gcs2/x") is None
    assert submission.cluster.bucket_address("/scratch/x") is None
    assert find_run("proof").home == "gs://my-bucket/shared/a/team/runs/proof/x"
