"""torchtune: what is rendered, how its recipe is started, what is refused before it would fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from support.recipes.foreign_tasks import FILES, loaded, shown, task_of, written
from support.recipes.golden_files import check_golden
from trainshed.catalog import model_preset
from trainshed.engines.importing import import_file, import_text
from trainshed.engines.keys import flatten
from trainshed.engines.launch import EngineTask, build_launch
from trainshed.engines.torchtune import start
from trainshed.engines.torchtune.builders import builder_named, builder_of, known_presets
from trainshed.engines.torchtune.keys import TORCHTUNE_TABLE
from trainshed.engines.torchtune.versions import torchtune_version
from trainshed.errors import InputError
from trainshed.workflow.runnable import check_layout

RECIPE = """
name: chat
model: {preset: llama3.1-8b, from: hf://meta-llama/Llama-3.1-8B-Instruct@abc}
tokenizer: hf://meta-llama/Llama-3.1-8B-Instruct@abc
data:
  sequence_length: 4096
  train: [{path: hf://datasets/org/talks@def, columns: {messages: conversations, role: from, content: value}}]
  split: {train: 0.95, validation: 0.05}
  validation: {every: 50}
train:
  mode: finetune
  steps: 200
  global_batch: 64
  optimizer: {lr: 2.0e-5}
  schedule: {name: cosine, warmup: 20}
layout: {tp: 2, micro_batch: 2, shard: full}
engine: {name: torchtune, version: "0.7.0"}
checkpoint: {every: 100, keep: 2}
"""
ON_PYPI = ('engine.version="0.6.1"', "data.validation=null", "data.split=null", "checkpoint={}")
"""The same for the version on PyPI, which has neither validation nor checkpoints by steps."""
LORA = ("train.lora={rank: 16, alpha: 32}", "layout.tp=1", "checkpoint.every=null")


def task(*overrides: str, nodes: int = 2, **place: Any) -> EngineTask:
    return task_of(written(RECIPE, overrides), nodes=nodes, steps=200, **place)


def config(given: EngineTask) -> dict[str, Any]:
    """The rendered file, flat."""
    return flatten(yaml.safe_load(build_launch(given).files["torchtune.yaml"]))


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_seeds_render(kind: str) -> None:
    recipe = loaded(import_file(FILES / f"torchtune-{kind}.yaml", gpus=16))
    text = shown(build_launch(task_of(recipe, nodes=2)))
    check_golden(f"engines/torchtune/llama3.3-70b-{kind}.txt", text.partition("=== programs/start_torchtune.py")[0])


def test_conversations_of_the_hub_render_with_their_validation() -> None:
    text = shown(build_launch(task()))
    check_golden("engines/torchtune/sharegpt.txt", text.partition("=== programs/start_torchtune.py")[0])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("data.train=[{path: /shared/talks.jsonl}]", "data.split=null", "data.validation=null"),
            {
                "dataset._component_": "torchtune.datasets.chat_dataset",
                "dataset.source": "json",
                "dataset.data_files": "/shared/talks.jsonl",
                "dataset.conversation_column": "messages",
                "dataset.conversation_style": "openai",
                "dataset.split": "train",
                "dataset.packed": True,
                "dataset.train_on_input": False,
            },
        ),
        (
            ("data.train=[{path: hf://datasets/org/talks@def/part/a.parquet, columns: {messages: turns}}]",),
            {
                "dataset.source": "org/talks",
                "dataset.revision": "def",
                "dataset.data_files": "part/a.parquet",
                "dataset.conversation_column": "turns",
                "dataset.conversation_style": "openai",
            },
        ),
        ((), {"dataset.conversation_column": "conversations", "dataset_val.conversation_style": "sharegpt"}),
        (
            ("data.format=instruct", "data.train=[{path: q.jsonl, columns: {prompt: q}}]"),
            {
                "dataset._component_": "torchtune.datasets.instruct_dataset",
                "dataset.column_map.input": "q",
                "dataset.column_map.output": "answer",
                "dataset_val.column_map.input": "q",
            },
        ),
        (
            ("data.format=alpaca", "data.train=[{path: a.json}]", "data.packing=false"),
            {
                "dataset._component_": "torchtune.datasets.alpaca_dataset",
                "dataset.train_on_input": False,
                "dataset.packed": False,
            },
        ),
        (
            ("data.format=alpaca", "data.train=[{path: a.json, columns: {output: reply}}]"),
            {
                "dataset.column_map.instruction": "instruction",
                "dataset.column_map.input": "input",
                "dataset.column_map.output": "reply",
            },
        ),
        (
            ("data.validation={path: other.jsonl, columns: {messages: turns}, split: 'train[:9%]'}", "data.split=null"),
            {
                "dataset_val.data_files": "other.jsonl",
                "dataset_val.conversation_column": "turns",
                "dataset_val.conversation_style": "openai",
                "dataset_val.split": "train[:9%]",
                "dataset.split": "train",
            },
        ),
        (
            ("data.train.0.split='train[:1000]'", "data.split=null", "data.validation=null"),
            {"dataset.split": "train[:1000]"},
        ),
        (
            ("data.system=Be brief.", "data.train_on=all"),
            {
                "dataset.new_system_prompt": "Be brief.",
                "dataset_val.new_system_prompt": "Be brief.",
                "dataset.train_on_input": True,
                "dataset_val.train_on_input": True,
            },
        ),
    ],
)
def test_chat_data_is_read_in_its_form(overrides: tuple[str, ...], expected: dict[str, Any]) -> None:
    found = config(task(*overrides))
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {"gradient_accumulation_steps": 4, "data_parallel_shard_dim": 8, "optimizer.fused": False}),
        (("layout.tp=1",), {"gradient_accumulation_steps": 2, "optimizer.fused": True, "tensor_parallel_dim": 1}),
        (("train.steps=null", "train.epochs=3"), {"epochs": 3, "max_steps_per_epoch": None}),
        (("train.steps=null", "train.epochs=1.5"), {"epochs": 2, "max_steps_per_epoch": None}),
        ((), {"epochs": 1, "max_steps_per_epoch": 200}),
        (("train.precision=fp8",), {"dtype": "bf16", "enable_fp8_training": True}),
        (("layout.recompute=full",), {"enable_activation_checkpointing": True}),
        (
            ("observe.profile={start: 10, steps: 3}",),
            {
                "profiler.wait_steps": 8,
                "profiler.warmup_steps": 1,
                "profiler.active_steps": 3,
                "profiler.num_cycles": 1,
            },
        ),
        (
            ("observe.profile={start: 10, warmup: 3, cycles: 2, memory: true, stacks: true, shapes: true}",),
            {
                "profiler.wait_steps": 6,
                "profiler.warmup_steps": 3,
                "profiler.num_cycles": 2,
                "profiler.profile_memory": True,
                "profiler.with_stack": True,
                "profiler.record_shapes": True,
            },
        ),
        (("observe.profile={}",), {"profiler.record_shapes": False, "profiler.num_cycles": 1}),
        (
            (*LORA, "train.lora.targets=[q_proj, o_proj, gate_proj, up_proj, down_proj]"),
            {"model.lora_attn_modules": ["q_proj", "output_proj"], "model.apply_lora_to_mlp": True},
        ),
        ((*LORA, "train.lora.targets=[all-linear]"), {"model.apply_lora_to_mlp": True}),
        (
            (*LORA, "train.lora.targets=[attn]"),
            {
                "model.lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
                "model.apply_lora_to_mlp": False,
            },
        ),
        ((*LORA, "train.lora.dora=true"), {"model.use_dora": True}),
        ((*LORA, "train.lora.quantize=nf4"), {"model.quantize_base": True}),
        (("engine.args.compile=false",), {"compile": False}),
    ],
)
def test_keys_of_the_recipe_become_torchtunes(overrides: tuple[str, ...], expected: dict[str, Any]) -> None:
    found = config(task(*overrides))
    assert {key: found[key] for key in expected} == expected


QUANTIZED = (*LORA, "train.lora.dora=true", "train.lora.quantize=nf4", "data.system=Be brief.")


@pytest.mark.parametrize("overrides", [(), LORA, QUANTIZED, ("observe.profile={}",)])
def test_every_key_we_can_write_is_one_that_torchtune_reads(overrides: tuple[str, ...]) -> None:
    for name, more in (("0.7.0", ()), ("0.6.1", ON_PYPI)):
        keys = [setting.key for setting in TORCHTUNE_TABLE.render(task(*overrides, *more), name)]
        assert [key for key in keys if not torchtune_version(name).keys.knows(key)] == []


FILE = """
tokenizer: {{_component_: torchtune.models.llama3.llama3_tokenizer, path: /m/tokenizer.model, max_seq_len: 512}}
model: {{_component_: torchtune.models.llama3_1.{builder}{model}}}
checkpointer: {{_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /models/Llama-3.1-8B-Instruct}}
dataset: {{_component_: torchtune.datasets.{dataset}}}
seed: 7
epochs: {epochs}
max_steps_per_epoch: null
optimizer: {{_component_: torch.optim.AdamW, lr: 1.0e-4}}
{more}
"""
RANK = ", lora_attn_modules: [q_proj], lora_rank: 4, lora_alpha: 8"
TALKS = "source: json, data_files: /d/a.jsonl"


def imported(dataset: str, builder: str = "llama3_1_8b", model: str = "", epochs: int = 1, more: str = "") -> Any:
    text = FILE.format(dataset=dataset, builder=builder, model=model, epochs=epochs, more=more)
    return import_text(text, "theirs.yaml", gpus=8)


@pytest.mark.parametrize(
    ("dataset", "data"),
    [
        (
            f"chat_dataset, {TALKS}, conversation_column: conversations, conversation_style: sharegpt, packed: true",
            {
                "train": [
                    {
                        "path": "/d/a.jsonl",
                        "columns": {"messages": "conversations", "role": "from", "content": "value"},
                    }
                ]
            },
        ),
        (
            f"chat_dataset, {TALKS}, conversation_column: messages, conversation_style: openai",
            {"packing": False, "train": [{"path": "/d/a.jsonl"}]},
        ),
        (
            f"instruct_dataset, {TALKS}, packed: true, train_on_input: true, new_system_prompt: Be brief.",
            {
                "format": "instruct",
                "system": "Be brief.",
                "train_on": "all",
                "train": [{"path": "/d/a.jsonl", "columns": {"prompt": "input", "answer": "output"}}],
            },
        ),
        (
            "alpaca_dataset, packed: true, train_on_input: false, split: 'train[:5000]'",
            {"format": "alpaca", "train": [{"path": "hf://datasets/tatsu-lab/alpaca", "split": "train[:5000]"}]},
        ),
        (f"text_completion_dataset, {TALKS}, packed: true", {"format": "text", "train": [{"path": "/d/a.jsonl"}]}),
    ],
)
def test_a_users_dataset_becomes_keys_of_the_recipe(dataset: str, data: dict[str, Any]) -> None:
    found = imported(dataset).recipe
    assert {key: value for key, value in found["data"].items() if key not in ("sequence_length", "seed")} == data
    assert found["engine"] == {"name": "torchtune"}


def test_a_dataset_that_is_not_known_is_asked_about() -> None:
    found = imported("slimorca_dataset")
    assert any("slimorca_dataset, which is not read here" in question for question in found.open_questions)


@pytest.mark.parametrize(
    ("builder", "model", "expected"),
    [
        ("lora_llama3_1_8b", RANK, {"rank": 4}),
        ("lora_llama3_1_8b", f"{RANK}, use_dora: true", {"dora": True}),
        ("lora_llama3_1_8b", f"{RANK}, quantize_base: true", {"quantize": "nf4"}),
        ("qlora_llama3_1_8b", RANK, {"quantize": "nf4"}),
    ],
)
def test_a_users_adapters_become_keys_of_the_recipe(builder: str, model: str, expected: dict[str, Any]) -> None:
    lora = imported(f"chat_dataset, {TALKS}", builder, model).recipe["train"]["lora"]
    assert {key: lora.get(key) for key in ("dora", "quantize")} == {"dora": None, "quantize": None} | {
        key: value for key, value in expected.items() if key != "rank"
    }
    assert lora["rank"] == 4


def test_adapters_that_would_fail_at_their_end_are_named_where_they_are_imported() -> None:
    found = imported(f"chat_dataset, {TALKS}", "lora_llama3_1_8b", RANK, more="save_every_n_steps: 50")
    assert any("fails when it saves by steps" in mistake.what for mistake in found.mistakes)
    assert found.recipe["checkpoint"]["every"] is None


def test_an_export_of_adapters_that_nobody_can_read_is_refused_before_they_are_trained() -> None:
    recipe = written(RECIPE, [*ON_PYPI, *LORA[:2], "train.lora.dora=true", "export={}"])
    with pytest.raises(InputError, match="magnitudes of DoRA in its own order of heads"):
        check_layout(recipe, model_preset("llama3.1-8b"), task(*ON_PYPI, *LORA[:2]).layout)


def test_one_gpu_does_not_clip_the_gradients_of_adapters() -> None:
    one = {"nodes": 1, "gpus_per_node": 1}
    with pytest.raises(InputError, match="clips gradients that several GPUs share"):
        build_launch(task(*LORA, **one))
    assert config(task(*LORA, "train.optimizer.clip=null", **one))["clip_grad_norm"] is None


@pytest.mark.parametrize("preset", known_presets())
def test_every_builder_is_found_by_its_model(preset: str) -> None:
    recipe = written(RECIPE, [f"model={{preset: {preset}, from: hf://org/base}}"])
    builder = builder_of(recipe, model_preset(preset))
    assert builder is not None
    assert builder.preset == preset
    assert builder_named(builder.component(lora=False)) == builder
    assert builder_named(builder.component(lora=True)) == builder


def test_a_model_with_biases_that_its_builder_does_not_have_is_not_built() -> None:
    recipe = written(RECIPE, ["model={preset: qwen3-8b, from: hf://org/base}"])
    biased = model_preset("qwen3-8b").model_copy(update={"qkv_bias": True, "output_bias": True})
    assert builder_of(recipe, biased) is None


@pytest.mark.parametrize(
    ("preset", "address", "name"),
    [
        ("qwen2.5-7b", "hf://Qwen/Qwen2.5-7B", "qwen2_5_7b_base"),
        ("qwen2.5-7b", "hf://Qwen/Qwen2.5-7B-Instruct", "qwen2_5_7b_instruct"),
        ("qwen3-8b", "hf://Qwen/Qwen3-8B", "qwen3_8b_instruct"),
        ("qwen3-8b", "hf://Qwen/Qwen3-8B-Base", "qwen3_8b_base"),
    ],
)
def test_base_and_instruct_models_have_builders_of_their_own(preset: str, address: str, name: str) -> None:
    builder = builder_of(written(RECIPE, [f"model={{preset: {preset}, from: {address}}}"]), model_preset(preset))
    assert builder is not None
    assert builder.name == name


def test_a_model_without_a_preset_is_known_by_its_sizes_and_its_address() -> None:
    recipe = written(RECIPE, ["model={from: hf://meta-llama/Llama-3.3-70B-Instruct}"])
    builder = builder_of(recipe, model_preset("llama3.1-70b"))
    assert builder is not None
    assert builder.name == "llama3_3_70b"


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (("layout.pp=2",), "pp: 2 is a pipeline, which torchtune does not have"),
        (("train.lora={rank: 16, alpha: 32}",), "tp: 2 with LoRA is not in torchtune"),
        (("layout.shard=zero1",), "and shard is zero1"),
        (("layout.recompute=selective",), "every layer or none"),
        (("model={preset: mixtral-8x7b, from: hf://org/base}",), "not rendered for a mixture of experts"),
        (("model={preset: qwen2.5-7b, from: hf://org/base}",), "no tensor-parallel plan for qwen2.5-7b"),
        (("train.mode=pretrain", "data.train=[{path: a.jsonl}]"), "it does not pretrain"),
        (("train.schedule={name: linear}",), "no linear schedule"),
        (("train.schedule.min_lr=1e-6",), "no cosine that ends above 0"),
        (("train.z_loss=0.1",), "no z-loss"),
        ((*LORA, "train.lora.targets=[q_proj, up_proj]"), "all of gate_proj, up_proj, down_proj or none"),
        ((*LORA, "train.schedule={}"), "LoRA without a cosine"),
        ((*LORA, "train.precision=fp8"), "LoRA in fp8"),
        (("data.train=[{path: s3://bucket/a.jsonl}]",), "cannot read s3://bucket/a.jsonl"),
        (("data.train=[{path: /data/a.json, format: json}]",), "torchtune tells formats by the names of files"),
        (("data.train=[{tokens: corpus_text_document}]",), "neither tokens nor a script"),
        (("engine.args.dataset.conversation_style=openai",), "contradicts `data.train`, which makes it sharegpt"),
        (("engine.args.dataset.train_on_input=true",), "contradicts `data.train_on`"),
        (("engine.args.dataset.packed=false",), "contradicts `data.packing`, which makes it true"),
        (("data.format=text", "data.train=[{path: a.jsonl}]"), "is not rendered for text"),
        (("train.mode=dpo", "data.train=[{path: a.jsonl}]"), "pairs of answers (dpo)"),
        (("data.train.0.columns={role: speaker}",), "knows messages as role/content or from/value"),
        (("data.train.0.columns={tools: tools}",), "no column of tools"),
        (("data.train.0.columns={system: system}",), "no column of system prompts"),
        (("data.template=chatml",), "as its tokenizer of the model does"),
        (("data.train_on=last",), "learns all answers"),
        (("data.thinking=drop",), "as they stand"),
        (("data.on_too_long=drop",), "and does not say so"),
        (("data.format=alpaca", "data.train=[{path: a.json}]", "data.system=Be brief."), "Alpaca no system prompt"),
        (("data.train.0.split='train[:9%]'",), "reads one part of a dataset"),
        (("data.validation.split='train[:9%]'",), "a share of the training data"),
        (("data.validation.prompts=[hello]",), "answers no questions"),
        (("train.early_stop={patience: 2}",), "does not end a run"),
        (("checkpoint.best={}",), "does not keep the best"),
        (("train.optimizer.states=fp32",), "states in another precision"),
        ((*LORA, "checkpoint.every=100"), "saves after every pass"),
        ((*LORA, "train.lora.rslora=true"), "write `alpha: 128`, which is the same scale"),
        ((*LORA, "train.lora.quantize=int8"), "in NF4, not in int8"),
        ((*LORA, "train.lora.targets=[experts]"), "models without experts"),
        (
            (*LORA, "train.lora.dora=true", "model={preset: llama3.1-405b, from: hf://org/base}"),
            "no DoRA for llama3.1-405b",
        ),
        (("observe.profile={cycles: 2, wait: 1}",), "waits before every cycle as long as before the first"),
        (("observe.profile={ranks: [1], memory: true}",), "torchtune writes the memory of rank 0 alone"),
        (("engine.args.batch_size=7",), "contradicts `layout.micro_batch`"),
        (("engine.args.batchsize=7",), "torchtune 0.7.0 reads no `batchsize`"),
        (("data.split={train: 0.955, validation: 0.045}",), "whole percents"),
        (("data.seed=9",), "one seed"),
        (('engine.version="0.5.0"',), "torchtune 0.5.0 is not known here"),
        (('engine.version="0.6.1"',), "torchtune 0.6.1 has no validation during a run"),
        ((*ON_PYPI, "checkpoint.every=100"), "torchtune 0.6.1 has no checkpoints by steps"),
        ((*ON_PYPI, "checkpoint.keep=1"), "torchtune 0.6.1 has no way to remove old checkpoints"),
        (("checkpoint.to=s3://bucket/x",), "checkpoints of torchtune 0.7.0, by steps and by passes, stay in the run's"),
        ((*ON_PYPI, "checkpoint.to=/elsewhere"), "only a bucket gets a copy of them"),
        ((*ON_PYPI, "train.precision=fp8"), "torchtune 0.6.1 has no fp8"),
        ((*ON_PYPI, "layout.replicate=2"), "torchtune 0.6.1 has no replicas"),
        (
            (*ON_PYPI, "layout.tp=1", "model={preset: qwen3-8b, from: hf://Qwen/Qwen3-8B}"),
            "torchtune 0.6.1 has no builder of qwen3-8b",
        ),
        (("budgets={step: 20m}",), "torchtune takes no limit for its collectives"),
    ],
)
def test_wrong_combinations_fail_by_name(overrides: tuple[str, ...], what: str) -> None:
    changed = [_quoted(override) for override in overrides]
    with pytest.raises(InputError) as caught:
        build_launch(task(*changed))
    assert what in str(caught.value)


def test_a_bucket_gets_as_many_checkpoints_as_the_recipe_keeps() -> None:
    notes = build_launch(task(*ON_PYPI, "checkpoint.to=s3://bucket/x")).notes
    assert "of its checkpoints the newest 3 stay in the bucket" in notes


def _quoted(override: str) -> str:
    """Dots in the names of arguments are theirs: `engine.args."dataset.packed"=true`."""
    key, sign, value = override.partition("=")
    inside = key.removeprefix("engine.args.")
    return f'engine.args."{inside}"{sign}{value}' if inside != key and "." in inside else override


def test_a_run_whose_path_torchtune_would_take_for_a_checkpoint_is_refused() -> None:
    with pytest.raises(InputError, match="takes a path with `step` in it for a checkpoint"):
        build_launch(task(run_folder="/store/runs/two-step/1"))


@settings(max_examples=40)
@given(st.text(min_size=1).filter(lambda text: not any(word in text for word in ("\x00", "step", "epoch", "${"))))
def test_no_path_breaks_out_of_the_file(path: str) -> None:
    path = path.encode("utf-8", "replace").decode()
    found = config(task(run_folder=f"/{path}"))
    assert found["output_dir"] == f"/{path}/checkpoints"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Weights in two files, with an index beside them."""
    folder = tmp_path / "base"
    folder.mkdir()
    for name in ("model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors", "config.json"):
        (folder / name).write_text("")
    return folder


FULL, LORA_RECIPE = "full_finetune_distributed", "lora_finetune_distributed"


def save_weights(output: Path, name: str, *, files: int = 1, whole: bool = True, state: bool = False) -> Path:
    """Weights as torchtune leaves them; its last version has the state of the run beside them."""
    folder = output / name
    folder.mkdir(parents=True)
    names = [f"model-{number:05d}-of-{files:05d}.safetensors" for number in range(1, files + 1)]
    for file in names:
        save_file({"weight": torch.ones(8)}, folder / file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {f"w{number}": file for number, file in enumerate(names)}})
    )
    if not whole:
        (folder / names[-1]).write_bytes((folder / names[-1]).read_bytes()[:-4])
    if state:
        torch.save({"epochs_run": 1}, folder / "recipe_state.pt")
    return folder


def save_shared_state(output: Path, epochs: int) -> None:
    """The state of a run as 0.6.1 leaves it, one for all weights."""
    (output / "recipe_state").mkdir(parents=True, exist_ok=True)
    torch.save({"epochs_run": epochs, "optimizer": {"a": torch.ones(2)}}, output / "recipe_state" / "recipe_state.pt")


def test_a_first_start_reads_the_files_of_the_base(base: Path, tmp_path: Path) -> None:
    assert start.choose_checkpoint(tmp_path / "out", "auto", 0) is None
    files = "model-00001-of-00002.safetensors,model-00002-of-00002.safetensors"
    assert start.overrides(FULL, base, None, "0.6.1") == [
        f"checkpointer.checkpoint_files=[{files}]",
        "resume_from_checkpoint=False",
    ]


def test_a_restart_goes_on_from_the_newest_checkpoint(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    save_weights(out, "step_9", state=True)
    newest = save_weights(out, "step_10", files=3, state=True)
    assert start.choose_checkpoint(out, "must", 0) == newest
    assert start.overrides(FULL, base, newest, "0.7.0")[1] == "resume_from_checkpoint=True"
    assert start.overrides(FULL, base, newest, "0.7.0")[0].count("of-00003.safetensors") == 3
    assert start.overrides(FULL, base, newest, "0.6.1")[0].count("step_10/model-") == 3


def test_a_restart_of_0_6_goes_on_from_the_weights_that_its_state_belongs_to(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = save_weights(out, "epoch_0")
    save_shared_state(out, epochs=1)
    assert start.choose_checkpoint(out, "auto", 0) == first
    # Killed between the weights of the second pass and their state: torchtune would train the pass twice.
    save_weights(out, "epoch_1")
    assert start.choose_checkpoint(out, "auto", 1) == first
    assert (out / "epoch_1").is_dir(), "rank 0 alone sets weights aside"
    assert start.choose_checkpoint(out, "auto", 0) == first
    assert sorted(path.name for path in out.iterdir()) == ["epoch_0", "recipe_state", "unfinished_epoch_1"]


@pytest.mark.parametrize("whole", [True, False])
def test_weights_without_a_state_are_set_aside_and_trained_again(tmp_path: Path, whole: bool) -> None:
    out = tmp_path / "out"
    for name in ("unfinished_epoch_0", "unfinished_epoch_0_1"):
        (out / name).mkdir(parents=True)
    save_weights(out, "epoch_0", whole=whole)
    assert start.choose_checkpoint(out, "auto", 0) is None
    assert (out / "unfinished_epoch_0_2").is_dir()
    assert not (out / "epoch_0").exists()


def test_a_state_that_was_cut_short_is_not_gone_on_from(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save_weights(out, "epoch_0")
    save_shared_state(out, epochs=1)
    state = out / "recipe_state" / "recipe_state.pt"
    state.write_bytes(state.read_bytes()[:-40])
    with pytest.raises(SystemExit, match="was not written to its end"):
        start.choose_checkpoint(out, "auto", 0)


def test_what_has_ended_is_not_trained_again_and_cannot_be_made_longer(tmp_path: Path) -> None:
    assert not start.has_finished(tmp_path, "epochs=1")
    (tmp_path / "finished.json").write_text('{"length": "epochs=1", "checkpoint": "epoch_0"}')
    assert start.has_finished(tmp_path, "epochs=1")
    with pytest.raises(SystemExit, match="no state with its last weights"):
        start.has_finished(tmp_path, "epochs=2")


def test_a_restart_of_an_adapter_reads_the_base_again(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "epoch_0"
    out.mkdir(parents=True)
    (out / "adapter_config.json").write_text("{}")
    save_file({"a": torch.ones(4)}, out / "adapter_model.safetensors")
    assert start.choose_checkpoint(tmp_path / "out", "auto", 1) is None
    torch.save({}, out / "adapter_model.pt")
    save_shared_state(tmp_path / "out", epochs=1)
    assert start.choose_checkpoint(tmp_path / "out", "auto", 0) == out
    assert "model-00001-of-00002.safetensors" in start.overrides(LORA_RECIPE, base, out, "0.6.1")[0]


@pytest.mark.parametrize(
    ("overrides", "length"),
    [
        ((), ["version=0.7.0", "steps=200"]),
        ((*ON_PYPI, "train.steps=null", "train.epochs=3"), ["version=0.6.1", "epochs=3"]),
        (("train.steps=null", "train.epochs=1.5"), ["version=0.7.0", "epochs=1.5"]),
        (("observe.profile={ranks: [0, 3]}",), ["version=0.7.0", "steps=200", "profile_ranks=0,3"]),
    ],
)
def test_a_length_that_only_the_data_can_put_into_passes_is_told_to_the_start(
    overrides: tuple[str, ...], length: list[str]
) -> None:
    assert list(build_launch(task(*overrides)).arguments[5:]) == length


@settings(max_examples=200)
@given(steps=st.integers(1, 3000), available=st.integers(1, 3000))
def test_passes_over_the_data_are_exactly_the_steps_that_were_asked_for(steps: int, available: int) -> None:
    epochs, each = start.passes(steps, available)
    assert epochs * each == steps
    assert each <= available
    assert epochs == 1 or steps > available


@pytest.mark.parametrize(
    ("resume", "checkpoint", "what"),
    [("must", None, "holds no checkpoint"), ("fresh", "step_5", "is fresh, and"), ("must", "epoch_0", "holds no")],
)
def test_a_start_that_would_not_do_what_was_asked_stops(
    tmp_path: Path, resume: str, checkpoint: str | None, what: str
) -> None:
    if checkpoint:
        save_weights(tmp_path / "out", checkpoint)
    with pytest.raises(SystemExit, match=what):
        start.choose_checkpoint(tmp_path / "out", resume, 0)


@pytest.mark.parametrize("last", [("auto", "epochs=1"), ("auto", "steps=12")])
def test_the_rendered_program_starts_the_installed_recipe_with_its_ranks_untouched(
    base: Path, tmp_path: Path, last: tuple[str, ...]
) -> None:
    site = tmp_path / "site"
    (site / "torchtune").mkdir(parents=True)
    (site / "torchtune" / "__init__.py").write_text("")
    (site / "recipes").mkdir()
    (site / "recipes" / "__init__.py").write_text("raise ModuleNotFoundError('as torchtune does')")
    (site / "recipes" / "full_finetune_distributed.py").write_text(
        "import json, os, sys\n"
        "class FullFinetuneRecipeDistributed:\n"
        "    rank, total_epochs, max_steps_per_epoch, _gradient_accumulation_steps = 0, 1, 12, 2\n"
        "    def _setup_data(self, items):\n"
        "        return items\n"
        "def recipe_main():\n"
        "    recipe = FullFinetuneRecipeDistributed()\n"
        "    recipe._setup_data(range(11))\n"
        "    recipe._setup_data(range(3))\n"
        "    length = [recipe.total_epochs, recipe.max_steps_per_epoch]\n"
        "    print(json.dumps({'argv': sys.argv[1:], 'rank': os.environ['RANK'], 'length': length}))\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(recipe_main())\n"
    )
    launch = build_launch(task())
    program = tmp_path / "start_torchtune.py"
    program.write_text(launch.files["programs/start_torchtune.py"])
    words = [sys.executable, str(program), launch.arguments[0], "torchtune.yaml"]
    done = subprocess.run(
        [*words, str(base), str(tmp_path / "o"), *last, "version=0.6.1"],
        env={**os.environ, "PYTHONPATH": str(site), "RANK": "13"},
        capture_output=True,
        text=True,
        check=True,
    )
    seen = json.loads(done.stdout)
    assert seen["rank"] == "13"
    # 11 batches are 5 steps of 2: 12 steps are 3 passes of 4.
    assert seen["length"] == ([3, 4] if "steps=12" in last else [1, 12])
    assert seen["argv"][:2] == ["--config", "torchtune.yaml"]
    assert seen["argv"][2].startswith("checkpointer.checkpoint_files=[model-00001")
