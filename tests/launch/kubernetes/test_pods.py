"""What was submitted really runs: the driver, the stages and a gang of two, as processes in the pods' own folders."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubernetes_server import TOKEN, KubernetesServer, kubernetes_server
from pod_runner import PodRunner
from small_recipes import recipe_text
from trainshed.launch.job import Job
from trainshed.launch.kubernetes.target import KubernetesTarget
from trainshed.launch.target import StageState, Submitted
from trainshed.line.submission import build_job
from trainshed.observe.reading import read_events, steps
from trainshed.recipe import load_cluster, load_recipe
from trainshed.storage import LocalStore


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for the server, in the place where pods find it, with a token and a namespace."""
    folder = tmp_path_factory.mktemp("account")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=api", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key.pem",
         "-out", folder / "ca.crt"],
        check=True, capture_output=True,
    )  # fmt: skip
    (folder / "token").write_text(TOKEN)
    (folder / "namespace").write_text("ml")
    return folder


@pytest.fixture
def runner(authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PodRunner]:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        message = "pods need root and `unshare` for a mount namespace of their own"
        if os.environ.get("TRAINSHED_REQUIRE_ALL") == "1":
            pytest.fail(message)
        pytest.skip(message)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "ca.crt", authority / "key.pem")
    pods, shared = tmp_path / "pods", tmp_path / "shared"
    pods.mkdir()
    shared.mkdir()
    with kubernetes_server(context) as server:
        monkeypatch.setenv("KUBECONFIG", str(_kubeconfig(server, authority, tmp_path / "config")))
        found = PodRunner(server, pods, "ml", shared, authority)
        yield found
        found.close()


def _kubeconfig(server: KubernetesServer, authority: Path, file: Path) -> Path:
    cluster = {"server": server.url, "certificate-authority": str(authority / "ca.crt")}
    body = {
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": cluster}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "users": [{"name": "me", "user": {"token": TOKEN}}],
    }
    file.write_text(yaml.safe_dump(body))
    return file


def make_job(folder: Path, *overrides: str, **changed: Any) -> Job:
    body: dict[str, Any] = {
        "name": "pods",
        "target": "kubernetes",
        "image": "registry/trainshed:1",
        "python": sys.executable,
        "store": "/mnt/data",
        "nodes": {"default": 2},
        "preflight": False,
        "volumes": [{"mount": "/mnt/data", "pvc": "shared"}],
        "limits": {"grace_seconds": 60, "restarts": 2},
        "environment": {
            "OMP_NUM_THREADS": "1",
            "TRAINSHED_LOOK_SECONDS": "0.2",
            "TRAINSHED_ROLL_CALL_SECONDS": "5",
            "TRAINSHED_FAILURE_GRACE_SECONDS": "5",
        },
        "kubernetes": {"namespace": "ml"},
    }
    (folder / "cluster.yaml").write_text(yaml.safe_dump(body | changed))
    (folder / "recipe.yaml").write_text(recipe_text("dense"))
    recipe = load_recipe(str(folder / "recipe.yaml"), ["layout.dp=2", "checkpoint.every=5", *overrides])
    return build_job(recipe, load_cluster(folder / "cluster.yaml"))


def submit(job: Job) -> Submitted:
    target = KubernetesTarget(job.cluster)
    assert target.check(job) == ["there is no claim shared in namespace ml"]  # the server has no claims
    return target.submit(target.render(job), job)


def states(job: Job, submitted: Submitted) -> dict[str, StageState]:
    return {state.stage: state for state in KubernetesTarget(job.cluster).status(submitted)}


def test_the_whole_line_runs_and_a_gang_that_loses_a_pod_starts_again_and_ends(
    runner: PodRunner, tmp_path: Path
) -> None:
    job = make_job(tmp_path, "train.steps=60")
    submitted = submit(job)
    run = runner.shared / Path(job.run).relative_to("/mnt/data")
    runner.until(lambda: list(run.glob("checkpoints/*/manifest.json")), "a checkpoint")
    before = states(job, submitted)
    assert (before["prepare"].state, before["train"].state) == ("done", "running"), runner.logs()

    (gang,) = [gang for path, gang in runner.gangs.items() if "/jobsets/" in path]
    gang.pods[1].process.send_signal(signal.SIGKILL)
    runner.until(lambda: states(job, submitted)["train"].state in ("done", "failed"), "the training to end")
    after = states(job, submitted)
    assert (after["train"].state, after["train"].restarts) == ("done", 1), runner.logs()
    events = list(read_events(LocalStore(run), ""))
    assert [event["step"] for event in steps(LocalStore(run), "")] == list(range(60))
    assert {event["attempt"] for event in events if event["kind"] == "step"} == {1, 2}
    assert {"install", "meeting", "first_step"} <= {event["name"] for event in events if event["kind"] == "phase"}

    driver = next(path for path in runner.gangs if path.endswith("-driver"))
    runner.until(lambda: runner.server.objects[driver].get("status"), "the driver to end")
    assert runner.server.objects[driver]["status"]["conditions"][0]["type"] == "Complete", runner.logs()


@pytest.mark.full
def test_wrong_input_ends_the_line_at_once_and_says_which_line_to_write(runner: PodRunner, tmp_path: Path) -> None:
    job = make_job(tmp_path, "train.steps=5", "checkpoint.resume=must")
    submitted = submit(job)
    runner.until(lambda: states(job, submitted)["train"].state == "failed", "the training to fail")
    state = states(job, submitted)["train"]
    assert (state.restarts, state.exit_code) == (0, 2), runner.logs()
    assert "checkpoint" in state.reason
