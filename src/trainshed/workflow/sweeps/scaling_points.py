"""Finished runs, sweeps and tables as the points of a scaling law (`plan/scaling_law.py`)."""

from __future__ import annotations

import csv
from pathlib import Path

from trainshed.errors import InputError
from trainshed.plan.scaling_law import LossPoint
from trainshed.storage import Store
from trainshed.workflow.sweeps.results import RunFigures, read_figures

TABLE_COLUMNS = ("parameters", "tokens", "loss")


def run_point(name: str, store: Store) -> LossPoint:
    """Return the size and the last validation loss of a run."""
    return figures_point(name, read_figures(store))


def figures_point(name: str, figures: RunFigures) -> LossPoint:
    """Return the point of a run by its figures; raises where one of them is not known."""
    if figures.parameters is None or not figures.tokens:
        raise InputError(f"{name} has no steps, or its model is not known", where=name)
    if figures.validation_loss is None:
        raise InputError(
            "this run has no validation loss, and the loss of a training batch is too noisy for a law",
            where=name,
            hint="write `data.validation` in the recipe",
        )
    return LossPoint(name, figures.parameters, figures.tokens, figures.validation_loss)


def table_points(path: Path) -> list[LossPoint]:
    """Read points from a CSV file with the columns parameters, tokens and loss, and perhaps run."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise InputError(f"cannot be read: {why}", where=str(path)) from None
    points = []
    for number, row in enumerate(rows, start=2):
        try:
            values = [float(row[column]) for column in TABLE_COLUMNS]
        except (KeyError, TypeError, ValueError):
            raise InputError(
                "a row needs a number in each of the columns parameters, tokens and loss", where=f"{path}:{number}"
            ) from None
        points.append(LossPoint(row.get("run") or f"row {number}", *values))
    return points
