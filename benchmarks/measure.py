"""Running a command and measuring it from outside: wall time and peak memory of its whole process tree."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Measured:
    """One run of a command."""

    seconds: float
    peak_mib: float
    output: str


def measure(command: list[str], *, timeout: float = 3600, alone: bool = False) -> Measured:
    """Run a command; stop the benchmark if it fails.

    `alone`: it starts no others, so that its memory can be asked for without holding it up.
    """
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    peak, stop = [0.0], threading.Event()

    def watch() -> None:
        ask, pause = (_resident_mib, 0.05) if alone else (_tree_mib, 0.2)
        while not stop.wait(pause):
            peak[0] = max(peak[0], ask(process.pid))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    output, _ = process.communicate(timeout=timeout)
    seconds = time.perf_counter() - started
    stop.set()
    thread.join()
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)}\nexit code {process.returncode}\n{output[-2000:]}")
    return Measured(seconds, peak[0], output)


def _resident_mib(pid: int) -> float:
    """Memory of one process, pages that it maps included."""
    try:
        return psutil.Process(pid).memory_info().rss / 2**20
    except psutil.NoSuchProcess:
        return 0.0


def _tree_mib(pid: int) -> float:
    """Memory of a process and all its children; pages they share are counted once (PSS, which is slow to ask for)."""
    total = 0
    try:
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied, AttributeError):
                continue
    except psutil.NoSuchProcess:
        pass
    return total / 2**20


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print rows in aligned columns."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    print(f"\n{title}")
    for row in [columns, ["-" * width for width in widths], *rows]:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells))
