"""How many floating-point operations a token costs, from the shapes of the model's own tensors.

A token times a weight is 2 FLOPs: one multiplication, one addition. Only matmuls are counted: no norms, activations,
softmax, rotary embeddings, biases or embedding look-ups, and no recomputation. Training costs three times the forward
pass: once more for the gradients of inputs, once for those of weights. Weights that are frozen below adapters (LoRA)
cost twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainshed.models.parameters import layer_parameters, lora_parameters
from trainshed.recipe import Lora, ModelConfig

TRAINING_PER_FORWARD = 3


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of the forward pass of one token through all layers, by part of the model."""

    projections: int
    """Query, key, value and output projections."""
    attention: float
    """Queries times keys, and attention weights times values."""
    feed_forward: int
    """Dense MLPs; with experts, those that a token is routed to and the shared one."""
    router: int
    head: int
    """The logits, whether tied to the embedding or not."""

    @property
    def matmul(self) -> int:
        """Matmuls with weights."""
        return self.projections + self.feed_forward + self.router + self.head

    @property
    def forward(self) -> float:
        """The forward pass."""
        return self.matmul + self.attention

    @property
    def training(self) -> float:
        """Forward and backward."""
        return TRAINING_PER_FORWARD * self.forward


def token_flops(config: ModelConfig, sequence_length: int, *, causal: bool = True) -> TokenFlops:
    """Count the FLOPs of one token, on average over a sequence."""
    parts = {"attention": 0, "router": 0, "mlp": 0}
    for parameter in layer_parameters(config, 0):
        if len(parameter.shape) == 1:
            continue
        used = parameter.size
        if parameter.expert:
            assert config.moe is not None, "only experts have expert tensors"
            used = parameter.size // config.moe.experts * config.moe.top_k
        block, part = parameter.name.split(".")[2:4]
        parts["router" if part == "router" else block] += 2 * used * config.layers
    return TokenFlops(
        projections=parts["attention"],
        attention=attention_flops(config, sequence_length, causal=causal),
        feed_forward=parts["mlp"],
        router=parts["router"],
        head=2 * config.hidden * config.vocab_size,
    )


def matmul_flops(config: ModelConfig) -> int:
    """Return the forward FLOPs of one token in matmuls with weights."""
    return token_flops(config, 1).matmul


def attention_flops(config: ModelConfig, sequence_length: int, *, causal: bool) -> float:
    """Return the forward FLOPs of one token in attention itself, on average over a sequence.

    With `causal`, token i attends to the i + 1 keys up to itself, or to as many of them as the sliding window has: the
    work that must be done. Without, every token attends to the whole sequence, as many papers and frameworks count.
    """
    keys = mean_keys(config, sequence_length) if causal else sequence_length
    return config.layers * 4 * config.heads * config.head_dim * keys


def mean_keys(config: ModelConfig, sequence_length: int) -> float:
    """Return how many keys a token attends to, on average over a sequence with causal attention."""
    return causal_keys(config.sliding_window, sequence_length)


def causal_keys(window: int | None, sequence_length: int) -> float:
    """Return the same for one layer, with a sliding window or without."""
    seen = min(window or sequence_length, sequence_length)
    growing = seen * (seen + 1) / 2
    return (growing + (sequence_length - seen) * seen) / sequence_length


def training_flops_per_token(
    config: ModelConfig, sequence_length: int, *, causal: bool = True, lora: Lora | None = None
) -> float:
    """Return what training costs per token: forward and backward, without recomputation."""
    flops = token_flops(config, sequence_length, causal=causal)
    if lora is None:
        return flops.training
    frozen = (TRAINING_PER_FORWARD - 1) * flops.matmul
    return frozen + TRAINING_PER_FORWARD * (flops.attention + adapter_flops(config, lora))


def adapter_flops(config: ModelConfig, lora: Lora) -> int:
    """Return the forward FLOPs of one token in the products with adapters."""
    used = 0
    for parameter in lora_parameters(config, lora):
        if len(parameter.shape) == 1:
            continue
        share = config.moe.top_k / config.moe.experts if parameter.expert and config.moe is not None else 1
        used += round(parameter.size * share)
    return 2 * used
