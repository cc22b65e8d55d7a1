"""The layout in Megatron's arguments: pipeline, sharding, recomputation; both directions, for rows of `keys.py`."""

from __future__ import annotations

import re
from typing import Any

from trainshed.engines.key_table import OMIT, KeyRow
from trainshed.engines.keys import format_value
from trainshed.engines.launch import EngineTask
from trainshed.engines.megatron.argument_import import ArgumentImport
from trainshed.engines.megatron.arguments import versions_with
from trainshed.plan.layout import RankLayout

_FSDP = {"zero2": "optim_grads", "full": "optim_grads_params"}


def uses_fsdp(layout: RankLayout) -> bool:
    """Whether gradients or weights are shared out, which is Megatron's FSDP."""
    return layout.shard in _FSDP


def _is_even(layout: RankLayout) -> bool:
    return len(set(layout.stages)) == 1


def render_virtual_stages(task: EngineTask) -> dict[str, int | None]:
    """Return the chunks of a rank; uneven ones are in the layout that is written out."""
    chunks = task.layout.vp if _is_even(task.layout) and task.layout.vp > 1 else None
    return {"num_layers_per_virtual_pipeline_stage": None, "num_virtual_stages_per_pipeline_rank": chunks}


def read_virtual_stages(config: ArgumentImport) -> Any:
    """Return `layout.vp`."""
    chunks = _virtual_stages(config, config.get("pipeline_model_parallel_size"))
    dests = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    config.note_mapped(f"layout.vp: {chunks}", *dests)
    return OMIT if chunks == 1 else chunks


def _virtual_stages(config: ArgumentImport, pp: int) -> int:
    if chunks := config.get("num_virtual_stages_per_pipeline_rank"):
        return chunks
    layers, layers_of_chunk = config.get("num_layers"), config.get("num_layers_per_virtual_pipeline_stage")
    if layers_of_chunk and layers:
        return max(1, layers // pp // layers_of_chunk)
    written = config.get("pipeline_model_parallel_layout")
    return len(_unroll_layout(written).split("|")) // pp if written else 1


def render_stages(task: EngineTask) -> dict[str, Any]:
    """Return uneven chunks in Megatron's notation: E is the embedding, t a layer, L the loss."""
    chunks = "|".join(f"t*{layers}" for layers in task.layout.stages)
    return {
        "pipeline_model_parallel_layout": None if _is_even(task.layout) else f"E{chunks}L",
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
    }


def read_stages(config: ArgumentImport) -> Any:
    """Return `layout.stages`, where chunks are uneven."""
    stages = _stages(config, config.get("pipeline_model_parallel_size"))
    config.note_mapped(f"layout.stages: {format_value(stages)}", "pipeline_model_parallel_layout")
    config.note_mapped("layout.stages", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    return OMIT if stages is None else stages


def _stages(config: ArgumentImport, pp: int) -> list[int] | None:
    if written := config.get("pipeline_model_parallel_layout"):
        return [chunk.count("t") for chunk in _unroll_layout(written).split("|")]
    layers = config.get("num_layers")
    first, last = config.get("decoder_first_pipeline_num_layers"), config.get("decoder_last_pipeline_num_layers")
    if pp == 1 or (first is None and last is None) or not layers:
        return None
    between = pp - (first is not None) - (last is not None)
    left = layers - (first or 0) - (last or 0)
    middle = [left // between] * between if between else []
    return [*([] if first is None else [first]), *middle, *([] if last is None else [last])]


def _unroll_layout(layout: str) -> str:
    """Unroll Megatron's shorthand: `Et*3|(tt|)*2L` has four chunks."""
    layout = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(pattern, lambda match: match.group(1) * int(match.group(2)), layout)
    return layout


def read_experts(config: ArgumentImport) -> Any:
    """Return `layout.etp`, which Megatron takes to be tp where it is not given."""
    if not config.get("num_experts"):
        return OMIT
    etp = config.get("expert_tensor_parallel_size") or config.get("tensor_model_parallel_size")
    config.note_mapped(f"layout.etp: {etp}", "expert_tensor_parallel_size")
    return OMIT if etp == 1 else etp


def render_sharding(task: EngineTask) -> dict[str, Any]:
    """Return what dp ranks share out."""
    return {
        "use_distributed_optimizer": task.layout.shard != "none",
        "use_megatron_fsdp": uses_fsdp(task.layout),
        "data_parallel_sharding_strategy": _FSDP.get(task.layout.shard),
    }


def sharding(config: ArgumentImport) -> str:
    """Return what the arguments share out among dp ranks."""
    if config.get("use_megatron_fsdp"):
        strategies = {theirs: ours for ours, theirs in _FSDP.items()}
        return strategies.get(config.get("data_parallel_sharding_strategy"), "zero1")
    return "zero1" if config.get("use_distributed_optimizer") else "none"


def read_sharding(config: ArgumentImport) -> Any:
    """Return `layout.shard`."""
    shard = sharding(config)
    dests = ("use_distributed_optimizer", "use_megatron_fsdp", "data_parallel_sharding_strategy")
    config.note_mapped(f"layout.shard: {shard}", *dests)
    return OMIT if shard == "zero1" else shard


# From 0.16 on Megatron's distributed optimizer has two formats. It cannot load its usual one into weights of fp32: it
# copies into a view of a parameter that requires a gradient, with gradients on, and PyTorch refuses that.
OPTIMIZER_FORMAT_ROW = KeyRow(
    ("dist_ckpt_optim_fully_reshardable",),
    "engine.args",
    lambda task: task.layout.shard == "zero1" and task.recipe.train.precision == "fp32",
    lambda config: sharding(config) == "zero1" and not (config.get("bf16") or config.get("fp16")),
    chosen=True,
    versions=versions_with("dist_ckpt_optim_fully_reshardable"),
)


def render_recompute(task: EngineTask) -> dict[str, Any]:
    """Return what is computed again in the backward pass: full is every layer."""
    recompute = task.layout.recompute
    return {
        "recompute_granularity": None if recompute == "none" else recompute,
        "recompute_activations": False,
        "recompute_method": "uniform" if recompute == "full" else None,
        "recompute_num_layers": 1 if recompute == "full" else None,
    }


def read_recompute(config: ArgumentImport) -> Any:
    """Return `layout.recompute`."""
    recompute = "selective" if config.get("recompute_activations") else config.get("recompute_granularity") or "none"
    config.note_mapped(f"layout.recompute: {recompute}", "recompute_granularity", "recompute_activations")
    details = ("recompute_method", "recompute_num_layers")
    if recompute == "full" and tuple(config.get(dest) for dest in details) == ("uniform", 1):
        config.note_mapped("layout.recompute: full", *details)
    else:
        config.drop("full recomputes every layer here", *details)
    return OMIT if recompute == "none" else recompute


def slides_over_ranks(task: EngineTask) -> bool:
    """Whether a window slides over several context-parallel ranks."""
    return task.layout.cp > 1 and task.config.sliding_window is not None
