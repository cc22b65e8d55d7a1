"""The tensors of a model: global name, shape, how ranks may split it, how it is initialised; and their counts.

Names and shapes do not depend on a layout; they are the names of native checkpoints, of the optimizer's state and of
fresh weights. Rows are ordered so that every split is a plain cut:

- `qkv`: for each key/value group its query heads, its key head, its value head (Megatron's order);
- `gate_up`: rows alternate, gate 0, up 0, gate 1, up 1, …;
- `experts.*`: all experts of a layer stacked on dim 0, those of biases too (`gate_up_bias`, `down_bias`);
- layers for multi-token prediction follow the last one: they are like the others, and also have `mtp.*`;
- latent attention (`mla`): `q_up` and `kv_up` head by head, of a head first what has no position, then its rotary part
  (`q_up`) or its value (`kv_up`); `kv_down` first what keys and values are computed from, then the shared rotary key.

Adapters (LoRA) are tensors of their own, one pair for each of Hugging Face's projections, below the module that holds
the projection: `attention.qkv.lora.q_proj.a` [rank, in] and `.b` [out, rank]. The rows of `b` are in Hugging Face's
order. `.magnitude` [out] is DoRA's length of each row. Those of experts are stacked as the experts are. The rows of
added tokens, which are trained beside adapters, are `embedding.added.weight` and `head.added.weight` [count, hidden].

This module does not import torch: `inspect` and the planner read this table on a laptop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from trainshed.recipe import Lora, ModelConfig
from trainshed.recipe.model_parts import Mla
from trainshed.recipe.train import LoraProjection

InitScheme = Literal["normal", "output", "ones", "zeros", "kaiming_uniform", "row_norms", "base_rows"]
"""How a fresh tensor is filled; `output` is `normal` scaled down by sqrt(2 · layers), as GPT-2 and Megatron do.

`kaiming_uniform` is that of `nn.Linear`: within ± 1 / sqrt(in). `row_norms` are the lengths of the rows of the weight
that an adapter is for, `base_rows` some of its rows; both are known once the weight is."""


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
    buffer: bool = False
    """State that no gradient trains: it is not counted as a weight, and stays in fp32 wherever weights have less."""

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
        return self.is_matrix

    @property
    def is_matrix(self) -> bool:
        """Whether tokens are multiplied with it; of stacked experts, with that of each."""
        return len(self.shape) > (2 if self.expert else 1)


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """Yield every tensor of a model, first to last."""
    yield Parameter("embedding.weight", (config.vocab_size, config.hidden), 0, "normal")
    if config.positions == "learned":
        yield Parameter("positions.weight", (config.max_positions, config.hidden), None, "normal")
    for layer in range(config.layers):
        yield from layer_parameters(config, layer)
    for layer in range(config.layers, config.layers + config.mtp_layers):
        yield from _mtp_parameters(config, layer)
        yield from layer_parameters(config, layer)
    yield from _norm_parameters(config, "norm", None)
    if not config.tied_embeddings:
        yield Parameter("head.weight", (config.vocab_size, config.hidden), 0, "normal")


def _mtp_parameters(config: ModelConfig, layer: int) -> Iterator[Parameter]:
    """Yield what a layer for multi-token prediction has besides: how its input is made, and its own last norm."""
    prefix, hidden = f"layers.{layer}.mtp", config.hidden
    yield from _norm_parameters(config, f"{prefix}.embedding_norm", layer)
    yield from _norm_parameters(config, f"{prefix}.hidden_norm", layer)
    yield Parameter(f"{prefix}.projection.weight", (hidden, 2 * hidden), None, "normal", layer)
    yield from _norm_parameters(config, f"{prefix}.norm", layer)


def is_unused_mtp(config: ModelConfig, name: str) -> bool:
    """Whether a tensor is of a layer for multi-token prediction that an architecture does not have."""
    first, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return first == "layers" and number.isdecimal() and int(number) >= config.layers + config.mtp_layers


def layer_parameters(config: ModelConfig, layer: int) -> Iterator[Parameter]:
    """Yield the tensors of one layer."""
    prefix, hidden = f"layers.{layer}", config.hidden
    if config.norm_placement != "post":
        yield from _norm_parameters(config, f"{prefix}.attention.norm", layer)
    yield from _attention_parameters(config, f"{prefix}.attention", layer)
    if config.norm_placement != "pre":
        yield from _norm_parameters(config, f"{prefix}.attention.post_norm", layer)
    if config.norm_placement != "post":
        yield from _norm_parameters(config, f"{prefix}.mlp.norm", layer)
    if not config.has_experts(layer):
        assert config.ffn is not None, "the schema asks for it wherever there are no experts"
        yield from _mlp_parameters(config, f"{prefix}.mlp", config.ffn, layer)
        if config.norm_placement != "pre":
            yield from _norm_parameters(config, f"{prefix}.mlp.post_norm", layer)
        return
    moe = config.moe
    assert moe is not None, "a layer with experts"
    up = 2 * moe.ffn if config.gated else moe.ffn
    yield Parameter(f"{prefix}.mlp.router.weight", (moe.experts, hidden), None, "normal", layer)
    if moe.router_bias:
        yield Parameter(f"{prefix}.mlp.router.bias", (moe.experts,), None, "zeros", layer)
    if moe.score_bias:
        yield Parameter(f"{prefix}.mlp.router.score_bias", (moe.experts,), None, "zeros", layer, buffer=True)
    experts, up_name = f"{prefix}.mlp.experts", up_projection_name(config)
    yield Parameter(f"{experts}.{up_name}", (moe.experts, up, hidden), 1, "normal", layer, True)
    if config.mlp_bias:
        yield Parameter(f"{experts}.{up_name}_bias", (moe.experts, up), 1, "zeros", layer, True)
    yield Parameter(f"{experts}.down", (moe.experts, hidden, moe.ffn), 2, "output", layer, True)
    if config.mlp_bias:
        yield Parameter(f"{experts}.down_bias", (moe.experts, hidden), None, "zeros", layer, True)
    if moe.shared_ffn:
        yield from _mlp_parameters(config, f"{prefix}.mlp.shared", moe.shared_ffn, layer)


def _attention_parameters(config: ModelConfig, prefix: str, layer: int) -> Iterator[Parameter]:
    hidden, head_dim = config.hidden, config.head_dim
    if config.mla is not None:
        yield from _latent_parameters(config, config.mla, prefix, layer)
        return
    rows = (config.heads + 2 * config.kv_heads) * head_dim
    yield Parameter(f"{prefix}.qkv.weight", (rows, hidden), 0, "normal", layer)
    if config.qkv_bias:
        yield Parameter(f"{prefix}.qkv.bias", (rows,), 0, "zeros", layer)
    if config.qk_norm:
        whole = config.qk_norm_span == "projection"
        for name, heads in (("query", config.heads), ("key", config.kv_heads)):
            shape, tp_dim = ((heads * head_dim,), 0) if whole else ((head_dim,), None)
            yield Parameter(f"{prefix}.{name}_norm.weight", shape, tp_dim, _norm_init(config), layer)
    if config.attention_sinks:
        yield Parameter(f"{prefix}.sinks", (config.heads,), 0, "normal", layer)
    yield Parameter(f"{prefix}.out.weight", (hidden, config.heads * head_dim), 1, "output", layer)
    if config.output_bias:
        yield Parameter(f"{prefix}.out.bias", (hidden,), None, "zeros", layer)


def _latent_parameters(config: ModelConfig, mla: Mla, prefix: str, layer: int) -> Iterator[Parameter]:
    queries, inputs = config.heads * config.head_dim, config.hidden
    if mla.query_rank is None:
        yield Parameter(f"{prefix}.q.weight", (queries, inputs), 0, "normal", layer)
    else:
        yield Parameter(f"{prefix}.q_down.weight", (mla.query_rank, inputs), None, "normal", layer)
        yield Parameter(f"{prefix}.q_norm.weight", (mla.query_rank,), None, "ones", layer)
        yield Parameter(f"{prefix}.q_up.weight", (queries, mla.query_rank), 0, "normal", layer)
    yield Parameter(f"{prefix}.kv_down.weight", (mla.kv_rank + mla.rope_dim, inputs), None, "normal", layer)
    yield Parameter(f"{prefix}.kv_norm.weight", (mla.kv_rank,), None, "ones", layer)
    rows = config.heads * (mla.nope_dim + mla.value_dim)
    yield Parameter(f"{prefix}.kv_up.weight", (rows, mla.kv_rank), 0, "normal", layer)
    yield Parameter(f"{prefix}.out.weight", (inputs, config.heads * mla.value_dim), 1, "output", layer)


def up_projection_name(config: ModelConfig) -> str:
    """The name of the projection into the feed-forward block: one matrix, with or without the gate."""
    return "gate_up" if config.gated else "up"


def parameter_count(config: ModelConfig) -> int:
    """Return the number of weights, tied ones counted once."""
    return sum(parameter.size for parameter in parameters(config) if not parameter.buffer)


def _norm_init(config: ModelConfig) -> InitScheme:
    return "zeros" if config.zero_centered_norms else "ones"


def _norm_parameters(config: ModelConfig, name: str, layer: int | None) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (config.hidden,), None, _norm_init(config), layer)
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


@dataclass(frozen=True)
class AdaptedProjection:
    """One projection of a layer that has an adapter: two factors, and DoRA's magnitude.

    `module` is the name, within the layer, of the module that holds the projection. `experts` is how many of them are
    stacked; None outside of experts. A `row_parallel` projection is cut over its inputs, a `replicated` one is whole on
    every tp rank, others are cut over their outputs.
    """

    module: str
    projection: LoraProjection
    inputs: int
    outputs: int
    row_parallel: bool
    experts: int | None = None
    replicated: bool = False

    def parameters(self, lora: Lora, layer: int) -> Iterator[Parameter]:
        """Yield the tensors of one layer; what is not cut over tp is whole on every rank."""
        prefix = f"layers.{layer}.{self.module}.lora.{self.projection}"
        stacked = () if self.experts is None else (self.experts,)
        dims, expert = len(stacked), self.experts is not None
        a, b = (*stacked, lora.rank, self.inputs), (*stacked, self.outputs, lora.rank)
        yield Parameter(f"{prefix}.a", a, dims + 1 if self.row_parallel else None, "kaiming_uniform", layer, expert)
        cut_outputs = None if self.row_parallel or self.replicated else dims
        yield Parameter(f"{prefix}.b", b, cut_outputs, "zeros", layer, expert)
        if lora.dora:
            magnitude = (*stacked, self.outputs)
            yield Parameter(f"{prefix}.magnitude", magnitude, cut_outputs, "row_norms", layer, expert)


def adapted_projections(config: ModelConfig, lora: Lora, layer: int) -> tuple[AdaptedProjection, ...]:
    """Return the adapters that a layer of a model gets, in the order of the model."""
    return tuple(adapter for adapter in all_projections(config, layer) if _target(adapter) in lora.projections)


@dataclass(frozen=True)
class AddedRows:
    """Where the tokens that a run adds are in the vocabulary: `count` rows from `start` on.

    `base_rows` is how many rows the base has; some of those may be padding that no token used. Rows of added tokens
    begin as the mean of the rows before `start`, which are those of the tokens that were there.
    """

    start: int
    count: int
    base_rows: int

    @property
    def stop(self) -> int:
        """One more than the last added token."""
        return self.start + self.count

    @property
    def vocab_size(self) -> int:
        """The rows of the model: more than the base has only where its padding does not suffice."""
        return max(self.base_rows, self.stop)

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Return which added tokens are among rows [start, stop), counted from the first: empty where none is."""
        first = min(max(start - self.start, 0), self.count)
        return first, max(first, min(stop - self.start, self.count))

    def grown(self, config: ModelConfig) -> ModelConfig:
        """Return the architecture of the base with the rows of the model."""
        return config.model_copy(update={"vocab_size": self.vocab_size})

    def of_base(self, config: ModelConfig) -> ModelConfig:
        """Return the architecture of the model with the rows of the base."""
        return config.model_copy(update={"vocab_size": self.base_rows})


def lora_parameters(config: ModelConfig, lora: Lora, added: AddedRows | None = None) -> Iterator[Parameter]:
    """Yield every tensor of a model's adapters, first to last, and the rows of added tokens, whole on every rank."""
    if added is not None:
        yield Parameter("embedding.added.weight", (added.count, config.hidden), None, "base_rows")
    for layer in range(config.layers):
        for adapter in adapted_projections(config, lora, layer):
            yield from adapter.parameters(lora, layer)
    if added is not None and not config.tied_embeddings:
        yield Parameter("head.added.weight", (added.count, config.hidden), None, "base_rows")


def lora_parameter_count(config: ModelConfig, lora: Lora, added: AddedRows | None = None) -> int:
    """Return the number of weights of the adapters: for each projection rank x (inputs + outputs)."""
    return sum(parameter.size for parameter in lora_parameters(config, lora, added))


def trained_fraction(config: ModelConfig, lora: Lora | None, added: AddedRows | None = None) -> float:
    """Return which part of all weights a run trains."""
    if lora is None:
        return 1.0
    adapters = lora_parameter_count(config, lora, added)
    return adapters / (adapters + parameter_count(config))


def _target(adapter: AdaptedProjection) -> LoraProjection:
    """The name under which `train.lora.targets` names an adapter."""
    return "experts" if adapter.experts is not None else adapter.projection


def all_projections(config: ModelConfig, layer: int) -> Iterator[AdaptedProjection]:
    """Yield every projection of a layer as one with an adapter; the router has none."""
    yield from _attention_projections(config)
    if not config.has_experts(layer):
        assert config.ffn is not None, "the schema asks for it wherever there are no experts"
        yield from _mlp_adapters(config, "mlp", config.ffn)
        return
    assert config.moe is not None, "a layer with experts"
    for adapter in _mlp_adapters(config, "mlp.experts", config.moe.ffn):
        yield replace(adapter, module="mlp.experts", experts=config.moe.experts)
    if config.moe.shared_ffn:
        yield from _mlp_adapters(config, "mlp.shared", config.moe.shared_ffn)


def _attention_projections(config: ModelConfig) -> Iterator[AdaptedProjection]:
    hidden, queries, keys = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    if (mla := config.mla) is None:
        yield AdaptedProjection("attention.qkv", "q_proj", hidden, queries, False)
        yield AdaptedProjection("attention.qkv", "k_proj", hidden, keys, False)
        yield AdaptedProjection("attention.qkv", "v_proj", hidden, keys, False)
    else:
        if mla.query_rank is None:
            yield AdaptedProjection("attention.q", "q_proj", hidden, queries, False)
        else:
            yield AdaptedProjection("attention.q_down", "q_a_proj", hidden, mla.query_rank, False, replicated=True)
            yield AdaptedProjection("attention.q_up", "q_b_proj", mla.query_rank, queries, False)
        compressed, rows = mla.kv_rank + mla.rope_dim, config.heads * (mla.nope_dim + mla.value_dim)
        yield AdaptedProjection("attention.kv_down", "kv_a_proj_with_mqa", hidden, compressed, False, replicated=True)
        yield AdaptedProjection("attention.kv_up", "kv_b_proj", mla.kv_rank, rows, False)
    yield AdaptedProjection("attention.out", "o_proj", config.heads * config.value_dim, hidden, True)


def _mlp_adapters(config: ModelConfig, prefix: str, ffn: int) -> Iterator[AdaptedProjection]:
    up = f"{prefix}.{up_projection_name(config)}"
    if config.gated:
        yield AdaptedProjection(up, "gate_proj", config.hidden, ffn, False)
    yield AdaptedProjection(up, "up_proj", config.hidden, ffn, False)
    yield AdaptedProjection(f"{prefix}.down", "down_proj", ffn, config.hidden, True)
