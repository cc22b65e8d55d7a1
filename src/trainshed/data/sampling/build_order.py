"""From token files to a run's order: indexes are built before GPUs are held, and then only opened."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainshed.data.order import DataOrder
from trainshed.data.sampling.index import IndexSpec, SourceIndex, build_index, content_of
from trainshed.data.sampling.schedule import BatchSchedule, SkipList
from trainshed.data.sampling.token_source import TokenSource
from trainshed.data.tokens.indexed import shard_prefixes
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
    accept: Callable[[DataOrder], None] = lambda _: None,
    reporter: Reporter = SILENT,
) -> DataOrder:
    """Open the order, first making what `steps` steps need and `indexes/<key>/` does not hold yet.

    `accept` sees how much each source holds before any epoch is made, and refuses it by raising.
    """

    specs = _specs(files, seed)

    def opened(epochs: list[int]) -> DataOrder:
        made = [
            build_index(indexes / spec.key, spec, shards, epochs=count, reporter=reporter)
            for (spec, shards), count in zip(specs, epochs, strict=True)
        ]
        return _order(files, specs, made, sequence_length, schedule, skip)

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

    specs = _specs(files, seed)
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
    return _order(files, specs, found, sequence_length, schedule, skip)


def _specs(files: Sequence[TokenFiles], seed: int) -> list[tuple[IndexSpec, list[str]]]:
    """What each source's index is a function of, and its token files."""
    specs: list[tuple[IndexSpec, list[str]]] = []
    for source in files:
        shards = [shard for prefix in source.prefixes for shard in shard_prefixes(prefix)]
        specs.append((IndexSpec(source.content or content_of(shards), source.label, seed, source.split), shards))
    return specs


def _order(
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
