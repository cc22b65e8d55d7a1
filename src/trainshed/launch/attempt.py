"""One attempt of a run, on whatever target: its plan, the command and environment of its ranks, its logs, its failure.

<run>/plans/attempt-0001.json             what its ranks run, and why the planner chose it
<run>/logs/attempt-0001/rank-00000.log    training, one file per rank
<run>/logs/prepare/part-0000.log          other stages, one file per part
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from trainshed.errors import NotFound, TrainshedError
from trainshed.launch.ranks import stopped_rank_text
from trainshed.observe.events import EventWriter
from trainshed.observe.health import diagnose, health_folder, read_flight_records, read_rank_error
from trainshed.plan import RankLayout
from trainshed.storage import LocalStore

PLAN_SCHEMA = "trainshed.plan/1"


def write_plan(
    store: LocalStore,
    attempt: int,
    layout: RankLayout,
    reasons: Sequence[str] = (),
    calibration: Mapping[str, Any] | None = None,
) -> None:
    """Keep what an attempt's ranks are to run, and why the planner chose it; no reasons where a person did."""
    body: dict[str, Any] = {
        "schema": PLAN_SCHEMA,
        "attempt": attempt,
        "layout": asdict(layout),
        "reasons": list(reasons),
    }
    if calibration is not None:
        body["calibration"] = calibration
    store.put(f"plans/attempt-{attempt:04d}.json", orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n")


def read_plan(run_folder: Path, attempt: int) -> RankLayout:
    """Return the layout of an attempt."""
    body = orjson.loads(LocalStore(run_folder).read(f"plans/attempt-{attempt:04d}.json"))
    return RankLayout(**body["layout"] | {"stages": tuple(body["layout"]["stages"])})


def read_job_plan(folder: Path) -> tuple[RankLayout, tuple[str, ...]]:
    """Return the layout that travelled with a job, and why it was chosen."""
    path = folder / "plan.json"
    body = orjson.loads(path.read_bytes())
    if body.get("schema") != PLAN_SCHEMA:
        raise TrainshedError(f"this plan was written as {body.get('schema')}, not {PLAN_SCHEMA}", where=str(path))
    layout = RankLayout(**body["layout"] | {"stages": tuple(body["layout"]["stages"])})
    return layout, tuple(body.get("reasons", ()))


# CPUs that say they have matrix tiles (AMX) while the hypervisor forbids them kill bf16 products with SIGILL.
WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


def worker_command(*arguments: str) -> list[str]:
    """Return how this Python starts `trainshed worker`."""
    # -P: a file of the user's named like one of Python's modules must not be taken for it.
    return [sys.executable, "-P", "-m", "trainshed", "worker", *arguments]


def rank_command(run_folder: Path, attempt: int, arguments: Sequence[str] = ()) -> list[str]:
    """Return what every rank of an attempt runs."""
    return worker_command("train", "--run", str(run_folder), "--attempt", str(attempt), *arguments)


def machine_environment(precision: str) -> dict[str, str]:
    """What ranks on this machine need in their environment besides their place."""
    needed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if precision == "bf16" and "ONEDNN_MAX_CPU_ISA" not in os.environ and _amx_is_forbidden():
        needed |= WITHOUT_AMX
    return {name: value for name, value in needed.items() if name not in os.environ}


def _amx_is_forbidden() -> bool:
    """Whether a bf16 product dies on this CPU; only one that claims to have tiles is tried."""
    facts = Path("/proc/cpuinfo")
    if not facts.exists() or "amx_bf16" not in facts.read_text():
        return False
    tried = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"
    return subprocess.run([sys.executable, "-c", tried], capture_output=True).returncode == -signal.SIGILL


def logs_folder(run_folder: Path, attempt: int) -> Path:
    """Return where the ranks of an attempt write what they print."""
    return run_folder / "logs" / f"attempt-{attempt:04d}"


_ATTEMPT_FOLDER = re.compile(r"attempt-(\d{4,})")
_LOG_POLL_SECONDS = 0.5
_MAX_READ_BYTES = 1 << 20


def log_file(run: Path, stage: str, *, rank: int | None = None, attempt: int | None = None) -> Path | None:
    """Return the file with a stage's log, None where it has written none yet; an attempt that never was is an error."""
    if stage != "train":
        files = sorted((run / "logs" / stage).glob("*.log"))
        return files[rank or 0] if len(files) > (rank or 0) else None
    attempts = sorted(
        int(found[1])
        for folder in (run / "logs").glob("attempt-*")
        if (found := _ATTEMPT_FOLDER.fullmatch(folder.name))
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


def follow_lines(file: Path, goes_on: Callable[[], bool] | None = None) -> Iterator[str]:
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
            time.sleep(_LOG_POLL_SECONDS)
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
                data = opened.read(_MAX_READ_BYTES)
        except FileNotFoundError:
            return
        complete = data[: data.rfind(b"\n") + 1]
        self._read += len(complete)
        for line in complete.decode(errors="replace").splitlines():
            self._say(line)


class RunFolderWatcher:
    """Notices that a run's folder is gone: its ranks would train on for a while, and keep nothing."""

    def __init__(self, folder: Path, *, seconds: float = 3.0) -> None:
        self._folder, self._seconds = folder, seconds
        self._there = self._looked = time.monotonic()

    def check(self, *, at_once: bool = False) -> None:
        """Raise if the folder has been gone for some time; a network disk may lose sight of it for a moment."""
        now = time.monotonic()
        if now - self._looked < self._seconds / 3 and not at_once:
            return
        self._looked = now
        if self._folder.is_dir():
            self._there = now
        elif at_once or now - self._there >= self._seconds:
            raise TrainshedError(
                "the folder of this run was removed or renamed while it trained",
                where=str(self._folder),
                hint="put it back, and the same command goes on from its last checkpoint; without it a new run begins",
            )


def emit_stall(store: LocalStore, attempt: int, rank: int, process: int) -> None:
    """Keep that a rank is stopped, for everybody who follows the run."""
    with EventWriter(store, "", attempt=attempt, rank=None) as events:
        events.emit("stall", ranks=[rank], collective=None, what=stopped_rank_text(rank, process))


def explain_failure(
    run_folder: Path, attempt: int, world_size: int, *, ends: Mapping[int, str], failed: Sequence[int]
) -> TrainshedError:
    """Return what ended an attempt, after keeping it as a `failure` event.

    `ends` says of ranks that ended by themselves how they did, `failed` are all that did not end well, first of all
    the one whose log to look at where nobody stands out.
    """
    health = health_folder(run_folder, attempt)
    diagnosis = diagnose(read_flight_records(health), world_size, exit_reasons=ends)
    error = read_rank_error(health)
    what = diagnosis.sentence if error is None else error.what
    with EventWriter(LocalStore(run_folder), "", attempt=attempt, rank=None) as events:
        events.emit("failure", ranks=diagnosis.ranks, collective=diagnosis.collective, what=what)
    if error is not None:
        return error
    first = diagnosis.ranks[0] if diagnosis.ranks else (failed[0] if failed else 0)
    return TrainshedError(
        diagnosis.sentence,
        where=str(run_folder / "logs" / f"attempt-{attempt:04d}" / f"rank-{first:05d}.log"),
        hint="the same command goes on from the last checkpoint",
    )
