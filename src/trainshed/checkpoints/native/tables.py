"""What ranks tell about their files, and the tables that are made of it: the index, `.metadata` and the manifest.

A checkpoint of 4,096 ranks has a million items. They are arrays from the rank that writes them to the table that is
stored, so no step makes a Python object for each. Large tables are made in a process of their own (`table_process.py`):
while one is made, Python would stop the thread that trains again and again. No torch here: that process needs none.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson

from trainshed.checkpoints.native.dcp_table import encode_dcp_metadata
from trainshed.checkpoints.native.folder import FORMAT, KIND, METADATA, index_name
from trainshed.checkpoints.native.index import (
    DIGEST_BYTES,
    IndexedTensor,
    ItemTable,
    encode_index,
    file_column,
)
from trainshed.errors import TrainshedError
from trainshed.storage import FileEntry, Manifest, algorithm_of, checksum_of

OWN_PROCESS_ITEMS = 20_000
"""From this many items on, tables are made in their own process: about a fifth of a second of Python's time."""
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class ItemSpan:
    """The place of one item in the rank's file; an item without elements has no bytes."""

    start: int
    length: int
    checksum: str


@dataclass(frozen=True)
class PlannedBox:
    """A box of a tensor that a rank writes as one item."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: tuple[int, ...]
    sizes: tuple[int, ...]


def encode_boxes(boxes: Sequence[PlannedBox]) -> bytes:
    """Return boxes as bytes: JSON with runs of boxes of one tensor, then offsets and sizes as int64 [N, D].

    D is the most dims of any of the tensors. Ranks that hold the same tensors have the same JSON.
    """
    dims = max((len(box.shape) for box in boxes), default=0)
    runs: list[list[Any]] = []
    for box in boxes:
        if runs and runs[-1][0] == box.name:
            runs[-1][3] += 1
        else:
            runs.append([box.name, box.shape, box.dtype, 1])
    places = np.zeros((2, len(boxes), dims), "<i8")
    for number, box in enumerate(boxes):
        places[0, number, : len(box.offset)] = box.offset
        places[1, number, : len(box.sizes)] = box.sizes
    head = orjson.dumps({"dims": dims, "runs": runs})
    return _LENGTH.pack(len(head)) + head + places.tobytes()


@dataclass(frozen=True, eq=False)
class RankFileRecord:
    """What a rank sends about its file. `boxes` is None where rank 0 knows them already, by the plan's digest.

    `spans` int64 [N, 2] are start and length of each item in the file, `digests` uint8 [N, 32] their checksums.
    """

    plan_digest: str
    boxes: bytes | None
    spans: np.ndarray
    digests: np.ndarray
    algorithm: str
    file: FileEntry

    @classmethod
    def of(cls, plan_digest: str, boxes: bytes, spans: Sequence[ItemSpan], file: FileEntry) -> RankFileRecord:
        """Make the record of a file from the places of its items."""
        algorithms = {algorithm_of(span.checksum) for span in spans} or {algorithm_of(file.checksum)}
        assert len(algorithms) == 1, "a rank hashes all its items alike"
        digests = b"".join(bytes.fromhex(span.checksum.partition(":")[2]) for span in spans)
        return cls(
            plan_digest,
            boxes,
            np.array([(span.start, span.length) for span in spans], "<i8").reshape(-1, 2),
            np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES),
            algorithms.pop(),
            file,
        )

    def to_bytes(self) -> bytes:
        """The record as it is sent to rank 0."""
        file = (self.file.path, self.file.size, self.file.checksum)
        boxes = b"" if self.boxes is None else self.boxes
        head = orjson.dumps(
            {
                "plan": self.plan_digest,
                "boxes": None if self.boxes is None else len(boxes),
                "items": len(self.spans),
                "algorithm": self.algorithm,
                "file": file,
            }
        )
        return b"".join([_LENGTH.pack(len(head)), head, boxes, self.spans.tobytes(), self.digests.tobytes()])

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> RankFileRecord:
        """Read a record."""
        view = memoryview(data)
        head, rest = _split_head(view)
        boxes_end, items = head["boxes"] or 0, head["items"]
        spans = np.frombuffer(rest[boxes_end : boxes_end + 16 * items], "<i8").reshape(items, 2)
        digests = np.frombuffer(rest[boxes_end + 16 * items :], np.uint8).reshape(items, DIGEST_BYTES)
        boxes = None if head["boxes"] is None else bytes(rest[:boxes_end])
        return cls(head["plan"], boxes, spans, digests, head["algorithm"], FileEntry(*head["file"]))

    def without_boxes(self) -> RankFileRecord:
        """The record for a rank 0 that knows the plan."""
        return replace(self, boxes=None)


def _split_head(view: memoryview) -> tuple[Any, memoryview]:
    length = int.from_bytes(view[: _LENGTH.size], "little")  # of a torn record: too few bytes, which no JSON fits
    return orjson.loads(view[_LENGTH.size : _LENGTH.size + length]), view[_LENGTH.size + length :]


class _TensorRuns:
    """The tensors of all ranks by number, with a cache of how each JSON of runs names them."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.shapes: list[tuple[int, ...]] = []
        self.dtypes: list[str] = []
        self._known: dict[bytes, tuple[int, np.ndarray]] = {}

    def number_boxes(self, boxes: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Return the tensor's number of every box [N], and offsets and sizes [2, N, D]."""
        (length,) = _LENGTH.unpack_from(boxes)
        head = boxes[_LENGTH.size : _LENGTH.size + length]
        if head not in self._known:
            document = orjson.loads(head)
            numbers = [self._number(name, tuple(shape), dtype) for name, shape, dtype, _ in document["runs"]]
            repeated = np.repeat(np.array(numbers, np.int64), [run[3] for run in document["runs"]])
            self._known[head] = document["dims"], repeated
        dims, numbers_of_boxes = self._known[head]
        places = np.frombuffer(boxes, "<i8", offset=_LENGTH.size + length).reshape(2, len(numbers_of_boxes), dims)
        return numbers_of_boxes, places

    def _number(self, name: str, shape: tuple[int, ...], dtype: str) -> int:
        number = self.names.setdefault(name, len(self.shapes))
        if number == len(self.shapes):
            self.shapes.append(shape)
            self.dtypes.append(dtype)
        elif (self.shapes[number], self.dtypes[number]) != (shape, dtype):
            raise TrainshedError(f"{name}: ranks disagree about its shape or dtype")
        return number


def assemble_index(parts: Sequence[RankFileRecord]) -> dict[str, IndexedTensor]:
    """Merge the ranks' records; every element of every tensor must have been written by exactly one rank."""
    runs = _TensorRuns()
    boxes: list[tuple[np.ndarray, np.ndarray]] = []
    for part in parts:
        assert part.boxes is not None, "rank 0 has filled in the boxes that it knows"
        boxes.append(runs.number_boxes(part.boxes))
    dims = max((places.shape[2] for _, places in boxes), default=0)
    offsets, sizes = (
        np.concatenate(
            [np.zeros((0, dims), np.int64)]
            + [np.pad(places[kind], ((0, 0), (0, dims - places.shape[2]))) for _, places in boxes]
        )
        for kind in (0, 1)
    )
    tensors = np.concatenate([np.zeros(0, np.int64), *(numbers for numbers, _ in boxes)])
    spans = np.concatenate([np.zeros((0, 2), np.int64), *(part.spans for part in parts)])
    digests = np.concatenate([np.zeros((0, DIGEST_BYTES), np.uint8), *(part.digests for part in parts)])
    files = np.concatenate(
        [
            np.zeros(0, np.int64),
            *(
                np.full(len(part.spans), file_column(number, part.algorithm), np.int64)
                for number, part in enumerate(parts)
            ),
        ]
    )
    names = [part.file.path for part in parts]
    written = np.flatnonzero(spans[:, 1])  # items without elements only record that a tensor exists
    order = written[np.lexsort([*(offsets[written, dim] for dim in reversed(range(dims))), tensors[written]])]
    tensors, offsets, sizes = tensors[order], offsets[order], sizes[order]
    spans, digests, files = spans[order], digests[order], files[order]
    bounds = np.searchsorted(tensors, np.arange(len(runs.shapes) + 1)).tolist()
    index: dict[str, IndexedTensor] = {}
    for name, number in runs.names.items():
        shape, rows = runs.shapes[number], slice(bounds[number], bounds[number + 1])
        own_dims = len(shape)
        _check_coverage(name, shape, offsets[rows, :own_dims], sizes[rows, :own_dims])
        table = np.hstack([offsets[rows, :own_dims], sizes[rows, :own_dims], files[rows, None], spans[rows]])
        index[name] = IndexedTensor(shape, runs.dtypes[number], ItemTable(names, table, digests[rows]))
    return index


def _check_coverage(name: str, shape: tuple[int, ...], offsets: np.ndarray, sizes: np.ndarray) -> None:
    """Check the boxes of a tensor, sorted by their offset."""
    written, wanted = int(sizes.prod(axis=1).sum()), math.prod(shape)
    if written != wanted or (offsets[1:] == offsets[:-1]).all(axis=1).any():
        raise TrainshedError(
            f"{name}: the ranks wrote {written:,} elements of a tensor of {wanted:,}",
            hint="each piece needs exactly one owner; this is a fault of Trainshed's engine: report it",
        )


@dataclass(frozen=True)
class CheckpointContents:
    """The index, `.metadata` and the manifest as they are stored; the manifest names them and the ranks' files."""

    index: bytes
    metadata: bytes
    manifest: bytes
    total_bytes: int
    """Of all files that the manifest names."""


_OWN_FACTS = frozenset({"format", "attempt", "pieces", "pieces_header", "tensors"})


def check_facts(facts: Mapping[str, Any]) -> None:
    """Refuse facts that the checkpoint writes itself."""
    if reserved := _OWN_FACTS & facts.keys():
        raise ValueError(f"'{min(reserved)}' is a fact that the checkpoint writes itself")


def checkpoint_contents(
    parts: Iterable[RankFileRecord],
    step: int,
    attempt: int,
    spec: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
) -> CheckpointContents:
    """Describe the files that all ranks have written for one step."""
    facts = facts or {}
    check_facts(facts)
    assert facts.get("step", step) == step
    parts = list(parts)
    tensors = assemble_index(parts)
    files = [part.file.path for part in parts]
    (index, header_bytes), metadata = encode_index(files, tensors), encode_dcp_metadata(files, tensors)
    own_facts = {
        "format": FORMAT,
        "step": step,
        "attempt": attempt,
        "pieces": index_name(attempt),
        "pieces_header": {"bytes": header_bytes, "checksum": checksum_of(index[:header_bytes])},
        "tensors": {name: {"shape": list(tensor.shape), "dtype": tensor.dtype} for name, tensor in tensors.items()},
    }
    entries = [
        *(part.file for part in parts),
        FileEntry(index_name(attempt), len(index), checksum_of(index)),
        FileEntry(METADATA, len(metadata), checksum_of(metadata)),
    ]
    manifest = Manifest.of(KIND, spec, entries, {**facts, **own_facts})
    return CheckpointContents(index, metadata, manifest.to_bytes(), manifest.total_bytes)
