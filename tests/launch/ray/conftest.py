"""A real Ray cluster of three nodes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from support.clusters.ray_cluster import shared_cluster
from support.missing_parts import missing_part, session_folder


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if find_spec("ray") is None:
        missing_part("no Ray: pip install 'ray[default]'")
    with shared_cluster(session_folder(tmp_path_factory) / "ray") as found:
        yield found
