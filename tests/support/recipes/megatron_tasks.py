"""Tasks for the Megatron adapter: recipes as people write them, on the layouts they were published with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from trainshed.catalog import model_preset
from trainshed.engines.launch import EngineSite, EngineTask
from trainshed.plan.layout import resolve_layout
from trainshed.recipe import Layout, ModelConfig, Recipe, parse_recipe

RUN, JOB = "/store/runs/demo/1a2b3c4d", "/store/runs/demo/1a2b3c4d/job"


def megatron_recipe(preset: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe on prepared text, for Megatron."""
    body = {
        "trainshed": 1,
        "name": "demo",
        "model": {"preset": preset, "init": "random"},
        "tokenizer": "hf://org/name",
        "data": {"sequence_length": 2048, "train": [{"path": "corpus/*.jsonl"}]},
        "train": {
            "steps": 100,
            "global_batch": 512,
            "optimizer": {"lr": 3e-4},
            "schedule": {"name": "cosine", "warmup": 10, "min_lr": 3e-5},
        },
        "engine": "megatron",
    }
    return parse_recipe(yaml.safe_dump(body), overrides)


def task_of(
    recipe: Recipe, config: ModelConfig, *, nodes: int = 1, gpus_per_node: int = 8, layout: Any = None, **place: Any
) -> EngineTask:
    """A recipe on a layout; `place` are keys of `EnginePlace`."""
    written = Layout() if isinstance(recipe.layout, str) else recipe.layout
    wanted = written if layout is None else Layout.model_validate(layout)
    placed = resolve_layout(wanted, config, world_size=nodes * gpus_per_node)
    assert recipe.train.steps is not None
    at = EngineSite(RUN, JOB, nodes, gpus_per_node, **place)
    return EngineTask(recipe, config, placed, recipe.train.steps, at)


def megatron_task(preset: str, *overrides: str, nodes: int = 1, layout: Any = None, **place: Any) -> EngineTask:
    """A preset of the catalog with some keys of the recipe changed."""
    keys = [] if layout is None else [f"layout={yaml.safe_dump(layout, default_flow_style=True).strip()}"]
    recipe = megatron_recipe(preset, [*overrides, *keys])
    return task_of(recipe, model_preset(preset), nodes=nodes, layout=layout, **place)


def golden_tasks() -> dict[str, EngineTask]:
    """The launches that are kept as golden files."""
    return {
        "llama3-8b": megatron_task("llama3-8b", layout={"tp": 2}),
        # GKE's llama3-70b-fp8 on 128 GPUs, as Megatron would train it.
        "llama3-70b-fp8": megatron_task(
            "llama3-70b",
            "train.precision=fp8",
            "train.global_batch=1024",
            "data.sequence_length=8192",
            nodes=16,
            layout={"tp": 4, "pp": 4, "vp": 5, "cp": 2},
        ),
        # Azure's 175b chart, on the 16 nodes that it takes.
        "gpt-175b-fp16": megatron_task(
            "gpt-175b",
            "train.precision=fp16",
            "train.steps=1500",
            "train.optimizer={lr: 6.0e-5, betas: [0.9, 0.95]}",
            "train.schedule={name: cosine, warmup: 2, min_lr: 6.0e-6}",
            "train.dropout=0.1",
            "data.validation={tokens: /data/valid, every: 100, batches: 10}",
            "checkpoint={every: 100, async: false}",
            nodes=16,
            layout={"tp": 8, "pp": 16},
            sharp=True,
        ),
        "mixtral-8x7b-ep8": megatron_task(
            "mixtral-8x7b",
            "train.moe={balance_loss: 0.01, z_loss: 0.001}",
            "train.global_batch=256",
            "engine.version=0.16.1",
            nodes=4,
            layout={"pp": 4, "vp": 8, "ep": 8},
        ),
        # Uneven stages, as 61 layers ask for.
        "deepseek-v3": megatron_task(
            "deepseek-v3",
            "train.moe={balance_loss: 0.0001, bias_update: 0.0005}",
            "train.global_batch=2048",
            "data.sequence_length=4096",
            nodes=32,
            layout={"pp": 8, "ep": 32, "stages": [7, 8, 8, 8, 8, 8, 7, 7], "recompute": "full"},
        ),
        # Continued pretraining of the MinIO seed, on MI300X.
        "llama3.1-70b-cpt-amd": megatron_task(
            "llama3.1-70b",
            "model.from=s3://default-bucket/models/meta-llama/Llama-3.1-70B",
            "model.init=null",
            "train.steps=20",
            "train.global_batch=176",
            "train.optimizer={lr: 1.0e-5, betas: [0.9, 0.999]}",
            "train.schedule={name: cosine, min_lr: 1.0e-6}",
            "data.split={train: 0.969, validation: 0.03, test: 0.001}",
            "data.validation={every: 10, batches: 10}",
            "checkpoint.every=20",
            nodes=2,
            layout={"tp": 8, "micro_batch": 11, "recompute": "selective"},
            vendor="amd",
        ),
    }
