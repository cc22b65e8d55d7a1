"""LoRA adapters in a torchtune configuration: the rows of `train.lora`, and what torchtune's adapters do not have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from trainshed.engines.importing import ConfigImport
from trainshed.engines.key_table import OMIT, KeyRow, same
from trainshed.engines.launch import EngineTask
from trainshed.engines.torchtune.builders import TorchtuneBuilder
from trainshed.recipe import Checkpoint
from trainshed.recipe.section import Problem

_MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""torchtune adapts all three of a feed-forward block or none."""
_ATTENTION_PROJECTIONS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}
"""The recipe's names of the attention's projections to torchtune's."""
WITHOUT_DORA = ("llama3_1_405b",)
"""Builders whose adapters take no `use_dora`."""


def trains_adapters(task: EngineTask) -> bool:
    """Whether a task trains adapters."""
    return task.recipe.train.lora is not None


def has_adapters(config: ConfigImport) -> bool:
    """Whether a configuration trains adapters."""
    return "model.lora_rank" in config or "lora_rank" in config


def _render_targets(task: EngineTask) -> dict[str, Any]:
    assert task.recipe.train.lora is not None, "asked for adapters"
    targets = task.recipe.train.lora.projections
    return {
        "model.lora_attn_modules": [theirs for ours, theirs in _ATTENTION_PROJECTIONS.items() if ours in targets],
        "model.apply_lora_to_mlp": all(name in targets for name in _MLP_PROJECTIONS),
    }


def _read_targets(config: ConfigImport) -> Any:
    if not has_adapters(config):
        return OMIT
    modules = config.get("model.lora_attn_modules", [])
    targets = [ours for ours, theirs in _ATTENTION_PROJECTIONS.items() if theirs in modules]
    if config.get("model.apply_lora_to_mlp"):
        targets += _MLP_PROJECTIONS
    config.note_mapped(f"train.lora.targets: [{', '.join(targets)}]", "model.lora_attn_modules")
    config.note_mapped("train.lora.targets", "model.apply_lora_to_mlp")
    return targets


def _read_quantization(config: ConfigImport) -> Any:
    """Return `train.lora.quantize`; builders called `qlora_…` hold their base in NF4 without a key that says it."""
    named = str(config.get("model._component_", "")).rpartition(".")[2].startswith("qlora_")
    return "nf4" if named or config.get("model.quantize_base") else OMIT


def read_saving(config: ConfigImport) -> int | None:
    """Return `checkpoint.every`."""
    every = config.get("save_every_n_steps")
    if every is None or not has_adapters(config):
        return every
    config.add_mistake(
        "save_every_n_steps",
        "torchtune 0.7.0's LoRA recipe fails when it saves by steps: its last checkpoint has no number of a step",
        "null, which saves after every pass; engine: torch saves adapters by steps",
    )
    return None


def _only_adapters(row: KeyRow) -> KeyRow:
    """Return a row that only tasks and files with adapters have."""
    read = row.read
    assert read is not None
    return KeyRow(row.keys, row.path, row.render, lambda c: read(c) if has_adapters(c) else OMIT, when=trains_adapters)


def _whole_number(value: float) -> int | float:
    return int(value) if value.is_integer() else value


def _quantizes(task: EngineTask) -> Any:
    assert task.recipe.train.lora is not None, "asked for adapters"
    return True if task.recipe.train.lora.quantize == "nf4" else OMIT


ADAPTER_ROWS = (
    KeyRow(
        ("model.lora_attn_modules", "model.apply_lora_to_mlp"),
        "train.lora.targets",
        _render_targets,
        _read_targets,
        when=trains_adapters,
    ),
    _only_adapters(same("model.lora_rank", "train.lora.rank", default=8)),
    _only_adapters(same("model.lora_alpha", "train.lora.alpha", default=16, to_engine=_whole_number, to_recipe=float)),
    _only_adapters(same("model.lora_dropout", "train.lora.dropout", default=0.0, to_recipe=float)),
    _only_adapters(
        same(
            "model.use_dora",
            "train.lora.dora",
            default=False,
            unless=False,
            to_engine=lambda dora: dora or OMIT,
        )
    ),
    _only_adapters(KeyRow(("model.quantize_base",), "train.lora.quantize", _quantizes, _read_quantization)),
)


def adapter_problems(task: EngineTask, builder: TorchtuneBuilder | None) -> Iterator[Problem]:
    """Yield what torchtune's adapters do not have."""
    lora = task.recipe.train.lora
    if lora is None:
        return
    some = [name for name in _MLP_PROJECTIONS if name in lora.projections]
    if some and len(some) < len(_MLP_PROJECTIONS):
        yield Problem(
            ("train", "lora", "targets"),
            f"torchtune adapts all of {', '.join(_MLP_PROJECTIONS)} or none",
            "write all three, or none of them",
        )
    if "experts" in lora.targets:
        yield Problem(("train", "lora", "targets"), "torchtune is rendered for models without experts", "engine: torch")
    if task.recipe.checkpoint.every not in (None, Checkpoint.model_fields["every"].default):
        yield Problem(
            ("checkpoint", "every"),
            "torchtune's LoRA recipe saves after every pass over the data: that of 0.7.0 fails when it saves by steps",
            "every: null, or engine: torch",
        )
    if task.recipe.train.optimizer.clip is not None and task.layout.dp == 1:
        yield Problem(
            ("train", "optimizer", "clip"),
            "torchtune's LoRA recipe clips gradients that several GPUs share, and fails with one",
            "clip: null, or engine: torch",
        )
    if lora.rslora:
        same_scale = _whole_number(round(lora.alpha * math.sqrt(lora.rank), 6))
        yield Problem(
            ("train", "lora", "rslora"),
            "torchtune scales adapters by alpha / rank",
            f"delete it and write `alpha: {same_scale}`, which is the same scale",
        )
    if lora.quantize == "int8":
        yield Problem(("train", "lora", "quantize"), "torchtune holds frozen weights in NF4, not in int8", "nf4")
    if lora.dora and builder is not None and builder.name in WITHOUT_DORA:
        yield Problem(("train", "lora", "dora"), f"torchtune has no DoRA for {builder.preset}", "delete it")
