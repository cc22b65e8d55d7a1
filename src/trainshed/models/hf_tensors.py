"""Which row of Hugging Face's tensors is which row of ours, and the other way round.

A native tensor is interleaved from blocks of consecutive rows of Hugging Face tensors. A row mapping describes one
block: its rows are in the native tensor in runs at a fixed distance. This covers key/value groups, alternating gate and
up rows, stacked experts and GPT-2's fused, transposed matrices. A mapping keeps the order of its rows, so any cut of a
native tensor needs one consecutive block of each, and nothing more is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from trainshed.errors import InputError
from trainshed.models.families import HF_FAMILIES
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig


@dataclass(frozen=True)
class RowMapping:
    """Rows [hf_start, hf_start + rows) of a Hugging Face tensor, and where they are in a native one.

    Row `hf_start + i` is native row `start + (i // run) · period + i % run`. Rows of a `transposed` tensor are its
    dim 1. `expert` is the index on dim 0 of a native tensor of stacked experts, whose rows are its dim 1. If Hugging
    Face's is `stacked` too, its first two dims count as one: a matrix begins at row `expert` · its rows.
    """

    hf_name: str
    native_name: str
    hf_start: int
    rows: int
    start: int
    run: int
    period: int
    transposed: bool = False
    expert: int | None = None
    stacked: bool = False

    def within(self, first: int, last: int) -> tuple[int, int]:
        """Return which rows of the mapping, [from, to), are in native rows [first, last)."""
        return self._rows_before(first), self._rows_before(last)

    def native_rows(self, first: int, last: int) -> slice | np.ndarray:
        """Return the native rows of the mapping's rows [first, last), as an index of a dim."""
        if first >= last:
            return slice(0, 0)
        if self.run == 1:
            begin = self.start + first * self.period
            return slice(begin, begin + (last - first - 1) * self.period + 1, self.period)
        if first // self.run == (last - 1) // self.run:
            begin = self.start + first // self.run * self.period + first % self.run
            return slice(begin, begin + last - first)
        row = np.arange(first, last)
        return self.start + row // self.run * self.period + row % self.run

    def runs(self, first: int, last: int) -> Iterator[tuple[int, slice]]:
        """Cut the mapping's rows [first, last) so that each part is one slice of native rows: (from, that slice)."""
        while first < last:
            stop = last if self.run == 1 else min(last, (first // self.run + 1) * self.run)
            rows = self.native_rows(first, stop)
            assert isinstance(rows, slice), "one run of rows, or rows at a fixed distance"
            yield first, rows
            first = stop

    def _rows_before(self, native_row: int) -> int:
        runs, rest = divmod(max(native_row - self.start, 0), self.period)
        return min(runs * self.run + min(rest, self.run), self.rows)


@dataclass(frozen=True)
class HfTensor:
    """One tensor as transformers saves it; `row_mappings` covers its rows, first to last.

    `buffer` is that of the `Parameter` that it is a part of.
    """

    name: str
    shape: tuple[int, ...]
    row_mappings: tuple[RowMapping, ...]
    buffer: bool = False


def hf_row_mappings(config: ModelConfig, parameter: Parameter) -> tuple[RowMapping, ...]:
    """Return the mappings that a native tensor is interleaved from; together they cover it."""
    names = HF_FAMILIES[config.family].names
    prefix, local = "", parameter.name
    if parameter.layer is not None:
        prefix, local = names.layer.format(layer=parameter.layer), local.removeprefix(f"layers.{parameter.layer}.")
    native_name, ending = (local, "weight") if parameter.expert else local.rsplit(".", 1)
    if native_name not in names.tensors:
        raise InputError(
            f"Hugging Face's {config.family} has no tensor for `{parameter.name}`",
            hint="choose another family, or keep it native",
        )
    transposed = native_name in names.transposed and ending == "weight"
    ending = names.endings.get(ending, ending)
    all_rows, stacked = parameter.shape[1 if parameter.expert else 0], native_name in names.stacked
    interleaving = row_interleaving(config, native_name, all_rows)
    if native_name in names.alternating:
        interleaving = [(all_rows, 0, all_rows, all_rows)]
    row_mappings = []
    for expert in range(parameter.shape[0]) if parameter.expert else (None,):
        # Of a transposed matrix, rows are columns, which begin anew for each expert.
        hf_start = expert * all_rows if expert is not None and stacked and not transposed else 0
        for number, (rows, start, run, period) in enumerate(interleaving):
            fused = len(names.tensors[native_name]) < len(interleaving)
            hf_name = prefix + names.tensors[native_name][0 if fused else number].format(expert=expert)
            hf_name = hf_name if stacked else f"{hf_name}.{ending}"
            row_mappings.append(
                RowMapping(hf_name, parameter.name, hf_start, rows, start, run, period, transposed, expert, stacked),
            )
            hf_start += rows if fused else 0
    return tuple(row_mappings)


def hf_tensors(config: ModelConfig) -> Iterator[HfTensor]:
    """Yield every tensor that transformers saves for an architecture, in our order."""
    for parameter in parameters(config):
        yield from _joined_by_name(parameter, hf_row_mappings(config, parameter))


def projection_tensors(config: ModelConfig) -> Iterator[HfTensor]:
    """As `hf_tensors`, but each projection has a tensor of its own, under a name of ours where the family has none.

    It has none for a tensor that it does not know, nor for the experts in a stack.
    """
    names = HF_FAMILIES[config.family].names
    known = names.tensors.keys() - names.stacked
    for parameter in parameters(config):
        native_name = parameter.name.removeprefix(f"layers.{parameter.layer}.")
        native_name = native_name if parameter.expert else native_name.rsplit(".", 1)[0]
        if native_name in known:
            yield from _joined_by_name(parameter, hf_row_mappings(config, parameter))
            continue
        interleaving = row_interleaving(config, native_name, parameter.shape[1 if parameter.expert else 0])
        yield from _joined_by_name(
            parameter,
            [
                RowMapping(
                    f"{parameter.name}:{number}" if expert is None else f"{parameter.name}:{expert}:{number}",
                    *(parameter.name, 0, rows, start, run, period),
                    expert=expert,
                )
                for expert in (range(parameter.shape[0]) if parameter.expert else (None,))
                for number, (rows, start, run, period) in enumerate(interleaving)
            ],
        )


def _joined_by_name(parameter: Parameter, row_mappings: Iterable[RowMapping]) -> Iterator[HfTensor]:
    by_name: dict[str, list[RowMapping]] = defaultdict(list)
    for mapping in row_mappings:
        by_name[mapping.hf_name].append(mapping)
    columns = parameter.shape[2 if parameter.expert else 1 :]
    for name, of_name in by_name.items():
        first = of_name[0]
        shape = (sum(mapping.rows for mapping in of_name if mapping.expert == first.expert), *columns)
        shape = shape[::-1] if first.transposed else shape
        shape = (parameter.shape[0], *shape) if first.stacked else shape
        yield HfTensor(name, shape, tuple(of_name), parameter.buffer)


def hf_table_name(config: ModelConfig, table: str) -> str:
    """Return the name under which transformers saves the `embedding` or the `head`."""
    return f"{HF_FAMILIES[config.family].names.tensors[table][0]}.weight"


def hf_names(config: ModelConfig) -> set[str]:
    """Return the names of all tensors that transformers saves for an architecture."""
    return {tensor.name for tensor in hf_tensors(config)}


def row_interleaving(config: ModelConfig, native_name: str, rows: int) -> list[tuple[int, int, int, int]]:
    """Return (rows, start, run, period) of each part of a native tensor: row i of a part is as in `RowMapping`."""
    if native_name == "attention.qkv":
        query, head = config.heads // config.kv_heads * config.head_dim, config.head_dim
        group = query + 2 * head
        return [
            (config.kv_heads * query, 0, query, group),
            (config.kv_heads * head, query, head, group),
            (config.kv_heads * head, query + head, head, group),
        ]
    if native_name.endswith(("gate_up", "gate_up_bias")):
        return [(rows // 2, 0, 1, 2), (rows // 2, 1, 1, 2)]
    return [(rows, 0, rows, rows)]
