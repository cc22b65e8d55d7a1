"""A person at a terminal: what they type, and what they see."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Sequence


def at_a_terminal(arguments: Sequence[str], typed: bytes) -> tuple[int, str]:
    """Run a command of Trainshed at a terminal of its own; return its exit code and what the terminal shows."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "dumb"  # no colours and no bold among the words
        os.execv(sys.executable, [sys.executable, "-m", "trainshed", *arguments])
    os.write(terminal, typed)
    shown = b""
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    return code, shown.decode()
