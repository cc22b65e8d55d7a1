"""Weights in 8 bits: how values are rounded, how far off they may be, and weights as they are after the rounding.

    fp8     E4M3 with one scale for each row of a matrix (an output channel), for vLLM's compressed-tensors
    q8_0    GGUF's blocks of 32 values with one scale

An export in 8 bits is proven like any other: every tensor that is read back must be, bit by bit, the source's after the
same rounding (`RoundedWeights`). Besides, no value may be further from the source's than the scheme allows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch

from trainshed.checkpoints.weights import Weights
from trainshed.errors import MissingExtra
from trainshed.models.parameters import Parameter

QuantizationName = Literal["fp8", "q8_0"]

FLOAT8_MAX = 448.0
"""The largest value of E4M3."""
_FLOAT8_RELATIVE = (1 + 1e-4) / 17
"""Between 1 and its neighbour 1.125 the middle is 1.0625: a value there is off by a 17th of itself, others by less."""
_FLOAT8_SMALLEST = 2.0**-10
"""Half of the distance between subnormal neighbours."""
BLOCK = 32
"""Values of a block of q8_0."""


class WeightQuantization(Protocol):
    """A scheme: which tensors it rounds, how, and within which bound."""

    name: QuantizationName
    bound_text: str

    def other_dtype(self, parameter: Parameter) -> torch.dtype | None:
        """Return the dtype of a tensor that is not quantised; None for one that is."""
        ...

    def round_trip(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [rows, columns] in float32 as they are after quantising."""
        ...

    def bound(self, rows: torch.Tensor) -> torch.Tensor:
        """Return how far each value may be from its own after quantising."""
        ...


class Float8Rows:
    """E4M3 with a scale in bfloat16 for each row; embedding, head, norms and biases stay in bfloat16."""

    name: QuantizationName = "fp8"
    bound_text = "1/17 of a value, or 1/1024 of its row's scale"

    def other_dtype(self, parameter: Parameter) -> torch.dtype | None:
        """Return bfloat16 for what is not a matrix of a layer."""
        return None if parameter.layer is not None and len(parameter.shape) == 2 else torch.bfloat16

    def quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows in E4M3, and their scales [rows, 1] in bfloat16."""
        largest = rows.abs().amax(dim=-1, keepdim=True)
        scales = torch.where(largest > 0, largest / FLOAT8_MAX, torch.ones_like(largest)).bfloat16()
        # A scale that was rounded to zero or down would push the largest value out of range.
        scales = torch.where(scales > 0, scales, torch.finfo(torch.bfloat16).tiny)
        return (rows / scales.float()).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn), scales

    def round_trip(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows as they are after quantising."""
        values, scales = self.quantize(rows)
        return values.float() * scales.float()

    def bound(self, rows: torch.Tensor) -> torch.Tensor:
        """Return how far each value may be off."""
        scales = self.quantize(rows)[1].float()
        return torch.maximum(rows.abs() * _FLOAT8_RELATIVE, scales * _FLOAT8_SMALLEST)


class GgufBlocks:
    """GGUF's q8_0: blocks of 32 values with a scale in float16; vectors stay in float32."""

    name: QuantizationName = "q8_0"
    bound_text = "0.5621 of the largest value of its block / 127"

    def other_dtype(self, parameter: Parameter) -> torch.dtype | None:
        """Return float32 for vectors, and float16, as llama.cpp does, for rows that are not whole blocks."""
        if len(parameter.shape) == 1:
            return torch.float32
        return None if parameter.shape[-1] % BLOCK == 0 else torch.float16

    def round_trip(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows as they are after quantising, computed by the `gguf` package."""
        quants, kind = gguf_package().quants, gguf_package().GGMLQuantizationType.Q8_0
        packed = quants.quantize(rows.contiguous().numpy(), kind)
        return torch.from_numpy(np.ascontiguousarray(quants.dequantize(packed, kind)))

    def bound(self, rows: torch.Tensor) -> torch.Tensor:
        """Return half a step, and what is lost where the scale becomes a float16 (a share of 2^-11, 127 times)."""
        blocks = rows.view(*rows.shape[:-1], -1, BLOCK)
        steps = blocks.abs().amax(dim=-1, keepdim=True) / 127
        limit = steps * (0.5 + 127 * 2.0**-11) * (1 + 1e-4) + 127 * 2.0**-25
        return limit.expand_as(blocks).reshape(rows.shape)


_SCHEMES: dict[str, type[WeightQuantization]] = {"fp8": Float8Rows, "q8_0": GgufBlocks}


def quantization_of(dtype: str | None) -> WeightQuantization | None:
    """Return the scheme that a dtype names; None for a dtype that is not one."""
    return _SCHEMES[dtype]() if dtype in _SCHEMES else None


def gguf_package() -> Any:
    """Return the `gguf` package."""
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise MissingExtra.named("gguf", "writing and reading GGUF") from None
    return gguf


class RoundedWeights:
    """Weights as they are after quantising; remembers how far off the worst value was, as a share of its bound."""

    def __init__(self, source: Weights, scheme: WeightQuantization) -> None:
        self.config = source.config
        self.largest_share = 0.0
        self._source, self._scheme = source, scheme
        self._lock = threading.Lock()

    @property
    def dtypes(self) -> list[str]:
        """They are float32, which holds every value of 8 bits with its scale."""
        return ["float32"]

    def read(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a box; scales need whole rows, so these are read."""
        last = len(parameter.shape) - 1
        columns = slice(offset[last], offset[last] + shape[last])
        box = self._source.read(parameter, (*offset[:last], 0), (*shape[:last], parameter.shape[last]), torch.float32)
        if (other := self._scheme.other_dtype(parameter)) is not None:
            return box[..., columns].to(other).to(dtype)
        rows = box.view(-1, parameter.shape[last])
        rounded = self._scheme.round_trip(rows)
        error = (rounded - rows).abs()
        share = float(torch.where(error == 0, error, error / self._scheme.bound(rows)).max()) if rows.numel() else 0.0
        with self._lock:
            # A value that is not a number is further off than any bound.
            self.largest_share = max(self.largest_share, share if share == share else float("inf"))
        return rounded.view(box.shape)[..., columns].to(dtype)

    @contextmanager
    def borrow(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """Lend such a box."""
        yield self.read(parameter, offset, shape, dtype)

    def close(self) -> None:
        """Leave the source open: whoever opened it closes it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
