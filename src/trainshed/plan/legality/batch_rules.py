"""What the batch asks of a layout: equal shares for dp ranks, and enough micro-batches for a pipeline's schedule."""

from __future__ import annotations

from collections.abc import Iterator

from trainshed.plan.layout import RankLayout
from trainshed.plan.legality.asked import Asked
from trainshed.plan.legality.wording import problem, round_up
from trainshed.plan.performance.anatomy import Anatomy
from trainshed.recipe.section import Problem


def equal_shares(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """Every rank makes the same whole number of micro-batches."""
    if layout.uneven and model.experts is None:
        return  # rows without a loss make them equal; a router would count those
    step = layout.dp * layout.micro_batch
    uneven = [size for size in asked.batch_sizes if size % step]
    if uneven:
        key = "dp" if uneven[0] % layout.dp else "micro_batch"
        yield problem(
            key,
            f"dp {layout.dp} · micro_batch {layout.micro_batch} = {step} does not divide "
            f"the global batch of {', '.join(map(str, uneven))}",
            f"write a multiple of {step} as train.global_batch (and in batch_ramp), or smaller dp or micro_batch",
        )


def torch_schedule(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """Micro-batches as `torch.distributed.pipelining` wants them."""
    if not layout.uneven and any(size % (layout.dp * layout.micro_batch) for size in asked.batch_sizes):
        return
    if layout.schedule == "1f1b":
        yield from _too_few_for_1f1b(layout, asked.batch_sizes)
    elif layout.schedule in ("interleaved", "zero_bubble"):
        yield from _uneven_rounds(layout, asked.batch_sizes)


def _too_few_for_1f1b(layout: RankLayout, batch_sizes: tuple[int, ...]) -> Iterator[Problem]:
    smallest = layout.micro_batches(batch_sizes[0]) if batch_sizes else layout.pp
    if smallest < layout.pp:
        yield problem(
            "schedule",
            f"1f1b fills its {layout.pp} stages with as many micro-batches, and a batch of {batch_sizes[0]} "
            f"makes {smallest}",
            f"write schedule: gpipe, or a global batch of {layout.pp * layout.dp * layout.micro_batch} or more",
        )


def _uneven_rounds(layout: RankLayout, batch_sizes: tuple[int, ...]) -> Iterator[Problem]:
    # The rule of torch.distributed.pipelining: rounds of pp micro-batches or a few more, all of one size.
    for size in batch_sizes:
        count = layout.micro_batches(size)
        rounds = max(1, count // layout.pp)
        if count % rounds:
            whole = round_up(count, layout.pp)
            yield problem(
                "schedule",
                f"{layout.schedule} runs {rounds} equal rounds, and a batch of {size} makes {count} micro-batches",
                f"write a global batch of {whole * layout.dp * layout.micro_batch} ({whole} micro-batches)",
            )
            return


def torch_sharding(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """A pipeline's micro-batches keep weights and gradients of a stage whole: only optimiser states are shared out."""
    if layout.pp > 1 and layout.shard in ("zero2", "full") and max(layout.dense_shards, layout.expert_shards) > 1:
        cut = "gradients" if layout.shard == "zero2" else "weights and gradients"
        yield problem(
            "shard",
            f"shard: {layout.shard} with pp: {layout.pp} would leave {cut} whole on every rank, as zero1 does: our own "
            "engine does not share them out in a pipeline yet",
            "write shard: zero1, or pp: 1",
        )


def torch_recompute(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """What is kept selectively may be passed backward once."""
    if layout.recompute == "selective" and layout.schedule == "zero_bubble":
        # torch.utils.checkpoint: what is kept selectively may be passed backward once; this schedule does it twice.
        yield problem(
            "recompute",
            "selective keeps activations for one backward, and zero_bubble makes two: inputs first, weights later",
            "write recompute: full or none, or schedule: 1f1b",
        )
