"""trackio: one run with our run's name, in trackio's own folder on this machine or in a Space of the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainshed.observe.exporters.figures import FigurePoint
from trainshed.observe.exporters.listener import ExportedRun
from trainshed.observe.exporters.tracker import Tracker
from trainshed.recipe.exporters import TrackioProject


class TrackioTracker(Tracker):
    """A run of trackio."""

    def __init__(self, run: ExportedRun, options: TrackioProject) -> None:
        self._run, self._options = run, options
        self.destination = f"{options.project} of {options.space or 'this machine'}"
        self._opened: Any = None

    def open(self) -> None:
        """Start the run, or go on with the one of this name."""
        import trackio

        self._opened = trackio.init(
            project=self._options.project,
            name=self._run.run,
            space_id=self._options.space,
            config=dict(self._run.config or {}),
            resume="allow",
            embed=False,
            # Our own events have them.
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, points: Sequence[FigurePoint]) -> None:
        """Write the figures."""
        for point in points:
            self._opened.log(dict(point.figures), step=point.step)

    def close(self, exit_code: int) -> None:
        """Send what is left."""
        self._opened.finish()
