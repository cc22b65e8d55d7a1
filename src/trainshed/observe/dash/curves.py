"""Figures over the steps of a run, in columns that grow; a window of them is cut into as many points as are drawn.

A run has up to millions of steps and a page some hundreds of pixels. Each pixel gets the mean of its steps with their
minimum and maximum, so that no spike is lost.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

AXES = ("step", "tokens", "time")
"""What figures may be drawn over: steps that are done, tokens, seconds since the run began."""
_CACHED_WINDOWS = 64
_NAN = float("nan")


@dataclass(frozen=True)
class CurveWindow:
    """Some figures in a part of the run: a column of values for each, in the order of `x`.

    Where there are more rows than points, `low` and `high` are the extremes of the rows of each value.
    """

    rows: int
    x: np.ndarray
    counts: np.ndarray | None
    """How many rows each point stands for; None: one."""
    values: Mapping[str, np.ndarray]
    low: Mapping[str, np.ndarray]
    high: Mapping[str, np.ndarray]

    def to_plain(self) -> dict[str, Any]:
        """The window, for JSON."""
        return {
            "rows": self.rows,
            "x": self.x,
            "counts": self.counts,
            "values": dict(self.values),
            "low": dict(self.low),
            "high": dict(self.high),
        }


class Curves:
    """Rows in the order of steps; a figure that a row lacks is NaN."""

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {}
        self._rows = 0
        self._windows: OrderedDict[tuple[Any, ...], CurveWindow] = OrderedDict()

    def __len__(self) -> int:
        return self._rows

    @property
    def keys(self) -> list[str]:
        """The figures that any row has, without the axes."""
        return [key for key in self._columns if key not in AXES]

    @property
    def last_step(self) -> float | None:
        """The step of the last row."""
        return self._columns["step"][-1] if self._rows else None

    def append(self, step: float, figures: Mapping[str, float]) -> None:
        """Add a row; rows from this step on, which an earlier attempt had done, are dropped."""
        if self._rows and step <= self._columns["step"][-1]:
            self.drop_from(step)
        self._set("step", step)
        for key, value in figures.items():
            self._set(key, value)
        self._rows += 1
        self._windows.clear()

    def drop_from(self, step: float) -> None:
        """Drop the rows of this step and later ones."""
        steps = self._columns.get("step", array("d"))
        row = bisect_left(steps, step)
        for column in self._columns.values():
            del column[row:]
        self._rows = len(steps)
        self._windows.clear()

    def last(self, key: str) -> float | None:
        """The figure of the last row; None where it has none."""
        column = self._columns.get(key)
        if column is None or len(column) < self._rows or not self._rows:
            return None
        return None if column[-1] != column[-1] else column[-1]

    def column(self, key: str) -> np.ndarray:
        """A copy of one column."""
        column = self._columns.get(key)
        values = np.full(self._rows, _NAN)
        if column is not None:
            values[: len(column)] = column
        return values

    def window(
        self,
        keys: Sequence[str],
        *,
        axis: str = "step",
        start: float | None = None,
        end: float | None = None,
        points: int,
    ) -> CurveWindow:
        """Return figures between two places of an axis, as at most `points` points."""
        request = (tuple(keys), axis, start, end, points)
        if (window := self._windows.get(request)) is None:
            window = self._windows[request] = self._cut(keys, axis, start, end, points)
            if len(self._windows) > _CACHED_WINDOWS:
                self._windows.popitem(last=False)
        return window

    def _cut(self, keys: Sequence[str], axis: str, start: float | None, end: float | None, points: int) -> CurveWindow:
        x = self.column(axis)
        # A clock may be set back between two attempts.
        x = np.maximum.accumulate(x) if axis == "time" else x
        first = 0 if start is None else int(np.searchsorted(x, start, side="left"))
        last = len(x) if end is None else int(np.searchsorted(x, end, side="right"))
        # One row more on each side, so that lines reach the edges.
        first, last = (
            max(0, first - 1) if start is not None else first,
            min(len(x), last + 1) if end is not None else last,
        )
        x = x[first:last]
        columns = {key: self.column(key)[first:last] for key in keys if key in self._columns}
        if len(x) <= points:
            return CurveWindow(len(x), x, None, {key: values.astype("f4") for key, values in columns.items()}, {}, {})
        edges = np.linspace(x[0], x[-1], points + 1)[:-1]
        starts = np.unique(np.searchsorted(x, edges, side="left"))
        counts = np.diff(starts, append=len(x))
        values, low, high = {}, {}, {}
        for key, column in columns.items():
            known = np.isfinite(column)
            known_counts = np.add.reduceat(known, starts, dtype="f8")
            sums = np.add.reduceat(np.where(known, column, 0.0), starts)
            with np.errstate(invalid="ignore"):
                values[key] = (sums / known_counts).astype("f4")
            low[key] = np.fmin.reduceat(column, starts).astype("f4")
            high[key] = np.fmax.reduceat(column, starts).astype("f4")
        return CurveWindow(len(x), np.add.reduceat(x, starts) / counts, counts, values, low, high)

    def _set(self, key: str, value: float) -> None:
        column = self._columns.get(key)
        if column is None:
            column = self._columns[key] = array("d")
        if len(column) < self._rows:
            column.extend([_NAN] * (self._rows - len(column)))
        column.append(value)
