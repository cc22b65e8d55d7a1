"""The Megatron-Bridge script of current NeMo images: it compiles, and uses names that Megatron-Bridge has."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.recipes.foreign_tasks import shown, task_of, written
from support.recipes.golden_files import check_golden
from trainshed.catalog import model_preset
from trainshed.engines.launch import EngineTask, build_launch
from trainshed.engines.nemo.bridge_keys import BRIDGE_KEYS
from trainshed.errors import InputError

RECIPE = """
name: pretraining
model: {preset: llama3.1-8b, init: random}
tokenizer: hf://org/tokens@abc
data: {sequence_length: 8192, train: [{path: corpus.jsonl}], split: {train: 0.99, validation: 0.01}}
train:
  steps: 1000
  global_batch: 512
  optimizer: {lr: 3.0e-4}
  schedule: {name: cosine, warmup: 100, min_lr: 3.0e-5}
layout: {tp: 2, pp: 2, cp: 2}
engine: {name: nemo, version: "26.06"}
"""
# What the script imports, and where Megatron-Bridge v0.5.0 and Megatron-LM d0b3b77 have it.
IMPORTS = {
    "megatron.bridge": {"AutoBridge"},
    "megatron.bridge.models": {"GPTModelProvider"},
    "megatron.bridge.training.config": {
        "CheckpointConfig", "ConfigContainer", "DistributedDataParallelConfig", "DistributedInitConfig",
        "GPTDatasetConfig", "LoggerConfig", "MockGPTDatasetConfig", "OptimizerConfig", "ProfilingConfig", "RNGConfig",
        "SchedulerConfig", "TokenizerConfig", "TrainingConfig", "ValidationConfig",
    },
    "megatron.bridge.training.gpt_step": {"forward_step"},
    "megatron.bridge.training.mixed_precision": {"get_mixed_precision_config"},
    "megatron.bridge.training.pretrain": {"pretrain"},
    "megatron.core.datasets.utils": {"get_blend_from_list"},
    "pathlib": {"Path"},
    "functools": {"partial"},
}  # fmt: skip
HALF_BASE = (
    "{family: llama, layers: 4, hidden: 64, heads: 8, ffn: 128, vocab_size: 512, max_positions: 8192, "
    "rope: {base: 10000.5}}"
)
VARIANTS = {
    "dense": (),
    "fp8": ("train.precision=fp8", "layout.recompute=full", "layout.vp=4"),
    "from-hf": ("model={preset: llama3.1-8b, from: hf://org/base@abc}",),
    "moe": (
        "model={preset: qwen3-30b-a3b, init: random}",
        "layout={tp: 2, ep: 8, recompute: selective}",
        "train.moe={balance_loss: 0.01, z_loss: 0.001}",
        "train.schedule={name: wsd, warmup: 10, decay: 100}",
    ),
    "synthetic": ("data={synthetic: true, sequence_length: 1024}", "model={preset: gpt2, init: random}", "layout={}"),
}


def task(*overrides: str, **place: Any) -> EngineTask:
    recipe = written(RECIPE, overrides)
    config = None if recipe.model.preset or recipe.model.config else model_preset("llama3.1-8b")
    return task_of(recipe, nodes=2, steps=1000, config=config, **place)


def script(*overrides: str, **place: Any) -> str:
    return build_launch(task(*overrides, **place)).files["pretrain.py"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_scripts_render(variant: str) -> None:
    check_golden(f"engines/nemo/bridge-{variant}.txt", shown(build_launch(task(*VARIANTS[variant]))))


@pytest.mark.parametrize("variant", VARIANTS)
def test_scripts_compile_and_use_only_names_that_are_there(variant: str) -> None:
    tree = ast.parse(script(*VARIANTS[variant]))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert {alias.name for alias in node.names} <= IMPORTS[node.module or ""]
    fields = written_fields(tree)
    assert [field for field in fields if not BRIDGE_KEYS.knows(field)] == []
    assert len(fields) > 50


def written_fields(tree: ast.Module) -> list[str]:
    """Every `section.field` that a script sets: by an assignment, or as an argument of a section's class."""
    fields: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            fields.append(ast.unparse(node.targets[0]).removeprefix("config."))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ConfigContainer":
            for section in node.keywords:
                if isinstance(section.value, ast.Call):
                    fields += [f"{section.arg}.{field.arg}" for field in section.value.keywords if field.arg]
    return [field.replace("dataset.seq_length", "dataset.sequence_length") for field in fields]


def test_budgets_become_the_limits_of_collectives() -> None:
    script = shown(build_launch(task("budgets={load: 2h, step: 20m}")))
    assert "distributed_timeout_minutes=120" in script
    assert "distributed_timeout_seconds_after_init=1200" in script
    assert "distributed_timeout" not in shown(build_launch(task()))


def test_base_weights_are_read_from_hugging_face_files() -> None:
    launch = build_launch(task(*VARIANTS["from-hf"]))
    text = launch.files["pretrain.py"]
    assert "AutoBridge.from_hf_pretrained('/store/runs/r/1/engine/base')" in text
    assert "load_weights=True" in text
    assert "base-hf" in launch.inputs
    assert "hidden_size" not in text, "the sizes are those of the weights"


def test_resuming_follows_the_recipe() -> None:
    assert "exit_on_missing_checkpoint=True" in script("checkpoint.resume=must")
    assert "load=None" in script("checkpoint.resume=fresh")


def test_arguments_become_fields() -> None:
    text = script("engine.args={model.cross_entropy_fusion_impl: te}")
    assert "    config.model.cross_entropy_fusion_impl = 'te'" in text
    with pytest.raises(InputError, match=r"Megatron-Bridge 0\.5\.0 reads no `model.cross_entropy`"):
        script("engine.args={model.cross_entropy: te}")
    with pytest.raises(InputError, match=r"contradicts `layout.tp`, which makes it 2"):
        script("engine.args={model.tensor_model_parallel_size: 4}")


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (("train.schedule.warmup=1000",), "would cut a warm-up of 1000 steps in silence"),
        (("layout.shard=full", "layout.pp=1"), "distributed optimizer, and shard is full"),
        (("train.global_batch=511",), "does not divide the global batch of 511"),
        (("train.precision=fp32",), "bf16 and fp8"),
        (("observe.profile={cycles: 2}",), "runs its profiler once"),
        (("observe.profile={memory: true}",), "records memory during the whole run"),
        (
            ("model={preset: llama3.1-8b, from: hf://org/base}", "train.lora={rank: 8, alpha: 16}"),
            "training all weights",
        ),
        (
            ("model={preset: gpt2, init: random}", "layout={}", "data.sequence_length=512"),
            "learns as many positions as a sample has tokens, and the model has 1024",
        ),
        ((f"model={{config: {HALF_BASE}, init: random}}",), "takes a whole number, and it is 10000.5"),
    ],
)
def test_wrong_combinations_fail_by_name(overrides: tuple[str, ...], what: str) -> None:
    with pytest.raises(InputError) as caught:
        script(*overrides)
    assert what in str(caught.value)


@settings(max_examples=40)
@given(st.text(min_size=1).filter(lambda text: "\x00" not in text))
def test_no_path_breaks_out_of_the_script(path: str) -> None:
    tree = ast.parse(script(run_folder=f"/{path}"))
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert f"/{path}/checkpoints" in texts


@pytest.mark.parametrize(
    ("data", "blends"),
    [
        ("{sequence_length: 512, train: [{path: a}]}", [["t"], None, None]),
        ("{sequence_length: 512, train: [{path: a}], validation: {path: b}}", [["t"], ["v"], None]),
    ],
)
def test_documents_that_are_trained_on_are_not_validated_on(data: str, blends: list[Any], tmp_path: Path) -> None:
    launch = build_launch(task(f"data={data}"))
    lines = next(text for name, text in launch.files.items() if name.endswith(".py")).split("\n")
    names = ("    splits = ", "    own = ", "    names = ", "    blends = ")
    picked = [line.strip() for line in lines if line.startswith(names)]
    assert len(picked) == len(names)
    (tmp_path / "data.json").write_text(json.dumps({"train": ["t"], "valid": ["v"], "test": ["v"]}))
    values: dict[str, Any] = {"json": json, "Path": lambda _: tmp_path / "data.json", "get_blend_from_list": list}
    exec("\n".join(picked), values)
    assert values["blends"] == blends
    assert any("blend_per_split=blends" in line for line in lines)
