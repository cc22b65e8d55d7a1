"""The figures of a training for Prometheus: rank 0 serves them on a port, with a registry of its own.

`GAUGES` and `COUNTERS` are all there is; every series has the labels `run` and `attempt`. Units are Prometheus' base
units (seconds, bytes, ratios). The dashboard beside this file (`grafana.json`) shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trainshed.observe.exporters.listener import ExportedRun
from trainshed.recipe.exporters import PrometheusServer

_GIB = float(1 << 30)
GAUGES: dict[str, str] = {
    "trainshed_step": "Steps that are done",
    "trainshed_steps_planned": "Steps that the run is to have",
    "trainshed_step_timestamp_seconds": "When the last step ended, in seconds since 1970",
    "trainshed_step_seconds": "Seconds of the last step",
    "trainshed_loss": "Training loss of the last step",
    "trainshed_validation_loss": "Loss of the last validation",
    "trainshed_grad_norm": "Norm of the gradient before clipping",
    "trainshed_learning_rate": "Learning rate",
    "trainshed_tokens": "Tokens that the run has consumed, over all attempts",
    "trainshed_tokens_per_second_per_gpu": "Tokens per second and GPU in the last step",
    "trainshed_mfu_ratio": "Model FLOPs utilisation of the last step, 0 to 1, with causal attention",
    "trainshed_memory_bytes": "Most memory that rank 0 had allocated",
    "trainshed_checkpoint_step": "Steps in the newest committed checkpoint",
    "trainshed_checkpoint_seconds": "Seconds that the newest checkpoint took to write",
    "trainshed_checkpoint_stall_seconds": "Seconds that training stopped for the newest checkpoint",
    "trainshed_compute_seconds_max": "Slowest rank: seconds of a step that it computed, mean of the last window",
    "trainshed_compute_seconds_median": "Median rank: seconds of a step that it computed, mean of the last window",
}
"""Name and help of what goes up and down."""
NAMED_GAUGES: dict[str, str] = {
    "trainshed_source_loss": "Training loss of the last step that had samples of a source",
    "trainshed_validation_set_loss": "Loss of the last validation of a named set",
}
"""Name and help of the losses of sources and sets, which have the label `name` too."""
COUNTERS: dict[str, str] = {
    "trainshed_step_duration_seconds": "Seconds of all steps of this attempt",
    "trainshed_steps_done": "Steps of this attempt",
    "trainshed_steps_skipped": "Steps of this attempt that updated nothing, because they were not finite",
    "trainshed_alarms": "Alarms of this attempt: loss spikes, stragglers and the like",
    "trainshed_warnings": "Warnings of this attempt",
}
"""Name and help of what only goes up; Prometheus shows them with `_total`."""
INFO = "trainshed_run_info"
_STEP_GAUGES = {
    "loss": "trainshed_loss",
    "grad_norm": "trainshed_grad_norm",
    "lr": "trainshed_learning_rate",
    "tokens": "trainshed_tokens",
    "step_seconds": "trainshed_step_seconds",
    "tokens_per_second_per_gpu": "trainshed_tokens_per_second_per_gpu",
    "mfu": "trainshed_mfu_ratio",
}


def grafana_dashboard() -> Path:
    """Return the file of the Grafana dashboard that shows these figures."""
    return Path(__file__).with_name("grafana.json")


class PrometheusExporter:
    """Serves the figures of one attempt at http://host:port/metrics until it ends."""

    def __init__(self, run: ExportedRun, server: PrometheusServer, *, warn: Callable[[str], None]) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        self._run, self._host, self._port, self._warn = run, server.host, server.port, warn
        self.registry = CollectorRegistry()
        self._labels = {"run": run.run, "attempt": str(run.attempt)}
        names = list(self._labels)
        self._gauges = {name: Gauge(name, text, names, registry=self.registry) for name, text in GAUGES.items()}
        self._named_gauges = {
            name: Gauge(name, text, [*names, "name"], registry=self.registry) for name, text in NAMED_GAUGES.items()
        }
        self._counters = {
            name: Counter(name, text, names, registry=self.registry).labels(**self._labels)
            for name, text in COUNTERS.items()
        }
        info_labels = [*names, "layout", "device", "ranks", "parameters"]
        self._info = Gauge(INFO, "What runs, and on what; always 1", info_labels, registry=self.registry)
        self._server: Any = None

    def __enter__(self) -> Self:
        from prometheus_client import start_http_server

        try:
            self._server, _ = start_http_server(self._port, self._host, registry=self.registry)
        except OSError as error:
            reason = error.strerror or error
            self._warn(f"observe.prometheus: nothing is served at {self._host}:{self._port}: {reason}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take the figures of an event."""
        match event["kind"]:
            case "start":
                values = {"layout": event["layout"], "device": event["device"]}
                values |= {"ranks": str(event["world_size"]), "parameters": str(event["parameters"])}
                self._info.labels(**self._labels, **values).set(1)
                self._set("trainshed_steps_planned", self._run.steps)
            case "step":
                self._take_step(event)
            case "validation":
                self._set("trainshed_validation_loss", event["loss"])
                self._set_named("trainshed_validation_set_loss", event.get("set_losses"))
            case "resume":
                self._set("trainshed_step", event["step"])
                self._set("trainshed_checkpoint_step", event["step"])
            case "checkpoint" if event["phase"] == "committed":
                self._set("trainshed_checkpoint_step", event["step"])
                self._set("trainshed_checkpoint_seconds", event.get("seconds"))
            case "checkpoint" if event["phase"] == "staged":
                self._set("trainshed_checkpoint_stall_seconds", event.get("stall_seconds"))
            case "ranks":
                seconds = sorted(value for value in event["compute_seconds"] if value is not None)
                if seconds:
                    self._set("trainshed_compute_seconds_max", seconds[-1])
                    self._set("trainshed_compute_seconds_median", seconds[len(seconds) // 2])
            case "alarm":
                self._counters["trainshed_alarms"].inc()
            case "warning":
                self._counters["trainshed_warnings"].inc()

    def _take_step(self, event: Mapping[str, Any]) -> None:
        for key, name in _STEP_GAUGES.items():
            if event.get(key) is None:
                self._gauges[name].clear()  # a loss that is not finite: the one before must not pass for it
            self._set(name, event.get(key))
        self._set_named("trainshed_source_loss", event.get("source_losses"))
        self._set("trainshed_step", event["step"] + 1)
        self._gauges["trainshed_step_timestamp_seconds"].labels(**self._labels).set_to_current_time()
        memory = event.get("memory_gib")
        self._set("trainshed_memory_bytes", None if memory is None else memory * _GIB)
        self._counters["trainshed_steps_done"].inc()
        self._counters["trainshed_step_duration_seconds"].inc(event["step_seconds"])
        if event.get("skipped"):
            self._counters["trainshed_steps_skipped"].inc()

    def _set_named(self, gauge: str, losses: Mapping[str, float | None] | None) -> None:
        for name, loss in (losses or {}).items():
            if loss is not None:
                self._named_gauges[gauge].labels(**self._labels, name=name).set(loss)

    def _set(self, name: str, value: float | None) -> None:
        """Set a gauge. What is not known has no series."""
        if value is not None:
            self._gauges[name].labels(**self._labels).set(value)
