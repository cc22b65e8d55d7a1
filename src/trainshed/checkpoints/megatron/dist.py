"""Megatron's `torch_dist`, read: one checkpoint for all layouts, in the format of torch.distributed.checkpoint.

`.metadata` says which boxes of which tensors lie where; each is a little file of torch.save inside a `.distcp`. The
arguments are in `common.pt` (up to megatron-core 0.16) or among the entries (`common_state`, later).
"""

from __future__ import annotations

import itertools
import math
import re
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from trainshed.checkpoints.megatron.args import Layout, norm_weights_less_one, read_args
from trainshed.checkpoints.megatron.dist_writer import MegatronDistWriter as MegatronDistWriter
from trainshed.checkpoints.megatron.patches import (
    READ_DTYPES,
    Located,
    Patch,
    PatchedWeights,
    Whole,
    iteration_folder,
    missing_file,
    refuse_misfits,
)
from trainshed.checkpoints.megatron.pickled import DTYPE_BYTES, PickledTensor, unpickle
from trainshed.checkpoints.megatron.pt_file import open_pt
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.models.megatron_tensors import EMBEDDING, LAYERS, expert_linear, layer_spellings, outside_name
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig

METADATA = ".metadata"
COMMON = "common.pt"
COMMON_KEY = "common_state/shard_0_1"
_OPTIMIZER = re.compile(r"(^|\.)(optimizer|chained_\d+)\.")


@dataclass(frozen=True)
class _Item:
    """Bytes [start, start + length) of a file: a box of a tensor, or something pickled."""

    offset: tuple[int, ...]
    box: tuple[int, ...]
    file: Path
    start: int
    length: int


@dataclass(frozen=True)
class _Entry:
    """One tensor of the checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    items: list[_Item]


@dataclass(frozen=True)
class _Found:
    """Where one of Megatron's uncut tensors is, or `rows` of it from `row` on: under a key, which may stack layers and
    experts of `lengths`, at the index `lead` of these.
    """

    key: str
    lead: tuple[int, ...]
    lengths: tuple[int, ...]
    row: int
    rows: int


class MegatronDistWeights(PatchedWeights):
    """The weights in a `torch_dist` checkpoint: its root, or the folder of one iteration.

    `config` is what its args describe, unless it is given; `vocab_size` is the true one, needed where they do not say.
    """

    def __init__(self, folder: Path, *, config: ModelConfig | None = None, vocab_size: int | None = None) -> None:
        self.folder = iteration_folder(folder)
        where = str(self.folder)
        entries, objects = _read_metadata(self.folder)
        args = _read_common(self.folder, objects)
        if config is None and args is None:
            raise InputError("its common state has no `args`", where=where, hint="give the architecture with it")
        self.args = args
        config = config or read_args(args or Namespace(), where, vocab_size)
        self.layout = Layout()
        patches = _matched(config, entries, where)
        self.padded_vocab_size = entries[EMBEDDING].shape[0]
        dtypes = [entry.dtype for key, entry in entries.items() if not _OPTIMIZER.search(key)]
        super().__init__(config, patches, dtypes, norm_weights_less_one(args))


def _read_metadata(folder: Path) -> tuple[dict[str, _Entry], dict[str, _Item]]:
    """Return the tensors and the pickled objects of a checkpoint."""
    path = folder / METADATA
    if not path.is_file():
        raise NotFound(f"there is no {METADATA}", where=str(folder), hint="name a torch_dist checkpoint of Megatron's")
    document = unpickle(path.read_bytes(), str(path))
    try:
        tensors, objects = {}, {}
        for key, told in document["state_dict_metadata"].items():
            if told.kind.endswith(".TensorStorageMetadata"):
                tensors[key] = _Entry(tuple(told["size"]), told["properties"].state[0], [])
        boxes = {key: _boxes(document["state_dict_metadata"][key]) for key in tensors}
        for index, info in document["storage_data"].items():
            key, file = index["fqn"], folder / info["relative_path"]
            if key not in tensors:
                objects[key] = _Item((), (), file, info["offset"], info["length"])
                continue
            offset = tuple(index["offset"]) if index.state.get("offset") is not None else (0,) * len(tensors[key].shape)
            tensors[key].items.append(_Item(offset, boxes[key][offset], file, info["offset"], info["length"]))
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise CorruptData(f"is no table of a checkpoint: {error!r}", where=str(path), hint="fetch it again") from None
    for file in {item.file for entry in tensors.values() for item in entry.items}:
        if not file.is_file():
            raise missing_file(file)
    for key, entry in tensors.items():
        if sum(math.prod(item.box) for item in entry.items) != math.prod(entry.shape):
            raise CorruptData(f"`{key}` is not covered by its parts", where=str(path), hint="fetch it again")
    return tensors, objects


def _boxes(told: Any) -> dict[tuple[int, ...], tuple[int, ...]]:
    return {tuple(chunk["offsets"]): tuple(chunk["sizes"]) for chunk in told["chunks"]}


def _read_common(folder: Path, objects: dict[str, _Item]) -> Namespace | None:
    """Return the arguments of whoever wrote the checkpoint."""
    if COMMON_KEY in objects:
        item = objects[COMMON_KEY]
        (common,) = open_pt(item.file, item.start, item.length).document
    elif (folder / COMMON).is_file():
        common = open_pt(folder / COMMON).document
    else:
        return None
    return common.get("args") if isinstance(common, dict) else None


def _matched(config: ModelConfig, entries: dict[str, _Entry], where: str) -> dict[Whole, list[Patch]]:
    """Find every tensor of an architecture, or say what is missing, left over or of another kind."""
    patches: dict[Whole, list[Patch]] = {}
    missing, wrong, read = [], {}, set()
    locator = _Locator()
    by_lead = cache(lambda key, depth: _by_lead(entries[key], depth))
    for parameter in parameters(config):
        for expert in range(parameter.shape[0]) if parameter.expert else (None,):
            founds = _find(config, parameter, expert, entries)
            if not founds:
                missing.append(parameter.name + ("" if expert is None else f" of expert {expert}"))
            for found in founds:
                read.add(found.key)
                wrong |= _misfit(parameter, found, entries[found.key])
                if not wrong:
                    made = _patches(found, by_lead(found.key, len(found.lead)), locator)
                    patches.setdefault((parameter.name, expert), []).extend(made)
    extra = sorted(key for key in entries if key not in read and not _OPTIMIZER.search(key))
    refuse_misfits(missing, extra, list(wrong.values()), where)
    return patches


def _find(config: ModelConfig, parameter: Parameter, expert: int | None, entries: dict[str, _Entry]) -> list[_Found]:
    """Return the key, or the two of gate and up, under which a tensor is stored, whichever way it is spelled."""
    rows = parameter.shape[1 if parameter.expert else 0]
    if parameter.layer is None:
        key = outside_name(parameter)
        return [_Found(key, (), (), 0, rows)] if key in entries else []
    forms = ((LAYERS, (parameter.layer,), (config.layers,)), (f"{LAYERS}{parameter.layer}.", (), ()))
    for (spelling, lead, lengths), (prefix, layer, layers) in itertools.product(_spellings(parameter, expert), forms):
        key, lead, lengths = prefix + spelling, layer + lead, layers + lengths
        if key in entries:
            return [_Found(key, lead, lengths, 0, rows)]
        if f"{key}_w" in entries and f"{key}_v" in entries:
            half = rows // 2
            return [_Found(f"{key}_{part}", lead, lengths, row, half) for part, row in (("w", 0), ("v", half))]
    return []


def _spellings(parameter: Parameter, expert: int | None) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    if expert is None:
        for spelling in layer_spellings(parameter):
            yield spelling, (), ()
        return
    linear = expert_linear(parameter)
    yield f"mlp.experts.experts.{linear}.weight", (expert,), (parameter.shape[0],)
    yield f"mlp.experts.experts.{expert}.{linear}.weight", (), ()


def _misfit(parameter: Parameter, found: _Found, entry: _Entry) -> dict[str, str]:
    wanted = (*found.lengths, found.rows, *parameter.shape[2 if parameter.expert else 1 :])
    padded = parameter.name in ("embedding.weight", "head.weight")
    same = entry.shape == wanted or (padded and entry.shape[1:] == wanted[1:] and entry.shape[0] >= found.rows)
    if not same:
        return {found.key: f"`{found.key}` is {list(entry.shape)}, not {list(wanted)}"}
    return {} if entry.dtype in READ_DTYPES else {found.key: f"`{found.key}` is {entry.dtype}"}


def _by_lead(entry: _Entry, depth: int) -> dict[tuple[int, ...], list[tuple[_Item, int]]]:
    """All items by index of the leading dims, each with how many such indices it has before."""
    found: dict[tuple[int, ...], list[tuple[_Item, int]]] = defaultdict(list)
    for item in entry.items:
        ranges = [range(start, start + length) for start, length in zip(item.offset[:depth], item.box, strict=False)]
        for number, lead in enumerate(itertools.product(*ranges)):
            found[lead].append((item, number))
    return found


def _patches(
    found: _Found, items: dict[tuple[int, ...], list[tuple[_Item, int]]], locator: _Locator
) -> Iterator[Patch]:
    depth = len(found.lead)
    for item, number in items[found.lead]:
        row, column = (*item.offset[depth:], 0)[:2]
        rows, columns = (*item.box[depth:], 1)[:2]
        locate = partial(locator.locate, item, number, rows, columns)
        yield Patch(locate, found.row + row, column, rows, columns)


class _Locator:
    """Finds the bytes of items' tensors, each when it is first asked for: there may be hundreds of thousands."""

    def __init__(self) -> None:
        self._starts: dict[_Item, tuple[int, str]] = {}

    def locate(self, item: _Item, number: int, rows: int, columns: int) -> Located:
        """Return the matrix of this number in an item."""
        if item not in self._starts:
            self._starts[item] = self._data_start(item)
        start, dtype = self._starts[item]
        return Located(item.file, start + number * rows * columns * DTYPE_BYTES[dtype], dtype, rows, columns)

    def _data_start(self, item: _Item) -> tuple[int, str]:
        opened = open_pt(item.file, item.start, item.length)
        tensor = opened.document
        if not isinstance(tensor, PickledTensor) or tensor.shape != item.box or tensor.storage not in opened.storages:
            raise CorruptData(f"has no tensor of {list(item.box)} at {item.start}", where=str(item.file))
        return opened.storages[tensor.storage] + tensor.start * DTYPE_BYTES[tensor.dtype], tensor.dtype
