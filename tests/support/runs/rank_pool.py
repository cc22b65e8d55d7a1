"""Worlds of ranks that start in milliseconds: one process has PyTorch and the engine loaded and forks them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from support.runs.rank_server import Job, RankEnd
from trainshed.launch.attempt import machine_environment
from trainshed.launch.ranks import free_port

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""These are proofs on gloo, also where there is a GPU."""
_SERVER = Path(__file__).with_name("rank_server.py")


class RankPool:
    """Runs functions on worlds of ranks. The functions are found by name: in modules, not inside tests."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            # Ranks share a core or two. bf16 products must not use matrix tiles that the machine forbids.
            environment = {**os.environ, **NO_GPU, "OMP_NUM_THREADS": "1", **machine_environment("bf16")}
            environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
            self._server = subprocess.Popen(
                [sys.executable, str(_SERVER), str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment
            )

    def ends(
        self, function: Callable[..., Any], *arguments: Any, ranks: int = 1, timeout_seconds: float = 120.0
    ) -> list[RankEnd]:
        """Call a function on every rank and say how each ended."""
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self._connection.send(Job(function, arguments, ranks, timeout_seconds, environment))
        ends = self._connection.recv()
        assert not isinstance(ends, str), f"the ranks could not be asked:\n{ends}"
        return ends

    def run(
        self, function: Callable[..., Any], *arguments: Any, ranks: int = 1, timeout_seconds: float = 120.0
    ) -> list[Any]:
        """Call a function on every rank and return what each gave; all of them must have come to their end."""
        ends = self.ends(function, *arguments, ranks=ranks, timeout_seconds=timeout_seconds)
        failed = [end for end in ends if end.error or end.signal]
        assert not failed, "\n".join(_told(end) for end in failed)
        return [end.value for end in ends]

    def close(self) -> None:
        """End the server, and with it whatever it has started."""
        self._connection.close()
        self._server.wait()


def _told(end: RankEnd) -> str:
    how = "hung" if end.hung else f"was ended by {end.signal}" if end.signal else "failed"
    return f"rank {end.rank} {how}\n{end.error or ''}{end.said}"
