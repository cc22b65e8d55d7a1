"""LoRA factors by native name, written as an adapter that PEFT and vLLM load.

A native tensor may hold several of Hugging Face's (queries, keys and values; gate and up): each of them gets the whole
of A and its own rows of B, which is the same update.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from trainshed.checkpoints.lora.adapter import CONFIG, PREFIX, WEIGHTS
from trainshed.errors import InputError
from trainshed.models.hf_tensors import hf_names, sources
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig


@dataclass(frozen=True)
class Factors:
    """The update of one native tensor [rows, columns] is b @ a · scale: `a` is [rank, columns], `b` [rows, rank]."""

    a: torch.Tensor
    b: torch.Tensor


def write_adapter(
    folder: Path,
    config: ModelConfig,
    factors: Mapping[str, Factors],
    *,
    alpha: float,
    rank_stabilized: bool = False,
    base: str | None = None,
) -> None:
    """Write factors, by native name, as a PEFT adapter; `base` is the model PEFT should load it onto."""
    rank = _rank(config, factors)
    table = {each.name: each for each in parameters(config)}
    tensors: dict[str, torch.Tensor] = {}
    turned = False
    for name, each in factors.items():
        modules, transposed = _split(config, table[name], each)
        turned = turned or transposed
        for module, b in modules.items():
            tensors[f"{PREFIX}{module}.lora_A.weight"] = each.a.contiguous().clone()
            tensors[f"{PREFIX}{module}.lora_B.weight"] = b.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    body = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rank_stabilized,
        "target_modules": _targets(config, tensors),
        "fan_in_fan_out": turned,
        "lora_dropout": 0.0,
        "bias": "none",
        "modules_to_save": None,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(body, indent=2, sort_keys=True) + "\n")


def _rank(config: ModelConfig, factors: Mapping[str, Factors]) -> int:
    """The one rank of all factors, each held against the tensor it is for."""
    table = {each.name: each for each in parameters(config)}
    ranks = {each.a.shape[0] for each in factors.values()}
    if len(ranks) != 1:
        raise InputError(f"factors of ranks {sorted(ranks)}", hint="give all factors one rank, and at least one factor")
    (rank,) = ranks
    for name, each in factors.items():
        parameter = table.get(name)
        if parameter is None or parameter.expert or len(parameter.shape) != 2 or name.startswith(("embedding", "pos")):
            raise InputError(
                f"`{name}` cannot be exported as an adapter",
                hint="matrices of attention, feed-forward and head can; experts, embeddings and norms cannot",
            )
        rows, columns = parameter.shape
        if (tuple(each.a.shape), tuple(each.b.shape)) != ((rank, columns), (rows, rank)):
            raise InputError(
                f"the factors of `{name}` are {list(each.a.shape)} and {list(each.b.shape)}, not "
                f"{[rank, columns]} and {[rows, rank]}"
            )
    return rank


def _split(config: ModelConfig, parameter: Parameter, factors: Factors) -> tuple[dict[str, torch.Tensor], bool]:
    """The rows of B by Hugging Face's modules, in their order, and whether those matrices are [in, out]."""
    parts: dict[str, list[torch.Tensor]] = {}
    strips = sources(config, parameter)
    for strip in strips:
        there = strip.native_rows(0, strip.rows)
        rows = factors.b[there] if isinstance(there, slice) else factors.b[torch.from_numpy(there)]
        parts.setdefault(strip.hf_name.removesuffix(".weight"), []).append(rows)
    return {module: torch.cat(rows) for module, rows in parts.items()}, strips[0].transposed


def _targets(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The adapted modules: by the end of their names where all that end so are adapted, else in full."""
    adapted = {key.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for key in tensors}
    all_modules = {name.removesuffix(".weight") for name in hf_names(config) if name.endswith(".weight")}
    found: set[str] = set()
    for module in adapted:
        ending = module.rsplit(".", 1)[-1]
        alike = {each for each in all_modules if each.rsplit(".", 1)[-1] == ending}
        found.add(ending if alike <= adapted else module)
    return sorted(found)
