"""Ranks that train on pairs of answers, from the base weights of a run that was prepared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.models.trl_preference import END, TokenPair, pack_pairs
from support.runs.small_ranks import captured_blocks
from trainshed.data.order import DataOrder
from trainshed.data.sampling.schedule import BatchSchedule
from trainshed.data.sampling.sources import SyntheticSource
from trainshed.engines.torch import trainer, validation
from trainshed.engines.torch.batch_loader import LocalBatch, to_local_batch
from trainshed.engines.torch.parallel import ParallelMesh
from trainshed.engines.torch.rank import train_rank
from trainshed.engines.torch.rank_env import TrainJob
from trainshed.plan import parse_layout
from trainshed.recipe.data import ValidationSource
from trainshed.recipe.train import Dpo
from trainshed.workflow import open_run_folder, run_layout, train_job

WORDS = range(1, 21)
"""The tokens that prompts and answers are made of."""


def learnable_pair(source: random.Random) -> TokenPair:
    """A prompt with a better answer of even words and a worse one of odd words."""

    def answer(words: Sequence[int]) -> list[int]:
        return [*source.choices(words, k=source.randint(1, 4)), END]

    return TokenPair(source.choices(WORDS, k=source.randint(1, 4)), answer(WORDS[1::2]), answer(WORDS[::2]))


class PairLoader:
    """Takes the place of `BatchLoader`: rows of one to three pairs, the same on every layout."""

    def __init__(self, order: DataOrder, mesh: ParallelMesh, *, with_sample_ids: bool) -> None:
        self.order, self.mesh, self.with_sample_ids = order, mesh, with_sample_ids

    def batch(self, step: int, *, ahead: bool = True) -> LocalBatch:
        """This rank's rows of a step."""
        source = random.Random(f"{self.order.sources[0].label} {step}")
        size, layout, place = self.order.batch_size(step), self.mesh.layout, self.mesh.coordinates
        rows = [[learnable_pair(source) for _ in range(source.randint(1, 3))] for _ in range(size)]
        packed = pack_pairs(rows, self.order.sequence_length)
        here, padding = layout.sample_range(size, place.dp), layout.padding(size, place.dp)
        mine = slice(here.start, here.stop)
        starts = torch.from_numpy(np.pad(packed.document_starts[mine].numpy(), ((0, padding), (0, 0))))
        first = self.order.consumed(step) + here.start
        samples = torch.arange(first, first + len(here) + padding) if self.with_sample_ids else None
        batch = LocalBatch(len(here) + padding, None, None, samples)
        if self.mesh.reads_tokens:
            batch = to_local_batch(
                packed.tokens[mine].numpy(), packed.labels[mine].numpy(), self.mesh, padding=padding, samples=samples
            )
        return replace(batch, document_starts=starts)

    def close(self) -> None:
        """There is nothing to stop."""


def preference_job(folder: Path, layout: str, dpo: dict[str, Any], train: dict[str, Any]) -> TrainJob:
    """The job of a prepared run, turned into one that learns from pairs and validates on others."""
    run = open_run_folder(folder)
    job = train_job(run, run_layout(run, keys=parse_layout(layout)))
    recipe = job.recipe.model_copy(
        update={
            "train": job.recipe.train.model_copy(update={"mode": "dpo", "dpo": Dpo(**dpo), **train}),
            "data": job.recipe.data.model_copy(update={"validation": ValidationSource(every=4, batches=2)}),
        }
    )
    other = SyntheticSource(
        vocab_size=job.config.vocab_size, sequence_length=job.order.sequence_length, seed=0, label="held out"
    )
    validation = DataOrder([other], BatchSchedule(job.order.batch_size(0)))
    steps = train.get("steps", job.steps)
    return replace(job, recipe=recipe, validation=validation, steps=steps)


def train_preference(
    folder: Path, layout: str, dpo: dict[str, Any], train: dict[str, Any], lost: Sequence[str] = ()
) -> int:
    """Train as one rank on pairs; `lost` are fields of the job that are missing."""
    job = replace(preference_job(folder, layout, dpo, train), **dict.fromkeys(lost))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "BatchLoader", PairLoader)
        patch.setattr(validation, "BatchLoader", PairLoader)
        return train_rank(job, run_folder=folder)


def train_preference_compiled(folder: Path, layout: str, dpo: dict[str, Any], train: dict[str, Any]) -> int:
    """Train as one rank on pairs with its blocks, and those of the reference, captured as for a GPU."""
    with captured_blocks():
        return train_preference(folder, layout, dpo, train)
