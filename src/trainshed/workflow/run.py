"""The stages of a recipe on this machine, in order: fetch, prepare, train, export. Each is skipped where it is proven.

`run` is what the command line calls, and what a program or a notebook can call. Nothing is printed: progress goes to
the reporter and to whoever watches the training's events. A killed run goes on where it was when it is called again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from trainshed.launch.here import train_here
from trainshed.launch.run_lock import only_start
from trainshed.observe.reading import done_steps, read_events
from trainshed.plan import RankLayout
from trainshed.recipe import Cluster, Recipe, load_cluster, to_yaml
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import LocalStore
from trainshed.workflow.layout import planned_layout
from trainshed.workflow.prepare import PreparedRun, keep_run, open_run, prepare_run, store_options
from trainshed.workflow.stages import export_run
from trainshed.workflow.start import RunStart, check_goes_on, find_start, note_other_runs
from trainshed.workflow.train import check_trainable

LayoutKeys = dict[str, object]
"""Keys of the layout that go over the recipe's own, as `parse_layout` reads them."""
EventListener = Callable[[dict[str, Any]], None]
WatchTraining = Callable[[int], AbstractContextManager[EventListener]]
"""Given the number of steps, yields what to call with every event of the training."""
CLUSTER = "cluster.yaml"
"""Where a run keeps the cluster file that it was started with, for its ranks."""


@dataclass(frozen=True)
class TrainedRun:
    """A run after an attempt: how far it has come, and how it ended."""

    prepared: PreparedRun
    layout: RankLayout
    attempt: int
    exit_code: int
    """0, or 128 + the signal that asked for a stop."""
    last_step: dict[str, Any] | None
    """The event of the last step."""
    validation_loss: float | None
    checkpoint: str | None
    export: str | None = None
    """Where the exported weights are; None where the recipe exports none, or the training was stopped."""

    @property
    def steps_done(self) -> int:
        """How many steps are done."""
        return self.last_step["step"] + 1 if self.last_step is not None else 0

    @property
    def is_complete(self) -> bool:
        """Whether all its steps are done."""
        return self.steps_done == self.prepared.steps


def watching(listener: EventListener) -> WatchTraining:
    """Let a function follow the events of a training."""

    @contextmanager
    def watch(steps: int) -> Iterator[EventListener]:
        yield listener

    return watch


UNWATCHED = watching(lambda event: None)


def run(
    recipe: Recipe,
    cluster: Cluster | None = None,
    *,
    id: str | None = None,
    layout: LayoutKeys | None = None,
    workers: int | None = None,
    reporter: Reporter = SILENT,
    watch: WatchTraining = UNWATCHED,
) -> TrainedRun:
    """Carry a recipe through every stage on this machine; what is already made and proven is not made again.

    Raises `InputError` before any work for what could not train here, `TrainshedError` for work that fails.
    """
    cluster = cluster or load_cluster()
    check_trainable(recipe, cluster, keys=layout)
    with _started(recipe, cluster, id, reporter) as start:
        prepared = prepare_run(recipe, cluster, id=start.id, workers=workers, reporter=reporter)
        trained = _train(prepared, cluster, layout, reporter, watch)
        if recipe.export is None or not trained.is_complete:
            return trained
        exported = export_run(
            prepared.recipe,
            prepared.folder,
            reporter,
            tokenizer=prepared.tokenizer,
            options=store_options(cluster),
        )
    return replace(trained, export=exported)


def train(
    recipe: Recipe,
    cluster: Cluster | None = None,
    *,
    id: str | None = None,
    layout: LayoutKeys | None = None,
    reporter: Reporter = SILENT,
    watch: WatchTraining = UNWATCHED,
) -> TrainedRun:
    """Train a recipe whose data is prepared, with all its ranks here."""
    cluster = cluster or load_cluster()
    check_trainable(recipe, cluster, keys=layout)
    with _started(recipe, cluster, id, reporter) as start:
        return _train(open_run(recipe, cluster, id=start.id), cluster, layout, reporter, watch)


@contextmanager
def _started(recipe: Recipe, cluster: Cluster, id: str | None, reporter: Reporter) -> Iterator[RunStart]:
    """Hold the recipe's run, once it is known that it can go on."""
    start = find_start(recipe, cluster, id)
    check_goes_on(start, recipe.train.steps, store_options(cluster))
    with only_start(start.folder, start.run):
        note_other_runs(start, reporter)
        yield start


def _train(
    prepared: PreparedRun, cluster: Cluster, layout: LayoutKeys | None, reporter: Reporter, watch: WatchTraining
) -> TrainedRun:
    start = RunStart(prepared.recipe, prepared.id, prepared.folder)
    check_goes_on(start, prepared.steps, store_options(cluster))
    chosen = planned_layout(prepared.recipe, cluster, keys=layout, reporter=reporter)
    keep_run(prepared)
    store = LocalStore(prepared.folder)
    store.put(CLUSTER, to_yaml(cluster).encode())
    with watch(prepared.steps) as on_event:
        ended = train_here(
            prepared.folder,
            chosen.layout,
            precision=prepared.recipe.train.precision,
            reasons=chosen.reasons,
            calibration=chosen.calibration,
            worker_arguments=("--on", str(prepared.folder / CLUSTER)),
            on_event=on_event,
        )
    events = list(read_events(store, ""))
    done = done_steps(events)
    measured = [event["loss"] for event in events if event["kind"] == "validation"]
    saved = [event["path"] for event in events if event["kind"] == "checkpoint" and event["phase"] == "committed"]
    return TrainedRun(
        prepared=prepared,
        layout=chosen.layout,
        attempt=ended.attempt,
        exit_code=ended.exit_code,
        last_step=done[-1] if done else None,
        validation_loss=measured[-1] if measured else None,
        checkpoint=saved[-1] if saved else None,
    )
