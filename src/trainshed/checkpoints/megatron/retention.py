"""Old checkpoints of Megatron-LM, which deletes none itself: which are complete, and which may go.

Also a job file: training in Megatron's image runs it on the first node, so it needs the standard library of Python 3.8
and nothing of Trainshed. It looks every half minute, and once more after training:

    python3 keep_checkpoints.py CHECKPOINTS KEEP LOGS_OF_THIS_ATTEMPT [--once]

Megatron writes an iteration's files first and `latest_checkpointed_iteration.txt` last. So the iteration that it names
and those before it are whole, and one after it may be in the middle of its save. Neither the newest nor what comes
after it is ever touched. Before it, all complete ones but the newest `keep` go, and so do the remains of interrupted
saves and removals. A removal takes the files first that make a folder loadable. If it is killed, what is left is not a
checkpoint, and goes with the next removal. A process whose attempt was overtaken by a later one removes nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Callable  # noqa: UP035 (of Python 3.8)

LATEST_ITERATION = "latest_checkpointed_iteration.txt"
LOOK_SECONDS = 30.0
_ITERATION = re.compile(r"iter_(\d{7,})")
# `.metadata` is the table of torch.distributed.checkpoint, `metadata.json` names the format, `common.pt` has the rest.
_COMMIT_FILES = (".metadata", "metadata.json", "common.pt")
_LEGACY_FILES = "mp_rank_*/model_optim_rng.pt"


def latest_iteration(folder: Path) -> int | None:
    """Return the iteration that Megatron would go on from, None where there is none."""
    try:
        text = (folder / LATEST_ITERATION).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def iteration_folders(folder: Path) -> dict[int, Path]:
    """Return the folders of all iterations, complete or not."""
    if not folder.is_dir():
        return {}
    named = ((_ITERATION.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in named if match and path.is_dir()}


def is_complete(path: Path) -> bool:
    """Say whether a folder has what makes it loadable, as `torch_dist` or in the older format."""
    if (path / ".metadata").is_file():
        return any((path / name).is_file() for name in _COMMIT_FILES[1:])
    return next(path.glob(_LEGACY_FILES), None) is not None


def removable_iterations(folder: Path, keep: int | None) -> list[int]:
    """Return the iterations that may go where `keep` are kept, oldest first; None keeps all that are complete."""
    folders, latest = iteration_folders(folder), latest_iteration(folder)
    if latest is None or latest not in folders or not is_complete(folders[latest]):
        return []  # it is not known what Megatron would go on from
    older = sorted((iteration for iteration in folders if iteration < latest), reverse=True)
    complete = [iteration for iteration in older if is_complete(folders[iteration])]
    kept = set(complete if keep is None else complete[: keep - 1])
    return sorted(set(older) - kept)


def remove_iteration(path: Path) -> None:
    """Remove the folder of an iteration, first what makes it loadable."""
    for file in [path / name for name in _COMMIT_FILES] + list(path.glob(_LEGACY_FILES)):
        with contextlib.suppress(FileNotFoundError):
            file.unlink()
    shutil.rmtree(str(path), ignore_errors=True)


def remove_old(folder: Path, keep: int | None, may_remove: Callable[[], bool]) -> list[int]:
    """Remove what `removable_iterations` says; `may_remove` is asked before each. Returns what was removed."""
    removed = []
    for iteration in removable_iterations(folder, keep):
        if not may_remove():
            break
        remove_iteration(iteration_folders(folder)[iteration])
        removed.append(iteration)
    return removed


def is_newest_attempt(logs: Path) -> bool:
    """Say whether no later attempt of the run has begun; `logs` is this attempt's folder among theirs."""
    kind, _, own = logs.name.rpartition("-")
    others = (path.name.rpartition("-") for path in logs.parent.iterdir())
    return all(int(number) <= int(own) for other, _, number in others if other == kind and number.isdecimal())


def main(arguments: list[str]) -> None:
    """Keep the newest checkpoints of a run while it trains."""
    folder, keep, logs = Path(arguments[0]), int(arguments[1]), Path(arguments[2])
    once, parent = "--once" in arguments, os.getppid()
    while True:
        try:
            for iteration in remove_old(folder, keep, lambda: is_newest_attempt(logs)):
                sys.stdout.write(f"trainshed: removed the checkpoint of step {iteration}, {keep} are kept\n")
        except OSError as error:  # of a shared disk: the next look may find it well
            sys.stdout.write(f"trainshed: old checkpoints could not be removed: {error}\n")
        sys.stdout.flush()
        if once or os.getppid() != parent:  # the job's script is gone
            return
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
