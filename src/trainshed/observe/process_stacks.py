"""The Python stacks of a run's ranks on this node, now, without disturbing them.

A rank is found by its environment: RANK, and TRAINSHED_RUN_FOLDER, which whoever starts it sets. Its stack is read by
py-spy where that is installed and allowed. Otherwise a rank of our own engine writes it itself: SIGUSR2 makes its
faulthandler write into a file in memory that it holds open (`engines/torch/stack_dump.py`).

This is also a script: `trainshed stacks` feeds it to a Python on the nodes of a job, and `watch_node.py` imports it in
the image of a foreign engine. It needs the standard library of Python 3.8 and nothing of Trainshed.

    python3 - RUN_FOLDER [RANK] < process_stacks.py      prints one line of JSON
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

RUN_FOLDER_VARIABLE = "TRAINSHED_RUN_FOLDER"
"""In the environment of every rank: the run that it belongs to."""
STACK_SIGNAL: int = getattr(signal, "SIGUSR2", 12)  # its number on Linux, where ranks run; Windows has none
STACK_FILE = "trainshed-stacks"
"""The name of the file in memory that a rank of our own engine writes its stacks into."""

_PROC = Path("/proc")
_PY_SPY_SECONDS = 30.0
_DUMP_SECONDS = 5.0


@dataclass(frozen=True)
class RankStack:
    """Where a rank is."""

    rank: int
    host: str
    pid: int | None = None
    state: str = ""
    """Of its process: `R` running, `S` sleeping, `D` in the kernel, `T` stopped, `Z` dead."""
    stack: list[str] = field(default_factory=list)
    """Of its main thread, the innermost frame last, as `file:line in function`."""
    source: str | None = None
    """What has read it: `py-spy`, `faulthandler`, `flight record`."""
    problem: str | None = None
    """Why there is no stack."""


def find_ranks(run_folder: str, proc: Path = _PROC) -> dict[int, int]:
    """Return the processes of a run's ranks on this node, by rank; the newest where there are several of one rank."""
    wanted = os.path.realpath(run_folder)
    ranks_by_pid: dict[int, int] = {}
    for entry in proc.iterdir():
        if not entry.name.isdecimal():
            continue
        environment = read_environment(int(entry.name), proc)
        rank, run = environment.get("RANK", ""), environment.get(RUN_FOLDER_VARIABLE)
        if rank.isdecimal() and run is not None and os.path.realpath(run) == wanted:
            ranks_by_pid[int(entry.name)] = int(rank)
    pids: dict[int, int] = {}
    for pid in sorted(ranks_by_pid):
        # A process that a rank has started (a worker of its data loader) has its environment too.
        parent = _stat_fields(pid, proc)[1:2]
        if not parent or ranks_by_pid.get(int(parent[0])) != ranks_by_pid[pid]:
            pids[ranks_by_pid[pid]] = pid
    return pids


def read_environment(pid: int, proc: Path = _PROC) -> dict[str, str]:
    """Return the environment that a process was started with; empty where it may not be read."""
    try:
        content = (proc / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition("=") for item in content.decode(errors="replace").split("\0") if "=" in item)
    return {name: value for name, _, value in pairs}


def process_state(pid: int, proc: Path = _PROC) -> str:
    """Return the state of a process as `ps` shows it; empty where it is gone."""
    return (_stat_fields(pid, proc) or [""])[0]


def _stat_fields(pid: int, proc: Path) -> list[str]:
    """Return the fields of a process after its name, which may hold anything: its state, its parent, …"""
    try:
        return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def read_stack(rank: int, pid: int) -> RankStack:
    """Return where a rank is now."""
    here = RankStack(rank, socket.gethostname(), pid, process_state(pid))
    program = find_py_spy(pid)
    problem = "py-spy is not installed where it runs (pip install py-spy)"
    if program is not None:
        text, problem = run_py_spy(program, pid)
        if text is not None:
            return replace(here, stack=parse_py_spy(text), source="py-spy")
    if here.state in ("T", "t"):
        return replace(here, problem="it is stopped (SIGSTOP, or a debugger)")
    dump = ask_faulthandler(pid)
    if dump is not None:
        return replace(here, stack=parse_faulthandler(dump), source="faulthandler")
    return replace(here, problem=problem)


def find_py_spy(pid: int) -> str | None:
    """Return the py-spy of this process, or of the one that is looked at; None where there is none."""
    path = [os.environ.get("PATH", ""), read_environment(pid).get("PATH", ""), str(Path(sys.executable).parent)]
    try:
        first = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
        path.append(str(Path(first).parent) if "/" in first else "")
    except OSError:
        pass
    return shutil.which("py-spy", path=os.pathsep.join(filter(None, path)))


def run_py_spy(program: str, pid: int) -> tuple[str | None, str]:
    """Return what py-spy says of a process as JSON, or None and why not.

    It reads the memory of a process that runs on; only if it cannot make sense of that, it holds it for a moment.
    """
    problem = ""
    for options in (["--nonblocking"], ["--nonblocking"], []):
        try:
            done = subprocess.run(
                [program, "dump", "--json", *options, "--pid", str(pid)],
                capture_output=True,
                text=True,
                timeout=_PY_SPY_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return None, f"py-spy: {error}"
        if done.returncode == 0 and parse_py_spy(done.stdout):
            return done.stdout, ""
        problem = (done.stderr.strip().splitlines() or ["it gave no stack"])[-1]
        if "ermission" in done.stderr:
            return None, "py-spy may not look at it: it needs the right to trace processes (CAP_SYS_PTRACE, or root)"
    return None, f"py-spy: {problem}"


def parse_py_spy(text: str) -> list[str]:
    """Return the stack of the main thread in what `py-spy dump --json` prints."""
    try:
        threads = json.loads(text)
    except ValueError:
        return []
    main = next((thread for thread in threads if thread.get("thread_name") == "MainThread"), None)
    if main is None:  # older versions of py-spy name no threads; the first thread is the oldest
        main = threads[-1] if threads else {"frames": []}
    return [f"{frame['filename']}:{frame['line']} in {frame['name']}" for frame in reversed(main["frames"])]


def ask_faulthandler(pid: int) -> bytes | None:
    """Return the stacks that a rank of our own engine writes when asked; None where it does not.

    The signal would end a process that does not expect it: only one that catches it and holds the file gets it.
    """
    file = _stack_file(pid)
    if file is None or not _catches(pid, STACK_SIGNAL):
        return None
    before = len(_read(file))
    try:
        os.kill(pid, STACK_SIGNAL)
    except OSError:
        return None
    deadline, size = time.monotonic() + _DUMP_SECONDS, before
    while time.monotonic() < deadline:
        time.sleep(0.05)
        content = _read(file)
        if len(content) > before and len(content) == size:  # it has stopped growing
            return content[before:]
        size = len(content)
    return None


def _stack_file(pid: int) -> Path | None:
    try:
        for link in (_PROC / str(pid) / "fd").iterdir():
            if os.readlink(str(link)).startswith(f"/memfd:{STACK_FILE}"):
                return link
    except OSError:
        pass
    return None


def _catches(pid: int, number: int) -> bool:
    try:
        status = (_PROC / str(pid) / "status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


_FAULTHANDLER_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


def parse_faulthandler(dump: bytes) -> list[str]:
    """Return the stack of the main thread in what faulthandler writes: the last of its threads."""
    blocks = dump.decode(errors="replace").strip().split("\n\n")
    frames = [match for line in blocks[-1].splitlines() if (match := _FAULTHANDLER_FRAME.match(line))]
    return [f"{frame[1]}:{frame[2]} in {frame[3]}" for frame in reversed(frames)]


def read_stacks(run_folder: str, rank: int | None = None) -> list[RankStack]:
    """Return where the ranks of a run on this node are now, or one of them."""
    ranks = find_ranks(run_folder)
    return [read_stack(number, pid) for number, pid in sorted(ranks.items()) if rank in (None, number)]


def main(arguments: list[str]) -> None:
    """Print the stacks as one line of JSON."""
    rank = int(arguments[1]) if len(arguments) > 1 else None
    stacks = [asdict(stack) for stack in read_stacks(arguments[0], rank)]
    sys.stdout.write(json.dumps({"host": socket.gethostname(), "ranks": stacks}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
