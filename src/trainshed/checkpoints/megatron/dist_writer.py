"""Megatron's `torch_dist`, written: a file per layer, one item per tensor, expert and block of rows.

Keys are stacked over layers, as Megatron's own are; since an item is any box of its tensor, a layer's items lie in
that layer's file. Where each lies follows from its shape alone, so the table of contents needs no look at the files.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from trainshed.checkpoints.framing import Framing
from trainshed.checkpoints.hashed_file import HashedFile, in_threads
from trainshed.checkpoints.megatron.args import Layout, to_args
from trainshed.checkpoints.megatron.blocks import Laying, Share, rows_at_once
from trainshed.checkpoints.megatron.patches import LATEST, RELEASE
from trainshed.checkpoints.pt_frame import PtFrame, Stub
from trainshed.checkpoints.weights import Advance, Unit, Weights
from trainshed.errors import CorruptData
from trainshed.models.megatron_tensors import (
    LAYERS,
    MegatronTensor,
    Spec,
    expert_linear,
    extra_state_modules,
    layer_groups,
    layer_name,
    outside_name,
    padded_vocab_size,
    whole_tensors,
)
from trainshed.models.parameters import Parameter
from trainshed.recipe import ModelConfig
from trainshed.storage import FileEntry

# What megatron-core 0.16 writes; later versions read it too, and common.pt with it.
_BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
ITEM_BYTES = 64 * 1024 * 1024
"""The most that lies in one item."""
_DCP_VERSION = "1.0.0"  # torch/distributed/checkpoint/filesystem.py, CURRENT_DCP_VERSION


@dataclass(frozen=True)
class _Item:
    """A box of a stacked tensor; `rows` are the native rows it comes from, every `step`-th from `part` on."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    box: tuple[int, ...]
    tensor: MegatronTensor
    rows: tuple[int, int]
    part: int = 0
    step: int = 1


class MegatronDistWriter:
    """A `torch_dist` checkpoint for any layout, as iteration `release`.

    `spec` is who will load it (`--transformer-impl`): it matters to models with experts. The vocabulary is padded to a
    multiple of `vocab_divisible_by`; Megatron loads it into another padding as well.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, spec: Spec = "te", vocab_divisible_by: int = 128
    ) -> None:
        self.config = config
        self._dtype = dtype
        self._spec: Spec = spec
        self._padded = padded_vocab_size(config.vocab_size, vocab_divisible_by, 1)
        self._args = to_args(
            config,
            layout=Layout(),
            spec=spec,
            experts="grouped",
            dtype=dtype,
            padded_vocab_size=self._padded,
            vocab_divisible_by=vocab_divisible_by,
            checkpoint_format="torch_dist",
        )
        groups = layer_groups(config)
        before = [each for each in groups[None] if each.name in ("embedding.weight", "positions.weight")]
        after = [each for each in groups[None] if each not in before]
        parts = [before, *(groups[layer] for layer in range(config.layers)), after]
        self._files: dict[str, list[Parameter]] = {f"__0_{number}.distcp": part for number, part in enumerate(parts)}

    def units(self) -> list[Unit]:
        """Return the files: what stands before the layers, each layer, what stands behind."""
        return [Unit(f"{RELEASE}/{name}", self._size(name)) for name in self._files]

    def write(self, unit: Unit, source: Weights, file: Path, advance: Advance, threads: int = 1) -> str:
        """Write one file; return its checksum."""
        name = unit.path.rpartition("/")[2]
        with HashedFile(file) as made:
            in_threads(self._jobs(name, made, Laying(source, self._dtype, advance)), threads)
            size = self._size(name)
            states = b"".join(_empty_state() for _ in self._objects(name))
            made.write(size - len(states), states)
            return made.checksum(size)

    def _jobs(self, name: str, made: HashedFile, laying: Laying) -> Iterator[Callable[[], None]]:
        """The jobs that lay the items into a file; gate and up rows come together and go to an item each."""
        base, shares = 0, []
        for item in self._items(name):
            frame = _frame(item.box, self._dtype)
            put = partial(Framing(frame, made, base).write, 0)
            base += frame.length
            if item.rows[0] == item.rows[1]:
                yield partial(laying.zeros, item.box, put)
                continue
            shares.append(Share(put, item.part, item.step))
            if item.part + 1 == item.step:
                yield from laying.rows(item.tensor, *item.rows, shares)
                shares = []

    def finish(self, folder: Path, entries: Sequence[FileEntry]) -> None:
        """Write the table of contents, the arguments and what names the iteration."""
        sizes = {entry.path: entry.size for entry in entries}
        for name in self._files:
            path = f"{RELEASE}/{name}"
            if sizes.get(path, self._size(name)) != self._size(name):
                raise CorruptData(f"has {sizes[path]} bytes, not {self._size(name)}", where=path, hint="write it again")
        target = folder / RELEASE
        target.mkdir(parents=True, exist_ok=True)
        common = {"args": self._args, "checkpoint_version": 3.0, "iteration": 0}
        (target / "common.pt").write_bytes(PtFrame(common).to_bytes())
        (target / "metadata.json").write_text(json.dumps(_BACKEND))
        (target / ".metadata").write_bytes(self._metadata())
        (folder / LATEST).write_text(RELEASE)

    def _size(self, name: str) -> int:
        items = sum(_frame(item.box, self._dtype).length for item in self._items(name))
        return items + len(_empty_state()) * sum(1 for _ in self._objects(name))

    def _items(self, name: str) -> Iterator[_Item]:
        for parameter in self._files[name]:
            for tensor in whole_tensors(self.config, parameter, self._padded):
                yield from self._cut(tensor)

    def _cut(self, tensor: MegatronTensor) -> Iterator[_Item]:
        """Cut a tensor into items: blocks of rows; of a gated one, a block of gate rows and one of up rows."""
        key, lengths, lead = self._place(tensor)
        shape, columns = (*lengths, *tensor.shape), tensor.shape[1:]
        zeros, at_once, (_, real) = (0,) * len(columns), rows_at_once(tensor, self._dtype, ITEM_BYTES), tensor.rows
        step = 2 if tensor.gated else 1
        for first in range(0, real, at_once):
            last = min(first + at_once, real)
            for part in range(step):
                row = part * (real // 2) + first // step
                box = ((1,) * len(lead)) + ((last - first) // step, *columns)
                yield _Item(key, shape, (*lead, row, *zeros), box, tensor, (first, last), part, step)
        for first in range(real, real + tensor.padding, at_once):
            box = (min(at_once, real + tensor.padding - first), *columns)
            yield _Item(key, shape, (first, *zeros), box, tensor, (real, real))

    def _place(self, tensor: MegatronTensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Return the key, the lengths of the stacked dims and the index in them."""
        parameter, layers = tensor.parameter, self.config.layers
        if parameter.layer is None:
            return outside_name(parameter), (), ()
        if tensor.expert is not None:
            key = f"{LAYERS}mlp.experts.experts.{expert_linear(parameter)}.weight"
            return key, (layers, parameter.shape[0]), (parameter.layer, tensor.expert)
        key = LAYERS + layer_name(self.config, parameter, self._spec, stacked=True)
        return key, (layers,), (parameter.layer,)

    def _objects(self, name: str) -> Iterator[str]:
        """The keys of a file's empty states, which Megatron asks for when it loads strictly."""
        layer = self._files[name][0].layer
        if layer is None:
            if self._spec == "te" and self._files[name][0].name == "norm.weight":
                yield "decoder.final_layernorm._extra_state/shard_0_1"
            return
        layers = self.config.layers
        for module in extra_state_modules(self.config, self._spec):
            yield f"{LAYERS}{module}._extra_state/shard_{layer}_{layers}"
        experts = self.config.moe.experts if self.config.moe else 0
        for linear in ("linear_fc1", "linear_fc2"):
            for expert in range(experts):
                place = f"shard_{layer}.{expert}_{layers}.{experts}"
                yield f"{LAYERS}mlp.experts.experts.{linear}._extra_state/{place}"

    def _metadata(self) -> bytes:
        """The `.metadata` file as PyTorch's FileSystemReader expects it."""
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.metadata import (
            BytesStorageMetadata,
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            StorageMeta,
            TensorProperties,
            TensorStorageMetadata,
        )

        table: dict[str, Any] = {}
        storage: dict[MetadataIndex, Any] = {}
        for name in self._files:
            start = 0
            for item in self._items(name):
                length = _frame(item.box, self._dtype).length
                properties = TensorProperties(dtype=self._dtype)
                whole = table.setdefault(item.key, TensorStorageMetadata(properties, torch.Size(item.shape), []))
                index = MetadataIndex(item.key, item.offset, len(whole.chunks))
                whole.chunks.append(ChunkStorageMetadata(torch.Size(item.offset), torch.Size(item.box)))
                storage[index] = _StorageInfo(name, start, length)
                start += length
            for key in self._objects(name):
                table[key] = BytesStorageMetadata()
                storage[MetadataIndex(key)] = _StorageInfo(name, start, len(_empty_state()))
                start += len(_empty_state())
        metadata = Metadata(table, {key: (key,) for key in table}, storage, StorageMeta())
        metadata.version = _DCP_VERSION
        return pickle.dumps(metadata)


@cache
def _frame(shape: tuple[int, ...], dtype: torch.dtype) -> PtFrame:
    return PtFrame(Stub(shape, dtype))


@cache
def _empty_state() -> bytes:
    return PtFrame([None]).to_bytes()
