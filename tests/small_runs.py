"""Small runs of the torch engine for the rank pool: their recipes, what a rank of them does, and what they leave."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from trainshed.data.run_orders import PreparedData, run_orders
from trainshed.engines.torch.job import TrainJob
from trainshed.engines.torch.rank import train_rank
from trainshed.line import resolve
from trainshed.observe.reading import steps
from trainshed.plan import layout_problems, parse_layout, resolve_layout
from trainshed.recipe import Layout, Recipe, parse_recipe
from trainshed.storage import LocalStore

_SIZES = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "vocab_size": 61, "max_positions": 32}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"family": "llama", **_SIZES, "ffn": 24, "rope": {"base": 10000.0}},
    # One embedding at both ends, learned positions, biases, norms with a bias.
    "tied": {"family": "gpt2", **_SIZES, "kv_heads": 4, "ffn": 24},
    "moe": {
        "family": "qwen3_moe",
        **_SIZES,
        "rope": {"base": 10000.0},
        "moe": {"experts": 4, "top_k": 2, "ffn": 8, "shared_ffn": 12},
    },
}


def small_recipe(model: str, *overrides: str) -> Recipe:
    """A recipe of a few steps on synthetic data in float64."""
    body = {
        "trainshed": 1,
        "name": "proof",
        "model": {"config": MODELS[model], "init": "random"},
        "data": {"synthetic": True, "sequence_length": 16},
        "train": {
            "steps": 20,
            "global_batch": 8,
            "precision": "fp64",
            "optimizer": {"lr": 1e-2},
            "schedule": {"name": "cosine", "warmup": 3, "min_lr": 1e-3},
        },
        "checkpoint": {"every": None},
    }
    if "moe" in MODELS[model]:
        body["train"] |= {"moe": {"balance_loss": 0.01, "z_loss": 1e-3}}
    return parse_recipe(yaml.safe_dump(body), overrides)


def small_job(folder: Path, recipe: Recipe, layout: str) -> TrainJob:
    """What a rank of a small run is asked to train."""
    config = recipe.model.config
    assert config is not None
    orders = run_orders(recipe, PreparedData(()), folder, build=False)
    placed = resolve_layout(Layout.model_validate(parse_layout(layout)), config)
    asked = {"sequence_length": orders.train.sequence_length, "batch_sizes": orders.train.schedule.sizes}
    problems = layout_problems(placed, config, **asked)
    assert not problems, problems
    return TrainJob(
        recipe=recipe,
        config=config,
        layout=placed,
        name=folder.name,
        steps=orders.steps,
        order=orders.train,
        validation=orders.validation,
        store=LocalStore(folder),
        folder="",
    )


def train(folder: Path, model: str, layout: str, overrides: Sequence[str] = ()) -> int:
    """Train as one rank of a small run; returns the exit code."""
    return train_rank(small_job(folder, small_recipe(model, *overrides), layout), run_folder=folder)
