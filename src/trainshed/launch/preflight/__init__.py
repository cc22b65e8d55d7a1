"""Checks before step 0: GPUs, versions, storage, clocks, and the network that NCCL itself says it uses.

`run.py` is the entrance, called on every node. Each node checks itself (`node.py`) and measures with others
(`measurement.py`) as node 0 tells it (`coordinator.py`); `verdict.py` is the result. `doctor.py` holds the checks that
need no job.
"""

from __future__ import annotations

from trainshed.launch.preflight.coordinator import PreflightTimeouts
from trainshed.launch.preflight.run import PreflightJob, preflight_job, preflight_stage, run_preflight
from trainshed.launch.preflight.verdict import CheckResult, NodeCheckReport, PreflightVerdict

__all__ = [
    "CheckResult",
    "NodeCheckReport",
    "PreflightJob",
    "PreflightTimeouts",
    "PreflightVerdict",
    "preflight_job",
    "preflight_stage",
    "run_preflight",
]
