"""Packed samples: whole conversations put together into rows, once, before training.

Documents are taken in the order of the keyed permutation ("packing", label), longest first, and each goes into the
fullest row that has room for it (best fit decreasing). A row holds whole documents of together at most sequence_length
tokens; the rest of its sequence_length + 1 columns is padding. In an epoch the rows are visited in the order of the
keyed permutation ("rows", label, epoch). So any row of any epoch is found at once, a longer run changes nothing, and
the pack index depends on neither the layout nor the number of epochs.

Preference data comes in pairs of sequences: a chosen answer, then the rejected one. Both are put into one row, next to
each other in this order. Without packing each document (or pair) has a row of its own.

    starts.npy     int64 [documents + 1]  token offset of each document in the concatenation of the shards
    rows.npy       int64 [rows + 1]       where each row begins in items.npy
    items.npy      int64 [documents]      the documents of all rows, row after row
    manifest.json  written last

This is packing version 1: never edited, only added to.

Shapes: D documents, R rows to read, L sequence_length, S segments (a document inside a row).
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainshed.data.sampling.index import REBUILD, STARTS, build_starts, check_array, open_array, save_array
from trainshed.data.sampling.permutation import Permutation
from trainshed.data.sampling.rows import SampleRows
from trainshed.data.sampling.shard_reader import DocumentSpan, RowSegments, ShardReader, open_token_reader
from trainshed.data.tokens.token_files import learned_path, open_token_file
from trainshed.data.tokens.token_source import TokenSource
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import LocalStore, Manifest
from trainshed.storage.locks import artefact_lock
from trainshed.storage.manifest import MANIFEST

if TYPE_CHECKING:
    from trainshed.storage import StoreOptions

PACK_KIND = "pack"
PACK_VERSION = 1
ROWS = "rows.npy"
ITEMS = "items.npy"
PADDING_TOKEN = 0
"""What padding columns hold. No other document sees them and they carry no loss, so any id of the vocabulary does."""
WRITE_ITEMS = 1 << 20
SCAN_BYTES = 1 << 24


@dataclass(frozen=True)
class PackRule:
    """How documents become rows: whether several share a row, and whether they come in pairs that stay together."""

    packed: bool = True
    pairs: bool = False


@dataclass(frozen=True)
class PackSpec:
    """Everything a pack index is a function of.

    `content` identifies the token files by their lengths, `learned` the `.learned` files, `label` the source within the
    recipe. `split` is a share of the documents: from, to.
    """

    content: str
    learned: str
    label: str
    seed: int
    sequence_length: int
    rule: PackRule
    split: tuple[float, float] = (0.0, 1.0)

    @classmethod
    def of(
        cls,
        source: TokenSource,
        seed: int,
        sequence_length: int,
        rule: PackRule,
        split: tuple[float, float] = (0.0, 1.0),
        options: StoreOptions | None = None,
    ) -> PackSpec:
        """Return the spec of a source's pack index."""
        learned = source.learned_hash(options)
        return cls(source.content_hash(options), learned, source.label, seed, sequence_length, rule, split)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> PackSpec:
        """Read what `asdict` gave."""
        return cls(**plain | {"rule": PackRule(**plain["rule"]), "split": (plain["split"][0], plain["split"][1])})

    @property
    def key(self) -> str:
        """The address of the artefact: 32 hex digits."""
        fields = {"kind": PACK_KIND, "pack": PACK_VERSION, **asdict(self)}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]


class PackIndex:
    """A pack index on disk, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            manifest = Manifest.read(LocalStore(folder), MANIFEST)
        except NotFound:
            raise NotFound("no pack index here", where=str(folder), hint=REBUILD) from None
        facts, version = manifest.facts, manifest.facts.get("pack")
        if manifest.kind != PACK_KIND or version != PACK_VERSION:
            raise CorruptData(
                f"is '{manifest.kind}' with packing {version}; this version reads '{PACK_KIND}' with packing "
                f"{PACK_VERSION}",
                where=str(folder / MANIFEST),
                hint="install the version of Trainshed that wrote it, or prepare again",
            )
        self.spec = PackSpec.from_plain(dict(manifest.spec))
        self.shards: list[dict[str, Any]] = facts["shards"]
        self.rows: int = facts["rows"]
        self.documents: int = facts["documents"]
        self.tokens: int = facts["tokens"]
        """Tokens of the documents, without padding."""
        self.learned_tokens: int = facts["learned_tokens"]
        self.efficiency: float = facts["efficiency"]
        """Which part of the rows is tokens of documents: tokens / (rows · sequence_length)."""
        self._files = {entry.path: entry for entry in manifest.files}
        self.starts, self.row_starts, self.items = (
            open_array(folder, self._files[name]) for name in (STARTS, ROWS, ITEMS)
        )

    def segments(self, rows: np.ndarray) -> RowSegments:
        """Find the documents of these rows; `row` counts within `rows`."""
        first = self.row_starts[rows]
        documents = self.row_starts[rows + 1] - first
        row = np.repeat(np.arange(len(rows)), documents)
        before = np.cumsum(documents) - documents
        unit = self.items[first[row] + np.arange(len(row)) - before[row]]
        start = self.starts[unit]
        count = self.starts[unit + 1] - start
        after = np.concatenate(([0], np.cumsum(count)))
        return RowSegments(row, after[:-1] - after[before[row]], unit, start, count)

    def check(self) -> None:
        """Compare every file with its hash."""
        for entry in self._files.values():
            check_array(self.folder, entry)


class PackedDataset:
    """The samples of prepared conversations: reads the rows of their pack index.

    In rows of `pairs` documents 2i are chosen answers and documents 2i + 1 the rejected ones beside them.
    """

    keeps_documents_apart = True
    has_learned = True

    def __init__(
        self,
        source: TokenSource,
        index: PackIndex,
        *,
        shards: Sequence[str] | None = None,
        options: StoreOptions | None = None,
    ) -> None:
        self.source, self.index, self._options = source, index, options
        self.name, self.label, self.weight = source.name, source.label, source.weight
        self.sequence_length = index.spec.sequence_length
        self.pairs = index.spec.rule.pairs
        self.shards = source.shards(options) if shards is None else list(shards)
        self.epoch_samples = index.rows
        # With padding: so sources without weights are drawn from in proportion to their rows, and end together.
        self.tokens = index.rows * self.sequence_length
        self.reader = open_token_reader(self.name, self.shards, index.shards, str(index.folder), options)
        self.learned_reader = ShardReader(self.shards, index.shards, learned_path(""), np.dtype(np.uint8), options)
        self._row_orders: dict[int, Permutation] = {}

    def __reduce__(self) -> tuple[object, ...]:
        # Worker processes map and open the files themselves.
        return (_reopen, (self.source, self.index.folder, self.shards, self._options))

    def close(self) -> None:
        """Close the token files; reading opens them again."""
        self.reader.close()
        self.learned_reader.close()

    def locate(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Map the k-th sample drawn from this source to (epoch, row)."""
        if not self.epoch_samples:
            raise InputError(f"source '{self.name}' holds no conversations", hint="give it some, or leave it out")
        epoch, position = np.divmod(draws, self.epoch_samples)
        row = np.empty_like(position)
        for number in sorted(set(epoch.tolist())):
            chosen = epoch == number
            row[chosen] = self._row_order(number)(position[chosen])
        return epoch, row

    def read(self, draws: np.ndarray) -> SampleRows:
        """Read the k-th samples."""
        segments = self.index.segments(self.locate(draws)[1])
        shape = (len(draws), self.sequence_length + 1)
        tokens = np.full(shape, PADDING_TOKEN, self.reader.dtype)
        learned = np.zeros(shape, np.uint8)
        targets = segments.row * shape[1] + segments.column
        self.reader.read_segments(segments, targets, tokens.reshape(-1))
        self.learned_reader.read_segments(segments, targets, learned.reshape(-1))
        return SampleRows(tokens.astype(np.int32, copy=False), self._starts_of(segments, len(draws)), learned != 0)

    def document_starts(self, draws: np.ndarray) -> np.ndarray:
        """Return where documents begin, from the index alone: int32 [R, L + 1]."""
        return self._starts_of(self.index.segments(self.locate(draws)[1]), len(draws))

    def document_spans(self, epoch: int, window: int) -> list[DocumentSpan]:
        """Return the documents of a row, which are the same in every epoch."""
        return self.reader.document_spans(self.index.segments(np.array([window])))

    def _starts_of(self, segments: RowSegments, rows: int) -> np.ndarray:
        used = np.zeros(rows, np.int64)
        np.add.at(used, segments.row, segments.count)
        columns = np.arange(self.sequence_length + 1)
        starts = np.broadcast_to(used[:, None].astype(np.int32), (rows, len(columns))).copy()
        starts[columns < used[:, None]] = np.repeat(segments.column, segments.count)
        return starts

    def _row_order(self, epoch: int) -> Permutation:
        """Return the order of the rows in an epoch."""
        if epoch not in self._row_orders:
            spec = self.index.spec
            self._row_orders[epoch] = Permutation(self.epoch_samples, spec.seed, "rows", spec.label, epoch)
        return self._row_orders[epoch]


def _reopen(source: TokenSource, index: Path, shards: Sequence[str], options: StoreOptions | None) -> PackedDataset:
    return PackedDataset(source, PackIndex(index), shards=shards, options=options)


def build_pack_index(
    folder: Path,
    spec: PackSpec,
    shards: Sequence[str],
    *,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> PackIndex:
    """Make the pack index in `folder`; one that exists is only opened."""
    with nullcontext() if (folder / MANIFEST).exists() else artefact_lock(folder, reporter):
        if not (folder / MANIFEST).exists():
            _build(folder, spec, shards, options, reporter)
    index = PackIndex(folder)
    if index.spec != spec:
        raise CorruptData("is the pack index of something else", where=str(folder), hint=REBUILD)
    return index


def _build(
    folder: Path, spec: PackSpec, shards: Sequence[str], options: StoreOptions | None, reporter: Reporter
) -> None:
    together = 2 if spec.rule.pairs else 1
    starts_file, facts = build_starts(folder, spec.split, shards, options, sequences_together=together)
    starts = open_array(folder, starts_file)
    documents = len(starts) - 1
    with reporter.task(f"pack {spec.label}", total=documents, unit="documents") as task:
        lengths = _packed_lengths(starts, spec, shards)
        rows, items = pack_documents(lengths, spec)
        files = [
            starts_file,
            save_array(folder / ROWS, len(rows), _pieces(rows)),
            save_array(folder / ITEMS, len(items), _pieces(items)),
        ]
        task.advance(documents)
    tokens = int(starts[-1] - starts[0])
    facts = {
        "shards": facts["shards"],
        "rows": len(rows) - 1,
        "documents": documents,
        "tokens": tokens,
        "learned_tokens": _count_learned(shards, facts["shards"], int(starts[0]), int(starts[-1]), options),
        "efficiency": tokens / max(1, (len(rows) - 1) * spec.sequence_length),
        "pack": PACK_VERSION,
    }
    Manifest.of(PACK_KIND, asdict(spec), files, facts).write(LocalStore(folder), MANIFEST)


def _packed_lengths(starts: np.ndarray, spec: PackSpec, shards: Sequence[str]) -> np.ndarray:
    """Return the tokens of each document, or of each pair: int64; what does not fit into a row is an error."""
    lengths = np.diff(starts)
    where = shards[0] if len(shards) == 1 else f"{shards[0]} and {len(shards) - 1} more"
    if spec.rule.pairs:
        lengths = lengths[0::2] + lengths[1::2]
    too_long = np.flatnonzero(lengths > spec.sequence_length)
    if len(too_long):
        what, number = "pair" if spec.rule.pairs else "conversation", int(too_long[0])
        others = f"; {len(too_long) - 1:,} others do not fit either" if len(too_long) > 1 else ""
        raise InputError(
            f"{what} {number:,} has {lengths[number]:,} tokens, more than a sample of {spec.sequence_length:,}{others}",
            where=where,
            hint=f"write `data.sequence_length: {int(lengths.max())}` or more, or name the conversations themselves as "
            "`path`: then they are prepared for this length",
        )
    return lengths


def pack_documents(lengths: np.ndarray, spec: PackSpec) -> tuple[np.ndarray, np.ndarray]:
    """Put documents (or pairs) of these lengths into rows; return `rows.npy` and `items.npy`."""
    if spec.rule.packed:
        order = Permutation(len(lengths), spec.seed, "packing", spec.label)(np.arange(len(lengths)))
        shorter = spec.sequence_length - lengths[order]
        # numpy sorts 16-bit numbers in linear time.
        order = order[
            np.argsort(shorter.astype(np.uint16) if spec.sequence_length < 1 << 16 else shorter, kind="stable")
        ]
        row = best_fit(lengths[order], spec.sequence_length)
        items = order[np.argsort(row, kind="stable")]
        documents = np.bincount(row)
    else:
        items = np.arange(len(lengths))
        documents = np.ones(len(lengths), np.int64)
    if spec.rule.pairs:
        items = (2 * items[:, None] + np.arange(2)).reshape(-1)
        documents = 2 * documents
    return np.concatenate(([0], np.cumsum(documents, dtype=np.int64))), items


def best_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """Return the row of each document, for lengths (1 to `room`) in falling order: int64 [D].

    Best fit: a document goes into the row with the least room that is still enough. Rows with equal room are
    interchangeable, so all documents of one length are placed together: as long as a row has room for another one, it
    is also the best fit for that one. This takes a few array operations per length, whatever the number of documents.
    """
    row_of = np.empty(len(lengths), np.int64)
    rows_by_room: dict[int, list[np.ndarray]] = {}
    rooms: list[int] = []  # the keys of rows_by_room, rising
    rows = 0
    ends = np.append(np.flatnonzero(np.diff(lengths)) + 1, len(lengths)).tolist() if len(lengths) else []
    begin = 0

    def add(rows_with_room: np.ndarray, left: int) -> None:
        if not left or not len(rows_with_room):
            return
        if left not in rows_by_room:
            insort(rooms, left)
        rows_by_room.setdefault(left, []).append(rows_with_room)

    for end in ends:
        length = int(lengths[begin])
        while begin < end:
            place = bisect_left(rooms, length)
            if place < len(rooms):
                left = rooms[place]
                candidates = rows_by_room[left].pop()
                if not rows_by_room[left]:
                    del rows_by_room[left], rooms[place]
            else:
                left = room
                candidates = np.arange(rows, rows - (begin - end) // (room // length))
                rows += len(candidates)
            per_row = left // length
            filled = min(len(candidates), (end - begin) // per_row)
            row_of[begin : begin + filled * per_row] = np.repeat(candidates[:filled], per_row)
            begin += filled * per_row
            add(candidates[:filled], left - per_row * length)
            candidates = candidates[filled:]
            if len(candidates) and begin < end:
                # Fewer documents are left than this row could take.
                row_of[begin:end] = candidates[0]
                add(candidates[:1], left - (end - begin) * length)
                candidates, begin = candidates[1:], end
            add(candidates, left)
    return row_of


def describe_packing(dataset: PackedDataset) -> str:
    """Say in one line into how many rows a source's conversations went, and how full these are."""
    index, rule = dataset.index, dataset.index.spec.rule
    documents = f"{index.documents // 2:,} pairs" if rule.pairs else f"{index.documents:,} documents"
    samples = f"{index.rows:,} samples of {dataset.sequence_length:,} tokens"
    return f"{dataset.name}: {documents} in {samples}, {index.efficiency:.1%} full"


def _pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(array), WRITE_ITEMS):
        yield array[start : start + WRITE_ITEMS]


def _count_learned(
    shards: Sequence[str], facts: Sequence[dict[str, Any]], first: int, last: int, options: StoreOptions | None
) -> int:
    """Count the learned tokens of [first, last) of the concatenation; a value other than 0 and 1 is an error."""
    learned = 0
    for shard, shard_facts in zip(shards, facts, strict=True):
        address, tokens = learned_path(shard), shard_facts["tokens"]
        file = open_token_file(address, options)
        try:
            for start in range(max(first, 0), min(last, tokens), SCAN_BYTES):
                values = np.empty(min(SCAN_BYTES, min(last, tokens) - start), np.uint8)
                file.read_into(values.data, start)
                if values.max() > 1:
                    wrong = start + int(np.argmax(values > 1))
                    raise CorruptData(
                        f"byte {wrong:,} is {values[wrong - start]}; 0 and 1 are known",
                        where=address,
                        hint="prepare the conversations again",
                    )
                learned += int(np.count_nonzero(values))
        finally:
            file.close()
        first, last = first - tokens, last - tokens
    return learned
