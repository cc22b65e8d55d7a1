"""Megatron's `torch_dist` format: one checkpoint for all layouts, in the format of torch.distributed.checkpoint.

`.metadata` says where each box of each tensor is stored: as a small torch.save file inside a `.distcp`. The arguments
are in `common.pt` (up to megatron-core 0.16) or among the entries (`common_state`, later).

We write a file per layer, and one item per tensor, expert and block of rows. Keys are stacked over layers, like
Megatron's own, unless only some of the layers have experts. An item may be any box of its tensor, so a layer's items
are all in that layer's file. The place of an item follows from shapes alone, so `.metadata` is computed without reading
the files.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from trainshed.checkpoints.io import HashedFile, run_in_threads
from trainshed.checkpoints.megatron.args import (
    MegatronLayout,
    computed_args,
    has_zero_centered_norms,
    read_args,
    to_args,
)
from trainshed.checkpoints.megatron.iterations import LATEST_ITERATION, RELEASE, iteration_folder
from trainshed.checkpoints.megatron.weights import (
    READ_DTYPES,
    FullTensor,
    MegatronWeights,
    RowCopier,
    RowShare,
    StoredMatrix,
    StoredRegion,
    missing_file,
    refuse_mismatches,
    rows_per_block,
)
from trainshed.checkpoints.torch_save_reader import DTYPE_BYTES, PickledTensor, read_torch_save, restricted_unpickle
from trainshed.checkpoints.torch_save_writer import TensorPlaceholder, TorchSaveLayout, TorchSaveWriter
from trainshed.checkpoints.weights import AdvanceProgress, OutputFile, Weights, stored_dtype
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.models.megatron_tensors import (
    EMBEDDING_NAME,
    LAYER_PREFIX,
    LayerSpec,
    MegatronTensor,
    expert_linear,
    extra_state_modules,
    has_stacked_layers,
    layer_name,
    layer_name_variants,
    layer_prefix,
    mtp_extra_state_modules,
    non_layer_name,
    padded_vocab_size,
    parameters_by_layer,
    whole_tensors,
)
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig
from trainshed.storage import FileEntry

METADATA = ".metadata"
COMMON = "common.pt"
COMMON_KEY = "common_state/shard_0_1"
_OPTIMIZER = re.compile(r"(^|\.)(optimizer|chained_\d+)\.")
# The biases of experts' scores are float32 in every checkpoint (`Parameter.buffer`).
_NOT_WEIGHTS = re.compile(rf"{_OPTIMIZER.pattern}|\.expert_bias$")


@dataclass(frozen=True)
class _StoredItem:
    """Bytes [start, start + length) of a file: a box of a tensor, or something pickled."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    length: int


@dataclass(frozen=True)
class _StoredTensor:
    """One tensor of the checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    items: list[_StoredItem]


@dataclass(frozen=True)
class _TensorLocation:
    """Where a full tensor of Megatron's, or `rows` of it from `row` on, is stored: under `key`.

    The tensor of this key may be stacked over layers and experts: these leading dims have `lengths`, and `lead` is the
    index in them.
    """

    key: str
    lead: tuple[int, ...]
    lengths: tuple[int, ...]
    row: int
    rows: int


class MegatronDistWeights(MegatronWeights):
    """The weights in a `torch_dist` checkpoint: its root, or the folder of one iteration.

    `config` replaces the architecture in its args; `vocab_size` is the true one, needed where the args do not hold it.
    """

    def __init__(self, folder: Path, *, config: ModelConfig | None = None, vocab_size: int | None = None) -> None:
        self.folder = iteration_folder(folder)
        where = str(self.folder)
        entries, objects = _read_metadata(self.folder)
        args = _read_common(self.folder, objects)
        if config is None and args is None:
            raise InputError("its common state has no `args`", where=where, hint="give the architecture with it")
        self.args = args
        config = config or read_args(computed_args(args or Namespace()), where, vocab_size)
        self.layout = MegatronLayout()
        regions = _match_tensors(config, entries, where)
        self.padded_vocab_size = entries[EMBEDDING_NAME].shape[0]
        dtypes = [entry.dtype for key, entry in entries.items() if not _NOT_WEIGHTS.search(key)]
        super().__init__(config, regions, dtypes, has_zero_centered_norms(args))


def _read_metadata(folder: Path) -> tuple[dict[str, _StoredTensor], dict[str, _StoredItem]]:
    """Return the tensors and the pickled objects of a checkpoint."""
    path = folder / METADATA
    if not path.is_file():
        raise NotFound(f"there is no {METADATA}", where=str(folder), hint="name a torch_dist checkpoint of Megatron's")
    document = restricted_unpickle(path.read_bytes(), str(path))
    try:
        tensors, objects = {}, {}
        for key, metadata in document["state_dict_metadata"].items():
            if metadata.class_name.endswith(".TensorStorageMetadata"):
                tensors[key] = _StoredTensor(tuple(metadata["size"]), metadata["properties"].state[0], [])
        sizes = {key: _chunk_sizes(document["state_dict_metadata"][key]) for key in tensors}
        for index, info in document["storage_data"].items():
            key, file = index["fqn"], folder / info["relative_path"]
            if key not in tensors:
                objects[key] = _StoredItem((), (), file, info["offset"], info["length"])
                continue
            offset = tuple(index["offset"]) if index.state.get("offset") is not None else (0,) * len(tensors[key].shape)
            tensors[key].items.append(_StoredItem(offset, sizes[key][offset], file, info["offset"], info["length"]))
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise CorruptData(
            f"is not a table of a checkpoint: {error!r}", where=str(path), hint="fetch it again"
        ) from None
    for file in {item.file for tensor in tensors.values() for item in tensor.items}:
        if not file.is_file():
            raise missing_file(file)
    for key, tensor in tensors.items():
        if sum(math.prod(item.sizes) for item in tensor.items) != math.prod(tensor.shape):
            raise CorruptData(f"`{key}` is not covered by its parts", where=str(path), hint="fetch it again")
    return tensors, objects


def _chunk_sizes(metadata: Any) -> dict[tuple[int, ...], tuple[int, ...]]:
    return {tuple(chunk["offsets"]): tuple(chunk["sizes"]) for chunk in metadata["chunks"]}


def _read_common(folder: Path, objects: dict[str, _StoredItem]) -> Namespace | None:
    """Return the arguments of whoever wrote the checkpoint."""
    if COMMON_KEY in objects:
        item = objects[COMMON_KEY]
        (common,) = read_torch_save(item.file, item.start, item.length).document
    elif (folder / COMMON).is_file():
        common = read_torch_save(folder / COMMON).document
    else:
        return None
    return common.get("args") if isinstance(common, dict) else None


def _match_tensors(
    config: ModelConfig, entries: dict[str, _StoredTensor], where: str
) -> dict[FullTensor, list[StoredRegion]]:
    """Find every tensor of an architecture, or raise: missing, left over, or of another shape or dtype."""
    regions_of: dict[FullTensor, list[StoredRegion]] = {}
    missing, wrong, read = [], {}, set()
    locator = _Locator()
    by_lead = cache(lambda key, depth: _by_lead(entries[key], depth))
    for parameter in parameters(config):
        for expert in range(parameter.shape[0]) if parameter.expert else (None,):
            locations = _find_tensor(config, parameter, expert, entries)
            if not locations:
                missing.append(parameter.name + ("" if expert is None else f" of expert {expert}"))
            for location in locations:
                read.add(location.key)
                wrong |= _mismatch(parameter, location, entries[location.key])
                if not wrong:
                    regions = _regions(location, by_lead(location.key, len(location.lead)), locator)
                    regions_of.setdefault((parameter.name, expert), []).extend(regions)
    extra = sorted(key for key in entries if key not in read and not _OPTIMIZER.search(key))
    refuse_mismatches(missing, extra, list(wrong.values()), where)
    return regions_of


def _find_tensor(
    config: ModelConfig, parameter: Parameter, expert: int | None, entries: dict[str, _StoredTensor]
) -> list[_TensorLocation]:
    """Return the key under which a tensor is stored, or the two keys of gate and up; versions have several names."""
    rows = parameter.shape[1 if parameter.expert else 0]
    if parameter.layer is None:
        key = non_layer_name(parameter)
        return [_TensorLocation(key, (), (), 0, rows)] if key in entries else []
    forms: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [(layer_prefix(config, parameter), (), ())]
    if parameter.layer < config.layers:
        forms.insert(0, (LAYER_PREFIX, (parameter.layer,), (config.layers,)))
    for (spelling, lead, lengths), (prefix, layer, layers) in itertools.product(_spellings(parameter, expert), forms):
        key, lead, lengths = prefix + spelling, layer + lead, layers + lengths
        if key in entries:
            return [_TensorLocation(key, lead, lengths, 0, rows)]
        if f"{key}_w" in entries and f"{key}_v" in entries:
            half = rows // 2
            return [_TensorLocation(f"{key}_{part}", lead, lengths, row, half) for part, row in (("w", 0), ("v", half))]
    return []


def _spellings(parameter: Parameter, expert: int | None) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    if expert is None:
        for spelling in layer_name_variants(parameter):
            yield spelling, (), ()
        return
    linear = expert_linear(parameter)
    yield f"mlp.experts.experts.{linear}.weight", (expert,), (parameter.shape[0],)
    yield f"mlp.experts.experts.{expert}.{linear}.weight", (), ()


def _mismatch(parameter: Parameter, location: _TensorLocation, entry: _StoredTensor) -> dict[str, str]:
    wanted = (*location.lengths, location.rows, *parameter.shape[2 if parameter.expert else 1 :])
    padded = parameter.name in ("embedding.weight", "head.weight")
    same = entry.shape == wanted or (padded and entry.shape[1:] == wanted[1:] and entry.shape[0] >= location.rows)
    if not same:
        return {location.key: f"`{location.key}` is {list(entry.shape)}, not {list(wanted)}"}
    return {} if entry.dtype in READ_DTYPES else {location.key: f"`{location.key}` is {entry.dtype}"}


def _by_lead(entry: _StoredTensor, depth: int) -> dict[tuple[int, ...], list[tuple[_StoredItem, int]]]:
    """Return all items by their index in the leading dims, each with the number of this index inside the item."""
    items: dict[tuple[int, ...], list[tuple[_StoredItem, int]]] = defaultdict(list)
    for item in entry.items:
        ranges = [range(start, start + length) for start, length in zip(item.offset[:depth], item.sizes, strict=False)]
        for number, lead in enumerate(itertools.product(*ranges)):
            items[lead].append((item, number))
    return items


def _regions(
    location: _TensorLocation, items: dict[tuple[int, ...], list[tuple[_StoredItem, int]]], locator: _Locator
) -> Iterator[StoredRegion]:
    depth = len(location.lead)
    for item, number in items[location.lead]:
        row, column = (*item.offset[depth:], 0)[:2]
        rows, columns = (*item.sizes[depth:], 1)[:2]
        locate = partial(locator.locate, item, number, rows, columns)
        yield StoredRegion(locate, location.row + row, column, rows, columns)


class _Locator:
    """Finds the bytes of items' tensors, each when it is first needed: there may be hundreds of thousands."""

    def __init__(self) -> None:
        self._starts: dict[_StoredItem, tuple[int, str]] = {}

    def locate(self, item: _StoredItem, number: int, rows: int, columns: int) -> StoredMatrix:
        """Return the matrix with this number in an item."""
        if item not in self._starts:
            self._starts[item] = self._data_start(item)
        start, dtype = self._starts[item]
        return StoredMatrix(item.file, start + number * rows * columns * DTYPE_BYTES[dtype], dtype, rows, columns)

    def _data_start(self, item: _StoredItem) -> tuple[int, str]:
        opened = read_torch_save(item.file, item.start, item.length)
        tensor = opened.document
        if not isinstance(tensor, PickledTensor) or tensor.shape != item.sizes or tensor.storage not in opened.storages:
            raise CorruptData(f"has no tensor of {list(item.sizes)} at {item.start}", where=str(item.file))
        return opened.storages[tensor.storage] + tensor.storage_offset * DTYPE_BYTES[tensor.dtype], tensor.dtype


# What megatron-core 0.16 writes; later versions read it too, together with common.pt.
_BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
ITEM_BYTES = 64 * 1024 * 1024
"""The largest item."""


@dataclass(frozen=True)
class _WriteItem:
    """A box of a stacked tensor; it holds every `stride`-th of the native rows `rows`, from `first` on."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: MegatronTensor
    rows: tuple[int, int]
    first: int = 0
    stride: int = 1


class MegatronDistWriter:
    """Writes a `torch_dist` checkpoint for any layout, as iteration `release`.

    `spec` says how Megatron will load it (`--transformer-impl`); it matters to models with experts. The vocabulary is
    padded to a multiple of `vocab_divisible_by`; Megatron also loads it with another padding.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, spec: LayerSpec = "te", vocab_divisible_by: int = 128
    ) -> None:
        self.config = config
        self._dtype = dtype
        self._spec: LayerSpec = spec
        self._padded = padded_vocab_size(config.vocab_size, vocab_divisible_by, 1)
        self._args = to_args(
            config,
            layout=MegatronLayout(),
            spec=spec,
            experts="grouped",
            dtype=dtype,
            padded_vocab_size=self._padded,
            vocab_divisible_by=vocab_divisible_by,
            checkpoint_format="torch_dist",
        )
        groups = parameters_by_layer(config)
        before = [parameter for parameter in groups[None] if parameter.name in ("embedding.weight", "positions.weight")]
        after = [parameter for parameter in groups[None] if parameter not in before]
        by_file = [before, *(groups[layer] for layer in range(config.layers + config.mtp_layers)), after]
        self._files: dict[str, list[Parameter]] = {
            f"__0_{number}.distcp": group for number, group in enumerate(by_file)
        }

    def output_files(self) -> list[OutputFile]:
        """Return the files: one for what comes before the layers, one for each layer, one for what comes after."""
        return [OutputFile(f"{RELEASE}/{name}", self._size(name)) for name in self._files]

    def write(self, output: OutputFile, source: Weights, file: Path, advance: AdvanceProgress, threads: int = 1) -> str:
        """Write one file; return its checksum."""
        name = output.path.rpartition("/")[2]
        with HashedFile(file) as hashed:
            run_in_threads(self._jobs(name, hashed, RowCopier(source, self._dtype, advance)), threads)
            size = self._size(name)
            states = b"".join(_empty_state() for _ in self._extra_state_keys(name))
            hashed.write(size - len(states), states)
            return hashed.checksum(size)

    def _jobs(self, name: str, hashed: HashedFile, copier: RowCopier) -> Iterator[Callable[[], None]]:
        """Yield the jobs that write the items of a file; gate and up rows are read together and go to two items."""
        offset, shares = 0, []
        for item in self._items(name):
            layout = self._item_layout(item)
            write = partial(TorchSaveWriter(layout, hashed, offset).write, 0)
            offset += layout.length
            if item.rows[0] == item.rows[1]:
                yield partial(copier.write_zeros, item.sizes, write)
                continue
            shares.append(RowShare(write, item.first, item.stride))
            if item.first + 1 == item.stride:
                yield from copier.row_jobs(item.tensor, *item.rows, shares)
                shares = []

    def finish(self, folder: Path, entries: Sequence[FileEntry]) -> None:
        """Write `.metadata`, the arguments and the pointer to the iteration."""
        sizes = {entry.path: entry.size for entry in entries}
        for name in self._files:
            path = f"{RELEASE}/{name}"
            if sizes.get(path, self._size(name)) != self._size(name):
                raise CorruptData(f"has {sizes[path]} bytes, not {self._size(name)}", where=path, hint="write it again")
        target = folder / RELEASE
        target.mkdir(parents=True, exist_ok=True)
        common = {"args": self._args, "checkpoint_version": 3.0, "iteration": 0}
        torch.save(common, target / COMMON)
        (target / "metadata.json").write_text(json.dumps(_BACKEND))
        (target / METADATA).write_bytes(self._metadata())
        (folder / LATEST_ITERATION).write_text(RELEASE)

    def _size(self, name: str) -> int:
        items = sum(self._item_layout(item).length for item in self._items(name))
        return items + len(_empty_state()) * sum(1 for _ in self._extra_state_keys(name))

    def _item_layout(self, item: _WriteItem) -> TorchSaveLayout:
        return _item_layout(item.sizes, stored_dtype(item.tensor.parameter, self._dtype))

    def _items(self, name: str) -> Iterator[_WriteItem]:
        for parameter in self._files[name]:
            for tensor in whole_tensors(self.config, parameter, self._padded):
                yield from self._split(tensor)

    def _split(self, tensor: MegatronTensor) -> Iterator[_WriteItem]:
        """Split a tensor into items: blocks of rows; of a gated one, a block of gate rows and one of up rows."""
        key, lengths, lead = self._stacked_place(tensor)
        shape, columns = (*lengths, *tensor.shape), tensor.shape[1:]
        zeros, at_once, (_, real) = (0,) * len(columns), rows_per_block(tensor, self._dtype, ITEM_BYTES), tensor.rows
        step = 2 if tensor.gated else 1
        for first in range(0, real, at_once):
            last = min(first + at_once, real)
            for part in range(step):
                row = part * (real // 2) + first // step
                box = ((1,) * len(lead)) + ((last - first) // step, *columns)
                yield _WriteItem(key, shape, (*lead, row, *zeros), box, tensor, (first, last), part, step)
        for first in range(real, real + tensor.padding, at_once):
            box = (min(at_once, real + tensor.padding - first), *columns)
            yield _WriteItem(key, shape, (first, *zeros), box, tensor, (real, real))

    def _stacked_place(self, tensor: MegatronTensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Return the key, the lengths of the stacked dims and the index in them."""
        parameter, config = tensor.parameter, self.config
        if parameter.layer is None:
            return non_layer_name(parameter), (), ()
        stacked = self._is_stacked(parameter.layer)
        prefix = LAYER_PREFIX if stacked else layer_prefix(config, parameter)
        lengths, lead = ((config.layers,), (parameter.layer,)) if stacked else ((), ())
        if tensor.expert is not None:
            key = f"{prefix}mlp.experts.experts.{expert_linear(parameter)}.weight"
            return key, (*lengths, parameter.shape[0]), (*lead, tensor.expert)
        return prefix + layer_name(config, parameter, self._spec, stacked=stacked), lengths, lead

    def _is_stacked(self, layer: int) -> bool:
        return has_stacked_layers(self.config) and layer < self.config.layers

    def _extra_state_keys(self, name: str) -> Iterator[str]:
        """Yield the keys of a file's empty extra states, which Megatron needs when it loads strictly."""
        first, config = self._files[name][0], self.config
        layer = first.layer
        if layer is None:
            if self._spec == "te" and first.name == "norm.weight":
                yield "decoder.final_layernorm._extra_state/shard_0_1"
            return
        stacked = self._is_stacked(layer)
        layer_place = f"shard_{layer}_{config.layers}" if stacked else "shard_0_1"
        if layer >= config.layers:
            # The first tensor of its file is one that only such a layer has.
            for module in mtp_extra_state_modules(self._spec):
                yield f"{layer_prefix(config, first)}{module}._extra_state/{layer_place}"
        prefix = LAYER_PREFIX if stacked else layer_prefix(config, self._files[name][-1])
        for module in extra_state_modules(config, self._spec, layer):
            yield f"{prefix}{module}._extra_state/{layer_place}"
        experts = config.moe.experts if config.moe and config.has_experts(layer) else 0
        for linear in ("linear_fc1", "linear_fc2"):
            for expert in range(experts):
                place = f"{layer}.{expert}_{config.layers}.{experts}" if stacked else f"{expert}_{experts}"
                yield f"{prefix}mlp.experts.experts.{linear}._extra_state/shard_{place}"

    def _metadata(self) -> bytes:
        from trainshed.checkpoints.dcp import DcpMetadataBuilder

        builder = DcpMetadataBuilder()
        for name in self._files:
            start = 0
            for item in self._items(name):
                length = self._item_layout(item).length
                builder.add_tensor(item.key, item.shape, stored_dtype(item.tensor.parameter, self._dtype))
                builder.add_chunk(item.key, item.offset, item.sizes, name, start, length)
                start += length
            for key in self._extra_state_keys(name):
                builder.add_object(key, name, start, len(_empty_state()))
                start += len(_empty_state())
        return builder.to_bytes()


@cache
def _item_layout(shape: tuple[int, ...], dtype: torch.dtype) -> TorchSaveLayout:
    return TorchSaveLayout(TensorPlaceholder(shape, dtype))


@cache
def _empty_state() -> bytes:
    file = io.BytesIO()
    torch.save([None], file)
    return file.getvalue()
