"""The CRC-32 of a record that several threads make: each sums its part, and the sums are put together."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

_POLYNOMIAL = 0xEDB88320  # of CRC-32 as zip has it, its bits reversed
_ONE = 1 << 31


def crc32_together(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of parts side by side, each given as (its own CRC-32, its bytes): zlib's `crc32_combine`."""
    whole = 0
    for checksum, length in parts:
        whole = _product(_shift(length), whole) ^ checksum
    return whole


@cache
def _shift(length: int) -> int:
    """x to the power of 8 · `length`, modulo the polynomial: what so many bytes behind it do to a checksum."""
    found, square = _ONE, _ONE >> 8
    while length:
        if length & 1:
            found = _product(square, found)
        square = _product(square, square)
        length >>= 1
    return found


def _product(a: int, b: int) -> int:
    """The product of two polynomials over two elements, modulo the polynomial."""
    found = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            found ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found
