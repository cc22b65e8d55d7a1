"""Reading values of a source's shards as one concatenation: its tokens (`.bin`), or a byte a token (`.learned`).

Shapes: S segments (a part of one unit inside one row).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trainshed.data.sampling.index import REBUILD
from trainshed.data.tokens.indexed_dataset import IndexedDataset
from trainshed.data.tokens.token_files import TokenFile, open_token_file
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.storage import open_store

if TYPE_CHECKING:
    from trainshed.storage import StoreOptions

TOKEN_TYPES = {"<u1", "<i1", "<i2", "<u2", "<i4"}


@dataclass(frozen=True)
class RowSegments:
    """The parts of units that make up rows, in reading order; every array is [S].

    `unit` is a number of the index, `start` the segment's first token in the concatenation of the shards.
    """

    row: np.ndarray
    column: np.ndarray
    unit: np.ndarray
    start: np.ndarray
    count: np.ndarray


@dataclass(frozen=True)
class DocumentSpan:
    """A part of a row: `tokens` tokens of a document of `file` (a prefix), from its token `offset` on."""

    file: str
    document: int
    offset: int
    column: int
    tokens: int


class ShardReader:
    """Random access to one file per shard, all of one type, as if they were one file.

    `facts` are what the index says of the shards: their names, tokens and token type.
    """

    def __init__(
        self,
        shards: Sequence[str],
        facts: Sequence[dict[str, Any]],
        suffix: str,
        dtype: np.dtype,
        options: StoreOptions | None,
    ) -> None:
        self.shards, self.dtype = list(shards), dtype
        self._facts, self._suffix, self._options = facts, suffix, options
        ends = np.cumsum([shard["tokens"] for shard in facts], dtype=np.int64)
        self._starts = np.concatenate(([0], ends))
        self._files: dict[int, TokenFile] = {}
        self._check_sizes()

    def read_segments(self, segments: RowSegments, targets: np.ndarray, flat: np.ndarray) -> None:
        """Write the values of the segments to `flat`, each from its target on."""
        start, count = segments.start, segments.count
        if not len(start):
            return
        shard = np.searchsorted(self._starts, start, "right") - 1
        # Segments that are adjacent both in the file and in the output are one read.
        joined = (start[1:] == start[:-1] + count[:-1]) & (targets[1:] == targets[:-1] + count[:-1])
        joined &= shard[1:] == shard[:-1]
        heads = np.concatenate(([0], np.flatnonzero(~joined) + 1))
        width = self.dtype.itemsize
        offsets = (start[heads] - self._starts[shard[heads]]) * width
        lows = targets[heads] * width
        highs = lows + np.add.reduceat(count, heads) * width
        view = flat.view(np.uint8).data
        reads = zip(shard[heads].tolist(), offsets.tolist(), lows.tolist(), highs.tolist(), strict=True)
        for number, offset, low, high in reads:
            self._file(number).read_into(view[low:high], offset)

    def document_spans(self, segments: RowSegments) -> list[DocumentSpan]:
        """Return the documents of the segments of one row (for people: it reads the token files' own index)."""
        spans: list[DocumentSpan] = []
        for start, column, count in zip(segments.start, segments.column, segments.count, strict=True):
            shard = int(np.searchsorted(self._starts, start, "right")) - 1
            with IndexedDataset(self.shards[shard], self._options) as reader:
                token = int(start - self._starts[shard])
                sequence = int(np.searchsorted(reader.pointers, token * reader.dtype.itemsize, "right")) - 1
                document = int(np.searchsorted(reader.document_indices, sequence, "right")) - 1
                first = int(reader.pointers[reader.document_indices[document]]) // reader.dtype.itemsize
                spans.append(DocumentSpan(reader.prefix, document, token - first, int(column), int(count)))
        return spans

    def close(self) -> None:
        """Close the files; reading opens them again."""
        while self._files:
            self._files.popitem()[1].close()

    def _file(self, shard: int) -> TokenFile:
        file = self._files.get(shard)
        if file is None:
            file = self._files.setdefault(shard, open_token_file(self.shards[shard] + self._suffix, self._options))
        return file

    def _check_sizes(self) -> None:
        for shard, facts in zip(self.shards, self._facts, strict=True):
            address = shard + self._suffix
            store, path = open_store(address, self._options)
            info = store.head(path)
            if info is None:
                raise NotFound("no such token file", where=address, hint="copy it here or prepare again")
            if info.size != facts["tokens"] * self.dtype.itemsize:
                raise CorruptData(
                    f"has {info.size} bytes, its index says {facts['tokens']} tokens of {self.dtype}",
                    where=address,
                    hint=REBUILD,
                )


def open_token_reader(
    name: str, shards: Sequence[str], facts: Sequence[dict[str, Any]], index: str, options: StoreOptions | None
) -> ShardReader:
    """Open the tokens of the source `name`; `index` is where its index is, for errors."""
    if len(shards) != len(facts):
        raise CorruptData(
            f"source '{name}' has {len(shards)} token files, its index was made of {len(facts)}",
            where=index,
            hint=REBUILD,
        )
    dtype = np.dtype(facts[0]["dtype"]) if facts else np.dtype("<u2")
    if dtype.str not in TOKEN_TYPES:
        raise InputError(
            f"source '{name}' holds {dtype} values; tokens are integers of at most 32 bits",
            where=shards[0],
            hint="prepare it again with `trainshed data prepare`",
        )
    return ShardReader(shards, facts, ".bin", dtype, options)
