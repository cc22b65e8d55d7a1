"""A foreign configuration read as a recipe: what was mapped, what was dropped and why, which mistakes it makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Mapped:
    """One setting of theirs and the key it became."""

    theirs: str
    """As written there, with its value: `model.micro_batch_size: 1`, `--lr 1e-5`."""
    ours: str
    """The key of the recipe or cluster file, with its value."""


@dataclass(frozen=True)
class Dropped:
    """One setting of theirs that has no place in a recipe."""

    theirs: str
    why: str


@dataclass(frozen=True)
class Mistake:
    """Something the file gets wrong, whatever reads it."""

    where: str
    what: str
    instead: str


@dataclass(frozen=True)
class Imported:
    """A foreign file as a recipe; `recipe` and `cluster` are plain mappings in the words of our files."""

    kind: str
    """megatron, nemo or torchtune"""
    recipe: dict[str, Any]
    cluster: dict[str, Any] = field(default_factory=dict)
    mapped: tuple[Mapped, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    mistakes: tuple[Mistake, ...] = ()
    open_questions: tuple[str, ...] = ()
    """What the file leaves open and a recipe must say; the recipe holds a line to be written out for each."""
