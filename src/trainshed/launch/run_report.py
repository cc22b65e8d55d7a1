"""The page of a run in one file, written when a start ends: by `run` and `train` here, by a job's leading agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainshed.data.prompts import read_answers
from trainshed.errors import TrainshedError
from trainshed.plugins import plugins_not_run
from trainshed.recipe import load_recipe
from trainshed.recipe.phase_spans import written_steps
from trainshed.reporting import SILENT, Reporter
from trainshed.run_folder import EVENTS, PREPARED_FILE, RECIPE_FILE, read_prepared
from trainshed.storage import LocalStore


def report_run(run_folder: Path, reporter: Reporter = SILENT) -> Path | None:
    """Write `report.html` of a run that has begun; a failure is only a warning."""
    from trainshed.observe.dash.report import write_report

    if not (run_folder / EVENTS).is_dir():
        return None

    def answers() -> list[dict[str, Any]]:
        return [{"step": step.step, "answers": step.answers} for step in read_answers(LocalStore(run_folder), "")]

    return write_report(run_folder, steps=lambda: _planned_steps(run_folder), answers=answers, reporter=reporter)


def _planned_steps(run_folder: Path) -> int | None:
    try:
        with plugins_not_run():
            steps = written_steps(load_recipe(str(run_folder / RECIPE_FILE)))
        return steps or read_prepared((run_folder / PREPARED_FILE).read_bytes(), run_folder).get("steps")
    except (TrainshedError, OSError, ValueError):
        return None
