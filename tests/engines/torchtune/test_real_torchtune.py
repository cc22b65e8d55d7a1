"""The torchtune of PyPI (0.6.1) runs what we render, on CPUs: the tokens and the mask that are expected, the same loss.

Of what is rendered for it only the model's builder is replaced, and the device. 0.7.0, which is on no index, was run by
hand from its source (41aaca4) on what this test writes: the same losses, and two failures of its LoRA recipe that are
refused since (checkpoints by steps, clipping on one GPU).
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from support import TESTS
from support.models.tiny_torchtune import (
    SEQUENCE_LENGTH,
    SIZES,
    conversations,
    write_base,
    write_conversations,
    write_tokenizer,
)
from support.recipes.foreign_tasks import task_of, written
from support.runs.job_files import write_files
from trainshed.catalog import model_preset
from trainshed.checkpoints.mirror import (
    fetch_checkpoints,
    follow_checkpoints,
    mirrored_checkpoints,
    upload_checkpoints,
)
from trainshed.data.sampling.rows import SampleRows
from trainshed.engines.importing import import_file, load_problem, recipe_text
from trainshed.engines.keys import flatten, nest
from trainshed.engines.launch import build_launch
from trainshed.engines.torch.rank import train_rank
from trainshed.engines.torchtune.adapters import ADAPTER_ROWS, WITHOUT_DORA
from trainshed.engines.torchtune.builders import builder_of, known_presets
from trainshed.engines.torchtune.versions import torchtune_version
from trainshed.errors import InputError
from trainshed.launch.ranks import free_port
from trainshed.observe.event_log import read_steps
from trainshed.observe.profile_summary import find_traces, summarize_trace
from trainshed.recipe import Recipe, parse_recipe
from trainshed.storage import open_folder, open_store, parse
from trainshed.workflow import prepare_run, run_layout, train_job

ASKED_STEPS = 3
RECIPE = f"""
name: real
model: {{preset: llama3.1-8b, from: hf://org/tiny}}
tokenizer: hf://org/tiny
data:
  sequence_length: {SEQUENCE_LENGTH}
  train: [{{path: talks.jsonl}}]
train:
  mode: finetune
  steps: {ASKED_STEPS}
  global_batch: 12
  precision: fp32
  optimizer: {{lr: 1.0e-3, clip: null}}
layout: {{shard: full, micro_batch: 12}}
engine:
  name: torchtune
  args:
    device: cpu
    compile: false
    tokenizer.special_tokens_path: tokenizer.json
"""
ONE_BY_ONE = ("data.packing=false",)
PACKED = ("data.packing=true", "train.global_batch={packs}", "layout.micro_batch={packs}")
TINY_BUILDER = {
    "vocab_size": 0,
    "num_layers": SIZES["layers"],
    "num_heads": SIZES["heads"],
    "num_kv_heads": SIZES["kv_heads"],
    "embed_dim": SIZES["hidden"],
    "intermediate_dim": SIZES["ffn"],
    "max_seq_len": SEQUENCE_LENGTH,
    "rope_base": 10000,
    "norm_eps": 1e-5,
    "attn_dropout": 0.0,
}


@dataclass(frozen=True)
class Site:
    """The run's folder as the stages before training leave it: base weights, a tokenizer, and data."""

    folder: Path
    tokenizer: Tokenizer
    model: LlamaForCausalLM

    @property
    def data(self) -> Path:
        return self.folder / "talks.jsonl"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("tune")
    tokenizer = write_tokenizer(folder / "engine/tokenizer")
    write_conversations(folder / "talks.jsonl")
    model = write_base(folder / "engine/base", tokenizer.get_vocab_size())
    return Site(folder, tokenizer, model)


def expected_sample(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
    """Llama 3's form of a conversation as one text, and which tokens torchtune learns: an answer with its header."""
    tokens, learned = [tokenizer.token_to_id("<|begin_of_text|>")], [False]
    for message in messages:
        header = f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n"
        ids = tokenizer.encode(f"{header}{message['content'].strip()}<|eot_id|>", add_special_tokens=False).ids
        tokens += ids
        learned += [message["role"] == "assistant"] * len(ids)
    return [*tokens, tokenizer.token_to_id("<|end_of_text|>")], [*learned, False]


def expected_loss(site: Site) -> float:
    """The mean over all learned tokens, each conversation by itself, by transformers."""
    total, count = 0.0, 0
    for talk in conversations():
        tokens, learned = expected_sample(site.tokenizer, talk["messages"])
        ids = torch.tensor([tokens])
        labels = torch.where(torch.tensor([learned]), ids, -100)
        with torch.no_grad():
            logits = site.model(ids).logits
        total += float(torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum"))
        count += sum(learned)
    return total / count


@dataclass(frozen=True)
class TorchtuneRun:
    """What one run of torchtune gave."""

    samples: list[dict[str, list[int]]]
    losses: list[float]
    output: str


def run_torchtune(site: Site, name: str, *overrides: str, program: str = "llama3") -> TorchtuneRun:
    """Start what we render in one process; of the file, only the model's builder is another."""
    run = site.folder / name
    if not run.exists():
        run.mkdir()
        (run / "engine").symlink_to(site.folder / "engine")
    path = f"data.train=[{{path: {site.data}}}]"
    special = f'engine.args."tokenizer.special_tokens_path"={site.folder}/engine/tokenizer/tokenizer.json'
    recipe = written(RECIPE, [path, special, *overrides])
    task = task_of(
        recipe, nodes=1, steps=ASKED_STEPS, gpus_per_node=1, run_folder=str(run), job_folder=str(run), image=None
    )
    launch = build_launch(task)
    config = flatten(yaml.safe_load(launch.files["torchtune.yaml"]))
    config |= {f"model.{key}": value for key, value in TINY_BUILDER.items()}
    config |= {"model._component_": f"torchtune.models.llama3.{program}", "model.vocab_size": site.model.vocab_size}
    write_files(run, {**launch.files, "torchtune.yaml": yaml.safe_dump(nest(config), sort_keys=False)})
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    driver = TESTS / "engines" / "torchtune" / "cpu_torchtune.py"
    done = subprocess.run(
        [sys.executable, str(driver), launch.program, str(run / "samples.json"), *launch.arguments],
        env={**os.environ, **ranks, **place, "HF_DATASETS_CACHE": str(site.folder / "cache"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    log = max((run / "torchtune").glob("log_*.txt"), key=lambda file: file.stat().st_mtime_ns).read_text()
    losses = [float(loss) for loss in re.findall(r"^Step \d+ \| loss:([\d.]+)", log, re.MULTILINE)]
    return TorchtuneRun(json.loads((run / "samples.json").read_text()), losses, done.stderr)


@pytest.fixture(scope="module")
def one_by_one(site: Site) -> TorchtuneRun:
    return run_torchtune(site, "one-by-one", *ONE_BY_ONE, "observe.profile={start: 2, steps: 1, shapes: true}")


def test_torchtune_reads_the_conversations_as_the_recipe_says(site: Site, one_by_one: TorchtuneRun) -> None:
    for talk, sample in zip(conversations(), one_by_one.samples, strict=True):
        tokens, learned = expected_sample(site.tokenizer, talk["messages"])
        assert sample["tokens"] == tokens
        assert [not masked for masked in sample["mask"]] == learned


def test_the_loss_of_the_first_step_is_that_of_the_answers(site: Site, one_by_one: TorchtuneRun) -> None:
    assert one_by_one.losses[0] == pytest.approx(expected_loss(site), abs=1e-4)


def test_a_run_has_exactly_the_steps_of_the_recipe_though_the_data_has_fewer(one_by_one: TorchtuneRun) -> None:
    assert len(one_by_one.losses) == ASKED_STEPS
    assert "3 steps: 3 passes of 1 of the 1 steps that the data has" in one_by_one.output
    assert one_by_one.losses == sorted(one_by_one.losses, reverse=True), "the weights did not move"


def test_the_profile_covers_the_step_that_the_recipe_names(site: Site, one_by_one: TorchtuneRun) -> None:
    assert one_by_one.losses, "it has run"
    (trace,) = find_traces(site.folder / "one-by-one")
    summary = summarize_trace(trace)
    assert (summary.device, summary.steps) == ("cpu", 1)
    assert summary.compute > 0


def test_packed_conversations_do_not_see_each_other(site: Site) -> None:
    sizes = [len(expected_sample(site.tokenizer, talk["messages"])[0]) for talk in conversations()]
    packs = packed_rows(sizes)
    assert packs < len(sizes) / 2
    run = run_torchtune(site, "packed", *(override.format(packs=packs) for override in PACKED))
    assert len(run.samples) == packs
    assert {len(sample["tokens"]) for sample in run.samples} == {SEQUENCE_LENGTH}
    assert run.losses[0] == pytest.approx(expected_loss(site), abs=1e-4)


@pytest.mark.parametrize("adapters", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_second_start_goes_on_after_the_first_pass_and_ends_with_the_same_losses(site: Site, adapters: bool) -> None:
    length = ("train.steps=null", "train.epochs=2", "train.global_batch=4", "layout.micro_batch=4")
    more = ("train.lora={rank: 2, alpha: 4}", "train.schedule={name: cosine, warmup: 1}") if adapters else ()
    name, program = ("two-adapted", "lora_llama3") if adapters else ("two-passes", "llama3")
    whole = run_torchtune(site, name, *ONE_BY_ONE, *length, *more, program=program)
    assert len(whole.losses) == 6
    saved = site.folder / name / "checkpoints"
    assert json.loads((saved / "finished.json").read_text()) == {"length": "epochs=2", "checkpoint": "epoch_1"}
    # As if the second save had been killed between its files.
    (saved / "finished.json").unlink()
    again = run_torchtune(site, name, *ONE_BY_ONE, *length, *more, program=program)
    assert "set aside as unfinished_epoch_1" in again.output
    assert again.losses == pytest.approx(whole.losses[3:], abs=1e-6)
    third = run_torchtune(site, name, *ONE_BY_ONE, *length, *more, program=program)
    assert "this run has ended already" in third.output


@pytest.mark.s3
@pytest.mark.parametrize("adapters", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_run_whose_disk_is_lost_goes_on_from_the_bucket_with_the_same_losses(
    site: Site, s3_bucket: str, adapters: bool
) -> None:
    length = ("train.steps=null", "train.epochs=3", "train.global_batch=4", "layout.micro_batch=4")
    more = ("train.lora={rank: 2, alpha: 4}", "train.schedule={name: cosine, warmup: 1}") if adapters else ()
    name, program = ("lost-adapted", "lora_llama3") if adapters else ("lost", "llama3")
    run, address = site.folder / name, f"s3://{s3_bucket}/torchtune/{name}"
    bucket = open_folder(address)

    def train() -> TorchtuneRun:
        return run_torchtune(site, name, *ONE_BY_ONE, *length, *more, program=program)

    over = Event()
    with ThreadPoolExecutor(1) as beside:
        copying = beside.submit(follow_checkpoints, run, address, over.is_set, every_seconds=0.05)
        try:
            whole = train()
        finally:
            over.set()
        copying.result()
    assert len(whole.losses) == 9
    upload_checkpoints(run, address)
    saved = run / "checkpoints"
    copies = {copy.name: copy for copy in mirrored_checkpoints(bucket)}
    assert sorted(copies) == ["epoch_0", "epoch_1", "epoch_2"]
    assert copies["epoch_1"].state, "the state after it was copied"
    assert json.loads(copies["epoch_2"].ended or "") == json.loads((saved / "finished.json").read_text())
    # As if the run had been killed in its last pass, and its disk were gone.
    bucket.delete("checkpoints/epoch_2.manifest.json")
    shutil.rmtree(saved)
    assert fetch_checkpoints(run, address) == 1
    assert sorted(path.name for path in saved.iterdir()) == ["epoch_1", "recipe_state"]
    again = train()
    assert again.losses == pytest.approx(whole.losses[6:], abs=1e-6)
    # And once more when it has ended: there is nothing left to do.
    assert upload_checkpoints(run, address) == [2]
    shutil.rmtree(saved)
    assert fetch_checkpoints(run, address) == 2
    assert "this run has ended already" in train().output


def test_every_builder_that_we_name_takes_the_keys_that_we_write() -> None:
    """Read from the source of the installed torchtune, which has no Qwen 3 yet."""
    taken = dict(installed_builders())
    keys = {key.removeprefix("model.") for row in ADAPTER_ROWS for key in row.keys} | {"apply_lora_to_output"}
    # Llama 3.3's are other names of Llama 3.1's.
    presets = [preset for preset in known_presets() if not preset.startswith(("qwen3", "llama3.3"))]
    assert len(presets) > 15
    for preset in presets:
        builder = builder_of(written(RECIPE, [f"model={{preset: {preset}, from: hf://org/x}}"]), model_preset(preset))
        assert builder is not None
        without_dora = {"use_dora"} if builder.name in WITHOUT_DORA else set()
        assert builder.component(lora=False) in taken
        assert taken[builder.component(lora=True)] >= keys - without_dora, preset


def package_file(*parts: str) -> Path:
    """A file of the installed torchtune, or of the recipes beside it."""
    spec = importlib.util.find_spec("torchtune")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.joinpath(*parts)


def test_the_keys_of_this_version_are_those_that_its_recipes_read() -> None:
    """Read from the source of the installed torchtune."""
    read = set()
    for recipe in ("full_finetune_distributed", "lora_finetune_distributed"):
        text = package_file("..", "recipes", f"{recipe}.py").read_text()
        read |= set(re.findall(r"\bcfg\.(?!get\b)(\w+)", text)) | set(re.findall(r"\bcfg\.get\(\s*\"(\w+)\"", text))
    version = torchtune_version(importlib.metadata.version("torchtune"))
    sections = {name for name in version.keys.sections if "." not in name}
    assert read - sections - {"profiler"} <= set(version.keys.sections["-"])
    assert set(version.keys.sections["-"]) <= read
    assert version.loss.rpartition(".")[2] in package_file("modules", "loss", "__init__.py").read_text()


CONFIGS = sorted(package_file("..", "recipes", "configs").resolve().rglob("*.yaml"))


def test_every_file_that_torchtune_ships_is_read_or_refused_by_name() -> None:
    """Files of generation, evaluation and quantisation ended in a TypeError."""
    assert len(CONFIGS) > 100
    loaded, refused = 0, 0
    for file in CONFIGS:
        try:
            imported = import_file(file, gpus=8)
        except InputError:
            refused += 1
            continue
        assert load_problem(recipe_text(imported, file.name)) is None, file
        loaded += 1
    assert loaded > 60
    assert refused > 60


def installed_builders() -> Iterator[tuple[str, set[str]]]:
    """Every builder of a model that the installed torchtune has, and the arguments that it takes."""
    for file in package_file("models").glob("*/_model_builders.py"):
        for line in ast.parse(file.read_text()).body:
            if isinstance(line, ast.FunctionDef):
                taken = {argument.arg for argument in line.args.args}
                yield f"torchtune.models.{file.parent.name}.{line.name}", taken


OURS = """
name: ours
model: {{from: {folder}/engine/base}}
tokenizer: {folder}/engine/tokenizer
data:
  sequence_length: {length}
  template: torchtune_llama3.jinja
  train: [{{path: {folder}/talks.jsonl}}]
train: {{mode: finetune, steps: 1, global_batch: 12, precision: fp32, optimizer: {{lr: 1.0e-3, clip: null}}}}
layout: {{dp: 1, micro_batch: 1}}
store: {folder}/store
"""


@pytest.mark.parametrize("packing", [False, True])
def test_our_engine_learns_the_same_tokens_and_begins_at_the_same_loss(
    site: Site, one_by_one: TorchtuneRun, packing: bool
) -> None:
    """With the chat template that writes conversations, and marks answers, as torchtune does."""
    shutil.copy(TESTS.parent / "docs" / "examples" / "torchtune_llama3.jinja", site.folder)
    text = OURS.format(folder=site.folder, length=SEQUENCE_LENGTH)
    overrides = [f"data.packing={str(packing).lower()}"]
    rows = epoch_rows(parse_recipe(text, [*overrides, "train.global_batch=1"], folder=site.folder))
    run = prepare_run(parse_recipe(text, [*overrides, f"train.global_batch={rows}"], folder=site.folder))
    assert (rows == len(one_by_one.samples)) is not packing
    theirs = [(sample["tokens"], [not masked for masked in sample["mask"]]) for sample in one_by_one.samples]
    assert sorted(documents(run.order.rows(0, 0, rows), site.tokenizer)) == sorted(theirs)
    train_rank(train_job(run, run_layout(run)), run_folder=run.folder)
    losses = [step["loss"] for step in read_steps(*open_store(parse(str(run.folder))))]
    assert losses[0] == pytest.approx(one_by_one.losses[0], abs=1e-4)


def epoch_rows(recipe: Recipe) -> int:
    """How many rows one pass over the data has."""
    rows = prepare_run(recipe).order.sources[0].epoch_samples
    assert rows is not None
    return rows


def documents(rows: SampleRows, tokenizer: Tokenizer) -> list[tuple[list[int], list[bool]]]:
    """The conversations of some rows, with what is learned of each."""
    assert rows.document_starts is not None
    assert rows.learned is not None
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    found = []
    for tokens, starts, learned in zip(rows.tokens, rows.document_starts, rows.learned, strict=True):
        for start in sorted(set(starts.tolist())):
            columns = starts == start
            if tokens[start] == begin:  # not the padding
                found.append((tokens[columns].tolist(), learned[columns].tolist()))
    return found


def packed_rows(sizes: list[int]) -> int:
    """How many rows torchtune packs into: each in turn, as long as the next one fits."""
    rows, used = 1, 0
    for size in sizes:
        rows, used = (rows, used + size) if used + size <= SEQUENCE_LENGTH else (rows + 1, size)
    return rows


def test_adapters_begin_at_the_loss_of_the_base_and_are_all_that_is_saved(site: Site) -> None:
    lora = "train.lora={rank: 2, alpha: 4, targets: [q_proj, v_proj, mlp], dora: true}"
    schedule = "train.schedule={name: cosine, warmup: 1}"
    run = run_torchtune(site, "lora", *ONE_BY_ONE, lora, schedule, program="lora_llama3")
    assert run.losses[0] == pytest.approx(expected_loss(site), abs=1e-4)
    assert len(run.losses) == ASKED_STEPS
    saved = [file.name for file in (site.folder / "lora/checkpoints").rglob("*.safetensors")]
    assert set(saved) == {"adapter_model.safetensors"}
