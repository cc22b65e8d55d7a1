"""The GKE seed scaled down, through the objects that are submitted: by a stand-in for NeMo, and by our own engine.

The shipped recipe and cluster file are rendered and applied; driver, stages and the JobSet's pods run as processes
here. NeMo's image is stood in for by a program at the place of its own: it reads the configuration that we render,
writes DLLogger as NeMo does, and dies once.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from support.clusters.pod_runner import PodRunner
from support.models.made_tokenizers import CONFIGS, docstrings, gpt2, save
from support.models.tiny_models import tiny_config
from support.runs.rendered_stages import write_machine
from support.servers import hub_server
from trainshed.cli import run_cli
from trainshed.engines.nemo import launch as nemo_launch
from trainshed.launch.job import Job
from trainshed.launch.kubernetes.target import KubernetesTarget
from trainshed.launch.target import StageState, SubmittedJob
from trainshed.observe.event_log import read_steps
from trainshed.recipe import load_cluster, load_recipe, to_plain
from trainshed.run_folder import IMAGE_CHECKS
from trainshed.storage import LocalStore
from trainshed.workflow.submit import build_job

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

STEPS = 6
STAND_IN = """
import ast, json, os, pathlib, sys, time
import yaml
words = dict(word.split("=", 1) for word in sys.argv[1:])
config = yaml.safe_load(open(os.path.join(words["--config-path"], words["--config-name"])))
place = {key.lstrip("+"): value for key, value in words.items() if key.startswith("++")}
rank = int(os.environ["RANK"])
weight, prefix = ast.literal_eval(place["model.data.data_prefix"])
assert os.path.getsize(prefix + ".bin") and "/mnt/ssd/" in prefix, prefix
assert os.path.exists(place["model.tokenizer.vocab_file"]) and os.path.exists(place["model.tokenizer.merge_file"])
assert int(os.environ["WORLD_SIZE"]) == int(place["trainer.num_nodes"]) * config["trainer"]["devices"]
model = config["model"]
assert model["tensor_model_parallel_size"] == 2 and model["encoder_seq_length"] == model["data"]["seq_length"]
log = pathlib.Path(place["exp_manager.dllogger_logger_kwargs.json_file"])
log.parent.mkdir(parents=True, exist_ok=True)
died = pathlib.Path(place["exp_manager.explicit_log_dir"] + ".died")
first = not died.exists()
with open(log if rank == 0 else os.devnull, "w") as file:  # the first rank of all alone, as in NeMo
    def write(step, data):
        if rank == 0:
            line = {"timestamp": str(time.time()), "elapsedtime": "1", "type": "LOG", "step": step, "data": data}
            file.write("DLLL " + json.dumps(line) + "\\n")
            file.flush()
    write("PARAMETER", {"cfg/trainer/max_steps": config["trainer"]["max_steps"]})
    for step in range(config["trainer"]["max_steps"]):
        write(step, {"train_step_timing in s": 0.5, "reduced_train_loss": 9.0 - step, "global_step": step,
            "consumed_samples": (step + 1) * model["global_batch_size"]})
        if first and step == 2:
            if rank == 3:
                died.write_text("once")
                os._exit(9)
            time.sleep(600)
"""
PARSER = """
class OverridesParser:
    @staticmethod
    def create():
        return OverridesParser()
    def parse_overrides(self, overrides):
        assert all(word.startswith("++") and "=" in word for word in overrides)
"""
SMALL = (
    *("data.sequence_length=64", "data.train=[{tokens: /mnt/data/wikipedia-tokenized-for-gpt2}]"),
    *(f"train.steps={STEPS}", "train.global_batch=4", "data.validation={every: 3, batches: 1}"),
    "train.schedule={name: cosine, warmup: 1, decay: 6, min_lr: 1.0e-5}",
    *("resources.nodes=2", "data.split={train: 0.8, validation: 0.1, test: 0.1}"),
)


@pytest.fixture
def hub(runner: PodRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.HubServer]:
    """GPT-2's tokenizer on a Hub-like server, Wikipedia's tokens in the bucket, NeMo's image on the path."""
    made = save(gpt2(), CONFIGS["gpt2"], tmp_path / "tokenizer")
    vocabulary = json.loads((made / "tokenizer.json").read_text())["model"]
    (made / "vocab.json").write_text(json.dumps(vocabulary["vocab"]))
    (made / "merges.txt").write_text("\n".join(" ".join(pair) for pair in vocabulary["merges"]))
    text = tmp_path / "wikipedia.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in docstrings()[:200]))
    prefix = str(runner.shared / "wikipedia-tokenized-for-gpt2")
    assert run_cli(["data", "prepare", "--input", str(text), "--tokenizer", str(made), "--output", prefix]) == 0
    image = runner.shared / "image"
    for package, content in {"nemo/__init__.py": "", "hydra/core/override_parser/overrides_parser.py": PARSER}.items():
        (image / package).parent.mkdir(parents=True)
        (image / package).write_text(content)
    (image / "megatron_gpt_pretraining.py").write_text(STAND_IN)
    monkeypatch.setattr(nemo_launch, "HYDRA_PROGRAM", "/mnt/data/image/megatron_gpt_pretraining.py")
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin:/usr/bin:/bin:/usr/sbin:/sbin")
    with hub_server.running() as server:
        server.repos["openai-community/gpt2"] = {path.name: path.read_bytes() for path in made.iterdir()}
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def seed_job(hub: hub_server.HubServer, machine: str, *overrides: str) -> Job:
    """The shipped recipe on the shipped cluster, scaled down: two nodes, no fabric, a claim in the bucket's place."""
    config = tiny_config("llama", vocab_size=gpt2().get_vocab_size(), max_positions=64)
    model = {"config": to_plain(config, defaults=False), "init": "random"}
    variables = {
        "HF_ENDPOINT": hub.url,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": "/mnt/data/image",
        "TRAINSHED_LOOK_SECONDS": "0.2",
        "TRAINSHED_ROLL_CALL_SECONDS": "5",
        "TRAINSHED_FAILURE_GRACE_SECONDS": "5",
    }
    cluster = load_cluster(
        "gke-a3-mega",
        [
            f"machine={machine}",
            *("store=/mnt/data", "secrets={}", "storage=null", "service_account=null", "preflight=false"),
            "volumes=[{mount: /mnt/data, pvc: shared}, {mount: /mnt/ssd, host: /mnt/stateful_partition/ssd}]",
            *(f"python={sys.executable}", "nodes={default: 2, max: 2}", "fabric=ethernet"),
            *("limits={restarts: 3, grace_seconds: 60}", "kubernetes={namespace: ml}"),
            f"environment={json.dumps(variables)}",
        ],
    )
    text = yaml.safe_dump(model, default_flow_style=True, width=10**6).strip()
    return build_job(load_recipe("gke-llama3-70b", [f"model={text}", *SMALL, *overrides]), cluster)


def stands(job: Job, submitted: SubmittedJob, stage: str) -> StageState:
    return {state.stage: state for state in KubernetesTarget(job.cluster).status(submitted)}[stage]


def submit(job: Job) -> SubmittedJob:
    target = KubernetesTarget(job.cluster)
    return target.submit(target.render(job), job)


def metrics(capsys: pytest.CaptureFixture[str], run: Path) -> dict[str, Any]:
    capsys.readouterr()
    assert run_cli(["metrics", str(run), "-o", "json"]) == 0
    return orjson.loads(capsys.readouterr().out)["runs"][0]


def test_the_stand_in_for_nemo_is_started_again_and_its_figures_are_read(
    runner: PodRunner, hub: hub_server.HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = seed_job(hub, str(write_machine(tmp_path)), "train.precision=bf16", "layout={tp: 2, micro_batch: 1}")
    assert [stage.name for stage in job.stages] == ["image", "prepare", "train"]
    submitted = submit(job)
    runner.until(lambda: stands(job, submitted, "train").state in ("done", "failed"), "the training to end", 900)
    ended = stands(job, submitted, "train")
    assert (ended.state, ended.restarts) == ("done", 1), runner.logs()
    run = runner.shared / Path(job.run).relative_to("/mnt/data")
    checks = json.loads((run / IMAGE_CHECKS).read_text())["checks"]
    assert {check["verdict"] for check in checks} <= {"pass", "skipped"}, checks
    lines = (run / "dllogger/rank-0/dllogger.json").read_text().splitlines()
    assert [json.loads(line.removeprefix("DLLL"))["step"] for line in lines] == ["PARAMETER", *range(STEPS)]
    figures = metrics(capsys, run)
    assert figures["step_seconds"]["mean"] == pytest.approx(0.5)
    assert figures["facts"]["gpus"] == 4
    assert not (run / "checkpoints").exists(), "checkpoint: off"


def test_our_own_engine_trains_the_same_recipe_survives_a_pod_and_is_exported(
    runner: PodRunner, hub: hub_server.HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("engine=torch", "train.precision=fp32", "layout={tp: 2, dp: 2, micro_batch: 1}", "export={format: hf}")
    job = seed_job(hub, "cpu", *keys, "checkpoint={every: 2}", "train.steps=20")
    submitted = submit(job)
    run = runner.shared / Path(job.run).relative_to("/mnt/data")
    runner.until(lambda: list(run.glob("checkpoints/*/manifest.json")), "a checkpoint", 900)
    (gang,) = [gang for path, gang in runner.gangs.items() if "/jobsets/" in path]
    gang.pods[1].process.send_signal(signal.SIGKILL)
    runner.until(lambda: stands(job, submitted, "export").state in ("done", "failed"), "the export to end", 900)
    assert (stands(job, submitted, "export").state, stands(job, submitted, "train").restarts) == ("done", 1), (
        runner.logs()
    )
    assert [step["step"] for step in read_steps(LocalStore(run), "")] == list(range(20))
    assert json.loads((run / "export" / "verdict.json").read_text())["passed"]
    model = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32)
    assert model(torch.arange(8)[None]).logits.isfinite().all()
    assert metrics(capsys, run)["last_step"] == 20
