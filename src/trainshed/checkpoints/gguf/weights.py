"""A GGUF file that we have written, read back by the `gguf` package: the reader that a proof compares with."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from trainshed.checkpoints.formats import GGUF_FILE
from trainshed.checkpoints.gguf.model_keys import (
    CONFIG_KEY,
    ROPE_FACTORS,
    gguf_tensors,
    model_keys,
    rope_factors,
    unpermuted,
)
from trainshed.checkpoints.quantization import gguf_package
from trainshed.checkpoints.weights import box_ends, join_names
from trainshed.errors import CorruptData, InputError
from trainshed.models.export_support import gguf_architecture
from trainshed.models.hf_tensors import hf_row_mappings
from trainshed.models.parameters import Parameter
from trainshed.recipe import ModelConfig

_DTYPES = {0: "fp32", 1: "fp16", 7: "q8_0", 32: "bf16"}
_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "Q8_0": "float32"}


class GgufWeights:
    """The weights in a folder with one GGUF file of ours.

    Its keys are checked against the architecture that they were written from: a reader would compute by them.
    """

    def __init__(self, folder: Path, config: ModelConfig | None = None) -> None:
        self.folder, self.file = folder, folder / GGUF_FILE
        self._gguf = gguf_package()
        try:
            self._reader = self._gguf.GGUFReader(self.file)
        except (ValueError, OSError, IndexError) as error:
            raise CorruptData(f"is no GGUF file that can be read: {error}", where=str(self.file)) from None
        written = self._key(CONFIG_KEY)
        if written is None:
            raise InputError(
                "this GGUF file was not written here, and others are not read",
                where=str(self.file),
                hint="name the model it was made from",
            )
        self.config = config or ModelConfig.model_validate(json.loads(written))
        self._stored = {tensor.name: tensor for tensor in self._reader.tensors}
        self._names = {tensor.hf.name: tensor for tensor in gguf_tensors(self.config)}
        self._check_keys()
        self._check_tensors()
        self._lock = threading.Lock()
        self._last: tuple[str, torch.Tensor] | None = None

    def _key(self, name: str) -> Any:
        field = self._reader.get_field(name)
        return None if field is None else field.contents()

    def _check_keys(self) -> None:
        dtype = _DTYPES.get(self._key("general.file_type"), "fp32")
        wanted = {"general.architecture": gguf_architecture(self.config)} | model_keys(self.config, dtype)
        for name, value in wanted.items():
            stored = self._key(name)
            same = np.float32(stored or 0) == np.float32(value) if isinstance(value, float) else stored == value
            if not same:
                raise CorruptData(f"`{name}` is {stored!r}, and the model has {value!r}", where=str(self.file))

    def _check_tensors(self) -> None:
        factors = rope_factors(self.config)
        wanted = {tensor.name: tensor.hf.shape for tensor in self._names.values()}
        wanted |= {} if factors is None else {ROPE_FACTORS: tuple(factors.shape)}
        wrong = sorted(wanted.keys() ^ self._stored.keys())
        # GGUF counts dims from the innermost.
        wrong += [
            name
            for name, shape in wanted.items()
            if name in self._stored and tuple(self._stored[name].shape.tolist()) != tuple(shape[::-1])
        ]
        if wrong:
            raise CorruptData(f"the tensors are not those of its model: {join_names(wrong)}", where=str(self.file))
        if factors is not None and not np.array_equal(self._stored[ROPE_FACTORS].data, factors.numpy()):
            raise CorruptData(f"`{ROPE_FACTORS}` is not how the model stretches its positions", where=str(self.file))

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the matrices; of those in 8 bits the one that holds their values."""
        kinds = {tensor.tensor_type.name for tensor in self._stored.values() if len(tensor.shape) > 1}
        return sorted({_TORCH_NAMES[kind] for kind in kinds})

    def read(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a box of a native tensor."""
        ends = box_ends(parameter, offset, shape)
        box = self._native(parameter)[tuple(slice(start, end) for start, end in zip(offset, ends, strict=True))]
        return box.to(dtype).clone()

    @contextmanager
    def borrow(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """Lend such a box."""
        yield self.read(parameter, offset, shape, dtype)

    def _native(self, parameter: Parameter) -> torch.Tensor:
        """Return a whole native tensor in float32; the last one is kept, as boxes are asked for in order."""
        with self._lock:
            if self._last is not None and self._last[0] == parameter.name:
                return self._last[1]
            native = torch.empty(parameter.shape, dtype=torch.float32)
            for mapping in hf_row_mappings(self.config, parameter):
                tensor = self._names[mapping.hf_name]
                stored = self._stored[tensor.name]
                values = self._gguf.quants.dequantize(stored.data, stored.tensor_type)
                values = unpermuted(values, tensor.heads) if tensor.heads is not None else values
                rows = mapping.native_rows(0, mapping.rows)
                index = rows if isinstance(rows, slice) else torch.from_numpy(rows)
                part = np.array(values[mapping.hf_start : mapping.hf_start + mapping.rows], dtype=np.float32)
                native[index] = torch.from_numpy(part)
            self._last = parameter.name, native
            return native

    def close(self) -> None:
        """Close the mapped file."""
        self._last = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
