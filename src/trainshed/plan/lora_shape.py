"""What LoRA adds to a model, as the planner needs it: the adapters of a layer, and which inputs they need kept.

All other weights are frozen. A frozen matmul has no weight gradient, so its input is not kept for backward unless an
adapter reads the same input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from trainshed.plan.model_shape import ModelShape, WeightMatrix
from trainshed.recipe import Lora
from trainshed.recipe.train import LORA_GROUPS, NF4_BLOCK, LoraProjection

QUANTIZED_BYTES = {"int8": 1.0, "nf4": 0.5 + 4 / NF4_BLOCK}
"""Bytes of a frozen weight as our own engine holds it (`models/quantization.py`): in int8 with one fp32 scale a row,
which is too little to count, in nf4 with one for each block."""
DOUBLE_QUANTIZED_NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""The same in torchtune and PEFT: a scale of 8 bits for 64 weights, and an fp32 scale for 256 of those (double
quantization, Dettmers et al. 2023)."""
_READS_ATTENTION_INPUT = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
_UP = ("gate_proj", "up_proj")


@dataclass(frozen=True)
class Adapter:
    """The adapter of one projection: an input is multiplied by `a` [rank, inputs], then by `b` [outputs, rank]."""

    matrix: WeightMatrix
    """The projection, without its bias."""
    rank: int
    routed: bool = False
    """Whether it is that of one routed expert."""

    @property
    def a(self) -> WeightMatrix:
        """The first factor; tensor parallel splits it where it splits the projection's inputs."""
        return WeightMatrix("a", self.matrix.inputs, self.rank, "in" if self.matrix.tp_split == "in" else "none")

    @property
    def b(self) -> WeightMatrix:
        """The second factor; tensor parallel splits it where it splits the projection's outputs."""
        return WeightMatrix("b", self.rank, self.matrix.outputs, "out" if self.matrix.tp_split == "out" else "none")

    def weights(self, tp: int = 1, *, dora: bool = False) -> float:
        """Return the number of weights that one of `tp` ranks holds."""
        inputs = self.matrix.inputs / (tp if self.matrix.tp_split == "in" else 1)
        outputs = self.matrix.outputs / (tp if self.matrix.tp_split == "out" else 1)
        return self.rank * (inputs + outputs) + (outputs if dora else 0)


@dataclass(frozen=True)
class LoraShape:
    """The adapters of a run, and how the frozen weights are held."""

    rank: int
    projections: tuple[LoraProjection, ...]
    dropout: bool = False
    dora: bool = False
    base_bytes: float | None = None
    """Bytes of a frozen weight of a layer; None: as the engine holds weights."""
    joint: bool = False
    """One adapter for queries, keys and values, and one for gate and up, as Megatron's joint matrices have them."""
    added_tokens: int = 0
    """Tokens whose rows of the embedding and of the head are trained too."""

    @property
    def quantized(self) -> bool:
        """Whether frozen weights are held in fewer bytes than matmuls read."""
        return self.base_bytes is not None

    @property
    def adapts_attention_input(self) -> bool:
        """Whether an adapter reads what queries, keys and values are computed from."""
        return any(projection in self.projections for projection in _READS_ATTENTION_INPUT)

    @property
    def adapts_mlp_input(self) -> bool:
        """Whether an adapter reads the input of dense and shared MLPs."""
        return any(projection in self.projections for projection in _UP)

    @property
    def adapts_inner(self) -> bool:
        """Whether an adapter reads the inner activations of dense and shared MLPs."""
        return "down_proj" in self.projections

    @property
    def adapts_experts(self) -> bool:
        """Whether routed experts have adapters."""
        return "experts" in self.projections

    def layer_weights(
        self, model: ModelShape, *, experts: bool, tp: int = 1, etp: int = 1, ep: int = 1
    ) -> tuple[float, float]:
        """Return how many adapter weights of a layer a rank holds: of dense projections, and of routed experts."""
        dense = routed = 0.0
        for adapter in layer_adapters(model, self, experts=experts):
            if adapter.routed:
                assert model.experts is not None, "only experts have routed adapters"
                routed += adapter.weights(etp, dora=self.dora) * model.experts.count / ep
            else:
                dense += adapter.weights(tp, dora=self.dora)
        return dense, routed

    def weights(self, model: ModelShape) -> int:
        """Return the number of weights of all adapters, with the rows of added tokens."""
        kinds = ((False, model.layers - model.expert_layers), (True, model.expert_layers))
        layers = sum(count * sum(self.layer_weights(model, experts=experts)) for experts, count in kinds if count)
        return round(layers) + self.table_weights(model) * (1 if model.tied else 2)

    def table_weights(self, model: ModelShape) -> int:
        """Return the number of weights of added tokens in the embedding, or in the head; each rank of tp has them."""
        return self.added_tokens * model.hidden

    def token_flops(self, model: ModelShape) -> float:
        """Return the forward FLOPs of one token in adapters; as `plan/flops.py` counts them."""
        total = 0.0
        for experts, count in ((False, model.layers - model.expert_layers), (True, model.expert_layers)):
            for adapter in layer_adapters(model, self, experts=experts) if count else ():
                times = model.experts.top_k if adapter.routed and model.experts is not None else 1
                total += 2 * count * times * adapter.weights()
        return total


def lora_shape(lora: Lora, added_tokens: int = 0) -> LoraShape:
    """Describe the adapters of a recipe, as our own engine has them."""
    return LoraShape(
        rank=lora.rank,
        projections=lora.projections,
        dropout=lora.dropout > 0,
        dora=lora.dora,
        base_bytes=None if lora.quantize is None else QUANTIZED_BYTES[lora.quantize],
        added_tokens=added_tokens,
    )


@cache
def layer_adapters(model: ModelShape, lora: LoraShape, *, experts: bool) -> tuple[Adapter, ...]:
    """Return the adapters of a layer, with experts or without; of routed experts, those of one."""
    shared = model.experts.shared_ffn if model.experts is not None else 0
    mlp = _mlp_projections(model, shared if experts else model.ffn)
    dense = (*_adapted(_attention_projections(model), lora), *_adapted(mlp, lora))
    adapted = [Adapter(matrix, lora.rank) for matrix in dense]
    if experts and model.experts is not None and lora.adapts_experts:
        every = replace(lora, projections=LORA_GROUPS["mlp"])
        routed = _adapted(_mlp_projections(model, model.experts.ffn), every)
        adapted += [Adapter(matrix, lora.rank, routed=True) for matrix in routed]
    return tuple(adapted)


def _adapted(matrices: Iterable[WeightMatrix], lora: LoraShape) -> Iterator[WeightMatrix]:
    """Yield the projections of a block that have an adapter, joined where one adapter is for all that read an input."""
    together: list[WeightMatrix] = []
    for matrix in matrices:
        if matrix.name not in lora.projections:
            continue
        if lora.joint and matrix.tp_split == "out":
            together.append(matrix)
            continue
        yield from _joined(together)
        together = []
        yield matrix
    yield from _joined(together)


def _joined(matrices: list[WeightMatrix]) -> Iterator[WeightMatrix]:
    if matrices:
        outputs = sum(matrix.outputs for matrix in matrices)
        yield replace(matrices[0], name="+".join(matrix.name for matrix in matrices), outputs=outputs)


def _attention_projections(model: ModelShape) -> Iterator[WeightMatrix]:
    if model.latent is None:
        yield WeightMatrix("q_proj", model.hidden, model.heads * model.head_dim, "out")
        yield WeightMatrix("k_proj", model.hidden, model.kv_heads * model.head_dim, "out")
        yield WeightMatrix("v_proj", model.hidden, model.kv_heads * model.value_dim, "out")
    else:
        names = {"q": "q_proj", "q_down": "q_a_proj", "q_up": "q_b_proj"}
        names |= {"kv_down": "kv_a_proj_with_mqa", "kv_up": "kv_b_proj"}
        yield from (replace(one, name=names[one.name]) for one in model.attention_matrices if one.name in names)
    yield WeightMatrix("o_proj", model.heads * model.value_dim, model.hidden, "in")


def _mlp_projections(model: ModelShape, ffn: int) -> Iterator[WeightMatrix]:
    if not ffn:
        return
    if model.gated:
        yield WeightMatrix("gate_proj", model.hidden, ffn, "out")
    yield WeightMatrix("up_proj", model.hidden, ffn, "out")
    yield WeightMatrix("down_proj", ffn, model.hidden, "in")
