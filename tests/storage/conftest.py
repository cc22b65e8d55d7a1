from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hub_server import HubServer, running

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


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """One megabyte of tmpfs."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("only root may mount a tmpfs; the file size limit is tested instead")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
