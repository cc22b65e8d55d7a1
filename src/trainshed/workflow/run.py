"""The stages of a recipe on this machine, in order: fetch, prepare, train, export, eval. What is proven is skipped.

`run` is what the command line calls, and what a program or a notebook can call. Before any work it finds the
run's folder and refuses what could not train here or could not continue. Nothing is printed: progress goes to the
reporter and to the watcher of the training's events. A killed run continues where it was when it is called again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainshed.catalog.models import architecture
from trainshed.checkpoints.native.folder import (
    CompleteCheckpoint,
    checkpoints_folder,
    latest_complete,
    list_checkpoints,
)
from trainshed.data.order import PhaseOrders
from trainshed.errors import InputError, MissingExtra, RecipeError, TrainshedError
from trainshed.launch.local import LocalRun, local_runs, lock_run, train_locally
from trainshed.launch.run_report import report_run
from trainshed.observe.event_log import completed_steps, read_events
from trainshed.observe.exporters import check_installed
from trainshed.observe.notify import notify_of_run, recipients_of
from trainshed.observe.run_status import read_run_status
from trainshed.observe.stages import StageRecorder
from trainshed.plan import RankLayout
from trainshed.plugins import plugins_not_run
from trainshed.recipe import Cluster, ModelConfig, Recipe, load_cluster, load_recipe, run_id, to_yaml
from trainshed.recipe.load import chosen_run_id, run_identity
from trainshed.recipe.phase_spans import with_rope_base, written_steps
from trainshed.reporting import SILENT, Reporter
from trainshed.run_folder import CLUSTER_FILE, RECIPE_FILE, run_path, store_of
from trainshed.storage import LocalStore, StoreOptions
from trainshed.this_machine import check_can_train
from trainshed.workflow.evaluation.evaluate import EvaluationReport, check_eval_inputs
from trainshed.workflow.evaluation.stage import EvaluationBesideTraining, evaluate_run
from trainshed.workflow.layout import phase_layouts, planned_layout, weights_architecture
from trainshed.workflow.prepare import (
    PreparedRun,
    open_run,
    prepare_run,
    resolve,
    save_run,
    store_options,
    store_root,
)
from trainshed.workflow.run_checkpoints import checkpoint_home, refuse_other_checkpoints
from trainshed.workflow.runnable import check_export_installed, check_runnable
from trainshed.workflow.stages import export_run

if TYPE_CHECKING:
    from trainshed.engines.torch.rank_env import PhaseJob, TrainJob


_SHOWN_KEYS = 4  # more differing keys are only counted


@dataclass(frozen=True)
class RunStart:
    """A run that is about to be started, or to go on."""

    recipe: Recipe
    """As resolved."""
    id: str
    folder: Path

    @property
    def run(self) -> str:
        """Name and id, as people write them."""
        return f"{self.recipe.name}/{self.id}"

    @property
    def is_new(self) -> bool:
        """Whether it was never started."""
        return not (self.folder / RECIPE_FILE).is_file()


def find_start(recipe: Recipe, cluster: Cluster, id: str | None = None) -> RunStart:
    """Return where a recipe's run is or will be; nothing is made."""
    resolved = resolve(recipe, store_options(cluster))
    name = chosen_run_id(resolved, id)
    return RunStart(resolved, name, run_path(store_root(recipe, cluster), resolved.name, name))


def check_resumable(start: RunStart, steps: int | None, options: StoreOptions | None = None) -> None:
    """Refuse a start that its last checkpoint does not allow: fewer steps than are done, or another decay.

    `steps` is None where they are not known yet.
    """
    from trainshed.engines.torch.learning_rate import check_resumed_decay

    if steps is None or start.recipe.checkpoint.resume == "fresh":
        return
    phased = start.recipe.train.phases is not None
    checkpoint = _last_checkpoint(start, options)
    if checkpoint is None:
        return
    done = checkpoint.step
    if done <= steps:
        if not phased:
            check_resumed_decay(start.recipe, steps, checkpoint)
        return
    key = (
        "phases"
        if phased
        else next(key for key in ("steps", "tokens", "epochs") if getattr(start.recipe.train, key) is not None)
    )
    length = f"train.steps is {steps:,}" if key == "steps" else f"train.{key} comes to {steps:,} steps"
    more = f"write train.steps={done} or more" if key == "steps" else f"write more in train.{key}"
    more = "make the last phase longer" if phased else more
    raise InputError(
        f"{done:,} steps of {start.run} are done already, and {length}",
        where=start.recipe.where(f"train.{key}"),
        hint=f"{more}, or --id NAME for another run",
    )


def note_other_runs(start: RunStart, reporter: Reporter) -> None:
    """Where a run is new and the recipe has an older one, say which keys make them two runs."""
    if not start.is_new:
        return
    others = [run for run in local_runs(store_of(start.folder)) if run.name == start.recipe.name]
    similar = [(run, keys) for run in others if (keys := _different_keys(start.recipe, run)) is not None]
    if not similar:
        return
    nearest, keys = min(similar, key=lambda candidate: len(candidate[1]))
    if not keys and start.id != run_id(start.recipe):
        return  # --id asks for another one
    if not keys:  # begun with --id, or by a version that counted other keys into the id
        reporter.note(
            f"{nearest.run} exists and is of the same recipe: this is another run, {start.run}, and begins at step 0; "
            f"to go on with that one, write --id {nearest.id}"
        )
        return
    shown = ", ".join(
        f"{key} ({_value_text(there)} there, {_value_text(here)} here)" for key, there, here in keys[:_SHOWN_KEYS]
    )
    more = f" and {len(keys) - _SHOWN_KEYS} more keys" if len(keys) > _SHOWN_KEYS else ""
    progress = read_run_status(LocalStore(nearest.folder), "").summary()
    at = f" at {progress.split(',')[0]}" if progress.startswith("step") else ""
    reporter.note(
        f"{nearest.run} exists{at} and differs in {shown}{more}: this is another run, {start.run}, and begins at step "
        f"0; to go on with that one, write {'it' if len(keys) == 1 else 'them'} as there"
    )


def _last_checkpoint(start: RunStart, options: StoreOptions | None) -> CompleteCheckpoint | None:
    store, folder = checkpoint_home(start.recipe, start.id, options) or (LocalStore(start.folder), "")
    return latest_complete(store, checkpoints_folder(folder))


def _different_keys(recipe: Recipe, run: LocalRun) -> list[tuple[str, Any, Any]] | None:
    """The keys in which a run's recipe differs, with its value and ours; None if that recipe cannot be read."""
    try:
        with plugins_not_run():
            there = _flatten(run_identity(load_recipe(str(run.folder / RECIPE_FILE))))
    except TrainshedError:  # of another version, or half a file: nothing can be said about it
        return None
    here = _flatten(run_identity(recipe))
    if recipe.model.config is None:  # base weights bring the architecture, and it is written out once they are there
        there = {key: value for key, value in there.items() if not key.startswith("model.config.")}
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    return [(key, there.get(key), here.get(key)) for key in keys]


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: leaf for name, inner in value.items() for key, leaf in _flatten(inner, f"{prefix}{name}.").items()}
    return {prefix.rstrip("."): value}


def _value_text(value: Any) -> str:
    return "the default" if value is None else str(value)


def check_trainable(recipe: Recipe, cluster: Cluster, *, keys: dict[str, object] | None = None) -> None:
    """Refuse what could not train here before anything is fetched or prepared; `keys` are those of `--layout`."""
    check_can_train()
    check_runnable(recipe, cluster)
    if find_spec("torch") is None:
        raise MissingExtra.named("train", "training")
    check_installed(recipe.observe)
    check_export_installed(recipe)
    check_eval_inputs(recipe, store_options(cluster))
    try:
        config = architecture(recipe) or weights_architecture(recipe, cluster)
    except RecipeError:
        return  # weights in a format that only they themselves explain: the layout is checked once they are here
    model = recipe.model.model_copy(update={"config": config, "preset": None})
    planned_layout(recipe.model_copy(update={"model": model}), cluster, keys=keys)


def train_job(run: PreparedRun, layout: RankLayout, options: StoreOptions | None = None) -> TrainJob:
    """Return what a rank of this run is asked to train."""
    from trainshed.engines.torch.rank_env import TrainJob

    return TrainJob(
        recipe=run.recipe,
        config=run.config,
        layout=layout,
        name=run.id,
        steps=run.steps,
        order=run.order,
        validations=run.validations,
        store=LocalStore(run.folder),
        folder="",
        base=run.base,
        checkpoint_home=checkpoint_home(run.recipe, run.id, options),
        prompts=run.prompts,
        added=run.added,
        phases=phase_jobs(run.recipe, run.config, run.phases, layout),
    )


def phase_jobs(
    recipe: Recipe, config: ModelConfig, phases: Sequence[PhaseOrders], layout: RankLayout
) -> tuple[PhaseJob, ...]:
    """Return the phases of a run as its ranks train them: with their layouts and bases of rotary frequencies."""
    from trainshed.engines.torch.rank_env import PhaseJob

    layouts = phase_layouts(recipe, layout)
    return tuple(
        PhaseJob(phase.span, phase.train, phase.validations, with_rope_base(config, phase.span.rope_base), own_layout)
        for phase, own_layout in zip(phases, layouts, strict=True)
    )


LayoutKeys = dict[str, object]
"""Keys of the layout that go over the recipe's own, as `parse_layout` reads them."""
EventListener = Callable[[dict[str, Any]], None]
WatchTraining = Callable[[int], AbstractContextManager[EventListener]]
"""Given the number of steps, yields what to call with every event of the training."""


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
    early_stop: str | None = None
    """Why the run ended before its last step (`train.early_stop`); None where it did not."""
    best: dict[str, Any] | None = None
    """The step with the lowest validation loss, and that loss, where `checkpoint.best` keeps it."""
    evaluation: EvaluationReport | None = None
    """The scores of the run's weights, where the recipe has `eval`."""

    @property
    def steps_done(self) -> int:
        """How many steps are done."""
        return self.last_step["step"] + 1 if self.last_step is not None else 0

    @property
    def is_complete(self) -> bool:
        """Whether all its steps are done, or it has stopped early."""
        return self.steps_done == self.prepared.steps or self.early_stop is not None


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
    with _locked_run(recipe, cluster, id, reporter) as start:
        stages = StageRecorder(LocalStore(start.folder))
        prepared = prepare_run(recipe, cluster, id=start.id, workers=workers, reporter=reporter, stages=stages)
        with EvaluationBesideTraining(prepared.recipe, prepared.folder, reporter) as beside:
            watched = _with_listener(watch, beside.on_event)
            trained = _train_prepared(prepared, cluster, layout, reporter, watched)
        if not trained.is_complete:
            return trained
        options = store_options(cluster)
        if recipe.export is not None:
            with stages.stage("export") as outcome:
                exported = export_run(
                    prepared.recipe, prepared.folder, reporter, tokenizer=prepared.tokenizer, options=options
                )
                outcome.what = f"{exported}, proven"
            trained = replace(trained, export=exported)
        if recipe.eval is not None:
            with stages.stage("eval") as outcome:
                evaluated = evaluate_run(prepared.recipe, prepared.folder, options=options, reporter=reporter)
                outcome.what, outcome.skipped = evaluated.text(), not evaluated.computed
            trained = replace(trained, evaluation=evaluated)
    return trained


def _with_listener(watch: WatchTraining, listener: EventListener) -> WatchTraining:
    """Let a second function follow the events of a training."""

    @contextmanager
    def both(steps: int) -> Iterator[EventListener]:
        with watch(steps) as first:

            def tell(event: dict[str, Any]) -> None:
                first(event)
                listener(event)

            yield tell

    return both


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
    with _locked_run(recipe, cluster, id, reporter) as start:
        return _train_prepared(open_run(recipe, cluster, id=start.id), cluster, layout, reporter, watch)


@contextmanager
def _locked_run(recipe: Recipe, cluster: Cluster, id: str | None, reporter: Reporter) -> Iterator[RunStart]:
    """Lock the recipe's run after checking that it can continue."""
    start, options = find_start(recipe, cluster, id), store_options(cluster)
    refuse_other_checkpoints(start.recipe, start.folder, options)
    check_resumable(start, written_steps(recipe), options)
    with lock_run(start.folder, start.run):
        note_other_runs(start, reporter)
        for plugin in recipe.plugin_sources:
            reporter.note(plugin.text())
        try:
            yield start
        finally:
            report_run(start.folder, reporter)


def _train_prepared(
    prepared: PreparedRun, cluster: Cluster, layout: LayoutKeys | None, reporter: Reporter, watch: WatchTraining
) -> TrainedRun:
    start = RunStart(prepared.recipe, prepared.id, prepared.folder)
    check_resumable(start, prepared.steps, store_options(cluster))
    chosen = planned_layout(prepared.recipe, cluster, keys=layout, reporter=reporter)
    save_run(prepared)
    store = LocalStore(prepared.folder)
    store.put(CLUSTER_FILE, to_yaml(cluster).encode())
    recipients = recipients_of(prepared.recipe, cluster)
    with (
        watch(prepared.steps) as on_event,
        notify_of_run(prepared.folder, recipients, run=start.run, steps=prepared.steps),
    ):
        ended = train_locally(
            prepared.folder,
            chosen.layout,
            precision=prepared.recipe.train.precision,
            reasons=chosen.reasons,
            calibration=chosen.calibration,
            predicted=chosen.predicted,
            worker_arguments=("--on", str(prepared.folder / CLUSTER_FILE)),
            on_event=on_event,
        )
    events = list(read_events(store, ""))
    done = completed_steps(events)
    measured = [event["loss"] for event in events if event["kind"] == "validation"]
    saved = [event["path"] for event in events if event["kind"] == "checkpoint" and event["phase"] == "committed"]
    early_stops = [event for event in events if event["kind"] == "early_stop" and event["attempt"] == ended.attempt]
    return TrainedRun(
        prepared=prepared,
        layout=chosen.layout,
        attempt=ended.attempt,
        exit_code=ended.exit_code,
        last_step=done[-1] if done else None,
        validation_loss=measured[-1] if measured else None,
        checkpoint=saved[-1] if saved else None,
        early_stop=early_stops[-1]["reason"] if early_stops else None,
        best=_best_checkpoint(prepared, store_options(cluster)),
    )


def _best_checkpoint(run: PreparedRun, options: StoreOptions) -> dict[str, Any] | None:
    if run.recipe.checkpoint.best is None:
        return None
    store, folder = checkpoint_home(run.recipe, run.id, options) or (LocalStore(run.folder), "")
    best = list_checkpoints(store, checkpoints_folder(folder)).best
    return None if best is None or best.step is None else {"step": best.step, "loss": best.loss}
