"""Proof before step 0: GPUs, versions, storage, clocks, and the fabric as NCCL itself says it uses it."""

from __future__ import annotations

from trainshed.launch.preflight.checks import Check
from trainshed.launch.preflight.coordinator import Limits
from trainshed.launch.preflight.job import preflight_job, preflight_stage
from trainshed.launch.preflight.run import PreflightJob, run_preflight
from trainshed.launch.preflight.verdict import NodeReport, PreflightVerdict

__all__ = [
    "Check",
    "Limits",
    "NodeReport",
    "PreflightJob",
    "PreflightVerdict",
    "preflight_job",
    "preflight_stage",
    "run_preflight",
]
