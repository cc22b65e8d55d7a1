"""The AKS seed from its shipped files to a resumed training, with the real Megatron-LM of its image, on a CPU."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
import zstandard

from support.clusters.pod_runner import PodRunner
from support.models.made_tokenizers import CONFIGS, docstrings, gpt2, save
from support.models.tiny_models import tiny_config
from support.runs.megatron_lm import CPU_ARGS
from support.runs.seed_images import cpu_overrides, megatron_image, own_image, pod_overrides
from support.runs.seed_runs import (
    latest_iteration,
    printed_losses,
    run_folder,
    run_to_the_end,
    seed_pods,
    step_losses,
    submit,
    wait_for,
    wait_for_end,
)
from support.servers import hub_server
from support.servers.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from trainshed.checkpoints.mirror import mirrored_checkpoints
from trainshed.cli import run_cli
from trainshed.launch.job import Job
from trainshed.launch.target import target_of
from trainshed.recipe import load_cluster, load_recipe, to_plain
from trainshed.storage import open_folder
from trainshed.workflow.submit import build_job

FILES, READ, STEPS = 6, 4, 8
MEGATRON_IMAGE = "ghcr.io/azure/ai-infrastructure-on-azure/megatron-lm:latest"
OWN_IMAGE = "myregistry.azurecr.io/trainshed:0.1.0"
ARGS = json.dumps(dict(load_recipe("aks-gpt-175b").engine.args) | CPU_ARGS)
"""The recipe's own, and what a CPU wants."""
SMALL = (
    *("train.global_batch=4", "train.precision=fp32", "train.schedule.warmup=1", f"train.steps={STEPS}"),
    *("data.sequence_length=64", "data.shards=2", f"data.train.0.limit={READ}", "resources.nodes=2"),
    *("data.split={train: 0.8, validation: 0.2}", "data.validation={every: 2, batches: 1}", "checkpoint.every=2"),
)
"""What a user changes of the recipe for a test of a minute; two nodes have two ranks each."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hub_server.HubServer]:
    """A corpus and a tokenizer under the names that the recipe reads."""
    texts = docstrings()
    made = save(gpt2(), CONFIGS["gpt2"], tmp_path_factory.mktemp("tokenizer"))
    with hub_server.running() as hub:
        hub.repos["datasets/cerebras/SlimPajama-627B"] = {
            f"train/chunk{1 + number % 2}/example_train_{number}.jsonl.zst": zstandard.compress(
                b"".join(
                    json.dumps({"text": text, "meta": {"redpajama_set_name": "RedPajamaC4"}}).encode() + b"\n"
                    for text in texts[number * 40 : number * 40 + 40]
                )
            )
            for number in range(FILES)
        }
        hub.repos["openai-community/gpt2"] = {path.name: path.read_bytes() for path in made.iterdir()}
        yield hub


@pytest.fixture
def pods(hub: hub_server.HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PodRunner]:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with seed_pods(tmp_path) as runner:
        runner.images[OWN_IMAGE] = own_image()
        yield runner


def seed_job(
    hub: hub_server.HubServer, folder: Path, *overrides: str, id: str | None = None, on: tuple[str, ...] = ()
) -> Job:
    """The shipped recipe on the shipped cluster, scaled down to a tiny GPT; `on` are keys of the cluster."""
    config = tiny_config("gpt2", vocab_size=gpt2().get_vocab_size(), max_positions=64)
    model = {"config": to_plain(config, defaults=False), "init": "random"}
    ours = "engine=torch" in overrides
    own = cpu_overrides() if ours else pod_overrides(folder, "h100-sxm", "infiniband-ndr")
    cluster = load_cluster("aks-nd-h100-v5", [*own, f"environment.HF_ENDPOINT={hub.url}", *on])
    written = f"model={yaml.safe_dump(model, default_flow_style=True, width=10**6).strip()}"
    return build_job(load_recipe("aks-gpt-175b", [written, *SMALL, *overrides]), cluster, id=id)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", ["layout={tp: 2, pp: 2, micro_batch: 1}"])
def test_slim_pajama_trains_loses_a_pod_goes_on_and_is_seen_in_tensorboard(
    layout: str, pods: PodRunner, hub: hub_server.HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = f"engine.args={ARGS}"
    job = seed_job(hub, tmp_path, layout, args)
    pods.images[MEGATRON_IMAGE] = megatron_image("878d65f", "/megatron-lm", tmp_path / "image", job.cluster)
    assert "--use-distributed-optimizer" in job.files["train.sh"]
    submitted, run = submit(job), run_folder(job, pods)
    wait_for(pods, job, submitted, "a checkpoint", lambda: latest_iteration(run) >= 2)
    (gang,) = [gang for path, gang in pods.gangs.items() if "/pytorchjobs/" in path]
    assert len(gang.pods) == 2
    # The others' ranks raise and end, although their checkpoint workers wait for work (`run_program.py`).
    gang.pods[1].process.send_signal(signal.SIGKILL)
    wait_for_end(pods, job, submitted)
    assert latest_iteration(run) == STEPS
    assert gang.restarts >= 1
    # `limit` reads so many of the corpus' files.
    read = {request for request in hub.requests if ".jsonl.zst" in request and "resolve" in request}
    assert len({request.split("example_train_")[1].split(".")[0] for request in read}) == READ

    # Never having stopped gives the same losses.
    whole = seed_job(hub, tmp_path, layout, args, id="whole")
    run_to_the_end(pods, whole)
    assert printed_losses(run_folder(whole, pods)) == printed_losses(run)
    assert sorted(printed_losses(run)) == list(range(1, STEPS + 1))

    assert run_cli(["checkpoints", str(run), "-o", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["step"] for row in listed] == [8, 6, 4]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("lm loss")][-1] == STEPS


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_our_own_engine_trains_the_same_recipe_loses_a_pod_and_goes_on(
    pods: PodRunner, hub: hub_server.HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = ("engine=torch", "layout={tp: 2, pp: 2, micro_batch: 1}", "train.steps=24", "checkpoint.every=4")
    job = seed_job(hub, tmp_path, *recipe)
    submitted, run = submit(job), run_folder(job, pods)
    wait_for(pods, job, submitted, "a checkpoint", lambda: bool(list(run.glob("checkpoints/*/manifest.json"))))
    (gang,) = [gang for path, gang in pods.gangs.items() if "/pytorchjobs/" in path]
    gang.pods[1].process.send_signal(signal.SIGKILL)
    wait_for_end(pods, job, submitted)
    assert gang.restarts >= 1
    whole = seed_job(hub, tmp_path, *recipe, id="whole")
    run_to_the_end(pods, whole)
    assert step_losses(run_folder(whole, pods)) == step_losses(run)
    assert sorted(step_losses(run)) == list(range(24))
    assert run_cli(["checkpoints", str(run), "-o", "json"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)["checkpoints"]] == [24, 20, 16]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"]


@pytest.mark.full
@pytest.mark.s3
@pytest.mark.timeout(3600)
def test_what_reached_the_bucket_while_it_trained_is_all_that_another_cluster_needs(
    s3_server: S3Server, s3_bucket: str, pods: PodRunner, hub: hub_server.HubServer, tmp_path: Path
) -> None:
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    pods.secrets |= {f"bucket/{name}": value for name, value in keys.items()}
    on = (
        f"stores.s3={{endpoint: '{s3_server.endpoint}', addressing: path}}",
        *(f"secrets.{name}={{k8s: bucket/{name}}}" for name in keys),
        "environment.TRAINSHED_UPLOAD_SECONDS=0.2",
    )
    recipe = (
        *(f"engine.args={ARGS}", "layout={tp: 2, pp: 2, micro_batch: 1}", "train.steps=120"),
        "data.validation.every=60",
    )
    bucket = f"s3://{s3_bucket}/experiments"
    job = seed_job(hub, tmp_path, *recipe, f"checkpoint={{every: 10, keep: 2, to: '{bucket}'}}", on=on)
    pods.images[MEGATRON_IMAGE] = megatron_image("878d65f", "/megatron-lm", tmp_path / "image", job.cluster)
    submitted, run = submit(job), run_folder(job, pods)

    def copied() -> list[int]:
        there = open_folder(f"{bucket}/{Path(job.run).parent.name}/{Path(job.run).name}")
        return sorted(row.step for row in mirrored_checkpoints(there))

    wait_for(pods, job, submitted, "a checkpoint", lambda: latest_iteration(run) > 0)
    (gang,) = [gang for path, gang in pods.gangs.items() if "/pytorchjobs/" in path]
    assert [len(pod.sidecars) for pod in gang.pods] == [1, 0], "the first node's alone"
    gang.pods[0].sidecars[0].process.kill()  # wherever it is: it is started again, and goes on
    wait_for(pods, job, submitted, "a checkpoint in the bucket", lambda: bool(copied()))
    assert latest_iteration(run) < 120, "it still trains"
    seen = printed_losses(run)
    pods.lose_everything()
    resumed = copied()[-1]

    run_to_the_end(pods, job)
    log = "".join(path.read_text() for path in run.glob("logs/attempt-*/node-*.log"))
    assert re.search(rf"successfully loaded checkpoint .* at iteration {resumed}\b", log)
    assert min(printed_losses(run)) == resumed + 1
    assert copied() == [110, 120]
    whole = seed_job(hub, tmp_path, *recipe, "checkpoint={every: 10, keep: 2}", id="whole", on=on)
    run_to_the_end(pods, whole)
    without = printed_losses(run_folder(whole, pods))
    assert {step: loss for step, loss in without.items() if step > resumed} == printed_losses(run)
    assert {step: loss for step, loss in without.items() if step in seen} == seen


def test_the_shipped_files_fit_the_image() -> None:
    image = "image=registry.example/trainshed@sha256:" + "1" * 64
    cluster = load_cluster("aks-nd-h100-v5", ["sharp=true", image])
    job = build_job(load_recipe("aks-gpt-175b"), cluster, offline=True)
    script = job.files["train.sh"]
    assert "/megatron-lm/pretrain_gpt.py" in script
    assert not [option for option in ("--padded-vocab-size", "--async-strategy") if option in script]
    # NCCL 2.25 of PyTorch 25.03 knows the plugin by this name, and by none of a newer interface.
    text = target_of(cluster).render(job).text()
    assert "IBext_v9" in text
    assert "IBext_v11" not in text
    assert job.files["programs/keep_checkpoints.py"]
