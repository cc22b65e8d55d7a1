"""Which of several predicted layouts to take: the fastest, risk counted, and of near ties the simplest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from trainshed.plan.layout import RankLayout
from trainshed.plan.performance.prediction import Prediction

SIMPLER_WITHIN = 0.01
"""How much slower than the fastest a simpler layout may be and still be chosen: less than any prediction is off."""
_BETS = 3
"""Layouts that somebody would try."""
_RECOMPUTE_ORDER = ("none", "selective", "full")
_SHARD_ORDER = ("none", "zero1", "zero2", "full")


def in_order_of_choice(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Return the one to take, then what to try beside it, then the others by time."""
    by_time = sorted(predictions, key=lambda each: (each.ranking_seconds, complexity(each.layout)))
    close = [each for each in by_time if each.ranking_seconds <= (1 + SIMPLER_WITHIN) * by_time[0].ranking_seconds]
    chosen = min(close, key=lambda each: complexity(each.layout))
    first = [chosen, *_other_bets(chosen, by_time)]
    return [*first, *(each for each in by_time if all(each is not one for one in first))]


def _other_bets(chosen: Prediction, by_time: Sequence[Prediction]) -> list[Prediction]:
    """Return what makes the first three unlike in luck where stalls come and go: three of one kind stall together.

    They are the fastest if nothing stalls, and the best of those that are half as likely to, or less.
    """
    fastest = min(by_time, key=lambda each: each.step_seconds)
    bets = [fastest] if fastest is not chosen and fastest.risk_seconds else []
    if chosen.stall_likelihood:
        safer = (each for each in by_time if each.stall_likelihood <= chosen.stall_likelihood / 2)
        bets += islice((each for each in safer if each is not fastest), _BETS - 1 - len(bets))
    return bets


def complexity(layout: RankLayout) -> tuple[int, ...]:
    """Return how complicated a layout is, to compare: axes in use first, then their sizes."""
    axes = (layout.tp, layout.pp, layout.cp, layout.ep)
    return (
        sum(size > 1 for size in axes),
        layout.tp * layout.pp * layout.cp * layout.ep,
        layout.vp,
        layout.etp,
        _RECOMPUTE_ORDER.index(layout.recompute),
        layout.replicate,
        _SHARD_ORDER.index(layout.shard),
        -layout.micro_batch,
        *axes,
    )
