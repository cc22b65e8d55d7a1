"""Clocks that jump: a folder on PYTHONPATH. Node n2 of Slurm's, or the second of another cluster, is a day ahead, and
every clock falls back an hour some seconds after its process began.

The clock of the machine is left alone: only `time.time` of our own processes lies. The monotonic clock is true, as on a
node whose time is set.
"""

import os
import time

_true_time, _began = time.time, time.monotonic()
_NODE = os.environ.get("SLURMD_NODENAME") or os.environ.get("TRAINSHED_NODE_RANK")
_AHEAD = 86400.0 if _NODE in ("n2", "1") else 0.0


def _jumping_time() -> float:
    fallen = 3600.0 if time.monotonic() - _began > 6.0 else 0.0
    return _true_time() + _AHEAD - fallen


time.time = _jumping_time
