"""Letters that one encoder knows and the other does not: their Unicode tables are of different years.

Tokenizers split text by classes such as \\p{L}. gigatoken 0.10 has the classes of Unicode 17, the regular expressions
of tokenizers 0.23 those of Unicode 16 and its normalizers older ones still, so that a letter added in between splits
differently (`𲨷.s`: two words or three). The reference is right by definition; documents that hold such a letter are
encoded by it. The ranges are what a sweep over every code point found (tests/data/test_young_letters.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

RANGES = (
    (0x088F, 0x088F),
    (0x0C5C, 0x0C5C),
    (0x0CDC, 0x0CDC),
    (0xA7CE, 0xA7CF),
    (0xA7D2, 0xA7D2),
    (0xA7D4, 0xA7D4),
    (0xA7F1, 0xA7F1),
    (0x10940, 0x10959),
    (0x10EC5, 0x10EC7),
    (0x113C2, 0x113C2),
    (0x11DB0, 0x11DDB),
    (0x11DE0, 0x11DE9),
    (0x1611E, 0x1611E),
    (0x16D67, 0x16D67),
    (0x16EA0, 0x16EB8),
    (0x16EBB, 0x16ED3),
    (0x16FF2, 0x16FF6),
    (0x187F8, 0x187FF),
    (0x18D09, 0x18D1E),
    (0x18D80, 0x18DF2),
    (0x1E6C0, 0x1E6DE),
    (0x1E6E0, 0x1E6E2),
    (0x1E6E4, 0x1E6E5),
    (0x1E6E7, 0x1E6ED),
    (0x1E6F0, 0x1E6F4),
    (0x1E6FE, 0x1E6FF),
    (0x2B73A, 0x2B73F),
    (0x2CEA2, 0x2CEAD),
    (0x323B0, 0x33479),
)

_YOUNG = re.compile("[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in RANGES) + "]")


_SHORT = tuple(chr(point) for first, last in RANGES for point in range(first, last + 1) if point < 0x10000)
_SECOND_BYTES = {chr(point).encode()[1] for first, last in RANGES for point in range(first, last + 1) if point > 0xFFFF}
"""The second byte of those that take four in UTF-8 (the first is F0 in all of them); no emoji has it."""


def with_young_letters(documents: Sequence[str]) -> list[int]:
    """Which documents hold such a letter, by number. Nearly always none, and then it costs next to nothing."""
    text = "".join(documents)
    if text.isascii() or not (any(letter in text for letter in _SHORT) or _may_hold_long_ones(text.encode())):
        return []
    return [number for number, document in enumerate(documents) if _YOUNG.search(document)]


def _may_hold_long_ones(data: bytes) -> bool:
    """A glance that takes a nanosecond a byte, where the regular expression takes forty."""
    import numpy as np

    at = np.flatnonzero(np.frombuffer(data, np.uint8) == 0xF0)
    return not _SECOND_BYTES.isdisjoint(np.unique(np.frombuffer(data, np.uint8)[at + 1]).tolist())
