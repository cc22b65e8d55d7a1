"""A real Slurm of four virtual nodes, started once for the whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.clusters.slurm_cluster import SlurmCluster, missing_parts, shared_cluster
from support.clusters.slurm_runs import SlurmRuns


@pytest.fixture(scope="session")
def slurm_daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """`slurm-wlm munge` from apt, and root."""
    if missing := missing_parts():
        message = f"no Slurm: {', '.join(missing)} missing (apt-get install slurm-wlm munge, as root)"
        if os.environ.get("TRAINSHED_REQUIRE_ALL") == "1":
            pytest.fail(message)
        pytest.skip(message)
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with shared_cluster(shared / "slurm") as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_daemons: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """The cluster, reachable by Slurm's own programs."""
    monkeypatch.setenv("SLURM_CONF", slurm_daemons.conf)
    return slurm_daemons


@pytest.fixture
def slurm_runs(slurm: SlurmCluster, tmp_path: Path) -> Iterator[SlurmRuns]:
    """Small recipes for it; what is left of them at the end is cancelled."""
    runs = SlurmRuns(slurm, tmp_path)
    yield runs
    runs.end()
