"""Smaller versions of a run that stay legal: a small model for a check, and a layout for fewer nodes.

`shrink` makes the model, the batch and the sequence small and keeps what makes a layout hard. What divides evenly
still does, and what does not still does not: heads and rows over tp, experts over ep, layers over the chunks of a
pipeline, micro-batches over its stages, every tensor over the ranks that shard it. The family and everything that is
not a size (norms, biases, tied embeddings, rotary scaling, routing) are kept. Fresh weights are larger where the model
is narrower, so every layer changes the loss as much as before.

`layout_for_nodes` drops whole replicas of the model and keeps the rest. The global batch and the order of the data do
not change, so the run continues with the same samples: each replica that is left takes more of them, and if they do
not divide evenly, some replicas take one more than others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainshed.errors import InputError
from trainshed.plan.layout import RankLayout
from trainshed.plan.legality import layout_problems
from trainshed.recipe import ModelConfig

# Small enough for a CPU to step in milliseconds, large enough that no rank's part is a single row.
_HIDDEN, _HEAD_DIM, _FFN, _EXPERT_FFN, _VOCABULARY, _TOKENS = 32, 8, 32, 16, 96, 32
_QUERY_RANK, _KV_RANK = 24, 16
_LAYERS = 2
"""Layers of a model without a pipeline; with one, a chunk has one layer, or up to three where chunks differ."""
_MICRO_BATCH = 2


@dataclass(frozen=True)
class ShrunkRun:
    """What a check runs in place of the real run; `batch_sizes` are two if the batch grows, one if it does not."""

    config: ModelConfig
    layout: RankLayout
    sequence_length: int
    batch_sizes: tuple[int, ...]


def shrink(
    config: ModelConfig,
    layout: RankLayout,
    *,
    sequence_length: int,
    batch_sizes: Sequence[int],
    max_ranks: int | None = None,
) -> ShrunkRun:
    """Shrink what a legal layout trains, so that it stays legal.

    The layout keeps its ranks unless they are more than `max_ranks`: then data parallel is reduced to what fits.
    """
    counts = [layout.micro_batches(size) for size in sorted({min(batch_sizes), max(batch_sizes)})]
    layout = _fewer_replicas(layout, config, sequence_length, max_ranks or layout.world_size)
    stages = _stages(layout)
    small = replace(layout, stages=stages, micro_batch=min(layout.micro_batch, _MICRO_BATCH))
    length = _smallest_like(
        sequence_length, max(_TOKENS, 2 * layout.cp * layout.tp), 2, 2 * layout.cp, layout.cp * layout.tp
    )
    model = _model(config, layout, sequence_length, length, sum(stages))
    if config.attention_pattern is not None:
        # Both kinds of attention, where there is room for both.
        limited = "chunk" if config.sliding_window is None else "window"
        model["attention_pattern"] = [limited, "full"] if sum(stages) > 1 else None
        if sum(stages) == 1 and config.rope is not None and config.rope.local_only:
            # The one layer that is left has positions.
            model["rope"] = config.rope.model_dump() | {"local_only": False}
            model["attention_temperature"] = None
    # A recipe says by `train.mtp` how many layers multi-token prediction has.
    shrunk = ModelConfig.model_validate(config.model_dump(exclude_none=True) | model | {"mtp_layers": 0})
    sizes: list[int] = []
    for count in counts:
        sizes.append(_batch(count, shrunk, small, length, more_than=sizes[-1] if sizes else 0))
    return ShrunkRun(shrunk, small, length, tuple(sizes))


def _fewer_replicas(layout: RankLayout, config: ModelConfig, sequence_length: int, max_ranks: int) -> RankLayout:
    """Reduce data parallel to what fits; replicated states stay replicated, sharded ones stay sharded."""
    if layout.world_size <= max_ranks:
        return layout
    for dp in range(max_ranks * layout.dp // layout.world_size, 1, -1):
        for replicas in (size for size in range(1, dp + 1) if dp % size == 0):
            if (replicas > 1, dp // replicas > 1) != (layout.replicas > 1, layout.dp_shard > 1):
                continue
            # With `shard: none` every dp rank is a replica, whatever `replicate` is.
            fewer = replace(layout, dp=dp, replicate=1 if layout.shard == "none" else replicas)
            batch = dp * layout.micro_batch * layout.pp
            if not layout_problems(fewer, config, sequence_length=sequence_length, batch_sizes=[batch]):
                return fewer
    raise InputError(
        f"{layout} is {layout.world_size} ranks, there is room for {max_ranks} here, and fewer dp ranks do not help",
        where="layout",
        hint="check its dimensions by themselves, for example --layout tp=2,pp=2, or run where there is more room",
    )


def _model(config: ModelConfig, layout: RankLayout, sequence_length: int, length: int, layers: int) -> dict[str, Any]:
    """Every size of the model."""
    tp = layout.tp
    shares = layout.dense_shards
    kv_heads = _smallest_like(config.kv_heads, 2 * tp, tp)
    hidden = _smallest_like(config.hidden, _HIDDEN, 2, shares)
    sizes: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "init_std": config.init_std * (config.hidden / hidden) ** 0.5,
        "heads": kv_heads * _smallest_like(config.heads // config.kv_heads, 2, 2),
        "kv_heads": kv_heads,
        "head_dim": _head_dim(config),
        "vocab_size": _smallest_like(config.vocab_size, max(_VOCABULARY, 2 * tp), 2, tp, tp * shares),
        "max_positions": _smallest_like(config.max_positions, length, 2, shares),
    }
    if config.ffn is not None:
        sizes["ffn"] = _smallest_like(config.ffn, max(_FFN, 2 * tp), 2, tp, tp * shares)
    if config.sliding_window is not None:
        # The window is the same fraction of the sequence: it limits attention if it did before.
        sizes["sliding_window"] = max(1, config.sliding_window * length // sequence_length)
    if config.attention_chunk is not None:
        sizes["attention_chunk"] = max(1, config.attention_chunk * length // sequence_length)
    if config.rope is not None and (scaling := config.rope.scaling) is not None and scaling.kind == "longrope":
        pairs = config.rope.rotary_dim(sizes["head_dim"]) // 2
        assert scaling.original_positions is not None, "the schema asks for all three"
        assert scaling.short_factors is not None, "the schema asks for all three"
        assert scaling.long_factors is not None, "the schema asks for all three"
        # Rows stay as far above or below the context before the stretch.
        changed = {
            "original_positions": max(2, scaling.original_positions * length // sequence_length),
            "short_factors": scaling.short_factors[:pairs],
            "long_factors": scaling.long_factors[:pairs],
        }
        sizes["rope"] = config.rope.model_dump() | {"scaling": scaling.model_dump() | changed}
    if (temperature := config.attention_temperature) is not None:
        steps = max(1, temperature.tokens * length // sequence_length)
        sizes["attention_temperature"] = temperature.model_dump() | {"tokens": steps}
    if config.moe is not None:
        moe = config.moe
        expert_shares = layout.expert_shards
        fewest = max(2 * layout.ep, moe.top_k + (moe.top_k < moe.experts))
        if moe.groups > 1:
            # A group has two experts at least, and the groups that a token visits have as many as it visits.
            fewest = max(fewest, 2 * moe.groups, -(-moe.top_k * moe.groups // moe.top_groups))
        sizes["moe"] = moe.model_dump() | {
            "experts": _smallest_like(moe.experts, fewest, layout.ep, layout.ep * expert_shares, moe.groups),
            "dense_first": min(moe.dense_first, layers - 1),
            "every": min(moe.every, layers - min(moe.dense_first, layers - 1)),
            "ffn": _smallest_like(moe.ffn, max(_EXPERT_FFN, 2 * layout.etp), 2, layout.etp, layout.etp * expert_shares),
            "shared_ffn": _smallest_like(moe.shared_ffn, max(_EXPERT_FFN, 2 * tp), 2, tp, tp * shares),
        }
    if config.mla is not None:
        mla = config.mla
        sizes["mla"] = mla.model_dump() | {
            "query_rank": None if mla.query_rank is None else _smallest_like(mla.query_rank, _QUERY_RANK, 2, shares),
            "kv_rank": _smallest_like(mla.kv_rank, _KV_RANK, 2, shares),
            "nope_dim": min(mla.nope_dim, _HEAD_DIM),
            "rope_dim": min(mla.rope_dim, _HEAD_DIM // 2),
            "value_dim": min(mla.value_dim, _HEAD_DIM - 2),
        }
        sizes["head_dim"] = sizes["mla"]["nope_dim"] + sizes["mla"]["rope_dim"]
    return sizes


def _head_dim(config: ModelConfig) -> int:
    """A small head, of which the part that is turned is even."""
    if config.rope is None:
        return min(config.head_dim, _HEAD_DIM)
    fits = (size for size in range(_HEAD_DIM, config.head_dim, 2) if config.rope.rotary_dim(size) % 2 == 0)
    return next((size for size in fits if config.rope.rotary_dim(size) > 0), config.head_dim)


def _stages(layout: RankLayout) -> tuple[int, ...]:
    """The layers of each chunk: uneven where they were uneven."""
    if len(layout.stages) == 1:
        return (min(layout.stages[0], _LAYERS),)
    fewest = min(layout.stages)
    return tuple(min(1 + layers - fewest, 3) for layers in layout.stages)


def _batch(count: int, config: ModelConfig, layout: RankLayout, length: int, *, more_than: int) -> int:
    """The smallest global batch whose micro-batches fill the pipeline like `count` of them."""
    pp, step = layout.pp, layout.dp * layout.micro_batch

    def kind(number: int) -> tuple[bool, ...]:
        return number == 1, number < pp, number == pp, number % pp == 0

    for number in range(more_than // step + 1, count):
        alike = kind(number) == kind(count)
        if alike and not layout_problems(layout, config, sequence_length=length, batch_sizes=[number * step]):
            return number * step
    return count * step


def _smallest_like(value: int, floor: int, *divisors: int) -> int:
    """The smallest number of at least `floor` that has the same of these divisors as `value`."""
    for number in range(min(floor, value), value):
        if all((number % divisor == 0) == (value % divisor == 0) for divisor in divisors):
            return number
    return value


def layout_for_nodes(
    layout: RankLayout,
    config: ModelConfig,
    *,
    nodes: int,
    min_nodes: int,
    ranks_per_node: int,
    sequence_length: int,
    batch_sizes: Sequence[int],
) -> tuple[RankLayout, int] | str:
    """Return the largest legal layout on at most `nodes` nodes and its number of nodes, or why there is none.

    The size of a replica is kept, since the memory of a GPU depends on it.
    """
    replica = layout.tp * layout.pp * layout.cp
    reason = f"a replica is {replica} ranks, and {nodes} nodes have {nodes * ranks_per_node}"
    for count in range(nodes, min_nodes - 1, -1):
        ranks = count * ranks_per_node
        if ranks % replica:
            continue
        for smaller in _with_replicas(layout, ranks // replica):
            problems = layout_problems(
                smaller, config, sequence_length=sequence_length, batch_sizes=batch_sizes, stages_written=True
            )
            if not problems:
                return smaller, count
            reason = problems[0].what
    return f"no layout of {min_nodes} to {nodes} nodes is legal: {reason}"


def _with_replicas(layout: RankLayout, dp: int) -> list[RankLayout]:
    """The layout with another dp: equal shares first, then uneven ones; each with its micro-batch, then smaller ones.

    An uneven share costs at most one micro-batch a step; dropping a replica always costs more.
    """
    replicate = layout.replicate if dp % layout.replicate == 0 else 1
    sizes = [size for size in range(layout.micro_batch, 0, -1) if layout.micro_batch % size == 0]
    fewer = replace(layout, dp=dp, replicate=replicate)
    return [replace(fewer, micro_batch=size, uneven=uneven) for uneven in (False, True) for size in sizes]
