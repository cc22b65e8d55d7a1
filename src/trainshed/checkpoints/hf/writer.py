"""Weights written as transformers saves them: safetensors shards, their index, config.json and what goes with them.

Every shard's header is computed first, then native tensors are read once, in boxes of bounded size, and their rows go
to their places in the file. So a shard costs memory for one box, whatever its size.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainshed.checkpoints.hf.companion_files import COMPANION_FILES, special_token_ids
from trainshed.checkpoints.hf.weights import CONFIG, INDEX, SAFETENSORS_DTYPES, WEIGHTS
from trainshed.checkpoints.io import BLOCK_BYTES, BufferPool, HashedFile, bytes_of, run_in_threads
from trainshed.checkpoints.weights import AdvanceProgress, OutputFile, Weights
from trainshed.errors import InputError
from trainshed.models.families import config_differences, read_hf_config, to_hf_config
from trainshed.models.hf_tensors import HfTensor, RowMapping, hf_tensors
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig
from trainshed.storage import FileEntry

SHARD_BYTES = 5_000_000_000
"""The largest shard, as transformers 4 cuts them; a single tensor may be larger."""
GENERATION_CONFIG = "generation_config.json"
_ALIGNMENT_BYTES = 8  # of a header's length, as the safetensors library pads it


@dataclass(frozen=True)
class _Shard:
    """One file: the tensors in it, where each begins, and the bytes before the first."""

    tensors: tuple[HfTensor, ...]
    header: bytes
    starts: Mapping[str, int]
    size: int


class HfWeightsWriter:
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
        self._scratch = BufferPool()

    def units(self) -> list[OutputFile]:
        """Return the shards."""
        return [OutputFile(name, shard.size) for name, shard in self._shards.items()]

    def write(self, unit: OutputFile, source: Weights, file: Path, advance: AdvanceProgress, threads: int = 1) -> str:
        """Write one shard; return its checksum."""
        shard = self._shards[unit.path]
        strips: dict[str, list[RowMapping]] = defaultdict(list)
        for tensor in shard.tensors:
            for strip in tensor.row_mappings:
                strips[strip.native_name].append(strip)
        with HashedFile(file) as made:
            made.write(0, shard.header)
            advance(len(shard.header))

            def lay(parameter: Parameter, first: int, last: int, expert: int | None) -> None:
                """Write what a box of a native tensor becomes here."""
                mine = strips[parameter.name]
                cut = _transposed_blocks if mine[0].transposed else _plain_blocks
                with self._box(source, parameter, first, last, expert, transposed=mine[0].transposed) as box:
                    for start, block in cut(box, first, [each for each in mine if each.expert == expert], shard.starts):
                        with self._in_one_piece(block) as data:
                            made.write(start, data)
                            advance(len(data))

            boxes = (
                partial(lay, parameter, *box)
                for parameter in parameters(self.config)
                if parameter.name in strips
                for box in self._boxes(parameter, strips[parameter.name])
            )
            run_in_threads(boxes, threads)
            return made.checksum(shard.size)

    def _boxes(self, parameter: Parameter, strips: list[RowMapping]) -> Iterator[tuple[int, int, int | None]]:
        """Cut a native tensor into boxes read at once, (first row, last row, expert); a turned one by columns."""
        dim = 1 if parameter.expert else 0
        cut, others = (1, 0) if strips[0].transposed else (dim, dim + 1)
        length, each = parameter.shape[cut], math.prod(parameter.shape[others : others + 1]) * self._dtype.itemsize
        # Gate and up rows alternate: an even number keeps the boxes of one item of ours within it.
        count = max(1, BLOCK_BYTES // each // 2 * 2)
        for expert in dict.fromkeys(strip.expert for strip in strips):
            mine = [strip for strip in strips if strip.expert == expert]
            for first in range(0, length, count):
                last = min(first + count, length)
                if mine[0].transposed or any(a < b for a, b in (strip.within(first, last) for strip in mine)):
                    yield first, last, expert

    @contextmanager
    def _box(
        self, source: Weights, parameter: Parameter, first: int, last: int, expert: int | None, *, transposed: bool
    ) -> Iterator[torch.Tensor]:
        if transposed:
            with source.lent(parameter, (0, first), (parameter.shape[0], last - first), self._dtype) as box:
                yield box
            return
        columns = parameter.shape[2 if parameter.expert else 1 :]
        offset, shape = (first, *(0 for _ in columns)), (last - first, *columns)
        if expert is None:
            with source.lent(parameter, offset, shape, self._dtype) as box:
                yield box
        else:
            with source.lent(parameter, (expert, *offset), (1, *shape), self._dtype) as box:
                yield box[0]

    @contextmanager
    def _in_one_piece(self, block: torch.Tensor) -> Iterator[memoryview]:
        if block.is_contiguous():
            yield bytes_of(block)
            return
        with self._scratch.lent(block.shape, block.dtype) as piece:
            yield bytes_of(piece.copy_(block))

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
            if name in COMPANION_FILES and name != CONFIG:
                (folder / name).write_bytes(data)
        ids = {key: value for key, value in self._config_json.items() if key.endswith("_token_id")}
        if GENERATION_CONFIG not in self._companions and ids:
            # What transformers itself saves for a model that came without one.
            _write_json(folder / GENERATION_CONFIG, {"_from_model_config": True, **ids})


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
    name = next((theirs for theirs, ours in SAFETENSORS_DTYPES.items() if getattr(torch, ours) == dtype), None)
    if name is None:
        raise InputError(
            f"weights are not exported as {dtype}", hint=f"write one of {', '.join(SAFETENSORS_DTYPES.values())}"
        )
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


def _plain_blocks(
    box: torch.Tensor, first: int, strips: list[RowMapping], starts: Mapping[str, int]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (place in the file, rows) of tensors that lie as ours do, row by row; the box begins at row `first`."""
    row_bytes = math.prod(box.shape[1:]) * box.itemsize
    for strip in strips:
        for begin, there in strip.runs(*strip.within(first, first + len(box))):
            place = starts[strip.hf_name] + (strip.hf_start + begin) * row_bytes
            yield place, box[there.start - first : there.stop - first : there.step]


def _transposed_blocks(
    box: torch.Tensor, first: int, strips: list[RowMapping], starts: Mapping[str, int]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (place in the file, rows) of matrices that are [in, out] there: our columns from `first` are their rows."""
    by_name: dict[str, list[RowMapping]] = defaultdict(list)
    for strip in strips:
        by_name[strip.hf_name].append(strip)
    for name, mine in by_name.items():
        block = torch.empty(box.shape[1], sum(strip.rows for strip in mine), dtype=box.dtype)
        for strip in mine:
            there = strip.native_rows(0, strip.rows)
            rows = box[there] if isinstance(there, slice) else box[torch.from_numpy(there)]
            block[:, strip.hf_start : strip.hf_start + strip.rows] = rows.T
        yield starts[name] + first * block.shape[1] * block.itemsize, block


def _config_json(config: ModelConfig, dtype: torch.dtype, companions: Mapping[str, bytes]) -> dict[str, Any]:
    """The config of an earlier life where it says the same; else one in our words, with the tokenizer's ids."""
    if CONFIG in companions:
        kept = json.loads(companions[CONFIG])
        if not config_differences(config, read_hf_config(kept, CONFIG)):
            named = [key for key in ("torch_dtype", "dtype") if key in kept] or ["torch_dtype"]
            return kept | dict.fromkeys(named, str(dtype).removeprefix("torch."))
    # Left out, transformers takes ids of the family's first models, which end no text of any other.
    written = to_hf_config(config) | {"bos_token_id": None, "eos_token_id": None}
    return written | special_token_ids(companions) | {"torch_dtype": str(dtype).removeprefix("torch.")}


def _write_json(path: Path, body: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=2, sort_keys=True) + "\n")
