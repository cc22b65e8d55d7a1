"""What node 0 decides: which nodes measure together next, and when enough is known. The others follow its instructions.

Bad nodes are found by all-reduces between pairs of nodes. A pair is as slow as the slower of its two nodes. So a node
is as fast as the best pair it was in, and it is bad if it was slow together with a node that is known to be good.
Neighbours are paired first. A node that was in a slow pair (or in none) is paired again with a known-good node, until
every node is decided or no further pair could decide anything.

Thresholds are those of Azure's node health checks (ai-infrastructure-on-azure): a pair that is 3.5 % slower than the
others is a warning, 7 % is bad. If there are enough pairs to know their spread, a bad pair must also be an outlier (a
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
    """The all-reduce rate of two nodes; None if it did not finish."""

    nodes: tuple[int, int]
    gb_per_s: float | None


@dataclass(frozen=True)
class PairRules:
    """How much slower than the others a pair may be, as fractions; and the rate below which it is bad in any case."""

    warn: float = 0.035
    replace: float = 0.07
    bad_below_gb_per_s: float | None = None


def next_pairs(nodes: Sequence[int], measured: Sequence[PairRate], rules: PairRules) -> list[tuple[int, int]]:
    """Return which pairs to measure next, each node in one of them at most; none if nothing more can be decided."""
    if len(nodes) < 2:
        return []
    if not measured:
        return _neighbour_pairs(nodes)
    tried = {frozenset(pair.nodes) for pair in measured}
    if len(nodes) == 3 and len(tried) < 3:
        # A single pair cannot be compared with another one: of three nodes, each pair is measured.
        missing = [
            pair for pair in ((0, 1), (0, 2), (1, 2)) if frozenset((nodes[pair[0]], nodes[pair[1]])) not in tried
        ]
        return [(nodes[missing[0][0]], nodes[missing[0][1]])]
    verdicts = judge_nodes(nodes, measured, rules)
    open_nodes = [node for node in nodes if verdicts[node] == "undecided"]
    good = [node for node in nodes if verdicts[node] == "pass"]
    if not good:
        rounds = max(sum(node in pair.nodes for pair in measured) for node in nodes)
        # If no pair finishes, each round takes its whole timeout, and the fabric is the likelier cause.
        most = _MAX_REMATCHES if reference_rate(measured) is not None else 2
        return _match_pairs(nodes, nodes, tried) if rounds < most else []
    return _match_pairs(open_nodes, good, tried)


def judge_nodes(nodes: Sequence[int], measured: Sequence[PairRate], rules: PairRules) -> dict[int, NodeVerdict]:
    """Return what is known about each node."""
    verdict_of_pair = {pair: _pair_verdict(pair, measured, rules) for pair in measured}
    good = {node for pair, verdict in verdict_of_pair.items() if verdict == "pass" for node in pair.nodes}
    verdicts: dict[int, NodeVerdict] = {}
    for node in nodes:
        own_pairs = [pair for pair in measured if node in pair.nodes]
        with_good = [verdict_of_pair[pair] for pair in own_pairs if set(pair.nodes) - {node} <= good - {node}]
        if node in good:
            verdicts[node] = "pass"
        elif not with_good:
            verdicts[node] = "undecided"
        else:
            verdicts[node] = "warn" if "warn" in with_good else "replace"
    return verdicts


def reference_rate(measured: Sequence[PairRate]) -> float | None:
    """Return what healthy pairs reach: the median of the faster half, which contains no bad node if these are few."""
    values = sorted((pair.gb_per_s for pair in measured if pair.gb_per_s is not None), reverse=True)
    return statistics.median(values[: max(1, len(measured) // 2)]) if values else None


def _pair_verdict(pair: PairRate, measured: Sequence[PairRate], rules: PairRules) -> Literal["pass", "warn", "replace"]:
    if pair.gb_per_s is None or (rules.bad_below_gb_per_s is not None and pair.gb_per_s < rules.bad_below_gb_per_s):
        return "replace"
    reference = reference_rate(measured)
    short = 1 - pair.gb_per_s / reference if reference else 0.0
    if short < rules.warn or not _stands_out(pair.gb_per_s, measured):
        return "pass"
    return "replace" if short >= rules.replace else "warn"


def _stands_out(value: float, measured: Sequence[PairRate]) -> bool:
    """Whether a rate is an outlier; always true while there are too few pairs to know."""
    values = [pair.gb_per_s for pair in measured if pair.gb_per_s is not None]
    if len(values) < _ENOUGH_PAIRS:
        return True
    middle = statistics.median(values)
    spread = statistics.median(abs(other - middle) for other in values)
    return spread == 0 or _MAD_TO_SIGMA * (value - middle) / spread < _OUTLIER_Z


def _neighbour_pairs(nodes: Sequence[int]) -> list[tuple[int, int]]:
    return [(nodes[index], nodes[index + 1]) for index in range(0, len(nodes) - 1, 2)]


def _match_pairs(
    open_nodes: Sequence[int], partners: Sequence[int], tried: set[frozenset[int]]
) -> list[tuple[int, int]]:
    """Give each undecided node a partner that it was not paired with yet; no node is in two pairs."""
    taken: set[int] = set()
    pairs: list[tuple[int, int]] = []
    for node in open_nodes:
        if node in taken:
            continue
        partner = next(
            (
                other
                for other in partners
                if other != node and other not in taken and frozenset((node, other)) not in tried
            ),
            None,
        )
        if partner is not None:
            taken |= {node, partner}
            pairs.append((min(node, partner), max(node, partner)))
    return pairs


_GPU_MEBIBYTES, _CPU_MEBIBYTES = 1024.0, 4.0
# CPUs are shared with whatever else runs on a node, and so is the network between them.
_CPU_PAIRS = PairRules(warn=0.5, replace=0.8)
_FETCH_VERDICT_SECONDS = 15.0  # for the others to fetch the verdict before the key-value server ends
_SILENT_CHECK = "report"
_CLOCK_WARN_SECONDS, _CLOCK_FAIL_SECONDS = 2.0, 300.0


@dataclass(frozen=True)
class PreflightTimeouts:
    """How long the parts of preflight may take."""

    report_seconds: float = 180.0
    """Until every node has checked itself."""
    measurement_seconds: float = 120.0
    """For one measurement, from the start of its processes."""
    sample_seconds: float = 0.5
    """How long all-reduces of one message size are repeated."""


@dataclass
class PreflightCoordinator:
    """What node 0 does besides checking itself: it gives instructions to all nodes and draws the verdict."""

    key_values: KeyValueClient
    nodes: int
    on_gpu: bool
    setup: FabricSetup
    machine: Machine | None
    full: bool
    timeouts: PreflightTimeouts
    started: float = field(default_factory=time.monotonic)
    _round: int = 0

    def run(self) -> None:
        """Lead all nodes to a verdict and publish it, whatever happens."""
        try:
            verdict = self._verdict()
        except Exception as error:
            verdict = PreflightVerdict("fail", f"preflight itself failed: {error}", seconds=self._seconds())
        self._publish({"verdict": verdict.to_plain()})
        present = [report.node for report in verdict.nodes if report.node and not _is_silent(report)]
        self.key_values.get([f"bye/{node}" for node in present], _FETCH_VERDICT_SECONDS)

    def _verdict(self) -> PreflightVerdict:
        reports = self._wait_for_reports()
        able = [node for node, report in reports.items() if worst_verdict(report.checks) != "fail"]
        checks = [compare_versions({node: reports[node].versions for node in able})] if able else []
        rate: float | None = None
        if len(able) > 1 and worst_verdict(checks) != "fail":
            self._find_bad_pairs(able, reports)
            able = [node for node in able if worst_verdict(reports[node].checks) != "fail"]
            if len(able) == self.nodes:
                rate = self._measure_all_nodes(able, reports, checks)
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

    def _wait_for_reports(self) -> dict[int, NodeCheckReport]:
        """Return what each node found by itself; a node that does not report has failed."""
        answers = self.key_values.get([f"node/{node}" for node in range(self.nodes)], self.timeouts.report_seconds)
        reports: dict[int, NodeCheckReport] = {}
        for node in range(self.nodes):
            report = answers.get(f"node/{node}")
            if report is None:
                what = f"did not report within {self.timeouts.report_seconds:.0f} s"
                reports[node] = NodeCheckReport(node, "unknown host", (CheckResult(_SILENT_CHECK, "fail", what),))
            else:
                reports[node] = NodeCheckReport.from_plain(report)
        return self._compare_products(reports)

    def _compare_products(self, reports: dict[int, NodeCheckReport]) -> dict[int, NodeCheckReport]:
        """Compare matrix products: a node is as fast as its slowest GPU, and one far below the others is bad."""
        slowest = {
            node: min(check.measured["tflops"])
            for node, report in reports.items()
            for check in report.checks
            if check.name == "products" and check.measured.get("tflops")
        }
        if len(slowest) < 3:
            return reports
        reference = statistics.median(slowest.values())
        for node, tflops in slowest.items():
            shortfall = 1 - tflops / reference
            if shortfall >= self.setup.pairs.warn:
                what = (
                    f"its slowest GPU reaches {tflops:.0f} TFLOP/s in products, "
                    f"others {reference:.0f} ({shortfall:.0%} less)"
                )
                verdict = "fail" if shortfall >= self.setup.pairs.replace else "warn"
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
            return  # the pair is measured as "all nodes"
        while chosen := next_pairs(nodes, measured, rules):
            groups = [self._probe_group(f"pair-{self._round + 1}-{a}-{b}", (a, b), expected) for a, b in chosen]
            for group, results in self._measure(groups).items():
                a, b = group.nodes
                by_node = [result.rate(median=False) for result in results.values()]
                rate = (
                    min((known for known in by_node if known is not None), default=None)
                    if None not in by_node
                    else None
                )
                measured.append(PairRate((a, b), rate))
                if first_error := next((result.error for result in results.values() if result.error), None):
                    errors[a, b] = first_error
        reference = reference_rate(measured)
        for node, verdict in judge_nodes(nodes, measured, rules).items():
            own_pairs = [pair for pair in measured if node in pair.nodes]
            if verdict == "pass" or not own_pairs:
                continue
            best = max((pair.gb_per_s for pair in own_pairs if pair.gb_per_s is not None), default=None)
            figures = {"best_gb_per_s": best, "others_gb_per_s": reference}
            error = next((errors[pair.nodes] for pair in own_pairs if pair.nodes in errors), "it did not get through")
            what = f"no all-reduce with it ends: {error}" if best is None else _slow_text(best, reference)
            if verdict == "undecided":
                partners = sorted({partner for pair in own_pairs for partner in pair.nodes} - {node})
                what += f"; it or {format_nodes(partners)} is bad"
            reports[node] = _with_check(
                reports[node], CheckResult("pairs", "warn" if verdict == "warn" else "fail", what, None, figures)
            )

    def _measure_all_nodes(
        self, nodes: list[int], reports: dict[int, NodeCheckReport], checks: list[CheckResult]
    ) -> float | None:
        expected = expected_between_nodes(self.machine, len(nodes), self.setup.fabric) if self.on_gpu else None
        group = self._probe_group("all", tuple(nodes), expected, all_nodes=True)
        results = self._measure([group])[group]
        rates = [result.rate(median=self.full) for result in results.values()]
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(nodes):
            silent = [node for node, result in results.items() if result.rate(median=self.full) is None]
            why = next((result.error for result in results.values() if result.error), "no answer")
            what = f"the all-reduce among all nodes failed on {format_nodes(silent)}: {why}"
            checks.append(CheckResult("all-reduce", "fail", what))
        else:
            checks.append(judge_rate("all-reduce", min(known), expected, group.request.mebibytes[-1]))
        self._check_fabric(results, reports, checks)
        return min(known) if known else None

    def _check_fabric(
        self, results: Mapping[int, FabricProbeResult], reports: dict[int, NodeCheckReport], checks: list[CheckResult]
    ) -> None:
        fabric_checks = {
            node: CheckResult.from_plain(result.fabric) for node, result in results.items() if result.fabric is not None
        }
        wrong = [node for node, fabric_check in fabric_checks.items() if fabric_check.verdict == "fail"]
        if len(wrong) == len(fabric_checks) and wrong:
            checks.append(fabric_checks[wrong[0]])
            return
        for node in wrong:
            reports[node] = _with_check(reports[node], fabric_checks[node])
        if fabric_checks and not wrong:
            checks.append(next(iter(fabric_checks.values())))

    def _probe_group(
        self, name: str, nodes: tuple[int, ...], expected: ExpectedRate | None, *, all_nodes: bool = False
    ) -> FabricProbeGroup:
        default_mebibytes = _GPU_MEBIBYTES if self.on_gpu else _CPU_MEBIBYTES
        mebibytes = float(expected.mebibytes) if expected is not None and expected.mebibytes else default_mebibytes
        seconds = 60.0 if self.full and all_nodes else self.timeouts.sample_seconds
        device = "cuda" if self.on_gpu else "cpu"
        request = ProbeRequest(device, (mebibytes,), seconds, timeout_seconds=self.timeouts.measurement_seconds)
        return FabricProbeGroup(name, nodes, request, proves_fabric=all_nodes)

    def _measure(self, groups: list[FabricProbeGroup]) -> dict[FabricProbeGroup, dict[int, FabricProbeResult]]:
        self._publish({"groups": [group.to_plain() for group in groups]})
        keys = [f"result/{group.name}/{node}" for group in groups for node in group.nodes]
        wait_seconds = self.timeouts.measurement_seconds + max(group.request.seconds for group in groups) + 30.0
        answers = self.key_values.get(keys, wait_seconds)
        return {
            group: {
                node: FabricProbeResult(**answers.get(f"result/{group.name}/{node}", {"error": "it went silent"}))
                for node in group.nodes
            }
            for group in groups
        }

    def _publish(self, instruction: dict[str, Any]) -> None:
        self._round += 1
        self.key_values.put(f"plan/{self._round}", instruction)

    def _seconds(self) -> float:
        return time.monotonic() - self.started


def check_clock(offset_seconds: float) -> CheckResult:
    """Check how far a node's clock is from node 0's."""
    offset = abs(offset_seconds)
    verdict = "fail" if offset > _CLOCK_FAIL_SECONDS else "warn" if offset > _CLOCK_WARN_SECONDS else "pass"
    hint = None if verdict == "pass" else "does chrony or ntpd run on it?"
    return CheckResult(
        "clock", verdict, f"its clock is {offset:.2f} s from node 0's", hint, {"offset_seconds": offset_seconds}
    )


def check_inside(result: FabricProbeResult, machine: Machine | None) -> list[CheckResult]:
    """Check the matrix products of a node's GPUs and the all-reduce between them."""
    if result.error is not None:
        return [CheckResult("inside", "fail", f"its own GPUs do not get through: {result.error}")]
    checks = []
    if tflops := result.figures.get("tflops"):
        known = expected_rates().gpus.get(find_gpu(machine.gpu).name) if machine is not None else None
        is_slow = known is not None and min(tflops) < known.tflops.warn
        reference_text = f", {known.tflops.expected:.0f} are usual" if known is not None else ""
        what = f"its slowest GPU reaches {min(tflops):.0f} TFLOP/s in products{reference_text}"
        checks.append(CheckResult("products", "warn" if is_slow else "pass", what, measured={"tflops": tflops}))
    if (rate := result.rate(median=False)) is not None:
        size = result.figures["all_reduces"][-1]["mebibytes"]
        checks.append(judge_rate("inside", rate, expected_in_node(machine), size))
    return checks


def judge_rate(name: str, rate: float, expected: ExpectedRate | None, mebibytes: float) -> CheckResult:
    """Compare an all-reduce with the rate that is expected."""
    measured = {"gb_per_s": rate, "mebibytes": mebibytes}
    text = f"all-reduce of {mebibytes:g} MiB reaches {rate:.3g} GB/s"
    if expected is None:
        return CheckResult(name, "pass", f"{text}; measured, nothing to compare with", measured=measured)
    measured |= {"expected_gb_per_s": expected.gb_per_s, "source": expected.source}
    what = f"{text}, {expected.gb_per_s:.3g} expected ({expected.source})"
    verdict = expected.verdict(rate)
    hint = None if verdict == "pass" else "is the fabric proven, and is nothing else running on the nodes?"
    return CheckResult(name, verdict, what, hint, measured)


def _slow_text(best: float, reference: float | None) -> str:
    if not reference or best >= reference:
        return f"all-reduces with it reach {best:.3g} GB/s, less than the machine should"
    return f"all-reduces with it reach {best:.3g} GB/s, others {reference:.3g} ({1 - best / reference:.0%} less)"


def _is_silent(report: NodeCheckReport) -> bool:
    return any(check.name == _SILENT_CHECK for check in report.checks)


def _with_check(report: NodeCheckReport, check: CheckResult) -> NodeCheckReport:
    return replace(report, checks=(*report.checks, check))
