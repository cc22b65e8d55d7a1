"""What a test does where a part it needs is not on the machine, and where parts that a session shares are kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest


def missing_part(message: str) -> NoReturn:
    """Skip the test with this reason; in CI, where nothing may be missing, fail it."""
    if os.environ.get("TRAINSHED_REQUIRE_ALL") == "1":
        pytest.fail(message)
    pytest.skip(message)


def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all workers of a session share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
