"""Worlds of ranks for the proofs of the engine, from one warm process per test session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.runs.lora_runs import AdaptedRuns
from support.runs.rank_pool import RankPool
from support.runs.small_runs import SmallRuns


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def small_runs(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> SmallRuns:
    return SmallRuns(rank_pool, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def adapted_runs(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> AdaptedRuns:
    return AdaptedRuns(rank_pool, tmp_path_factory.mktemp("adapted"))
