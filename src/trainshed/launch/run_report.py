"""The page of a run in one file, written when a start ends: by `run` and `train` here, by a job's leading agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainshed.data.prompts import read_answers
from trainshed.launch.stored_run import planned_steps
from trainshed.reporting import SILENT, Reporter
from trainshed.run_folder import EVENTS
from trainshed.storage import LocalStore


def report_run(run_folder: Path, reporter: Reporter = SILENT) -> Path | None:
    """Write `report.html` of a run that has begun; a failure is only a warning."""
    from trainshed.observe.dash.report import write_report

    if not (run_folder / EVENTS).is_dir():
        return None

    store = LocalStore(run_folder)

    def answers() -> list[dict[str, Any]]:
        return [{"step": step.step, "answers": step.answers} for step in read_answers(store, "")]

    return write_report(run_folder, steps=lambda: planned_steps(store), answers=answers, reporter=reporter)
