"""Exactly which tokens a step trains on, from (data section, seed, step, skip list) and nothing else.

Step n takes samples consumed(n) .. consumed(n + 1) of the run. Skips turn them into samples of the stream. The blend
gives each sample a source and a number within it. The source's two keyed permutations (documents, windows) give the
tokens. Each part has a closed form, so any step costs the same to reach, and a rank can read its own rows alone.

`DataOrder` is that function. `build_order` makes the source indexes that it needs, before any GPU is held.
`open_order` only opens them. `run_orders` does one or the other for a recipe.

Shapes: B samples of a step (the global batch, ramp-up included), R rows to read, L sequence_length.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainshed.data.sampling.blend import Blend, SourceBudget
from trainshed.data.sampling.index import IndexSpec, SourceIndex, build_index
from trainshed.data.sampling.schedule import BatchRampUp, BatchSchedule, SkipList
from trainshed.data.sampling.sources import SampleSource, SyntheticSource, TokenDataset
from trainshed.data.tokens.token_source import RunTokens, TokenSource
from trainshed.errors import InputError, NotFound
from trainshed.recipe import Recipe
from trainshed.recipe.validation import recipe_error
from trainshed.reporting import SILENT, Reporter

if TYPE_CHECKING:
    from trainshed.storage import StoreOptions


@dataclass(frozen=True)
class SampleLocation:
    """Where samples come from; every array is int64 [R]."""

    source: np.ndarray
    epoch: np.ndarray
    window: np.ndarray


class DataOrder:
    """The order of a run's samples."""

    def __init__(
        self, sources: Sequence[SampleSource], schedule: BatchSchedule, *, skip: SkipList | None = None
    ) -> None:
        self.sources = list(sources)
        self.schedule = schedule
        self.skip = skip or SkipList()
        self.blend = Blend(
            [source.name for source in self.sources],
            [source.weight for source in self.sources],
            [source.tokens for source in self.sources],
        )
        if len({source.label for source in self.sources}) < len(self.sources):
            raise InputError("two sources would be shuffled alike", where="data.train", hint="label each apart")
        self.sequence_length = self.sources[0].sequence_length
        for source in self.sources:
            if source.sequence_length != self.sequence_length:
                raise InputError(
                    f"source '{source.name}' is cut to {source.sequence_length}, others to {self.sequence_length}",
                    where="data.sequence_length",
                )

    def consumed(self, step: int) -> int:
        """Return how many samples were taken before a step; steps count from 0."""
        return self.schedule.consumed(step)

    def batch_size(self, step: int) -> int:
        """Return how many samples a step takes."""
        return self.schedule.batch_size(step)

    def sample_indices(self, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows [start, stop) of a step as samples of the stream (skips applied): int64 [R]."""
        size = self.batch_size(step)
        stop = size if stop is None else stop
        if not 0 <= start <= stop <= size:
            raise IndexError(f"rows {start} to {stop} of a batch of {size}")
        before = self.consumed(step)
        return self.skip.to_stream(np.arange(before + start, before + stop, dtype=np.int64))

    def locate(self, samples: np.ndarray) -> SampleLocation:
        """Map samples of the stream to source, epoch and window."""
        number, draw = self.blend.locate(samples)
        epoch, window = np.empty_like(draw), np.empty_like(draw)
        for source in sorted(set(number.tolist())):
            chosen = number == source
            epoch[chosen], window[chosen] = self.sources[source].locate(draw[chosen])
        return SampleLocation(number, epoch, window)

    def read(self, samples: np.ndarray) -> np.ndarray:
        """Return the tokens of samples of the stream: int32 [R, L + 1], read-only."""
        number, draw = self.blend.locate(samples)
        out = np.empty((len(samples), self.sequence_length + 1), np.int32)
        used = sorted(set(number.tolist()))
        for source in used:
            if len(used) == 1:
                self.sources[source].read(draw, out)
            else:
                rows = np.flatnonzero(number == source)
                part = np.empty((len(rows), self.sequence_length + 1), np.int32)
                self.sources[source].read(draw[rows], part)
                out[rows] = part
        out.flags.writeable = False
        return out

    def rows(self, step: int, start: int, stop: int) -> np.ndarray:
        """Return rows [start, stop) of a step's batch, reading nothing else: int32 [R, L + 1]."""
        return self.read(self.sample_indices(step, start, stop))

    def batch(self, step: int) -> np.ndarray:
        """Return a step's whole batch: int32 [B, L + 1]; inputs are [:, :-1], labels [:, 1:]."""
        return self.read(self.sample_indices(step))

    def batch_hash(self, step: int) -> str:
        """Return 16 hex digits of the step's tokens, for events: equal on any layout, after any restart."""
        return hash_batch(self.batch(step))

    def budget(self, steps: int) -> list[SourceBudget]:
        """Return what each source gives to the first `steps` steps; `samples` does not count skipped ones."""
        end = self.skip.stream_end(self.consumed(steps))
        reached = self.blend.counts(end)
        drawn = np.array(reached, np.int64)
        for start, stop in self.skip.ranges:
            if start < end:
                drawn -= np.subtract(self.blend.counts(min(stop, end)), self.blend.counts(start))
        budgets: list[SourceBudget] = []
        for source, weight, through, samples in zip(
            self.sources, self.blend.weights, reached, drawn.tolist(), strict=True
        ):
            # Skipped samples are passed over, so they count towards how far the run gets into the source.
            epochs = None if source.epoch_samples is None else through / max(1, source.epoch_samples)
            tokens = samples * self.sequence_length
            budgets.append(SourceBudget(source.name, weight, samples, tokens, epochs))
        return budgets


def hash_batch(tokens: np.ndarray) -> str:
    """Return 16 hex digits of a whole batch of tokens [B, L + 1]."""
    return format_batch_hash(*hash_batch_rows(tokens, 0))


def hash_batch_rows(tokens: np.ndarray, first_row: int) -> tuple[int, int]:
    """Return two sums of the rows' hashes. `format_batch_hash` takes the sums over all rows of a batch.

    A row's hash is BLAKE2b over its number in the batch and its tokens as little-endian int32. It is cut into two
    32-bit numbers: their sums stay exact in float64, so ranks can add them with their other figures.
    """
    low = high = 0
    for number, row in enumerate(np.ascontiguousarray(tokens, "<i4"), first_row):
        digest = hashlib.blake2b(row.data, digest_size=8, salt=number.to_bytes(8, "little")).digest()
        low += int.from_bytes(digest[:4], "little")
        high += int.from_bytes(digest[4:], "little")
    return low, high


def format_batch_hash(low: int, high: int) -> str:
    """Write the summed hashes of a batch as 16 hex digits."""
    return f"{high % 2**32:08x}{low % 2**32:08x}"


def build_order(
    sources: Sequence[TokenSource],
    *,
    indexes: Path,
    seed: int,
    sequence_length: int,
    schedule: BatchSchedule,
    steps: int,
    split: tuple[float, float] = (0.0, 1.0),
    skip: SkipList | None = None,
    options: StoreOptions | None = None,
    check: Callable[[DataOrder], None] = lambda _: None,
    reporter: Reporter = SILENT,
) -> DataOrder:
    """Open the order; first make what `steps` steps need and `indexes/<key>/` lacks.

    `check` gets an order that knows how much each source holds, before any epoch is made. It raises to refuse it.
    """
    listed = _list_shards(sources, seed, split, options)

    def order_of(epochs: list[int]) -> DataOrder:
        datasets: list[TokenDataset] = []
        for (source, spec, shards), count in zip(listed, epochs, strict=True):
            folder = indexes / spec.key
            index = build_index(folder, spec, shards, epochs=count, options=options, reporter=reporter)
            datasets.append(TokenDataset(source, index, sequence_length, shards=shards, options=options))
        return DataOrder(datasets, schedule, skip=skip)

    # How many epochs a source needs follows from the blend, which may need to know how large the sources are.
    without_epochs = order_of([0] * len(sources))
    check(without_epochs)
    return order_of([math.ceil(budget.epochs or 0) for budget in without_epochs.budget(steps)])


def open_order(
    sources: Sequence[TokenSource],
    *,
    indexes: Path,
    seed: int,
    sequence_length: int,
    schedule: BatchSchedule,
    split: tuple[float, float] = (0.0, 1.0),
    skip: SkipList | None = None,
    options: StoreOptions | None = None,
) -> DataOrder:
    """Open an order whose indexes exist; nothing is built."""
    datasets: list[TokenDataset] = []
    for source, spec, shards in _list_shards(sources, seed, split, options):
        try:
            index = SourceIndex(indexes / spec.key)
        except NotFound:
            raise NotFound(
                f"source '{source.name}' has no index",
                where=str(indexes / spec.key),
                hint="run `trainshed run RECIPE` first",
            ) from None
        datasets.append(TokenDataset(source, index, sequence_length, shards=shards, options=options))
    return DataOrder(datasets, schedule, skip=skip)


def _list_shards(
    sources: Sequence[TokenSource], seed: int, split: tuple[float, float], options: StoreOptions | None
) -> list[tuple[TokenSource, IndexSpec, list[str]]]:
    """Return each source with the spec of its index, and its shards."""
    return [(source, IndexSpec.of(source, seed, split, options), source.shards(options)) for source in sources]


@dataclass(frozen=True)
class RunOrders:
    """The length of a run in steps, and the samples of its training and its validation."""

    steps: int
    train: DataOrder
    validation: DataOrder | None


def run_orders(
    recipe: Recipe,
    data: RunTokens,
    indexes: Path,
    *,
    build: bool,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> RunOrders:
    """Put a run's orders together. With `build`, missing indexes are made; otherwise they are an error."""
    section, train = recipe.data, recipe.train
    schedule = _batch_schedule(recipe)
    steps = run_steps(recipe, data)
    if section.synthetic:
        return RunOrders(steps, DataOrder([_synthetic_source(recipe)], schedule), None)
    share = section.split.train if section.split else 1.0
    builder = _OrderBuilder(recipe, indexes, build, options, reporter)
    order = builder.order(
        data.sources, (0.0, share), schedule, steps, SkipList(section.skip), minimum_samples=train.global_batch
    )
    too_short = list(recipe.warmup_problems(steps))
    if too_short:
        raise recipe_error(too_short, recipe.places)
    validation = None
    if section.validation is not None:
        if data.validation is not None:
            validation_sources, split = (data.validation,), (0.0, 1.0)
        else:
            assert section.split is not None, "the schema asks for a split or a source"
            validation_sources, split = data.sources, (share, min(1.0, share + section.split.validation))
        renamed = [replace(source, name=f"{source.name} (validation)") for source in validation_sources]
        batches = section.validation.batches
        validation = builder.order(renamed, split, BatchSchedule(train.global_batch), batches, SkipList())
    return RunOrders(steps, order, validation)


def run_steps(recipe: Recipe, data: RunTokens) -> int:
    """Return the length of a run in steps, in whichever way its recipe says it; no token file is opened."""
    train = recipe.train
    if train.steps is not None:
        return train.steps
    tokens = train.tokens
    if tokens is None:
        share = recipe.data.split.train if recipe.data.split else 1.0
        epoch_tokens = int(sum(source.tokens for source in data.sources) * share)
        tokens = int((train.epochs or 0) * epoch_tokens)
    length = _synthetic_source(recipe).sequence_length if recipe.data.synthetic else recipe.data.sequence_length
    assert length is not None, "the schema asks for it wherever data is not synthetic"
    return _batch_schedule(recipe).steps_for(-(-tokens // length))


@dataclass(frozen=True)
class _OrderBuilder:
    recipe: Recipe
    indexes: Path
    build: bool
    options: StoreOptions | None
    reporter: Reporter

    def order(
        self,
        sources: Sequence[TokenSource],
        split: tuple[float, float],
        schedule: BatchSchedule,
        steps: int,
        skip: SkipList,
        *,
        minimum_samples: int = 1,
    ) -> DataOrder:
        common = {
            "indexes": self.indexes,
            "seed": self.recipe.data.seed,
            "sequence_length": self.recipe.data.sequence_length or 0,
            "schedule": schedule,
            "split": (split[0], min(split[1], 1.0)),
            "skip": skip,
            "options": self.options,
        }
        if not self.build:
            return open_order(sources, **common)
        return build_order(
            sources,
            **common,
            steps=steps,
            check=lambda order: self._require_text(order, minimum_samples, of_split=split != (0.0, 1.0)),
            reporter=self.reporter,
        )

    def _require_text(self, order: DataOrder, minimum_samples: int, *, of_split: bool) -> None:
        """Refuse a source without a whole sample, and sources that hold less than one batch together."""
        length = order.sequence_length
        where = self.recipe.where("data.split" if of_split else "data.train")
        more = "give it more text" + (", another `data.split`" if of_split else "") + " or a smaller"
        samples = 0
        for source in order.sources:
            if source.epoch_samples == 0:
                raise InputError(
                    f"source '{source.name}' holds {source.tokens or 'no'} tokens, and a sample takes {length + 1}",
                    where=where,
                    hint=f"{more} `data.sequence_length`",
                )
            samples += source.epoch_samples or minimum_samples
        if samples < minimum_samples:
            count = f"{samples} sample" + ("s" if samples > 1 else "")
            raise InputError(
                f"the sources hold {count} of {length + 1} tokens, fewer than one batch of {minimum_samples}: every "
                "step would see the same text more than once",
                where=where,
                hint=f"{more} `train.global_batch` or `data.sequence_length`",
            )


def _synthetic_source(recipe: Recipe) -> SyntheticSource:
    config = recipe.model.config
    if config is None:
        raise InputError(
            "synthetic data needs the model's vocabulary",
            where=recipe.where("model"),
            hint="write `preset` or `config` under `model`",
        )
    length = recipe.data.sequence_length or config.max_positions
    return SyntheticSource(vocab_size=config.vocab_size, sequence_length=length, seed=recipe.data.seed)


def _batch_schedule(recipe: Recipe) -> BatchSchedule:
    ramp = recipe.train.batch_ramp
    ramp_up = BatchRampUp(ramp.start, ramp.increment, ramp.samples) if ramp is not None else None
    return BatchSchedule(recipe.train.global_batch, ramp_up)
