"""Base weights with rows for the tokens that a run adds (`model.added_tokens`), read like any other weights.

Nothing is written, whatever format the base is in. In the embedding and in the head, the row of an added token is the
mean of the rows of all tokens that were there before: computed in float64 and in one order, so that every layout reads
the same values.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from trainshed.checkpoints.formats import open_weights
from trainshed.checkpoints.weights import Weights, box_ends
from trainshed.models.parameters import AddedRows, Parameter
from trainshed.recipe import ModelConfig
from trainshed.storage import StoreOptions

if TYPE_CHECKING:
    import torch

_TABLES = ("embedding.weight", "head.weight")
_READ_ELEMENTS = 1 << 26
"""The rows that a mean is of are read in parts of about this size."""


def open_with_added_rows(
    address: str | Path,
    config: ModelConfig | None,
    added: AddedRows | None,
    options: StoreOptions | None = None,
) -> Weights:
    """Open weights in any format, with rows for added tokens; `config` counts those."""
    if added is None:
        return open_weights(address, config=config, options=options)
    return GrownWeights(
        open_weights(address, config=None if config is None else added.of_base(config), options=options), added
    )


class GrownWeights:
    """The weights of `base` with rows for added tokens."""

    def __init__(self, base: Weights, added: AddedRows) -> None:
        self.base, self.added, self.config = base, added, added.grown(base.config)
        self._means: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the base."""
        self.base.close()

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the base."""
        return self.base.dtypes

    def read(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the box [offset, offset + shape) of a tensor, on the CPU."""
        if parameter.name not in _TABLES:
            return self.base.read(parameter, offset, shape, dtype)
        import torch

        box_ends(parameter, offset, shape)
        box, start = torch.empty(tuple(shape), dtype=dtype), offset[0]
        stop, added = start + shape[0], self.added
        for first, last in ((start, min(stop, added.start)), (max(start, added.stop), stop)):
            if first < last:
                rows = (last - first, *shape[1:])
                box[first - start : last - start] = self._base_rows(parameter, first, offset[1:], rows, dtype)
        first, last = max(start, added.start), min(stop, added.stop)
        if first < last:
            columns = slice(offset[1], offset[1] + shape[1])
            box[first - start : last - start] = self._mean(parameter)[columns].to(dtype)
        return box

    @contextmanager
    def borrow(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """Lend such a box for as long as the `with` block runs."""
        if parameter.name not in _TABLES:
            with self.base.borrow(parameter, offset, shape, dtype) as box:
                yield box
            return
        yield self.read(parameter, offset, shape, dtype)

    def _base_rows(
        self, parameter: Parameter, first: int, columns: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        table = replace(parameter, shape=(self.added.base_rows, *parameter.shape[1:]))
        return self.base.read(table, (first, *columns), shape, dtype)

    def _mean(self, parameter: Parameter) -> torch.Tensor:
        """Return the mean of the rows of the tokens that were there before: float64 [H]."""
        import torch

        with self._lock:
            if parameter.name not in self._means:
                width, count = parameter.shape[1], self.added.start
                total = torch.zeros(width, dtype=torch.float64)
                share = max(1, _READ_ELEMENTS // width)
                for first in range(0, count, share):
                    rows = (min(share, count - first), width)
                    total += self._base_rows(parameter, first, (0,), rows, torch.float64).sum(0)
                self._means[parameter.name] = total / count
            return self._means[parameter.name]
