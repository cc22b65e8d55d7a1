"""A real Slurm of four virtual nodes, started once for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.clusters.slurm_cluster import SlurmCluster, missing_parts, shared_cluster
from support.clusters.slurm_runs import SlurmRuns
from support.missing_parts import missing_part, session_folder


@pytest.fixture(scope="session")
def slurm_daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """`slurm-wlm munge` from apt, and root."""
    if missing := missing_parts():
        missing_part(f"no Slurm: {', '.join(missing)} missing (apt-get install slurm-wlm munge, as root)")
    with shared_cluster(session_folder(tmp_path_factory) / "slurm") as cluster:
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
