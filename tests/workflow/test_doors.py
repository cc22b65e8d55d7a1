"""What one door refuses all refuse, in the same words and before any work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.recipes.small_recipes import recipe_text
from support.runs.job_files import write_files
from trainshed.cli import run_cli
from trainshed.launch.job import CodeArchive
from trainshed.recipe import Recipe, load_cluster, load_recipe, to_yaml
from trainshed.workflow import prepare_run
from trainshed.workflow.submit import build_job

CODE = CodeArchive("trainshed-0-0.tar.xz", "0" * 64, b"")
CLUSTER = """\
name: elsewhere
target: slurm
machine: dgx-h100
store: {store}
nodes: {{default: 1, max: 2}}
"""
BASE = "model.from=/models/base"
PAIRS = (
    *(BASE, "model.init=null", "tokenizer=/models/base"),
    *("train.mode=dpo", "data.synthetic=false", "data.train=[{path: /corpus/x.jsonl}]"),
)
CHAT = tuple(override.replace("mode=dpo", "mode=finetune") for override in PAIRS)
REFUSED = {
    "train.lora.quantize": (
        "weights that are held as int8 are multiplied in bf16, not in fp8",
        (BASE, "model.init=null", "train.precision=fp8", "train.lora={rank: 2, alpha: 4, quantize: int8}"),
    ),
    "train.z_loss": ("the loss of `mode: dpo` has no z-loss", (*PAIRS, "train.z_loss=1e-4")),
    "train.loss": ("`mode: dpo` compares answers, and has no other loss", (*PAIRS, "train.loss=cross_entropy")),
    "data.template": ("there is no chat template `chatmll`", (*CHAT, "data.template=chatmll")),
    "data.train.0.split": (
        "`train[:9` in the split `train[:9` is not understood",
        (*CHAT, "data.train.0.split=train[:9"),
    ),
    "data.stage": ("synthetic tokens are made by the ranks: there is nothing to copy", ("data.stage=shm",)),
}
"""Keys that our engine cannot do anywhere."""
OF_TEXT = ("data.template", "data.train.0.split")
"""`verify` reads no text."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and a cluster file, and nothing else."""
    (tmp_path / "recipe.yaml").write_text(recipe_text("dense"))
    (tmp_path / "elsewhere.yaml").write_text(CLUSTER.format(store=tmp_path / "shared"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def changed(*overrides: str) -> Recipe:
    return load_recipe("recipe.yaml", overrides)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command writes that refuses its input."""
    capsys.readouterr()
    assert run_cli(list(words)) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("key", REFUSED)
def test_every_door_refuses_what_the_engine_cannot_do(key: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what, overrides = REFUSED[key]
    doors = {
        "run": said(capsys, "run", "recipe.yaml", *overrides),
        "train": said(capsys, "train", "recipe.yaml", *overrides),
        **({} if key in OF_TEXT else {"verify": said(capsys, "verify", "recipe.yaml", *overrides)}),
        "render": said(capsys, "render", "recipe.yaml", *overrides, "--on", "./elsewhere.yaml", "--offline"),
        "submit": said(capsys, "submit", "recipe.yaml", *overrides, "--on", "./elsewhere.yaml", "--offline"),
        "run --on": said(capsys, "run", "recipe.yaml", *overrides, "--on", "./elsewhere.yaml"),
    }
    assert {door: what in text and key in text for door, text in doors.items()} == dict.fromkeys(doors, True)
    assert sorted(path.name for path in here.iterdir()) == ["elsewhere.yaml", "recipe.yaml"], "work was done"


@pytest.mark.parametrize("key", REFUSED)
def test_the_worker_refuses_it_too_whoever_wrote_its_files(
    key: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what, overrides = REFUSED[key]
    job = build_job(changed("train.precision=bf16"), load_cluster("elsewhere.yaml"), code=CODE, offline=True)
    folder = here / "job"
    folder.mkdir()
    write_files(folder, job.files)
    (folder / "recipe.yaml").write_text(to_yaml(changed(*overrides)))
    assert what in said(capsys, "worker", "prepare", "--job", str(folder))
    assert not (here / "shared").exists(), "work was done"
    run = prepare_run(changed(), load_cluster())
    (run.folder / "recipe.yaml").write_text(to_yaml(changed(*overrides)))
    assert what in said(capsys, "worker", "train", "--run", str(run.folder), "--attempt", "1")


@pytest.mark.parametrize(
    "layout",
    [
        ("layout={tp: 2, overlap: tp, micro_batch: 4}",),
        ("--layout", "tp=2,overlap=tp,micro_batch=4"),
        (
            *("train.steps=null", "train.schedule={}", "layout={tp: 2, micro_batch: 4}"),
            "train.phases=[{steps: 2}, {steps: 2, layout: {tp: 2, overlap: tp, micro_batch: 4}}]",
        ),
    ],
)
def test_fp8_products_that_hide_communication_are_refused_wherever_they_are_asked_for(
    layout: tuple[str, ...], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said_here = said(capsys, "train", "recipe.yaml", "train.precision=fp8", *layout)
    assert "products in fp8 are not cut into parts that hide the communication of tp" in said_here


@pytest.mark.parametrize(
    ("overrides", "key", "what"),
    [
        (("resources.nodes=2",), "resources.nodes", "this machine is one node, and the recipe asks for 2"),
        (("elastic={min_nodes: 1}",), "elastic", "this machine is one node"),
        (("notify=[{webhook: {secret: NO_HOOK}}]",), "notify.0.webhook.secret", "needs NO_HOOK, and this environment"),
        (("engine.image=a/b@sha256:0",), "engine.image", "ranks run in this machine's own environment"),
        (("engine=megatron",), "engine", "the engine megatron is not ours"),
    ],
)
def test_what_this_machine_cannot_do_is_refused_here_and_not_ignored(
    overrides: tuple[str, ...], key: str, what: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for door in ("run", "train"):
        text = said(capsys, door, "recipe.yaml", *overrides)
        assert key in text
        assert what in text
    assert not (here / "store").exists(), "work was done"


def test_a_layout_that_cannot_be_is_refused_before_anything_is_prepared(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for door in ("run", "train"):
        for words in (("layout={tp: 3}",), ("--layout", "tp=3")):
            assert "tp: 3" in said(capsys, door, "recipe.yaml", *words)
    assert not (here / "store").exists(), "work was done"


@pytest.mark.parametrize(
    ("overrides", "key", "what"),
    [
        (("observe.profile={ranks: [0, 3]}",), "observe.profile.ranks", "there is no rank 3: the layout has 1"),
        (("observe.profile={start: 99}",), "observe.profile.start", "the run ends after 20 steps"),
    ],
)
def test_a_profile_that_nobody_would_write_is_refused(
    overrides: tuple[str, ...], key: str, what: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "run", "recipe.yaml", "layout={dp: 1}", *overrides)
    assert key in text
    assert what in text


@pytest.mark.parametrize("engine", ["megatron", "nemo", "torchtune"])
def test_preferences_are_learned_by_our_own_engine_alone(
    engine: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "render", "recipe.yaml", *PAIRS, f"engine={engine}", "--on", "slurm-h100", "--offline")
    assert "train.mode" in text
    assert f"{engine} is not rendered for `mode: dpo`" in text
    assert "engine: torch" in text


def test_a_secret_among_the_arguments_of_an_engine_is_refused_and_not_repeated(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = "hf_" + "aB3dE5gH" * 4
    engine = f"engine={{name: megatron, args: {{wandb_project: {token}}}}}"
    text = said(capsys, "render", "recipe.yaml", engine, "--on", "slurm-h100", "--offline")
    assert "engine.args.wandb_project" in text
    assert "a token of Hugging Face" in text
    assert token not in text


HF_TOKEN = "hf_" + "aB3dE5gH" * 4
HOOK = "https://hooks.slack.com/services/T0/B0/" + "x" * 24
TEXT_DATA = "data={sequence_length: 8, train: [{path: /corpus/x.jsonl}]}"


@pytest.mark.parametrize(
    ("overrides", "key", "what", "secret"),
    [
        ((f"data.train=[{{script: s.py, args: [--login, {HF_TOKEN}]}}]",), "data.train.0.args.1", "token of", HF_TOKEN),
        (("data.train=[{script: s.py, args: [--password, sesame]}]",), "args.1", "a secret by its name", "sesame"),
        ((f"notify=[{{command: [curl, '{HOOK}']}}]",), "notify.0.command.1", "may post", HOOK),
        ((f"notify=[{{webhook: '{HOOK}'}}]",), "notify.0.webhook", "may post", HOOK),
        ((f"observe.wandb={{mode: offline, project: {HF_TOKEN}}}",), "observe.wandb.project", "token of", HF_TOKEN),
        ((f"serve.args.api-key={HF_TOKEN}", "serve.engine=vllm", "export={}"), "serve.args", "token of", HF_TOKEN),
    ],
)
def test_a_secret_anywhere_in_a_recipe_is_refused_by_every_door_and_not_repeated(
    overrides: tuple[str, ...], key: str, what: str, secret: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("recipe.yaml", "data.synthetic=false", TEXT_DATA, "tokenizer=/models/base", *overrides)
    for door in (("run",), ("train",), ("render", "--on", "./elsewhere.yaml", "--offline")):
        text = said(capsys, door[0], *words, *door[1:])
        assert key in text
        assert what in text
        assert secret not in text
    assert not (here / "store").exists(), "work was done"


@pytest.mark.parametrize("key", ["checkpoint.to", "export.to"])
def test_a_place_that_cannot_be_written_to_is_refused_before_anything_is_trained(
    key: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "taken").write_text("a file")
    for door in ("run", "train"):
        assert "taken is not a folder" in said(capsys, door, "recipe.yaml", f"{key}=taken/weights")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    text = said(capsys, "run", "recipe.yaml", f"{key}=closed/weights")
    assert key in text
    assert f"{here} cannot be written to" in text
    assert not (here / "store").exists(), "work was done"


SITES = {
    "slurm without containers": ("slurm-h100", ()),
    "slurm with containers": ("slurm-h100", ("slurm={container: pyxis}", "image=a/b@sha256:0")),
    "kubernetes": ("aks-nd-h100-v5", ("image=a/b@sha256:0",)),
}


@pytest.mark.parametrize(
    ("site", "overrides", "key", "what"),
    [
        ("slurm without containers", ("engine.image=a/b",), "engine.image", "slurm-h100 has no containers"),
        ("slurm with containers", ("export={to: /nowhere/x}",), "export.to", "/nowhere/x lies on no volume"),
        ("kubernetes", ("tokenizer=/nowhere/x",), "tokenizer", "/nowhere/x lies on no volume that jobs mount (/data)"),
        ("kubernetes", ("checkpoint.to=/nowhere/x",), "checkpoint.to", "on no volume that jobs may write to (/data)"),
        ("kubernetes", ("tokenizer=models/x",), "tokenizer", "`models/x` is relative to this machine's folder"),
        ("kubernetes", ("engine=megatron", "elastic={min_nodes: 1}"), "elastic", "knows no spare ones"),
        ("kubernetes", ("observe.wandb={project: p}",), "observe.wandb", "needs the secret WANDB_API_KEY"),
        ("kubernetes", ("observe.trackio={project: p}",), "observe.trackio.space", "is gone when the job has ended"),
        ("kubernetes", ("notify=[{webhook: {secret: HOOK}}]",), "notify.0", "write `HOOK: {k8s: NAME/KEY}` below"),
        ("kubernetes", ("observe.mlflow={uri: mlruns}",), "observe.mlflow.uri", "relative to this machine's folder"),
        ("kubernetes", ("observe.mlflow={uri: 'file:///x'}",), "observe.mlflow.uri", "/x lies on no volume that jobs"),
        ("kubernetes", ("engine=megatron", "notify=[{command: [page]}]"), "notify", "megatron runs without it"),
    ],
)
def test_what_a_site_cannot_do_is_refused_before_it_is_rendered(
    site: str, overrides: tuple[str, ...], key: str, what: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, changes = SITES[site]
    text = said(capsys, "render", "recipe.yaml", *overrides, *(f"cluster.{each}" for each in changes), "--on", cluster)
    assert key in text
    assert what in text
