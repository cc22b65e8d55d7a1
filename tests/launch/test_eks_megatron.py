"""The EKS seed from its shipped files to weights for Hugging Face, with the real Megatron-LM, on a CPU."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.clusters.pod_runner import PodRunner
from support.models.made_tokenizers import docstrings, llama2, save
from support.models.tiny_models import hf_model, save_tiny_hf
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
from trainshed.catalog import find_machine
from trainshed.launch.job import Job
from trainshed.recipe import load_cluster, load_recipe
from trainshed.workflow.submit import build_job

STEPS, BATCH, LENGTH = 4, 4, 64
REGISTRY = "123456789012.dkr.ecr.us-east-1.amazonaws.com"
MEGATRON_IMAGE, OWN_IMAGE = f"{REGISTRY}/megatron-efa:0.16.1", f"{REGISTRY}/trainshed:0.1.0"
_TOKEN = {"__type": "AddedToken", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
TOKENIZER_CONFIG = {
    "tokenizer_class": "LlamaTokenizer",
    **{f"{name}_token": _TOKEN | {"content": text} for name, text in {"bos": "<s>", "eos": "</s>"}.items()},
    "add_bos_token": True,
    "add_eos_token": False,
}
"""As Llama 2's own."""
NO_FUSIONS = {"no-rope-fusion": True, "no-bias-swiglu-fusion": True}
"""What Llama asks of Transformer Engine, and a CPU has not."""
WEIGHTS = {"articles": 0.5, "code": 0.3, "reference": 0.2}
SMALL = (
    *(f"train.steps={STEPS}", f"train.global_batch={BATCH}", "train.precision=fp32", "train.schedule.warmup=1"),
    *(f"data.sequence_length={LENGTH}", "data.split={train: 0.8, validation: 0.2}", "layout.recompute=none"),
    "export.dtype=fp32",
    *(
        f"data.validation={{every: {STEPS}, batches: 1}}",
        "checkpoint.every=2",
        "model={from: hf://meta-llama/Llama-2-7b-hf}",
    ),
)
"""What a user changes of the recipe for a test of a minute; two nodes have two ranks each."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hub_server.HubServer]:
    """A tiny model of Llama 2's shape with its tokenizer, under the name that the recipe reads."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = llama2()
    # A multiple of 128 · tp, as Llama 2's 32,000 are: Megatron-LM adds no rows, which would count in its loss.
    rows = -(-tokenizer.get_vocab_size() // 256) * 256
    save_tiny_hf("llama", folder, kv_heads=4, vocab_size=rows, max_positions=LENGTH)
    save(tokenizer, TOKENIZER_CONFIG, folder)
    with hub_server.running() as hub:
        hub.repos["meta-llama/Llama-2-7b-hf"] = {path.name: path.read_bytes() for path in folder.iterdir()}
        yield hub


@pytest.fixture
def pods(hub: hub_server.HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PodRunner]:
    """Pods whose volume has the corpora where the recipe reads them."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    texts = docstrings()
    with seed_pods(tmp_path) as runner:
        runner.images[OWN_IMAGE] = own_image()
        for number, name in enumerate(WEIGHTS):
            (folder := runner.shared / "corpus" / name).mkdir(parents=True)
            lines = [json.dumps({"text": text}) for text in texts[number * 80 : number * 80 + 80]]
            (folder / "part-0.jsonl").write_text("\n".join(lines) + "\n")
        yield runner


def seed_job(
    hub: hub_server.HubServer,
    folder: Path,
    name: str,
    *overrides: str,
    id: str | None = None,
    on: tuple[str, ...] = (),
) -> Job:
    """The shipped recipe on a shipped cluster, scaled down; `on` are keys of the cluster."""
    machine = find_machine(str(load_cluster(name).machine))
    ours = any(override.startswith("engine=torch") for override in overrides)
    own = cpu_overrides() if ours else pod_overrides(folder, machine.gpu, machine.fabric)
    cluster = load_cluster(name, [*own, f"environment.HF_ENDPOINT={hub.url}", *on])
    return build_job(load_recipe("eks-llama2-7b-cpt", [*SMALL, *overrides]), cluster, id=id)


SAMPLES = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import build_index
asked = json.loads(Path(sys.argv[2]).read_text())
sys.path.insert(0, str(Path(asked["program"]).parent))
from megatron.core.datasets import blended_megatron_dataset_builder as builder
make = builder.BlendedMegatronDatasetBuilder.build
def build(self):
    validation = make(self)[1]
    samples = [validation[number] for number in range(int(sys.argv[3]))]
    keys = ("tokens", "labels", "loss_mask")
    print("samples " + json.dumps([{key: sample[key].tolist() for key in keys} for sample in samples]))
builder.BlendedMegatronDatasetBuilder.build = build
build_index.build(asked, json.loads(Path(asked["data"]).read_text()))
"""


def validation_samples(job: Job, pods: PodRunner, folder: Path) -> list[dict[str, Any]]:
    """The first samples that Megatron-LM evaluates, from its own datasets."""
    image = pods.images[MEGATRON_IMAGE]
    place, source = next(iter(image.folders.items()))
    shared, texts = str(pods.shared), folder / "samples"
    texts.mkdir()
    for name, text in job.files.items():
        if name.startswith("programs/"):
            (texts / name.removeprefix("programs/")).write_text(text)
    index = job.files["index.json"].replace("/fsx/", f"{shared}/").replace(place, str(source))
    data = json.loads(index)["data"]
    (texts / "data.json").write_text(Path(data).read_text().replace("/fsx/", f"{shared}/"))
    (texts / "index.json").write_text(index.replace(data, str(texts / "data.json")))
    environment = dict(image.environment)
    environment["PYTHONPATH"] = environment["PYTHONPATH"].replace(place, str(source))
    done = subprocess.run(
        [sys.executable, "-c", SAMPLES, texts, texts / "index.json", str(BATCH)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("samples ")]
    assert lines, done.stdout + done.stderr
    return json.loads(lines[0].removeprefix("samples "))


def loss_of(folder: Path, samples: list[dict[str, Any]]) -> float:
    """The mean loss that transformers computes with exported weights."""
    import torch

    model = hf_model(folder)
    with torch.no_grad():
        logits = model(torch.tensor([sample["tokens"] for sample in samples])).logits
    labels = torch.tensor([sample["labels"] for sample in samples]).flatten()
    mask = torch.tensor([sample["loss_mask"] for sample in samples]).flatten()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
    return float((losses * mask).sum() / mask.sum())


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["eks-p4d", "eks-p5"])
def test_weights_of_the_hub_are_trained_on_by_megatron_and_come_back_to_hugging_face(
    name: str, pods: PodRunner, hub: hub_server.HubServer, tmp_path: Path
) -> None:
    job = seed_job(hub, tmp_path, name, f"engine.args={json.dumps(CPU_ARGS | NO_FUSIONS)}")
    pods.images[MEGATRON_IMAGE] = megatron_image("0.16.1", "/opt/megatron-lm", tmp_path / "image", job.cluster)
    stages = [stage.name for stage in job.stages]
    assert stages == ["image", "fetch", "convert", "prepare", "index", "train", "export"]
    run_to_the_end(pods, job)
    run = run_folder(job, pods)
    # Three corpora, blended as the recipe says.
    blend = json.loads((run / "engine" / "data.json").read_text())["train"]
    assert [float(weight) for weight in blend[::2]] == pytest.approx(list(WEIGHTS.values()))
    # Step 0 computes what transformers computes with the base weights: nothing began at random.
    assert float(printed_losses(run)[1]) < 9.0
    verdict = json.loads((run / "export" / "verdict.json").read_text())
    assert verdict["passed"]
    # The trained weights, in transformers, have the loss that Megatron-LM printed for the same samples.
    printed = [
        match[1]
        for log in sorted(run.glob("logs/attempt-*/node-*.log"))
        for match in re.finditer(rf"validation loss at iteration {STEPS} \| lm loss value: (\S+)", log.read_text())
    ]
    assert loss_of(run / "export", validation_samples(job, pods, tmp_path)) == pytest.approx(
        float(printed[0]), abs=2e-5
    )


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("lost", ["all", "one"])
def test_megatron_loses_pods_and_its_losses_are_those_of_a_run_that_never_stopped(
    lost: str, pods: PodRunner, hub: hub_server.HubServer, tmp_path: Path
) -> None:
    steps = 40
    recipe = (
        *(f"engine.args={json.dumps(CPU_ARGS | NO_FUSIONS)}", f"train.steps={steps}", "checkpoint.every=5"),
        *(f"data.validation={{every: {steps}, batches: 1}}", "train.optimizer.lr=1.0e-3", "export=null"),
    )
    job = seed_job(hub, tmp_path, "eks-p4d", *recipe)
    pods.images[MEGATRON_IMAGE] = megatron_image("0.16.1", "/opt/megatron-lm", tmp_path / "image", job.cluster)
    script = job.files["train.sh"].split()
    assert script[script.index("--tensor-model-parallel-size") + 1] == "2", "the layout of the seed: tp 2, dp the rest"
    submitted, run = submit(job), run_folder(job, pods)
    wait_for(pods, job, submitted, "a checkpoint", lambda: latest_iteration(run) >= 5)
    (gang,) = [gang for path, gang in pods.gangs.items() if "/pytorchjobs/" in path]
    for pod in gang.pods if lost == "all" else gang.pods[1:]:
        pod.process.send_signal(signal.SIGKILL)
    wait_for_end(pods, job, submitted)
    assert gang.restarts >= 1
    log = "".join(path.read_text() for path in run.glob("logs/attempt-*/node-*.log"))
    resumed = [int(step) for step in re.findall(r"successfully loaded checkpoint .* at iteration (\d+)", log)]
    assert resumed
    assert max(resumed) >= 5

    whole = seed_job(hub, tmp_path, "eks-p4d", *recipe, id="whole")
    run_to_the_end(pods, whole)
    without, losses = printed_losses(run_folder(whole, pods)), printed_losses(run)
    assert sorted(losses) == sorted(without) == list(range(1, steps + 1))
    # The second line after a start is the mean of two steps: this version prints the first one's loss and keeps it.
    means = {step + 2 for step in resumed}
    assert {step: loss for step, loss in without.items() if step not in means} == {
        step: loss for step, loss in losses.items() if step not in means
    }


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "on"),
    [("eks-p5", ()), ("eks-p5", ("kubernetes.kind=job",)), ("eks-p4d", ())],
    ids=["set", "job", "pytorch"],
)
def test_our_own_engine_trains_on_them_too_and_transformers_computes_its_loss(
    name: str, on: tuple[str, ...], pods: PodRunner, hub: hub_server.HubServer, tmp_path: Path
) -> None:
    job = seed_job(hub, tmp_path, name, "engine=torch", "layout={tp: 2, dp: 2, micro_batch: 1}", on=on)
    assert job.stage("train").ranks_per_node == 2
    run_to_the_end(pods, job)
    run = run_folder(job, pods)
    assert json.loads((run / "export" / "verdict.json").read_text())["passed"]
    assert sorted(step_losses(run)) == list(range(STEPS))
    exported, base = hf_model(run / "export"), pods.shared / "artefacts" / "weights"
    assert exported.config.num_hidden_layers == 2
    assert base.is_dir()
