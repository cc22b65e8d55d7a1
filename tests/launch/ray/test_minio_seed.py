"""The MinIO and Ray seed, scaled down: S3, convert, a real Ray cluster, real Megatron-LM, the bucket, `PUT /api`."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from support.models.made_tokenizers import gpt2
from support.runs.minio_seed import (
    CHECKPOINTS,
    MinioSeed,
    RayLine,
    check_answers,
    fill_bucket,
    kill_everything,
    losses,
    megatron_sources,
    same_weights,
)
from support.servers.s3_server import S3Server
from trainshed.checkpoints.mirror import MirroredCheckpoint, mirrored_checkpoints
from trainshed.checkpoints.native.folder import latest_complete
from trainshed.cli import run_cli
from trainshed.storage import open_folder

pytestmark = [pytest.mark.ray, pytest.mark.s3, pytest.mark.full, pytest.mark.timeout(3600)]
STEPS = 12


@pytest.fixture
def seed(address: str, s3_server: S3Server, s3_bucket: str, tmp_path: Path) -> MinioSeed:
    fill_bucket(s3_bucket, tmp_path)
    variables = s3_server.environment()
    endpoint = variables.pop("AWS_ENDPOINT_URL_S3")
    return MinioSeed(s3_bucket, endpoint, address, tmp_path, variables)


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
