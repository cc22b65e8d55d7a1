"""The results of a sweep: the figures of its runs, read from their folders, as a table and as one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any

from trainshed.errors import TrainshedError
from trainshed.launch.stored_run import exists, prepared_length, stored_run_status
from trainshed.observe.engine_logs.run_logs import read_run_events
from trainshed.observe.event_log import completed_steps
from trainshed.observe.metrics import RunMetrics, measure_events
from trainshed.observe.run_facts import read_run_recipe, run_facts
from trainshed.plan.model_shape import model_shape
from trainshed.plan.report.line_chart import SERIES_COLOURS, ChartSeries, html_document, html_table, line_chart
from trainshed.recipe import Recipe
from trainshed.storage import Store

_CURVE_POINTS = 300
"""Points of one curve: the page has one of each run."""
_MOST_MARKS = 12
"""Values that are written along an axis before round numbers are."""


@dataclass(frozen=True)
class RunFigures:
    """The figures of one run; None for what is not known."""

    step: int = 0
    """Steps that are done."""
    loss: float | None = None
    """Of the last step."""
    validation_loss: float | None = None
    best_validation_loss: float | None = None
    best_step: int | None = None
    tokens: int | None = None
    """Seen in training."""
    parameters: int | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    losses: tuple[tuple[float, float], ...] = ()
    """Step and loss, thinned out."""
    validations: tuple[tuple[float, float], ...] = ()

    @property
    def final_loss(self) -> float | None:
        """What runs are compared by: the best validation loss, or the last loss where nothing was validated."""
        return self.best_validation_loss if self.best_validation_loss is not None else self.loss

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON; without the curves, which are in the runs' events."""
        return {
            "step": self.step,
            "loss": self.loss,
            "validation_loss": self.validation_loss,
            "best_validation_loss": self.best_validation_loss,
            "best_step": self.best_step,
            "tokens": self.tokens,
            "parameters": self.parameters,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
        }


def is_finished(store: Store, recipe: Recipe, steps: int | None) -> bool:
    """Whether a run is done as this recipe asks: all its steps, and its export where there is one."""
    if not exists(store):
        return False
    status = stored_run_status(store, steps)
    stored = read_run_recipe(store, "")
    if status.state != "done" or stored is None or stored.export != recipe.export:
        return False
    done = status.progress.step
    if status.progress.early_stop is not None and stored.train.early_stop == recipe.train.early_stop:
        return True
    if steps is not None:
        return done == steps
    # Its length follows from the data, and is known since it was prepared.
    same_length = (stored.train.tokens, stored.train.epochs) == (recipe.train.tokens, recipe.train.epochs)
    return same_length and done is not None and done == prepared_length(store)


def read_figures(store: Store) -> RunFigures:
    """Read the figures of a run from its folder; empty where it has not begun."""
    if not exists(store):
        return RunFigures()
    events = read_run_events(store, "")
    done = completed_steps(events)
    facts = run_facts(store, "", events)
    parameters = None if facts.config is None else model_shape(facts.config).weights
    # A step that was done twice counts as it was done last.
    by_step = {
        event["step"]: event["loss"]
        for event in events
        if event["kind"] == "validation" and event["loss"] is not None and isfinite(event["loss"])
    }
    best_step = min(by_step, key=lambda step: by_step[step], default=None)
    if not done:
        return RunFigures(parameters=parameters)
    metrics: RunMetrics | None = None
    with suppress(
        TrainshedError
    ):  # too few steps to measure by, or an MFU that cannot be: the losses count all the same
        metrics = measure_events(events, facts)
    last = done[-1]
    losses = [(float(event["step"] + 1), event["loss"]) for event in done if event["loss"] is not None]
    return RunFigures(
        step=last["step"] + 1,
        loss=last["loss"],
        validation_loss=by_step[max(by_step)] if by_step else None,
        best_validation_loss=None if best_step is None else by_step[best_step],
        best_step=best_step,
        tokens=last.get("tokens"),
        parameters=parameters,
        tokens_per_second=None if metrics is None else metrics.tokens_per_second,
        mfu=None if metrics is None or metrics.mfu is None else metrics.mfu.mfu,
        losses=tuple(losses[:: ceil(len(losses) / _CURVE_POINTS) or 1]),
        validations=tuple(sorted((float(step), loss) for step, loss in by_step.items())),
    )


SWEEP_COLUMNS = ("steps", "loss", "val loss", "best val", "tokens/s", "MFU", "state", "run")


def sweep_rows(plain: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table of a sweep, by what `sweep.json` holds: the columns, and a row for each run."""
    keys: list[str] = plain["keys"]
    short = [key.rpartition(".")[2] for key in keys]
    names = short if len(set(short)) == len(short) else list(keys)
    best = _best(plain)
    rows = []
    for run in plain["runs"]:
        steps = f"{run['step']:,}" + (f" of {run['steps']:,}" if run["steps"] and run["step"] != run["steps"] else "")
        mark = " *" if best is not None and _final(run) == best else ""
        has_validation = run["best_validation_loss"] is not None
        rows.append(
            [
                *(run["values"][key] for key in keys),
                steps,
                _loss_text(run["loss"]) + ("" if has_validation else mark),
                _loss_text(run["validation_loss"]),
                _loss_text(run["best_validation_loss"]) + (mark if has_validation else ""),
                "" if run["tokens_per_second"] is None else f"{run['tokens_per_second']:,.0f}",
                "" if run["mfu"] is None else f"{run['mfu']:.1%}",
                run["state"],
                run["run"],
            ]
        )
    return [*names, *SWEEP_COLUMNS], rows


def mark_text(plain: Mapping[str, Any]) -> str:
    """Return what the mark in the table of a sweep says; empty where nothing is marked."""
    best = _best(plain)
    if best is None:
        return ""
    is_validation = any(run["best_validation_loss"] == best for run in plain["runs"])
    return "* the lowest validation loss" if is_validation else "* the lowest loss after the last step"


def _best(plain: Mapping[str, Any]) -> float | None:
    """The lowest final loss; None where there is none, or nothing to compare it with."""
    losses = [loss for run in plain["runs"] if (loss := _final(run)) is not None]
    return min(losses) if losses and len(plain["runs"]) > 1 else None


def _final(run: Mapping[str, Any]) -> float | None:
    loss = run["best_validation_loss"] if run["best_validation_loss"] is not None else run["loss"]
    return loss if loss is not None and isfinite(loss) else None


def _loss_text(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"


def sweep_page(plain: Mapping[str, Any], figures: Mapping[str, RunFigures]) -> str:
    """Return the page of a sweep: the table, the curves of all runs, and the final loss over every swept key."""
    columns, rows = sweep_rows(plain)
    runs: Sequence[Mapping[str, Any]] = plain["runs"]
    colours = {run["run"]: SERIES_COLOURS[place % len(SERIES_COLOURS)] for place, run in enumerate(runs)}
    labels = {
        run["run"]: " ".join(f"{key.rpartition('.')[2]}={run['values'][key]}" for key in plain["keys"]) for run in runs
    }
    has_validation = any(one.validations for one in figures.values())
    mark = mark_text(plain)
    sections = [("Runs", html_table(columns, rows) + (f"<p>{mark}</p>" if mark else ""))]
    failures = [[labels[run["run"]], run["why"]] for run in runs if run["state"] in ("failed", "stopped")]
    if failures:
        sections.append(("Not done", html_table(["run", "why"], failures)))
    if has_validation:
        curves = [
            ChartSeries(labels[name], one.validations, colours[name])
            for name, one in figures.items()
            if one.validations
        ]
        chart = line_chart(curves, x_label="step", y_label="validation loss")
        sections.append(("Validation loss", chart.svg(label="Validation loss by run")))
    curves = [ChartSeries(labels[name], one.losses, colours[name]) for name, one in figures.items() if one.losses]
    chart = line_chart(curves, x_label="step", y_label="training loss")
    sections.append(("Training loss", chart.svg(label="Training loss by run")))
    what = "best validation loss" if has_validation else "last training loss"
    for key in plain["keys"]:
        chart = _final_chart(key, runs, figures, labels, colours, what)
        sections.append((f"Final loss over {key}", chart))
    title = f"Sweep {plain['name']}/{plain['id']}"
    done = sum(run["state"] == "done" for run in runs)
    return html_document(title, f"{plain['recipe']} on {plain['on']}: {done} of {len(runs)} runs done", sections)


def _final_chart(
    key: str,
    runs: Sequence[Mapping[str, Any]],
    figures: Mapping[str, RunFigures],
    labels: Mapping[str, str],
    colours: Mapping[str, str],
    what: str,
) -> str:
    """The final loss of every run over one key: numbers on an axis, words beside each other."""
    values = list(dict.fromkeys(run["values"][key] for run in runs))
    numbers = {value: _number(value) for value in values}
    are_numbers = all(number is not None for number in numbers.values())
    places = {value: float(place) for place, value in enumerate(values)}
    positive = [number for number in numbers.values() if number is not None and number > 0]
    log_x = are_numbers and len(positive) == len(values) and max(positive) >= 5 * min(positive)
    series = []
    for run in runs:
        loss = figures[run["run"]].final_loss if run["run"] in figures else None
        if loss is None:
            continue
        value = run["values"][key]
        number = numbers[value]
        x = number if are_numbers and number is not None else places[value]
        tip = f"{labels[run['run']]}: {loss:.4f}"
        series.append(ChartSeries("", [(x, loss)], colours[run["run"]], dots=True, tips=[tip]))
    names = () if are_numbers else tuple(values)
    known = [(number, value) for value, number in numbers.items() if number is not None]
    marks = known if are_numbers and len(known) <= _MOST_MARKS else ()
    chart = line_chart(series, x_label=key, y_label=what, log_x=log_x, x_names=names, x_marks=marks)
    return chart.svg(label=f"{what} over {key}")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
