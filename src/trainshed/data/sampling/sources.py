"""Sources of samples: what an order needs of one, synthetic tokens, and token files with their index.

Shapes: R rows to read, L sequence_length, S segments (a part of one unit inside one window).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from trainshed.data.sampling.index import REBUILD, STRIDE, SourceIndex
from trainshed.data.sampling.permutation import Permutation, derive_words
from trainshed.data.tokens.indexed_dataset import IndexedDataset
from trainshed.data.tokens.token_files import TokenFile, open_token_file
from trainshed.data.tokens.token_source import TokenSource
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.storage import open_store

if TYPE_CHECKING:
    from trainshed.storage import StoreOptions


@dataclass(frozen=True)
class DocumentSpan:
    """A part of a window: `tokens` tokens of a document of `file` (a prefix), from its token `offset` on."""

    file: str
    document: int
    offset: int
    column: int
    tokens: int


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
        """Tokens of one epoch; None for a source that never repeats (synthetic)."""
        ...

    @property
    def epoch_samples(self) -> int | None:
        """Samples of one epoch; None for a source that never repeats."""
        ...

    def locate(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Map the k-th sample drawn from this source to (epoch, window): int64 [R] each."""
        ...

    def read(self, draws: np.ndarray, out: np.ndarray) -> None:
        """Write the tokens of the k-th samples into `out`: int32 [R, L + 1]."""
        ...

    def document_spans(self, epoch: int, window: int) -> list[DocumentSpan]:
        """Return the parts of documents that make up a window; none for a source without documents."""
        ...


SHIFT = np.uint64(32)


class SyntheticSource:
    """Uniform tokens in [0, vocab_size), the same for the same (seed, label, sample, position) everywhere."""

    weight: float | None = None
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

    def locate(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Every sample is a new one: epoch 0, window k."""
        return np.zeros_like(draws), draws

    def read(self, draws: np.ndarray, out: np.ndarray) -> None:
        """Write the tokens of the k-th samples into `out`: int32 [R, L + 1]."""
        column = np.arange(self.sequence_length + 1, dtype=np.uint64) * self._column_keys[0]
        for row, draw in enumerate(draws):
            # One row at a time: 8 bytes a token of scratch would not fit the cache for a whole batch.
            state = _splitmix64(np.full(1, draw, np.uint64) * self._row_keys[0] + self._row_keys[1])
            word = _splitmix64((column + state) * self._column_keys[1])
            out[row] = ((word >> SHIFT) * np.uint64(self.vocab_size)) >> SHIFT

    def document_spans(self, epoch: int, window: int) -> list[DocumentSpan]:
        """There are no documents."""
        return []


def _splitmix64(word: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every input bit reaches every output bit."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


TOKEN_TYPES = {"<u1", "<i1", "<i2", "<u2", "<i4"}


@dataclass(frozen=True)
class WindowSegments:
    """The parts of units that make up windows, in reading order; every array is [S]."""

    row: np.ndarray
    column: np.ndarray
    unit: np.ndarray
    start: np.ndarray
    count: np.ndarray


class TokenDataset:
    """The samples of a token source: reads windows of its files as its index cuts them.

    `shards` are the source's, for a caller that has listed them already.
    """

    def __init__(
        self,
        source: TokenSource,
        index: SourceIndex,
        sequence_length: int,
        *,
        shards: Sequence[str] | None = None,
        options: StoreOptions | None = None,
    ) -> None:
        self.source, self.index, self._options = source, index, options
        self.name, self.label, self.weight = source.name, source.label, source.weight
        self.sequence_length = sequence_length
        self.shards = source.shards(options) if shards is None else list(shards)
        self.tokens = index.tokens
        self.epoch_samples = max(0, (index.tokens - 1) // sequence_length)
        self._dtype = np.dtype(index.shards[0]["dtype"]) if index.shards else np.dtype("<u2")
        self._check_shards()
        ends = np.cumsum([shard["tokens"] for shard in index.shards], dtype=np.int64)
        self._shard_starts = np.concatenate(([0], ends))
        self._window_orders: dict[int, Permutation] = {}
        self._files: dict[int, TokenFile] = {}

    def __reduce__(self) -> tuple[object, ...]:
        # Worker processes map and open the files themselves.
        return (_reopen, (self.source, self.index.folder, self.sequence_length, self.shards, self._options))

    def close(self) -> None:
        """Close the token files; reading opens them again."""
        while self._files:
            self._files.popitem()[1].close()

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

    def read(self, draws: np.ndarray, out: np.ndarray) -> None:
        """Write the tokens of the k-th samples into `out`: int32 [R, L + 1]."""
        epoch, window = self.locate(draws)
        # If the file has the type of the rows, read straight into them; otherwise through a buffer.
        direct = self._dtype == out.dtype and out.flags.c_contiguous
        tokens = out if direct else np.empty(out.shape, self._dtype)
        flat = tokens.reshape(-1)
        for number in sorted(set(epoch.tolist())):
            rows = np.flatnonzero(epoch == number)
            segments = self.segments(number, window[rows])
            targets = rows[segments.row] * (self.sequence_length + 1) + segments.column
            self._read_segments(segments, targets, flat)
        if not direct:
            out[...] = tokens

    def segments(self, epoch: int, windows: np.ndarray) -> WindowSegments:
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
        return WindowSegments(row, low - begin[row], unit[kept], start[kept] + low - lower, high - low)

    def document_spans(self, epoch: int, window: int) -> list[DocumentSpan]:
        """Return the parts of documents that make up a window (for people: it reads the token files' own index)."""
        segments = self.segments(epoch, np.array([window]))
        spans: list[DocumentSpan] = []
        for start, column, count in zip(segments.start, segments.column, segments.count, strict=True):
            shard = int(np.searchsorted(self._shard_starts, start, "right")) - 1
            with IndexedDataset(self.shards[shard], self._options) as reader:
                token = int(start - self._shard_starts[shard])
                sequence = int(np.searchsorted(reader.pointers, token * reader.dtype.itemsize, "right")) - 1
                document = int(np.searchsorted(reader.document_indices, sequence, "right")) - 1
                first = int(reader.pointers[reader.document_indices[document]]) // reader.dtype.itemsize
                spans.append(DocumentSpan(reader.prefix, document, token - first, int(column), int(count)))
        return spans

    def _read_segments(self, segments: WindowSegments, targets: np.ndarray, flat: np.ndarray) -> None:
        start, count = segments.start, segments.count
        shard = np.searchsorted(self._shard_starts, start, "right") - 1
        # Segments that are adjacent both in the file and in the output are one read.
        joined = (start[1:] == start[:-1] + count[:-1]) & (targets[1:] == targets[:-1] + count[:-1])
        joined &= shard[1:] == shard[:-1]
        heads = np.concatenate(([0], np.flatnonzero(~joined) + 1))
        width = self._dtype.itemsize
        offsets = (start[heads] - self._shard_starts[shard[heads]]) * width
        lows = targets[heads] * width
        highs = lows + np.add.reduceat(count, heads) * width
        view = flat.view(np.uint8).data
        reads = zip(shard[heads].tolist(), offsets.tolist(), lows.tolist(), highs.tolist(), strict=True)
        for number, offset, low, high in reads:
            file = self._files.get(number)
            if file is None:
                file = self._files.setdefault(number, open_token_file(self.shards[number] + ".bin", self._options))
            file.read_into(view[low:high], offset)

    def _window_order(self, epoch: int) -> Permutation:
        """Return the order of an epoch's windows."""
        if epoch not in self._window_orders:
            spec = self.index.spec
            self._window_orders[epoch] = Permutation(self.epoch_samples, spec.seed, "windows", spec.label, epoch)
        return self._window_orders[epoch]

    def _check_shards(self) -> None:
        if len(self.shards) != len(self.index.shards):
            raise CorruptData(
                f"source '{self.name}' has {len(self.shards)} token files, its index was made of "
                f"{len(self.index.shards)}",
                where=str(self.index.folder),
                hint=REBUILD,
            )
        if self._dtype.str not in TOKEN_TYPES:
            raise InputError(
                f"source '{self.name}' holds {self._dtype} values; tokens are integers of at most 32 bits",
                where=self.shards[0],
                hint="prepare it again with `trainshed data prepare`",
            )
        for shard, facts in zip(self.shards, self.index.shards, strict=True):
            address = shard + ".bin"
            store, path = open_store(address, self._options)
            info = store.head(path)
            if info is None:
                raise NotFound("no such token file", where=address, hint="copy it here or prepare again")
            if info.size != facts["tokens"] * self._dtype.itemsize:
                raise CorruptData(
                    f"has {info.size} bytes, its index says {facts['tokens']} tokens of {self._dtype}",
                    where=address,
                    hint=REBUILD,
                )


def _reopen(
    source: TokenSource, index: Path, sequence_length: int, shards: Sequence[str], options: StoreOptions | None
) -> TokenDataset:
    return TokenDataset(source, SourceIndex(index), sequence_length, shards=shards, options=options)
