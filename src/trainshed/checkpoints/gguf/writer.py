"""Write a model as one GGUF file: its keys, its tokenizer, and its tensors one after the other.

Vectors (norms, biases) are float32, as llama.cpp wants them. Matrices have the dtype that is asked for; what is cast is
cast in all tensors alike, so that the file is the model in that dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainshed.checkpoints.formats import GGUF_FILE
from trainshed.checkpoints.gguf.model_keys import (
    ROPE_FACTORS,
    GgufTensor,
    gguf_tensors,
    model_keys,
    permuted,
    rope_factors,
)
from trainshed.checkpoints.gguf.tokenizer_keys import gguf_vocabulary
from trainshed.checkpoints.hf.stored_rows import read_hf_tensor
from trainshed.checkpoints.quantization import WeightQuantization, gguf_package
from trainshed.checkpoints.weights import AdvanceProgress, OutputFile, Weights
from trainshed.errors import InputError
from trainshed.models.export_support import gguf_architecture
from trainshed.models.parameters import parameters
from trainshed.recipe import ModelConfig
from trainshed.storage import FileEntry, Hasher, LocalStore

_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class GgufWriter:
    """Writes a model for llama.cpp."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        scheme: WeightQuantization | None = None,
        companions: Mapping[str, bytes] | None = None,
    ) -> None:
        self.config = config
        if dtype not in _KINDS:
            raise InputError(f"GGUF is not written in {dtype}", where="dtype", hint="write bf16, fp16, fp32 or q8_0")
        self._dtype, self._scheme = dtype, scheme
        self._gguf = gguf_package()
        self._table = {parameter.name: parameter for parameter in parameters(config)}
        self._tensors = list(gguf_tensors(config))
        self._keys = model_keys(config, scheme.name if scheme is not None else _DTYPE_NAMES[dtype])
        self._vocabulary = gguf_vocabulary(companions or {}, config.vocab_size)

    def output_files(self) -> list[OutputFile]:
        """Return the one file."""
        return [OutputFile(GGUF_FILE, sum(self._bytes(tensor) for tensor in self._tensors))]

    def write(self, output: OutputFile, source: Weights, file: Path, advance: AdvanceProgress, threads: int = 1) -> str:
        """Write the file; return its checksum."""
        gguf = self._gguf
        writer = gguf.GGUFWriter(file, gguf_architecture(self.config))
        self._add_keys(writer)
        factors = rope_factors(self.config)
        if factors is not None:
            kind = gguf.GGMLQuantizationType.F32
            writer.add_tensor_info(ROPE_FACTORS, factors.shape, np.dtype(np.float32), factors.nbytes, kind)
        for tensor in self._tensors:
            kind = self._kind(tensor)
            shape = gguf.quant_shape_to_byte_shape(tensor.hf.shape, kind)
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), self._bytes(tensor), kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors.numpy())
        for tensor in self._tensors:
            writer.write_tensor_data(self._values(source, tensor))
            advance(self._bytes(tensor))
        writer.close()
        hasher = Hasher()
        for chunk in LocalStore(file.parent).stream(file.name):
            hasher.update(chunk)
        return hasher.checksum

    def finish(self, folder: Path, entries: Sequence[FileEntry]) -> None:
        """Write nothing else: everything is in the file."""

    def _kind(self, tensor: GgufTensor) -> Any:
        kinds = self._gguf.GGMLQuantizationType
        parameter = self._table[tensor.hf.row_mappings[0].native_name]
        if self._scheme is not None:
            other = self._scheme.other_dtype(parameter)
            return kinds.Q8_0 if other is None else kinds[_KINDS[other]]
        return kinds.F32 if len(parameter.shape) == 1 else kinds[_KINDS[self._dtype]]

    def _bytes(self, tensor: GgufTensor) -> int:
        return int(np.prod(self._gguf.quant_shape_to_byte_shape(tensor.hf.shape, self._kind(tensor))))

    def _values(self, source: Weights, tensor: GgufTensor) -> np.ndarray:
        values = read_hf_tensor(source, tensor.hf, self._table)
        if tensor.heads is not None:
            values = permuted(values, tensor.heads)
        kind = self._kind(tensor)
        largest = torch.finfo(torch.float16).max if kind.name in ("F16", "Q8_0") else float("inf")
        if not bool((values.abs() < largest).all()):
            what = "is not a number" if not bool(values.isfinite().all()) else f"is larger than {kind.name} holds"
            raise InputError(f"`{tensor.name}` has a value that {what}", where="dtype", hint="write dtype bf16 or fp32")
        if self._scheme is None:
            values = values.to(self._dtype).float()  # vectors have the precision of the matrices, in float32
        packed = self._gguf.quants.quantize(values.contiguous().numpy(), kind)
        return packed.view(np.uint8)

    def _add_keys(self, writer: Any) -> None:
        types = self._gguf.GGUFValueType
        by_type = {bool: types.BOOL, int: types.UINT32, float: types.FLOAT32, str: types.STRING}
        for key, value in self._keys.items():
            writer.add_key_value(key, value, by_type[type(value)])
        vocabulary = self._vocabulary
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(vocabulary.cut)
        writer.add_token_list(vocabulary.tokens)
        writer.add_token_types(vocabulary.kinds)
        writer.add_token_merges(vocabulary.merges)
        writer.add_add_bos_token(vocabulary.adds_bos)
        for name, index in vocabulary.ids.items():
            add = {"bos": writer.add_bos_token_id, "eos": writer.add_eos_token_id, "padding": writer.add_pad_token_id}
            add[name](index)
        if vocabulary.chat_template is not None:
            writer.add_chat_template(vocabulary.chat_template)
