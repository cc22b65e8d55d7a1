"""Pods of what was submitted, run as processes on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.clusters.pod_cluster import make_service_account, running_pods
from support.clusters.pod_runner import PodRunner


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for the server, in the place where pods find it, with a token and a namespace."""
    return make_service_account(tmp_path_factory.mktemp("account"))


@pytest.fixture
def runner(authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PodRunner]:
    """An API server over TLS whose pods really run."""
    with running_pods(authority, tmp_path) as pods:
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        yield pods
