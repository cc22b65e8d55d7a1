"""How many weights adapters have: what a run with `train.lora` trains. No torch here: the planner asks this."""

from __future__ import annotations

from collections.abc import Iterator

from trainshed.models.parameters import parameter_count
from trainshed.recipe import Lora, ModelConfig


def adapter_count(config: ModelConfig, lora: Lora) -> int:
    """Return the number of weights of the adapters: for each projection rank x (inputs + outputs)."""
    shapes = dict(_projections(config))
    each = sum(sum(shapes[target]) for target in lora.targets if target in shapes)
    return config.layers * lora.rank * each


def trained_share(config: ModelConfig, lora: Lora | None) -> float:
    """Return which part of all weights a run trains."""
    if lora is None:
        return 1.0
    adapters = adapter_count(config, lora)
    return adapters / (adapters + parameter_count(config))


def _projections(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    """Inputs and outputs of each projection of a layer; experts have adapters of their own."""
    hidden, queries, keys = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield from {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}.items()
    yield "o_proj", (queries, hidden)
    ffn = config.ffn if config.moe is None else config.moe.ffn
    experts = 1 if config.moe is None else config.moe.experts
    assert ffn is not None, "the schema asks for it wherever there are no experts"
    for name in ("gate_proj", "up_proj", "down_proj") if config.gated else ("up_proj", "down_proj"):
        yield name, (experts * hidden, experts * ffn)
