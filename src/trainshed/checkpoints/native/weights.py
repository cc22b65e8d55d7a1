"""The weights in one of our checkpoints, read box by box, and weights alone written as such a checkpoint.

Items are read whole, because their checksum covers them whole. The last ones are kept: a tensor is read in boxes,
and neighbouring boxes need the same item. An item is checked against its checksum when it is first read.

Weights alone are step 0 of a folder laid out like a run's, without optimizer state. Whatever reads checkpoints
reads it: `trainshed checkpoints`, the engine's base weights, PyTorch's own DCP.
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
from trainshed.checkpoints.native import index
from trainshed.checkpoints.native.commit import (
    ItemSpan,
    RankFileRecord,
    assemble_index,
    dcp_metadata,
    frame_item,
    framed_item_bytes,
)
from trainshed.checkpoints.native.folder import (
    FORMAT,
    KIND,
    LATEST,
    MANIFEST,
    METADATA,
    CompleteCheckpoint,
    LatestPointer,
    checkpoints_folder,
    find_checkpoint,
    index_name,
    rank_file_name,
    step_folder,
)
from trainshed.checkpoints.native.index import IndexedItem, IndexedTensor, overlap, read_index
from trainshed.checkpoints.native.reader import read_item
from trainshed.checkpoints.native.shards import DTYPES, SavePlan, TensorShard, WriteItem, make_save_plan
from trainshed.checkpoints.weights import AdvanceProgress, OutputFile, Weights, box_ends
from trainshed.errors import InputError
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig
from trainshed.recipe.validation import validate
from trainshed.recipe.yaml_io import SourceMap, YamlDocument
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import FileEntry, Hasher, LocalStore, Manifest, Store, checksum_of, join

MODEL_PREFIX = "model."
"""Of the names of weights in a checkpoint; whatever else is there is the optimiser's."""
_SLOTS = 4  # items kept; more only while more threads read
_NAMED = 5  # how many tensors an error names before it only counts


class NativeWeights:
    """The weights of a checkpoint: a step's folder, a run's folder (its latest), or weights that were converted.

    `config` is the one its manifest holds, unless it is given.
    """

    def __init__(self, store: Store, path: str, config: ModelConfig | None = None, reporter: Reporter = SILENT) -> None:
        self.found: CompleteCheckpoint = find_checkpoint(store, path, reporter)
        self._store = store
        self.config = read_checkpoint_config(store, self.found) if config is None else config
        self._tensors = _match_tensors(self.config, read_index(store, self.found), join(store.url, self.found.path))
        self._items = _ItemCache(store, self.found)
        self._scratch = BufferPool()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what is kept in memory."""
        self._items.clear()
        self._scratch.clear()

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the stored tensors, in torch's words."""
        return sorted({tensor.dtype for tensor in self._tensors.values()})

    @property
    def parameters(self) -> int:
        """The number of weights, tied ones counted once."""
        return sum(parameter.size for parameter in parameters(self.config))

    def read(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the box [offset, offset + shape) of a tensor, on the CPU."""
        box_ends(parameter, offset, shape)
        box = torch.empty(tuple(shape), dtype=dtype)
        self._fill(box, parameter, offset)
        return box

    @contextmanager
    def lent(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """Lend such a box, to look at for as long as the block runs: where it can be, a part of an item in memory."""
        box_ends(parameter, offset, shape)
        stored = self._tensors[parameter.name]
        first = next(((item, shared) for item in stored.items if (shared := overlap(item, offset, shape))), None)
        if first is not None and DTYPES[stored.dtype] == dtype:
            item, (inside_item, inside_box) = first
            if all(part == slice(0, length) for part, length in zip(inside_box, shape, strict=True)):
                with self._items.held(parameter.name, stored.dtype, item) as tensor:
                    yield tensor[inside_item]
                return
        with self._scratch.lent(shape, dtype) as box:
            self._fill(box, parameter, offset)
            yield box

    def _fill(self, box: torch.Tensor, parameter: Parameter, offset: Sequence[int]) -> None:
        stored = self._tensors[parameter.name]
        for item in stored.items:
            shared = overlap(item, offset, box.shape)
            if shared is not None:
                inside_item, inside_box = shared
                with self._items.held(parameter.name, stored.dtype, item) as tensor:
                    box[inside_box] = tensor[inside_item]


def read_checkpoint_config(store: Store, found: CompleteCheckpoint) -> ModelConfig:
    """Return the architecture that a checkpoint's manifest holds."""
    where = join(store.url, f"{found.path}/manifest.json")
    model = found.manifest.spec.get("model")
    if not isinstance(model, dict):
        raise InputError("the checkpoint does not say what model it is of", where=where, hint="convert it by its run")
    return validate(ModelConfig, YamlDocument(model, SourceMap(where)))


class _CacheSlot:
    """One item in memory, read into a buffer that the next item uses again."""

    def __init__(self) -> None:
        self.key: tuple[str, int] | None = None
        self.users = 0
        self.filling = threading.Lock()
        self.tensor: torch.Tensor | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def memory(self, size: int) -> torch.Tensor:
        """The buffer, large enough for an item."""
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory


class _ItemCache:
    """The last items read. Buffers are kept rather than made: the heap would grow by many times what is in use."""

    def __init__(self, store: Store, found: CompleteCheckpoint) -> None:
        self._store, self._found = store, found
        self._lock = threading.Lock()
        self._slots: list[_CacheSlot] = []
        self._checked: set[tuple[str, int]] = set()

    @contextmanager
    def held(self, name: str, dtype: str, item: IndexedItem) -> Iterator[torch.Tensor]:
        """Give out an item, for as long as the block runs; of two who want it one reads and the other waits."""
        key = item.file, item.start
        slot = self._taken(key)
        try:
            with slot.filling:
                if slot.tensor is None:
                    memory, check = slot.memory(item.length), key not in self._checked
                    slot.tensor = read_item(self._store, self._found, name, dtype, item, memory, check=check)
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

    def _taken(self, key: tuple[str, int]) -> _CacheSlot:
        with self._lock:
            slot = next((each for each in self._slots if each.key == key), None)
            if slot is None:
                slot = next((each for each in self._slots if not each.users), None)
                if slot is None or len(self._slots) < _SLOTS:
                    slot = _CacheSlot()
                slot.key, slot.tensor = key, None
            if slot in self._slots:
                self._slots.remove(slot)
            self._slots.append(slot)  # the one used last is the last to be taken for another
            slot.users += 1
            return slot


def _match_tensors(config: ModelConfig, stored: dict[str, IndexedTensor], where: str) -> dict[str, IndexedTensor]:
    """Hold what is stored against an architecture: every tensor there, in its shape, and none left over."""
    wanted = {parameter.name: parameter for parameter in parameters(config)}
    found = {name.removeprefix(MODEL_PREFIX): each for name, each in stored.items() if name.startswith(MODEL_PREFIX)}
    problems = list(_mismatches(wanted, found))
    if problems:
        more = f" and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise InputError(
            f"the tensors are not those of its model: {', '.join(problems[:_NAMED])}{more}",
            where=where,
            hint="load it as the model that wrote it",
        )
    return {name: found[name] for name in wanted}


def _mismatches(wanted: dict[str, Parameter], found: dict[str, IndexedTensor]) -> Iterator[str]:
    yield from (f"`{name}` is missing" for name in wanted if name not in found)
    yield from (f"`{name}` is left over" for name in found if name not in wanted)
    for name in wanted.keys() & found.keys():
        if wanted[name].shape != found[name].shape:
            yield f"`{name}` is {list(found[name].shape)}, not {list(wanted[name].shape)}"
        elif not DTYPES[found[name].dtype].is_floating_point:
            yield f"`{name}` is {found[name].dtype}"


UNIT_BYTES = 256_000_000
"""How much goes into one file: enough that requests do not count, and files enough for every thread."""
STEP, ATTEMPT = 0, 1
_RECORD_SUFFIX = ".part.json"  # beside a unit: what is in it, for the tables that are written once all are there


class NativeWeightsWriter:
    """A checkpoint of weights in one dtype."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, unit_bytes: int | None = None) -> None:
        if dtype not in DTYPES.values() or not dtype.is_floating_point:
            raise InputError(f"weights are not stored as {dtype}", hint="write bf16, fp16, fp32 or fp64")
        self.config = config
        self._dtype = dtype
        self._folder = step_folder(checkpoints_folder(""), STEP)
        self._parameters = {
            f"{self._folder}/{rank_file_name(number, ATTEMPT)}": group
            for number, group in enumerate(_group_by_file(config, dtype, unit_bytes or UNIT_BYTES))
        }

    def units(self) -> list[OutputFile]:
        """Return the files of items."""
        return [OutputFile(path, self._plan(group).size) for path, group in self._parameters.items()]

    def write(self, unit: OutputFile, source: Weights, file: Path, advance: AdvanceProgress, threads: int = 1) -> str:
        """Write one file of items, and beside it what is in it; return its checksum."""
        group = {MODEL_PREFIX + parameter.name: parameter for parameter in self._parameters[unit.path]}
        plan = self._plan(self._parameters[unit.path])
        starts = [0, *accumulate(map(framed_item_bytes, plan.items))]
        spans: dict[int, ItemSpan] = {}
        with HashedFile(file) as made:

            def lay(number: int, item: WriteItem) -> None:
                with source.lent(group[item.name], item.offset, item.box, self._dtype) as box:
                    data, hasher = bytes_of(box), Hasher()
                    before, behind = frame_item(item, zlib.crc32(data))
                    for part in (before, data, behind):
                        hasher.update(part)
                    made.write(starts[number], before, data, behind)
                spans[number] = ItemSpan(starts[number], hasher.size, hasher.checksum)
                advance(item.size)

            run_in_threads((partial(lay, *each) for each in enumerate(plan.items)), threads)
            entry = FileEntry(Path(unit.path).name, starts[-1], made.checksum(starts[-1]))
        part = RankFileRecord(plan.digest, plan.items, tuple(spans[number] for number in range(len(plan.items))), entry)
        file.with_name(file.name + _RECORD_SUFFIX).write_bytes(part.to_bytes())
        return entry.checksum

    def finish(self, folder: Path, entries: Sequence[FileEntry]) -> None:
        """Write the tables of contents and the checkpoint's manifest, then `latest`."""
        store = LocalStore(folder)
        # The manifest is there once all tables are; a finish that was killed after it only tidies up.
        if store.head(f"{self._folder}/{MANIFEST}") is None:
            self._write_tables(store, [self._told(folder / path, group) for path, group in self._parameters.items()])
        store.put(f"{checkpoints_folder('')}/{LATEST}", LatestPointer(STEP, ATTEMPT, ATTEMPT).to_bytes())
        for path in self._parameters:
            store.delete(f"{path}{_RECORD_SUFFIX}")

    def _told(self, file: Path, group: Sequence[Parameter]) -> RankFileRecord:
        """What is in a unit; where the record did not reach the disk before a machine died, read from the unit."""
        plan = self._plan(group)
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            part = RankFileRecord.from_bytes(file.with_name(file.name + _RECORD_SUFFIX).read_bytes())
            if part.plan == plan.digest:
                return part
        whole, spans = Hasher(), []
        with file.open("rb") as handle:
            for item in plan.items:
                saved = handle.read(framed_item_bytes(item))
                spans.append(ItemSpan(whole.size, len(saved), checksum_of(saved)))
                whole.update(saved)
        return RankFileRecord(plan.digest, plan.items, tuple(spans), FileEntry(file.name, whole.size, whole.checksum))

    def _write_tables(self, store: LocalStore, parts: list[RankFileRecord]) -> None:
        tensors = assemble_index(parts)
        table = index_name(ATTEMPT)
        written = {table: index.encode_index(tensors), METADATA: dcp_metadata(tensors)}
        for name, data in written.items():
            store.put(f"{self._folder}/{name}", data)
        files = [part.file for part in parts]
        files += [FileEntry(name, len(data), checksum_of(data)) for name, data in written.items()]
        facts = {
            "format": FORMAT,
            "step": STEP,
            "attempt": ATTEMPT,
            "pieces": table,
            "tensors": {name: {"shape": list(each.shape), "dtype": each.dtype} for name, each in tensors.items()},
        }
        spec = {"model": self.config.model_dump(mode="json", by_alias=True, exclude_none=True)}
        Manifest.of(KIND, spec, files, facts).write(store, f"{self._folder}/{MANIFEST}")

    def _plan(self, group: Sequence[Parameter]) -> SavePlan:
        whole = {
            MODEL_PREFIX + each.name: TensorShard(
                each.shape, (0,) * len(each.shape), torch.empty(each.shape, dtype=self._dtype, device="meta")
            )
            for each in group
        }
        return make_save_plan(whole, BLOCK_BYTES)


def _group_by_file(config: ModelConfig, dtype: torch.dtype, unit_bytes: int) -> list[list[Parameter]]:
    groups: list[list[Parameter]] = [[]]
    filled = 0
    for parameter in parameters(config):
        size = parameter.size * dtype.itemsize
        if groups[-1] and filled + size > unit_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(parameter)
        filled += size
    return groups
