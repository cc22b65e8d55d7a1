"""Checks and the verdict drawn from them: one outcome, and one sentence that names the bad nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from trainshed.run_folder import HEALTH

CheckVerdict = Literal["pass", "warn", "fail", "skipped"]
_BY_SEVERITY: tuple[CheckVerdict, ...] = ("skipped", "pass", "warn", "fail")


@dataclass(frozen=True)
class CheckResult:
    """The result of one check: `what` is a sentence about it, `hint` says what to do."""

    name: str
    verdict: CheckVerdict
    what: str
    hint: str | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)
    """Figures, for programs."""

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON has it, without what is empty."""
        plain: dict[str, Any] = {"name": self.name, "verdict": self.verdict, "what": self.what}
        return (
            plain
            | ({"hint": self.hint} if self.hint else {})
            | ({"measured": dict(self.measured)} if self.measured else {})
        )

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> CheckResult:
        """Read it back."""
        return cls(plain["name"], plain["verdict"], plain["what"], plain.get("hint"), plain.get("measured", {}))


def worst_verdict(checks: Iterable[CheckResult]) -> CheckVerdict:
    """Return the worst verdict; "skipped" if there is no check."""
    return max((check.verdict for check in checks), key=_BY_SEVERITY.index, default="skipped")


def failed_checks(checks: Iterable[CheckResult]) -> list[CheckResult]:
    """Return the checks that failed."""
    return [check for check in checks if check.verdict == "fail"]


PREFLIGHT_SCHEMA = "trainshed.preflight/1"
PreflightOutcome = Literal["pass", "warn", "replace", "fail"]


@dataclass(frozen=True)
class NodeCheckReport:
    """The checks of one node."""

    node: int
    host: str
    checks: tuple[CheckResult, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        checks = [check.to_plain() for check in self.checks]
        return {"node": self.node, "host": self.host, "checks": checks, "versions": dict(self.versions)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> NodeCheckReport:
        """Read it back."""
        checks = tuple(CheckResult.from_plain(check) for check in plain["checks"])
        return cls(plain["node"], plain["host"], checks, plain["versions"])

    @property
    def name(self) -> str:
        """For a sentence."""
        return f"node {self.node} ({self.host})"


@dataclass(frozen=True)
class PreflightVerdict:
    """The result of preflight on all nodes.

    `replace`: only the named nodes are bad. `fail`: something is wrong with most nodes, or between them, and replacing
    a node would not help.
    """

    outcome: PreflightOutcome
    sentence: str
    replace: tuple[int, ...] = ()
    doubtful: tuple[int, ...] = ()
    nodes: tuple[NodeCheckReport, ...] = ()
    checks: tuple[CheckResult, ...] = ()
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
            tuple(NodeCheckReport.from_plain(report) for report in plain["nodes"]),
            tuple(CheckResult.from_plain(check) for check in plain["checks"]),
            plain["bus_gb_per_s"],
            plain["fabric"],
            plain["seconds"],
        )


def newest_verdict(run: Path) -> PreflightVerdict | None:
    """Return the verdict of a run's newest attempt; None if its folder is not here or has none."""
    files = sorted((run / HEALTH).glob("attempt-*/preflight/verdict.json"))
    return PreflightVerdict.from_plain(orjson.loads(files[-1].read_bytes())) if files else None


def conclude(
    reports: Sequence[NodeCheckReport],
    checks: Sequence[CheckResult],
    *,
    fabric: str | None = None,
    bus_gb_per_s: float | None = None,
    seconds: float = 0.0,
) -> PreflightVerdict:
    """Return the verdict from each node's checks and from those of all nodes together."""
    bad = [report for report in reports if worst_verdict(report.checks) == "fail"]
    doubtful = tuple(report.node for report in reports if worst_verdict(report.checks) == "warn")
    outcome, sentence = _draw_outcome(reports, bad, checks, doubtful)
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


def _draw_outcome(
    reports: Sequence[NodeCheckReport],
    bad: Sequence[NodeCheckReport],
    checks: Sequence[CheckResult],
    doubtful: Sequence[int],
) -> tuple[PreflightOutcome, str]:
    if bad and len(bad) * 2 > len(reports):
        # A problem of most nodes is not the fault of single ones.
        what = failed_checks(bad[0].checks)[0].what
        names = "the node" if len(reports) == 1 else f"{len(bad)} of {len(reports)} nodes"
        return "fail", f"{names} cannot train: {what}"
    if bad:
        reasons = "; ".join(f"{report.name}: {failed_checks(report.checks)[0].what}" for report in bad[:8])
        return "replace", f"{_nodes_are(len(bad))} to be replaced, of {len(reports)}: {reasons}"
    if failed := failed_checks(checks):
        return "fail", failed[0].what
    warned = [check for check in checks if check.verdict == "warn"]
    if warned or doubtful:
        by_node = [
            f"{report.name}: {check.what}" for report in reports for check in report.checks if check.verdict == "warn"
        ]
        reasons = [check.what for check in warned] + by_node
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        return "warn", f"{reasons[0]}{more}"
    last = [check.what for check in checks if check.verdict == "pass" and check.name in ("fabric", "all-reduce")]
    return "pass", f"{_nodes_are(len(reports))} ready" + (f": {'; '.join(last)}" if last else "")


def _nodes_are(nodes: int) -> str:
    return "one node is" if nodes == 1 else f"{nodes} nodes are"
