"""Trainshed from Python: what every command does, as functions; the command line calls these.

    import trainshed as ts

    recipe = ts.Recipe.load("quickstart").with_("train.optimizer.lr", 3e-4)
    plan = ts.plan(recipe, on="slurm-h100")
    run = ts.run(recipe)
    pandas.DataFrame(run.metrics())

A recipe or a cluster is an object, a file or the name of a shipped one; overrides are written as in the shell. Errors
are `TrainshedError`s with what happened, where, and what to write instead. Nothing is printed: a notebook shows
progress by itself, elsewhere a `reporter` and a `watch` receive it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainshed.errors import InputError, MissingExtra, NotFound, TrainshedError
from trainshed.recipe import Cluster, Recipe, as_cluster, as_recipe, split_overrides
from trainshed.reporting import SILENT, Reporter
from trainshed.workflow.known_runs import KnownRun, checkpoint_address, find_run, known_runs, submitted_run

if TYPE_CHECKING:
    from trainshed.launch.job import Job
    from trainshed.observe.evaluations import EvaluationRecord
    from trainshed.observe.metrics import RunMetrics
    from trainshed.plan.planner import Plan
    from trainshed.serve.loading import LoadedModel
    from trainshed.workflow.evaluation.evaluate import EvaluationReport
    from trainshed.workflow.run import TrainedRun, WatchTraining
    from trainshed.workflow.run_checkpoints import StoredCheckpoint
    from trainshed.workflow.submission import RenderedJob
    from trainshed.workflow.sweeps.sweep import SweepOutcome
    from trainshed.workflow.verify import Verification

RecipeLike = Recipe | str | os.PathLike[str]
"""A recipe, its file, or the name of a shipped one."""
ClusterLike = Cluster | str | os.PathLike[str]
"""A cluster, its file, or its name."""
LayoutLike = str | Mapping[str, Any]
"""Keys of the layout: `"tp=2,pp=2"`, or a mapping of them."""


class Run:
    """A run, wherever it is: how it stands, what it measured and stored."""

    def __init__(self, known: KnownRun, trained: TrainedRun | None = None) -> None:
        self.known = known
        """Where it is, and the record of its submission where it was sent from here."""
        self.trained = trained
        """How it ended, where this process has trained it."""

    def __repr__(self) -> str:
        return f"Run({str(self)!r}, {self.known.address!r})"

    def __str__(self) -> str:
        return self.known.run

    def _repr_html_(self) -> str:
        """Show the run in a notebook: how it stands, and its losses."""
        from trainshed.observe.notebook import run_html

        return run_html(self.status(), self.metrics())

    @property
    def name(self) -> str:
        """The name of its recipe."""
        return self.known.name

    @property
    def id(self) -> str:
        """What tells it from other runs of the name."""
        return self.known.id

    @property
    def folder(self) -> Path:
        """Its folder; raises where this machine does not see it (`address` says where it is)."""
        return self.known.local_folder()

    @property
    def address(self) -> str:
        """Its folder as a path or as the URL of a bucket."""
        return self.known.address

    @property
    def recipe(self) -> Recipe | None:
        """Its recipe as resolved; None where this version cannot read it."""
        from trainshed.observe.run_facts import read_run_recipe

        return read_run_recipe(self.known.store(), "")

    @property
    def state(self) -> str:
        """`waiting`, `running`, `serving`, `done`, `stopped`, `cancelled`, `failed` or `unknown`."""
        return str(self.status()["state"])

    def status(self) -> dict[str, Any]:
        """Return how it stands and why, with the keys of `trainshed status -o json`."""
        from trainshed.workflow.run_state import run_status

        return run_status(self.known) | {"evaluations": [record.to_plain() for record in self.evaluations]}

    @property
    def evaluations(self) -> list[EvaluationRecord]:
        """The scores of its checkpoints, as far as its folder is seen here."""
        from trainshed.observe.evaluations import list_evaluations

        try:
            return list_evaluations(self.known.store()) if self.known.home is not None else []
        except TrainshedError:
            return []

    def wait(
        self, *, check: bool = True, timeout_seconds: float | None = None, reporter: Reporter | None = None
    ) -> dict[str, Any]:
        """Wait until it has ended or serves, and return its status.

        Raises `TrainshedError` where it has failed, unless `check` is false, and `TimeoutError` after the timeout; the
        run goes on without whoever waits.
        """
        from trainshed.workflow.run_state import follow_run

        data = follow_run(self.known, _reporter(reporter), timeout_seconds=timeout_seconds)
        if check and data["state"] in ("failed", "cancelled"):
            raise TrainshedError(
                f"{self} has {'failed' if data['state'] == 'failed' else 'been cancelled'}: {data['why']}",
                where=self.address,
                hint=f"`trainshed logs {self}` shows what it printed",
            )
        return data

    def logs(
        self, stage: str = "train", *, rank: int | None = None, attempt: int | None = None, follow: bool = False
    ) -> Iterator[str]:
        """Yield the lines of a log; with `follow` until the stage has ended."""
        from trainshed.workflow.run_state import log_lines

        return log_lines(self.known, stage, rank=rank, attempt=attempt, follow=follow)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield what happened, attempt by attempt, as `observe/events.py` describes it."""
        from trainshed.observe.engine_logs.run_logs import read_run_events

        return iter(read_run_events(self.known.store(), ""))

    def metrics(self) -> list[dict[str, Any]]:
        """Return one row a step (`step`, `loss`, `lr`, …, `validation_loss`): `pandas.DataFrame(run.metrics())`."""
        from trainshed.observe.notebook import metric_rows

        return metric_rows(self.events())

    def measure(self, *, start: int | None = None, end: int | None = None) -> RunMetrics:
        """Return step time, throughput, MFU and goodput over some steps, as `trainshed metrics` prints them."""
        from trainshed.workflow.run_metrics import MetricsFlags, measure_run

        return measure_run(self.known, MetricsFlags(), start=start, end=end).metrics

    @property
    def checkpoints(self) -> tuple[StoredCheckpoint, ...]:
        """Its checkpoints, newest first."""
        from trainshed.workflow.run_checkpoints import run_checkpoints

        try:
            return run_checkpoints(self.known).checkpoints
        except NotFound:
            return ()

    def cancel(self, *, reporter: Reporter | None = None) -> list[str]:
        """End every stage that has not ended, and return their names; what is stored stays."""
        from trainshed.workflow.run_state import cancel_run

        return cancel_run(self.known, _reporter(reporter))


def open_run(run: str | os.PathLike[str], *overrides: str, on: ClusterLike = "local", id: str | None = None) -> Run:
    """Return the run that is called NAME or NAME/ID, that lies in a folder or at a URL, or that a recipe file started.

    `overrides` and `id` are those that the run of a recipe file was started with.
    """
    return Run(find_run(os.fspath(run), on=on, overrides=overrides, id=id))


def runs(on: ClusterLike = "local", *, reporter: Reporter | None = None) -> list[Run]:
    """Return the runs in a cluster's store, and those that were submitted from this machine; newest first."""
    cluster = as_cluster(on)
    known, problem = known_runs(cluster)
    if problem is not None and not known:
        raise problem
    if problem is not None:
        _reporter(reporter).warn(f"{cluster.store_root} cannot be listed: {problem.what}")
    return [Run(run) for run in known]


def plan(
    recipe: RecipeLike | None = None,
    *overrides: str,
    on: ClusterLike | None = None,
    model: str | None = None,
    gpu: str | None = None,
    machine: str | None = None,
    gpus: int | str | None = None,
    nodes: int | None = None,
    seq: int | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    layout: LayoutLike | None = None,
    engine: str | None = None,
    steps: int | None = None,
    tokens: str | int | None = None,
    price: float | None = None,
    calibration: str | None = None,
    explain: bool = False,
    top: int = 5,
) -> Plan:
    """Choose the layout of a training, or judge a given one: does it fit, how fast is it, what does it cost.

    Ask about a recipe on a cluster, or about a model by its name (`model`, `gpu`, `gpus`, `seq`, `global_batch`). The
    arguments are the options of `trainshed plan`; `gpus="8..4096"` also gives the scaling curve.
    """
    from trainshed.plan.planner import make_plan
    from trainshed.workflow.plan_request import PlanFlags, check_top, request_from_flags

    check_top(top)
    flags = PlanFlags(
        recipe,
        overrides,
        on,
        model,
        gpu,
        machine,
        None if gpus is None else str(gpus),
        nodes,
        seq,
        global_batch,
        precision,
        _layout_text(layout),
        engine,
        steps,
        None if tokens is None else str(tokens),
        price,
        calibration,
    )
    return make_plan(request_from_flags(flags), top=top, explained=explain)


def run(
    recipe: RecipeLike,
    *overrides: str,
    on: ClusterLike = "local",
    id: str | None = None,
    layout: LayoutLike | None = None,
    workers: int | None = None,
    nodes: int | None = None,
    reporter: Reporter | None = None,
    watch: WatchTraining | None = None,
) -> Run:
    """Carry a recipe through every stage and return its run; what is already made and proven is not made again.

    On this machine it trains here; `watch` gets the events of the training. On another cluster it submits the same
    stages and waits for their end. Raises `InputError` before any work for what could not run, `TrainshedError` for
    work that fails.
    """
    for_recipe, for_cluster = split_overrides(overrides)
    cluster = as_cluster(on, for_cluster)
    if cluster.target != "local":
        if layout is not None or workers is not None:
            raise InputError("--layout and --workers are for this machine", hint="write layout.tp=2 …, or `--on local`")
        sent = submit(as_recipe(recipe, for_recipe), on=cluster, id=id, nodes=nodes, reporter=reporter)
        sent.wait(reporter=reporter)
        return sent
    if nodes is not None:
        raise InputError("--nodes is for other clusters: here the layout says how many ranks", hint="write --layout")
    if workers is not None and workers < 1:
        raise InputError(f"--workers {workers} is less than one", hint="write --workers 1 or more, or leave it out")
    from trainshed.workflow.run import run as run_here

    shown, watching = _progress(reporter, watch)
    finished = run_here(
        as_recipe(recipe, for_recipe),
        cluster,
        id=id,
        layout=_layout_keys(layout),
        workers=workers,
        reporter=shown,
        watch=watching,
    )
    return _trained(finished)


def train(
    recipe: RecipeLike,
    *overrides: str,
    on: ClusterLike = "local",
    id: str | None = None,
    layout: LayoutLike | None = None,
    reporter: Reporter | None = None,
    watch: WatchTraining | None = None,
) -> Run:
    """Train a recipe whose data is prepared, with all its ranks here; goes on from its last checkpoint."""
    from trainshed.workflow.run import train as train_here

    for_recipe, for_cluster = split_overrides(overrides)
    shown, watching = _progress(reporter, watch)
    finished = train_here(
        as_recipe(recipe, for_recipe),
        as_cluster(on, for_cluster),
        id=id,
        layout=_layout_keys(layout),
        reporter=shown,
        watch=watching,
    )
    return _trained(finished)


def render(
    recipe: RecipeLike,
    *overrides: str,
    on: ClusterLike,
    id: str | None = None,
    nodes: int | None = None,
    gpus: int | None = None,
    despite_memory: bool = False,
    offline: bool = False,
) -> RenderedJob:
    """Return what `submit` would send, byte for byte: `.text()` is everything, `.files` the parts by name."""
    from trainshed.workflow.submission import render_job

    for_recipe, for_cluster = split_overrides(overrides)
    return render_job(
        as_recipe(recipe, for_recipe),
        as_cluster(on, for_cluster),
        id=id,
        nodes=nodes,
        gpus=gpus,
        despite_memory=despite_memory,
        offline=offline,
    )


def submit(
    recipe: RecipeLike,
    *overrides: str,
    on: ClusterLike,
    id: str | None = None,
    nodes: int | None = None,
    gpus: int | None = None,
    despite_memory: bool = False,
    offline: bool = False,
    reporter: Reporter | None = None,
) -> Run:
    """Send a recipe's job to a cluster, planned and checked first, and return its run at once."""
    rendered = render(
        recipe, *overrides, on=on, id=id, nodes=nodes, gpus=gpus, despite_memory=despite_memory, offline=offline
    )
    sent = send(rendered, reporter=reporter)
    assert sent is not None, "nobody was asked"
    return sent


def send(
    rendered: RenderedJob, *, confirm: Callable[[Job], bool] = lambda job: True, reporter: Reporter | None = None
) -> Run | None:
    """Send what was rendered; None where `confirm` says no after the scheduler has been asked."""
    from trainshed.launch.submissions import find_submission
    from trainshed.workflow.submission import send_job

    shown = _reporter(reporter)
    for note in rendered.notes:
        shown.note(note)
    if send_job(rendered, confirm) is None:
        return None
    return Run(submitted_run(find_submission(rendered.job.name)))


def verify(
    recipe: RecipeLike,
    *overrides: str,
    layout: LayoutLike | None = None,
    steps: int = 10,
    on: ClusterLike = "local",
    reporter: Reporter | None = None,
) -> Verification:
    """Train a shrunk model on one process and on the layout, and compare every step (`.equal`); then resume it."""
    from trainshed.workflow.verify import verify_and_clean_up

    for_recipe, for_cluster = split_overrides(overrides)
    return verify_and_clean_up(
        as_recipe(recipe, for_recipe),
        layout_keys=_layout_keys(layout),
        steps=steps,
        cluster=as_cluster(on, for_cluster),
        reporter=_reporter(reporter),
    )


def load_model(
    source: Run | str | os.PathLike[str],
    *,
    on: ClusterLike = "local",
    name: str | None = None,
    tokenizer: str | None = None,
    base: str | None = None,
    adapters: Mapping[str, str] | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    device: str | None = None,
    vocab_size: int | None = None,
    ignore_verdict: bool = False,
    reporter: Reporter | None = None,
) -> LoadedModel:
    """Load a model that can be asked (`.generate(…)`, `.logits(…)`): a run, its name, or weights in any format.

    Of a run that is its best or newest checkpoint. `base` and `adapters` are named in the same way. Raises
    `MissingExtra` where the parts for it are not installed.
    """
    address = checkpoint_address(source.address if isinstance(source, Run) else os.fspath(source), on)
    places = {adapter: checkpoint_address(place, on) for adapter, place in (adapters or {}).items()}
    try:
        from trainshed.serve import loading
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "safetensors"):
            raise
        raise MissingExtra.named("serve", "asking a model") from None
    return loading.load_model(
        address,
        name=name,
        dtype=dtype,
        device=device,
        tokenizer=tokenizer,
        base=None if base is None else checkpoint_address(base, on),
        adapters=places,
        vocab_size=vocab_size,
        ignore_verdict=ignore_verdict,
        reporter=_reporter(reporter),
    )


def evaluate(
    source: Run | str | os.PathLike[str],
    *,
    perplexity: str | Sequence[str] = (),
    tasks: str | Sequence[str] = (),
    questions: str | os.PathLike[str] | None = None,
    include_path: str | None = None,
    fewshot: int | None = None,
    limit: int | None = None,
    on: ClusterLike = "local",
    reporter: Reporter | None = None,
) -> EvaluationReport:
    """Score a run's best or newest checkpoint, or weights in any format, as `trainshed eval` does; `.records` has all.

    `perplexity` names prepared tokens or `validation`, `tasks` are lm-eval's, `questions` is a file of questions with
    expected words. Scores that are stored already are not computed again.
    """
    from trainshed.recipe.evaluation import load_questions
    from trainshed.workflow.evaluation.evaluate import EvaluationRequest
    from trainshed.workflow.evaluation.evaluate import evaluate as evaluate_weights

    request = EvaluationRequest(
        perplexity=(perplexity,) if isinstance(perplexity, str) else tuple(perplexity),
        tasks=(tasks,) if isinstance(tasks, str) else tuple(tasks),
        questions=() if questions is None else load_questions(questions),
        questions_name="questions" if questions is None else Path(questions).stem,
        include_path=include_path,
        fewshot=fewshot,
        limit=limit,
    )
    address = checkpoint_address(source.address if isinstance(source, Run) else os.fspath(source), on)
    return evaluate_weights(address, request, reporter=_reporter(reporter))


def sweep(
    recipe: str | os.PathLike[str],
    *overrides: str,
    on: str = "local",
    random: int | None = None,
    seed: int = 0,
    parallel: int | None = None,
    reporter: Reporter | None = None,
) -> SweepOutcome:
    """Run a recipe once for each combination of swept values (`"train.optimizer.lr=1e-4,3e-4"`), and compare the runs.

    `random` draws as many of them. The arguments are the options of `trainshed sweep`; nobody is asked first.
    """
    from trainshed.workflow.sweeps.runners import sweep as run_all

    return run_all(
        os.fspath(recipe), overrides, on=on, draws=random, seed=seed, parallel=parallel, reporter=_reporter(reporter)
    )


def _trained(finished: TrainedRun) -> Run:
    prepared = finished.prepared
    return Run(KnownRun(prepared.recipe.name, prepared.id, str(prepared.folder)), finished)


def _layout_keys(layout: LayoutLike | None) -> dict[str, object] | None:
    from trainshed.plan import parse_layout

    text = _layout_text(layout)
    return None if text is None else parse_layout(text)


def _layout_text(layout: LayoutLike | None) -> str | None:
    if layout is None or isinstance(layout, str):
        return layout or None
    return ",".join(f"{key}={value}" for key, value in layout.items())


def _progress(reporter: Reporter | None, watch: WatchTraining | None) -> tuple[Reporter, WatchTraining]:
    """Return what shows a training: as the caller says, or the notebook that this process belongs to."""
    from trainshed.observe.notebook import NotebookProgress
    from trainshed.workflow.run import UNWATCHED

    shown = _reporter(reporter)
    if watch is None and isinstance(shown, NotebookProgress):
        return shown, shown.watch
    return shown, watch or UNWATCHED


def _reporter(reporter: Reporter | None) -> Reporter:
    if reporter is not None:
        return reporter
    from trainshed.observe.notebook import NotebookProgress, in_notebook

    return NotebookProgress() if in_notebook() else SILENT
