"""What an order needs of a source of samples.

Shapes: R rows asked for, L sequence_length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Piece:
    """A part of a window: `tokens` tokens of a document of `file` (a prefix), from its token `offset` on."""

    file: str
    document: int
    offset: int
    column: int
    tokens: int


class Source(Protocol):
    """What an order needs to know of a source."""

    @property
    def name(self) -> str:
        """How reports and errors call it."""
        ...

    @property
    def label(self) -> str:
        """What sets its shuffle apart from that of other sources."""
        ...

    @property
    def sequence_length(self) -> int:
        """Tokens of a sample, less the one shared with the next."""
        ...

    @property
    def tokens(self) -> int | None:
        """Tokens of one epoch; None where a source never repeats (synthetic)."""
        ...

    @property
    def epoch_samples(self) -> int | None:
        """Samples of one epoch, None where a source never repeats."""
        ...

    def place(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Map the k-th sample drawn from this source to (epoch, window): int64 [R] each."""
        ...

    def read(self, draws: np.ndarray, out: np.ndarray) -> None:
        """Write the tokens of the k-th samples into `out`: int32 [R, L + 1]."""
        ...

    def pieces(self, epoch: int, window: int) -> list[Piece]:
        """Tell which documents make up a window; none for a source without documents."""
        ...
