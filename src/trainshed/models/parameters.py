"""The tensors of a model: global name, shape, how ranks may split it, how it is initialised; and their counts.

Names and shapes do not depend on a layout; they are the names of native checkpoints, of the optimizer's state and of
fresh weights. Rows are ordered so that every split is a plain cut:

- `qkv`: for each key/value group its query heads, its key head, its value head (Megatron's order);
- `gate_up`: rows alternate, gate 0, up 0, gate 1, up 1, …;
- `experts.*`: all experts of a layer stacked on dim 0.

This module does not import torch: `inspect` and the planner read this table on a laptop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainshed.recipe import Lora, ModelConfig

InitScheme = Literal["normal", "output", "ones", "zeros"]
"""How a fresh tensor is filled; `output` is `normal` scaled down by sqrt(2 · layers), as GPT-2 and Megatron do."""


@dataclass(frozen=True)
class Parameter:
    """One tensor of a model.

    `tp_dim` is the dim that is split over tensor-parallel ranks (of expert tensors: over expert-tensor-parallel ranks);
    None for a tensor that each of them holds whole. `expert` tensors are stacked on dim 0, which is split over
    expert-parallel ranks. `layer` is None for tensors before the first layer or after the last.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None
    init: InitScheme
    layer: int | None = None
    expert: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        product = 1
        for length in self.shape:
            product *= length
        return product

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to norms and biases."""
        return len(self.shape) > 1


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """Yield every tensor of a model, first to last."""
    yield Parameter("embedding.weight", (config.vocab_size, config.hidden), 0, "normal")
    if config.positions == "learned":
        yield Parameter("positions.weight", (config.max_positions, config.hidden), None, "normal")
    for layer in range(config.layers):
        yield from layer_parameters(config, layer)
    yield from _norm_parameters(config, "norm", None)
    if not config.tied_embeddings:
        yield Parameter("head.weight", (config.vocab_size, config.hidden), 0, "normal")


def layer_parameters(config: ModelConfig, layer: int) -> Iterator[Parameter]:
    """Yield the tensors of one layer."""
    prefix, hidden, head_dim = f"layers.{layer}", config.hidden, config.head_dim
    yield from _norm_parameters(config, f"{prefix}.attention.norm", layer)
    rows = (config.heads + 2 * config.kv_heads) * head_dim
    yield Parameter(f"{prefix}.attention.qkv.weight", (rows, hidden), 0, "normal", layer)
    if config.qkv_bias:
        yield Parameter(f"{prefix}.attention.qkv.bias", (rows,), 0, "zeros", layer)
    if config.qk_norm:
        yield Parameter(f"{prefix}.attention.query_norm.weight", (head_dim,), None, "ones", layer)
        yield Parameter(f"{prefix}.attention.key_norm.weight", (head_dim,), None, "ones", layer)
    yield Parameter(f"{prefix}.attention.out.weight", (hidden, config.heads * head_dim), 1, "output", layer)
    if config.output_bias:
        yield Parameter(f"{prefix}.attention.out.bias", (hidden,), None, "zeros", layer)
    yield from _norm_parameters(config, f"{prefix}.mlp.norm", layer)
    if config.moe is None:
        assert config.ffn is not None, "the schema asks for it wherever there are no experts"
        yield from _mlp_parameters(config, f"{prefix}.mlp", config.ffn, layer)
        return
    moe = config.moe
    up = 2 * moe.ffn if config.gated else moe.ffn
    yield Parameter(f"{prefix}.mlp.router.weight", (moe.experts, hidden), None, "normal", layer)
    yield Parameter(
        f"{prefix}.mlp.experts.{up_projection_name(config)}", (moe.experts, up, hidden), 1, "normal", layer, True
    )
    yield Parameter(f"{prefix}.mlp.experts.down", (moe.experts, hidden, moe.ffn), 2, "output", layer, True)
    if moe.shared_ffn:
        yield from _mlp_parameters(config, f"{prefix}.mlp.shared", moe.shared_ffn, layer)


def up_projection_name(config: ModelConfig) -> str:
    """The name of the projection into the feed-forward block: one matrix, with or without the gate."""
    return "gate_up" if config.gated else "up"


def parameter_count(config: ModelConfig) -> int:
    """Return the number of weights, tied ones counted once."""
    return sum(parameter.size for parameter in parameters(config))


def _norm_parameters(config: ModelConfig, name: str, layer: int | None) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (config.hidden,), None, "ones", layer)
    if config.norm == "layer":
        yield Parameter(f"{name}.bias", (config.hidden,), None, "zeros", layer)


def _mlp_parameters(config: ModelConfig, prefix: str, ffn: int, layer: int) -> Iterator[Parameter]:
    rows = 2 * ffn if config.gated else ffn
    yield Parameter(f"{prefix}.{up_projection_name(config)}.weight", (rows, config.hidden), 0, "normal", layer)
    if config.mlp_bias:
        yield Parameter(f"{prefix}.{up_projection_name(config)}.bias", (rows,), 0, "zeros", layer)
    yield Parameter(f"{prefix}.down.weight", (config.hidden, ffn), 1, "output", layer)
    if config.mlp_bias:
        yield Parameter(f"{prefix}.down.bias", (config.hidden,), None, "zeros", layer)


def lora_parameter_count(config: ModelConfig, lora: Lora) -> int:
    """Return the number of weights of the adapters: for each projection rank x (inputs + outputs)."""
    shapes = dict(_lora_projections(config))
    per_layer = sum(sum(shapes[target]) for target in lora.targets if target in shapes)
    return config.layers * lora.rank * per_layer


def trained_fraction(config: ModelConfig, lora: Lora | None) -> float:
    """Return which part of all weights a run trains."""
    if lora is None:
        return 1.0
    adapters = lora_parameter_count(config, lora)
    return adapters / (adapters + parameter_count(config))


def _lora_projections(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    """Inputs and outputs of each projection of a layer; experts have adapters of their own."""
    hidden, queries, keys = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield from {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}.items()
    yield "o_proj", (queries, hidden)
    ffn = config.ffn if config.moe is None else config.moe.ffn
    experts = 1 if config.moe is None else config.moe.experts
    assert ffn is not None, "the schema asks for it wherever there are no experts"
    for name in ("gate_proj", "up_proj", "down_proj") if config.gated else ("up_proj", "down_proj"):
        yield name, (experts * hidden, experts * ffn)
