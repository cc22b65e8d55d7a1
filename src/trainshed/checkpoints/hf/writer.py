"""Write weights as transformers saves them: safetensors shards, their index, config.json and the companion files.

The header of a shard is computed first. Then native tensors are read once, in boxes of bounded size, and their rows are
written to their places in the file. So a shard needs memory for a few boxes, whatever its size.
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
from trainshed.checkpoints.weights import (
    AdvanceProgress,
    OutputFile,
    Weights,
    dtype_name,
    group_by_size,
    stored_dtype,
)
from trainshed.errors import InputError
from trainshed.models.families import config_differences, read_hf_config, to_hf_config
from trainshed.models.hf_tensors import HfTensor, RowMapping, hf_tensors
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig
from trainshed.storage import FileEntry

SHARD_BYTES = 5_000_000_000
"""The largest shard, as in transformers 4; a single tensor may be larger."""
GENERATION_CONFIG = "generation_config.json"
_ALIGNMENT_BYTES = 8  # of a header's length, as the safetensors library pads it


@dataclass(frozen=True)
class _Shard:
    """One file: its tensors, where each starts, and the bytes before the first."""

    tensors: tuple[HfTensor, ...]
    header: bytes
    starts: Mapping[str, int]
    size: int


class HfWeightsWriter:
    """Writes a model for transformers, in one dtype; what is not a weight stays in float32, as in transformers.

    `companions` are files by name (`companion_files.py`): tokenizer, chat template and generation settings are copied
    unchanged. A config.json is kept if it describes the same architecture; only its dtype is set.
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
        self._config_json = config_json(config, dtype, self._companions)
        self._shards = _shards(config, dtype, shard_bytes or SHARD_BYTES)
        self._buffers = BufferPool()

    def output_files(self) -> list[OutputFile]:
        """Return the shards."""
        return [OutputFile(name, shard.size) for name, shard in self._shards.items()]

    def write(self, output: OutputFile, source: Weights, file: Path, advance: AdvanceProgress, threads: int = 1) -> str:
        """Write one shard; return its checksum."""
        shard = self._shards[output.path]
        mappings: dict[str, list[RowMapping]] = defaultdict(list)
        for tensor in shard.tensors:
            for mapping in tensor.row_mappings:
                mappings[mapping.native_name].append(mapping)
        with HashedFile(file) as hashed:
            hashed.write(0, shard.header)
            advance(len(shard.header))

            def starts(parameter: Parameter, expert: int | None) -> Mapping[str, int]:
                """Return where tensors begin in the file; of a stack of transposed matrices, where that matrix does."""
                first = mappings[parameter.name][0]
                if expert is None or not (first.stacked and first.transposed):
                    return shard.starts
                matrix_bytes = math.prod(parameter.shape[1:]) * self._dtype.itemsize
                return {first.hf_name: shard.starts[first.hf_name] + expert * matrix_bytes}

            def write_box(parameter: Parameter, first: int, last: int, expert: int | None) -> None:
                """Write the rows of one box of a native tensor."""
                transposed = mappings[parameter.name][0].transposed
                box_mappings = [mapping for mapping in mappings[parameter.name] if mapping.expert == expert]
                to_blocks = _transposed_blocks if transposed else _plain_blocks
                with self._box(source, parameter, first, last, expert, transposed=transposed) as box:
                    for start, block in to_blocks(box, first, box_mappings, starts(parameter, expert)):
                        with self._contiguous_bytes(block) as data:
                            hashed.write(start, data)
                            advance(len(data))

            boxes = (
                partial(write_box, parameter, *box)
                for parameter in parameters(self.config)
                if parameter.name in mappings
                for box in self._boxes(parameter, mappings[parameter.name])
            )
            run_in_threads(boxes, threads)
            return hashed.checksum(shard.size)

    def _boxes(self, parameter: Parameter, mappings: list[RowMapping]) -> Iterator[tuple[int, int, int | None]]:
        """Split a native tensor into boxes, (first row, last row, expert); a transposed one by columns."""
        dim = 1 if parameter.expert else 0
        split_dim, other_dim = (dim + 1, dim) if mappings[0].transposed else (dim, dim + 1)
        length = parameter.shape[split_dim]
        dtype = stored_dtype(parameter, self._dtype)
        row_bytes = math.prod(parameter.shape[other_dim : other_dim + 1]) * dtype.itemsize
        # Gate and up rows alternate: an even number keeps a box within one item of a native checkpoint.
        count = max(1, BLOCK_BYTES // row_bytes // 2 * 2)
        for expert in dict.fromkeys(mapping.expert for mapping in mappings):
            expert_mappings = [mapping for mapping in mappings if mapping.expert == expert]
            for first in range(0, length, count):
                last = min(first + count, length)
                row_ranges = (mapping.within(first, last) for mapping in expert_mappings)
                if expert_mappings[0].transposed or any(start < stop for start, stop in row_ranges):
                    yield first, last, expert

    @contextmanager
    def _box(
        self, source: Weights, parameter: Parameter, first: int, last: int, expert: int | None, *, transposed: bool
    ) -> Iterator[torch.Tensor]:
        if transposed:
            offset, shape = (0, first), (parameter.shape[-2], last - first)
            if expert is None:
                with source.borrow(parameter, offset, shape, self._dtype) as box:
                    yield box
            else:
                with source.borrow(parameter, (expert, *offset), (1, *shape), self._dtype) as box:
                    yield box[0]
            return
        columns = parameter.shape[2 if parameter.expert else 1 :]
        offset, shape = (first, *(0 for _ in columns)), (last - first, *columns)
        if expert is None:
            with source.borrow(parameter, offset, shape, stored_dtype(parameter, self._dtype)) as box:
                yield box
        else:
            with source.borrow(parameter, (expert, *offset), (1, *shape), self._dtype) as box:
                yield box[0]

    @contextmanager
    def _contiguous_bytes(self, block: torch.Tensor) -> Iterator[memoryview]:
        if block.is_contiguous():
            yield bytes_of(block)
            return
        with self._buffers.borrow(block.shape, block.dtype) as contiguous:
            yield bytes_of(contiguous.copy_(block))

    def finish(self, folder: Path, entries: Sequence[FileEntry]) -> None:
        """Write the index, config.json, generation settings and the tokenizer's files."""
        del entries
        sizes = {
            tensor.name: (name, _tensor_bytes(tensor, self._dtype), math.prod(tensor.shape))
            for name, shard in self._shards.items()
            for tensor in shard.tensors
        }
        finish_folder(folder, self._config_json, self._companions, sizes)


def finish_folder(
    folder: Path,
    config: Mapping[str, Any],
    companions: Mapping[str, bytes],
    sizes: Mapping[str, tuple[str, int, int]],
) -> None:
    """Write what a folder has besides its shards; `sizes` are the file, the bytes and the elements of each tensor."""
    if len({file for file, _, _ in sizes.values()}) > 1:
        index = {
            "metadata": {
                "total_parameters": sum(elements for _, _, elements in sizes.values()),
                "total_size": sum(size for _, size, _ in sizes.values()),
            },
            "weight_map": {name: file for name, (file, _, _) in sizes.items()},
        }
        _write_json(folder / INDEX, index)
    _write_json(folder / CONFIG, config)
    for name, data in companions.items():
        if name in COMPANION_FILES and name != CONFIG:
            (folder / name).write_bytes(data)
    ids = {key: value for key, value in config.items() if key.endswith("_token_id")}
    if ids.get("pad_token_id") is None:
        ids.pop("pad_token_id", None)  # generation pads with the end of a text then
    if GENERATION_CONFIG not in companions and ids:
        # transformers itself saves this for a model without one.
        _write_json(folder / GENERATION_CONFIG, {"_from_model_config": True, **ids})


def shard_names(count: int) -> list[str]:
    """Return the file names of `count` shards."""
    if count == 1:
        return [WEIGHTS]
    stem = WEIGHTS.removesuffix(".safetensors")
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _shards(config: ModelConfig, dtype: torch.dtype, shard_bytes: int) -> dict[str, _Shard]:
    """Return the shards by file name, filled one after the other in our order of tensors."""
    groups = group_by_size(hf_tensors(config), lambda tensor: _tensor_bytes(tensor, dtype), shard_bytes)
    return {name: _shard(group, dtype) for name, group in zip(shard_names(len(groups)), groups, strict=True)}


def _tensor_bytes(tensor: HfTensor, dtype: torch.dtype) -> int:
    return math.prod(tensor.shape) * stored_dtype(tensor, dtype).itemsize


def _shard(tensors: list[HfTensor], dtype: torch.dtype) -> _Shard:
    names = {getattr(torch, ours): theirs for theirs, ours in SAFETENSORS_DTYPES.items()}
    if dtype not in names:
        raise InputError(
            f"weights are not exported as {dtype}", hint=f"write one of {', '.join(SAFETENSORS_DTYPES.values())}"
        )
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + _tensor_bytes(tensor, dtype)
        name = names[stored_dtype(tensor, dtype)]
        header[tensor.name] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    data = 8 + len(text)
    starts = {tensor.name: data + header[tensor.name]["data_offsets"][0] for tensor in tensors}
    return _Shard(tuple(tensors), len(text).to_bytes(8, "little") + text, starts, data + end)


def _plain_blocks(
    box: torch.Tensor, first: int, mappings: list[RowMapping], starts: Mapping[str, int]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (offset in the file, rows) of tensors that are stored like ours; the box starts at row `first`."""
    row_bytes = math.prod(box.shape[1:]) * box.itemsize
    for mapping in mappings:
        for start, native_rows in mapping.runs(*mapping.within(first, first + len(box))):
            offset = starts[mapping.hf_name] + (mapping.hf_start + start) * row_bytes
            yield offset, box[native_rows.start - first : native_rows.stop - first : native_rows.step]


def _transposed_blocks(
    box: torch.Tensor, first: int, mappings: list[RowMapping], starts: Mapping[str, int]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (offset in the file, rows) of matrices stored as [in, out]: our columns from `first` on are their rows."""
    by_name: dict[str, list[RowMapping]] = defaultdict(list)
    for mapping in mappings:
        by_name[mapping.hf_name].append(mapping)
    for name, tensor_mappings in by_name.items():
        block = torch.empty(box.shape[1], sum(mapping.rows for mapping in tensor_mappings), dtype=box.dtype)
        for mapping in tensor_mappings:
            native_rows = mapping.native_rows(0, mapping.rows)
            rows = box[native_rows] if isinstance(native_rows, slice) else box[torch.from_numpy(native_rows)]
            block[:, mapping.hf_start : mapping.hf_start + mapping.rows] = rows.T
        yield starts[name] + first * block.shape[1] * block.itemsize, block


def config_json(config: ModelConfig, dtype: torch.dtype, companions: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the source's config.json if it describes the same model, otherwise a new one with the tokenizer's ids."""
    if CONFIG in companions:
        kept = json.loads(companions[CONFIG])
        same_family = kept.get("model_type") == config.family  # otherwise it is that of a model with more parts
        if same_family and not config_differences(config, read_hf_config(kept, CONFIG)):
            kept.pop("quantization_config", None)  # what is written is not quantised
            named = [key for key in ("torch_dtype", "dtype") if key in kept] or ["torch_dtype"]
            return kept | dict.fromkeys(named, dtype_name(dtype))
    # Without these keys transformers would use the ids of the family's first models, which are wrong for any other.
    written = to_hf_config(config) | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return written | special_token_ids(companions) | {"torch_dtype": dtype_name(dtype)}


def _write_json(path: Path, body: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=2, sort_keys=True) + "\n")
