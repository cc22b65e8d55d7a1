"""What GGUF says of a model: its architecture's name, its keys, its tensors' names, and how rows are turned for it.

Sources: the GGUF specification (ggml/docs/gguf.md) and llama.cpp's `convert_hf_to_gguf.py`, whose files these are held
against. llama.cpp turns neighbours of a head in its `llama` architecture, and halves in the others; so rows of queries
and keys are permuted for the first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from trainshed.checkpoints.quantization import gguf_package
from trainshed.errors import InputError
from trainshed.models.export_support import gguf_architecture
from trainshed.models.hf_tensors import HfTensor, hf_tensors
from trainshed.recipe import ModelConfig
from trainshed.recipe.load import to_plain

CONFIG_KEY = "trainshed.model_config"
"""A key of ours: the architecture as a recipe writes it. The other keys are checked against it."""
ROPE_FACTORS = "rope_freqs.weight"
_FILE_TYPES = {"fp32": 0, "fp16": 1, "q8_0": 7, "bf16": 32}
KeyValue = int | float | str | bool


def model_keys(config: ModelConfig, dtype: str) -> dict[str, KeyValue]:
    """Return the keys that describe a model; readers compute by them."""
    name = gguf_architecture(config)
    assert config.rope is not None, "the architectures have rotary positions"
    keys: dict[str, KeyValue] = {
        "general.file_type": _FILE_TYPES[dtype],
        "general.quantization_version": 2,
        f"{name}.block_count": config.layers,
        f"{name}.context_length": config.max_positions,
        f"{name}.embedding_length": config.hidden,
        f"{name}.feed_forward_length": config.ffn or 0,
        f"{name}.attention.head_count": config.heads,
        f"{name}.attention.head_count_kv": config.kv_heads,
        f"{name}.attention.key_length": config.head_dim,
        f"{name}.attention.value_length": config.head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": float(config.norm_eps),
        f"{name}.rope.dimension_count": config.head_dim,
        f"{name}.rope.freq_base": float(config.rope.base),
        f"{name}.vocab_size": config.vocab_size,
        CONFIG_KEY: json.dumps(to_plain(config), sort_keys=True),
    }
    scaling = config.rope.scaling
    if scaling is not None and scaling.kind == "linear":
        keys |= {f"{name}.rope.scaling.type": "linear", f"{name}.rope.scaling.factor": float(scaling.factor)}
    return keys


def rope_factors(config: ModelConfig) -> torch.Tensor | None:
    """Return by how much each frequency is divided, of a model that stretches them as Llama 3.1 does; else None.

    llama.cpp reads them as a tensor; the formula is that of Llama 3.1's release, as in transformers' `rope_utils`.
    """
    scaling = config.rope.scaling if config.rope is not None else None
    if scaling is None or scaling.kind != "llama3":
        return None
    assert config.rope is not None
    assert scaling.original_positions is not None, "the schema asks for it"
    assert scaling.low_frequency_factor is not None, "the schema asks for it"
    assert scaling.high_frequency_factor is not None, "the schema asks for it"
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    factors = []
    for channel in range(0, config.head_dim, 2):
        wavelength = 2 * math.pi * config.rope.base ** (channel / config.head_dim)
        turns = scaling.original_positions / wavelength
        if turns > high:
            factors.append(1.0)
        elif turns < low:
            factors.append(scaling.factor)
        else:
            smooth = (turns - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return torch.tensor(factors, dtype=torch.float32)


@dataclass(frozen=True)
class GgufTensor:
    """One tensor under GGUF's name; `heads` is how many its rows are permuted by, None: they are as transformers'."""

    name: str
    hf: HfTensor
    heads: int | None = None


def gguf_tensors(config: ModelConfig) -> Iterator[GgufTensor]:
    """Yield every tensor of a model."""
    gguf = gguf_package()
    architecture = gguf_architecture(config)
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.layers)
    for tensor in hf_tensors(config):
        name = names.get_name(tensor.name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise InputError(f"GGUF's architecture `{architecture}` has no tensor for `{tensor.name}`", where="format")
        heads = None
        if architecture == "llama" and ".q_proj." in tensor.name:
            heads = config.heads
        elif architecture == "llama" and ".k_proj." in tensor.name:
            heads = config.kv_heads
        yield GgufTensor(name, tensor, heads)


def permuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows of queries or keys in llama.cpp's order: the halves of a head interleaved."""
    return rows.view(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return such rows in transformers' order."""
    parts = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(np.swapaxes(parts, 1, 2)).reshape(rows.shape)
