"""How the stages of a Ray job stand, from what Ray and the driver's log say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainshed.errors import InputError, TrainshedError
from trainshed.launch.job import Stage
from trainshed.launch.ray.actors import ActorLocation, actor_death_reason, read_secrets
from trainshed.launch.ray.placement import bundle_fits, format_bundle, parse_quantity, stage_bundle
from trainshed.launch.ray.status import StageLogLine, stage_log_lines, stage_states
from trainshed.launch.ray.target import RayDashboard
from trainshed.recipe import SecretReference, load_cluster

STAGES = ("fetch", "prepare", "train")
LOG = """\
stage fetch runs: 10.0.0.1
stage fetch done
stage prepare runs: 10.0.0.1
stage prepare done
"""
FAILED = """\
stage train runs: 10.0.0.1 10.0.0.2
warning: rank 3 exited with 1; the end of its log:
CUDA error
error: /data/rank-00003.log: rank 3 exited with 1 before all_reduce #7
       the same command goes on from the last checkpoint
"""


def states(status: str, log: str, **more: Any) -> list[tuple[str, str, str]]:
    found = stage_states(STAGES, "x", {"status": status, **more}, log)
    return [(each.stage, each.state, each.reason) for each in found]


def test_a_job_that_ray_has_not_started_waits_with_rays_own_words() -> None:
    message = "Job has not started yet. It may be waiting for resources."
    assert states("PENDING", "", message=message) == [
        ("fetch", "waiting", f"Ray has not started the driver yet: {message}"),
        ("prepare", "waiting", "comes after fetch"),
        ("train", "waiting", "comes after fetch"),
    ]


def test_a_stage_without_room_says_what_is_missing() -> None:
    why = "it takes 2 nodes with 8 CPU and 8 GPU, and 1 of the cluster's 3 nodes are that large"
    log = LOG + str(StageLogLine("train", "waits", why)) + "\n"
    assert states("RUNNING", log)[1:] == [("prepare", "done", ""), ("train", "waiting", why)]


def test_a_running_stage_names_its_nodes() -> None:
    found = stage_states(STAGES, "x", {"status": "RUNNING"}, LOG + "stage train runs: 10.0.0.1 10.0.0.2\n")
    assert (found[2].state, found[2].nodes) == ("running", ("10.0.0.1", "10.0.0.2"))
    assert states("RUNNING", "")[0] == ("fetch", "waiting", "the driver is starting")


def test_a_failed_stage_repeats_the_drivers_error_and_later_ones_never_begin() -> None:
    found = stage_states(STAGES, "x", {"status": "FAILED", "driver_exit_code": 1}, LOG + FAILED)
    assert found[2].reason == "/data/rank-00003.log: rank 3 exited with 1 before all_reduce #7"
    assert (found[2].state, found[2].exit_code) == ("failed", 1)
    killed = states("FAILED", LOG, driver_exit_code=-9, message="Job entrypoint command failed with exit code -9, …")
    assert killed[2][2].startswith("its driver was killed by SIGKILL")
    early = states("FAILED", "stage fetch runs: 10.0.0.1\n", message="Job supervisor actor died: gone\n\tclass_name")
    assert early[0] == ("fetch", "failed", "Job supervisor actor died: gone")
    assert early[2] == ("train", "cancelled", "fetch failed before it")


def test_a_stopped_a_finished_and_a_forgotten_job() -> None:
    assert states("STOPPED", LOG)[1:] == [("prepare", "done", ""), ("train", "cancelled", "stopped on request")]
    assert {state for _, state, _ in states("SUCCEEDED", "")} == {"done"}
    assert "Ray knows no such job" in stage_states(STAGES, "x", None, "")[0].reason


def test_the_log_of_a_stage_is_what_was_said_during_it() -> None:
    assert stage_log_lines(LOG + FAILED, "train") == FAILED.splitlines()
    assert stage_log_lines(LOG, "prepare") == LOG.splitlines()[2:]


def test_a_stage_asks_each_node_for_what_its_ranks_take() -> None:
    train = Stage("train", nodes=2, gpus_per_node=8, ranks_per_node=8)
    assert stage_bundle(train, "GPU") == {"CPU": 8, "GPU": 8}
    assert stage_bundle(train, "MI300X") == {"CPU": 8, "MI300X": 8}
    assert stage_bundle(train, "CPU") == {"CPU": 8}
    assert stage_bundle(Stage("train", nodes=2, ranks_per_node=2), "GPU") == {"CPU": 2}
    prepare = stage_bundle(Stage("prepare", cpus=8, memory="32Gi"), "GPU")
    assert format_bundle(prepare) == "8 CPU and 32 GiB of memory"
    assert bundle_fits(prepare, {"CPU": 8, "memory": 2**36})
    assert not bundle_fits(prepare, {"CPU": 7, "memory": 2**36})
    assert [parse_quantity(text) for text in ("5", "1k", "1.5Ki", "2G")] == [5, 1000, 1536, 2 * 10**9]


def test_an_actors_death_has_a_cause() -> None:
    location = ActorLocation("10.0.0.1", "one", "a1", 17)
    died = actor_death_reason("The actor died", location)
    assert died == "was lost: its Ray actor (process 17 on 10.0.0.1) has died"
    memory = "Task was killed due to the node running low on memory."
    assert actor_death_reason(memory, location) == "was killed by Ray: its node 10.0.0.1 ran low on memory"
    assert "left the Ray cluster" in actor_death_reason("The actor is dead because its node has died.", None)


def test_a_secret_that_a_node_does_not_have_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_TOKEN", "a")
    (tmp_path / "key").write_text("b\n")
    there = {
        "ONE": SecretReference(env="LAB_TOKEN", file=None, k8s=None),
        "TWO": SecretReference(env=None, file=str(tmp_path / "key"), k8s=None),
        "POD": SecretReference(env=None, file=None, k8s="name/key"),
    }
    assert read_secrets(there) == {"ONE": "a", "TWO": "b"}
    with pytest.raises(InputError, match=r"the secret X is not on the node .*: the variable NOT_THERE cannot be read"):
        read_secrets({"X": SecretReference(env="NOT_THERE", file=None, k8s=None)})
    with pytest.raises(InputError, match="the file /not/there cannot be read"):
        read_secrets({"X": SecretReference(env=None, file="/not/there", k8s=None)})


def test_a_dashboard_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lab.yaml").write_text(
        "name: lab\ntarget: ray\nmachine: cpu\nstore: /data\nray: {address: 'http://127.0.0.1:9'}\n"
    )
    dashboard = RayDashboard(load_cluster(tmp_path / "lab.yaml"))
    with pytest.raises(TrainshedError, match=r"no Ray dashboard answers at http://127\.0\.0\.1:9") as refused:
        dashboard.nodes()
    assert refused.value.where == f"{tmp_path}/lab.yaml:5 (ray.address)"
    monkeypatch.setenv("RAY_JOB_HEADERS", "Bearer x")
    with pytest.raises(InputError, match="RAY_JOB_HEADERS is not a JSON object"):
        dashboard.nodes()
