"""The logs of a run as they lie in its folder.

logs/attempt-0001/rank-00000.log    training, one file per rank
logs/prepare/part-0000.log          other stages, one file per part
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trainshed.errors import NotFound

_ATTEMPT = re.compile(r"attempt-(\d{4,})")
_POLL_SECONDS = 0.5
_MOST_AT_ONCE = 1 << 20


def log_file(run: Path, stage: str, *, rank: int | None = None, attempt: int | None = None) -> Path | None:
    """Return the file with a stage's log, None where it has written none yet; an attempt that never was is an error."""
    if stage != "train":
        files = sorted((run / "logs" / stage).glob("*.log"))
        return files[rank or 0] if len(files) > (rank or 0) else None
    attempts = sorted(
        int(found[1]) for folder in (run / "logs").glob("attempt-*") if (found := _ATTEMPT.fullmatch(folder.name))
    )
    if attempt is not None and attempt not in attempts:
        there = ", ".join(map(str, attempts)) or "none"
        raise NotFound(f"there is no attempt {attempt} of this run", where=str(run), hint=f"attempts: {there}")
    if not attempts:
        return None
    folder = run / "logs" / f"attempt-{attempt or attempts[-1]:04d}"
    file = folder / f"rank-{rank or 0:05d}.log"
    if not file.is_file():
        if rank is not None:
            raise NotFound(f"rank {rank} of attempt {attempt or attempts[-1]} left no log", where=str(folder))
        files = sorted(folder.glob("*.log"))
        return files[0] if files else None
    return file


def read_lines(file: Path, goes_on: Callable[[], bool] | None = None) -> Iterator[str]:
    """Yield the lines of a file; while `goes_on` says so, also those that are added."""
    with file.open(encoding="utf-8", errors="replace") as opened:
        kept = ""
        while True:
            # Asked before reading: what was written before the end is read after it.
            more = goes_on is not None and goes_on()
            while line := opened.readline():
                kept += line
                if kept.endswith("\n"):
                    yield kept
                    kept = ""
            if not more:
                break
            time.sleep(_POLL_SECONDS)
        if kept:
            yield kept


class LogEcho:
    """Says the lines that are added to a log, each once, so that a scheduler's own log shows them too."""

    def __init__(self, file: Path, say: Callable[[str], None], every_seconds: float = 1.0) -> None:
        self._file, self._say, self._every_seconds = file, say, every_seconds
        self._read = file.stat().st_size if file.is_file() else 0
        self._looked = 0.0

    def poll(self, *, at_once: bool = False) -> None:
        """Say what is new and complete; asked more often than `every_seconds`, it does not look."""
        if not at_once and time.monotonic() - self._looked < self._every_seconds:
            return
        self._looked = time.monotonic()
        try:
            with self._file.open("rb") as opened:
                opened.seek(self._read)
                data = opened.read(_MOST_AT_ONCE)
        except FileNotFoundError:
            return
        complete = data[: data.rfind(b"\n") + 1]
        self._read += len(complete)
        for line in complete.decode(errors="replace").splitlines():
            self._say(line)
