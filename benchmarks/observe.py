"""What exporters and messages cost a training step: the time that rank 0 spends in each of them for one step event.

    python benchmarks/observe.py [--steps 2000] [--step-seconds 0.5]

Experiment trackers work in a thread of their own; what is measured is what the step waits for. The last column is the
share of a step of `--step-seconds`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from trainshed.launch.ranks import free_port
from trainshed.observe.events import EventWriter
from trainshed.observe.exporters import ExportedRun, RunListener, open_exporters
from trainshed.recipe import Observe
from trainshed.recipe.exporters import MlflowExperiment, PrometheusServer, TrackioProject, WandbProject
from trainshed.storage import LocalStore

VALUES: dict[str, Any] = {
    "loss": 2.5,
    "grad_norm": 1.0,
    "lr": 1e-3,
    "tokens": 1 << 20,
    "step_seconds": 0.5,
    "tokens_per_second_per_gpu": 12345.6,
    "mfu": 0.41,
    "mfu_full_attention": 0.44,
    "batch_hash": "0123456789abcdef",
    "skipped": False,
    "memory_gib": 61.5,
}
OFF = Observe(tensorboard=False, dllogger=False)


def chosen(folder: Path) -> Iterator[tuple[str, Observe]]:
    yield "tensorboard", OFF.model_copy(update={"tensorboard": True})
    yield "dllogger", OFF.model_copy(update={"dllogger": True})
    yield "prometheus", OFF.model_copy(update={"prometheus": PrometheusServer(port=free_port())})
    yield "wandb", OFF.model_copy(update={"wandb": WandbProject(project="p", mode="offline")})
    yield "mlflow", OFF.model_copy(update={"mlflow": MlflowExperiment(uri=str(folder / "mlruns"))})
    yield "trackio", OFF.model_copy(update={"trackio": TrackioProject(project="p")})


def microseconds(call: Callable[[int], object], steps: int) -> tuple[float, float]:
    """Median and mean of one call."""
    taken = []
    for step in range(steps):
        began = time.perf_counter_ns()
        call(step)
        taken.append((time.perf_counter_ns() - began) / 1000)
    return statistics.median(taken), statistics.mean(taken)


def _hand_over(listener: RunListener, step: int) -> None:
    listener({"kind": "step", "step": step, **VALUES})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--step-seconds", type=float, default=0.5)
    options = parser.parse_args()
    print(f"{'per step event':<16}{'median us':>11}{'mean us':>11}{'share of a step':>17}")

    def show(name: str, median: float, mean: float) -> None:
        print(f"{name:<16}{median:>11.1f}{mean:>11.1f}{mean / 1e6 / options.step_seconds:>17.4%}")

    with tempfile.TemporaryDirectory(prefix="trainshed-observe-") as place:
        folder = Path(place)
        os.environ["TRACKIO_DIR"] = str(folder / "trackio-folder")
        with EventWriter(LocalStore(folder / "events"), "", attempt=1, rank=0) as events:
            show("the event itself", *microseconds(lambda step: events.emit("step", step, **VALUES), options.steps))
        for name, observe in chosen(folder):
            run = ExportedRun("bench", name, folder / name, sequence_length=4096, config={"name": "bench"})
            warnings: list[str] = []
            with ExitStack() as stack:
                (listener,) = open_exporters(observe, run, warn=warnings.append)
                stack.enter_context(listener)
                cost = microseconds(partial(_hand_over, listener), options.steps)
            show(name, *cost)
            print(*(f"  {warning}" for warning in warnings), sep="\n", end="\n" if warnings else "")


if __name__ == "__main__":
    main()
