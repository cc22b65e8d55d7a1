"""Which of several predicted layouts to take: the fastest, risk counted; of near ties an emptier card, then simplicity.

Where runs stall by chance, what to try beside the chosen one is what does best together with it: three layouts that are
a little slower each but stall independently are a better bet than three that share their luck.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import log, prod

from trainshed.plan.layout import RankLayout
from trainshed.plan.performance.prediction import Prediction

CLOSE_WITHIN = 0.01
"""How much slower than the fastest a safer or simpler layout may be and still be chosen: less than any prediction is
off."""
ROOMY = 0.6
"""Share of the card up to which emptier is no safer. With constants that never saw a model of the ultra-scale sweep,
choosing by it made the first choice 7% slower than the best on average; by simplicity alone 11%."""
_BETS = 3
"""Layouts that somebody would try."""
_RECOMPUTE_ORDER = ("none", "selective", "full")
_SHARD_ORDER = ("none", "zero1", "zero2", "full")


def in_order_of_choice(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Return the one to take, then what to try beside it, then the others by time."""
    by_time = sorted(predictions, key=lambda each: (each.ranking_seconds, complexity(each.layout)))
    close = [each for each in by_time if each.ranking_seconds <= (1 + CLOSE_WITHIN) * by_time[0].ranking_seconds]
    first = [min(close, key=preference)]
    left = [each for each in by_time if each is not first[0]]
    may_stall = any(each.stall_likelihood for each in by_time)
    while may_stall and left and len(first) < _BETS:
        # Where one more adds nothing, the faster one stands first.
        best = min(left, key=lambda each: _expected_log_seconds([*first, each]))
        first.append(best)
        left = [each for each in left if each is not best]
    return [*first, *left]


def preference(found: Prediction) -> tuple[float, tuple[int, ...]]:
    """Return what is compared of layouts that are as fast: how far beyond roomy the card is filled, then complexity."""
    return max(0.0, found.memory.total / found.memory.capacity - ROOMY), complexity(found.layout)


def _expected_log_seconds(tried: Sequence[Prediction]) -> float:
    """Logarithm of the seconds of the best of them, averaged over which of them are held up."""
    expected = 0.0
    for held_up in product((False, True), repeat=len(tried)):
        chances = (
            each.stall_likelihood if held else 1 - each.stall_likelihood
            for each, held in zip(tried, held_up, strict=True)
        )
        seconds = (
            each.step_seconds + (each.stall_seconds if held else 0.0) for each, held in zip(tried, held_up, strict=True)
        )
        expected += prod(chances) * log(min(seconds))
    return expected


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
