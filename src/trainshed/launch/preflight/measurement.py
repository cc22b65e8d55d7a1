"""Measure one group of nodes, and read from NCCL's own log (`NCCL_DEBUG=INFO`) which network it uses.

Every measurement has its own process group, so that a node that hangs stops only its group. Each node of the group
starts its probes (`engines/torch/fabric_probe.py`) and reads what its first one wrote. The first node of the group
publishes the address at which its probes listen.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from trainshed.engines.probe_request import ProbeRequest
from trainshed.errors import TrainshedError
from trainshed.launch.fabric import FabricSetup
from trainshed.launch.preflight.verdict import CheckResult
from trainshed.launch.ranks import free_port, run_ranks
from trainshed.launch.rendezvous import KeyValueClient
from trainshed.observe.nccl_log import (
    first_matching_line,
    missing_pattern,
    network_taken,
    not_shown,
    read_logs,
    rejected_line,
)

# -P: a file of the user's that is named like a module of Python must not be imported in its place.
PROBE_COMMAND = (sys.executable, "-P", "-m", "trainshed.engines.torch.fabric_probe")
_PORT_SECONDS = 60.0


@dataclass(frozen=True)
class FabricProbeGroup:
    """A group of nodes and what they measure together."""

    name: str
    nodes: tuple[int, ...]
    request: ProbeRequest
    proves_fabric: bool = False
    """Check NCCL's log against the setup."""

    def to_plain(self) -> dict[str, Any]:
        """Return it as it is published."""
        request = self.request.to_text()
        return {"name": self.name, "nodes": self.nodes, "request": request, "proves_fabric": self.proves_fabric}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> FabricProbeGroup:
        """Read it back."""
        request = ProbeRequest.from_text(plain["request"])
        return cls(plain["name"], tuple(plain["nodes"]), request, plain["proves_fabric"])


@dataclass(frozen=True)
class FabricProbeResult:
    """What one node measured in a group: figures, or why there are none."""

    figures: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    fabric: Mapping[str, Any] | None = None
    """The check of NCCL's log, if the group asks for it."""

    def to_plain(self) -> dict[str, Any]:
        """Return it as it is published."""
        return {"figures": dict(self.figures), "error": self.error, "fabric": self.fabric}

    def rate(self, *, median: bool) -> float | None:
        """Return the bus bandwidth of the largest message, None if it was not measured."""
        measured: Sequence[Mapping[str, float]] = self.figures.get("all_reduces", ())
        return measured[-1]["median_gb_per_s" if median else "best_gb_per_s"] if measured else None


@dataclass(frozen=True)
class FabricProbeRunner:
    """Runs this node's part of measurements."""

    node: int
    host: str
    """The address at which other nodes reach it."""
    ranks: int
    """Probes of each node: one per GPU, or one if there is none."""
    key_values: KeyValueClient
    setup: FabricSetup
    scratch: Path
    probe: Sequence[str] = PROBE_COMMAND

    def measure(self, group: FabricProbeGroup, seconds: float) -> FabricProbeResult:
        """Start this node's probes of a group and wait for them, at most `seconds`."""
        folder = self.scratch / group.name
        folder.mkdir(parents=True, exist_ok=True)
        result_file = folder / "result.json"
        on_gpu = group.request.kind == "cuda"
        deadline = time.monotonic() + seconds
        peer_errors = self._watch(group, seconds)

        def raise_if_over() -> None:
            if peer_errors:
                raise TrainshedError(peer_errors[0])
            if time.monotonic() > deadline:
                raise TrainshedError(f"the all-reduce did not end within {seconds:.0f} s")

        try:
            done = run_ranks(
                [*self.probe, group.request.to_text(), str(result_file)],
                ranks=self.ranks,
                logs=folder,
                world_size=self.ranks * len(group.nodes),
                first_rank=self.ranks * group.nodes.index(self.node),
                master=self._master(group),
                environment=dict(self.setup.environment) | (nccl_log_environment(folder) if on_gpu else {}),
                grace_seconds=5.0,
                failure_grace_seconds=5.0,
                on_poll=raise_if_over,
            )
            error = None if not done.failed else _probe_failure_text(done.failed[0].log_tail, done.failed[0].end_text)
        except TrainshedError as raised:
            error = raised.what
        if len(group.nodes) > 1:
            self.key_values.put(f"ended/{group.name}", [self.node, error])
        log = read_nccl_logs(folder) if on_gpu else ""
        fabric = check_fabric(self.setup, log).to_plain() if on_gpu and group.proves_fabric else None
        if error is not None and (warning := first_matching_line(log, ("NCCL WARN",))):
            error = f"{error}; NCCL says `{warning}`"
        if error is not None or not result_file.exists():
            return FabricProbeResult(error=error or "its probes ended without a result", fabric=fabric)
        return FabricProbeResult(orjson.loads(result_file.read_bytes()), fabric=fabric)

    def _watch(self, group: FabricProbeGroup, seconds: float) -> list[str]:
        """Return a list that gets the error of a peer that fails: our probes would wait for it in vain."""
        peer_errors: list[str] = []
        if len(group.nodes) == 1:
            return peer_errors

        def wait() -> None:
            key = f"ended/{group.name}"
            with suppress(TrainshedError):
                node, error = self.key_values.get([key], seconds).get(key, (self.node, None))
                if error is not None and node != self.node:
                    peer_errors.append(f"node {node} failed: {error}")

        threading.Thread(target=wait, daemon=True).start()
        return peer_errors

    def _master(self, group: FabricProbeGroup) -> tuple[str, int]:
        if len(group.nodes) == 1:
            return ("127.0.0.1", free_port())
        key = f"port/{group.name}"
        if group.nodes[0] == self.node:
            self.key_values.put(key, [self.host, free_port()])
        answers = self.key_values.get([key], _PORT_SECONDS)
        if key not in answers:
            raise TrainshedError(f"node {group.nodes[0]} did not come")
        return (answers[key][0], answers[key][1])


def _probe_failure_text(log: str, end_text: str) -> str:
    """Return how a probe ended, with the line of its log that says why."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and not line.startswith((" ", "\t", "[W", "[I"))]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)] or lines
    return f"a probe {end_text}" + (f": {errors[-1][:300]}" if errors else "")


def nccl_log_environment(folder: Path) -> dict[str, str]:
    """Return the variables that make NCCL log into files of a folder; NCCL fills in host %h and process %p."""
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
        "NCCL_DEBUG_FILE": str(folder / "nccl-%h-%p.log"),
    }


def read_nccl_logs(folder: Path) -> str:
    """Return the NCCL logs of this node's probes."""
    return read_logs(str(folder / "nccl-"))


def check_fabric(setup: FabricSetup, log: str) -> CheckResult:
    """Check a node's log against what the setup says it must and must not show."""
    network = network_taken(log)
    measured = {"network": network}
    if not setup.selected and not setup.rejected:
        what = f"NCCL took {network or 'no network'}; nothing says which it should be"
        return CheckResult("fabric", "skipped", what, measured=measured)
    if not log.strip():
        return CheckResult(
            "fabric", "fail", "NCCL left no log: nothing proves that the fabric is used", measured=measured
        )
    expected = setup.expected_network._replace(rejected=(*setup.rejected, *setup.sharp_rejected))
    if line := rejected_line(log, expected):
        return CheckResult("fabric", "fail", f"{setup.fabric} is not used: NCCL says `{line}`", expected.hint, measured)
    if pattern := missing_pattern(log, expected):
        what = f"{setup.fabric} is not proven: {not_shown(log, pattern)}"
        return CheckResult("fabric", "fail", what, expected.hint, measured)
    return CheckResult("fabric", "pass", f"NCCL uses {network or setup.fabric}", measured=measured)
