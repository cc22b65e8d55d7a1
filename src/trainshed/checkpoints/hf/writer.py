"""Weights written as transformers saves them: safetensors shards, their index, config.json and what goes with them.

Every shard's header is computed first, then native tensors are read once, in boxes of bounded size, and their rows go
to their places in the file. So a shard costs memory for one box, whatever its size.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainshed.checkpoints.converting.companions import COMPANIONS, token_ids
from trainshed.checkpoints.converting.following_hash import FollowingHash
from trainshed.checkpoints.hf.weights import CONFIG, DTYPES, INDEX, WEIGHTS
from trainshed.checkpoints.weights import Advance, Unit, Weights
from trainshed.errors import InputError
from trainshed.models.hf_config import config_differences, read_hf_config, to_hf_config
from trainshed.models.hf_tensors import HfTensor, Strip, hf_tensors
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig
from trainshed.storage import FileEntry

SHARD_BYTES = 5_000_000_000
"""The largest shard, as transformers 4 cuts them; a single tensor may be larger."""
GENERATION = "generation_config.json"
# Below what malloc maps anew each time: memory that was touched before is twice as fast.
_BOX_BYTES = 4 * 1024 * 1024
_THREADS = 2  # in one shard, so that a model of one file does not wait for its reading
_ALIGNMENT_BYTES = 8  # of a header's length, as the safetensors library pads it


@dataclass(frozen=True)
class _Shard:
    """One file: the tensors in it, where each begins, and the bytes before the first."""

    tensors: tuple[HfTensor, ...]
    header: bytes
    starts: Mapping[str, int]
    size: int


class HfWriter:
    """A model for transformers, in one dtype.

    `companions` are files by name (`companions.py`): tokenizer, chat template and generation settings are copied as
    they are; a config.json that describes this very architecture is kept, with the dtype put right.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        companions: Mapping[str, bytes] | None = None,
        shard_bytes: int | None = None,
    ) -> None:
        self.config = config
        self._dtype = dtype
        self._companions = dict(companions or {})
        self._config_json = _config_json(config, dtype, self._companions)
        self._shards = _shards(config, dtype, shard_bytes or SHARD_BYTES)

    def units(self) -> list[Unit]:
        """Return the shards."""
        return [Unit(name, shard.size) for name, shard in self._shards.items()]

    def write(self, unit: Unit, source: Weights, file: Path, advance: Advance) -> str:
        """Write one shard; return its checksum."""
        shard = self._shards[unit.path]
        strips: dict[str, list[Strip]] = defaultdict(list)
        for tensor in shard.tensors:
            for strip in tensor.strips:
                strips[strip.native_name].append(strip)
        with file.open("wb", buffering=0) as handle, FollowingHash(file) as following:
            handle.truncate(shard.size)
            _write_at(handle.fileno(), shard.header, 0)
            advance(len(shard.header))

            def lay(parameter: Parameter) -> int:
                """Write all that one native tensor becomes here; return where that ends."""
                mine, end = strips[parameter.name], 0
                cut = _transposed if mine[0].transposed else _rows
                for start, block in cut(parameter, mine, shard.starts, source, self._dtype):
                    data = _bytes(block)
                    _write_at(handle.fileno(), data, start)
                    advance(len(data))
                    end = max(end, start + len(data))
                return end

            wanted = [parameter for parameter in parameters(self.config) if parameter.name in strips]
            pool = ThreadPoolExecutor(_THREADS, "trainshed-shard", initializer=partial(torch.set_num_threads, 1))
            try:
                # What comes of one native tensor lies side by side, so everything before its end is written.
                for end in pool.map(lay, wanted):
                    following.final_until(end)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
            return following.sha256()

    def finish(self, folder: Path, entries: Sequence[FileEntry]) -> None:
        """Write the index, config.json, generation settings and the tokenizer's files."""
        del entries
        if len(self._shards) > 1:
            shards = self._shards.items()
            total = sum(math.prod(each.shape) for shard in self._shards.values() for each in shard.tensors)
            index = {
                "metadata": {"total_parameters": total, "total_size": total * self._dtype.itemsize},
                "weight_map": {tensor.name: name for name, shard in shards for tensor in shard.tensors},
            }
            _write_json(folder / INDEX, index)
        _write_json(folder / CONFIG, self._config_json)
        for name, data in self._companions.items():
            if name in COMPANIONS and name != CONFIG:
                (folder / name).write_bytes(data)
        ids = {key: value for key, value in self._config_json.items() if key.endswith("_token_id")}
        if GENERATION not in self._companions and ids:
            # What transformers itself saves for a model that came without one.
            _write_json(folder / GENERATION, {"_from_model_config": True, **ids})


def _shards(config: ModelConfig, dtype: torch.dtype, shard_bytes: int) -> dict[str, _Shard]:
    """Fill one shard after the other, in our order of tensors."""
    groups: list[list[HfTensor]] = [[]]
    filled = 0
    for tensor in hf_tensors(config):
        size = math.prod(tensor.shape) * dtype.itemsize
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    if len(groups) == 1:
        return {WEIGHTS: _shard(groups[0], dtype)}
    stem = WEIGHTS.removesuffix(".safetensors")
    return {
        f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors": _shard(group, dtype)
        for number, group in enumerate(groups, start=1)
    }


def _shard(tensors: list[HfTensor], dtype: torch.dtype) -> _Shard:
    name = next((theirs for theirs, ours in DTYPES.items() if getattr(torch, ours) == dtype), None)
    if name is None:
        raise InputError(f"weights are not exported as {dtype}", hint=f"write one of {', '.join(DTYPES.values())}")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + math.prod(tensor.shape) * dtype.itemsize
        header[tensor.name] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    data = 8 + len(text)
    starts = {tensor.name: data + header[tensor.name]["data_offsets"][0] for tensor in tensors}
    return _Shard(tuple(tensors), len(text).to_bytes(8, "little") + text, starts, data + end)


def _rows(
    parameter: Parameter, strips: list[Strip], starts: Mapping[str, int], source: Weights, dtype: torch.dtype
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (place in the file, rows) of tensors that lie as ours do, row by row."""
    dim = 1 if parameter.expert else 0
    columns = parameter.shape[dim + 1 :]
    row_bytes = math.prod(columns) * dtype.itemsize
    rows = max(1, _BOX_BYTES // row_bytes)
    for expert in dict.fromkeys(strip.expert for strip in strips):
        mine = [strip for strip in strips if strip.expert == expert]
        for first in range(0, parameter.shape[dim], rows):
            last = min(first + rows, parameter.shape[dim])
            if not any(begin < end for begin, end in (strip.within(first, last) for strip in mine)):
                continue
            offset, shape = (first, *(0 for _ in columns)), (last - first, *columns)
            if expert is None:
                box = source.read(parameter, offset, shape, dtype)
            else:
                box = source.read(parameter, (expert, *offset), (1, *shape), dtype)[0]
            for strip in mine:
                begin, end = strip.within(first, last)
                if begin < end:
                    there = strip.native_rows(begin, end)
                    block = (
                        box[there.start - first : there.stop - first : there.step]
                        if isinstance(there, slice)
                        else box[torch.from_numpy(there - first)]
                    )
                    yield starts[strip.hf_name] + (strip.hf_start + begin) * row_bytes, block


def _transposed(
    parameter: Parameter, strips: list[Strip], starts: Mapping[str, int], source: Weights, dtype: torch.dtype
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (place in the file, rows) of matrices that are [in, out] there: our columns are their rows."""
    height, width = parameter.shape
    columns = max(1, _BOX_BYTES // (height * dtype.itemsize))
    by_name: dict[str, list[Strip]] = defaultdict(list)
    for strip in strips:
        by_name[strip.hf_name].append(strip)
    for first in range(0, width, columns):
        last = min(first + columns, width)
        box = source.read(parameter, (0, first), (height, last - first), dtype)
        for name, mine in by_name.items():
            block = torch.empty(last - first, sum(strip.rows for strip in mine), dtype=dtype)
            for strip in mine:
                there = strip.native_rows(0, strip.rows)
                rows = box[there] if isinstance(there, slice) else box[torch.from_numpy(there)]
                block[:, strip.hf_start : strip.hf_start + strip.rows] = rows.T
            yield starts[name] + first * block.shape[1] * dtype.itemsize, block


def _config_json(config: ModelConfig, dtype: torch.dtype, companions: Mapping[str, bytes]) -> dict[str, Any]:
    """The config of an earlier life where it says the same; else one in our words, with the tokenizer's ids."""
    if CONFIG in companions:
        kept = json.loads(companions[CONFIG])
        if not config_differences(config, read_hf_config(kept, CONFIG)):
            named = [key for key in ("torch_dtype", "dtype") if key in kept] or ["torch_dtype"]
            return kept | dict.fromkeys(named, str(dtype).removeprefix("torch."))
    # Left out, transformers takes ids of the family's first models, which end no text of any other.
    written = to_hf_config(config) | {"bos_token_id": None, "eos_token_id": None}
    return written | token_ids(companions) | {"torch_dtype": str(dtype).removeprefix("torch.")}


def _bytes(block: torch.Tensor) -> memoryview:
    flat = block.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _write_at(descriptor: int, data: bytes | memoryview, start: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written


def _write_json(path: Path, body: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=2, sort_keys=True) + "\n")
