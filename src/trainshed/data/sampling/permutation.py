"""A keyed permutation of [0, n): any position in O(1), no table, the same on every machine for ever.

This is order algorithm version 1. It is never edited, only added to: a change here changes what every run
that resumes would see. It uses unsigned 64-bit integers alone (no numpy random generator, no floats).

n <= 1024: a Fisher-Yates table drawn from SplitMix64.
n > 1024: a generalised Feistel network (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002)
over pairs (left, right) in [0, a) x [0, b), a = ceil(sqrt(n)), b = ceil(n / a). Six rounds add a keyed hash
of one half to the other, modulo its size. Results >= n are sent through again ("cycle walking"); a*b - n < a,
so this happens to fewer than 1 in sqrt(n).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np

TABLE_LIMIT = 1024
ROUNDS = 6
# The five arrays that a round touches stay in cache (2.5 MiB), and each pass over one is long enough for
# threads to overlap: a pass ends with taking the interpreter lock. Not part of the order.
CHUNK = 1 << 16
MASK = (1 << 64) - 1
SHIFT = np.uint64(32)

Labels = tuple[str | int, ...]
RoundKeys = tuple[np.uint64, np.uint64, np.uint64]


def derive_words(seed: int, labels: Labels, count: int) -> list[int]:
    """Return `count` 64-bit words that depend on every label: SHAKE-256 of an unambiguous text of them.

    The text is `trainshed-order-1`, then seed and labels as `i<decimal>` or `s<bytes>:<text>`, joined by `/`.
    """
    parts = ["trainshed-order-1", f"i{int(seed)}"]
    for label in labels:
        parts.append(f"s{len(label.encode())}:{label}" if isinstance(label, str) else f"i{int(label)}")
    digest = hashlib.shake_256("/".join(parts).encode()).digest(8 * count)
    return [int.from_bytes(digest[8 * word : 8 * word + 8], "little") for word in range(count)]


class Permutation:
    """The permutation of [0, size) that belongs to (seed, labels)."""

    def __init__(self, size: int, seed: int, *labels: str | int) -> None:
        if not 0 <= size < 1 << 62:
            raise ValueError(f"a permutation of {size} elements")
        self.size = size
        words = derive_words(seed, labels, 3 * ROUNDS)
        self._table = _fisher_yates(size, words[0]) if size <= TABLE_LIMIT else None
        if self._table is not None:
            self._inverse_table = np.empty_like(self._table)
            self._inverse_table[self._table] = np.arange(size, dtype=np.int64)
            return
        a = math.isqrt(size - 1) + 1
        b = -(-size // a)
        self._a, self._b = np.uint64(a), np.uint64(b)
        # Odd multipliers, so that no input bit is lost in the first product.
        self._keys = [
            (np.uint64(words[3 * r] | 1), np.uint64(words[3 * r + 1]), np.uint64(words[3 * r + 2] | 1))
            for r in range(ROUNDS)
        ]

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Map positions in [0, size) to elements: int64, the shape of `positions`."""
        return self._map(positions, self._forward) if self._table is None else self._table[positions]

    def inverse(self, elements: np.ndarray) -> np.ndarray:
        """Map elements back to their positions."""
        return self._map(elements, self._backward) if self._table is None else self._inverse_table[elements]

    def _map(self, values: np.ndarray, network: Callable[[np.ndarray], None]) -> np.ndarray:
        out = np.array(values, np.uint64)
        if out.size and int(out.max()) >= self.size:
            raise IndexError(f"{int(out.max())} is outside a permutation of {self.size}")
        flat = out.reshape(-1)
        size = np.uint64(self.size)
        for start in range(0, flat.size, CHUNK):
            chunk = flat[start : start + CHUNK]
            network(chunk)
            while (outside := np.flatnonzero(chunk >= size)).size:
                again = chunk[outside]
                network(again)
                chunk[outside] = again
        return out.view(np.int64)

    def _forward(self, values: np.ndarray) -> None:
        left, right = self._split(values)
        spare = np.empty_like(values)
        for number, keys in enumerate(self._keys):
            if number % 2 == 0:
                _add_hash(left, right, keys, self._a, spare)
            else:
                _add_hash(right, left, keys, self._b, spare)
        np.multiply(right, self._a, out=values)
        np.add(values, left, out=values)

    def _backward(self, values: np.ndarray) -> None:
        left, right = self._split(values)
        spare = np.empty_like(values)
        for number, keys in reversed(list(enumerate(self._keys))):
            if number % 2 == 0:
                _subtract_hash(left, right, keys, self._a, spare)
            else:
                _subtract_hash(right, left, keys, self._b, spare)
        np.multiply(right, self._a, out=values)
        np.add(values, left, out=values)

    def _split(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        right = values // self._a
        left = right * self._a
        np.subtract(values, left, out=left)
        return left, right


def _hash(half: np.ndarray, keys: RoundKeys, modulus: np.uint64, out: np.ndarray, spare: np.ndarray) -> None:
    """Set `out` to a keyed hash of `half` in [0, modulus), modulus < 2**32, by multiply and shift."""
    multiplier, addend, last = keys
    np.multiply(half, multiplier, out=out)
    np.add(out, addend, out=out)
    np.right_shift(out, SHIFT, out=spare)
    np.bitwise_xor(out, spare, out=out)
    np.multiply(out, last, out=out)
    np.right_shift(out, SHIFT, out=out)
    np.multiply(out, modulus, out=out)
    np.right_shift(out, SHIFT, out=out)


def _add_hash(target: np.ndarray, half: np.ndarray, keys: RoundKeys, modulus: np.uint64, spare: np.ndarray) -> None:
    hashed = np.empty_like(target)
    _hash(half, keys, modulus, hashed, spare)
    np.add(target, hashed, out=target)
    # Where no reduction is due, target - modulus wraps to a huge number: the minimum is the remainder.
    np.subtract(target, modulus, out=spare)
    np.minimum(target, spare, out=target)


def _subtract_hash(
    target: np.ndarray, half: np.ndarray, keys: RoundKeys, modulus: np.uint64, spare: np.ndarray
) -> None:
    hashed = np.empty_like(target)
    _hash(half, keys, modulus, hashed, spare)
    np.subtract(target, hashed, out=target)
    np.add(target, modulus, out=spare)
    np.minimum(target, spare, out=target)


def _fisher_yates(size: int, state: int) -> np.ndarray:
    """Shuffle [0, size) with SplitMix64 (Steele, Lea, Flood 2014), reduced by multiply and shift."""
    table = np.arange(size, dtype=np.int64)
    for last in range(size - 1, 0, -1):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        word = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
        word ^= word >> 31
        other = (word * (last + 1)) >> 64
        table[last], table[other] = table[other], table[last]
    return table
