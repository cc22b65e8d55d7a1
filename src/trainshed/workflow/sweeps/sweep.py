"""Many runs of one recipe: `plan_sweep` checks and prices them before any starts, `run_sweep` carries them out.

<store>/sweeps/<name>/<id>/
    sweep.json       the points with their runs, and their figures as far as they are
    report.html      the table and the plots, in one file
    logs/<id>.log    what `trainshed run` said of each run on this machine

A run of a sweep is the run that `trainshed run` with the same keys has, so that runs which are there already are found.
Where swept keys do not make another run (`layout`, `train.steps`), the run's id is the usual one with these values
after it. Everything may be killed at any moment: the same sweep goes on where its runs are.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import orjson

from trainshed.errors import InputError, TrainshedError
from trainshed.launch.job import CodeArchive, Job
from trainshed.launch.submissions import state_folder
from trainshed.plan import RankLayout
from trainshed.plan.budget.budget import RunCost
from trainshed.recipe import Cluster, Recipe, load_cluster, load_recipe, run_id, split_overrides
from trainshed.recipe.load import to_plain
from trainshed.recipe.phase_spans import written_steps
from trainshed.reporting import SILENT, ProgressTask, Reporter
from trainshed.run_folder import REPORT, SWEEP_FILE, run_address, run_path, sweep_address
from trainshed.signals import StopSignals
from trainshed.storage import LocalStore, Store, StoreOptions, join, open_folder, parse
from trainshed.workflow.layout import planned_layout
from trainshed.workflow.prepare import store_options, store_root
from trainshed.workflow.resolve import resolve
from trainshed.workflow.run import RunStart, check_resumable, check_trainable
from trainshed.workflow.submit import build_job
from trainshed.workflow.sweeps.grid import Values, split_swept, sweep_values, values_text
from trainshed.workflow.sweeps.results import RunFigures, is_finished, read_figures, sweep_page

SWEEP_SCHEMA = "trainshed.sweep/1"
PointState = Literal["waiting", "running", "done", "failed", "stopped"]
_LONGEST_SUFFIX = 16
_LONGEST_JOB_NAME = 49
"""Of a job, so that the suffixes of its objects fit into 63 (`launch/job.py`)."""


@dataclass(frozen=True)
class SweepPoint:
    """One run of a sweep."""

    values: Values
    overrides: tuple[str, ...]
    """All overrides, the swept values among them."""
    recipe: Recipe = field(repr=False)
    cluster: Cluster = field(repr=False)
    id: str
    own_id: bool = False
    """Whether the id is another than the recipe's own, and must be written."""
    steps: int | None = None
    """None: known once the data is prepared."""
    layout: str = ""
    """As planned; empty where only the weights will say it."""
    gpus: int = 1
    """Ranks, where there are no GPUs."""
    step_seconds: float | None = None
    """As planned; None where nothing is predicted."""
    cost: RunCost | None = None
    job: Job | None = field(default=None, repr=False, compare=False)
    """On a cluster."""

    @property
    def run(self) -> str:
        """Name and id, as people write them."""
        return f"{self.recipe.name}/{self.id}"

    @property
    def text(self) -> str:
        """The swept values, for people."""
        return values_text(self.values)

    @property
    def hours(self) -> float | None:
        """As planned; None where nothing is predicted."""
        if self.cost is not None:
            return self.cost.hours
        if self.step_seconds is None or self.steps is None:
            return None
        return self.step_seconds * self.steps / 3600

    @property
    def gpu_hours(self) -> float | None:
        """As planned."""
        return None if self.hours is None else self.hours * self.gpus

    def plan_plain(self) -> dict[str, Any]:
        """What is planned, for JSON."""
        return {
            "run": self.run,
            "values": dict(self.values),
            "steps": self.steps,
            "layout": self.layout,
            "gpus": self.gpus,
            "step_seconds": self.step_seconds,
            "hours": self.hours,
            "gpu_hours": self.gpu_hours,
            "cost": None if self.cost is None else self.cost.cost,
        }


@dataclass(frozen=True)
class PlannedSweep:
    """All runs of a sweep, checked and priced; nothing has started."""

    recipe: str
    """As a person wrote it."""
    name: str
    on: str
    cluster: Cluster = field(repr=False)
    points: tuple[SweepPoint, ...] = field(repr=False)
    home: str = ""
    """The sweep's folder, on a disk or in a bucket."""
    options: StoreOptions | None = field(default=None, repr=False)

    @property
    def id(self) -> str:
        """8 hex digits of its runs: the same runs are the same sweep."""
        text = "\n".join(sorted(point.run for point in self.points))
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def sweep(self) -> str:
        """Name and id, as people write them."""
        return f"{self.name}/{self.id}"

    @property
    def is_here(self) -> bool:
        """Whether its runs train on this machine."""
        return self.cluster.target == "local"

    def store(self) -> Store:
        """Its folder."""
        return open_folder(self.home, self.options) if "://" in self.home else LocalStore(self.home)

    def run_store(self, point: SweepPoint) -> Store | None:
        """The folder of a run as far as this machine sees it."""
        root = point.recipe.store or point.cluster.store_root
        if parse(root).scheme == "file" and not Path(root).expanduser().is_dir():
            bucket = point.cluster.bucket_address(root)
            if bucket is None and not self.is_here:
                return None
            root = bucket or root
        address = run_address(root, point.recipe.name, point.id)
        if "://" in address:
            return open_folder(address, store_options(point.cluster))
        return LocalStore(Path(address).expanduser())

    def totals(self) -> dict[str, Any]:
        """What all runs take together; None where it is not known of each."""

        def total(amounts: list[float | None]) -> float | None:
            known = [amount for amount in amounts if amount is not None]
            return sum(known) if len(known) == len(amounts) else None

        return {
            "runs": len(self.points),
            "hours": total([point.hours for point in self.points]),
            "gpu_hours": total([point.gpu_hours for point in self.points]),
            "cost": total([None if point.cost is None else point.cost.cost for point in self.points]),
        }


def plan_sweep(
    recipe: str,
    overrides: Sequence[str],
    *,
    on: str = "local",
    draws: int | None = None,
    seed: int = 0,
    reporter: Reporter = SILENT,
) -> PlannedSweep:
    """Decide, check and price every run; raises `InputError` for the first that could not run, before any starts.

    `overrides` are those of `run`; those with several values (`key=a,b`) or a range (`key=a..b`, with `draws`) are
    swept.
    """
    same, swept = split_swept(overrides)
    loaded = [_load_point(recipe, same, values, on) for values in sweep_values(swept, draws=draws, seed=seed)]
    points: list[SweepPoint] = []
    with reporter.task("plan", total=len(loaded), unit="runs") as task:
        for point in _with_own_ids(loaded):
            points.append(_planned_point(point, code=points[0].job.code if points and points[0].job else None))
            task.advance(1)
    cluster = load_cluster(on, split_overrides(same)[1])
    planned = PlannedSweep(recipe, points[0].recipe.name, on, cluster, tuple(points), options=store_options(cluster))
    return replace(planned, home=_home(planned, points[0].recipe.store or cluster.store_root))


def _load_point(recipe: str, same: Sequence[str], values: Values, on: str) -> SweepPoint:
    overrides = (*same, *(f"{key}={value}" for key, value in values))
    for_recipe, for_cluster = split_overrides(overrides)
    with _naming(values):
        cluster = load_cluster(on, for_cluster)
        loaded = load_recipe(recipe, for_recipe)
        return SweepPoint(values, overrides, loaded, cluster, run_id(resolve(loaded, store_options(cluster))))


@contextmanager
def _naming(values: Values) -> Iterator[None]:
    """Say in an error of which run it is."""
    try:
        yield
    except InputError as error:
        where = f"{values_text(values)}: {error.where}" if error.where else values_text(values)
        hint = f"{error.hint}; no run was started" if error.hint else "no run was started"
        raise type(error)(error.what, where=where, hint=hint) from None


def _with_own_ids(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """Give points that would share a run (`layout.tp=1,2`) ids of their own, by the values they differ in."""
    groups: dict[str, list[SweepPoint]] = defaultdict(list)
    for point in points:
        groups[point.id].append(point)
    ids: dict[Values, str] = {}
    for id, group in groups.items():
        if len(group) > 1:
            suffixes = _suffixes([dict(point.values) for point in group])
            ids |= {point.values: f"{id}-{suffix}" for point, suffix in zip(group, suffixes, strict=True)}
    return [replace(point, id=ids[point.values], own_id=True) if point.values in ids else point for point in points]


def _suffixes(group: Sequence[dict[str, str]]) -> list[str]:
    keys = [key for key in group[0] if len({values[key] for values in group}) > 1]
    texts = [
        "-".join(_letters(f"{key.rpartition('.')[2]}{values[key]}") for key in keys).strip("-") for values in group
    ]
    if len(set(texts)) == len(group) and all(len(text) <= _LONGEST_SUFFIX for text in texts):
        return texts
    exact = ["\n".join(f"{key}={values[key]}" for key in keys) for values in group]
    return [hashlib.sha256(text.encode()).hexdigest()[:8] for text in exact]


def _letters(text: str) -> str:
    """What a name of Kubernetes may have in it."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())


def _planned_point(point: SweepPoint, *, code: CodeArchive | None) -> SweepPoint:
    with _naming(point.values):
        return _plan_here(point) if point.cluster.target == "local" else _plan_elsewhere(point, code)


def _plan_here(point: SweepPoint) -> SweepPoint:
    recipe, steps = point.recipe, written_steps(point.recipe)
    check_trainable(recipe, point.cluster)
    resolved = resolve(recipe, store_options(point.cluster))
    folder = run_path(store_root(recipe, point.cluster), recipe.name, point.id)
    check_resumable(RunStart(resolved, point.id, folder), steps, store_options(point.cluster))
    try:
        chosen = planned_layout(recipe, point.cluster)
    except TrainshedError:  # weights in a format that only they themselves explain, which `check_trainable` let pass
        return replace(point, steps=steps)
    seconds = chosen.predicted["step_seconds"] if chosen.predicted is not None else None
    layout = chosen.layout
    return replace(point, steps=steps, layout=str(layout), gpus=layout.world_size, step_seconds=seconds)


def _plan_elsewhere(point: SweepPoint, code: CodeArchive | None) -> SweepPoint:
    job = build_job(point.recipe, point.cluster, id=point.id if point.own_id else None, code=code)
    if len(job.name) > _LONGEST_JOB_NAME:
        raise InputError(
            f"the name of the job {job.name} has {len(job.name)} characters, and {_LONGEST_JOB_NAME} fit",
            where=point.recipe.where("name"),
            hint="write a shorter `name` in the recipe",
        )
    train, plan = job.stage("train"), orjson.loads(job.files["plan.json"])
    return replace(
        point,
        steps=job.steps,
        layout=str(RankLayout(**plan["layout"])),
        gpus=train.nodes * train.ranks_per_node,
        step_seconds=(plan["predicted"] or {}).get("step_seconds"),
        cost=job.cost,
        job=job,
    )


def _home(sweep: PlannedSweep, root: str) -> str:
    """Return where a sweep is kept: in its runs' store, or where submissions are recorded if that is not seen here."""
    if not sweep.is_here and parse(root).scheme == "file" and not Path(root).expanduser().is_dir():
        bucket = sweep.cluster.bucket_address(root)
        root = bucket if bucket is not None else str(state_folder().parent)
    address = sweep_address(root, sweep.name, sweep.id)
    return address if "://" in address else str(Path(address).expanduser())


class SweepRunner(Protocol):
    """Starts runs somewhere, and says how they go."""

    look_seconds: float

    def start(self, point: SweepPoint) -> None:
        """Start a run; raises `TrainshedError` where it cannot be."""
        ...

    def look(self, point: SweepPoint) -> tuple[PointState, str]:
        """Return how a run stands, and why in a sentence; also of one that an earlier start of the sweep began."""
        ...

    def is_prepared(self, point: SweepPoint) -> bool:
        """Whether a run has all that others may share with it."""
        ...

    def stop(self, points: Sequence[SweepPoint]) -> None:
        """Stop what ends with this process, after a checkpoint; jobs of a cluster go on."""
        ...


@dataclass
class SweepOutcome:
    """A sweep after it has ended, or was stopped."""

    sweep: PlannedSweep
    states: dict[str, tuple[PointState, str]]
    figures: dict[str, RunFigures]
    exit_code: int = 0
    """0, 1 where a run failed, 128 + the signal that asked for a stop."""

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON; also what is kept."""
        sweep = self.sweep
        return {
            "schema": SWEEP_SCHEMA,
            "name": sweep.name,
            "id": sweep.id,
            "recipe": sweep.recipe,
            "on": sweep.cluster.name,
            "folder": sweep.home,
            "report": join(sweep.home, REPORT),
            "keys": [key for key, _ in sweep.points[0].values],
            "planned": sweep.totals(),
            "runs": [
                point.plan_plain()
                | {"state": self.states[point.run][0], "why": self.states[point.run][1]}
                | self.figures.get(point.run, RunFigures()).to_plain()
                for point in sweep.points
            ],
        }


def run_sweep(
    sweep: PlannedSweep, runner: SweepRunner, *, parallel: int = 1, reporter: Reporter = SILENT
) -> SweepOutcome:
    """Carry out every run that is not done, `parallel` at a time; one that fails does not stop the others.

    What runs share (tokens, tokenizer, base weights) is made by the first of them; the others wait until it is there.
    """
    outcome = SweepOutcome(sweep, {point.run: ("waiting", "") for point in sweep.points}, {})
    stores = {point.run: sweep.run_store(point) for point in sweep.points}
    for point in sweep.points:
        store = stores[point.run]
        if store is not None and is_finished(store, point.recipe, point.steps):
            outcome.states[point.run] = ("done", "")
    done_before = _count(outcome, "done")
    if done_before:
        reporter.note(f"{done_before} of {len(sweep.points)} runs are done already")
    _keep(outcome, stores)
    with StopSignals() as stop, reporter.task("sweep", total=len(sweep.points), unit="runs") as task:
        task.advance(done_before)
        while stop.first is None and not _look_and_start(outcome, runner, parallel, task, reporter, stores):
            time.sleep(runner.look_seconds)
        if stop.first is not None:
            active = [point for point in sweep.points if outcome.states[point.run][0] == "running"]
            runner.stop(active)
            for point in active:
                outcome.states[point.run] = runner.look(point)
            task.describe("")
            task.advance(sum(outcome.states[point.run][0] in ("done", "failed") for point in active))
    _keep(outcome, stores, figures=True)
    failed = _count(outcome, "failed") + _count(outcome, "stopped")
    outcome.exit_code = stop.exit_code or (1 if failed else 0)
    return outcome


def _look_and_start(
    outcome: SweepOutcome,
    runner: SweepRunner,
    parallel: int,
    task: ProgressTask,
    reporter: Reporter,
    stores: Mapping[str, Store | None],
) -> bool:
    """Look at what runs, start what may; returns whether all have ended."""
    sweep, states = outcome.sweep, outcome.states
    changed = False
    for point in sweep.points:
        if states[point.run][0] != "running":
            continue
        states[point.run] = state, why = runner.look(point)
        if state == "waiting":  # whoever worked on it has left it unfinished: it is started again
            changed = True
        elif state != "running":
            changed = True
            task.advance(1)
            tell = reporter.note if state == "done" else reporter.warn
            tell(f"{point.text} ({point.run}): {state}{f', {why}' if why else ''}")
    active = [point for point in sweep.points if states[point.run][0] == "running"]
    preparing = {_shared_work(point) for point in active if not runner.is_prepared(point)}
    for point in sweep.points:
        if len(active) >= parallel:
            break
        if states[point.run][0] != "waiting" or _shared_work(point) in preparing:
            continue
        states[point.run] = _begin(point, runner, reporter)
        changed = True
        if states[point.run][0] == "running":
            active.append(point)
            preparing |= set() if runner.is_prepared(point) else {_shared_work(point)}
        else:
            task.advance(1)
    if changed:
        _keep(outcome, stores)
    task.describe(f"{len(active)} running" if active else "")
    return not active and not _count(outcome, "waiting")


def _begin(point: SweepPoint, runner: SweepRunner, reporter: Reporter) -> tuple[PointState, str]:
    """Start a run, or follow the one that goes on already."""
    if runner.look(point)[0] == "running":
        reporter.note(f"{point.text} ({point.run}) runs already: it is followed")
        return "running", ""
    try:
        runner.start(point)
    except TrainshedError as error:
        reporter.warn(f"{point.text} ({point.run}) could not be started: {error.what}")
        return "failed", error.what
    reporter.note(f"{point.text}: {point.run} has started")
    return "running", ""


def _shared_work(point: SweepPoint) -> str:
    """What runs have to prepare alike: those of another text begin at once."""
    recipe = point.recipe
    plain = to_plain(recipe)
    shared = {"data": plain["data"], "tokenizer": plain.get("tokenizer"), "from": recipe.model.from_}
    return orjson.dumps(shared, option=orjson.OPT_SORT_KEYS, default=str).decode()


def _count(outcome: SweepOutcome, state: PointState) -> int:
    return Counter(state for state, _ in outcome.states.values())[state]


def _keep(outcome: SweepOutcome, stores: Mapping[str, Store | None], *, figures: bool = False) -> None:
    """Write `sweep.json`; at the end also the figures of all runs and the page."""
    sweep = outcome.sweep
    for point in sweep.points:
        store, state = stores[point.run], outcome.states[point.run][0]
        is_new = point.run not in outcome.figures and state in ("done", "failed", "stopped")
        if store is not None and (figures or is_new):
            outcome.figures[point.run] = read_figures(store)
    plain = outcome.to_plain()
    kept = sweep.store()
    kept.put(SWEEP_FILE, orjson.dumps(plain, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY) + b"\n")
    if figures:
        curves = {point.run: outcome.figures.get(point.run, RunFigures()) for point in sweep.points}
        kept.put(REPORT, sweep_page(plain, curves).encode())
