"""What the ranks of small runs do: train, and on the way be killed, asked to stop, poisoned or captured."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from support.recipes.small_recipes import small_job, small_recipe
from support.runs.checkpoint_parts import HookedStore
from trainshed.checkpoints.base import BaseWeights
from trainshed.data.order import DataOrder
from trainshed.data.prompts import ValidationPrompts
from trainshed.data.sampling.schedule import BatchSchedule, SkipList
from trainshed.data.sampling.sources import SyntheticSource
from trainshed.engines.torch import rank, rank_timing
from trainshed.engines.torch.batch_loader import BatchLoader, LocalBatch
from trainshed.engines.torch.model import RankModel, build_model
from trainshed.engines.torch.rank import train_rank
from trainshed.engines.torch.rank_env import TrainJob
from trainshed.engines.torch.state import StartPoint, load_start_state
from trainshed.models import loss
from trainshed.models.decoder import DecoderLayer
from trainshed.observe.event_log import EventFollower
from trainshed.plan import parse_layout
from trainshed.recipe import Recipe
from trainshed.recipe.data import ValidationSource
from trainshed.recipe.schema import BestCheckpoint
from trainshed.recipe.train import EarlyStop
from trainshed.storage import LocalStore, Store
from trainshed.workflow import open_run_folder, run_layout, train_job


def train_small(folder: Path, model: str, layout: str, overrides: Sequence[str]) -> int:
    """Train as one rank; returns the exit code."""
    return train_rank(small_job(folder, small_recipe(model, overrides), layout), run_folder=folder)


def train_uneven(folder: Path, model: str, layout: str, overrides: Sequence[str]) -> int:
    """Train as one rank of a layout whose dp ranks have different numbers of rows."""
    return train_rank(small_job(folder, small_recipe(model, overrides), layout, uneven=True), run_folder=folder)


def train_unchecked(folder: Path, model: str, layout: str, overrides: Sequence[str]) -> int:
    """Train as one rank on a layout that nobody has checked."""
    return train_rank(small_job(folder, small_recipe(model, overrides), layout, checked=False), run_folder=folder)


def train_in_slices(folder: Path, model: str, layout: str, overrides: Sequence[str], elements: int) -> int:
    """Train as one rank with at most so many logits at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "CHUNK_ELEMENTS", elements)
        return train_small(folder, model, layout, overrides)


def train_skipping(
    folder: Path, model: str, layout: str, overrides: Sequence[str], ranges: Sequence[tuple[int, int]]
) -> int:
    """Train as one rank with samples left out; the schema has `data.skip` for real data only."""
    job = small_job(folder, small_recipe(model, overrides), layout)
    order = DataOrder(job.order.sources, job.order.schedule, skip=SkipList(ranges))
    return train_rank(replace(job, order=order), run_folder=folder)


def train_validating(folder: Path, model: str, layout: str, overrides: Sequence[str]) -> int:
    """Train as one rank and measure the loss on other samples in between; the schema has that for real data only.

    Where the recipe averages weights, the average is measured.
    """
    job = small_job(folder, small_recipe(model, overrides), layout)
    measured = job.recipe.data.model_copy(update={"validation_": ValidationSource(every=3, batches=2)})
    other = SyntheticSource(vocab_size=job.config.vocab_size, sequence_length=job.order.sequence_length, seed=99)
    order = DataOrder([other], BatchSchedule(job.order.batch_size(0)))
    train = job.recipe.train
    if train.ema is not None:
        train = train.model_copy(update={"ema": train.ema.model_copy(update={"validation": True})})
    recipe = job.recipe.model_copy(update={"data": measured, "train": train})
    return train_rank(replace(job, recipe=recipe, validations={"validation": order}), run_folder=folder)


def blended_order(job: TrainJob, *, apart: bool) -> DataOrder:
    """An order of two sources with shares of 3 to 1; `apart` keeps their documents apart."""
    sources = []
    for label, weight in (("articles", 3.0), ("code", 1.0)):
        source = SyntheticSource(
            vocab_size=job.config.vocab_size,
            sequence_length=job.order.sequence_length,
            seed=5,
            label=label,
            keeps_documents_apart=apart,
        )
        source.weight = weight
        sources.append(source)
    return DataOrder(sources, job.order.schedule)


def train_blended(folder: Path, model: str, layout: str, overrides: Sequence[str], apart: bool) -> int:
    """Train as one rank on two sources; the schema has several for real data only."""
    job = small_job(folder, small_recipe(model, overrides), layout)
    return train_rank(replace(job, order=blended_order(job, apart=apart)), run_folder=folder)


def train_compiled(folder: Path, model: str, layout: str, overrides: Sequence[str]) -> int:
    """Train as one rank with its blocks captured as for a GPU."""
    with captured_blocks():
        return train_small(folder, model, layout, overrides)


@contextmanager
def captured_blocks() -> Iterator[None]:
    """Let ranks capture their blocks as for a GPU; the graphs are then run operation by operation."""
    warnings.simplefilter("ignore")  # of PyTorch's own, when it loads its compiler

    def build_compiled(*arguments: Any, **options: Any) -> RankModel:
        return build_model(*arguments, **options | {"compile_blocks": True})

    def compile_block(block: DecoderLayer, **options: Any) -> None:
        torch.nn.Module.compile(block, backend="aot_eager", **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "build_model", build_compiled)
        patch.setattr(DecoderLayer, "compile", compile_block)
        yield


def train_counting_stages(folder: Path, model: str, layout: str, overrides: Sequence[str]) -> list[int]:
    """Train as one rank; returns how many pipeline stages, with their buffers, there were after each of its steps."""
    counts: list[int] = []

    def listen(event: dict[str, Any]) -> None:
        if event["kind"] == "step":
            frozen = gc.get_freeze_count()
            gc.unfreeze()  # only then they are listed
            counts.append(sum(issubclass(type(each), PipelineStage) for each in gc.get_objects()))
            if frozen:
                gc.freeze()

    train_rank(small_job(folder, small_recipe(model, overrides), layout), run_folder=folder, listener=listen)
    return counts


def train_loading_slowly(folder: Path, model: str, layout: str, overrides: Sequence[str], late_seconds: float) -> int:
    """Train as one rank; the last one is that late with its weights."""

    def load(*arguments: Any) -> StartPoint:
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            time.sleep(late_seconds)
        return load_start_state(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "load_start_state", load)
        job = small_job(folder, small_recipe(model, overrides), layout)
        return train_rank(job, run_folder=folder)


def train_with_a_slow_rank(folder: Path, model: str, layout: str, overrides: Sequence[str], late_seconds: float) -> int:
    """Train as one rank; the last one takes longer to read its rows. Windows are as short as three steps."""
    read = BatchLoader.batch

    def read_slowly(loader: BatchLoader, step: int, *, ahead: bool = True) -> LocalBatch:
        time.sleep(late_seconds)
        return read(loader, step, ahead=ahead)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_timing, "WINDOW_STEPS", 3)
        patch.setattr(rank_timing, "WINDOW_SECONDS", 0.0)
        patch.setattr(rank_timing, "_RANKS_PER_WINDOW_SECOND", float("inf"))
        patch.setitem(rank_timing.MEASURED_EVERY, "cpu", 1)
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            patch.setattr(BatchLoader, "batch", read_slowly)
        return train_small(folder, model, layout, overrides)


def train_until_killed(folder: Path, model: str, layout: str, overrides: Sequence[str], step: int) -> int:
    """Train as one rank; rank 0 kills itself after this step, or after a later one if no checkpoint is stored yet."""
    stored = False

    def listen(event: dict[str, Any]) -> None:
        nonlocal stored
        stored = stored or (event["kind"] == "checkpoint" and event["phase"] == "committed")
        if stored and event["kind"] == "step" and event["step"] >= step:
            os.kill(os.getpid(), signal.SIGKILL)

    return train_rank(small_job(folder, small_recipe(model, overrides), layout), run_folder=folder, listener=listen)


def train_until_boundary(folder: Path, model: str, layout: str, overrides: Sequence[str], kind: str, step: int) -> int:
    """Train as one rank; rank 0 kills itself at the first event of this kind that is of this step or a later one."""

    def listen(event: dict[str, Any]) -> None:
        if event["kind"] == kind and event["step"] >= step and event.get("phase") in (None, "committed"):
            os.kill(os.getpid(), signal.SIGKILL)

    return train_rank(small_job(folder, small_recipe(model, overrides), layout), run_folder=folder, listener=listen)


def train_until_asked(folder: Path, model: str, layout: str, overrides: Sequence[str], asked: int, number: int) -> int:
    """Train as one rank; one of them, and no other, gets a signal after the third step."""

    def ask() -> None:
        follower = EventFollower(folder)
        while not any(event["kind"] == "step" and event["step"] >= 2 for event in follower.poll()):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    if int(os.environ.get("RANK", 0)) == asked:
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
    return train_rank(replace(job, base=BaseWeights.from_folder(base), order=order), run_folder=folder)


def train_prepared(folder: Path, layout: str, with_base: bool = True) -> int:
    """Train as one rank of a run that the line has prepared; it may have lost its base weights."""
    run = open_run_folder(folder)
    job = train_job(run, run_layout(run, keys=parse_layout(layout)))
    return train_rank(job if with_base else replace(job, base=None), run_folder=folder)


def train_measuring(
    folder: Path,
    model: str,
    layout: str,
    overrides: Sequence[str],
    every: int = 2,
    best: bool = False,
    early_stop: EarlyStop | None = None,
    killed_before: tuple[str, str] | None = None,
    stop_after: int | None = None,
    prompts: ValidationPrompts | None = None,
    document_mask: bool = False,
    stop_in_validation: int | None = None,
) -> int:
    """Train as one rank and measure the loss on other samples; the schema has that for real data only.

    The checkpoints are kept apart; `killed_before` is a change there, as in `train_keeping_apart`. A signal makes the
    run stop after `stop_after` steps, or in the validation that follows step `stop_in_validation`.
    """

    def before(what: str, path: str) -> None:
        if killed_before is not None and what == killed_before[0] and path.endswith(killed_before[1]):
            os.kill(os.getpid(), signal.SIGKILL)

    def listen(event: dict[str, Any]) -> None:
        # Ranks agree on a signal in the step that follows, or in the first batch of a validation.
        if event["kind"] == "step" and event["step"] in (
            stop_after - 2 if stop_after is not None else None,
            stop_in_validation - 1 if stop_in_validation is not None else None,
        ):
            os.kill(os.getpid(), signal.SIGTERM)

    def measured(recipe: Recipe) -> Recipe:
        changed = {"validation_": ValidationSource(every=every, batches=2), "document_mask": document_mask or None}
        return recipe.model_copy(
            update={
                "data": recipe.data.model_copy(update=changed),
                "train": recipe.train.model_copy(update={"early_stop": early_stop}),
                "checkpoint": recipe.checkpoint.model_copy(update={"best": BestCheckpoint() if best else None}),
            }
        )

    def validations(order: DataOrder) -> dict[str, DataOrder]:
        other = SyntheticSource(vocab_size=job.config.vocab_size, sequence_length=order.sequence_length, seed=99)
        return {"validation": DataOrder([other], BatchSchedule(order.schedule.global_batch))}

    job = small_job(folder, small_recipe(model, overrides), layout)
    phases = [
        replace(
            phase,
            span=replace(phase.span, recipe=measured(phase.span.recipe)),
            validations=validations(phase.order),
        )
        for phase in job.phases
    ]
    job = replace(
        job, recipe=measured(job.recipe), validations=validations(job.order), phases=tuple(phases), prompts=prompts
    )
    home = cast(Store, HookedStore(LocalStore(folder), before))
    return train_rank(replace(job, checkpoint_home=(home, "apart")), run_folder=folder, listener=listen)
