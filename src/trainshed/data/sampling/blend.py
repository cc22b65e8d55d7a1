"""Which source the i-th sample comes from, in closed form.

The sources are the leaves of a balanced binary tree. A node that has seen i samples has sent floor(i * p) of
them to its left child, p a 32-bit fixed-point fraction; sample i goes left exactly when that count grows. So
any sample is found in O(log sources) without what came before, counts only ever grow, and a source's count
differs from its share by less than the depth of the tree (plus what rounding p costs: at most 2**-33 of the
samples a level). Part of order algorithm version 1: never edited, only added to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from trainshed.errors import InputError

ONE = 1 << 32
LOW = np.uint64(ONE - 1)
SHIFT = np.uint64(32)
# Below this the rounding of p is more than 0.1% of the weight: the budget would not be what was asked for.
LEAST = 512


@dataclass(frozen=True)
class SourceBudget:
    """What one source gives to a run; `epochs` is None for a source that never repeats."""

    name: str
    weight: float
    samples: int
    tokens: int
    epochs: float | None


class Blend:
    """Shares of samples for a list of sources.

    `weights` are relative; None makes them proportional to `tokens`.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float | int | None] | None = None,
        tokens: Sequence[int | None] | None = None,
    ) -> None:
        if not names:
            raise InputError("there is no source to draw from", where="data.train", hint="name one source or more")
        self.names = list(names)
        shares = _shares(self.names, weights, tokens)
        total = sum(shares)
        self.weights = [float(share / total) for share in shares]
        # Nodes in preorder: (first source, middle, end, fraction that goes left).
        self._fractions: dict[tuple[int, int], int] = {}
        self._grow(shares, 0, len(shares))

    def __len__(self) -> int:
        return len(self.names)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Map samples to (source, how many samples of that source came before): int64 each."""
        source = np.zeros(samples.shape, np.int64)
        draw = np.zeros(samples.shape, np.int64)
        self._descend(0, len(self.names), np.arange(samples.size), samples.astype(np.uint64), source, draw)
        return source, draw

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples each source gives."""
        counts: list[int] = []

        def visit(first: int, end: int, count: int) -> None:
            if end - first == 1:
                counts.append(count)
                return
            left = (count * self._fractions[first, end]) >> 32
            middle = (first + end) // 2
            visit(first, middle, left)
            visit(middle, end, count - left)

        visit(0, len(self.names), samples)
        return counts

    def _grow(self, shares: list[Fraction], first: int, end: int) -> None:
        if end - first == 1:
            return
        middle = (first + end) // 2
        part = sum(shares[first:middle], Fraction(0)) / sum(shares[first:end], Fraction(0))
        fraction = math.floor(part * ONE + Fraction(1, 2))
        if not LEAST <= fraction <= ONE - LEAST:
            light = range(first, middle) if fraction < LEAST else range(middle, end)
            least = min(light, key=lambda number: shares[number])
            raise InputError(
                f"source '{self.names[least]}' has a weight of {self.weights[least]:.2g} of the whole, "
                "too small to be kept exactly",
                where="data.train",
                hint="give it more weight, leave it out, or join it with another source",
            )
        self._fractions[first, end] = fraction
        self._grow(shares, first, middle)
        self._grow(shares, middle, end)

    def _descend(
        self, first: int, end: int, places: np.ndarray, seen: np.ndarray, source: np.ndarray, draw: np.ndarray
    ) -> None:
        if not places.size:
            return
        if end - first == 1:
            source[places] = first
            draw[places] = seen.view(np.int64)
            return
        fraction = np.uint64(self._fractions[first, end])
        left = _scaled(seen, fraction)
        goes_left = _scaled(seen + np.uint64(1), fraction) > left
        middle = (first + end) // 2
        self._descend(first, middle, places[goes_left], left[goes_left], source, draw)
        right = ~goes_left
        self._descend(middle, end, places[right], seen[right] - left[right], source, draw)


def _scaled(count: np.ndarray, fraction: np.uint64) -> np.ndarray:
    """Return floor(count * fraction / 2**32) without leaving 64 bits."""
    return (count >> SHIFT) * fraction + (((count & LOW) * fraction) >> SHIFT)


def _shares(
    names: list[str], weights: Sequence[float | int | None] | None, tokens: Sequence[int | None] | None
) -> list[Fraction]:
    given = [None] * len(names) if weights is None else list(weights)
    if all(weight is None for weight in given):
        sizes = [None] * len(names) if tokens is None else list(tokens)
        if len(names) > 1 and any(not size for size in sizes):
            empty = names[next(number for number, size in enumerate(sizes) if not size)]
            raise InputError(
                f"source '{empty}' has no tokens to be weighed by",
                where="data.train",
                hint="give each a weight",
            )
        return [Fraction(size or 1) for size in sizes]
    shares: list[Fraction] = []
    for name, weight in zip(names, given, strict=True):
        if weight is None:
            raise InputError(
                f"source '{name}' has no weight, but others have one",
                where="data.train",
                hint="give every source a weight, or none (then they are proportional to tokens)",
            )
        if not math.isfinite(weight) or weight <= 0:
            raise InputError(
                f"source '{name}' has weight {weight}",
                where="data.train",
                hint="weights are numbers above 0",
            )
        shares.append(Fraction(weight))
    return shares
