"""Exactly which tokens a step trains on, from (data section, seed, step, skip list) and nothing else.

Step n takes samples consumed(n) .. consumed(n + 1) of the run. Skips turn them into samples of the stream. The blend
gives each a source and a number within it. The source's two keyed permutations (documents, windows) give the tokens.
Each part has a closed form, so any step costs the same to reach, and a rank may ask for its rows only.

`DataOrder` is that function. `build_order` makes the source indexes it needs before GPUs are held, `open_order` only
opens them, and `run_orders` does either one for a recipe.

Shapes: B samples of a step (the global batch, ramp-up included), R rows asked for, L sequence_length.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from trainshed.data.sampling.blend import Blend, SourceBudget
from trainshed.data.sampling.index import IndexSpec, SourceIndex, build_index, token_content_hash
from trainshed.data.sampling.schedule import BatchRampUp, BatchSchedule, SkipList
from trainshed.data.sampling.sources import SampleSource, SyntheticSource, TokenSource
from trainshed.data.tokens.prepared_data import PreparedData, PreparedSource
from trainshed.data.tokens.token_files import shard_prefixes
from trainshed.errors import InputError, NotFound
from trainshed.recipe import Recipe
from trainshed.recipe.validation import recipe_error
from trainshed.reporting import SILENT, Reporter


@dataclass(frozen=True)
class SampleLocation:
    """Where samples lie; every array is int64 [R]."""

    source: np.ndarray
    epoch: np.ndarray
    window: np.ndarray


class DataOrder:
    """The order of a run's samples."""

    def __init__(
        self,
        sources: Sequence[SampleSource],
        schedule: BatchSchedule,
        *,
        weights: Sequence[float | int | None] | None = None,
        skip: SkipList | None = None,
    ) -> None:
        self.sources = list(sources)
        self.schedule = schedule
        self.skip = skip or SkipList()
        self.blend = Blend(
            [source.name for source in self.sources], weights, [source.tokens for source in self.sources]
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
        return self.skip.stream(np.arange(before + start, before + stop, dtype=np.int64))

    def locate(self, samples: np.ndarray) -> SampleLocation:
        """Map samples of the stream to source, epoch and window."""
        number, draw = self.blend.locate(samples)
        epoch, window = np.empty_like(draw), np.empty_like(draw)
        for source in sorted(set(number.tolist())):
            chosen = number == source
            epoch[chosen], window[chosen] = self.sources[source].place(draw[chosen])
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
        """Return what each source gives to the first `steps` steps; `samples` leaves out the skipped."""
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
            # Skipped samples are passed by, so they count for how far into the source the run gets.
            epochs = None if source.epoch_samples is None else through / max(1, source.epoch_samples)
            tokens = samples * self.sequence_length
            budgets.append(SourceBudget(source.name, weight, samples, tokens, epochs))
        return budgets


def hash_batch(tokens: np.ndarray) -> str:
    """Return 16 hex digits of a whole batch of tokens [B, L + 1]."""
    return format_batch_hash(*hash_batch_rows(tokens, 0))


def hash_batch_rows(tokens: np.ndarray, first_row: int) -> tuple[int, int]:
    """Return two sums of the rows' hashes. `format_batch_hash` takes the sums over all rows of a batch.

    Each row's hash is BLAKE2b over its number in the batch and its tokens as little-endian int32, cut into two
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


@dataclass(frozen=True)
class TokenFiles:
    """One source of a recipe: prefixes (each may stand for its shards) that are read as one.

    `name` is for reports. `label` is part of the shuffle's key: a path must not be in it, or the order would
    change when the files move. `content` identifies the tokens; left out, it is computed.
    """

    label: str
    prefixes: tuple[str, ...]
    weight: float | int | None = None
    split: tuple[float, float] = (0.0, 1.0)
    content: str | None = None
    name: str | None = None


def build_order(
    files: Sequence[TokenFiles],
    *,
    indexes: Path,
    seed: int,
    sequence_length: int,
    schedule: BatchSchedule,
    steps: int,
    skip: SkipList | None = None,
    accept: Callable[[DataOrder], None] = lambda _: None,
    reporter: Reporter = SILENT,
) -> DataOrder:
    """Open the order, first making what `steps` steps need and `indexes/<key>/` does not hold yet.

    `accept` sees how much each source holds before any epoch is made, and refuses it by raising.
    """

    specs = _index_specs(files, seed)

    def opened(epochs: list[int]) -> DataOrder:
        made = [
            build_index(indexes / spec.key, spec, shards, epochs=count, reporter=reporter)
            for (spec, shards), count in zip(specs, epochs, strict=True)
        ]
        return _assemble_order(files, specs, made, sequence_length, schedule, skip)

    # How many epochs a source needs follows from the blend, which may need to know how large the sources are.
    sized = opened([0] * len(files))
    accept(sized)
    budgets = sized.budget(steps)
    return opened([math.ceil(budget.epochs or 0) for budget in budgets])


def open_order(
    files: Sequence[TokenFiles],
    *,
    indexes: Path,
    seed: int,
    sequence_length: int,
    schedule: BatchSchedule,
    skip: SkipList | None = None,
) -> DataOrder:
    """Open an order whose indexes exist; nothing is built."""

    specs = _index_specs(files, seed)
    found: list[SourceIndex] = []
    for (spec, _), source in zip(specs, files, strict=True):
        try:
            found.append(SourceIndex(indexes / spec.key))
        except NotFound:
            raise NotFound(
                f"source '{source.name or source.label}' has no index",
                where=str(indexes / spec.key),
                hint="run `trainshed run RECIPE` first",
            ) from None
    return _assemble_order(files, specs, found, sequence_length, schedule, skip)


def _index_specs(files: Sequence[TokenFiles], seed: int) -> list[tuple[IndexSpec, list[str]]]:
    """What each source's index is a function of, and its token files."""
    specs: list[tuple[IndexSpec, list[str]]] = []
    for source in files:
        shards = [shard for prefix in source.prefixes for shard in shard_prefixes(prefix)]
        specs.append(
            (IndexSpec(source.content or token_content_hash(shards), source.label, seed, source.split), shards)
        )
    return specs


def _assemble_order(
    files: Sequence[TokenFiles],
    specs: Sequence[tuple[IndexSpec, list[str]]],
    indexes: Sequence[SourceIndex],
    sequence_length: int,
    schedule: BatchSchedule,
    skip: SkipList | None,
) -> DataOrder:
    sources = [
        TokenSource(index, shards, sequence_length, source.name)
        for source, (_, shards), index in zip(files, specs, indexes, strict=True)
    ]
    return DataOrder(sources, schedule, weights=[source.weight for source in files], skip=skip)


@dataclass(frozen=True)
class RunOrders:
    """The length of a run in steps, and what it sees."""

    steps: int
    train: DataOrder
    validation: DataOrder | None


def run_orders(
    recipe: Recipe, data: PreparedData, indexes: Path, *, build: bool, reporter: Reporter = SILENT
) -> RunOrders:
    """Put a run's orders together; `build` makes missing indexes, else they are an error."""
    section, train = recipe.data, recipe.train
    ramp = train.batch_ramp
    schedule = BatchSchedule(
        train.global_batch, BatchRampUp(ramp.start, ramp.increment, ramp.samples) if ramp is not None else None
    )
    if section.synthetic:
        order = DataOrder([_synthetic_source(recipe)], schedule)
        return RunOrders(_run_steps(recipe, schedule, order.sequence_length, 0), order, None)
    length = section.sequence_length
    assert length is not None, "the schema asks for it wherever data is not synthetic"
    share = section.split.train if section.split else 1.0
    steps = _run_steps(recipe, schedule, length, int(sum(source.tokens for source in data.sources) * share))
    making = _OrderBuilder(recipe, indexes, build, reporter)
    order = making.order(data.sources, (0.0, share), schedule, steps, SkipList(section.skip), least=train.global_batch)
    too_short = list(recipe.warmup_problems(steps))
    if too_short:
        raise recipe_error(too_short, recipe.places)
    validation = None
    if section.validation is not None:
        measured, part = data.sources, (share, 1.0)
        if data.validation is not None:
            measured, part = (data.validation,), (0.0, 1.0)
        else:
            assert section.split is not None, "the schema asks for a split or a source"
            part = (share, min(1.0, share + section.split.validation))
        measured = [replace(source, name=f"{source.name} (validation)") for source in measured]
        batches = section.validation.batches
        validation = making.order(measured, part, BatchSchedule(train.global_batch), batches, SkipList())
    return RunOrders(steps, order, validation)


@dataclass(frozen=True)
class _OrderBuilder:
    recipe: Recipe
    indexes: Path
    build: bool
    reporter: Reporter

    def order(
        self,
        sources: Sequence[PreparedSource],
        share: tuple[float, float],
        schedule: BatchSchedule,
        steps: int,
        skip: SkipList,
        *,
        least: int = 1,
    ) -> DataOrder:
        files = [
            TokenFiles(
                source.label,
                source.prefixes,
                source.weight,
                (share[0], min(share[1], 1.0)),
                content=source.content,
                name=source.name,
            )
            for source in sources
        ]
        length, seed = self.recipe.data.sequence_length or 0, self.recipe.data.seed
        if not self.build:
            return open_order(
                files, indexes=self.indexes, seed=seed, sequence_length=length, schedule=schedule, skip=skip
            )
        return build_order(
            files,
            indexes=self.indexes,
            seed=seed,
            sequence_length=length,
            schedule=schedule,
            steps=steps,
            skip=skip,
            accept=lambda order: self._require_text(order, least, of_split=share != (0.0, 1.0)),
            reporter=self.reporter,
        )

    def _require_text(self, order: DataOrder, least: int, *, of_split: bool) -> None:
        """Refuse sources without a whole sample, or with less than one batch together: steps would fail or repeat."""
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
            samples += source.epoch_samples or least
        if samples < least:
            count = f"{samples} sample" + ("s" if samples > 1 else "")
            raise InputError(
                f"the sources hold {count} of {length + 1} tokens, fewer than one batch of {least}: every step would "
                "see the same text more than once",
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


def _run_steps(recipe: Recipe, schedule: BatchSchedule, sequence_length: int, epoch_tokens: int) -> int:
    """The length of the run in steps, whichever way the recipe says it."""
    train = recipe.train
    if train.steps is not None:
        return train.steps
    tokens = train.tokens if train.tokens is not None else int((train.epochs or 0) * epoch_tokens)
    return schedule.steps_for(-(-tokens // sequence_length))
