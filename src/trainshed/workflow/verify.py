"""A layout against one process, and against itself resumed, on a shrunk model.

Three trainings run as every training does (a run's folder, ranks as processes, events, checkpoints), on synthetic
data:

    one process         the reference
    the layout          the same losses and gradient norms, step by step, within the bound
    the layout resumed  goes on from its own checkpoint in the middle and equals the straight one

All in float64, on GPUs as on CPUs: a forgotten sum over two ranks moves the loss of a small model by 1e-5, which in
float32 passes for rounding.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import gcd, inf
from pathlib import Path
from typing import Any

from trainshed.catalog.models import architecture
from trainshed.checkpoints.native.folder import checkpoints_folder, list_checkpoints, remove_checkpoint
from trainshed.data.order import run_orders
from trainshed.data.tokens.token_source import RunTokens
from trainshed.errors import InputError, TrainshedError
from trainshed.launch.local import train_locally
from trainshed.models.parameter_groups import parameter_group
from trainshed.models.parameters import AddedRows, lora_parameters, parameter_count, parameters
from trainshed.observe.event_log import read_events
from trainshed.observe.event_text import CTRL_C
from trainshed.plan import RankLayout
from trainshed.plan.shrink import ShrunkRun, shrink
from trainshed.recipe import (
    BatchRamp,
    Checkpoint,
    Cluster,
    DataSection,
    Engine,
    Layout,
    Lora,
    ModelSection,
    Observe,
    Optimizer,
    Recipe,
    Resources,
    load_cluster,
    parse_recipe,
    to_plain,
    to_yaml,
)
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import LocalStore
from trainshed.this_machine import check_can_train, usable_cpus
from trainshed.workflow import PreparedRun, check_engine, planned_layout, prepare_run, run_layout, save_run
from trainshed.workflow.layout import weights_architecture

SCHEMA = "trainshed.verify/1"
STEPS = 10
PRECISION = "fp64"
_MOST_PROCESSES = 16
"""Ranks that any CPU is asked to run, however few its cores: each is some 400 MB of PyTorch and little else."""

StepEvents = list[dict[str, Any]]


_DIFFERENCES = ("loss_difference", "grad_norm_difference")


@dataclass(frozen=True)
class Tolerance:
    """By how much, relative to their size, losses and gradient norms may differ."""

    loss: float
    grad_norm: float


FLOAT64_TOLERANCE = Tolerance(1e-9, 1e-9)
"""What rounding in another order may change in float64, over tens of steps."""
BITWISE_TOLERANCE = Tolerance(0.0, 0.0)


@dataclass(frozen=True)
class ComparedStep:
    """One step (counted from 1) of two trainings; a figure that is not finite is None."""

    step: int
    loss: float | None
    other_loss: float | None
    grad_norm: float | None
    other_grad_norm: float | None
    same_batch: bool

    @property
    def loss_difference(self) -> float:
        """The relative difference of the losses."""
        return relative_difference(self.loss, self.other_loss)

    @property
    def grad_norm_difference(self) -> float:
        """The relative difference of the gradient norms."""
        return relative_difference(self.grad_norm, self.other_grad_norm)

    def to_plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self) | _differences(self)


@dataclass(frozen=True)
class RunComparison:
    """Two trainings, and how far apart they may be."""

    steps: tuple[ComparedStep, ...]
    tolerance: Tolerance

    @property
    def loss_difference(self) -> float:
        """The largest relative difference of the losses."""
        return max(step.loss_difference for step in self.steps)

    @property
    def grad_norm_difference(self) -> float:
        """The largest relative difference of the gradient norms."""
        return max(step.grad_norm_difference for step in self.steps)

    @property
    def same_batches(self) -> bool:
        """Whether every step has seen the same tokens in the same order."""
        return all(step.same_batch for step in self.steps)

    @property
    def equal(self) -> bool:
        """Whether the batches are the same and all differences within the tolerance."""
        within = self.loss_difference <= self.tolerance.loss and self.grad_norm_difference <= self.tolerance.grad_norm
        return within and self.same_batches

    def to_plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "equal": self.equal,
            "bounds": asdict(self.tolerance),
            "same_batches": self.same_batches,
            **_differences(self),
            "rows": [step.to_plain() for step in self.steps],
        }


def compare_runs(
    expected: Sequence[dict[str, Any]], actual: Sequence[dict[str, Any]], tolerance: Tolerance
) -> RunComparison:
    """Compare the step events of one training with those of another, which must be of the same steps."""
    steps, others = ([event["step"] for event in events] for events in (expected, actual))
    if steps != others or not steps:
        raise TrainshedError(f"one training has {_span(steps)}, the other {_span(others)}: they cannot be compared")
    compared = (
        ComparedStep(
            step=one["step"] + 1,
            loss=one["loss"],
            other_loss=other["loss"],
            grad_norm=one["grad_norm"],
            other_grad_norm=other["grad_norm"],
            same_batch=one["batch_hash"] == other["batch_hash"],
        )
        for one, other in zip(expected, actual, strict=True)
    )
    return RunComparison(tuple(compared), tolerance)


def relative_difference(one: float | None, other: float | None) -> float:
    """Return the difference of two figures relative to the larger; infinite if one of them is not finite."""
    if one is None or other is None:
        return inf
    return 0.0 if one == other else abs(one - other) / max(abs(one), abs(other))


def _differences(compared: ComparedStep | RunComparison) -> dict[str, float | None]:
    """Return the differences by name; None for an infinite one, which JSON does not have."""
    differences = {key: getattr(compared, key) for key in _DIFFERENCES}
    return {key: None if value == inf else value for key, value in differences.items()}


def _span(steps: list[int]) -> str:
    return f"steps {steps[0] + 1} to {steps[-1] + 1}" if steps else "no steps"


@dataclass(frozen=True)
class Verification:
    """The result of a check; `asked` is the layout that was requested, `small.layout` the one that ran."""

    name: str
    asked: RankLayout
    small: ShrunkRun
    device: str
    straight: RunComparison
    resumed: RunComparison
    resumed_after: int

    @property
    def equal(self) -> bool:
        """The verdict."""
        return self.straight.equal and self.resumed.equal

    def to_plain(self) -> dict[str, Any]:
        """The report for programs."""
        small = self.small
        return {
            "schema": SCHEMA,
            "name": self.name,
            "verdict": "equal" if self.equal else "different",
            "asked": str(self.asked),
            "layout": small.layout.recipe_keys() | {"ranks": small.layout.world_size},
            "device": self.device,
            "precision": PRECISION,
            "model": to_plain(small.config),
            "parameters": parameter_count(small.config),
            "sequence_length": small.sequence_length,
            "batch_sizes": list(small.batch_sizes),
            **self.straight.to_plain(),
            "resumed": {"after_step": self.resumed_after, **self.resumed.to_plain()},
        }


def verify(
    recipe: Recipe,
    folder: Path,
    *,
    layout_keys: dict[str, object] | None = None,
    steps: int = STEPS,
    cluster: Cluster | None = None,
    reporter: Reporter = SILENT,
) -> Verification:
    """Check a recipe's layout, with `layout_keys` over it; the runs are made in `folder` and left there.

    No data has to be prepared and no weights fetched. A layout that is illegal for the model itself is an `InputError`
    before anything runs.
    """
    check_can_train()
    if steps < 2:
        raise InputError(f"{steps} steps have no middle to resume in", where="--steps", hint="write --steps 2 or more")
    check_engine(recipe)
    cluster = cluster or load_cluster()
    whole = _full_size_run(recipe, cluster)
    chosen = planned_layout(whole.recipe, cluster, keys=layout_keys)
    for reason in chosen.reasons:
        reporter.note(reason)
    asked = chosen.layout
    if recipe.train.lora is not None and recipe.train.lora.quantize == "nf4":
        reporter.note("the frozen weights are checked as int8: a shrunk model has no blocks of nf4")
    if asked.world_size == 1:
        reporter.note("the layout is one process: its micro-batches, its recomputation and its resuming are checked")
    small, on_gpus = _shrink_to_fit(whole, asked, reporter)
    trials = _Trials(steps, {} if on_gpus else {"CUDA_VISIBLE_DEVICES": ""}, reporter)
    alone = Layout(dp=1, micro_batch=gcd(*small.batch_sizes))
    spread = Layout.model_validate(small.layout.recipe_keys())
    one, run = (
        _with_added_rows(
            prepare_run(shrunk_recipe(whole.recipe, small, trial, folder, steps=steps), cluster, id=id),
            recipe.model.added_tokens,
        )
        for trial, id in ((alone, "one-process"), (spread, "layout"))
    )
    expected = trials.train(one, "one process")
    parallel_steps = trials.train(run, "the layout")
    middle = steps // 2
    again = trials.train(_rewind(run, middle), "resumed", after=middle)
    bitwise = not on_gpus or recipe.train.deterministic
    return Verification(
        name=recipe.name,
        asked=asked,
        small=small,
        device=trials.device,
        straight=compare_runs(expected, parallel_steps, FLOAT64_TOLERANCE),
        resumed=compare_runs(parallel_steps[middle:], again, BITWISE_TOLERANCE if bitwise else FLOAT64_TOLERANCE),
        resumed_after=middle,
    )


def verify_and_clean_up(
    recipe: Recipe,
    *,
    layout_keys: dict[str, object] | None = None,
    steps: int = STEPS,
    cluster: Cluster | None = None,
    reporter: Reporter = SILENT,
) -> Verification:
    """Verify in a temporary folder, which is kept where something differs or fails."""
    folder = Path(tempfile.mkdtemp(prefix="trainshed-verify-"))
    done = False
    try:
        verification = verify(recipe, folder, layout_keys=layout_keys, steps=steps, cluster=cluster, reporter=reporter)
        done = verification.equal
    except TrainshedError as error:
        done = error.exit_code != TrainshedError.exit_code  # wrong input, or somebody asked to stop
        raise
    finally:
        # What failed is explained by the runs' logs and events.
        if done:
            shutil.rmtree(folder)
        else:
            reporter.note(f"the runs of this check are kept in {folder}")
    return verification


def shrunk_recipe(recipe: Recipe, small: ShrunkRun, layout: Layout, store: Path, *, steps: int) -> Recipe:
    """Return the recipe of one training of a check: the real one's way of training, the shrunk one's sizes."""
    first, last = small.batch_sizes[0], small.batch_sizes[-1]
    ramp = None
    if last > first:
        ramp = BatchRamp(start=first, increment=last - first, samples=first * max(1, steps // 3))
    # A warm-up of thousands of steps would leave these few without a learning rate.
    schedule = recipe.train.schedule.model_copy(update={"warmup": min(recipe.train.schedule.warmup, steps // 4)})
    # Synthetic rows have no answers. What a layout can get wrong about conversations is to keep them apart.
    train = {
        "mode": "pretrain",
        "steps": steps,
        "tokens": None,
        "epochs": None,
        "phases": None,
        "global_batch": last,
        "batch_ramp": ramp,
        "lora": _checked_adapters(recipe.train.lora),
        "dpo": None,
        "early_stop": None,
        "optimizer": _checked_optimizer(recipe, small),
    }
    changes = {
        "model": ModelSection(config=small.config, init="random"),
        "tokenizer": None,
        "data": DataSection(
            synthetic=True,
            sequence_length=small.sequence_length,
            seed=recipe.data.seed,
            document_mask=True if recipe.document_mask else None,
        ),
        "train": recipe.train.model_copy(
            update=train | {"precision": PRECISION, "schedule": schedule, "early_stop": None}
        ),
        "layout": layout,
        "engine": Engine(),
        "checkpoint": Checkpoint(every=steps // 2, keep=None, **{"async": recipe.checkpoint.async_}),
        "observe": Observe(tensorboard=False, dllogger=False),
        "resources": Resources(),
        "elastic": None,
        "export": None,
        "eval": None,
        "serve": None,
        "store": str(store.absolute()),
    }
    # Read back as the ranks will read it, and so checked.
    return parse_recipe(to_yaml(recipe.model_copy(update=changes)), folder=recipe.folder)


def _checked_adapters(lora: Lora | None) -> Lora | None:
    """Return the adapters of a check: nf4 has blocks of 64 columns, which a shrunk model does not have."""
    if lora is None or lora.quantize != "nf4":
        return lora
    return lora.model_copy(update={"quantize": "int8"})


def _checked_optimizer(recipe: Recipe, small: ShrunkRun) -> Optimizer:
    """Return the optimizer of a check: a shrunk model has fewer layers, and maybe none that a group names."""
    optimizer, lora = recipe.train.optimizer, _checked_adapters(recipe.train.lora)
    trained = parameters(small.config) if lora is None else lora_parameters(small.config, lora)
    used = {parameter_group(parameter.name, optimizer.groups or ()) for parameter in trained}
    groups = tuple(group for group in optimizer.groups or () if group in used)
    return optimizer.model_copy(update={"groups": groups or None})


def _with_added_rows(run: PreparedRun, added_tokens: Sequence[str] | None) -> PreparedRun:
    """Let the last tokens of a shrunk model stand for added ones: with adapters their rows are trained."""
    if not added_tokens:
        return run
    rows = run.config.vocab_size
    count = min(len(added_tokens), rows // 2)
    run = replace(run, added=AddedRows(rows - count, count, rows))
    save_run(run)
    return run


def _full_size_run(recipe: Recipe, cluster: Cluster) -> PreparedRun:
    """The recipe's run at full size on synthetic data: never trained, but what its layout is checked against."""
    config = architecture(recipe) or weights_architecture(recipe, cluster)
    model = recipe.model.model_copy(update={"config": config, "preset": None})
    data = DataSection(synthetic=True, sequence_length=recipe.data.sequence_length, seed=recipe.data.seed)
    train = recipe.train.model_copy(update={"steps": 1, "tokens": None, "epochs": None, "phases": None})
    recipe = recipe.model_copy(update={"model": model, "data": data, "train": train})
    orders = run_orders(recipe, RunTokens(()), Path(), build=False)
    return PreparedRun(recipe, "whole", Path(), RunTokens(()), 1, orders.train, {}, None, None)


def _shrink_to_fit(whole: PreparedRun, layout: RankLayout, reporter: Reporter) -> tuple[ShrunkRun, bool]:
    """Shrink for the GPUs of this machine, else for its CPU; whether it is the GPUs."""
    from trainshed.engines.torch.rank_env import gpu_count

    asked = {"sequence_length": whole.order.sequence_length, "batch_sizes": whole.order.schedule.sizes}
    gpus = gpu_count()
    room = max(_MOST_PROCESSES, usable_cpus())
    try:
        small, on_gpus = shrink(whole.config, layout, **asked, max_ranks=gpus or room), gpus > 0
    except InputError:
        if not gpus:
            raise
        reporter.note(f"{layout} does not fit on {gpus} GPUs: it is checked on the CPU")
        small, on_gpus = shrink(whole.config, layout, **asked, max_ranks=room), False
    if small.layout.dp != layout.dp:
        ranks = gpus if on_gpus else room
        reporter.note(f"there is room for {ranks} ranks: checked with dp {small.layout.dp} in place of {layout.dp}")
    return small, on_gpus


def _rewind(run: PreparedRun, step: int) -> PreparedRun:
    """Take a run back to its checkpoint of a step, as if it had been stopped there."""
    store, folder = LocalStore(run.folder), checkpoints_folder("")
    there = list_checkpoints(store, folder)
    for entry in there.complete:
        if entry.step > step:
            remove_checkpoint(store, folder, entry.step, there)
    checkpoint = run.recipe.checkpoint.model_copy(update={"resume": "must"})
    run = replace(run, recipe=run.recipe.model_copy(update={"checkpoint": checkpoint}))
    save_run(run)
    return run


class _Trials:
    """Trains the runs of a check one after the other, and remembers on what."""

    def __init__(self, steps: int, environment: dict[str, str], reporter: Reporter) -> None:
        self.steps, self.environment, self.reporter = steps, environment, reporter
        self.device = ""

    def train(self, run: PreparedRun, label: str, *, after: int = 0) -> StepEvents:
        """Train a run and return its step events; `after` is the step it goes on from."""
        with self.reporter.task(label, total=self.steps - after, unit="steps") as task:

            def show(event: dict[str, Any]) -> None:
                if event["kind"] == "step":
                    task.advance(1)
                    task.describe(f"loss {event['loss']:.6f}" if event["loss"] is not None else "loss not finite")

            layout = run_layout(run)
            trained = train_locally(
                run.folder, layout, precision=PRECISION, on_event=show, environment=self.environment
            )
        if trained.exit_code:
            number = trained.exit_code - 128
            stopped_by = CTRL_C if number == signal.SIGINT else signal.Signals(number).name
            stopped = TrainshedError(f"the check was stopped by {stopped_by}")
            stopped.exit_code = trained.exit_code
            raise stopped
        events = list(read_events(LocalStore(run.folder), "", attempt=trained.attempt))
        self.device = next(event["device"] for event in events if event["kind"] == "start")
        return [event for event in events if event["kind"] == "step"]
