"""Where shipped recipes, cluster files, measurements and tested versions are: in the wheel, or beside `src/`."""

from __future__ import annotations

from pathlib import Path


def shipped_folder(kind: str) -> Path:
    """Return the folder of shipped files of a kind: `recipes`, `clusters` or `measurements`."""
    in_wheel = Path(__file__).parent / "shipped" / kind
    return in_wheel if in_wheel.is_dir() else Path(__file__).parents[2] / kind


def shipped_file(name: str) -> Path:
    """Return a shipped file: `constraints.txt`."""
    in_wheel = Path(__file__).parent / "shipped" / name
    return in_wheel if in_wheel.is_file() else Path(__file__).parents[2] / name
