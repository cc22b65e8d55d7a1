"""The state of a stage, as every target reports it.

The driver in a pod uses it too (`kubernetes/driver_program.py`), so this file needs the standard library of Python 3.8
only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StageStateName = Literal["waiting", "running", "serving", "done", "failed", "cancelled", "unknown"]
"""serving: a server answers; it runs until somebody ends it."""


@dataclass(frozen=True)
class StageState:
    """The state of a stage, with one sentence that says why."""

    stage: str
    state: StageStateName
    reason: str
    """Why it waits or failed, in a sentence; empty if there is nothing to say."""
    id: str = ""
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    exit_code: int | None = None
