"""One attempt of a run, on any target: its plan, the command and environment of its ranks, its logs, its failure.

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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson

from trainshed.errors import NotFound, TrainshedError
from trainshed.launch.ranks import stopped_rank_text
from trainshed.observe.events import EventWriter
from trainshed.observe.health import diagnose, failure_advice, health_folder, read_flight_records, read_rank_error
from trainshed.observe.run_facts import EngineRun
from trainshed.plan import RankLayout
from trainshed.run_folder import LOGS, attempt_folder, attempt_number, node_name, plan_file, rank_log, rank_name
from trainshed.storage import LocalStore, Store, join

PLAN_SCHEMA = "trainshed.plan/1"


def write_plan(
    store: LocalStore,
    attempt: int,
    layout: RankLayout,
    reasons: Sequence[str] = (),
    calibration: Mapping[str, Any] | None = None,
    predicted: Mapping[str, Any] | None = None,
) -> None:
    """Store the layout of an attempt, why the planner chose it, and the step time, MFU and memory it predicts.

    A layout that a person wrote has no reasons, and nothing is predicted for CPUs.
    """
    body: dict[str, Any] = {
        "schema": PLAN_SCHEMA,
        "attempt": attempt,
        "layout": asdict(layout),
        "reasons": list(reasons),
    }
    if calibration is not None:
        body["calibration"] = calibration
    if predicted is not None:
        body["predicted"] = predicted
    store.put(plan_file(attempt), orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n")


def read_plan(run_folder: Path, attempt: int) -> RankLayout:
    """Return the layout of an attempt."""
    return _read_layout(orjson.loads(LocalStore(run_folder).read(plan_file(attempt))))


def read_job_plan(folder: Path) -> tuple[RankLayout, tuple[str, ...], Mapping[str, Any] | None]:
    """Return the layout that came with a job, why it was chosen, and what the planner predicts of it."""
    path = folder / "plan.json"
    body = orjson.loads(path.read_bytes())
    if body.get("schema") != PLAN_SCHEMA:
        raise TrainshedError(f"this plan was written as {body.get('schema')}, not {PLAN_SCHEMA}", where=str(path))
    return _read_layout(body), tuple(body.get("reasons", ())), body.get("predicted")


def _read_layout(plan: Mapping[str, Any]) -> RankLayout:
    return RankLayout(**plan["layout"] | {"stages": tuple(plan["layout"]["stages"])})


# A CPU may report matrix tiles (AMX) that its hypervisor forbids: a bf16 matmul then dies of SIGILL.
WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


def worker_command(*arguments: str) -> list[str]:
    """Return the command of `trainshed worker` with this Python."""
    # -P: a file of the user's that is named like a module of Python must not be imported in its place.
    return [sys.executable, "-P", "-m", "trainshed", "worker", *arguments]


def rank_command(run_folder: Path, attempt: int, arguments: Sequence[str] = ()) -> list[str]:
    """Return what every rank of an attempt runs."""
    return worker_command("train", "--run", str(run_folder), "--attempt", str(attempt), *arguments)


def machine_environment(precision: str, written: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that ranks on this machine need besides `rank_environment`.

    What is in the environment, or `written` for the ranks, is left as it is.
    """
    known = {**os.environ, **(written or {})}
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if precision == "bf16" and "ONEDNN_MAX_CPU_ISA" not in known and _amx_is_forbidden():
        variables |= WITHOUT_AMX
    if has_gpu_driver() and not any(name in known for name in _ALLOCATOR_VARIABLES):
        variables[_allocator_variable()] = "expandable_segments:True"
    return {name: value for name, value in variables.items() if name not in known}


_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_GPU_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def has_gpu_driver() -> bool:
    """Whether this machine has the driver of NVIDIA or AMD; asked without PyTorch, which takes seconds to load."""
    return any(path.exists() for path in _GPU_DRIVER_FILES)


def _allocator_variable() -> str:
    """Return the variable that PyTorch's allocator of GPU memory reads: since 2.9 it is not CUDA's alone."""
    try:
        major, minor = (int(part) for part in version("torch").split(".")[:2])
    except PackageNotFoundError:  # it is in another environment, which the ranks load
        return _ALLOCATOR_VARIABLES[0]
    return _ALLOCATOR_VARIABLES[0] if (major, minor) >= (2, 9) else _ALLOCATOR_VARIABLES[1]


def _amx_is_forbidden() -> bool:
    """Whether a bf16 matmul dies on this CPU; tried only on a CPU that reports AMX."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or "amx_bf16" not in cpuinfo.read_text():
        return False
    probe = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"
    return subprocess.run([sys.executable, "-P", "-c", probe], capture_output=True).returncode == -signal.SIGILL


def logs_folder(run_folder: Path, attempt: int) -> Path:
    """Return the folder of the logs of an attempt's ranks."""
    return run_folder / attempt_folder(LOGS, attempt)


_LOG_POLL_SECONDS = 0.5
_BUCKET_POLL_SECONDS = 2.0
_MAX_READ_BYTES = 1 << 20


_ATTEMPT_LOG = re.compile(rf"{LOGS}/(attempt-\d+)/((?:rank|node)-\d+\.log)")


def find_log(store: Store, stage: str, *, rank: int | None = None, attempt: int | None = None) -> str | None:
    """Return the path of a stage's log, None if it has written none yet; an unknown attempt is an error."""
    if stage != "train":
        files = [info.path for info in store.list(f"{LOGS}/{stage}") if info.path.endswith(".log")]
        return files[rank or 0] if len(files) > (rank or 0) else None
    logs: dict[int, list[str]] = {}
    for info in store.list(LOGS):
        match = _ATTEMPT_LOG.fullmatch(info.path)
        number = attempt_number(match[1]) if match else None
        if match and number is not None:
            logs.setdefault(number, []).append(match[2])
    if attempt is not None and attempt not in logs:
        known = ", ".join(map(str, sorted(logs))) or "none"
        raise NotFound(f"there is no attempt {attempt} of this run", where=store.url, hint=f"attempts: {known}")
    if not logs:
        return None
    number = attempt or max(logs)
    folder, wanted = attempt_folder(LOGS, number), f"{rank_name(rank or 0)}.log"
    placed = EngineRun.read(store, "")
    if placed is not None:
        if rank is not None and rank >= placed.world_size:
            raise NotFound(f"this run has {placed.world_size} ranks, and no rank {rank}", where=join(store.url, folder))
        # The log of a foreign engine is one per node; the losses are printed by one rank.
        wanted = f"{node_name((placed.losses_rank if rank is None else rank) // placed.ranks_per_node)}.log"
    if wanted not in logs[number]:
        if rank is not None:
            raise NotFound(f"rank {rank} of attempt {number} left no log", where=join(store.url, folder))
        wanted = min(logs[number])
    return f"{folder}/{wanted}"


def log_file(run_folder: Path, stage: str, *, rank: int | None = None, attempt: int | None = None) -> Path | None:
    """Return the file with a stage's log, as `find_log` finds it."""
    path = find_log(LocalStore(run_folder), stage, rank=rank, attempt=attempt)
    return None if path is None else run_folder / path


def follow_lines(file: Path, is_running: Callable[[], bool] | None = None) -> Iterator[str]:
    """Yield the lines of a file; while `is_running` says so, also those that are added."""
    with file.open(encoding="utf-8", errors="replace") as opened:
        partial_line = ""
        while True:
            # Asked before reading, so that what was written before the end is still read.
            keeps_growing = is_running is not None and is_running()
            while line := opened.readline():
                partial_line += line
                if partial_line.endswith("\n"):
                    yield partial_line
                    partial_line = ""
            if not keeps_growing:
                break
            time.sleep(_LOG_POLL_SECONDS)
        if partial_line:
            yield partial_line


def stored_log_lines(store: Store, path: str, is_running: Callable[[], bool] | None = None) -> Iterator[str]:
    """Return the lines of a log in a bucket; while `is_running` says so, also those that are added."""

    def read_from(offset: int) -> bytes:
        info = store.head(path)
        return b"" if info is None or info.size <= offset else store.read(path, offset)

    return growing_lines(read_from, lambda: is_running is not None and is_running(), _BUCKET_POLL_SECONDS)


def growing_lines(
    read_from: Callable[[int], bytes], keeps_growing: Callable[[], bool], poll_seconds: float
) -> Iterator[str]:
    """Yield the lines of a log until it no longer grows; `read_from` returns its bytes from an offset on."""
    offset, partial_line = 0, b""
    while True:
        # Asked before reading, so that what was written before the end is still read.
        grows = keeps_growing()
        new = read_from(offset)
        offset += len(new)
        *lines, partial_line = (partial_line + new).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace") + "\n"
        if not grows:
            break
        time.sleep(poll_seconds)
    if partial_line:
        yield partial_line.decode(errors="replace")


class LogEcho:
    """Repeats the lines that are added to a log, each once, so that a scheduler's own log shows them too."""

    def __init__(self, file: Path, write: Callable[[str], None], every_seconds: float = 1.0) -> None:
        self._file, self._write, self._every_seconds = file, write, every_seconds
        self._offset = file.stat().st_size if file.is_file() else 0
        self._checked_at = 0.0

    def poll(self, *, at_once: bool = False) -> None:
        """Write the new complete lines; the file is read once in `every_seconds` at most, unless `at_once`."""
        if not at_once and time.monotonic() - self._checked_at < self._every_seconds:
            return
        self._checked_at = time.monotonic()
        try:
            with self._file.open("rb") as opened:
                opened.seek(self._offset)
                data = opened.read(_MAX_READ_BYTES)
        except FileNotFoundError:
            return
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.decode(errors="replace").splitlines():
            self._write(line)


class RunFolderWatcher:
    """Notices that a run's folder is gone: its ranks would train on for a while and could save nothing."""

    def __init__(self, folder: Path, *, seconds: float = 3.0) -> None:
        self._folder, self._seconds = folder, seconds
        self._seen_at = self._checked_at = time.monotonic()

    def check(self, *, at_once: bool = False) -> None:
        """Raise if the folder has been gone for some time; on a network disk it may be missing for a moment."""
        now = time.monotonic()
        if now - self._checked_at < self._seconds / 3 and not at_once:
            return
        self._checked_at = now
        if self._folder.is_dir():
            self._seen_at = now
        elif at_once or now - self._seen_at >= self._seconds:
            raise TrainshedError(
                "the folder of this run was removed or renamed while it trained",
                where=str(self._folder),
                hint="put it back, and the same command goes on from its last checkpoint; without it a new run begins",
            )


def emit_stall(store: LocalStore, attempt: int, rank: int, pid: int) -> None:
    """Write an event that a rank is stopped (SIGSTOP), for everybody who follows the run."""
    with EventWriter(store, "", attempt=attempt, rank=None) as events:
        events.emit("stall", ranks=[rank], collective=None, what=stopped_rank_text(rank, pid))


def explain_failure(
    run_folder: Path, attempt: int, world_size: int, *, rank_ends: Mapping[int, str], failed_ranks: Sequence[int]
) -> TrainshedError:
    """Return the error that ended an attempt, and write it as a `failure` event.

    `rank_ends` says how ranks ended that nobody killed. `failed_ranks` are all that failed; the error names the log of
    the first of them if the flight records single out no rank.
    """
    health = health_folder(run_folder, attempt)
    records = read_flight_records(health)
    diagnosis = diagnose(records, world_size, exit_reasons=rank_ends)
    error = read_rank_error(health)
    what = diagnosis.sentence if error is None else error.what
    with EventWriter(LocalStore(run_folder), "", attempt=attempt, rank=None) as events:
        events.emit("failure", ranks=diagnosis.ranks, collective=diagnosis.collective, what=what)
    if error is not None:
        return error
    first = diagnosis.ranks[0] if diagnosis.ranks else (failed_ranks[0] if failed_ranks else 0)
    advice = next((record.advice for record in records.values() if record.advice), None)
    advice = advice or failure_advice(diagnosis, records, rank_ends)
    return TrainshedError(
        diagnosis.sentence,
        where=str(run_folder / rank_log(attempt, first)),
        hint="; ".join([*([advice] if advice else []), "the same command goes on from the last checkpoint"]),
    )
