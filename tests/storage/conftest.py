from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.servers.hub_server import HubServer, running
from trainshed.storage import Retry, StoreOptions


@pytest.fixture
def hub(no_cloud: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with running() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def impatient() -> StoreOptions:
    """Back-off in milliseconds, so that no test waits."""
    return StoreOptions(retry=Retry(attempts=4, first_seconds=0.001, max_seconds=0.002))
