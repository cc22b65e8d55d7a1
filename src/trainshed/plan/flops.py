"""How many floating-point operations a token costs, from the shapes of the model's own tensors.

A token times a weight is 2 FLOPs: one multiplication, one addition. Only matmuls are counted: no norms, activations,
softmax, rotary embeddings, biases or embedding look-ups, and no recomputation. Training costs three times the forward
pass: once more for the gradients of inputs, once for those of weights.

Model FLOPs are what the training needs, on any hardware and with any software. So with LoRA a frozen weight costs 4 per
token, not 6: forward and the gradient of its input. So does one that a group of the optimizer freezes. Adapters are
trained, and attention has no weights: both cost three times their forward pass. The base in 8 or 4 bits costs the same:
turning it back into bf16 is not a matmul. DPO adds a forward pass of the reference model. Where documents are kept
apart, a token attends to its own document only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainshed.models.parameter_groups import is_frozen_by_group
from trainshed.models.parameters import layer_parameters, lora_parameters, parameters
from trainshed.recipe import Lora, ModelConfig
from trainshed.recipe.optimizer import ParameterGroup

TRAINING_PER_FORWARD = 3
FROZEN_PER_FORWARD = 2
"""The same for a weight without a gradient."""
WIDE_EXPERT_ENGINES = frozenset({"torch"})
"""Engines whose experts multiply in bf16 where all other projections multiply in fp8."""


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of the forward pass of one token through all layers, by part of the model."""

    projections: int
    """Query, key, value and output projections."""
    attention: float
    """Queries times keys, and attention weights times values."""
    feed_forward: int
    """Dense MLPs; with experts, those that a token is routed to and the shared one."""
    experts: int
    """The part of `feed_forward` in experts that a token is routed to."""
    router: int
    head: int
    """The logits, whether tied to the embedding or not."""
    adapters: int | None = None
    """Adapters of a model whose other weights are frozen; None where all weights are trained."""
    frozen: int = 0
    """The part of `matmul` with weights that groups of the optimizer freeze, where there are no adapters."""
    frozen_experts: int = 0
    """The part of `frozen` in experts that a token is routed to."""

    @property
    def matmul(self) -> int:
        """Matmuls with weights, without adapters."""
        return self.projections + self.feed_forward + self.router + self.head

    @property
    def forward(self) -> float:
        """The forward pass."""
        return self.matmul + self.attention + (self.adapters or 0)

    @property
    def reference(self) -> float:
        """The forward pass of DPO's reference, which has no adapters."""
        return self.matmul + self.attention

    @property
    def training(self) -> float:
        """Forward and backward."""
        return training_flops(self.matmul, self.attention, self.adapters, self.frozen)

    def expert_share(self, *, reference: bool = False) -> float:
        """Return the share of a training's FLOPs in experts that tokens are routed to."""
        return expert_share(
            self.experts,
            self.matmul,
            self.attention,
            self.adapters,
            reference=reference,
            frozen=self.frozen,
            frozen_experts=self.frozen_experts,
        )


def expert_share(
    experts: float,
    matmul: float,
    attention: float,
    adapters: float | None,
    *,
    reference: bool = False,
    frozen: float = 0.0,
    frozen_experts: float = 0.0,
) -> float:
    """Return the share of a training's FLOPs in experts, from the forward FLOPs; `experts` are part of `matmul`."""
    in_experts = training_flops(experts, 0.0, None if adapters is None else 0.0, frozen_experts)
    everything = training_flops(matmul, attention, adapters, frozen)
    if reference:
        in_experts, everything = in_experts + experts, everything + matmul + attention
    return in_experts / everything


def mixed_peak(narrow_peak: float, wide_peak: float, wide_share: float) -> float:
    """Return the peak of work that is done in two dtypes: its FLOPs divided by the least time that both parts take."""
    return 1.0 / ((1.0 - wide_share) / narrow_peak + wide_share / wide_peak)


def training_flops(matmul: float, attention: float, adapters: float | None, frozen: float = 0.0) -> float:
    """Return forward and backward, from the forward FLOPs.

    `adapters` is None where the weights themselves are trained, all but the `frozen` part of `matmul`.
    """
    if adapters is None:
        return TRAINING_PER_FORWARD * (matmul + attention) - (TRAINING_PER_FORWARD - FROZEN_PER_FORWARD) * frozen
    return FROZEN_PER_FORWARD * matmul + TRAINING_PER_FORWARD * (attention + adapters)


def token_flops(
    config: ModelConfig,
    sequence_length: int,
    *,
    causal: bool = True,
    document_length: float | None = None,
    lora: Lora | None = None,
    groups: Sequence[ParameterGroup] = (),
) -> TokenFlops:
    """Count the FLOPs of one token, on average over a sequence; `document_length` is that of `attended_length`.

    `groups` are those of the optimizer, which may freeze weights.
    """
    frozen, frozen_experts = (0, 0) if lora is not None else frozen_flops(config, groups)
    parts = {"attention": 0, "router": 0, "mlp": 0}
    experts = 0
    kinds = [config.has_experts(layer) for layer in range(config.layers + config.mtp_layers)]
    for with_experts in sorted(set(kinds)):
        count = kinds.count(with_experts)
        for parameter in layer_parameters(config, kinds.index(with_experts)):
            if not parameter.is_matrix:
                continue
            used = parameter.size
            if parameter.expert:
                assert config.moe is not None, "only experts have expert tensors"
                used = parameter.size // config.moe.experts * config.moe.top_k
                experts += 2 * used * count
            block, part = parameter.name.split(".")[2:4]
            parts["router" if part == "router" else block] += 2 * used * count
    return TokenFlops(
        # A layer of multi-token prediction projects a hidden state and an embedding into one, and uses the head again.
        projections=parts["attention"] + config.mtp_layers * 4 * config.hidden**2,
        attention=attention_flops(config, attended_length(sequence_length, document_length), causal=causal),
        feed_forward=parts["mlp"],
        experts=experts,
        router=parts["router"],
        head=2 * config.hidden * config.vocab_size * (1 + config.mtp_layers),
        adapters=None if lora is None else adapter_flops(config, lora),
        frozen=frozen,
        frozen_experts=frozen_experts,
    )


def frozen_flops(config: ModelConfig, groups: Sequence[ParameterGroup]) -> tuple[int, int]:
    """Return the forward FLOPs of one token in matmuls with weights that groups freeze: all, and those of experts."""
    if not any(group.freeze for group in groups):
        return 0, 0
    head = "embedding.weight" if config.tied_embeddings else "head.weight"
    everything = experts = 0
    for parameter in parameters(config):
        if not parameter.is_matrix or not is_frozen_by_group(parameter.name, groups):
            continue
        if parameter.layer is None:
            everything += 2 * parameter.size * (1 + config.mtp_layers) * (parameter.name == head)
        elif parameter.expert:
            assert config.moe is not None, "only experts have expert tensors"
            experts += 2 * parameter.size // config.moe.experts * config.moe.top_k
        else:
            everything += 2 * parameter.size
    return everything + experts, experts


def adapter_flops(config: ModelConfig, lora: Lora) -> int:
    """Return the forward FLOPs of one token in adapters; it passes through those of the experts it is routed to."""
    used = 0
    for parameter in lora_parameters(config, lora):
        if not parameter.is_matrix:
            continue
        share = config.moe.top_k / config.moe.experts if parameter.expert and config.moe is not None else 1
        used += round(parameter.size * share)
    return 2 * used


def newton_schulz_flops(rows: int, columns: int, *, steps: int) -> int:
    """Return the FLOPs of Muon's iterations on one matrix.

    With m the smaller side and n the larger, an iteration multiplies X·Xᵀ (2·m²·n), its square (2·m³), and with X again
    (2·m²·n).
    """
    small, large = sorted((rows, columns))
    return steps * (4 * small * small * large + 2 * small**3)


def matmul_flops(config: ModelConfig) -> int:
    """Return the forward FLOPs of one token in matmuls with weights."""
    return token_flops(config, 1).matmul


def attended_length(sequence_length: int, document_length: float | None) -> float:
    """Return the length of what attention sees as one sequence: a document where documents are kept apart.

    `document_length` is the length of the document that an average token is in, which is the sum of the squared lengths
    divided by their sum; None where documents are not kept apart.
    """
    return sequence_length if document_length is None else min(float(sequence_length), document_length)


def attention_flops(config: ModelConfig, sequence_length: float, *, causal: bool) -> float:
    """Return the forward FLOPs of one token in attention itself, on average over a sequence.

    With `causal`, token i attends to the i + 1 keys up to itself, or to as many of them as the sliding window has: the
    work that must be done. Without, every token attends to the whole sequence, as many papers and frameworks count.
    """
    keys = mean_keys(config, sequence_length) if causal else sequence_length
    return (config.layers + config.mtp_layers) * 2 * config.heads * (config.head_dim + config.value_dim) * keys


def mean_keys(config: ModelConfig, sequence_length: float) -> float:
    """Return how many keys a token attends to, on average over layers and a sequence with causal attention."""
    layers = range(1 if config.attention_pattern is None else config.layers)
    spans = [(config.layer_window(layer), config.layer_chunk(layer)) for layer in layers]
    return sum(causal_keys(window, sequence_length, chunk) for window, chunk in spans) / len(spans)


def causal_keys(window: int | None, sequence_length: float, chunk: int | None = None) -> float:
    """Return the same for one layer, with a sliding window, with chunks or with neither."""
    if chunk is not None and chunk < sequence_length:
        whole = sequence_length // chunk * chunk
        rest = sequence_length - whole
        return (whole * (chunk + 1) / 2 + rest * (rest + 1) / 2) / sequence_length
    seen = min(window or sequence_length, sequence_length)
    growing = seen * (seen + 1) / 2
    return (growing + (sequence_length - seen) * seen) / sequence_length


def training_flops_per_token(
    config: ModelConfig,
    sequence_length: int,
    *,
    causal: bool = True,
    document_length: float | None = None,
    lora: Lora | None = None,
    groups: Sequence[ParameterGroup] = (),
    reference: bool = False,
) -> float:
    """Return what training costs per token: forward and backward, without recomputation; `reference`: that of DPO."""
    flops = token_flops(
        config, sequence_length, causal=causal, document_length=document_length, lora=lora, groups=groups
    )
    return flops.training + (flops.reference if reference else 0.0)
