"""What node 0 decides: who measures with whom next, and when enough is known. The others only do as they are told.

Which node is the bad one follows from all-reduces between pairs of nodes. A pair is as slow as the slower of its two
nodes. So a node is as fast as the best pair it was in, and bad once it was slow together with a node that is known to
be good. Neighbours are paired first; a node that was in a slow pair (or in none) is paired again with a known-good
node, until every node is decided or no further pair could decide anything.

Thresholds are those of Azure's node health checks (ai-infrastructure-on-azure): 3.5 % below the others is worth a
look, 7 % is bad; where there are enough pairs to know how much they spread, a bad one must also stand out from that (a
modified z-score below -2).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trainshed.catalog import Machine, find_gpu
from trainshed.catalog.machines import ExpectedRate, expected_between_nodes, expected_in_node, expected_rates
from trainshed.engines.probe_request import ProbeRequest
from trainshed.launch.fabric import FabricSetup
from trainshed.launch.preflight.measurement import FabricProbeGroup, FabricProbeResult
from trainshed.launch.preflight.node import compare_versions, format_nodes
from trainshed.launch.preflight.verdict import CheckResult, NodeCheckReport, PreflightVerdict, conclude, worst_verdict
from trainshed.launch.rendezvous import KeyValueClient

NodeVerdict = Literal["pass", "warn", "replace", "undecided"]

_ENOUGH_PAIRS = 8
_OUTLIER_Z = -2.0
_MAD_TO_SIGMA = 0.6745  # of a normal distribution
_MAX_REMATCHES = 4


@dataclass(frozen=True)
class PairRate:
    """What two nodes reached together; None where they did not get through."""

    nodes: tuple[int, int]
    gb_per_s: float | None


@dataclass(frozen=True)
class PairRules:
    """How far below the others a pair may be, as fractions; and below which figure it is bad in any case."""

    warn: float = 0.035
    replace: float = 0.07
    bad_below_gb_per_s: float | None = None


def next_pairs(nodes: Sequence[int], measured: Sequence[PairRate], rules: PairRules) -> list[tuple[int, int]]:
    """Return which pairs to measure next, each node in one of them at most; none once nothing more can be decided."""
    if len(nodes) < 2:
        return []
    if not measured:
        return _neighbour_pairs(nodes)
    tried = {frozenset(pair.nodes) for pair in measured}
    if len(nodes) == 3 and len(tried) < 3:
        # A single pair has nothing to be compared with: among three, each pair is measured.
        missing = [
            pair for pair in ((0, 1), (0, 2), (1, 2)) if frozenset((nodes[pair[0]], nodes[pair[1]])) not in tried
        ]
        return [(nodes[missing[0][0]], nodes[missing[0][1]])]
    verdicts = judge_nodes(nodes, measured, rules)
    open_nodes = [node for node in nodes if verdicts[node] == "undecided"]
    good = [node for node in nodes if verdicts[node] == "pass"]
    if not good:
        rounds = max(sum(node in pair.nodes for pair in measured) for node in nodes)
        # Where nobody gets through, each round may cost its whole patience, and the fabric is the likelier culprit.
        most = _MAX_REMATCHES if reference_rate(measured) is not None else 2
        return _match_pairs(nodes, nodes, tried) if rounds < most else []
    return _match_pairs(open_nodes, good, tried)


def judge_nodes(nodes: Sequence[int], measured: Sequence[PairRate], rules: PairRules) -> dict[int, NodeVerdict]:
    """Return what is known of each node."""
    found = {pair: _pair_verdict(pair, measured, rules) for pair in measured}
    good = {node for pair, verdict in found.items() if verdict == "pass" for node in pair.nodes}
    verdicts: dict[int, NodeVerdict] = {}
    for node in nodes:
        own = [pair for pair in measured if node in pair.nodes]
        with_good = [found[pair] for pair in own if set(pair.nodes) - {node} <= good - {node}]
        if node in good:
            verdicts[node] = "pass"
        elif not with_good:
            verdicts[node] = "undecided"
        else:
            verdicts[node] = "warn" if "warn" in with_good else "replace"
    return verdicts


def reference_rate(measured: Sequence[PairRate]) -> float | None:
    """Return what healthy pairs reach: the median of the better half, which a few bad nodes are not in."""
    values = sorted((pair.gb_per_s for pair in measured if pair.gb_per_s is not None), reverse=True)
    return statistics.median(values[: max(1, len(measured) // 2)]) if values else None


def shortfalls(measured: Sequence[PairRate]) -> Mapping[tuple[int, int], float]:
    """Return by what fraction each pair falls short of the others; 1 where it did not get through."""
    reference = reference_rate(measured)
    return {
        pair.nodes: 1.0 if pair.gb_per_s is None or not reference else 1 - pair.gb_per_s / reference
        for pair in measured
    }


def _pair_verdict(pair: PairRate, measured: Sequence[PairRate], rules: PairRules) -> Literal["pass", "warn", "replace"]:
    if pair.gb_per_s is None or (rules.bad_below_gb_per_s is not None and pair.gb_per_s < rules.bad_below_gb_per_s):
        return "replace"
    reference = reference_rate(measured)
    short = 1 - pair.gb_per_s / reference if reference else 0.0
    if short < rules.warn or not _stands_out(pair.gb_per_s, measured):
        return "pass"
    return "replace" if short >= rules.replace else "warn"


def _stands_out(value: float, measured: Sequence[PairRate]) -> bool:
    """Whether a value is further from the others than they are from each other."""
    values = [pair.gb_per_s for pair in measured if pair.gb_per_s is not None]
    if len(values) < _ENOUGH_PAIRS:
        return True
    middle = statistics.median(values)
    spread = statistics.median(abs(each - middle) for each in values)
    return spread == 0 or _MAD_TO_SIGMA * (value - middle) / spread < _OUTLIER_Z


def _neighbour_pairs(nodes: Sequence[int]) -> list[tuple[int, int]]:
    return [(nodes[index], nodes[index + 1]) for index in range(0, len(nodes) - 1, 2)]


def _match_pairs(
    open_nodes: Sequence[int], partners: Sequence[int], tried: set[frozenset[int]]
) -> list[tuple[int, int]]:
    """Give each open node a partner it was not with yet, nobody twice."""
    taken: set[int] = set()
    pairs: list[tuple[int, int]] = []
    for node in open_nodes:
        if node in taken:
            continue
        partner = next(
            (each for each in partners if each != node and each not in taken and frozenset((node, each)) not in tried),
            None,
        )
        if partner is not None:
            taken |= {node, partner}
            pairs.append((min(node, partner), max(node, partner)))
    return pairs


_GPU_MEBIBYTES, _CPU_MEBIBYTES = 1024.0, 4.0
# Processors are shared with whatever else runs on a node, and so are the links between them.
_CPU_PAIRS = PairRules(warn=0.5, replace=0.8)
_BYE_SECONDS = 15.0  # for the others to fetch the verdict before the board goes away
_SILENT_CHECK = "report"
_CLOCK_WARN_SECONDS, _CLOCK_FAIL_SECONDS = 2.0, 300.0


@dataclass(frozen=True)
class PreflightTimeouts:
    """How long things may take, in seconds."""

    reports: float = 180.0
    """Until every node has looked at itself."""
    world: float = 120.0
    """One measurement, from the start of its processes."""
    measuring: float = 0.5
    """Of one size of message."""


@dataclass
class PreflightCoordinator:
    """Node 0's part."""

    board: KeyValueClient
    nodes: int
    on_gpu: bool
    setup: FabricSetup
    machine: Machine | None
    full: bool
    limits: PreflightTimeouts
    started: float = field(default_factory=time.monotonic)
    _round: int = 0

    def run(self) -> None:
        """Lead the others to a verdict and put it on the board, whatever happens."""
        try:
            verdict = self._verdict()
        except Exception as error:
            verdict = PreflightVerdict("fail", f"preflight itself failed: {error}", seconds=self._seconds())
        self._tell({"verdict": verdict.to_plain()})
        came = [report.node for report in verdict.nodes if report.node and not _is_silent(report)]
        self.board.get([f"bye/{node}" for node in came], _BYE_SECONDS)

    def _verdict(self) -> PreflightVerdict:
        reports = self._reports()
        able = [node for node, report in reports.items() if worst_verdict(report.checks) != "fail"]
        checks = [compare_versions({node: reports[node].versions for node in able})] if able else []
        rate: float | None = None
        if len(able) > 1 and worst_verdict(checks) != "fail":
            self._find_bad_pairs(able, reports)
            able = [node for node in able if worst_verdict(reports[node].checks) != "fail"]
            if len(able) == self.nodes:
                rate = self._whole(able, reports, checks)
            else:
                checks.append(
                    CheckResult("all-reduce", "skipped", "not measured among all: there are nodes to replace")
                )
        return conclude(
            [reports[node] for node in sorted(reports)],
            checks,
            fabric=self.setup.fabric,
            bus_gb_per_s=rate,
            seconds=self._seconds(),
        )

    def _reports(self) -> dict[int, NodeCheckReport]:
        """What each node found by itself; one that is silent is bad."""
        found = self.board.get([f"node/{node}" for node in range(self.nodes)], self.limits.reports)
        reports: dict[int, NodeCheckReport] = {}
        for node in range(self.nodes):
            plain = found.get(f"node/{node}")
            if plain is None:
                what = f"did not report within {self.limits.reports:.0f} s"
                reports[node] = NodeCheckReport(node, "unknown host", (CheckResult(_SILENT_CHECK, "fail", what),))
            else:
                reports[node] = NodeCheckReport.from_plain(plain)
        return self._compare_products(reports)

    def _compare_products(self, reports: dict[int, NodeCheckReport]) -> dict[int, NodeCheckReport]:
        """A node is as fast as the slowest of its GPUs; who is far below the others is bad."""
        slowest = {
            node: min(check.measured["tflops"])
            for node, report in reports.items()
            for check in report.checks
            if check.name == "products" and check.measured.get("tflops")
        }
        if len(slowest) < 3:
            return reports
        usual = statistics.median(slowest.values())
        for node, tflops in slowest.items():
            short = 1 - tflops / usual
            if short >= self.setup.pairs.warn:
                what = (
                    f"its slowest GPU reaches {tflops:.0f} TFLOP/s in products, others {usual:.0f} ({short:.0%} less)"
                )
                verdict = "fail" if short >= self.setup.pairs.replace else "warn"
                reports[node] = _with_check(reports[node], CheckResult("slow GPU", verdict, what))
        return reports

    def _find_bad_pairs(self, nodes: list[int], reports: dict[int, NodeCheckReport]) -> None:
        expected = expected_between_nodes(self.machine, 2, self.setup.fabric) if self.on_gpu else None
        pairs = self.setup.pairs
        floor = expected.replace if expected is not None else None
        rules = PairRules(pairs.warn, pairs.replace, floor) if self.on_gpu else _CPU_PAIRS
        measured: list[PairRate] = []
        errors: dict[tuple[int, int], str] = {}
        if len(nodes) == 2 and self.nodes == 2:
            return  # the pair is the whole
        while chosen := next_pairs(nodes, measured, rules):
            worlds = [self._world(f"pair-{self._round + 1}-{a}-{b}", (a, b), expected) for a, b in chosen]
            for world, found in self._measure(worlds).items():
                a, b = world.nodes
                by_node = [each.rate(median=False) for each in found.values()]
                rate = (
                    min((each for each in by_node if each is not None), default=None) if None not in by_node else None
                )
                measured.append(PairRate((a, b), rate))
                if said := next((each.error for each in found.values() if each.error), None):
                    errors[a, b] = said
        usual = reference_rate(measured)
        for node, verdict in judge_nodes(nodes, measured, rules).items():
            own = [pair for pair in measured if node in pair.nodes]
            if verdict == "pass" or not own:
                continue
            best = max((pair.gb_per_s for pair in own if pair.gb_per_s is not None), default=None)
            figures = {"best_gb_per_s": best, "others_gb_per_s": usual}
            error = next((errors[pair.nodes] for pair in own if pair.nodes in errors), "it did not get through")
            what = f"no all-reduce with it ends: {error}" if best is None else _slow_text(best, usual)
            if verdict == "undecided":
                partners = sorted({each for pair in own for each in pair.nodes} - {node})
                what += f"; it or {format_nodes(partners)} is bad"
            reports[node] = _with_check(
                reports[node], CheckResult("pairs", "warn" if verdict == "warn" else "fail", what, None, figures)
            )

    def _whole(self, nodes: list[int], reports: dict[int, NodeCheckReport], checks: list[CheckResult]) -> float | None:
        expected = expected_between_nodes(self.machine, len(nodes), self.setup.fabric) if self.on_gpu else None
        world = self._world("all", tuple(nodes), expected, whole=True)
        found = self._measure([world])[world]
        rates = [each.rate(median=self.full) for each in found.values()]
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(nodes):
            silent = [node for node, each in found.items() if each.rate(median=self.full) is None]
            why = next((each.error for each in found.values() if each.error), "no answer")
            what = f"the all-reduce among all nodes failed on {format_nodes(silent)}: {why}"
            checks.append(CheckResult("all-reduce", "fail", what))
        else:
            checks.append(judge_rate("all-reduce", min(known), expected, world.request.mebibytes[-1]))
        self._prove_fabric(found, reports, checks)
        return min(known) if known else None

    def _prove_fabric(
        self, found: Mapping[int, FabricProbeResult], reports: dict[int, NodeCheckReport], checks: list[CheckResult]
    ) -> None:
        proofs = {node: CheckResult.from_plain(each.fabric) for node, each in found.items() if each.fabric is not None}
        wrong = [node for node, proof in proofs.items() if proof.verdict == "fail"]
        if len(wrong) == len(proofs) and wrong:
            checks.append(proofs[wrong[0]])
            return
        for node in wrong:
            reports[node] = _with_check(reports[node], proofs[node])
        if proofs and not wrong:
            checks.append(next(iter(proofs.values())))

    def _world(
        self, name: str, nodes: tuple[int, ...], expected: ExpectedRate | None, *, whole: bool = False
    ) -> FabricProbeGroup:
        usual = _GPU_MEBIBYTES if self.on_gpu else _CPU_MEBIBYTES
        size = float(expected.mebibytes) if expected is not None and expected.mebibytes else usual
        seconds = 60.0 if self.full and whole else self.limits.measuring
        kind = "cuda" if self.on_gpu else "cpu"
        request = ProbeRequest(kind, (size,), seconds, timeout_seconds=self.limits.world)
        return FabricProbeGroup(name, nodes, request, proves_fabric=whole)

    def _measure(self, worlds: list[FabricProbeGroup]) -> dict[FabricProbeGroup, dict[int, FabricProbeResult]]:
        self._tell({"worlds": [world.to_plain() for world in worlds]})
        keys = [f"result/{world.name}/{node}" for world in worlds for node in world.nodes]
        patience = self.limits.world + max(world.request.seconds for world in worlds) + 30.0
        found = self.board.get(keys, patience)
        return {
            world: {
                node: FabricProbeResult(**found.get(f"result/{world.name}/{node}", {"error": "it went silent"}))
                for node in world.nodes
            }
            for world in worlds
        }

    def _tell(self, plan: dict[str, Any]) -> None:
        self._round += 1
        self.board.put(f"plan/{self._round}", plan)

    def _seconds(self) -> float:
        return time.monotonic() - self.started


def check_clock(offset_seconds: float) -> CheckResult:
    """How far a node's clock is from node 0's."""
    off = abs(offset_seconds)
    verdict = "fail" if off > _CLOCK_FAIL_SECONDS else "warn" if off > _CLOCK_WARN_SECONDS else "pass"
    hint = None if verdict == "pass" else "does chrony or ntpd run on it?"
    return CheckResult(
        "clock", verdict, f"its clock is {off:.2f} s from node 0's", hint, {"offset_seconds": offset_seconds}
    )


def check_inside(found: FabricProbeResult, machine: Machine | None) -> list[CheckResult]:
    """What a node's own GPUs reach."""
    if found.error is not None:
        return [CheckResult("inside", "fail", f"its own GPUs do not get through: {found.error}")]
    checks = []
    if tflops := found.figures.get("tflops"):
        known = expected_rates().gpus.get(find_gpu(machine.gpu).name) if machine is not None else None
        low = known is not None and min(tflops) < known.tflops.warn
        usual = f", {known.tflops.expected:.0f} are usual" if known is not None else ""
        what = f"its slowest GPU reaches {min(tflops):.0f} TFLOP/s in products{usual}"
        checks.append(CheckResult("products", "warn" if low else "pass", what, measured={"tflops": tflops}))
    if (rate := found.rate(median=False)) is not None:
        size = found.figures["all_reduces"][-1]["mebibytes"]
        checks.append(judge_rate("inside", rate, expected_in_node(machine), size))
    return checks


def judge_rate(name: str, rate: float, expected: ExpectedRate | None, mebibytes: float) -> CheckResult:
    """Hold an all-reduce against what it should reach."""
    measured = {"gb_per_s": rate, "mebibytes": mebibytes}
    told = f"all-reduce of {mebibytes:g} MiB reaches {rate:.3g} GB/s"
    if expected is None:
        return CheckResult(name, "pass", f"{told}; measured, nothing to compare with", measured=measured)
    measured |= {"expected_gb_per_s": expected.gb_per_s, "source": expected.source}
    what = f"{told}, {expected.gb_per_s:.3g} expected ({expected.source})"
    verdict = expected.verdict(rate)
    hint = None if verdict == "pass" else "is the fabric proven, and is nothing else running on the nodes?"
    return CheckResult(name, verdict, what, hint, measured)


def _slow_text(best: float, usual: float | None) -> str:
    if not usual or best >= usual:
        return f"all-reduces with it reach {best:.3g} GB/s, less than the machine should"
    return f"all-reduces with it reach {best:.3g} GB/s, others {usual:.3g} ({1 - best / usual:.0%} less)"


def _is_silent(report: NodeCheckReport) -> bool:
    return any(check.name == _SILENT_CHECK for check in report.checks)


def _with_check(report: NodeCheckReport, check: CheckResult) -> NodeCheckReport:
    return replace(report, checks=(*report.checks, check))
