"""The weights in one of our checkpoints, read box by box; and weights alone, written as such a checkpoint.

An item is always read completely, because its checksum covers all of it. The last items are cached: a tensor is read in
boxes, and adjacent boxes need the same item. An item is checked against its checksum when it is first read.

Weights alone are stored as step 0 of a folder like a run's, without optimizer state. Everything that reads checkpoints
reads them: `trainshed checkpoints`, the engine's base weights, PyTorch's own DCP.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Self

import torch

from trainshed.checkpoints.io import BLOCK_BYTES, BufferPool, HashedFile, bytes_of, run_in_threads
from trainshed.checkpoints.native.commit import frame_item, framed_item_bytes
from trainshed.checkpoints.native.folder import (
    LATEST,
    METADATA,
    CompleteCheckpoint,
    LatestPointer,
    checkpoints_folder,
    find_checkpoint,
    index_name,
    rank_file_name,
    read_checkpoint_config,
    step_folder,
)
from trainshed.checkpoints.native.index import IndexedItem, IndexedTensor, overlap, read_index
from trainshed.checkpoints.native.reader import read_item
from trainshed.checkpoints.native.shards import DTYPES, SavePlan, TensorShard, WriteItem, make_save_plan
from trainshed.checkpoints.native.tables import ItemSpan, RankFileRecord, checkpoint_contents
from trainshed.checkpoints.weights import (
    AdvanceProgress,
    OutputFile,
    Weights,
    box_ends,
    group_by_size,
    join_names,
    stored_dtype,
)
from trainshed.errors import InputError
from trainshed.models.parameters import Parameter, is_unused_mtp, parameters
from trainshed.recipe import ModelConfig
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import FileEntry, Hasher, LocalStore, Store, checksum_of, join
from trainshed.storage.manifest import MANIFEST

MODEL_PREFIX = "model."
"""Of the names of weights in a checkpoint."""
EMA_PREFIX = "ema."
"""Of their averages, where a run makes them; all other tensors are those of the optimizer and of the run."""
_SLOTS = 4  # items in the cache; more only while more threads read


class NativeWeights:
    """The weights of a checkpoint: a step's folder, a run's folder (its best or latest), or converted weights.

    `config` is the one its manifest holds, unless it is given. `prefix` chooses the weights, or their averages.
    """

    def __init__(
        self,
        store: Store,
        path: str,
        config: ModelConfig | None = None,
        reporter: Reporter = SILENT,
        prefix: str = MODEL_PREFIX,
    ) -> None:
        self.checkpoint: CompleteCheckpoint = find_checkpoint(store, path, reporter)
        self._store = store
        self.config = read_checkpoint_config(store, self.checkpoint) if config is None else config
        where = join(store.url, self.checkpoint.path)
        buffers = {f"{MODEL_PREFIX}{one.name}" for one in parameters(self.config) if one.buffer}
        names = [name for name in self.checkpoint.facts["tensors"] if name.startswith(prefix) or name in buffers]
        self._tensors = _match_tensors(self.config, read_index(store, self.checkpoint, names), where, prefix)
        self._items = _ItemCache(store, self.checkpoint)
        self._buffers = BufferPool()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory."""
        self._items.clear()
        self._buffers.clear()

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the stored weights, by torch's names."""
        weights = [parameter.name for parameter in parameters(self.config) if not parameter.buffer]
        return sorted({self._tensors[name].dtype for name in weights})

    def read(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the box [offset, offset + shape) of a tensor, on the CPU."""
        box_ends(parameter, offset, shape)
        box = torch.empty(tuple(shape), dtype=dtype)
        self._fill(box, parameter, offset)
        return box

    @contextmanager
    def borrow(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """Lend such a box for as long as the `with` block runs; where possible it is a view of a cached item."""
        box_ends(parameter, offset, shape)
        stored = self._tensors[parameter.name]
        items = stored.overlapping(offset, shape)
        if len(items) == 1 and DTYPES[stored.dtype] == dtype:
            shared = overlap(items[0], offset, shape)
            assert shared is not None, "it was chosen because it overlaps"
            with self._items.borrow(parameter.name, stored.dtype, items[0]) as tensor:
                yield tensor[shared[0]]
            return
        with self._buffers.borrow(shape, dtype) as box:
            self._fill(box, parameter, offset)
            yield box

    def _fill(self, box: torch.Tensor, parameter: Parameter, offset: Sequence[int]) -> None:
        stored = self._tensors[parameter.name]
        for item in stored.overlapping(offset, box.shape):
            shared = overlap(item, offset, box.shape)
            if shared is not None:
                inside_item, inside_box = shared
                with self._items.borrow(parameter.name, stored.dtype, item) as tensor:
                    box[inside_box] = tensor[inside_item]


class _CacheSlot:
    """One item in memory, read into a buffer that is reused for the next item."""

    def __init__(self) -> None:
        self.key: tuple[str, int] | None = None
        self.users = 0
        self.lock = threading.Lock()
        self.tensor: torch.Tensor | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def memory(self, size: int) -> torch.Tensor:
        """The buffer, large enough for an item."""
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory


class _ItemCache:
    """The last items read. Buffers are reused: with new ones the heap would grow to many times what is in use."""

    def __init__(self, store: Store, checkpoint: CompleteCheckpoint) -> None:
        self._store, self._checkpoint = store, checkpoint
        self._lock = threading.Lock()
        self._slots: list[_CacheSlot] = []
        self._checked: set[tuple[str, int]] = set()

    @contextmanager
    def borrow(self, name: str, dtype: str, item: IndexedItem) -> Iterator[torch.Tensor]:
        """Lend an item for as long as the `with` block runs; of two threads that want it, one reads and one waits."""
        key = item.file, item.start
        slot = self._take_slot(key)
        try:
            with slot.lock:
                if slot.tensor is None:
                    memory, check = slot.memory(item.length), key not in self._checked
                    slot.tensor = read_item(self._store, self._checkpoint, name, dtype, item, memory, check=check)
                    self._checked.add(key)
            assert slot.tensor is not None
            yield slot.tensor
        finally:
            with self._lock:
                slot.users -= 1
                if slot.tensor is None:  # it could not be read
                    slot.key = None

    def clear(self) -> None:
        with self._lock:
            self._slots.clear()

    def _take_slot(self, key: tuple[str, int]) -> _CacheSlot:
        with self._lock:
            slot = next((other for other in self._slots if other.key == key), None)
            if slot is None:
                slot = next((other for other in self._slots if not other.users), None)
                if slot is None or len(self._slots) < _SLOTS:
                    slot = _CacheSlot()
                slot.key, slot.tensor = key, None
            if slot in self._slots:
                self._slots.remove(slot)
            self._slots.append(slot)  # the slot used last is the last one to be reused
            slot.users += 1
            return slot


def _match_tensors(
    config: ModelConfig, stored: dict[str, IndexedTensor], where: str, prefix: str
) -> dict[str, IndexedTensor]:
    """Check the stored tensors against an architecture: every tensor exists, in its shape, and none is left over."""
    wanted = {parameter.name: parameter for parameter in parameters(config)}
    names = [name for name in stored if name.startswith(prefix)]
    if not names and prefix == EMA_PREFIX:
        raise InputError("the checkpoint holds no averaged weights", where=where, hint="train with `train.ema`")
    tensors = {name.removeprefix(prefix): stored[name] for name in names}
    # Whoever needs fewer layers for multi-token prediction leaves the others out.
    unused = {name.partition(".mtp.")[0] for name in tensors if ".mtp." in name and is_unused_mtp(config, name)}
    tensors = {name: tensor for name, tensor in tensors.items() if ".".join(name.split(".")[:2]) not in unused}
    for parameter in wanted.values():
        # No average is made of a buffer, which no optimizer moves.
        if parameter.buffer and f"{MODEL_PREFIX}{parameter.name}" in stored:
            tensors[parameter.name] = stored[f"{MODEL_PREFIX}{parameter.name}"]
    problems = list(_mismatches(wanted, tensors))
    if problems:
        raise InputError(
            f"the tensors are not those of its model: {join_names(problems)}",
            where=where,
            hint="load it as the model that wrote it",
        )
    return {name: tensors[name] for name in wanted}


def _mismatches(wanted: dict[str, Parameter], tensors: dict[str, IndexedTensor]) -> Iterator[str]:
    yield from (f"`{name}` is missing" for name in wanted if name not in tensors)
    yield from (f"`{name}` is left over" for name in tensors if name not in wanted)
    for name in wanted.keys() & tensors.keys():
        if wanted[name].shape != tensors[name].shape:
            yield f"`{name}` is {list(tensors[name].shape)}, not {list(wanted[name].shape)}"
        elif not DTYPES[tensors[name].dtype].is_floating_point:
            yield f"`{name}` is {tensors[name].dtype}"


UNIT_BYTES = 256_000_000
"""The size of one file: large enough that requests do not matter, small enough that every thread has files."""
STEP, ATTEMPT = 0, 1
_RECORD_SUFFIX = ".part"  # beside a file: its contents, for the index that is written after all files


class NativeWeightsWriter:
    """A checkpoint of weights in one dtype; what is not a weight stays in float32."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, unit_bytes: int | None = None) -> None:
        if dtype not in DTYPES.values() or not dtype.is_floating_point:
            raise InputError(f"weights are not stored as {dtype}", hint="write bf16, fp16, fp32 or fp64")
        self.config = config
        self._dtype = dtype
        groups = group_by_size(
            parameters(config), lambda parameter: parameter.size * dtype.itemsize, unit_bytes or UNIT_BYTES
        )
        self._folder = step_folder(checkpoints_folder(""), STEP)
        self._parameters = {
            f"{self._folder}/{rank_file_name(number, ATTEMPT)}": group for number, group in enumerate(groups)
        }

    def output_files(self) -> list[OutputFile]:
        """Return the files of items."""
        return [OutputFile(path, self._plan(group).size) for path, group in self._parameters.items()]

    def write(self, output: OutputFile, source: Weights, file: Path, advance: AdvanceProgress, threads: int = 1) -> str:
        """Write one file of items, and beside it a record of its contents; return its checksum."""
        group = {MODEL_PREFIX + parameter.name: parameter for parameter in self._parameters[output.path]}
        plan = self._plan(self._parameters[output.path])
        starts = [0, *accumulate(map(framed_item_bytes, plan.items))]
        spans: dict[int, ItemSpan] = {}
        with HashedFile(file) as hashed:

            def write_item(number: int, item: WriteItem) -> None:
                dtype = stored_dtype(group[item.name], self._dtype)
                with source.borrow(group[item.name], item.offset, item.sizes, dtype) as box:
                    data, hasher = bytes_of(box), Hasher()
                    head, tail = frame_item(item, zlib.crc32(data))
                    for part in (head, data, tail):
                        hasher.update(part)
                    hashed.write(starts[number], head, data, tail)
                spans[number] = ItemSpan(starts[number], hasher.size, hasher.checksum)
                advance(item.size)

            run_in_threads((partial(write_item, number, item) for number, item in enumerate(plan.items)), threads)
            entry = FileEntry(Path(output.path).name, starts[-1], hashed.checksum(starts[-1]))
        record = RankFileRecord.of(plan.digest, plan.boxes, [spans[number] for number in range(len(plan.items))], entry)
        file.with_name(file.name + _RECORD_SUFFIX).write_bytes(record.to_bytes())
        return entry.checksum

    def finish(self, folder: Path, entries: Sequence[FileEntry]) -> None:
        """Write the index, `.metadata` and the checkpoint's manifest, then `latest`."""
        store = LocalStore(folder)
        # The manifest is written last; a `finish` that was killed after it only removes the records.
        if store.head(f"{self._folder}/{MANIFEST}") is None:
            records = [self._read_record(folder / path, group) for path, group in self._parameters.items()]
            self._write_tables(store, records)
        store.put(f"{checkpoints_folder('')}/{LATEST}", LatestPointer(STEP, ATTEMPT, ATTEMPT).to_bytes())
        for path in self._parameters:
            store.delete(f"{path}{_RECORD_SUFFIX}")

    def _read_record(self, file: Path, group: Sequence[Parameter]) -> RankFileRecord:
        """Return the contents of a file; computed from the file where its record did not reach the disk."""
        plan = self._plan(group)
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            record = RankFileRecord.from_bytes(file.with_name(file.name + _RECORD_SUFFIX).read_bytes())
            if record.plan_digest == plan.digest:
                return record
        hasher, spans = Hasher(), []
        with file.open("rb") as handle:
            for item in plan.items:
                saved = handle.read(framed_item_bytes(item))
                spans.append(ItemSpan(hasher.size, len(saved), checksum_of(saved)))
                hasher.update(saved)
        entry = FileEntry(file.name, hasher.size, hasher.checksum)
        return RankFileRecord.of(plan.digest, plan.boxes, spans, entry)

    def _write_tables(self, store: LocalStore, parts: list[RankFileRecord]) -> None:
        spec = {"model": self.config.model_dump(mode="json", by_alias=True, exclude_none=True)}
        contents = checkpoint_contents(parts, STEP, ATTEMPT, spec)
        store.put(f"{self._folder}/{index_name(ATTEMPT)}", contents.index)
        store.put(f"{self._folder}/{METADATA}", contents.metadata)
        store.put(f"{self._folder}/{MANIFEST}", contents.manifest)

    def _plan(self, group: Sequence[Parameter]) -> SavePlan:
        shards = {
            MODEL_PREFIX + parameter.name: TensorShard(
                parameter.shape,
                (0,) * len(parameter.shape),
                torch.empty(parameter.shape, dtype=stored_dtype(parameter, self._dtype), device="meta"),
            )
            for parameter in group
        }
        return make_save_plan(shards, BLOCK_BYTES)
