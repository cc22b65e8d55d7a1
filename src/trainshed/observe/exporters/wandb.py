"""Weights & Biases: one run with our run's id, which a restart goes on with; offline as files in the run's folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainshed.observe.exporters.figures import FigurePoint
from trainshed.observe.exporters.listener import ExportedRun
from trainshed.observe.exporters.tracker import Tracker
from trainshed.recipe.exporters import WandbProject

_INIT_SECONDS = 25.0
"""Shorter than the wait at the end of a run, so that a server which does not answer is reported as such."""
_SERVICE = "wandb-core"


class WandbTracker(Tracker):
    """A run of Weights & Biases."""

    def __init__(self, run: ExportedRun, options: WandbProject) -> None:
        self._run, self._options = run, options
        where = f"{options.entity}/{options.project}" if options.entity else options.project
        self.destination = f"{where} ({options.mode})"
        self._opened: Any = None

    def open(self) -> None:
        """Start the run, or go on with the one of this id."""
        import wandb

        run, options = self._run, self._options
        offline = options.mode == "offline"
        self._opened = wandb.init(
            project=options.project,
            entity=options.entity,
            id=f"{run.name}-{run.id}",
            name=run.run,
            # What is offline is joined by `wandb sync`, by the id.
            resume=None if offline else "allow",
            mode=options.mode,
            dir=str(run.folder),
            config=dict(run.config or {}),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                # It would read the GPUs every few seconds; our own events have them.
                x_disable_stats=True,
                init_timeout=_INIT_SECONDS,
            ),
        )

    def log(self, points: Sequence[FigurePoint]) -> None:
        """Write the figures into the run's history; W&B itself drops steps that it already has."""
        for point in points:
            self._opened.log(dict(point.figures), step=point.step)

    def close(self, exit_code: int) -> None:
        """Finish the run."""
        self._opened.finish(exit_code=exit_code)

    def abandon(self) -> None:
        """End W&B's own process, for which Python would wait when rank 0 ends, and GPUs with it.

        What it has not sent lies in the run's folder, and `wandb sync` sends it.
        """
        for children in Path("/proc/self/task").glob("*/children"):
            for process in children.read_text().split():
                with suppress(OSError):
                    if Path(f"/proc/{process}/comm").read_text().strip() == _SERVICE:
                        os.kill(int(process), signal.SIGKILL)
