"""Measure one group of nodes, and read from NCCL's own log (`NCCL_DEBUG=INFO`) which network it took.

Every measurement is a process group of its own, so that a node that hangs stops only its group. Each node of the group
starts its probes (`engines/torch/fabric_probe.py`) and reads what its first one wrote. The first node of the group
tells the others where its probes listen.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
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

# -P: a file of the user's named like one of Python's modules must not be taken for it.
PROBE_COMMAND = (sys.executable, "-P", "-m", "trainshed.engines.torch.fabric_probe")
_PORT_SECONDS = 60.0


@dataclass(frozen=True)
class FabricProbeGroup:
    """A group of nodes and what they measure together."""

    name: str
    nodes: tuple[int, ...]
    request: ProbeRequest
    proves_fabric: bool = False
    """Hold NCCL's log against the setup."""

    def to_plain(self) -> dict[str, Any]:
        """Return it as the board has it."""
        request = self.request.to_text()
        return {"name": self.name, "nodes": self.nodes, "request": request, "proves_fabric": self.proves_fabric}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> FabricProbeGroup:
        """Read it back."""
        request = ProbeRequest.from_text(plain["request"])
        return cls(plain["name"], tuple(plain["nodes"]), request, plain["proves_fabric"])


@dataclass(frozen=True)
class FabricProbeResult:
    """What one node found in a world: figures, or why there are none."""

    figures: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    fabric: Mapping[str, Any] | None = None
    """The check of NCCL's log, where it was asked for."""

    def to_plain(self) -> dict[str, Any]:
        """Return it as the board has it."""
        return {"figures": dict(self.figures), "error": self.error, "fabric": self.fabric}

    def rate(self, *, median: bool) -> float | None:
        """Return the bus bandwidth of the largest message, None where it was not measured."""
        measured: Sequence[Mapping[str, float]] = self.figures.get("all_reduces", ())
        return measured[-1]["median_gb_per_s" if median else "best_gb_per_s"] if measured else None


@dataclass(frozen=True)
class FabricProbeRunner:
    """How this node takes part in measurements."""

    node: int
    host: str
    """Where other nodes reach it."""
    ranks: int
    """Probes of each node: one a GPU, or one where there is none."""
    board: KeyValueClient
    setup: FabricSetup
    scratch: Path
    probe: Sequence[str] = PROBE_COMMAND

    def measure(self, world: FabricProbeGroup, seconds: float) -> FabricProbeResult:
        """Start this node's probes of a world and wait for them, at most so long."""
        folder = self.scratch / world.name
        folder.mkdir(parents=True, exist_ok=True)
        out = folder / "found.json"
        on_gpu = world.request.kind == "cuda"
        until = time.monotonic() + seconds
        peer = self._watch(world, seconds)

        def heed() -> None:
            if peer:
                raise TrainshedError(peer[0])
            if time.monotonic() > until:
                raise TrainshedError(f"the all-reduce did not end within {seconds:.0f} s")

        try:
            done = run_ranks(
                [*self.probe, world.request.to_text(), str(out)],
                ranks=self.ranks,
                logs=folder,
                world_size=self.ranks * len(world.nodes),
                first_rank=self.ranks * world.nodes.index(self.node),
                master=self._master(world),
                environment=dict(self.setup.environment) | (nccl_log_environment(folder) if on_gpu else {}),
                grace_seconds=5.0,
                failure_grace_seconds=5.0,
                on_poll=heed,
            )
            error = None if not done.failed else _probe_failure_text(done.failed[0].log_tail, done.failed[0].end_text)
        except TrainshedError as raised:
            error = raised.what
        if len(world.nodes) > 1:
            self.board.put(f"ended/{world.name}", [self.node, error])
        log = read_nccl_logs(folder) if on_gpu else ""
        fabric = check_fabric(self.setup, log).to_plain() if on_gpu and world.proves_fabric else None
        if error is not None and (said := first_matching_line(log, ("NCCL WARN",))):
            error = f"{error}; NCCL says `{said}`"
        if error is not None or not out.exists():
            return FabricProbeResult(error=error or "its probes ended without a result", fabric=fabric)
        return FabricProbeResult(orjson.loads(out.read_bytes()), fabric=fabric)

    def _watch(self, world: FabricProbeGroup, seconds: float) -> list[str]:
        """Return a list that will hold why a peer of the world failed: our probes would wait for it in vain."""
        found: list[str] = []
        if len(world.nodes) == 1:
            return found

        def wait() -> None:
            key = f"ended/{world.name}"
            with suppress(TrainshedError):
                node, error = self.board.get([key], seconds).get(key, (self.node, None))
                if error is not None and node != self.node:
                    found.append(f"node {node} failed: {error}")

        threading.Thread(target=wait, daemon=True).start()
        return found

    def _master(self, world: FabricProbeGroup) -> tuple[str, int]:
        if len(world.nodes) == 1:
            return ("127.0.0.1", free_port())
        key = f"port/{world.name}"
        if world.nodes[0] == self.node:
            self.board.put(key, [self.host, free_port()])
        found = self.board.get([key], _PORT_SECONDS)
        if key not in found:
            raise TrainshedError(f"node {world.nodes[0]} did not come")
        return (found[key][0], found[key][1])


def _probe_failure_text(log: str, how: str) -> str:
    """The line of a probe's log that says why, for a sentence about it."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and not line.startswith((" ", "\t", "[W", "[I"))]
    telling = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)] or lines
    return f"a probe {how}" + (f": {telling[-1][:300]}" if telling else "")


_MAX_LOG_BYTES = 4 * 2**20
_USING_NETWORK = re.compile(r"Using network (.+)$", re.MULTILINE)


def nccl_log_environment(folder: Path) -> dict[str, str]:
    """What makes NCCL write its log into files of its own in a folder; %h and %p are NCCL's host and process."""
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
        "NCCL_DEBUG_FILE": str(folder / "nccl-%h-%p.log"),
    }


def read_nccl_logs(folder: Path) -> str:
    """Return what the ranks of this node wrote."""
    texts = []
    for file in sorted(folder.glob("nccl-*.log")):
        with file.open("rb") as log:
            texts.append(log.read(_MAX_LOG_BYTES).decode(errors="replace"))
    return "\n".join(texts)


def network_taken(log: str) -> str | None:
    """Return the network NCCL says it uses, None where it says nothing."""
    found = _USING_NETWORK.search(log)
    return found[1].strip() if found else None


def check_fabric(setup: FabricSetup, log: str) -> CheckResult:
    """Hold a node's log against what the setup says it must and must not show."""
    taken = network_taken(log)
    measured = {"network": taken}
    if not setup.selected and not setup.rejected:
        what = f"NCCL took {taken or 'no network'}; nothing says which it should be"
        return CheckResult("fabric", "skipped", what, measured=measured)
    if not log.strip():
        return CheckResult(
            "fabric", "fail", "NCCL left no log: nothing proves that the fabric is used", measured=measured
        )
    hint = _plugin_hint(setup)
    if bad := first_matching_line(log, setup.rejected):
        return CheckResult("fabric", "fail", f"{setup.fabric} is not used: NCCL says `{bad}`", hint, measured)
    missing = [pattern for pattern in setup.selected if not re.search(pattern, log, re.MULTILINE)]
    if missing:
        told = f"it says `Using network {taken}`" if taken else "it names no network"
        what = f"{setup.fabric} is not proven: NCCL's log does not show /{missing[0]}/; {told}"
        return CheckResult("fabric", "fail", what, hint, measured)
    return CheckResult("fabric", "pass", f"NCCL uses {taken or setup.fabric}", measured=measured)


def first_matching_line(log: str, patterns: Iterable[str]) -> str | None:
    """Return the first line that matches one of the patterns, without NCCL's prefix."""
    for pattern in patterns:
        if found := re.search(f"^.*(?:{pattern}).*$", log, re.MULTILINE):
            return re.sub(r"^.*NCCL (INFO|WARN) ", "", found[0]).strip()
    return None


def _plugin_hint(setup: FabricSetup) -> str:
    wanted = setup.environment.get("NCCL_NET", "")
    return f"is the plugin of {setup.name} {setup.version} in the image (NCCL_NET={wanted}), and are its devices there?"
