"""Sources of samples: what an order needs of one, synthetic tokens, and token files with their index.

Shapes: R rows to read, L sequence_length, S segments (a part of one unit inside one window).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from trainshed.data.sampling.index import STRIDE, SourceIndex
from trainshed.data.sampling.permutation import Permutation, derive_words
from trainshed.data.sampling.rows import SampleRows
from trainshed.data.sampling.shard_reader import DocumentSpan, RowSegments, open_token_reader
from trainshed.data.tokens.token_source import TokenSource
from trainshed.errors import InputError

if TYPE_CHECKING:
    from trainshed.storage import StoreOptions


class SampleSource(Protocol):
    """What an order needs to know of a source."""

    @property
    def name(self) -> str:
        """Its name in reports and errors."""
        ...

    @property
    def label(self) -> str:
        """What makes its shuffle differ from that of other sources."""
        ...

    @property
    def weight(self) -> float | None:
        """Its relative share of the samples; None in all sources makes them proportional to their tokens."""
        ...

    @property
    def sequence_length(self) -> int:
        """Tokens of a sample, without the one that it shares with the next."""
        ...

    @property
    def tokens(self) -> int | None:
        """Tokens of one epoch, padding included; None for a source that never repeats (synthetic)."""
        ...

    @property
    def epoch_samples(self) -> int | None:
        """Samples of one epoch; None for a source that never repeats."""
        ...

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether its rows say where documents begin."""
        ...

    @property
    def has_learned(self) -> bool:
        """Whether its rows say which tokens are learned."""
        ...

    def locate(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Map the k-th sample drawn from this source to (epoch, window): int64 [R] each."""
        ...

    def read(self, draws: np.ndarray) -> SampleRows:
        """Read the k-th samples."""
        ...

    def document_starts(self, draws: np.ndarray) -> np.ndarray:
        """Return only where their documents begin, from the index alone: int32 [R, L + 1]."""
        ...

    def document_spans(self, epoch: int, window: int) -> list[DocumentSpan]:
        """Return the parts of documents that make up a window; none for a source without documents."""
        ...


SHIFT = np.uint64(32)


SYNTHETIC_DOCUMENTS = 4
"""Documents of a synthetic row on average, where they are kept apart."""


class SyntheticSource:
    """Uniform tokens in [0, vocab_size), the same for the same (seed, label, sample, position) everywhere.

    With `keeps_documents_apart`, documents begin at random columns of a row, which are a function of the same values.
    """

    weight: float | None = None
    tokens: int | None = None
    epoch_samples: int | None = None
    has_learned = False

    def __init__(
        self,
        *,
        vocab_size: int,
        sequence_length: int,
        seed: int,
        label: str = "synthetic",
        keeps_documents_apart: bool = False,
    ) -> None:
        if not 0 < vocab_size <= 1 << 31:
            raise ValueError(f"a vocabulary of {vocab_size} tokens")
        self.name = self.label = label
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.keeps_documents_apart = keeps_documents_apart
        self._token_keys = derive_words(seed, ("synthetic", label), 4)
        self._document_keys = derive_words(seed, ("synthetic documents", label), 4)

    def locate(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Every sample is a new one: epoch 0, window k."""
        return np.zeros_like(draws), draws

    def read(self, draws: np.ndarray) -> SampleRows:
        """Make the k-th samples."""
        tokens = self._random_values(draws, self._token_keys, self.vocab_size)
        return SampleRows(tokens, self.document_starts(draws) if self.keeps_documents_apart else None)

    def document_starts(self, draws: np.ndarray) -> np.ndarray:
        """Return where documents begin: int32 [R, L + 1]."""
        draw = self._random_values(draws, self._document_keys, max(1, self.sequence_length // SYNTHETIC_DOCUMENTS))
        columns = np.arange(self.sequence_length + 1, dtype=np.int32)
        return np.maximum.accumulate(np.where(draw == 0, columns, 0), axis=1, dtype=np.int32)

    def document_spans(self, epoch: int, window: int) -> list[DocumentSpan]:
        """There are no documents in files."""
        return []

    def _random_values(self, draws: np.ndarray, keys: list[int], end: int) -> np.ndarray:
        """Return uniform values in [0, end): int32 [R, L + 1]."""
        row_multiplier, row_addend = np.uint64(keys[0] | 1), np.uint64(keys[1])
        column_multiplier, last = np.uint64(keys[2] | 1), np.uint64(keys[3] | 1)
        column = np.arange(self.sequence_length + 1, dtype=np.uint64) * column_multiplier
        out = np.empty((len(draws), self.sequence_length + 1), np.int32)
        for row, draw in enumerate(draws):
            # One row at a time: 8 bytes a token of scratch would not fit the cache for a whole batch.
            state = _splitmix64(np.full(1, draw, np.uint64) * row_multiplier + row_addend)
            word = _splitmix64((column + state) * last)
            out[row] = ((word >> SHIFT) * np.uint64(end)) >> SHIFT
        return out


def _splitmix64(word: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every input bit reaches every output bit."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


class TokenDataset:
    """The samples of a token source: reads windows of its files as its index cuts them.

    `shards` are the source's, for a caller that has listed them already. With `keeps_documents_apart`, rows say where
    documents begin. One that continues from the window before begins at column 0.
    """

    has_learned = False

    def __init__(
        self,
        source: TokenSource,
        index: SourceIndex,
        sequence_length: int,
        *,
        keeps_documents_apart: bool = False,
        shards: Sequence[str] | None = None,
        options: StoreOptions | None = None,
    ) -> None:
        self.source, self.index, self._options = source, index, options
        self.name, self.label, self.weight = source.name, source.label, source.weight
        self.sequence_length = sequence_length
        self.keeps_documents_apart = keeps_documents_apart
        self.shards = source.shards(options) if shards is None else list(shards)
        self.tokens = index.tokens
        self.epoch_samples = max(0, (index.tokens - 1) // sequence_length)
        self.reader = open_token_reader(self.name, self.shards, index.shards, str(index.folder), options)
        self._continued = index.continued_units() if keeps_documents_apart else None
        self._window_orders: dict[int, Permutation] = {}

    def __reduce__(self) -> tuple[object, ...]:
        # Worker processes map and open the files themselves.
        apart = self.keeps_documents_apart
        return (_reopen, (self.source, self.index.folder, self.sequence_length, apart, self.shards, self._options))

    def close(self) -> None:
        """Close the token files; reading opens them again."""
        self.reader.close()

    def locate(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Map the k-th sample drawn from this source to (epoch, window)."""
        if not self.epoch_samples:
            raise InputError(
                f"source '{self.name}' has {self.tokens} tokens, fewer than one sample of {self.sequence_length + 1}",
                hint="give it more text, or a smaller data.sequence_length",
            )
        epoch, position = np.divmod(draws, self.epoch_samples)
        window = np.empty_like(position)
        for number in sorted(set(epoch.tolist())):
            chosen = epoch == number
            window[chosen] = self._window_order(number)(position[chosen])
        return epoch, window

    def read(self, draws: np.ndarray) -> SampleRows:
        """Read the k-th samples."""
        shape = (len(draws), self.sequence_length + 1)
        tokens = np.empty(shape, self.reader.dtype)
        starts = np.empty(shape, np.int32) if self.keeps_documents_apart else None
        for rows, segments in self._segments_by_epoch(draws):
            targets = rows[segments.row] * shape[1] + segments.column
            self.reader.read_segments(segments, targets, tokens.reshape(-1))
            if starts is not None:
                starts[rows] = self._starts_of(segments)
        return SampleRows(tokens.astype(np.int32, copy=False), starts)

    def document_starts(self, draws: np.ndarray) -> np.ndarray:
        """Return where documents begin, from the index alone: int32 [R, L + 1]."""
        starts = np.empty((len(draws), self.sequence_length + 1), np.int32)
        for rows, segments in self._segments_by_epoch(draws):
            starts[rows] = self._starts_of(segments)
        return starts

    def _segments_by_epoch(self, draws: np.ndarray) -> Iterator[tuple[np.ndarray, RowSegments]]:
        """Yield the rows that come from one epoch, and the segments of their windows."""
        epoch, window = self.locate(draws)
        for number in sorted(set(epoch.tolist())):
            rows = np.flatnonzero(epoch == number)
            yield rows, self.segments(number, window[rows])

    def _starts_of(self, segments: RowSegments) -> np.ndarray:
        """Return the column at which the document of each column begins: int32 [rows of the segments, L + 1]."""
        unit, column = segments.unit, segments.column
        if self._continued is not None and len(self._continued):
            place = np.minimum(np.searchsorted(self._continued, unit), len(self._continued) - 1)
            joined = (self._continued[place] == unit) & (column > 0)
            joined[1:] &= unit[1:] == unit[:-1] + 1
            head = np.maximum.accumulate(np.where(joined, 0, np.arange(len(unit))))
            column = column[head]
        return np.repeat(column.astype(np.int32), segments.count).reshape(-1, self.sequence_length + 1)

    def segments(self, epoch: int, windows: np.ndarray) -> RowSegments:
        """Find the parts of units in these windows of an epoch; `row` counts within `windows`."""
        order, table = self.index.epoch_order(epoch)
        begin = windows * self.sequence_length
        end = begin + self.sequence_length + 1
        first = np.searchsorted(table, begin, "right") - 1
        blocks = np.searchsorted(table, end, "left") - first
        # One line per block of units that a window touches: [sum(blocks), STRIDE] positions of the order.
        row = np.repeat(np.arange(len(windows)), blocks)
        within = np.arange(len(row)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
        block = first[row] + within
        position = (block[:, None] * STRIDE + np.arange(STRIDE)).reshape(-1)
        inside = position < self.index.units
        position, row = position[inside], np.repeat(row, STRIDE)[inside]
        unit = order(position)
        start = self.index.starts[unit]
        length = self.index.starts[unit + 1] - start
        # Offsets in the epoch's concatenation: a window's blocks are adjacent, so one running sum serves all.
        after = np.cumsum(length)
        line = np.searchsorted(row, np.arange(len(windows)), "left")
        shift = table[first] - (after[line] - length[line])
        lower = after - length + shift[row]
        low = np.maximum(lower, begin[row])
        high = np.minimum(lower + length, end[row])
        kept = high > low
        low, high, lower, row = low[kept], high[kept], lower[kept], row[kept]
        return RowSegments(row, low - begin[row], unit[kept], start[kept] + low - lower, high - low)

    def document_spans(self, epoch: int, window: int) -> list[DocumentSpan]:
        """Return the parts of documents that make up a window."""
        return self.reader.document_spans(self.segments(epoch, np.array([window])))

    def _window_order(self, epoch: int) -> Permutation:
        """Return the order of an epoch's windows."""
        if epoch not in self._window_orders:
            spec = self.index.spec
            self._window_orders[epoch] = Permutation(self.epoch_samples, spec.seed, "windows", spec.label, epoch)
        return self._window_orders[epoch]


def _reopen(
    source: TokenSource,
    index: Path,
    sequence_length: int,
    keeps_documents_apart: bool,
    shards: Sequence[str],
    options: StoreOptions | None,
) -> TokenDataset:
    return TokenDataset(
        source,
        SourceIndex(index),
        sequence_length,
        keeps_documents_apart=keeps_documents_apart,
        shards=shards,
        options=options,
    )
