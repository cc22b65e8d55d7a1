"""Ranks that train on packed pairs of answers, from the base weights of a run that was prepared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.models.trl_preference import END, TokenPair
from support.runs.conversations import write_conversations
from support.runs.small_ranks import captured_blocks
from trainshed.data.order import DataOrder, packed_order
from trainshed.data.sampling.packing import PackRule
from trainshed.data.sampling.schedule import BatchSchedule
from trainshed.data.tokens.token_source import TokenSource
from trainshed.engines.torch.rank import train_rank
from trainshed.engines.torch.rank_env import TrainJob
from trainshed.plan import parse_layout
from trainshed.recipe.data import ValidationSource
from trainshed.recipe.train import Dpo
from trainshed.workflow import open_run_folder, run_layout, train_job

WORDS = range(1, 21)
"""The tokens that prompts and answers are made of."""
PAIRS = {"train": 400, "validation": 100}
"""How many pairs there are to learn from, and to validate on."""


def learnable_pair(source: random.Random) -> TokenPair:
    """A prompt with a better answer of even words and a worse one of odd words."""

    def answer(words: Sequence[int]) -> list[int]:
        return [*source.choices(words, k=source.randint(1, 4)), END]

    return TokenPair(source.choices(WORDS, k=source.randint(1, 4)), answer(WORDS[1::2]), answer(WORDS[::2]))


def write_pairs(folder: Path) -> None:
    """Write the pairs of a run as token files: better and worse in turn, their answers learned."""
    for name, count in PAIRS.items():
        source = random.Random(name)
        pairs = [learnable_pair(source) for _ in range(count)]
        documents = [document for pair in pairs for document in pair.documents]
        prompts = [len(pair.prompt) for pair in pairs for _ in range(2)]
        learned = [
            [column >= prompt for column in range(len(document))]
            for document, prompt in zip(documents, prompts, strict=True)
        ]
        write_conversations(folder / "pairs" / name, documents, learned)


def pair_order(folder: Path, name: str, length: int, batch: int, *, build: bool) -> DataOrder:
    """The packed rows of the pairs of a run."""
    return packed_order(
        [TokenSource.open(name, [str(folder / "pairs" / name)])],
        indexes=folder / "pairs" / "indexes",
        seed=0,
        sequence_length=length,
        rule=PackRule(pairs=True),
        schedule=BatchSchedule(batch),
        build=build,
    )


def preference_job(folder: Path, layout: str, dpo: dict[str, Any], train: dict[str, Any]) -> TrainJob:
    """The job of a prepared run, turned into one that learns from pairs and validates on others."""
    run = open_run_folder(folder)
    job = train_job(run, run_layout(run, keys=parse_layout(layout)))
    recipe = job.recipe.model_copy(
        update={
            "train": job.recipe.train.model_copy(update={"mode": "dpo", "dpo": Dpo(**dpo), **train}),
            "data": job.recipe.data.model_copy(update={"validation_": ValidationSource(every=4, batches=2)}),
        }
    )
    length, batch = job.order.sequence_length, job.order.batch_size(0)
    order, validation = (pair_order(folder, name, length, batch, build=False) for name in PAIRS)
    return replace(
        job, recipe=recipe, order=order, validations={"validation": validation}, steps=train.get("steps", job.steps)
    )


def train_preference(
    folder: Path, layout: str, dpo: dict[str, Any], train: dict[str, Any], lost: Sequence[str] = ()
) -> int:
    """Train as one rank on pairs; `lost` are fields of the job that are missing."""
    job = replace(preference_job(folder, layout, dpo, train), **dict.fromkeys(lost))
    return train_rank(job, run_folder=folder)


def train_preference_compiled(folder: Path, layout: str, dpo: dict[str, Any], train: dict[str, Any]) -> int:
    """Train as one rank on pairs with its blocks, and those of the reference, captured as for a GPU."""
    with captured_blocks():
        return train_preference(folder, layout, dpo, train)
