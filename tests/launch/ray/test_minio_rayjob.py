"""The MinIO seed on Kubernetes: the shipped recipe and cluster file as objects whose pods are processes on a real Ray.

What its operator does is `support/clusters/pod_ray.py`. The engine's image is a folder with the Megatron-LM that the
recipe names, where AMD's image has it; the bucket is Ceph's.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from support.clusters.pod_runner import POD_MARK, Image, PodRunner
from support.models.made_tokenizers import gpt2
from support.runs.megatron_lm import engine_programs, unpacked
from support.runs.minio_seed import CHECKPOINTS, MinioSeed, check_answers, check_answers_of, fill_bucket
from support.runs.seed_images import fabric_libraries
from support.runs.seed_runs import run_folder, seed_pods, submit, wait_for
from support.servers.s3_server import S3Server
from support.servers.shared_daemons import free_ports
from trainshed.checkpoints.mirror import mirrored_checkpoints
from trainshed.checkpoints.native.folder import latest_complete
from trainshed.launch.job import Job
from trainshed.launch.kubernetes.target import KubernetesTarget
from trainshed.observe.event_log import read_events
from trainshed.storage import LocalStore, open_folder

pytestmark = [pytest.mark.ray, pytest.mark.s3, pytest.mark.full, pytest.mark.timeout(3600)]
STEPS, EVERY = 16, 8
PLACE = "/workspace/Megatron-LM"
"""Where AMD's image has Megatron-LM, and where its containers start."""


@pytest.fixture
def pods(tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[PodRunner]:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    variables = s3_server.environment()
    with seed_pods(tmp_path) as runner:
        runner.server.kinds["/apis/ray.io/v1"] = ["RayJob"]
        runner.secrets["minio-credentials/minio-access-key"] = variables["AWS_ACCESS_KEY_ID"]
        runner.secrets["minio-credentials/minio-secret-key"] = variables["AWS_SECRET_ACCESS_KEY"]
        yield runner


@pytest.fixture
def seed(s3_server: S3Server, s3_bucket: str, tmp_path: Path) -> MinioSeed:
    fill_bucket(s3_bucket, tmp_path)
    variables = s3_server.environment()
    endpoint = variables.pop("AWS_ENDPOINT_URL_S3")
    return MinioSeed(s3_bucket, endpoint, "", tmp_path, variables)


def ray_programs(folder: Path) -> None:
    """What an image has that has Ray: `ray`, and `python`, which KubeRay's submitter calls."""
    folder.mkdir(exist_ok=True)
    for name, words in {"ray": f"{sys.executable} -m ray.scripts.scripts", "python": sys.executable}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (folder / name).chmod(0o755)


def killed_rank(pod: str) -> int:
    """Kill a rank of Megatron-LM in a pod; returns its id."""
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        try:
            is_rank = "pretrain_gpt.py" in words and "torch.distributed.run" not in words
            if is_rank and process.environ().get(POD_MARK) == pod:
                os.kill(process.pid, signal.SIGKILL)
                return process.pid
        except (psutil.Error, ProcessLookupError):
            continue
    raise AssertionError(f"{pod} has no rank")


def printed_losses(run: Path, attempt: int) -> dict[int, str]:
    """The loss of each iteration as Megatron-LM printed it."""
    texts = [log.read_text() for log in sorted(run.glob(f"logs/attempt-{attempt:04d}/node-*.log"))]
    lines = [match for text in texts for match in re.finditer(r"iteration +(\d+)/.*lm loss: (\S+)", text)]
    return {int(line[1]): line[2] for line in lines}


def nodes_of(pods: PodRunner) -> list[str]:
    """The names of the pods of the Ray cluster that runs now, the head's first."""
    (ray,) = pods.rays.values()
    return [pod.name for pod in ray.nodes]


def bucket_of(seed: MinioSeed, job: Job) -> str:
    return f"s3://{seed.bucket}/{CHECKPOINTS}/{Path(job.run).parent.name}/{Path(job.run).name}"


def test_the_rayjob_trains_with_the_shipped_megatron_survives_a_killed_rank_and_fills_the_bucket(
    seed: MinioSeed, pods: PodRunner, tmp_path: Path
) -> None:
    seed = replace(seed, megatron=unpacked("0.12.3", tmp_path / "image"))
    job = seed.job(f"train.steps={STEPS}", f"checkpoint.every={EVERY}", kubernetes=True)
    assert [stage.name for stage in job.stages] == [
        *("image", "fetch", "convert", "prepare", "index", "train", "upload", "export")
    ]
    assert (job.stage("train").nodes, job.stage("train").gpus_per_node) == (2, 2)
    path = engine_programs(Path(PLACE), tmp_path / "programs")
    ray_programs(tmp_path / "programs/bin")
    folders = {PLACE: tmp_path / "image/0.12.3", **fabric_libraries(job.cluster, tmp_path / "libraries")}
    variables = {"PATH": path, "LD_LIBRARY_PATH": next(iter(set(folders) - {PLACE}))}
    pods.images[str(job.stage("train").image)] = Image(folders, variables, working_folder=PLACE)
    submitted, run = submit(job), run_folder(job, pods)
    bucket = open_folder(bucket_of(seed, job))

    killed: list[int] = []
    steps: set[int] = set()

    def kill_a_rank() -> None:
        while not killed:
            time.sleep(0.1)
            if EVERY + 2 in printed_losses(run, 1):
                killed.append(killed_rank(nodes_of(pods)[1]))

    def has_seen_all() -> bool:
        # The bucket has the first checkpoint before the last one is written.
        if EVERY not in steps and STEPS not in printed_losses(run, 2):
            steps.update(checkpoint.step for checkpoint in mirrored_checkpoints(bucket))
        return all(state.state == "done" for state in KubernetesTarget(job.cluster).status(submitted))

    threading.Thread(target=kill_a_rank, daemon=True).start()
    wait_for(pods, job, submitted, "the job to end", has_seen_all)
    assert killed

    first, second = printed_losses(run, 1), printed_losses(run, 2)
    assert sorted(second) == list(range(EVERY + 1, STEPS + 1)), "it goes on from the checkpoint"
    again = set(first) & set(second)
    assert again
    assert {step: first[step] for step in again} == {step: second[step] for step in again}
    assert EVERY in steps, "the sidecar of the head has sent it while training went on"
    assert sorted(checkpoint.step for checkpoint in mirrored_checkpoints(bucket)) == [EVERY, STEPS]
    log = "\n".join(KubernetesTarget(job.cluster).logs(submitted, "train"))
    assert f"iteration {STEPS:8d}/" in log, "the losses are in the log that `trainshed logs` shows"
    assert "starting again, 2 restarts left" in log
    assert json.loads((run / "export/verdict.json").read_text())["passed"]
    check_answers(run / "export", gpt2())


def test_the_rayjob_of_our_own_engine_loses_a_pod_and_goes_on_from_the_bucket(
    seed: MinioSeed, pods: PodRunner, tmp_path: Path
) -> None:
    (port,) = free_ports(1, 20000, 30000)
    job = seed.job(
        *(f"train.steps={STEPS}", f"checkpoint.every={EVERY}", f"export.to=s3://{seed.bucket}/models/trained"),
        f"serve={{gpus: 0, port: {port}}}",
        kubernetes=True,
    )
    assert [stage.name for stage in job.stages] == ["fetch", "prepare", "train", "export", "serve"]
    ray_programs(tmp_path / "programs")
    own = Image({}, {"PATH": f"{tmp_path}/programs:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"})
    pods.images[str(job.cluster.image)] = own
    submitted, run = submit(job), run_folder(job, pods)

    def losses(attempt: int) -> dict[int, float]:
        events = read_events(LocalStore(run), "") if run.is_dir() else ()
        steps = [event for event in events if event["kind"] == "step" and event["attempt"] == attempt]
        return {event["step"]: event["loss"] for event in steps}

    killed: list[int] = []

    def kill_a_pod() -> None:
        while not killed:
            time.sleep(0.1)
            if max(losses(1), default=0) >= EVERY + 1:
                killed.append(pods.rays[next(iter(pods.rays))].nodes[1].process.pid)
                os.kill(killed[0], signal.SIGKILL)

    threading.Thread(target=kill_a_pod, daemon=True).start()
    states = KubernetesTarget(job.cluster).status
    wait_for(pods, job, submitted, "the server", lambda: states(submitted)[-1].state == "serving")
    assert killed
    check_answers_of(f"http://127.0.0.1:{port}", gpt2())

    first, second = losses(1), losses(2)
    assert sorted(second) == list(range(EVERY, STEPS)), "it goes on from the checkpoint"
    assert latest_complete(open_folder(bucket_of(seed, job)), "checkpoints") is not None
    again = set(first) & set(second)
    assert again
    assert {step: first[step] for step in again} == {step: second[step] for step in again}
    assert json.loads((run / "export/verdict.json").read_text())["passed"]
    # What is served is in the bucket too, with checksums.
    copy = open_folder(f"s3://{seed.bucket}/models/trained/{run.parent.name}/{run.name}")
    for file in (run / "export").glob("*.safetensors"):
        assert copy.read(file.name) == file.read_bytes()
    assert [found.path for found in copy.list() if found.path.endswith("manifest.json")]
