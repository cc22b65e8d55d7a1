"""Recipes of small runs on synthetic data: a dense, a tied and an expert model, and what a rank is asked to train."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trainshed.data.order import run_orders
from trainshed.data.tokens.token_source import RunTokens
from trainshed.plan import layout_problems, parse_layout, resolve_layout
from trainshed.recipe import Layout, Recipe, parse_recipe
from trainshed.storage import LocalStore
from trainshed.workflow.run import phase_jobs

if TYPE_CHECKING:
    from trainshed.engines.torch.rank_env import TrainJob

_SIZES = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "vocab_size": 61, "max_positions": 32}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"family": "llama", **_SIZES, "ffn": 24, "rope": {"base": 10000.0}},
    # One embedding at both ends, learned positions, biases everywhere.
    "tied": {"family": "gpt2", **_SIZES, "kv_heads": 4, "ffn": 24},
    "moe": {
        "family": "qwen3_moe",
        **_SIZES,
        "rope": {"base": 10000.0},
        "moe": {"experts": 4, "top_k": 2, "ffn": 8, "shared_ffn": 12},
    },
    # Norms after blocks, over all heads of a rank and its neighbours; a window in all layers but each fourth; YaRN.
    "olmo3": {
        "family": "olmo3",
        **_SIZES,
        "layers": 4,
        "ffn": 24,
        "rope": {"base": 1e4, "local_base": 1e4, "scaling": {"kind": "yarn", "factor": 4.0, "original_positions": 8}},
        "sliding_window": 5,
        "attention_pattern": ["window", "window", "window", "full"],
    },
    # Norms before and after, two rotary tables, a stretched one among them, an embedding that is scaled and tied.
    "gemma3": {
        "family": "gemma3_text",
        **_SIZES,
        "ffn": 24,
        "rope": {"base": 1e6, "local_base": 1e4, "scaling": {"kind": "linear", "factor": 8.0}},
        "sliding_window": 5,
        "attention_pattern": ["window", "full"],
        "query_scalar": 6,
    },
    # Scores and logits that are bent.
    "gemma2": {
        "family": "gemma2",
        **_SIZES,
        "ffn": 24,
        "rope": {"base": 1e4},
        "sliding_window": 5,
        "attention_pattern": ["window", "full"],
        "attention_soft_cap": 0.5,
        "logit_soft_cap": 1.0,
    },
    # Biases on all projections, gate and up among them.
    "biases": {
        "family": "llama",
        **_SIZES,
        "ffn": 24,
        "rope": {"base": 1e4},
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
    },
    "phi3": {"family": "phi3", **_SIZES, "ffn": 24, "rope": {"base": 1e4, "fraction": 0.5}},
    "nemotron": {"family": "nemotron", **_SIZES, "ffn": 24, "rope": {"base": 1e4, "fraction": 0.5}},
}
MODELS["gpt_oss"] = {
    "family": "gpt_oss",
    **_SIZES,
    "rope": {"base": 1e4, "scaling": {"kind": "yarn", "factor": 4.0, "original_positions": 8, "truncate": False}},
    "sliding_window": 5,
    "attention_pattern": ["window", "full"],
    "swiglu_limit": 0.3,
    "moe": {"experts": 4, "top_k": 2, "ffn": 8, "router_bias": True},
}
# Chunks and no positions, a temperature that counts at once, experts in the second layer only.
MODELS["llama4"] = {
    "family": "llama4_text",
    **_SIZES,
    "ffn": 24,
    "rope": {"base": 1e4, "interleaved": True, "local_only": True},
    "attention_chunk": 5,
    "attention_pattern": ["chunk", "full"],
    "attention_temperature": {"scale": 0.5, "tokens": 3},
    "qk_l2_norm": True,
    "moe": {
        "experts": 4,
        "top_k": 1,
        "ffn": 8,
        "shared_ffn": 8,
        "scores": "sigmoid",
        "normalize_top_k": False,
        "scale_inputs": True,
        "every": 2,
    },
}
MODELS["latent"] = {
    "family": "deepseek_v3",
    **{key: value for key, value in _SIZES.items() if key not in ("kv_heads", "head_dim")},
    "ffn": 24,
    "rope": {"base": 100.0, "scaling": {"kind": "yarn", "factor": 4.0, "original_positions": 8, "mscale_all_dim": 0.7}},
    "mla": {"query_rank": 10, "kv_rank": 6, "nope_dim": 4, "rope_dim": 2, "value_dim": 3},
    # One layer without experts, one with; a token visits two experts of two out of four groups.
    "moe": {
        "experts": 8,
        "top_k": 2,
        "ffn": 8,
        "shared_ffn": 12,
        "dense_first": 1,
        "scale": 1.5,
        "scores": "sigmoid",
        "score_bias": True,
        "groups": 4,
        "top_groups": 2,
    },
}
ALONE = "micro_batch=2"
"""The layout that others are held against: one process."""


def recipe_text(model: str) -> str:
    """A recipe of 20 steps on synthetic data, in float64; its vocabulary is odd, so that no tp divides it."""
    train: dict[str, Any] = {
        "steps": 20,
        "global_batch": 8,
        "precision": "fp64",
        "optimizer": {"lr": 3e-3},  # with 1e-2 a step now and then multiplies rounding by a million
        # Not to the end of the run: a run that is made longer must not change its past.
        "schedule": {"name": "cosine", "warmup": 3, "decay": 40, "min_lr": 1e-3},
    }
    if "moe" in MODELS[model]:
        train["moe"] = {"balance_loss": 0.01, "z_loss": 1e-3}
    if "mla" in MODELS[model]:
        train["moe"]["bias_update"] = 0.02  # so large that it changes choices within 20 steps
    body = {
        "trainshed": 1,
        "name": "proof",
        "model": {"config": MODELS[model], "init": "random"},
        "data": {"synthetic": True, "sequence_length": 16},
        "train": train,
        "checkpoint": {"every": None},
    }
    return yaml.safe_dump(body, sort_keys=False)


def small_recipe(model: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe with some keys changed."""
    return parse_recipe(recipe_text(model), overrides)


def small_job(folder: Path, recipe: Recipe, layout: str, *, uneven: bool = False, checked: bool = True) -> TrainJob:
    """What a rank of a small run is asked to train.

    `uneven` is how an elastic run goes on that has lost nodes; without `checked` the layout may be an illegal one.
    """
    # The client's tests read recipes of this module where there is no torch.
    from trainshed.engines.torch.rank_env import TrainJob

    assert recipe.model.config is not None
    config = recipe.trained_architecture(recipe.model.config)
    orders = run_orders(recipe, RunTokens(()), folder, build=False)
    placed = replace(resolve_layout(Layout.model_validate(parse_layout(layout)), config), uneven=uneven)
    asked = {"sequence_length": orders.train.sequence_length, "batch_sizes": orders.train.schedule.sizes}
    problems = layout_problems(placed, config, **asked)
    assert not (checked and problems), problems
    return TrainJob(
        recipe=recipe,
        config=config,
        layout=placed,
        name=folder.name,
        steps=orders.steps,
        order=orders.train,
        validations=orders.validations,
        store=LocalStore(folder),
        folder="",
        phases=phase_jobs(recipe, config, orders.phases, placed),
    )


def world_size(layout: str) -> int:
    """How many ranks a layout is."""
    keys = parse_layout(layout)
    return math.prod(int(str(keys.get(key, 1))) for key in ("tp", "pp", "cp", "dp"))
