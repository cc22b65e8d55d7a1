"""What this machine has, on Linux, macOS and Windows alike: cores, memory, users."""

from __future__ import annotations

import os
import sys

from trainshed.errors import InputError

ON_WINDOWS = sys.platform == "win32"


def not_on_windows(what: str) -> InputError:
    """Return the error of what only Linux and macOS can do."""
    return InputError(
        what,
        hint="Windows plans, renders, submits and watches; do this in WSL (`wsl --install`), or on a cluster "
        "(`trainshed submit RECIPE --on CLUSTER`)",
    )


def check_can_train() -> None:
    """Refuse to start ranks on Windows."""
    if ON_WINDOWS:
        raise not_on_windows("Windows cannot train")


def usable_cpus() -> int:
    """Return how many cores this process may use: on Linux fewer than there are in a container or under `taskset`."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the memory of this machine."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _windows_memory_bytes()


def user_name() -> str:
    """Return what tells the users of one machine apart in the name of a folder."""
    return str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")


def _windows_memory_bytes() -> int:
    """Ask Windows (GlobalMemoryStatusEx): the total is the second field, after a length and a percentage."""
    import ctypes

    class MemoryStatus(ctypes.Structure):
        _fields_ = (
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            *((name, ctypes.c_ulonglong) for name in ("total", "free", "page", "page_free", "own", "own_free", "more")),
        )

    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return int(status.total)
