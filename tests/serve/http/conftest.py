"""A served model of letters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.models.served_letters import Served, serve_letters


@pytest.fixture(scope="session")
def letters_server() -> Iterator[Served]:
    """One server for all tests that do not end it."""
    with serve_letters() as found:
        yield found


@pytest.fixture
def served(letters_server: Served) -> Served:
    """The model of letters, never asked before."""
    letters_server.begin_anew()
    return letters_server
