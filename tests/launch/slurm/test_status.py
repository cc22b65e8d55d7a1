"""How a stage stands, in a sentence, from what Slurm's programs print; texts are those of Slurm 22.05."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from trainshed.launch.slurm.client import SlurmClient
from trainshed.launch.slurm.status import stage_state
from trainshed.launch.slurm.target import parse_time_limit
from trainshed.launch.target import StageState
from trainshed.recipe import load_cluster

SHOWN = (
    "JobId=7{array} JobName=small-1-train UserId=me(1) GroupId=me(1) MCS_label=N/A Priority=1 Nice=0 Account=(null) "
    "QOS=(null) JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 "
    "ExitCode={exits} RunTime=00:00:01 NodeList={nodes} Comment=JobState=COMPLETED\n"
)
SCONTROL = """#!/bin/sh
if [ "$2" = hostnames ]; then echo n3; echo n4; exit; fi
[ -s "{folder}/scontrol.txt" ] || {{ echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; }}
cat "{folder}/scontrol.txt"
"""
SACCT = """#!/bin/sh
[ -s "{folder}/sacct.txt" ] || {{ echo 'Slurm accounting storage is disabled' >&2; exit 1; }}
cat "{folder}/sacct.txt"
"""


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmClient:
    """Programs that print what the test has written."""
    for name, text in {"scontrol": SCONTROL, "sacct": SACCT}.items():
        (tmp_path / name).write_text(text.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"name": "c", "target": "slurm", "machine": "cpu"}))
    return SlurmClient(load_cluster(tmp_path / "cluster.yaml"))


def shown(state: str, reason: str = "None", **changed: object) -> str:
    values = {"array": "", "restarts": 0, "exits": "0:0", "nodes": "(null)"} | changed
    return SHOWN.format(state=state, reason=reason, **values)


def ask(client: SlurmClient, folder: Path, *lines: str) -> StageState:
    (folder / "scontrol.txt").write_text("".join(lines))
    return stage_state(client, str(folder), "train", "7")


def ended(folder: Path, start: str, code: int, what: str) -> None:
    (folder / "starts" / start).mkdir(parents=True)
    (folder / "starts" / start / "order.json").write_text(json.dumps({"exit_code": code, "what": what}))


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("Resources", "waits for nodes to become free"),
        ("Priority", "waits behind jobs of higher priority"),
        ("Dependency", "waits for the stage before it"),
        ("DependencyNeverSatisfied", "never runs: the stage before it failed"),
        ("BeginTime", "was queued again a moment ago and may start shortly"),
        ("PartitionNodeLimit", "asks for more nodes than its partition gives a job; it never runs"),
        ("ReqNodeNotAvail,_UnavailableNodes:n2", "waits for nodes that are down, drained or reserved"),
        ("QOSMaxCpuPerUserLimit", "waits for a limit of its account or quality of service (QOSMaxCpuPerUserLimit)"),
        ("AssocGrpGRES", "waits for a limit of its account or quality of service (AssocGrpGRES)"),
        ("SomethingNew", "waits: SomethingNew"),
    ],
)
def test_a_job_that_waits_says_what_for(client: SlurmClient, tmp_path: Path, reason: str, sentence: str) -> None:
    state = ask(client, tmp_path, shown("PENDING", reason))
    assert (state.state, state.reason) == ("waiting", sentence)


@pytest.mark.parametrize(
    ("state", "exits", "sentence"),
    [
        ("FAILED", "3:0", "exit code 3"),
        ("FAILED", "0:9", "was killed by signal 9"),
        ("OUT_OF_MEMORY", "0:125", "was killed for want of memory"),
        ("NODE_FAIL", "0:0", "a node was lost"),
        ("TIMEOUT", "0:15", "ran into its time limit"),
    ],
)
def test_a_job_that_failed_says_how_and_repeats_the_last_error(
    client: SlurmClient, tmp_path: Path, state: str, exits: str, sentence: str
) -> None:
    assert ask(client, tmp_path, shown(state, exits=exits)).reason == sentence
    ended(tmp_path, "slurm-7-0-100", 1, "rank 3 failed with OutOfMemoryError")
    # Another job whose number begins alike.
    ended(tmp_path, "slurm-71-0-100", 1, "not this one")
    found = ask(client, tmp_path, shown(state, exits=exits))
    assert (found.state, found.reason) == ("failed", f"{sentence}: rank 3 failed with OutOfMemoryError")


def test_a_job_that_was_queued_again_says_how_its_last_start_ended(client: SlurmClient, tmp_path: Path) -> None:
    ended(tmp_path, "slurm-7-0-100", 1, "rank 1 was killed")
    ended(tmp_path, "slurm-7-1-200", 1, "rank 2 was killed")
    state = ask(client, tmp_path, shown("PENDING", "BeginTime", restarts=2))
    assert state.restarts == 2
    assert state.reason.endswith("may start shortly; its last start ended: rank 2 was killed")


def test_a_job_that_runs_says_where(client: SlurmClient, tmp_path: Path) -> None:
    state = ask(client, tmp_path, shown("RUNNING", nodes="n[3-4]"))
    assert (state.state, state.reason, state.nodes) == ("running", "", ("n3", "n4"))


def test_of_several_parts_the_worst_decides(client: SlurmClient, tmp_path: Path) -> None:
    parts = [shown("COMPLETED"), shown("RUNNING", nodes="n3"), shown("FAILED", exits="2:0"), shown("COMPLETED")]
    assert ask(client, tmp_path, *parts).reason == "1 of 4 parts exit code 2"
    assert ask(client, tmp_path, parts[0], parts[1]).state == "running"
    assert ask(client, tmp_path, parts[0], parts[3]).state == "done"


def test_a_job_that_slurmctld_has_forgotten_is_asked_of_accounting_and_then_of_the_run(
    client: SlurmClient, tmp_path: Path
) -> None:
    found = ask(client, tmp_path)
    assert (found.state, found.reason) == (
        "unknown",
        "Slurm no longer knows it, and it left no account of its end",
    )
    ended(tmp_path, "slurm-7-0-100", 2, "recipe.yaml:3: wrong")
    assert (ask(client, tmp_path).state, ask(client, tmp_path).reason) == ("failed", "recipe.yaml:3: wrong")
    ended(tmp_path, "slurm-7-1-200", 0, "")
    assert ask(client, tmp_path).state == "done"
    (tmp_path / "sacct.txt").write_text("CANCELLED by 0|None|0:15|n[3-4]\n")
    assert ask(client, tmp_path).state == "cancelled"


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("UNLIMITED", None), ("1-12:00:00", 129600), ("2:30:00", 9000), ("30:00", 1800), ("INFINITE", None)],
)
def test_time_limits_are_read_as_slurm_prints_them(written: str, seconds: int | None) -> None:
    assert parse_time_limit(written) == seconds
