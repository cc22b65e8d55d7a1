"""The MinIO and Ray seed, scaled down: S3, convert, a real Ray cluster, real Megatron-LM, the bucket, `PUT /api`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from support.clusters.kubernetes_schemas import all_objects
from support.models.made_tokenizers import gpt2
from support.runs.minio_seed import (
    CHECKPOINTS,
    QUESTIONS,
    MinioSeed,
    RayLine,
    fill_bucket,
    kill_everything,
    losses,
    megatron_sources,
    run_stages,
    same_weights,
)
from support.servers.s3_server import S3Server
from support.servers.shared_daemons import free_ports
from trainshed.checkpoints.mirror import MirroredCheckpoint, mirrored_checkpoints
from trainshed.checkpoints.native.folder import latest_complete
from trainshed.cli import run_cli
from trainshed.launch.job import MOUNTED_JOB
from trainshed.launch.kubernetes.objects import RAY_DRIVER_FILE
from trainshed.launch.kubernetes.render import render
from trainshed.launch.ray import script_driver
from trainshed.launch.ray.target import ENDED_STATUSES, RayDashboard
from trainshed.storage import open_folder

pytestmark = [pytest.mark.ray, pytest.mark.s3, pytest.mark.full, pytest.mark.timeout(3600)]
STEPS = 12


@pytest.fixture
def seed(address: str, s3_server: S3Server, s3_bucket: str, tmp_path: Path) -> MinioSeed:
    fill_bucket(s3_bucket, tmp_path)
    variables = s3_server.environment()
    endpoint = variables.pop("AWS_ENDPOINT_URL_S3")
    return MinioSeed(s3_bucket, endpoint, address, tmp_path, variables)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Our own server for an exported model, as the seed's page tells to start it."""
    (port,) = free_ports(1, 20000, 30000)
    command = [sys.executable, "-m", "trainshed", "serve", str(folder), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None
            try:
                urllib.request.urlopen(f"{url}/ready", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def ask(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/api", json.dumps(body).encode(), headers, method="PUT")
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def check_answers(folder: Path, tokenizer: Tokenizer) -> None:
    """Ask the seed's three questions."""
    with served(folder) as url:
        for question, tokens in QUESTIONS.items():
            answer = ask(url, {"prompts": [question], "tokens_to_generate": tokens})
            assert answer["text"][0].startswith(question)
            asked = len(tokenizer.encode(question).ids)
            assert asked < len(answer["tokens"][0]) <= asked + tokens


def in_bucket(seed: MinioSeed, line: RayLine) -> list[MirroredCheckpoint]:
    bucket = open_folder(f"s3://{seed.bucket}/{CHECKPOINTS}/{line.run.parent.name}/{line.run.name}")
    return sorted(mirrored_checkpoints(bucket), key=lambda checkpoint: checkpoint.step)


def test_the_line_with_megatron_is_killed_goes_on_from_the_bucket_and_ends_with_answers(
    seed: MinioSeed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = replace(seed, megatron=megatron_sources(tmp_path))
    undisturbed = RayLine(seed.job(f"train.steps={STEPS}", "checkpoint.keep=null", id="undisturbed"))
    assert [stage.name for stage in undisturbed.job.stages] == [
        *("image", "fetch", "convert", "prepare", "index", "train", "upload", "export")
    ]
    states = undisturbed.ended()
    assert {state.state for state in states.values()} == {"done"}, undisturbed.log()[-6000:]
    assert [checkpoint.step for checkpoint in in_bucket(seed, undisturbed)] == list(range(2, STEPS + 1, 2))

    line = RayLine(seed.job(f"train.steps={STEPS}"))
    while not (there := in_bucket(seed, line)):
        assert not line.has_ended(), line.log()[-6000:]
        time.sleep(0.2)
    # The first checkpoints are in the bucket, and training goes on.
    assert line.states()["train"].state == "running", line.states()
    assert there[-1].step < STEPS
    kill_everything(line)
    line.ended()
    shutil.rmtree(tmp_path / "store" / "runs" / line.run.parent.name / line.run.name)  # and the node's disk is lost
    resumed_from = in_bucket(seed, line)[-1].step

    again = RayLine(seed.job(f"train.steps={STEPS}"))
    assert again.run == line.run
    states = again.ended()
    assert {state.state for state in states.values()} == {"done"}, again.log()[-6000:]
    log = (again.run / "logs/attempt-0001/node-00001.log").read_text()
    assert f"iteration {resumed_from:8d}/" not in log
    assert f"iteration {resumed_from + 1:8d}/" in log
    assert in_bucket(seed, again)[-1].step == STEPS
    assert len(in_bucket(seed, again)) == 3, "checkpoint.keep"
    # As if it had never stopped.
    assert sorted(losses(again.run)) == list(range(resumed_from, STEPS))
    assert same_weights(undisturbed.run / "export", again.run / "export")

    assert run_cli(["checkpoints", str(again.run)]) == 0
    assert str(STEPS) in capsys.readouterr().out
    check_answers(again.run / "export", gpt2())


def test_the_rayjob_of_the_shipped_cluster_trains_and_its_sidecar_fills_the_bucket(
    seed: MinioSeed, tmp_path: Path
) -> None:
    seed = replace(seed, megatron=megatron_sources(tmp_path))
    job = seed.job(f"train.steps={STEPS}", kubernetes=True)
    (rayjob,) = [found for found in all_objects(render(job)) if found["kind"] == "RayJob"]
    variables = os.environ | dict(job.cluster.environment)
    run = run_stages(job, tmp_path, ("fetch", "convert", "prepare", "index"), variables)
    place, pod = tmp_path / "job", rayjob["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    shutil.copy(script_driver.__file__, place / RAY_DRIVER_FILE)
    # What KubeRay does: the entrypoint goes to the head, whose pod has these variables and this sidecar.
    (sidecar,) = [container for container in pod["initContainers"] if container["name"] == "upload"]
    words = [word.replace(MOUNTED_JOB, str(place)) for word in sidecar["args"]]
    plain = {each["name"]: each["value"] for each in pod["containers"][0]["env"] if "value" in each}
    body = {
        "entrypoint": rayjob["spec"]["entrypoint"].replace(MOUNTED_JOB, str(place)),
        "runtime_env": {"env_vars": plain},
    }
    dashboard = RayDashboard(seed.job().cluster)
    bucket, training_seen = open_folder(f"s3://{seed.bucket}/{CHECKPOINTS}/{run.parent.name}/{run.name}"), []
    with subprocess.Popen(words, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as uploader:
        id = dashboard.submit(json.dumps(body).encode())
        while (state := dashboard.job(id)) is None or state["status"] not in ENDED_STATUSES:
            steps = [checkpoint.step for checkpoint in mirrored_checkpoints(bucket)]
            training_seen += steps
            time.sleep(0.2)
        uploader.terminate()  # as a kubelet does when the head has ended
    assert state["status"] == "SUCCEEDED", dashboard.log(id)[-6000:]
    assert uploader.returncode == 128 + 15
    assert training_seen, "checkpoints were in the bucket before training had ended"
    run_stages(job, tmp_path, ("upload", "export"), variables)
    assert sorted(checkpoint.step for checkpoint in mirrored_checkpoints(bucket)) == [STEPS - 4, STEPS - 2, STEPS]
    assert f"iteration {STEPS:8d}/" in dashboard.log(id), "the losses are in the log of the job"
    check_answers(run / "export", gpt2())


def test_the_same_line_with_our_own_engine(seed: MinioSeed) -> None:
    undisturbed = RayLine(seed.job(f"train.steps={STEPS}", id="undisturbed"))
    assert [stage.name for stage in undisturbed.job.stages] == ["fetch", "prepare", "train", "export"]
    states = undisturbed.ended()
    assert {state.state for state in states.values()} == {"done"}, undisturbed.log()[-6000:]
    line = RayLine(seed.job(f"train.steps={STEPS}"))
    bucket = open_folder(f"s3://{seed.bucket}/{CHECKPOINTS}/{line.run.parent.name}/{line.run.name}")
    while latest_complete(bucket, "checkpoints") is None:
        assert not line.has_ended(), line.log()[-6000:]
        time.sleep(0.1)
    kill_everything(line)
    line.ended()
    shutil.rmtree(line.run)
    again = RayLine(seed.job(f"train.steps={STEPS}"))
    states = again.ended()
    assert {state.state for state in states.values()} == {"done"}, again.log()[-6000:]
    got, expected = losses(again.run), losses(undisturbed.run)
    assert min(got) > min(expected), "it goes on from the bucket"
    assert got == {step: loss for step, loss in expected.items() if step in got}
    assert same_weights(undisturbed.run / "export", again.run / "export")
    check_answers(again.run / "export", gpt2())
