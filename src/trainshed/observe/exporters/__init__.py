"""What a training writes besides its events, for tools that people already use.

tensorboard, dllogger    files in the run's folder
prometheus               an address of rank 0 that Prometheus reads
wandb, mlflow, trackio   runs of these tools, sent by a thread

An exporter receives every event of rank 0 as it is emitted. One that cannot write warns once and stops; the run goes
on. `export_run` writes the figures of a run that has ended, or was trained elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

from trainshed.errors import MissingExtra
from trainshed.observe.exporters.dllogger import DLLoggerExporter
from trainshed.observe.exporters.file_exporter import Exporter
from trainshed.observe.exporters.listener import ExportedRun, GuardedListener, RunListener
from trainshed.observe.exporters.tensorboard import TensorBoardExporter
from trainshed.plugins import Registry
from trainshed.recipe import Observe

__all__ = [
    "EXPORTERS",
    "FILE_EXPORTERS",
    "TRACKERS",
    "DLLoggerExporter",
    "ExportedRun",
    "Exporter",
    "GuardedListener",
    "RunListener",
    "TensorBoardExporter",
    "check_installed",
    "open_exporters",
]

FILE_EXPORTERS: dict[str, type[Exporter]] = {"tensorboard": TensorBoardExporter, "dllogger": DLLoggerExporter}
TRACKERS = ("wandb", "mlflow", "trackio")
_MODULES = {"prometheus": "prometheus_client", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""What is imported for a tool; the extra has the tool's name."""

EXPORTERS: Registry[Callable[..., RunListener]] = Registry("exporter", {**FILE_EXPORTERS})
"""By name. Ours are switched by the key of their name under `observe`, those of plugins by `observe.exporters`."""


def check_installed(observe: Observe) -> None:
    """Raise what must be installed for the tools that a recipe names."""
    for name, module in _MODULES.items():
        if getattr(observe, name) is not None and find_spec(module) is None:
            raise MissingExtra.named(name, f"observe.{name}")


def open_exporters(observe: Observe, run: ExportedRun, *, warn: Callable[[str], None]) -> Iterator[RunListener]:
    """Yield the exporters that a recipe asks for."""
    check_installed(observe)
    for name, kind in FILE_EXPORTERS.items():
        if getattr(observe, name) is not False:
            yield kind(run.folder, sequence_length=run.sequence_length, warn=warn)
    if observe.prometheus is not None:
        from trainshed.observe.exporters.prometheus import PrometheusExporter

        yield PrometheusExporter(run, observe.prometheus, warn=warn)
    for name in TRACKERS:
        if getattr(observe, name) is not None:
            from trainshed.observe.exporters.tracker import open_tracker

            yield open_tracker(name, observe, run, warn=warn)
    for name, options in (observe.exporters or {}).items():
        yield GuardedListener(name, partial(EXPORTERS.find(name), run.folder, **options), warn)
