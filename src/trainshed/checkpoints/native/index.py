"""The index of a checkpoint (`pieces-NNNN.bin`): where the bytes of every tensor are, with a checksum for each item.

It contains what `.metadata` contains, in a form that needs neither torch nor unpickling. A checkpoint of 4,096 ranks
has a million items, so format 3 stores them as arrays, and a rank reads those of its own tensors alone:

    "TSPIECES", format (uint32), length of the header (uint32)
    header    JSON: the files, and of every tensor its shape, dtype, number of items, place of its block and checksum
    blocks    per tensor: int64 [N, 2 D + 3] (offset, sizes, file, start, length), then uint8 [N, 32] (checksums)

Bits 32 and up of `file` are the algorithm of the item's checksum, by its number in `ALGORITHMS`. Formats 1 and 2 are
JSON (`pieces-NNNN.json`), which had to be read as a whole. In format 1 all checksums are SHA-256.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from trainshed.checkpoints.native.folder import CompleteCheckpoint, complete_checkpoints
from trainshed.errors import CorruptData
from trainshed.storage import Store, algorithm_of, checksum_of, join

INDEX_FORMAT = 3
ALGORITHMS = ("blake3", "sha256")
"""Of checksums, by their number in a table; names are only added."""
DIGEST_BYTES = 32
_MAGIC = b"TSPIECES"
_PREFIX = struct.Struct("<8sII")
_FILE_BITS = 32
# Blocks that are nearer to each other than this are read in one request.
_GAP_BYTES = 256 * 1024


@dataclass(frozen=True)
class IndexedItem:
    """A box of a tensor, in the format of torch.save, as the bytes [start, start + length) of a file."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int
    checksum: str


@dataclass(frozen=True, eq=False)
class ItemTable:
    """The items of one tensor as arrays: `rows` int64 [N, 2 D + 3] and `digests` uint8 [N, 32], as they are stored."""

    files: Sequence[str]
    rows: np.ndarray
    digests: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def offsets(self) -> np.ndarray:
        """Where each item begins in the tensor: int64 [N, D]."""
        return self.rows[:, : self._dims]

    @property
    def sizes(self) -> np.ndarray:
        """The shape of each item: int64 [N, D]."""
        return self.rows[:, self._dims : 2 * self._dims]

    @property
    def _dims(self) -> int:
        return (self.rows.shape[1] - 3) // 2

    def item(self, number: int) -> IndexedItem:
        """Return one item."""
        values, dims = self.rows[number].tolist(), self._dims
        place, start, length = values[2 * dims :]
        file, algorithm = place & ((1 << _FILE_BITS) - 1), ALGORITHMS[place >> _FILE_BITS]
        checksum = f"{algorithm}:{self.digests[number].tobytes().hex()}"
        return IndexedItem(
            tuple(values[:dims]), tuple(values[dims : 2 * dims]), self.files[file], start, length, checksum
        )


@dataclass(frozen=True, eq=False)
class IndexedTensor:
    """One whole tensor, and its items."""

    shape: tuple[int, ...]
    dtype: str
    table: ItemTable

    @property
    def items(self) -> Iterator[IndexedItem]:
        """All items, by their offset."""
        return (self.table.item(number) for number in range(len(self.table)))

    def overlapping(self, offset: Sequence[int], sizes: Sequence[int]) -> list[IndexedItem]:
        """Return the items that have elements in the box at `offset`."""
        starts, stops = self.table.offsets, self.table.offsets + self.table.sizes
        box_start = np.array(offset, np.int64)
        box_stop = box_start + np.array(sizes, np.int64)
        inside = (np.maximum(starts, box_start) < np.minimum(stops, box_stop)).all(1)
        return [self.table.item(number) for number in np.flatnonzero(inside).tolist()]


def file_column(file_number: int, algorithm: str) -> int:
    """Return the value of the column `file` for an item whose checksum is of this algorithm."""
    return file_number | (ALGORITHMS.index(algorithm) << _FILE_BITS)


def encode_index(files: Sequence[str], tensors: Mapping[str, IndexedTensor]) -> tuple[bytes, int]:
    """Return the index as it is stored, and the bytes up to the end of its header."""
    blocks: list[bytes] = []
    described: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        block = np.ascontiguousarray(tensor.table.rows, "<i8").tobytes() + tensor.table.digests.tobytes()
        described[name] = [tensor.shape, tensor.dtype, len(tensor.table), end, len(block), checksum_of(block)]
        blocks.append(block)
        end += len(block)
    header = orjson.dumps({"files": files, "tensors": described})
    head = _PREFIX.pack(_MAGIC, INDEX_FORMAT, len(header)) + header
    return b"".join([head, *blocks]), len(head)


def read_index(
    store: Store, checkpoint: CompleteCheckpoint, names: Iterable[str] | None = None
) -> dict[str, IndexedTensor]:
    """Read a checkpoint's index, checked against the manifest; with `names` only what is stored of these tensors."""
    name = checkpoint.facts["pieces"]
    path = f"{checkpoint.path}/{name}"
    where = join(store.url, path)
    header = checkpoint.facts.get("pieces_header")
    if header is None:
        data = store.read(path)
        entry = next((file for file in checkpoint.manifest.files if file.path == name), None)
        _check(store, checkpoint, where, data, None if entry is None else entry.checksum)
        return _decode_json(data, where)
    head = store.read(path, 0, header["bytes"])
    _check(store, checkpoint, where, head, header["checksum"])
    _, format, _ = _PREFIX.unpack_from(head)
    _check_format(format, where)
    document: Any = orjson.loads(memoryview(head)[_PREFIX.size :])
    described = document["tensors"]
    wanted = described if names is None else {name: described[name] for name in names if name in described}
    tensors: dict[str, IndexedTensor] = {}
    for first, last, entries in _requests(wanted):
        data = store.read(path, len(head) + first, len(head) + last)
        for name, (shape, dtype, count, start, length, checksum) in entries:
            block = memoryview(data)[start - first : start - first + length]
            _check(store, checkpoint, where, block, checksum)
            columns = 2 * len(shape) + 3
            rows = np.frombuffer(block, "<i8", count * columns).reshape(count, columns)
            digests = np.frombuffer(block, np.uint8, offset=8 * count * columns).reshape(count, DIGEST_BYTES)
            tensors[name] = IndexedTensor(tuple(shape), dtype, ItemTable(document["files"], rows, digests))
    return {name: tensors[name] for name in wanted}


def _requests(wanted: Mapping[str, Any]) -> Iterator[tuple[int, int, list[tuple[str, Any]]]]:
    """Group blocks that are near each other: (first byte, end, the tensors)."""
    group: list[tuple[str, Any]] = []
    first = last = 0
    for name, entry in sorted(wanted.items(), key=lambda named: named[1][3]):
        start, length = entry[3], entry[4]
        if group and start - last > _GAP_BYTES:
            yield first, last, group
            group = []
        if not group:
            first = start
        last = start + length
        group.append((name, entry))
    if group:
        yield first, last, group


def _check(
    store: Store, checkpoint: CompleteCheckpoint, where: str, data: bytes | memoryview, checksum: str | None
) -> None:
    if checksum is None or checksum_of(data, algorithm_of(checksum)) != checksum:
        raise corrupt_checkpoint(store, checkpoint, "the table of pieces is not what the manifest says", where)


def _check_format(format: int, where: str) -> None:
    if format > INDEX_FORMAT:
        raise CorruptData(
            f"the table of pieces has format {format}, this Trainshed reads up to {INDEX_FORMAT}",
            where=where,
            hint="upgrade Trainshed",
        )


def _decode_json(data: bytes, where: str) -> dict[str, IndexedTensor]:
    """Read an index of format 1 or 2."""
    document: Any = orjson.loads(data)
    _check_format(document["format"], where)
    return {
        name: IndexedTensor(
            tuple(tensor["shape"]),
            tensor["dtype"],
            _table_of_lists(document["files"], tensor["shape"], tensor["items"]),
        )
        for name, tensor in document["tensors"].items()
    }


def _table_of_lists(files: Sequence[str], shape: Sequence[int], items: Sequence[Any]) -> ItemTable:
    rows = [
        [*offset, *sizes, file | ALGORITHMS.index(algorithm_of(checksum)) << _FILE_BITS, start, length]
        for offset, sizes, file, start, length, checksum in items
    ]
    digests = b"".join(bytes.fromhex(item[5].partition(":")[2]) for item in items)
    return ItemTable(
        files,
        np.array(rows, np.int64).reshape(len(items), 2 * len(shape) + 3),
        np.frombuffer(digests, np.uint8).reshape(len(items), DIGEST_BYTES),
    )


def overlap(
    item: IndexedItem, offset: Sequence[int], sizes: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the overlap of an item and the box at `offset`, as slices of the item and of the box; None without one."""
    starts = [max(a, b) for a, b in zip(item.offset, offset, strict=True)]
    ends = [min(a + n, b + m) for a, n, b, m in zip(item.offset, item.sizes, offset, sizes, strict=True)]
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return None
    return _slices(starts, ends, item.offset), _slices(starts, ends, offset)


def _slices(starts: list[int], ends: list[int], offset: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(start - origin, end - origin) for start, end, origin in zip(starts, ends, offset, strict=True))


def corrupt_checkpoint(store: Store, checkpoint: CompleteCheckpoint, what: str, where: str) -> CorruptData:
    """Return the error for a broken checkpoint; its hint names the checkpoint before it."""
    folder = checkpoint.path.rpartition("/")[0]
    earlier = next((other for other in complete_checkpoints(store, folder) if other.step < checkpoint.step), None)
    run = join(store.url, folder.rpartition("/")[0])
    remove = f"`trainshed checkpoints {run} --verify --prune` removes it"
    if earlier is None:
        return CorruptData(what, where=where, hint=f"{remove}; there is no earlier checkpoint to go on from")
    address = join(store.url, earlier.path)
    return CorruptData(what, where=where, hint=f"{remove}, and the run goes on from step {earlier.step} ({address})")
