"""What is known of a run before it starts: where it lies, whether it is long enough, and which others it is not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainshed.checkpoints.native.folder import Found, checkpoints_folder
from trainshed.checkpoints.native.resuming import latest_complete
from trainshed.errors import InputError, TrainshedError
from trainshed.launch.local_runs import RECIPE, LocalRun, local_runs
from trainshed.observe.standing import standing
from trainshed.recipe import Cluster, Recipe, load_recipe, run_id
from trainshed.recipe.resolved import identity
from trainshed.reporting import Reporter
from trainshed.storage import LocalStore, StoreOptions
from trainshed.workflow.prepare import checkpoint_home, resolve, store_options, store_root

_SHOWN = 4  # keys that a note writes out before it only counts


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
        return not (self.folder / RECIPE).is_file()


def find_start(recipe: Recipe, cluster: Cluster, id: str | None = None) -> RunStart:
    """Return where a recipe's run lies or will lie; nothing is made."""
    resolved = resolve(recipe, store_options(cluster))
    name = id or run_id(resolved)
    return RunStart(resolved, name, store_root(recipe, cluster) / "runs" / resolved.name / name)


def check_goes_on(start: RunStart, steps: int | None, options: StoreOptions | None = None) -> None:
    """Refuse what no rank would go on with from the run's last checkpoint: fewer steps than are done, another decay.

    `steps` is None where they are not known yet.
    """
    from trainshed.engines.torch.learning_rate import check_resumed_decay

    if steps is None or start.recipe.checkpoint.resume == "fresh":
        return
    found = _last_checkpoint(start, options)
    if found is None:
        return
    done = found.step
    if done <= steps:
        check_resumed_decay(start.recipe, steps, found)
        return
    key = next(key for key in ("steps", "tokens", "epochs") if getattr(start.recipe.train, key) is not None)
    said = f"train.steps is {steps:,}" if key == "steps" else f"train.{key} comes to {steps:,} steps"
    more = f"write train.steps={done} or more" if key == "steps" else f"write more in train.{key}"
    raise InputError(
        f"{done:,} steps of {start.run} are done already, and {said}",
        where=start.recipe.where(f"train.{key}"),
        hint=f"{more}, or --id NAME for another run",
    )


def note_other_runs(start: RunStart, reporter: Reporter) -> None:
    """Where a run is new, name the one of its recipe that it is not, and what makes it another."""
    if not start.is_new:
        return
    others = [run for run in local_runs(start.folder.parents[2]) if run.name == start.recipe.name]
    found = [(run, keys) for run in others if (keys := _different_keys(start.recipe, run)) is not None]
    if not found:
        return
    nearest, keys = min(found, key=lambda each: len(each[1]))
    if not keys and start.id != run_id(start.recipe):
        return  # --id asks for another one
    if not keys:  # begun with --id, or by a version that counted other keys into the id
        reporter.note(
            f"{nearest.run} exists and is of the same recipe: this is another run, {start.run}, and begins at step 0; "
            f"to go on with that one, write --id {nearest.id}"
        )
        return
    shown = ", ".join(f"{key} ({_value(there)} there, {_value(here)} here)" for key, there, here in keys[:_SHOWN])
    more = f" and {len(keys) - _SHOWN} more keys" if len(keys) > _SHOWN else ""
    progress = standing(LocalStore(nearest.folder), "").words()
    at = f" at {progress.split(',')[0]}" if progress.startswith("step") else ""
    reporter.note(
        f"{nearest.run} exists{at} and differs in {shown}{more}: this is another run, {start.run}, and begins at step "
        f"0; to go on with that one, write {'it' if len(keys) == 1 else 'them'} as there"
    )


def _last_checkpoint(start: RunStart, options: StoreOptions | None) -> Found | None:
    store, folder = checkpoint_home(start.recipe, start.id, options) or (LocalStore(start.folder), "")
    return latest_complete(store, checkpoints_folder(folder))


def _different_keys(recipe: Recipe, run: LocalRun) -> list[tuple[str, Any, Any]] | None:
    """The keys that make another run of a recipe: each with its value there and here; None where nothing is known."""
    try:
        there = _flat(identity(load_recipe(str(run.folder / RECIPE))))
    except TrainshedError:  # of another version, or half a file: nothing can be said about it
        return None
    here = _flat(identity(recipe))
    if recipe.model.config is None:  # base weights bring the architecture, and it is written out once they are there
        there = {key: value for key, value in there.items() if not key.startswith("model.config.")}
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    return [(key, there.get(key), here.get(key)) for key in keys]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: each for name, inner in value.items() for key, each in _flat(inner, f"{prefix}{name}.").items()}
    return {prefix.rstrip("."): value}


def _value(value: Any) -> str:
    return "the default" if value is None else str(value)
