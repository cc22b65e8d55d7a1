"""Weights in fp8 as vLLM and transformers read them: safetensors of the `compressed-tensors` format.

Every matrix of a layer is stored in E4M3 with one scale for each row (`NAME.weight_scale`, [rows, 1]). Activations are
quantised by the server, token by token. Embedding, head, norms and biases stay in bfloat16. `config.json` says so in
`quantization_config`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainshed.checkpoints.hf.stored_rows import read_hf_tensor
from trainshed.checkpoints.hf.weights import SCALE_SUFFIX
from trainshed.checkpoints.hf.writer import SHARD_BYTES, config_json, finish_folder, shard_names
from trainshed.checkpoints.io import HashedFile, bytes_of
from trainshed.checkpoints.quantization import Float8Rows
from trainshed.checkpoints.weights import AdvanceProgress, OutputFile, Weights, group_by_size
from trainshed.errors import InputError
from trainshed.models.export_support import check_float8
from trainshed.models.hf_tensors import HfTensor, hf_tensors
from trainshed.models.parameters import parameters
from trainshed.recipe import ModelConfig
from trainshed.storage import FileEntry

_NAMES = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16"}
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True)
class _Stored:
    """One tensor of a file: the values of a tensor, or its scales."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: HfTensor

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Float8WeightsWriter:
    """Writes a model in fp8."""

    def __init__(
        self, config: ModelConfig, *, companions: Mapping[str, bytes] | None = None, shard_bytes: int | None = None
    ) -> None:
        check_float8(config)
        self.config = config
        self._companions = dict(companions or {})
        self._table = {parameter.name: parameter for parameter in parameters(config)}
        self._scheme = Float8Rows()
        groups = group_by_size(
            self._tensors(), lambda tensors: sum(one.bytes for one in tensors), shard_bytes or SHARD_BYTES
        )
        self._shards = {
            name: [one for tensors in group for one in tensors]
            for name, group in zip(shard_names(len(groups)), groups, strict=True)
        }

    def _tensors(self) -> Iterator[list[_Stored]]:
        """Yield every tensor, with its scales where it has them."""
        for tensor in hf_tensors(self.config):
            parameter = self._table[tensor.row_mappings[0].native_name]
            other = self._scheme.other_dtype(parameter)
            if other is not None:
                yield [_Stored(tensor.name, tensor.shape, other, tensor)]
                continue
            scales = tensor.name.removesuffix(".weight") + SCALE_SUFFIX
            yield [
                _Stored(tensor.name, tensor.shape, torch.float8_e4m3fn, tensor),
                _Stored(scales, (tensor.shape[0], 1), torch.bfloat16, tensor),
            ]

    def output_files(self) -> list[OutputFile]:
        """Return the shards."""
        return [OutputFile(name, sum(one.bytes for one in shard)) for name, shard in self._shards.items()]

    def write(self, output: OutputFile, source: Weights, file: Path, advance: AdvanceProgress, threads: int = 1) -> str:
        """Write one shard, tensor by tensor; return its checksum."""
        shard = self._shards[output.path]
        header = _header(shard)
        with HashedFile(file) as hashed:
            end = hashed.write(0, header)
            place = 0
            while place < len(shard):
                first = shard[place]
                values = read_hf_tensor(source, first.source, self._table)
                if not bool(values.isfinite().all()):
                    raise InputError(
                        f"`{first.name}` has a value that is not a number", hint="export the weights in fp32"
                    )
                if first.dtype == torch.float8_e4m3fn:
                    quantised, scales = self._scheme.quantize(values)
                    end = hashed.write(end, bytes_of(quantised.view(torch.uint8)), bytes_of(scales))
                    place += 2
                    advance(first.bytes + shard[place - 1].bytes)
                else:
                    end = hashed.write(end, bytes_of(values.to(first.dtype)))
                    place += 1
                    advance(first.bytes)
            return hashed.checksum(end)

    def finish(self, folder: Path, entries: Sequence[FileEntry]) -> None:
        """Write the index, config.json with `quantization_config`, generation settings and the tokenizer's files."""
        del entries
        written = config_json(self.config, torch.bfloat16, self._companions) | {
            "quantization_config": quantization_config(self.config)
        }
        sizes = {
            one.name: (name, one.bytes, math.prod(one.shape)) for name, shard in self._shards.items() for one in shard
        }
        finish_folder(folder, written, self._companions, sizes)


def quantization_config(config: ModelConfig) -> dict[str, Any]:
    """Return what compressed-tensors, and with it transformers and vLLM, read."""
    values = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": values | {"strategy": "channel", "dynamic": False},
                "input_activations": values | {"strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head"],
    }


def _header(shard: Sequence[_Stored]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for one in shard:
        start, end = end, end + one.bytes
        header[one.name] = {"dtype": _NAMES[one.dtype], "shape": list(one.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
