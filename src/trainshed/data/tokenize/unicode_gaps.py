"""Characters that the two encoders class differently, because their Unicode tables are of different versions.

Tokenizers split text by classes such as \\p{L}. gigatoken 0.10 has the classes of Unicode 17, the regular expressions
of tokenizers 0.23 those of Unicode 16, and its normalizers older ones. A letter that was added in between splits
differently (`𲨷.s`: two words or three). The reference is right by definition, so it encodes the documents that hold
such a character. A sweep over every code point found the ranges (tests/data/tokenize/test_unicode_gaps.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


GAP_RANGES = (
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

_LEAD_BYTES = sorted({chr(first).encode()[0] for first, _ in GAP_RANGES})
"""The first bytes in UTF-8 of all of them (E0, EA, F0): never inside another character, and rare in most text."""


def documents_with_gaps(documents: Sequence[str]) -> list[int]:
    """Return the numbers of the documents with such a character: nearly always none, at a nanosecond per byte."""
    import numpy as np

    numbers = [number for number, document in enumerate(documents) if not document.isascii()]
    if not numbers:
        return []
    # The fast encoder has encoded these strings before, and Python caches their UTF-8: encoding is a copy.
    encoded = [documents[number].encode() for number in numbers]
    data = np.frombuffer(b"".join(encoded), np.uint8)
    is_lead = data == _LEAD_BYTES[0]
    for lead in _LEAD_BYTES[1:]:
        is_lead |= data == lead
    at = np.flatnonzero(is_lead)
    if not len(at):
        return []
    hits = at[_gap_table()[_code_points(data, at)]]
    if not len(hits):
        return []
    ends = np.cumsum([len(text) for text in encoded])
    return sorted({numbers[int(which)] for which in np.searchsorted(ends, hits, "right")})


def _code_points(data: NDArray[np.uint8], at: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the characters of three or four bytes that begin at these offsets."""
    import numpy as np

    lead = data[at].astype(np.int64)
    tail = [(data[np.minimum(at + i, len(data) - 1)] & 63).astype(np.int64) for i in (1, 2, 3)]
    three = (lead & 15) << 12 | tail[0] << 6 | tail[1]
    four = (lead & 7) << 18 | tail[0] << 12 | tail[1] << 6 | tail[2]
    return np.where(lead >= 0xF0, four, three)


@cache
def _gap_table() -> NDArray[np.bool_]:
    """Return for every code point whether it is in `GAP_RANGES`."""
    import numpy as np

    table = np.zeros(0x110000, np.bool_)
    for first, last in GAP_RANGES:
        table[first : last + 1] = True
    return table
