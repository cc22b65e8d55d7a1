"""From what all nodes found to one verdict and one sentence that names the bad ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from trainshed.errors import TrainshedError
from trainshed.launch.preflight.checks import Check, failures, worst

PREFLIGHT_SCHEMA = "trainshed.preflight/1"
Outcome = Literal["pass", "warn", "replace", "fail"]


@dataclass(frozen=True)
class NodeReport:
    """One node: where it is and what was found of it."""

    node: int
    host: str
    checks: tuple[Check, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        checks = [check.to_plain() for check in self.checks]
        return {"node": self.node, "host": self.host, "checks": checks, "versions": dict(self.versions)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> NodeReport:
        """Read it back."""
        checks = tuple(Check.from_plain(check) for check in plain["checks"])
        return cls(plain["node"], plain["host"], checks, plain["versions"])

    @property
    def name(self) -> str:
        """For a sentence."""
        return f"node {self.node} ({self.host})"


@dataclass(frozen=True)
class PreflightVerdict:
    """What was found before the ranks start.

    `replace`: the nodes named are bad, the others are not. `fail`: something is wrong with all of them, or between
    them, and another node would not help.
    """

    outcome: Outcome
    sentence: str
    replace: tuple[int, ...] = ()
    doubtful: tuple[int, ...] = ()
    nodes: tuple[NodeReport, ...] = ()
    checks: tuple[Check, ...] = ()
    """Of all nodes together."""
    bus_gb_per_s: float | None = None
    fabric: str | None = None
    seconds: float = 0.0

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "schema": PREFLIGHT_SCHEMA,
            "verdict": self.outcome,
            "sentence": self.sentence,
            "replace": list(self.replace),
            "doubtful": list(self.doubtful),
            "hosts": {str(report.node): report.host for report in self.nodes},
            "fabric": self.fabric,
            "bus_gb_per_s": self.bus_gb_per_s,
            "seconds": self.seconds,
            "checks": [check.to_plain() for check in self.checks],
            "nodes": [report.to_plain() for report in self.nodes],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> PreflightVerdict:
        """Read it back."""
        return cls(
            plain["verdict"],
            plain["sentence"],
            tuple(plain["replace"]),
            tuple(plain["doubtful"]),
            tuple(NodeReport.from_plain(report) for report in plain["nodes"]),
            tuple(Check.from_plain(check) for check in plain["checks"]),
            plain["bus_gb_per_s"],
            plain["fabric"],
            plain["seconds"],
        )

    def raise_unless_ready(self, where: str | None = None) -> None:
        """Raise where training should not start."""
        if self.outcome in ("replace", "fail"):
            hints = [check.hint for report in self.nodes for check in failures(report.checks) if check.hint]
            hints += [check.hint for check in failures(self.checks) if check.hint]
            raise TrainshedError(self.sentence, where=where, hint=hints[0] if hints else None)


def newest_verdict(run: Path) -> PreflightVerdict | None:
    """Return the verdict of a run's newest attempt; None where its folder is not here, or holds none."""
    files = sorted((run / "health").glob("attempt-*/preflight/verdict.json"))
    return PreflightVerdict.from_plain(orjson.loads(files[-1].read_bytes())) if files else None


def conclude(
    reports: Sequence[NodeReport],
    checks: Sequence[Check],
    *,
    fabric: str | None = None,
    bus_gb_per_s: float | None = None,
    seconds: float = 0.0,
) -> PreflightVerdict:
    """Draw the conclusion from each node's checks and from those of all together."""
    bad = [report for report in reports if worst(report.checks) == "fail"]
    doubtful = tuple(report.node for report in reports if worst(report.checks) == "warn")
    outcome, sentence = _outcome(reports, bad, checks, doubtful)
    return PreflightVerdict(
        outcome,
        sentence,
        tuple(report.node for report in bad) if outcome == "replace" else (),
        doubtful,
        tuple(reports),
        tuple(checks),
        bus_gb_per_s,
        fabric,
        seconds,
    )


def _outcome(
    reports: Sequence[NodeReport], bad: Sequence[NodeReport], checks: Sequence[Check], doubtful: Sequence[int]
) -> tuple[Outcome, str]:
    if bad and len(bad) * 2 > len(reports):
        # What most nodes have is no fault of theirs.
        what = failures(bad[0].checks)[0].what
        names = "the node" if len(reports) == 1 else f"{len(bad)} of {len(reports)} nodes"
        return "fail", f"{names} cannot train: {what}"
    if bad:
        told = "; ".join(f"{report.name}: {failures(report.checks)[0].what}" for report in bad[:8])
        return "replace", f"{_count(len(bad))} to be replaced, of {len(reports)}: {told}"
    if failed := failures(checks):
        return "fail", failed[0].what
    warned = [check for check in checks if check.verdict == "warn"]
    if warned or doubtful:
        by_node = [
            f"{report.name}: {check.what}" for report in reports for check in report.checks if check.verdict == "warn"
        ]
        told = [check.what for check in warned] + by_node
        more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
        return "warn", f"{told[0]}{more}"
    last = [check.what for check in checks if check.verdict == "pass" and check.name in ("fabric", "all-reduce")]
    return "pass", f"{_count(len(reports))} ready" + (f": {'; '.join(last)}" if last else "")


def _count(nodes: int) -> str:
    return "one node is" if nodes == 1 else f"{nodes} nodes are"
