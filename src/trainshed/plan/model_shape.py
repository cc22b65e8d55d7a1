"""The shape of a model as the planner needs it: the weight matrices of each layer, and what a token costs in them.

A `ModelConfig` is what our own engine can train. Published measurements are also of models it cannot train, so the
planner's arithmetic uses this wider description.
`model_shape` turns a `ModelConfig` into a `ModelShape`; a test checks that both count the same weights and FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from trainshed.plan.flops import causal_keys
from trainshed.recipe import ModelConfig

TensorParallelSplit = Literal["out", "in", "none"]
"""Which dimension of a weight tensor parallel splits: its outputs, its inputs, or none."""


@dataclass(frozen=True)
class WeightMatrix:
    """One weight matrix that every token is multiplied with."""

    name: str
    inputs: int
    outputs: int
    tp_split: TensorParallelSplit
    bias: bool = False

    @property
    def weights(self) -> int:
        """Number of elements, with the bias."""
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)


class LayerKind(NamedTuple):
    """In what the layers of one model can differ."""

    experts: bool
    windowed: bool


class LayerWeights(NamedTuple):
    """Number of weights in one layer, by how ranks divide them."""

    attention_split: int
    """Divided among tensor-parallel ranks."""
    attention_replicated: int
    """Whole on every rank."""
    mlp: int
    router: int
    shared: int
    """Of the shared expert, which every token goes through."""
    experts: int
    """Of all routed experts together."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): low-rank projections of queries, keys and values."""

    query_rank: int
    """0: queries have one full-rank projection."""
    value_rank: int
    rope_dim: int
    """Width of the rotary part of a key, which all heads share."""


@dataclass(frozen=True)
class ExpertShape:
    """A mixture of experts in place of a dense MLP."""

    count: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    router_bias: bool = False


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer that decide what it costs."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Width of a query and key head."""
    value_dim: int
    """Width of a value head."""
    ffn: int
    """Inner width of the dense MLPs; 0 where every layer has experts."""
    vocab_size: int
    gated: bool = True
    tied: bool = False
    learned_positions: int = 0
    """Rows of the position embedding; 0: rotary or none."""
    norm_vectors: int = 1
    """Vectors of one norm: 1 (RMS) or 2 (with a bias)."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    attention_sinks: bool = False
    """Each head has one more weight."""
    qk_norm: bool = False
    qk_norm_whole: bool = False
    """Queries and keys are normalised over all heads together, by weights that are split as the heads are."""
    norms_per_layer: int = 2
    """2, or 4 where blocks have a norm before and after them."""
    window: int | None = None
    """How many tokens back the layers with a sliding window look."""
    chunk: int | None = None
    """How many tokens a chunk of attention has, in the layers that have it in place of a window."""
    window_pattern: tuple[bool, ...] = (True,)
    """Which layers have a sliding window or chunks, from the first on and repeated."""
    experts: ExpertShape | None = None
    dense_first: int = 0
    """Number of first layers without experts in a model that has experts."""
    experts_every: int = 1
    """One layer in this many has experts."""
    latent: LatentAttention | None = None
    mtp_layers: int = 0
    """Multi-token prediction: extra layers after the last, each with a pass through the head."""

    @cached_property
    def attention_matrices(self) -> tuple[WeightMatrix, ...]:
        """The projections before and after attention, in order."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        out = WeightMatrix("out", self.heads * self.value_dim, self.hidden, "in", self.output_bias)
        if self.latent is None:
            rows = queries + keys + self.kv_heads * self.value_dim
            return (WeightMatrix("qkv", self.hidden, rows, "out", self.qkv_bias), out)
        latent, plain = self.latent, self.head_dim - self.latent.rope_dim
        up = self.heads * (plain + self.value_dim)
        return (
            *self._latent_queries(latent, queries),
            WeightMatrix("kv_down", self.hidden, latent.value_rank + latent.rope_dim, "none"),
            WeightMatrix("kv_up", latent.value_rank, up, "out"),
            out,
        )

    def _latent_queries(self, latent: LatentAttention, queries: int) -> Iterator[WeightMatrix]:
        if not latent.query_rank:
            yield WeightMatrix("q", self.hidden, queries, "out")
            return
        yield WeightMatrix("q_down", self.hidden, latent.query_rank, "none")
        yield WeightMatrix("q_up", latent.query_rank, queries, "out")

    def mlp_matrices(self, ffn: int) -> tuple[WeightMatrix, ...]:
        """Return the matrices of an MLP of this inner width; none where it is 0."""
        if not ffn:
            return ()
        rows = 2 * ffn if self.gated else ffn
        return (
            WeightMatrix("up", self.hidden, rows, "out", self.mlp_bias),
            WeightMatrix("down", ffn, self.hidden, "in", self.mlp_bias),
        )

    @cached_property
    def expert_matrices(self) -> tuple[WeightMatrix, ...]:
        """The matrices of one routed expert."""
        return () if self.experts is None else self.mlp_matrices(self.experts.ffn)

    @cached_property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return sum(map(self.has_experts, range(self.layers)))

    def expert_layers_in(self, layers: range) -> int:
        """Return how many of these layers have experts."""
        if self._one_kind is not None:
            return len(layers) if self._one_kind.experts else 0
        return sum(map(self.has_experts, layers))

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts."""
        if self.experts is None or layer < self.dense_first:
            return False
        return (layer - self.dense_first) % self.experts_every == self.experts_every - 1

    def is_windowed(self, layer: int) -> bool:
        """Whether a layer has a sliding window or chunks."""
        return (self.window or self.chunk) is not None and self.window_pattern[layer % len(self.window_pattern)]

    @cached_property
    def _one_kind(self) -> LayerKind | None:
        """The kind of every layer where all are equal, as in most models; a search asks very often."""
        kinds = {LayerKind(self.has_experts(layer), self.is_windowed(layer)) for layer in range(self.layers)}
        return kinds.pop() if len(kinds) == 1 else None

    def layer_kinds(self, layers: range) -> dict[LayerKind, int]:
        """Return how many of these layers are of each kind."""
        if self._one_kind is not None:
            return {self._one_kind: len(layers)} if layers else {}
        counts: dict[LayerKind, int] = {}
        for layer in layers:
            kind = LayerKind(self.has_experts(layer), self.is_windowed(layer))
            counts[kind] = counts.get(kind, 0) + 1
        return counts

    def mean_keys(self, sequence_length: float, *, windowed: bool) -> float:
        """Return how many keys a token attends to, on average over a sequence with causal attention."""
        return causal_keys(self.window, sequence_length, self.chunk) if windowed else causal_keys(None, sequence_length)

    @cached_property
    def layer_vectors(self) -> int:
        """Elements of the norms of a layer, which every tensor-parallel rank holds whole."""
        latent = self.latent.query_rank + self.latent.value_rank if self.latent else 0
        heads = 2 * self.head_dim if self.qk_norm and not self.qk_norm_whole else 0
        return self.norms_per_layer * self.norm_vectors * self.hidden + heads + latent

    @property
    def _split_vectors(self) -> int:
        """Elements of a layer's vectors that are divided among tensor-parallel ranks as heads are."""
        norms = (self.heads + self.kv_heads) * self.head_dim if self.qk_norm and self.qk_norm_whole else 0
        return norms + (self.heads if self.attention_sinks else 0)

    @property
    def head_weights(self) -> int:
        """Elements of the head, or of the embedding, which has the same size."""
        return self.vocab_size * self.hidden

    @cached_property
    def layer_sizes(self) -> LayerWeights:
        """Number of weights in every part that a layer can have."""
        attention, experts = self.attention_matrices, self.experts or ExpertShape(0, 0, 0)
        return LayerWeights(
            attention_split=_count_weights(matrix for matrix in attention if matrix.tp_split != "none")
            + self._split_vectors,
            attention_replicated=_count_weights(matrix for matrix in attention if matrix.tp_split == "none"),
            mlp=_count_weights(self.mlp_matrices(self.ffn)),
            router=experts.count * (self.hidden + (1 if experts.router_bias else 0)),
            shared=_count_weights(self.mlp_matrices(experts.shared_ffn)),
            experts=experts.count * _count_weights(self.expert_matrices),
        )

    @cached_property
    def weights(self) -> int:
        """Number of weights in the model, tied ones counted once."""
        sizes, with_experts = self.layer_sizes, self.expert_layers
        total = self.layers * (sizes.attention_split + sizes.attention_replicated + self.layer_vectors)
        total += self.norm_vectors * self.hidden + self.learned_positions * self.hidden
        total += self.head_weights * (1 if self.tied else 2)
        total += (self.layers - with_experts) * sizes.mlp
        return total + with_experts * (sizes.router + sizes.shared + sizes.experts)

    @cached_property
    def matmul_flops(self) -> float:
        """Forward FLOPs of one token in matmuls with weights; as `plan/flops.py` counts them."""
        total = 2.0 * self.head_weights * (1 + self.mtp_layers)
        total += (self.layers - self.expert_layers) * self._layer_flops(experts=False)
        if self.experts is not None:
            total += self.expert_layers * self._layer_flops(experts=True)
        # A layer of multi-token prediction projects a hidden state and an embedding into one.
        return total + self.mtp_layers * (self._layer_flops(experts=self.mtp_experts) + 4 * self.hidden**2)

    def _layer_flops(self, *, experts: bool) -> float:
        """Return the forward FLOPs of one token in the matmuls of a layer."""
        used = _count_elements(self.attention_matrices)
        if not experts:
            return 2.0 * (used + _count_elements(self.mlp_matrices(self.ffn)))
        assert self.experts is not None, "a layer with experts"
        used += self.experts.top_k * _count_elements(self.expert_matrices) + self.experts.count * self.hidden
        return 2.0 * (used + _count_elements(self.mlp_matrices(self.experts.shared_ffn)))

    @property
    def mtp_experts(self) -> bool:
        """Whether layers of multi-token prediction have experts: as the last layer does."""
        return self.has_experts(self.layers - 1)

    @cached_property
    def expert_flops(self) -> float:
        """The part of `matmul_flops` in experts that a token is routed to."""
        if self.experts is None:
            return 0.0
        layers = self.expert_layers + (self.mtp_layers if self.mtp_experts else 0)
        return 2.0 * layers * self.experts.top_k * _count_elements(self.expert_matrices)

    def attention_flops(self, sequence_length: float, *, causal: bool = True) -> float:
        """Return the forward FLOPs of one token in attention itself, on average over a sequence."""
        per_key, total = 2 * self.heads * (self.head_dim + self.value_dim), 0.0
        for kind, count in self.layer_kinds(range(self.layers)).items():
            keys = self.mean_keys(sequence_length, windowed=kind.windowed) if causal else sequence_length
            total += count * per_key * keys
        return total * (1 + self.mtp_layers / self.layers)

    def token_flops(self, sequence_length: float, *, causal: bool = True) -> float:
        """Return the forward FLOPs of one token, on average over a sequence."""
        return self.matmul_flops + self.attention_flops(sequence_length, causal=causal)


def _count_weights(matrices: Iterable[WeightMatrix]) -> int:
    return sum(matrix.weights for matrix in matrices)


def _count_elements(matrices: Iterable[WeightMatrix]) -> int:
    """Elements without biases: those that cost FLOPs."""
    return sum(matrix.inputs * matrix.outputs for matrix in matrices)


def model_shape(config: ModelConfig, name: str = "") -> ModelShape:
    """Describe a model that our engine can train."""
    moe, mla = config.moe, config.mla
    return ModelShape(
        name=name or config.family,
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        value_dim=config.value_dim,
        ffn=config.ffn or 0,
        vocab_size=config.vocab_size,
        gated=config.gated,
        tied=config.tied_embeddings,
        learned_positions=config.max_positions if config.positions == "learned" else 0,
        norm_vectors=2 if config.norm == "layer" else 1,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        mlp_bias=config.mlp_bias,
        attention_sinks=config.attention_sinks,
        qk_norm=config.qk_norm,
        qk_norm_whole=config.qk_norm_span == "projection",
        norms_per_layer=4 if config.norm_placement == "both" else 2,
        window=config.sliding_window,
        chunk=config.attention_chunk,
        window_pattern=tuple(kind != "full" for kind in config.attention_pattern or ("window",)),
        experts=None if moe is None else ExpertShape(moe.experts, moe.top_k, moe.ffn, moe.shared_ffn, moe.router_bias),
        dense_first=0 if moe is None else moe.dense_first,
        experts_every=1 if moe is None else moe.every,
        latent=None if mla is None else LatentAttention(mla.query_rank or 0, mla.kv_rank, mla.rope_dim),
        mtp_layers=config.mtp_layers,
    )
