"""Small runs of the torch engine on the rank pool: their recipes, what their ranks do, and what they leave behind."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import yaml

from checkpoint_parts import HookedStore
from rank_pool import RankPool
from trainshed.checkpoints.base import BaseWeights
from trainshed.checkpoints.native.folder import Found, checkpoints_folder, find
from trainshed.checkpoints.native.loading import load, read_pieces
from trainshed.checkpoints.native.plan import DTYPES
from trainshed.checkpoints.pieces import Piece
from trainshed.data.order import DataOrder
from trainshed.data.run_orders import PreparedData, run_orders
from trainshed.data.sampling.schedule import BatchSchedule, SkipList
from trainshed.data.sampling.synthetic import SyntheticSource
from trainshed.engines.torch.job import TrainJob
from trainshed.engines.torch.rank import train_rank
from trainshed.line import open_run_folder, run_layout, train_job
from trainshed.observe.reading import EventFollower, read_events, steps
from trainshed.plan import layout_problems, parse_layout, resolve_layout
from trainshed.recipe import Layout, Recipe, parse_recipe
from trainshed.recipe.data import ValidationSource
from trainshed.storage import LocalStore, Store

_SIZES = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "vocab_size": 61, "max_positions": 32}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"family": "llama", **_SIZES, "ffn": 24, "rope": {"base": 10000.0}},
    # One embedding at both ends, learned positions, biases everywhere.
    "tied": {"family": "gpt2", **_SIZES, "kv_heads": 4, "ffn": 24},
    "moe": {
        "family": "qwen3_moe",
        **_SIZES,
        "rope": {"base": 10000.0},
        "moe": {"experts": 4, "top_k": 2, "ffn": 8, "shared_ffn": 12},
    },
}
ALONE = "micro_batch=2"
"""The layout that others are held against: one process."""


def recipe_text(model: str) -> str:
    """A recipe of 20 steps on synthetic data, in float64; its vocabulary is odd, so that no tp divides it."""
    train: dict[str, Any] = {
        "steps": 20,
        "global_batch": 8,
        "precision": "fp64",
        "optimizer": {"lr": 3e-3},  # with 1e-2 a step now and then multiplies rounding by a million
        # Not to the end of the run: a run that is made longer must not change its past.
        "schedule": {"name": "cosine", "warmup": 3, "decay": 40, "min_lr": 1e-3},
    }
    if "moe" in MODELS[model]:
        train["moe"] = {"balance_loss": 0.01, "z_loss": 1e-3}
    body = {
        "trainshed": 1,
        "name": "proof",
        "model": {"config": MODELS[model], "init": "random"},
        "data": {"synthetic": True, "sequence_length": 16},
        "train": train,
        "checkpoint": {"every": None},
    }
    return yaml.safe_dump(body, sort_keys=False)


def small_recipe(model: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe with some keys changed."""
    return parse_recipe(recipe_text(model), overrides)


def small_job(folder: Path, recipe: Recipe, layout: str) -> TrainJob:
    """What a rank of a small run is asked to train."""
    config = recipe.model.config
    assert config is not None
    orders = run_orders(recipe, PreparedData(()), folder, build=False)
    placed = resolve_layout(Layout.model_validate(parse_layout(layout)), config)
    asked = {"sequence_length": orders.train.sequence_length, "batch_sizes": orders.train.schedule.sizes}
    problems = layout_problems(placed, config, **asked)
    assert not problems, problems
    return TrainJob(
        recipe=recipe,
        config=config,
        layout=placed,
        name=folder.name,
        steps=orders.steps,
        order=orders.train,
        validation=orders.validation,
        store=LocalStore(folder),
        folder="",
    )


def train_small(folder: Path, model: str, layout: str, overrides: Sequence[str]) -> int:
    """Train as one rank; returns the exit code."""
    return train_rank(small_job(folder, small_recipe(model, overrides), layout), run_folder=folder)


def train_skipping(
    folder: Path, model: str, layout: str, overrides: Sequence[str], ranges: Sequence[tuple[int, int]]
) -> int:
    """Train as one rank with samples left out; the schema has `data.skip` for real data only."""
    job = small_job(folder, small_recipe(model, overrides), layout)
    order = DataOrder(job.order.sources, job.order.schedule, skip=SkipList(ranges))
    return train_rank(replace(job, order=order), run_folder=folder)


def train_validating(folder: Path, model: str, layout: str, overrides: Sequence[str]) -> int:
    """Train as one rank and measure the loss on other samples in between; the schema has that for real data only."""
    job = small_job(folder, small_recipe(model, overrides), layout)
    measured = job.recipe.data.model_copy(update={"validation": ValidationSource(every=3, batches=2)})
    other = SyntheticSource(vocab_size=job.config.vocab_size, sequence_length=job.order.sequence_length, seed=99)
    order = DataOrder([other], BatchSchedule(job.order.batch_size(0)))
    recipe = job.recipe.model_copy(update={"data": measured})
    return train_rank(replace(job, recipe=recipe, validation=order), run_folder=folder)


def train_until_killed(folder: Path, model: str, layout: str, overrides: Sequence[str], step: int) -> int:
    """Train as one rank; rank 0 kills itself after this step, or after a later one if no checkpoint is stored yet."""
    stored = False

    def listen(event: dict[str, Any]) -> None:
        nonlocal stored
        stored = stored or (event["kind"] == "checkpoint" and event["phase"] == "committed")
        if stored and event["kind"] == "step" and event["step"] >= step:
            os.kill(os.getpid(), signal.SIGKILL)

    return train_rank(small_job(folder, small_recipe(model, overrides), layout), run_folder=folder, listener=listen)


def train_until_asked(folder: Path, model: str, layout: str, overrides: Sequence[str], rank: int, number: int) -> int:
    """Train as one rank; one of them, and no other, gets a signal after the third step."""

    def ask() -> None:
        follower = EventFollower(folder)
        while not any(event["kind"] == "step" and event["step"] >= 2 for event in follower.poll()):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    if int(os.environ.get("RANK", 0)) == rank:
        threading.Thread(target=ask, daemon=True).start()
    return train_small(folder, model, layout, overrides)


def train_keeping_apart(
    folder: Path, model: str, layout: str, overrides: Sequence[str], killed_before: tuple[str, str] | None
) -> int:
    """Train as one rank with the checkpoints in a folder of their own; may be killed before a change there.

    `killed_before` is what changes (see `HookedStore`) and how its path ends.
    """

    def before(what: str, path: str) -> None:
        if killed_before is not None and what == killed_before[0] and path.endswith(killed_before[1]):
            os.kill(os.getpid(), signal.SIGKILL)

    job = small_job(folder, small_recipe(model, overrides), layout)
    home = HookedStore(LocalStore(folder / "apart"), before)
    return train_rank(replace(job, checkpoint_home=(cast(Store, home), "")), run_folder=folder)


def train_from(
    folder: Path, layout: str, overrides: Sequence[str], base: Path, ranges: Sequence[tuple[int, int]] = ()
) -> int:
    """Train as one rank from base weights, with samples left out."""
    job = small_job(folder, small_recipe("dense", overrides), layout)
    order = DataOrder(job.order.sources, job.order.schedule, skip=SkipList(ranges))
    return train_rank(replace(job, base=BaseWeights.at(base), order=order), run_folder=folder)


def train_prepared(folder: Path, layout: str, with_base: bool = True) -> int:
    """Train as one rank of a run that the line has prepared; it may have lost its base weights."""
    run = open_run_folder(folder)
    job = train_job(run, run_layout(run, keys=parse_layout(layout)))
    return train_rank(job if with_base else replace(job, base=None), run_folder=folder)


class SmallRuns:
    """Runs small recipes and remembers what one process gave."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self._made = 0
        self._alone: dict[tuple[str, tuple[str, ...]], list[dict[str, Any]]] = {}

    def new_folder(self) -> Path:
        """A folder for another run."""
        self._made += 1
        made = self.folder / f"run-{self._made}"
        made.mkdir()
        return made

    def train(self, folder: Path, model: str, layout: str, *overrides: str) -> list[dict[str, Any]]:
        """Train a run, or train on; returns the step events of the whole run so far."""
        codes = self.pool.run(train_small, folder, model, layout, overrides, ranks=world_size(layout))
        assert set(codes) == {0}
        return steps(LocalStore(folder), "")

    def fresh(self, model: str, layout: str, *overrides: str) -> list[dict[str, Any]]:
        """Train a new run; returns its step events."""
        return self.train(self.new_folder(), model, layout, *overrides)

    def alone(self, model: str, *overrides: str) -> list[dict[str, Any]]:
        """The step events of one process, trained once."""
        key = (model, overrides)
        if key not in self._alone:
            self._alone[key] = self.fresh(model, ALONE, *overrides)
        return self._alone[key]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind that all attempts of a run have written."""
    return [event for event in read_events(LocalStore(folder), "") if event["kind"] == kind]


def checkpoint(folder: Path, step: int) -> Found:
    """The complete checkpoint of a step."""
    return next(found for found in find(LocalStore(folder), checkpoints_folder("")) if found.step == step)


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, put together."""
    store, found = LocalStore(folder), checkpoint(folder, step)
    stored = read_pieces(store, found)
    whole = {name: torch.empty(each.shape, dtype=DTYPES[each.dtype]) for name, each in stored.items()}
    load(store, found, {name: Piece(each.shape, (0,) * each.dim(), each) for name, each in whole.items()})
    return whole


def world_size(layout: str) -> int:
    """How many ranks a layout is."""
    keys = parse_layout(layout)
    return math.prod(int(str(keys.get(key, 1))) for key in ("tp", "pp", "cp", "dp"))


def difference(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], figure: str) -> float:
    """The largest relative difference of a figure between the steps of two runs."""
    pairs = [(a[figure], b[figure]) for a, b in zip(one, other, strict=True)]
    return max(abs(a - b) / max(abs(a), abs(b)) for a, b in pairs)


def figures(steps: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What each step gave, without its times."""
    names = ("step", "loss", "grad_norm", "lr", "batch_hash", "tokens", "skipped", "moe_balance", "moe_z", "z_loss")
    return [tuple(event.get(name) for name in names) for event in steps]
