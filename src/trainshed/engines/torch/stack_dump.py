"""A rank's answer to `trainshed stacks` where nobody may trace it: it writes its own stacks when it is asked.

The signal is handled by faulthandler, in C and without the interpreter's lock, and a system call that it meets goes on:
training does not notice. The stacks go into a file in memory, which whoever asks opens by /proc: no disk is touched.
"""

from __future__ import annotations

import faulthandler
import os
from typing import BinaryIO

from trainshed.observe.process_stacks import STACK_FILE, STACK_SIGNAL

_stack_file: BinaryIO | None = None


def write_stacks_when_asked() -> None:
    """Make this process answer `STACK_SIGNAL` with its stacks, as long as it lives; nothing happens outside Linux."""
    global _stack_file
    if _stack_file is None and hasattr(os, "memfd_create"):
        _stack_file = os.fdopen(os.memfd_create(STACK_FILE), "ab", buffering=0)
        faulthandler.register(STACK_SIGNAL, file=_stack_file, all_threads=True)
