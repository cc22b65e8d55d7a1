"""What an agent does beside its work: it gives signs of life and samples the node's GPUs."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import orjson

from trainshed.errors import StorageError
from trainshed.launch.agent.meeting import Meeting
from trainshed.launch.agent.place import AgentTimes

_GPU_KEYS = ("index", "temperature.gpu", "power.draw", "utilization.gpu", "memory.used", "clocks.sm")
_GPU_KEYS_ECC = "ecc.errors.uncorrected.volatile.total"
_SMI_SECONDS = 20.0


@contextmanager
def pulse(meeting: Meeting, slot: int, times: AgentTimes) -> Generator[None]:
    """Give signs of life for as long as the block runs, more often while the roll is called."""
    count, due = 0, 0.0

    def beat() -> None:
        nonlocal count, due
        if time.monotonic() >= due or meeting.roll_is_called:
            count, due = count + 1, time.monotonic() + times.beat_seconds
            try:
                meeting.beat(slot, count)
            except StorageError:
                due = 0.0  # once more at the next look
                raise

    with every(min(times.look_seconds, times.beat_seconds), beat):
        yield


@contextmanager
def gpu_samples(file: Path, seconds: float) -> Generator[None]:
    """Sample the node's GPUs into a file of JSON lines; does nothing where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        yield
        return

    def sample() -> None:
        if (gpus := _gpus()) is None:
            return
        line = orjson.dumps({"time": time.time(), "gpus": gpus}, option=orjson.OPT_APPEND_NEWLINE)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as samples:
            samples.write(line)

    with every(seconds, sample):
        yield


def _gpus() -> list[dict[str, float | None]] | None:
    """Ask the driver; None where it does not answer."""
    keys = (*_GPU_KEYS, _GPU_KEYS_ECC)
    command = ["nvidia-smi", f"--query-gpu={','.join(keys)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    rows = [[_figure(cell) for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [dict(zip(keys, row, strict=False)) for row in rows]


def _figure(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:  # [N/A]
        return None


@contextmanager
def every(seconds: float, do: Callable[[], None]) -> Generator[None]:
    """Do something now and then in a thread of its own, so that a hanging driver or disk holds nothing up."""
    over = threading.Event()

    def repeat() -> None:
        while True:
            with suppress(Exception):  # one that fails is followed by the next
                do()
            if over.wait(seconds):
                return

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=1.0)
