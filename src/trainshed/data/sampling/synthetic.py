"""The benchmark source: tokens by a keyed hash of (sample, position). No files, no end, never by accident."""

from __future__ import annotations

import numpy as np

from trainshed.data.sampling.permutation import derive_words
from trainshed.data.sampling.source import Piece

SHIFT = np.uint64(32)


class SyntheticSource:
    """Uniform tokens in [0, vocab_size), the same for the same (seed, label, sample, position) everywhere."""

    tokens: int | None = None
    epoch_samples: int | None = None

    def __init__(self, *, vocab_size: int, sequence_length: int, seed: int, label: str = "synthetic") -> None:
        if not 0 < vocab_size <= 1 << 31:
            raise ValueError(f"a vocabulary of {vocab_size} tokens")
        self.name = self.label = label
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        words = derive_words(seed, ("synthetic", label), 4)
        self._row_keys = np.uint64(words[0] | 1), np.uint64(words[1])
        self._column_keys = np.uint64(words[2] | 1), np.uint64(words[3] | 1)

    def place(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Every sample is a new one: epoch 0, window k."""
        return np.zeros_like(draws), draws

    def read(self, draws: np.ndarray, out: np.ndarray) -> None:
        """Write the tokens of the k-th samples into `out`: int32 [R, L + 1]."""
        column = np.arange(self.sequence_length + 1, dtype=np.uint64) * self._column_keys[0]
        for row, draw in enumerate(draws):
            # One row at a time: 8 bytes a token of scratch would not fit the cache for a whole batch.
            state = _mixed(np.full(1, draw, np.uint64) * self._row_keys[0] + self._row_keys[1])
            word = _mixed((column + state) * self._column_keys[1])
            out[row] = ((word >> SHIFT) * np.uint64(self.vocab_size)) >> SHIFT

    def pieces(self, epoch: int, window: int) -> list[Piece]:
        """There are no documents."""
        return []


def _mixed(word: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every input bit reaches every output bit."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
