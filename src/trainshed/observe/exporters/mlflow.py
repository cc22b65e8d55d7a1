"""MLflow: one run with our run's name and id as a tag, by which a restart finds it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from trainshed.observe.exporters.figures import FigurePoint
from trainshed.observe.exporters.listener import ExportedRun
from trainshed.observe.exporters.tracker import Tracker
from trainshed.recipe.exporters import MlflowExperiment
from trainshed.redaction import shown_address

_TAG = "trainshed.run"
_MOST_METRICS = 1000
_MOST_PARAMETERS = 100
_MOST_CHARACTERS = 500
"""What MLflow's server takes in one request, and as the value of a parameter in all of its versions."""


class MlflowTracker(Tracker):
    """A run of MLflow."""

    def __init__(self, run: ExportedRun, options: MlflowExperiment) -> None:
        self._run, self._uri = run, options.uri
        self._experiment = options.experiment or run.name
        self.destination = f"{self._experiment} of {shown_address(options.uri)}"
        self._client: Any = None
        self._id = ""

    def open(self) -> None:
        """Find the run by its tag, or create it with the recipe as its parameters."""
        if "://" not in self._uri:
            # MLflow asks for this since its file store is no longer developed; whoever writes a folder wants it.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow

        uri = self._uri if "://" in self._uri else os.path.abspath(self._uri)
        self._client = client = mlflow.MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(self._experiment)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(self._experiment)
        known = client.search_runs([experiment_id], filter_string=f"tags.`{_TAG}` = '{self._run.run}'", max_results=1)
        if known:
            self._id = known[0].info.run_id
            client.update_run(self._id, status="RUNNING")
            return
        self._id = client.create_run(experiment_id, run_name=self._run.run, tags={_TAG: self._run.run}).info.run_id
        parameters = [
            mlflow.entities.Param(key, str(value)[:_MOST_CHARACTERS])
            for key, value in _flatten(self._run.config or {}).items()
        ]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            client.log_batch(self._id, params=parameters[first : first + _MOST_PARAMETERS])

    def log(self, points: Sequence[FigurePoint]) -> None:
        """Write the figures as metrics."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, float(value), round(1000 * (point.time or time.time())), point.step)
            for point in points
            for name, value in point.figures.items()
        ]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MOST_METRICS])

    def close(self, exit_code: int) -> None:
        """End the run."""
        status = "FINISHED" if exit_code == 0 else "KILLED" if exit_code > 128 else "FAILED"
        self._client.set_terminated(self._id, status=status)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= _flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat
