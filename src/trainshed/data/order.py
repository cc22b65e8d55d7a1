"""Exactly which tokens a step trains on, from (data section, seed, step, skip list) and nothing else.

Step n takes samples consumed(n) .. consumed(n + 1) of the run. Skips turn them into samples of the stream. The blend
gives each sample a source and a number within it. Text is cut into windows, which two keyed permutations (documents,
windows) find. Conversations are packed into rows, which one permutation finds (`sampling/packing.py`). Each part has a
closed form, so any step costs the same to reach, and a rank can read its own rows alone.

`DataOrder` is that function. `build_order` makes the source indexes that it needs, before any GPU is held.
`open_order` only opens them; `packed_order` does both for conversations. `run_orders` does so for a recipe.

Shapes: B samples of a step (the global batch, ramp-up included), R rows to read, L sequence_length.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainshed.data.sampling.blend import Blend, SourceBudget
from trainshed.data.sampling.index import IndexSpec, SourceIndex, build_index
from trainshed.data.sampling.packing import (
    PackedDataset,
    PackIndex,
    PackRule,
    PackSpec,
    build_pack_index,
    describe_packing,
)
from trainshed.data.sampling.rows import SampleRows
from trainshed.data.sampling.schedule import BatchRampUp, BatchSchedule, ScheduleStart, SkipList
from trainshed.data.sampling.sources import SampleSource, SyntheticSource, TokenDataset
from trainshed.data.tokens.token_source import RunTokens, TokenSource
from trainshed.errors import InputError, NotFound
from trainshed.recipe import Recipe
from trainshed.recipe.phase_spans import PhaseSpan, phase_spans
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
        if len({(source.keeps_documents_apart, source.has_learned) for source in self.sources}) > 1:
            raise InputError(
                "some sources are conversations and others are not", where="data.train", hint="train on one kind"
            )

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether rows say where documents begin."""
        return self.sources[0].keeps_documents_apart

    def consumed(self, step: int) -> int:
        """Return how many samples were taken before a step; steps count from 0."""
        return self.schedule.consumed(step)

    def batch_size(self, step: int) -> int:
        """Return how many samples a step takes."""
        return self.schedule.batch_size(step)

    def run_samples(self, step: int) -> int:
        """Return how many samples the run took before a step, of the data of all its phases."""
        start = self.schedule.start
        return start.run_samples + self.consumed(step) - start.sample

    def run_tokens(self, step: int) -> int:
        """Return how many tokens the run took before a step, of the data of all its phases."""
        start = self.schedule.start
        return start.run_tokens + (self.consumed(step) - start.sample) * self.sequence_length

    def source_numbers(self, step: int, start: int, stop: int) -> np.ndarray:
        """Return which source each of the rows [start, stop) of a step comes from: int64 [R]."""
        return self.blend.locate(self.sample_indices(step, start, stop))[0]

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

    def read(self, samples: np.ndarray) -> SampleRows:
        """Read samples of the stream; the arrays are read-only."""
        number, draw = self.blend.locate(samples)
        used = sorted(set(number.tolist()))
        if len(used) == 1:
            return self.sources[used[0]].read(draw).read_only()
        rows = SampleRows.empty(
            len(samples),
            self.sequence_length,
            document_starts=self.keeps_documents_apart,
            learned=self.sources[0].has_learned,
        )
        for source in used:
            places = np.flatnonzero(number == source)
            rows.put(places, self.sources[source].read(draw[places]))
        return rows.read_only()

    def rows(self, step: int, start: int, stop: int) -> SampleRows:
        """Read rows [start, stop) of a step's batch, and nothing else."""
        return self.read(self.sample_indices(step, start, stop))

    def document_starts(self, step: int, start: int, stop: int) -> np.ndarray | None:
        """Return the `document_starts` of rows [start, stop) of a step, from the indexes alone: int32 [R, L + 1].

        None if documents are not kept apart.
        """
        if not self.keeps_documents_apart:
            return None
        number, draw = self.blend.locate(self.sample_indices(step, start, stop))
        starts = np.empty((stop - start, self.sequence_length + 1), np.int32)
        for source in sorted(set(number.tolist())):
            places = np.flatnonzero(number == source)
            starts[places] = self.sources[source].document_starts(draw[places])
        return starts

    def batch(self, step: int) -> SampleRows:
        """Read a step's whole batch: B rows."""
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


def hash_batch(rows: SampleRows) -> str:
    """Return 16 hex digits of the rows of a whole batch."""
    return format_batch_hash(*hash_batch_rows(rows, 0))


def hash_batch_rows(rows: SampleRows, first_row: int) -> tuple[int, int]:
    """Return two sums of the rows' hashes. `format_batch_hash` takes the sums over all rows of a batch.

    A row's hash is BLAKE2b over its number in the batch and its tokens as little-endian int32, followed by its
    `document_starts` as the same and by its `learned` as bytes, where it has them. It is cut into two 32-bit numbers:
    their sums stay exact in float64, so ranks can add them with their other figures.
    """
    tokens = np.ascontiguousarray(rows.tokens, "<i4")
    starts = None if rows.document_starts is None else np.ascontiguousarray(rows.document_starts, "<i4")
    learned = None if rows.learned is None else np.ascontiguousarray(rows.learned, np.uint8)
    low = high = 0
    for row in range(len(rows)):
        digest = hashlib.blake2b(tokens[row].data, digest_size=8, salt=(first_row + row).to_bytes(8, "little"))
        for more in (starts, learned):
            if more is not None:
                digest.update(more[row].data)
        value = digest.digest()
        low += int.from_bytes(value[:4], "little")
        high += int.from_bytes(value[4:], "little")
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
    document_mask: bool = False,
    options: StoreOptions | None = None,
    check: Callable[[DataOrder], None] = lambda _: None,
    reporter: Reporter = SILENT,
) -> DataOrder:
    """Open the order; first make what `steps` steps need and `indexes/<key>/` lacks.

    With `document_mask` rows say where documents begin. `check` gets an order that knows how much each source holds,
    before any epoch is made. It raises to refuse it.
    """
    listed = _list_shards(sources, seed, split, options)

    def order_of(epochs: list[int]) -> DataOrder:
        datasets: list[TokenDataset] = []
        for (source, spec, shards), count in zip(listed, epochs, strict=True):
            index = build_index(
                indexes / spec.key,
                spec,
                shards,
                epochs=count,
                documents=document_mask,
                options=options,
                reporter=reporter,
            )
            datasets.append(
                TokenDataset(
                    source,
                    index,
                    sequence_length,
                    keeps_documents_apart=document_mask,
                    shards=shards,
                    options=options,
                )
            )
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
    document_mask: bool = False,
    options: StoreOptions | None = None,
) -> DataOrder:
    """Open an order whose indexes exist; nothing is built."""
    datasets: list[TokenDataset] = []
    for source, spec, shards in _list_shards(sources, seed, split, options):
        try:
            index = SourceIndex(indexes / spec.key)
        except NotFound:
            raise _no_index(source, indexes / spec.key) from None
        datasets.append(
            TokenDataset(
                source, index, sequence_length, keeps_documents_apart=document_mask, shards=shards, options=options
            )
        )
    return DataOrder(datasets, schedule, skip=skip)


def _no_index(source: TokenSource, folder: Path) -> NotFound:
    return NotFound(f"source '{source.name}' has no index", where=str(folder), hint="run `trainshed run RECIPE` first")


def _list_shards(
    sources: Sequence[TokenSource], seed: int, split: tuple[float, float], options: StoreOptions | None
) -> list[tuple[TokenSource, IndexSpec, list[str]]]:
    """Return each source with the spec of its index, and its shards."""
    return [(source, IndexSpec.of(source, seed, split, options), source.shards(options)) for source in sources]


def packed_order(
    sources: Sequence[TokenSource],
    *,
    indexes: Path,
    seed: int,
    sequence_length: int,
    rule: PackRule,
    schedule: BatchSchedule,
    build: bool,
    split: tuple[float, float] = (0.0, 1.0),
    skip: SkipList | None = None,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> DataOrder:
    """Open the order of prepared conversations. With `build`, missing pack indexes are made."""
    datasets: list[PackedDataset] = []
    for source in sources:
        spec = PackSpec.of(source, seed, sequence_length, rule, split, options)
        folder, shards = indexes / spec.key, source.shards(options)
        if build:
            index = build_pack_index(folder, spec, shards, options=options, reporter=reporter)
        else:
            index = open_pack_index(source, folder)
        datasets.append(PackedDataset(source, index, shards=shards, options=options))
    return DataOrder(datasets, schedule, skip=skip)


def open_pack_index(source: TokenSource, folder: Path) -> PackIndex:
    """Open the pack index of a source; a missing one is an error that names the source."""
    try:
        return PackIndex(folder)
    except NotFound:
        raise _no_index(source, folder) from None


@dataclass(frozen=True)
class PhaseOrders:
    """The samples of one phase of a run."""

    span: PhaseSpan
    train: DataOrder
    validations: Mapping[str, DataOrder]


@dataclass(frozen=True)
class RunOrders:
    """The length of a run in steps, and the samples of its training and its validation sets: of its first phase."""

    steps: int
    train: DataOrder
    validations: Mapping[str, DataOrder]
    phases: tuple[PhaseOrders, ...] = ()


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
    parts = _OrderParts(indexes, build, options, reporter)
    if not (spans := phase_spans(recipe)):
        return _orders_of(recipe, data, _batch_schedule(recipe), parts)
    phases: list[PhaseOrders] = []
    for span in spans:
        start = ScheduleStart(span.start, span.first_sample, span.run_samples, span.run_tokens)
        schedule = BatchSchedule(span.recipe.train.global_batch, start=start)
        orders = _orders_of(span.recipe, data.of_phase(span.number, own=span.own_sources), schedule, parts, span.end)
        phases.append(PhaseOrders(span, orders.train, orders.validations))
    return RunOrders(spans[-1].end, phases[0].train, phases[0].validations, tuple(phases))


@dataclass(frozen=True)
class _OrderParts:
    """What every order of a run is made with."""

    indexes: Path
    build: bool
    options: StoreOptions | None
    reporter: Reporter


def _orders_of(
    recipe: Recipe, data: RunTokens, schedule: BatchSchedule, parts: _OrderParts, end: int | None = None
) -> RunOrders:
    """Put the orders of a recipe without phases together; `end` is the last step of a phase in its run."""
    section, train, indexes, options = recipe.data, recipe.train, parts.indexes, parts.options

    def steps_to_end() -> int:
        return run_steps(recipe, data, indexes, options) if end is None else end

    if section.synthetic:
        return RunOrders(steps_to_end(), DataOrder([_synthetic_source(recipe)], schedule), {})
    share = section.split.train if section.split else 1.0
    builder = _OrderBuilder(recipe, indexes, parts.build, options, parts.reporter)
    if pack_rule(recipe) is None:
        steps = steps_to_end()
        order = builder.windows(
            data.sources, (0.0, share), schedule, steps, SkipList(section.skip), minimum_samples=train.global_batch
        )
    else:
        order = builder.packed(
            data.sources, (0.0, share), schedule, SkipList(section.skip), minimum_samples=train.global_batch
        )
        steps = steps_to_end()
    too_short = list(recipe.warmup_problems(steps))
    if too_short:
        raise recipe_error(too_short, recipe.places)
    validations: dict[str, DataOrder] = {}
    for name, one_set in section.validations.items():
        own = data.validations.get(name)
        if own is not None:
            validation_sources, split = (own,), (0.0, 1.0)
        else:
            assert section.split is not None, "the schema asks for a split or a source"
            validation_sources, split = data.sources, (share, min(1.0, share + section.split.validation))
        renamed = [replace(source, name=f"{source.name} ({name})") for source in validation_sources]
        validation_schedule = BatchSchedule(train.global_batch)
        if pack_rule(recipe) is None:
            validations[name] = builder.windows(renamed, split, validation_schedule, one_set.batches, SkipList())
        else:
            validations[name] = builder.packed(renamed, split, validation_schedule, SkipList())
    return RunOrders(steps, order, validations)


def pack_rule(recipe: Recipe) -> PackRule | None:
    """Return how conversations become rows; None for text, which is cut into windows."""
    if recipe.sample_format == "text":
        return None
    return PackRule(packed=recipe.data.answers.packing, pairs=recipe.sample_format == "preference")


def run_steps(recipe: Recipe, data: RunTokens, indexes: Path, options: StoreOptions | None = None) -> int:
    """Return the length of a run in steps, in whichever way its recipe says it; no token file is opened.

    How many rows conversations make is read from their pack indexes, which must exist.
    """
    train = recipe.train
    if train.steps is not None:
        return train.steps
    if spans := phase_spans(recipe):
        return spans[-1].end
    length = _synthetic_source(recipe).sequence_length if recipe.data.synthetic else recipe.data.sequence_length
    assert length is not None, "the schema asks for it wherever data is not synthetic"
    tokens = train.tokens
    if tokens is None:
        share = recipe.data.split.train if recipe.data.split else 1.0
        rule = pack_rule(recipe)
        if rule is None:
            epoch_tokens = int(sum(source.tokens for source in data.sources) * share)
        else:
            split = _clipped((0.0, share))
            specs = [PackSpec.of(source, recipe.data.seed, length, rule, split, options) for source in data.sources]
            epoch_tokens = length * sum(
                open_pack_index(source, indexes / spec.key).rows
                for source, spec in zip(data.sources, specs, strict=True)
            )
        tokens = int((train.epochs or 0) * epoch_tokens)
    return _batch_schedule(recipe).steps_for(-(-tokens // length))


def _clipped(split: tuple[float, float]) -> tuple[float, float]:
    """Fractions are typed by hand and may sum to a little more than 1."""
    return split[0], min(split[1], 1.0)


@dataclass(frozen=True)
class _OrderBuilder:
    recipe: Recipe
    indexes: Path
    build: bool
    options: StoreOptions | None
    reporter: Reporter

    def windows(
        self,
        sources: Sequence[TokenSource],
        split: tuple[float, float],
        schedule: BatchSchedule,
        steps: int,
        skip: SkipList,
        *,
        minimum_samples: int = 1,
    ) -> DataOrder:
        """The order of text, which is cut into windows."""
        common = self._common(split, schedule, skip) | {"document_mask": self.recipe.document_mask}
        if not self.build:
            return open_order(sources, **common)
        return build_order(
            sources,
            **common,
            steps=steps,
            check=lambda order: self._require_text(order, minimum_samples, of_split=split != (0.0, 1.0)),
            reporter=self.reporter,
        )

    def packed(
        self,
        sources: Sequence[TokenSource],
        split: tuple[float, float],
        schedule: BatchSchedule,
        skip: SkipList,
        *,
        minimum_samples: int = 1,
    ) -> DataOrder:
        """The order of conversations, which are packed into rows."""
        rule = pack_rule(self.recipe)
        assert rule is not None, "text is not packed"
        order = packed_order(
            sources, **self._common(split, schedule, skip), rule=rule, build=self.build, reporter=self.reporter
        )
        if self.build:
            self._require_text(order, minimum_samples, of_split=split != (0.0, 1.0))
            for source in order.sources:
                assert isinstance(source, PackedDataset)
                self.reporter.note(describe_packing(source))
        return order

    def _common(self, split: tuple[float, float], schedule: BatchSchedule, skip: SkipList) -> dict[str, Any]:
        return {
            "indexes": self.indexes,
            "seed": self.recipe.data.seed,
            "sequence_length": self.recipe.data.sequence_length or 0,
            "schedule": schedule,
            "split": _clipped(split),
            "skip": skip,
            "options": self.options,
        }

    def _require_text(self, order: DataOrder, minimum_samples: int, *, of_split: bool) -> None:
        """Refuse a source without a whole sample, and sources that hold less than one batch together."""
        length = order.sequence_length
        where = self.recipe.where("data.split" if of_split else "data.train")
        more = "give it more text" + (", another `data.split`" if of_split else "") + " or a smaller"
        samples = 0
        for source in order.sources:
            if source.epoch_samples == 0 and source.has_learned:
                raise InputError(
                    f"source '{source.name}' holds no conversations",
                    where=where,
                    hint="give it some" + (", or another `data.split`" if of_split else ", or leave it out"),
                )
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
    return SyntheticSource(
        vocab_size=config.vocab_size,
        sequence_length=length,
        seed=recipe.data.seed,
        keeps_documents_apart=recipe.document_mask,
    )


def _batch_schedule(recipe: Recipe) -> BatchSchedule:
    ramp = recipe.train.batch_ramp
    ramp_up = BatchRampUp(ramp.start, ramp.increment, ramp.samples) if ramp is not None else None
    return BatchSchedule(recipe.train.global_batch, ramp_up)
