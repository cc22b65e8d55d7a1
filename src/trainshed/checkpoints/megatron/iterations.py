"""The folders of a Megatron checkpoint: a pointer file at its root names the latest iteration.

    latest_checkpointed_iteration.txt    `release`, or the number of an iteration
    release/ or iter_0000100/            the files of one iteration

No torch here: formats are detected without it.
"""

from __future__ import annotations

from pathlib import Path

from trainshed.errors import CorruptData, NotFound
from trainshed.storage import Store

LATEST_ITERATION = "latest_checkpointed_iteration.txt"
RELEASE = "release"


def read_latest_iteration(root: Store) -> str | None:
    """Return the name of the folder of the latest iteration, None where there is no pointer."""
    if root.head(LATEST_ITERATION) is None:
        return None
    return _folder_name(root.read(LATEST_ITERATION).decode("utf-8", "replace").strip())


def iteration_folder(folder: Path) -> Path:
    """Return the folder of one iteration; `folder` is that folder, or the root of a checkpoint."""
    pointer = folder / LATEST_ITERATION
    if not pointer.is_file():
        return folder
    iteration = pointer.read_text().strip()
    if iteration != RELEASE and not iteration.isdecimal():
        raise CorruptData(
            f"names `{iteration}`, which is not an iteration", where=str(pointer), hint="name one of its folders"
        )
    latest = folder / _folder_name(iteration)
    if not latest.is_dir():
        raise NotFound(
            f"there is no {latest.name}", where=str(folder), hint=f"{LATEST_ITERATION} names it: fetch it too"
        )
    return latest


def is_iteration_name(name: str) -> bool:
    """Whether a folder's name is that of an iteration."""
    return name == RELEASE or name.startswith("iter_")


def _folder_name(iteration: str) -> str:
    return f"iter_{int(iteration):07d}" if iteration.isdecimal() else iteration
