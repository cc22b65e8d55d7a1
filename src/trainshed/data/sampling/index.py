"""The index of a source: it finds any window of any epoch, without a stored shuffle.

A source is one or many token files read as one concatenation. Its unit is Megatron's: a sequence with at least one
token (for files that we write, a document). In epoch e the units are in the order of the keyed permutation
("documents", label, e) and are cut into windows of sequence_length + 1 tokens, each sharing one token with the next,
exactly as Megatron's GPT dataset cuts them. Epochs are independent: what is left of an epoch after its last whole
window (at most sequence_length tokens) is not trained on in that epoch. So a longer run only adds epochs and never
changes the past, and the index does not depend on the sequence length.

    starts.npy        int64 [units + 1]   token offset of each unit in the concatenation
    epoch-00000.npy   int64 [blocks + 1]  tokens before every 64th position of that epoch's order
    continued.npy     int64 [..]          units that continue the document of the unit before them: files of others may
                                          have several sequences in a document; made only where documents are kept apart
    manifest.json     written last; grows when epochs are added

The arrays are written in pieces and read by memory map.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainshed.data.sampling.permutation import Permutation
from trainshed.data.tokens.indexed_dataset import IndexedDataset
from trainshed.data.tokens.token_files import replace_file
from trainshed.data.tokens.token_source import TokenSource
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import FileEntry, Hasher, LocalStore, Manifest, sha256_of
from trainshed.storage.locks import artefact_lock
from trainshed.storage.manifest import MANIFEST

if TYPE_CHECKING:
    from trainshed.storage import StoreOptions


INDEX_KIND = "index"
INDEX_FORMAT = 1
ORDER_VERSION = 1
REBUILD = "run `trainshed run RECIPE`, which makes what is missing; remove the folder first if it is damaged"


def save_array(path: Path, length: int, pieces: Iterator[np.ndarray]) -> FileEntry:
    """Write an int64 array in pieces (never by a memory map: on a full disk that ends with SIGBUS)."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (length,)})
    hasher = Hasher("sha256")
    with replace_file(path, sync_folder=False) as file:
        hasher.update(header.getvalue())
        file.write(header.getvalue())
        for piece in pieces:
            data = piece.astype("<i8", copy=False).tobytes()
            hasher.update(data)
            file.write(data)
    written = (hasher.size - len(header.getvalue())) // 8
    if written != length:
        raise CorruptData(f"{written} values where {length} were counted", where=str(path), hint=REBUILD)
    return FileEntry(path.name, hasher.size, hasher.checksum)


def save_index_manifest(
    folder: Path, spec: Mapping[str, Any], facts: Mapping[str, Any], files: Iterable[FileEntry]
) -> None:
    """Write the manifest: from here on the index exists."""
    Manifest.of(INDEX_KIND, spec, files, {**facts, "order": ORDER_VERSION}).write(LocalStore(folder), MANIFEST)


def load_index_manifest(folder: Path) -> Manifest:
    """Read the manifest of an index that this version understands."""
    try:
        manifest = Manifest.read(LocalStore(folder), MANIFEST)
    except NotFound:
        raise NotFound("no index here", where=str(folder), hint=REBUILD) from None
    order = manifest.facts.get("order")
    if manifest.kind != INDEX_KIND or order != ORDER_VERSION:
        raise CorruptData(
            f"is '{manifest.kind}' with order {order}; this version reads '{INDEX_KIND}' with order {ORDER_VERSION}",
            where=str(folder / MANIFEST),
            hint="install the version of Trainshed that wrote it, or prepare again",
        )
    return manifest


def open_array(folder: Path, entry: FileEntry) -> np.ndarray:
    """Map one array of the index, read-only."""
    path = folder / entry.path
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (FileNotFoundError, ValueError) as error:
        raise CorruptData(f"cannot be read: {error}", where=str(path), hint=REBUILD) from None
    size = path.stat().st_size
    if size != entry.size or array.dtype != np.dtype("<i8"):
        raise CorruptData(
            f"holds {size} bytes of {array.dtype}, not what its manifest says", where=str(path), hint=REBUILD
        )
    return array.view(np.ndarray)


def check_array(folder: Path, entry: FileEntry) -> None:
    """Compare an array with its hash."""
    if sha256_of(LocalStore(folder).stream(entry.path)) != entry.checksum:
        raise CorruptData("is not what its manifest says", where=str(folder / entry.path), hint=REBUILD)


# To find a window, at most one stride is walked on either side. With 64 the table takes 1/8 byte per unit, and the
# walk about 100 evaluations of the permutation (some microseconds).
STRIDE = 64
STARTS = "starts.npy"
CONTINUED = "continued.npy"
CHUNK_UNITS = 1 << 18
CHUNK_POSITIONS = 1 << 16


@dataclass(frozen=True)
class IndexSpec:
    """Everything an index is a function of, apart from the number of epochs.

    `content` identifies the token files (see `token_content_hash`), `label` the source within the recipe: two sources
    with the same text but different labels are shuffled differently. `split` is a share of the sequences: from, to.
    """

    content: str
    label: str
    seed: int
    split: tuple[float, float] = (0.0, 1.0)

    @classmethod
    def of(
        cls,
        source: TokenSource,
        seed: int,
        split: tuple[float, float] = (0.0, 1.0),
        options: StoreOptions | None = None,
    ) -> IndexSpec:
        """Return the spec of a source's index."""
        return cls(source.content_hash(options), source.label, seed, split)

    @property
    def key(self) -> str:
        """The address of the artefact: 32 hex digits."""
        fields = {"format": INDEX_FORMAT, "order": ORDER_VERSION, "stride": STRIDE, **asdict(self)}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]


def split_range(split: tuple[float, float], sequences: int) -> tuple[int, int]:
    """Return the sequences [first, last) of a share, rounded as Megatron's `--split` rounds."""
    first, last = (round(share * float(sequences)) for share in split)
    return first, last


class SourceIndex:
    """An index on disk, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = load_index_manifest(folder)
        self.spec = _spec_of_manifest(manifest)
        self.epochs: int = manifest.facts["epochs"]
        self.shards: list[dict[str, Any]] = manifest.facts["shards"]
        self._files = {entry.path: entry for entry in manifest.files}
        self.starts = open_array(folder, self._files[STARTS])
        self.units = len(self.starts) - 1
        self.first_token = int(self.starts[0])
        self.tokens = int(self.starts[-1]) - self.first_token
        self._orders: dict[int, tuple[Permutation, np.ndarray]] = {}

    def epoch_order(self, number: int) -> tuple[Permutation, np.ndarray]:
        """Return the order of the units in an epoch, and the tokens before every 64th of them."""
        if number not in self._orders:
            if not 0 <= number < self.epochs:
                raise InputError(
                    f"epoch {number} of source '{self.spec.label}' is not in its index of {self.epochs}",
                    where=str(self.folder),
                    hint="run `trainshed run RECIPE` with these steps first: it adds the missing epochs",
                )
            table = open_array(self.folder, self._files[_epoch_name(number)])
            self._orders[number] = (unit_order(self.spec, self.units, number), table)
        return self._orders[number]

    def continued_units(self) -> np.ndarray:
        """Return the units that continue the document of the unit before them, in order; none in files of ours."""
        if CONTINUED not in self._files:
            raise NotFound(
                f"the index of source '{self.spec.label}' does not say where documents begin",
                where=str(self.folder),
                hint="run `trainshed run RECIPE` with `data.document_mask: true` first: it adds what is missing",
            )
        return open_array(self.folder, self._files[CONTINUED])

    def check(self) -> None:
        """Compare every file with its hash."""
        for entry in self._files.values():
            check_array(self.folder, entry)


def unit_order(spec: IndexSpec, units: int, epoch: int) -> Permutation:
    """Return the order of a source's units in one epoch: position -> unit."""
    return Permutation(units, spec.seed, "documents", spec.label, epoch)


def build_index(
    folder: Path,
    spec: IndexSpec,
    shards: Sequence[str],
    *,
    epochs: int,
    documents: bool = False,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> SourceIndex:
    """Make the index in `folder`, or add the epochs that it lacks. A complete index is only opened.

    With `documents` it also says which units are documents of their own.
    """
    complete = False
    if (folder / MANIFEST).exists():
        manifest = load_index_manifest(folder)
        complete = manifest.facts["epochs"] >= epochs and (not documents or _has_continued(manifest.files))
    with nullcontext() if complete else artefact_lock(folder, reporter):
        _extend_index(folder, spec, shards, epochs, documents, options, reporter)
    return SourceIndex(folder)


def _extend_index(
    folder: Path,
    spec: IndexSpec,
    shards: Sequence[str],
    epochs: int,
    documents: bool,
    options: StoreOptions | None,
    reporter: Reporter,
) -> None:
    fresh = not (folder / MANIFEST).exists()
    if fresh:
        starts_file, facts = build_starts(folder, spec.split, shards, options)
        files, facts = [starts_file], facts | {"epochs": 0}
    else:
        manifest = load_index_manifest(folder)
        if spec != _spec_of_manifest(manifest):
            raise CorruptData("is the index of something else", where=str(folder), hint=REBUILD)
        files, facts = list(manifest.files), dict(manifest.facts)
    have: int = facts["epochs"]
    if have < epochs:
        starts = open_array(folder, next(entry for entry in files if entry.path == STARTS))
        blocks = -(-(len(starts) - 1) // STRIDE)
        with reporter.task(f"index {spec.label}", total=epochs - have, unit="epochs") as task:
            for epoch, table in _epoch_tables(spec, starts, range(have, epochs)):
                files.append(save_array(folder / _epoch_name(epoch), blocks + 1, table))
                task.advance(1)
        facts["epochs"] = epochs
    lacks_documents = documents and not _has_continued(files)
    if lacks_documents:
        files.append(_build_continued(folder, spec, shards, options))
    if fresh or have < epochs or lacks_documents:
        save_index_manifest(folder, asdict(spec), facts, files)


def build_starts(
    folder: Path,
    split: tuple[float, float],
    shards: Sequence[str],
    options: StoreOptions | None,
    *,
    sequences_together: int = 1,
) -> tuple[FileEntry, dict[str, Any]]:
    """Write where each unit of a share of the shards begins; return the file, and facts on shards and units.

    With `sequences_together` the sequences come in groups of that many, which a split does not cut.
    """
    with _open_shards(shards, options) as readers:
        for reader in readers if sequences_together > 1 else ():
            if reader.sequences % sequences_together or not reader.lengths.all():
                raise CorruptData(
                    f"its {reader.sequences:,} sequences are not groups of {sequences_together} with tokens in each",
                    where=reader.index_address,
                    hint="prepare the data again",
                )
        first, last = _sequences_of(split, readers, sequences_together)
        units = sum(int(np.count_nonzero(lengths)) for _, lengths in _lengths_between(readers, first, last))
        facts = [
            {"name": os.path.basename(reader.prefix), "tokens": reader.tokens, "dtype": reader.dtype.str}
            for reader in readers
        ]
        saved = save_array(folder / STARTS, units + 1, _unit_starts(readers, first, last))
    return saved, {"shards": facts, "units": units}


@contextmanager
def _open_shards(shards: Sequence[str], options: StoreOptions | None) -> Iterator[list[IndexedDataset]]:
    """Open shards that hold tokens of one type."""
    with ExitStack() as stack:
        readers = [stack.enter_context(IndexedDataset(shard, options)) for shard in shards]
        for reader in readers:
            if reader.dtype != readers[0].dtype:
                raise InputError(
                    f"holds {reader.dtype} tokens, but {readers[0].prefix} holds {readers[0].dtype}",
                    where=reader.prefix,
                    hint="prepare all files of a source with the same tokenizer",
                )
        yield readers


def _sequences_of(split: tuple[float, float], readers: Sequence[IndexedDataset], together: int = 1) -> tuple[int, int]:
    """Return the sequences [first, last) of a share of all shards."""
    first, last = split_range(split, sum(reader.sequences for reader in readers) // together)
    return first * together, last * together


def _build_continued(folder: Path, spec: IndexSpec, shards: Sequence[str], options: StoreOptions | None) -> FileEntry:
    with _open_shards(shards, options) as readers:
        continued = np.concatenate(
            [np.empty(0, np.int64), *_continued_units(readers, *_sequences_of(spec.split, readers))]
        )
    return save_array(folder / CONTINUED, len(continued), iter([continued]))


def _continued_units(readers: Sequence[IndexedDataset], first: int, last: int) -> Iterator[np.ndarray]:
    """Yield the units of sequences [first, last) that belong to the document of the unit before them."""
    sequence = unit = 0
    for reader in readers:
        begin, end = max(first - sequence, 0), min(last - sequence, reader.sequences)
        several = _has_documents_of_several_sequences(reader)
        document_before = -1
        for start in range(begin, end, CHUNK_UNITS):
            lengths = reader.lengths[start : min(start + CHUNK_UNITS, end)]
            filled = np.flatnonzero(lengths)
            if several and len(filled):
                document = np.searchsorted(reader.document_indices, start + filled, "right")
                same = document == np.concatenate(([document_before], document[:-1]))
                yield unit + np.flatnonzero(same)
                document_before = int(document[-1])
            unit += len(filled)
        sequence += reader.sequences


def _has_documents_of_several_sequences(reader: IndexedDataset) -> bool:
    bounds = reader.document_indices
    return any(
        bool((np.diff(bounds[start : start + CHUNK_UNITS + 1]) > 1).any())
        for start in range(0, reader.documents, CHUNK_UNITS)
    )


def _has_continued(files: Iterable[FileEntry]) -> bool:
    return any(entry.path == CONTINUED for entry in files)


def _lengths_between(readers: Sequence[IndexedDataset], first: int, last: int) -> Iterator[tuple[int, np.ndarray]]:
    """The lengths of sequences [first, last) of all files in chunks, each with its first token's offset."""
    sequence = token = 0
    for reader in readers:
        begin, end = max(first - sequence, 0), min(last - sequence, reader.sequences)
        for start in range(begin, end, CHUNK_UNITS):
            offset = token + int(reader.pointers[start]) // reader.dtype.itemsize
            yield offset, reader.lengths[start : min(start + CHUNK_UNITS, end)]
        sequence += reader.sequences
        token += reader.tokens


def _unit_starts(readers: Sequence[IndexedDataset], first: int, last: int) -> Iterator[np.ndarray]:
    end = 0
    for offset, lengths in _lengths_between(readers, first, last):
        lengths = lengths[lengths != 0]
        ends = offset + np.cumsum(lengths, dtype=np.int64)
        yield ends - lengths
        end = int(ends[-1]) if len(ends) else offset
    yield np.array([end])


def _epoch_tables(spec: IndexSpec, starts: np.ndarray, epochs: range) -> Iterator[tuple[int, Iterator[np.ndarray]]]:
    """Yield the tables of several epochs, each in pieces; read a table to its end before taking the next."""
    units = len(starts) - 1
    # Up to 48 MiB: one random read per unit in place of two, and of half the size.
    lengths = np.diff(starts).astype(np.int32) if units <= 1 << 22 else None

    def block_tokens(order: Permutation, position: int) -> np.ndarray:
        unit = order(np.arange(position, min(position + CHUNK_POSITIONS, units)))
        length = starts[unit + 1] - starts[unit] if lengths is None else lengths[unit]
        return np.add.reduceat(length, np.arange(0, len(length), STRIDE), dtype=np.int64)

    def table(epoch: int) -> Iterator[np.ndarray]:
        yield np.zeros(1, np.int64)
        before = 0
        for tokens in threads.map(partial(block_tokens, unit_order(spec, units, epoch)), positions):
            ends = before + np.cumsum(tokens)
            before = int(ends[-1])
            yield ends

    positions = range(0, units, CHUNK_POSITIONS)
    # numpy lets go of the interpreter lock in these loops, so threads share the work.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        for epoch in epochs:
            yield epoch, table(epoch)


def _spec_of_manifest(manifest: Manifest) -> IndexSpec:
    spec = manifest.spec
    return IndexSpec(spec["content"], spec["label"], spec["seed"], (spec["split"][0], spec["split"][1]))


def _epoch_name(epoch: int) -> str:
    return f"epoch-{epoch:05d}.npy"
