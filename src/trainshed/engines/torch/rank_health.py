"""A rank's health: the watchdog that ends a stuck rank, the flight record it leaves, the signals that ask it to stop.

The flight record is compared with those of the other ranks. PyTorch's flight recorder keeps the last collectives of
gloo and of NCCL; both are read here. gloo neither records point-to-point operations nor ends them at a group's timeout:
there the Python stack shows that a rank waits, and the watchdog ends it.

A signal only sets a flag; ranks agree on it at a step boundary.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import orjson
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as bindings
from torch.distributed import distributed_c10d

from trainshed.engines.torch import rank_timing
from trainshed.observe.budgets import PhaseBudgets
from trainshed.observe.health import (
    NCCL_DUMP,
    STALLED_EXIT_CODE,
    CollectiveRecord,
    FlightRecord,
    ProcessGroupRecord,
    RecordedError,
    flight_record_name,
    parse_collectives,
)
from trainshed.signals import STOP_SIGNALS, StopSignals

_PHASE_TEXT = {"step": "step {step}", "first_step": "step {step}", "checkpoint": "the checkpoint of step {done}"}
"""Where a rank is when `done` steps are done, for messages."""

_GRACE_SECONDS = 60.0
"""Time for the flight record and `on_stall`; after it the process is ended without them."""


class Watchdog:
    """Ends this process when there is no heartbeat for longer than its phase may take.

    It writes the flight record, calls `on_stall` with a sentence and exits with `STALLED_EXIT_CODE`. So a rank that is
    stuck in Python, or in a collective that has no timeout, ends in bounded time. Before the first `heartbeat` nothing
    is watched.

    The phase also sets the timeout of collectives. So ranks wait for one that loads or compiles for as long as it may
    load or compile, and in a usual step no longer than that.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        budgets: PhaseBudgets | None = None,
        on_stall: Callable[[str], None] | None = None,
        poll_seconds: float = 1.0,
    ) -> None:
        self._folder, self._rank = folder, rank
        self.budgets = budgets or PhaseBudgets()
        self._on_stall = on_stall
        self._poll_seconds = poll_seconds
        self._collective_seconds: float | None = None
        self._last_beat: tuple[float, int | None, str] | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def heartbeat(self, step: int | None, phase: str) -> None:
        """Record that this rank is alive and which phase begins; it is cheap enough for every step."""
        with self._lock:
            budget = self.budgets.seconds(phase)
            changed = self._last_beat is None or self._last_beat[2] != phase
            self._last_beat = time.monotonic(), step, phase
            if changed:  # within a phase the thread does it
                _arm_faulthandler(budget + _GRACE_SECONDS)
        wait_seconds = self.budgets.collective_seconds(phase)
        # A step's budget may grow within the phase; a new phase may have new groups.
        if changed or wait_seconds != self._collective_seconds:
            set_collective_timeout(wait_seconds)
            self._collective_seconds = wait_seconds

    def add_step(self, seconds: float) -> None:
        """Tell how long a step took: the budget of a step follows it unless the recipe has one."""
        with self._lock:
            self.budgets.add_step(seconds)

    @property
    def advice(self) -> str | None:
        """Which key of the recipe allows the current phase more time."""
        return None if self._last_beat is None else self.budgets.advice(self._last_beat[2])

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._stopped.wait(self._poll_seconds):
            with self._lock:
                if self._last_beat is None:
                    continue
                since, step, phase = self._last_beat
                left = since + self.budgets.seconds(phase) - time.monotonic()
                _arm_faulthandler(max(left, 0) + _GRACE_SECONDS)
            if left <= 0:
                self._end(step, phase)

    def _end(self, step: int | None, phase: str) -> None:
        at = (
            phase
            if step is None
            else _PHASE_TEXT.get(phase, f"{phase} after step {{done}}").format(done=step, step=step + 1)
        )
        text = f"rank {self._rank} has shown no progress for {self.budgets.seconds(phase):g} seconds in {at}"
        try:
            advice = self.budgets.advice(phase)
            write_flight_record(self._folder, self._rank, reason=text, step=step, phase=phase, advice=advice)
            if self._on_stall is not None:
                self._on_stall(text)
        except BaseException:  # whatever it is, this process must end; its log is the only place left to write to
            traceback.print_exc()
        finally:
            os._exit(STALLED_EXIT_CODE)


def _arm_faulthandler(seconds: float) -> None:
    """End this process later without Python's help: code that holds the interpreter lock stops our thread too."""
    if sys.__stderr__ is None or seconds > threading.TIMEOUT_MAX:
        faulthandler.cancel_dump_traceback_later()
    else:
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)


_RECORDERS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
_BUFFER_ENTRIES = "2000"  # PyTorch's own default since 2.9; some builds and images turn it off
_PEER_ERROR = re.compile(r"gloo|nccl|closed by peer|timed out waiting|connection reset", re.IGNORECASE)
_TIMEOUT_ERROR = re.compile(r"timed out|timeout", re.IGNORECASE)
# Frames of PyTorch between the wait and its caller.
_SKIPPED_FRAMES = ("/torch/_ops.py", "/torch/utils/", "/torch/autograd/")
_record_lock = threading.Lock()
_error_records: set[Path] = set()


def enable_flight_recorder(folder: Path) -> None:
    """Turn PyTorch's flight recorder on; called before the first process group is made.

    If NCCL's own watchdog acts first, it leaves PyTorch's dump in `folder` too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _BUFFER_ENTRIES)
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / NCCL_DUMP))


def set_collective_timeout(seconds: float) -> None:
    """Set one timeout for every existing process group: those of a mesh do not inherit the first group's."""
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def write_flight_record(
    folder: Path,
    rank: int,
    *,
    reason: str = "asked to",
    error: BaseException | None = None,
    step: int | None = None,
    phase: str | None = None,
    advice: str | None = None,
) -> Path:
    """Write this rank's flight record into `folder` (`health/attempt-0001`); returns its file.

    `advice` says what to write if a limit was too short; it is left out where the error is not about waiting too long.
    The record of an error is never overwritten, for example by the watchdog while the error is being handled.
    """
    path = folder / flight_record_name(rank)
    with _record_lock:
        if error is not None or path not in _error_records:
            _write_record(path, rank, reason, error, step, phase, advice)
        if error is not None:
            _error_records.add(path)
    return path


def _write_record(
    path: Path,
    rank: int,
    reason: str,
    error: BaseException | None,
    step: int | None,
    phase: str | None,
    advice: str | None,
) -> None:
    frames = _frames(error)
    stacks = FlightRecord(
        rank=rank,
        time=time.time(),
        reason=reason,
        step=step,
        phase=phase,
        error=None if error is None else _rank_error(error),
        stack=[f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames[-30:]],
        waiting=_waits_for(frames),
        threads=_thread_stacks(),
        advice=advice if error is None or _TIMEOUT_ERROR.search(str(error)) else None,
        missing="the recorder did not answer",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    # First without the collectives: reading them calls CUDA, which may be what hangs.
    _write_atomically(path, stacks)
    groups = _process_groups()
    collectives, missing = _recorded_collectives(groups)
    _write_atomically(path, replace(stacks, groups=groups, collectives=collectives, missing=missing))


def _rank_error(error: BaseException) -> RecordedError:
    text = str(error).strip()
    about_others = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and _PEER_ERROR.search(text) is not None
    )
    return RecordedError(type(error).__name__, text[:500], about_others)


def _frames(error: BaseException | None) -> list[traceback.FrameSummary]:
    """Return the stack of an error, or of the main thread if there is none; without what only measures waits."""
    if error is not None:
        frames: traceback.StackSummary = traceback.extract_tb(error.__traceback__)
    else:
        frames = traceback.extract_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    return [frame for frame in frames if frame.filename != rank_timing.__file__]


def _waits_for(frames: list[traceback.FrameSummary]) -> Literal["collective", "point-to-point"] | None:
    """Return what the innermost frame waits for, if it waits for other ranks."""
    inner = [frame for frame in frames if not any(part in frame.filename for part in _SKIPPED_FRAMES)][-1:]
    for frame in inner:
        if "/torch/distributed/pipelining/" in frame.filename or frame.name in ("recv", "send", "irecv", "isend"):
            return "point-to-point"
        if "/torch/distributed/" in frame.filename and "/checkpoint/" not in frame.filename:
            return "collective"
        if frame.line is not None and ".wait(" in frame.line:
            return "point-to-point"
    return None


def _thread_stacks() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def _process_groups() -> list[ProcessGroupRecord]:
    if not dist.is_initialized():
        return []
    records = []
    for group, name in distributed_c10d._world.pg_names.items():
        described = group.group_desc not in ("", "undefined")
        records.append(
            ProcessGroupRecord(name, group.group_desc if described else name, dist.get_process_group_ranks(group))
        )
    return records


def _recorded_collectives(groups: list[ProcessGroupRecord]) -> tuple[list[CollectiveRecord], str | None]:
    """Return the last collectives of each group, oldest first; or no collectives and the reason."""
    if os.environ.get("TORCH_FR_BUFFER_SIZE") == "0":
        return [], "TORCH_FR_BUFFER_SIZE=0 turns the recorder off"
    if not dist.is_initialized():
        return [], "there is no process group"
    used = {part for group in distributed_c10d._world.pg_map for part in dist.get_backend_config(group).split(",")}
    entries = []
    for backend, name in _RECORDERS.items():
        dump = getattr(bindings, name, None)
        if dump is not None:
            entries += orjson.loads(dump(True, False)).get("entries", [])
        elif any(part.split(":")[-1] == backend for part in used):
            return [], f"PyTorch {torch.__version__} has no flight recorder for {backend}"
    return parse_collectives(entries, groups), None


def _write_atomically(path: Path, written: FlightRecord) -> None:
    """Write the whole file or nothing: the launcher may read it or kill this process at any moment."""
    part = path.with_suffix(".part")
    part.write_bytes(written.to_json())
    os.replace(part, path)


NO_STOP_VOTES: Mapping[str, float] = {number.name: 0.0 for number in STOP_SIGNALS}
"""The votes of a rank that has received no signal."""


def stop_votes(signals: StopSignals) -> dict[str, float]:
    """Return 1.0 for each stop signal that was received, by its name; to be summed over all ranks.

    Each rank votes with every step, and one vote stops all ranks.
    """
    return {number.name: float(number in signals.received) for number in STOP_SIGNALS}


def agreed_signal(summed_votes: Mapping[str, float]) -> int | None:
    """Return the signal that some rank has received, if any."""
    return next((int(number) for number in STOP_SIGNALS if summed_votes[number.name] > 0), None)
