"""What node 0 decides: who measures with whom next, and when enough is known. The others only do as they are told."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainshed.catalog import Machine, find_gpu
from trainshed.catalog.expected_rates import Expected, expected_between, expected_inside, expected_rates
from trainshed.engines.probe_request import ProbeRequest
from trainshed.launch.fabric import FabricSetup
from trainshed.launch.preflight.board import Board
from trainshed.launch.preflight.checks import Check, worst
from trainshed.launch.preflight.node import compare_versions, nodes_in_words
from trainshed.launch.preflight.pairs import PairRate, PairRules, judge, next_pairs, reference_rate
from trainshed.launch.preflight.verdict import NodeReport, PreflightVerdict, conclude
from trainshed.launch.preflight.worlds import Found, World

_GPU_MEBIBYTES, _CPU_MEBIBYTES = 1024.0, 4.0
# Processors are shared with whatever else runs on a node, and so are the links between them.
_CPU_PAIRS = PairRules(warn=0.5, replace=0.8)
_BYE_SECONDS = 15.0  # for the others to fetch the verdict before the board goes away
_SILENT = "report"
_CLOCK_WARN_SECONDS, _CLOCK_FAIL_SECONDS = 2.0, 300.0


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds."""

    reports: float = 180.0
    """Until every node has looked at itself."""
    world: float = 120.0
    """One measurement, from the start of its processes."""
    measuring: float = 0.5
    """Of one size of message."""


@dataclass
class Coordinator:
    """Node 0's part."""

    board: Board
    nodes: int
    on_gpu: bool
    setup: FabricSetup
    machine: Machine | None
    full: bool
    limits: Limits
    started: float = field(default_factory=time.monotonic)
    _round: int = 0

    def run(self) -> None:
        """Lead the others to a verdict and put it on the board, whatever happens."""
        try:
            verdict = self._verdict()
        except Exception as error:
            verdict = PreflightVerdict("fail", f"preflight itself failed: {error}", seconds=self._seconds())
        self._tell({"verdict": verdict.to_plain()})
        came = [report.node for report in verdict.nodes if report.node and not _silent(report)]
        self.board.get([f"bye/{node}" for node in came], _BYE_SECONDS)

    def _verdict(self) -> PreflightVerdict:
        reports = self._reports()
        able = [node for node, report in reports.items() if worst(report.checks) != "fail"]
        checks = [compare_versions({node: reports[node].versions for node in able})] if able else []
        rate: float | None = None
        if len(able) > 1 and worst(checks) != "fail":
            self._find_bad_pairs(able, reports)
            able = [node for node in able if worst(reports[node].checks) != "fail"]
            if len(able) == self.nodes:
                rate = self._whole(able, reports, checks)
            else:
                checks.append(Check("all-reduce", "skipped", "not measured among all: there are nodes to replace"))
        return conclude(
            [reports[node] for node in sorted(reports)],
            checks,
            fabric=self.setup.fabric,
            bus_gb_per_s=rate,
            seconds=self._seconds(),
        )

    def _reports(self) -> dict[int, NodeReport]:
        """What each node found by itself; one that is silent is bad."""
        found = self.board.get([f"node/{node}" for node in range(self.nodes)], self.limits.reports)
        reports: dict[int, NodeReport] = {}
        for node in range(self.nodes):
            plain = found.get(f"node/{node}")
            if plain is None:
                what = f"did not report within {self.limits.reports:.0f} s"
                reports[node] = NodeReport(node, "unknown host", (Check(_SILENT, "fail", what),))
            else:
                reports[node] = NodeReport.from_plain(plain)
        return self._compare_products(reports)

    def _compare_products(self, reports: dict[int, NodeReport]) -> dict[int, NodeReport]:
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
                reports[node] = _with(reports[node], Check("slow GPU", verdict, what))
        return reports

    def _find_bad_pairs(self, nodes: list[int], reports: dict[int, NodeReport]) -> None:
        expected = expected_between(self.machine, 2, self.setup.fabric) if self.on_gpu else None
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
        for node, verdict in judge(nodes, measured, rules).items():
            own = [pair for pair in measured if node in pair.nodes]
            if verdict == "pass" or not own:
                continue
            best = max((pair.gb_per_s for pair in own if pair.gb_per_s is not None), default=None)
            figures = {"best_gb_per_s": best, "others_gb_per_s": usual}
            error = next((errors[pair.nodes] for pair in own if pair.nodes in errors), "it did not get through")
            what = f"no all-reduce with it ends: {error}" if best is None else _slow(best, usual)
            if verdict == "undecided":
                partners = sorted({each for pair in own for each in pair.nodes} - {node})
                what += f"; it or {nodes_in_words(partners)} is bad"
            reports[node] = _with(
                reports[node], Check("pairs", "warn" if verdict == "warn" else "fail", what, None, figures)
            )

    def _whole(self, nodes: list[int], reports: dict[int, NodeReport], checks: list[Check]) -> float | None:
        expected = expected_between(self.machine, len(nodes), self.setup.fabric) if self.on_gpu else None
        world = self._world("all", tuple(nodes), expected, whole=True)
        found = self._measure([world])[world]
        rates = [each.rate(median=self.full) for each in found.values()]
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(nodes):
            silent = [node for node, each in found.items() if each.rate(median=self.full) is None]
            why = next((each.error for each in found.values() if each.error), "no answer")
            what = f"the all-reduce among all nodes failed on {nodes_in_words(silent)}: {why}"
            checks.append(Check("all-reduce", "fail", what))
        else:
            checks.append(judge_rate("all-reduce", min(known), expected, world.request.mebibytes[-1]))
        self._prove_fabric(found, reports, checks)
        return min(known) if known else None

    def _prove_fabric(self, found: Mapping[int, Found], reports: dict[int, NodeReport], checks: list[Check]) -> None:
        proofs = {node: Check.from_plain(each.fabric) for node, each in found.items() if each.fabric is not None}
        wrong = [node for node, proof in proofs.items() if proof.verdict == "fail"]
        if len(wrong) == len(proofs) and wrong:
            checks.append(proofs[wrong[0]])
            return
        for node in wrong:
            reports[node] = _with(reports[node], proofs[node])
        if proofs and not wrong:
            checks.append(next(iter(proofs.values())))

    def _world(self, name: str, nodes: tuple[int, ...], expected: Expected | None, *, whole: bool = False) -> World:
        usual = _GPU_MEBIBYTES if self.on_gpu else _CPU_MEBIBYTES
        size = float(expected.mebibytes) if expected is not None and expected.mebibytes else usual
        seconds = 60.0 if self.full and whole else self.limits.measuring
        kind = "cuda" if self.on_gpu else "cpu"
        request = ProbeRequest(kind, (size,), seconds, timeout_seconds=self.limits.world)
        return World(name, nodes, request, proves_fabric=whole)

    def _measure(self, worlds: list[World]) -> dict[World, dict[int, Found]]:
        self._tell({"worlds": [world.to_plain() for world in worlds]})
        keys = [f"result/{world.name}/{node}" for world in worlds for node in world.nodes]
        patience = self.limits.world + max(world.request.seconds for world in worlds) + 30.0
        found = self.board.get(keys, patience)
        return {
            world: {
                node: Found(**found.get(f"result/{world.name}/{node}", {"error": "it went silent"}))
                for node in world.nodes
            }
            for world in worlds
        }

    def _tell(self, plan: dict[str, Any]) -> None:
        self._round += 1
        self.board.put(f"plan/{self._round}", plan)

    def _seconds(self) -> float:
        return time.monotonic() - self.started


def check_clock(offset_seconds: float) -> Check:
    """How far a node's clock is from node 0's."""
    off = abs(offset_seconds)
    verdict = "fail" if off > _CLOCK_FAIL_SECONDS else "warn" if off > _CLOCK_WARN_SECONDS else "pass"
    hint = None if verdict == "pass" else "does chrony or ntpd run on it?"
    return Check("clock", verdict, f"its clock is {off:.2f} s from node 0's", hint, {"offset_seconds": offset_seconds})


def check_inside(found: Found, machine: Machine | None) -> list[Check]:
    """What a node's own GPUs reach."""
    if found.error is not None:
        return [Check("inside", "fail", f"its own GPUs do not get through: {found.error}")]
    checks = []
    if tflops := found.figures.get("tflops"):
        known = expected_rates().gpus.get(find_gpu(machine.gpu).name) if machine is not None else None
        low = known is not None and min(tflops) < known.tflops.warn
        usual = f", {known.tflops.expected:.0f} are usual" if known is not None else ""
        what = f"its slowest GPU reaches {min(tflops):.0f} TFLOP/s in products{usual}"
        checks.append(Check("products", "warn" if low else "pass", what, measured={"tflops": tflops}))
    if (rate := found.rate(median=False)) is not None:
        size = found.figures["all_reduces"][-1]["mebibytes"]
        checks.append(judge_rate("inside", rate, expected_inside(machine), size))
    return checks


def judge_rate(name: str, rate: float, expected: Expected | None, mebibytes: float) -> Check:
    """Hold an all-reduce against what it should reach."""
    measured = {"gb_per_s": rate, "mebibytes": mebibytes}
    told = f"all-reduce of {mebibytes:g} MiB reaches {rate:.3g} GB/s"
    if expected is None:
        return Check(name, "pass", f"{told}; measured, nothing to compare with", measured=measured)
    measured |= {"expected_gb_per_s": expected.gb_per_s, "source": expected.source}
    what = f"{told}, {expected.gb_per_s:.3g} expected ({expected.source})"
    verdict = expected.verdict(rate)
    hint = None if verdict == "pass" else "is the fabric proven, and is nothing else running on the nodes?"
    return Check(name, verdict, what, hint, measured)


def _slow(best: float, usual: float | None) -> str:
    if not usual or best >= usual:
        return f"all-reduces with it reach {best:.3g} GB/s, less than the machine should"
    return f"all-reduces with it reach {best:.3g} GB/s, others {usual:.3g} ({1 - best / usual:.0%} less)"


def _silent(report: NodeReport) -> bool:
    return any(check.name == _SILENT for check in report.checks)


def _with(report: NodeReport, check: Check) -> NodeReport:
    return replace(report, checks=(*report.checks, check))
