"""Stacked bars: cells add up, and nothing that exists vanishes."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from trainshed.plan.performance.memory import GpuMemory
from trainshed.plan.performance.prediction import StepTimes
from trainshed.plan.report.text import MEMORY_PARTS, TIME_PARTS, share_cells


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=8), st.integers(8, 200))
def test_cells_add_up_and_nothing_vanishes(amounts: list[float], width: int) -> None:
    cells = share_cells(amounts, width)
    assert sum(cells) == (width if sum(amounts) > 0 else 0)
    assert all(
        (count > 0) == (amount / sum(amounts) > 0) for count, amount in zip(cells, amounts, strict=True) if sum(amounts)
    )


def test_every_field_has_a_part_and_parts_keep_apart() -> None:
    assert [part.key for part in MEMORY_PARTS] == [part.name for part in fields(GpuMemory) if part.name != "capacity"]
    assert [part.key for part in TIME_PARTS] == [part.name for part in fields(StepTimes)]
    for parts in (MEMORY_PARTS, TIME_PARTS):
        assert len({part.letter for part in parts}) == len({part.colour for part in parts}) == len(parts)
