"""Clocks that jump: a folder on PYTHONPATH. Node n2 is a day ahead, and every clock falls back an hour some seconds
after its process began.

The clock of the machine is left alone: only `time.time` of our own processes lies. The monotonic clock is true, as on a
node whose time is set.
"""

import os
import time

_true_time, _began = time.time, time.monotonic()
_AHEAD = 86400.0 if os.environ.get("SLURMD_NODENAME") == "n2" else 0.0


def _jumping_time() -> float:
    fallen = 3600.0 if time.monotonic() - _began > 6.0 else 0.0
    return _true_time() + _AHEAD - fallen


time.time = _jumping_time
