"""Which node is the bad one, from all-reduces between pairs of nodes. Pure: no network, no clock.

A pair is as slow as the slower of its two nodes. So a node is as fast as the best pair it was in, and bad once it was
slow together with a node that is known to be good. Neighbours are paired first; who was in a slow pair (or sat out) is
paired again with a known-good node, until every node is decided or no further pair could decide anything.

Thresholds are those of Azure's node health checks (ai-infrastructure-on-azure): 3.5 % below the others is worth a look,
7 % is bad; where there are enough pairs to know how much they spread, a bad one must also stand out from that (a
modified z-score below -2).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

NodeVerdict = Literal["pass", "warn", "replace", "undecided"]

_ENOUGH_PAIRS = 8
_OUTLIER_Z = -2.0
_MAD_TO_SIGMA = 0.6745  # of a normal distribution
_MOST_REMATCHES = 4


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
        return _neighbours(nodes)
    tried = {frozenset(pair.nodes) for pair in measured}
    if len(nodes) == 3 and len(tried) < 3:
        # A single pair has nothing to be compared with: among three, each pair is measured.
        missing = [
            pair for pair in ((0, 1), (0, 2), (1, 2)) if frozenset((nodes[pair[0]], nodes[pair[1]])) not in tried
        ]
        return [(nodes[missing[0][0]], nodes[missing[0][1]])]
    verdicts = judge(nodes, measured, rules)
    open_nodes = [node for node in nodes if verdicts[node] == "undecided"]
    good = [node for node in nodes if verdicts[node] == "pass"]
    if not good:
        rounds = max(sum(node in pair.nodes for pair in measured) for node in nodes)
        # Where nobody gets through, each round may cost its whole patience, and the fabric is the likelier culprit.
        most = _MOST_REMATCHES if reference_rate(measured) is not None else 2
        return _matching(nodes, nodes, tried) if rounds < most else []
    return _matching(open_nodes, good, tried)


def judge(nodes: Sequence[int], measured: Sequence[PairRate], rules: PairRules) -> dict[int, NodeVerdict]:
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


def _neighbours(nodes: Sequence[int]) -> list[tuple[int, int]]:
    return [(nodes[index], nodes[index + 1]) for index in range(0, len(nodes) - 1, 2)]


def _matching(open_nodes: Sequence[int], partners: Sequence[int], tried: set[frozenset[int]]) -> list[tuple[int, int]]:
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
