"""From token files to a run's order: indexes are built before GPUs are held, and then only opened."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainshed.data.index import IndexSpec, SourceIndex, build_index, content_of
from trainshed.data.indexed import shard_prefixes
from trainshed.data.order import DataOrder
from trainshed.data.schedule import BatchSchedule, SkipList
from trainshed.data.source import TokenSource
from trainshed.errors import NotFound
from trainshed.reporting import SILENT, Reporter


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
    reporter: Reporter = SILENT,
) -> DataOrder:
    """Open the order, first making what `steps` steps need and `indexes/<key>/` does not hold yet."""

    def bare(folder: Path, spec: IndexSpec, shards: list[str]) -> SourceIndex:
        return build_index(folder, spec, shards, epochs=0, reporter=reporter)

    order = _order(files, indexes, seed, sequence_length, schedule, skip, bare)
    # How many epochs a source needs follows from the blend, which may need to know how large the sources are.
    budgets = zip(order.sources, order.budget(steps), strict=True)
    epochs = {source.label: math.ceil(budget.epochs or 0) for source, budget in budgets}

    def full(folder: Path, spec: IndexSpec, shards: list[str]) -> SourceIndex:
        return build_index(folder, spec, shards, epochs=epochs[spec.label], reporter=reporter)

    return _order(files, indexes, seed, sequence_length, schedule, skip, full)


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

    def existing(folder: Path, spec: IndexSpec, shards: list[str]) -> SourceIndex:
        try:
            return SourceIndex(folder)
        except NotFound:
            raise NotFound(
                f"source '{spec.label}' has no index",
                where=str(folder),
                hint="run `trainshed data prepare` first",
            ) from None

    return _order(files, indexes, seed, sequence_length, schedule, skip, existing)


def _order(
    files: Sequence[TokenFiles],
    indexes: Path,
    seed: int,
    sequence_length: int,
    schedule: BatchSchedule,
    skip: SkipList | None,
    opened: Callable[[Path, IndexSpec, list[str]], SourceIndex],
) -> DataOrder:
    sources: list[TokenSource] = []
    for source in files:
        shards = [shard for prefix in source.prefixes for shard in shard_prefixes(prefix)]
        spec = IndexSpec(source.content or content_of(shards), source.label, seed, source.split)
        sources.append(TokenSource(opened(indexes / spec.key, spec, shards), shards, sequence_length, source.name))
    return DataOrder(sources, schedule, weights=[source.weight for source in files], skip=skip)
