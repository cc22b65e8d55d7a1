"""Alarms: a loss that jumps, a run that diverges, a rank that is slower than its peers.

All are decided from the run's events alone, so that they work for every engine, and none of them changes the training.
A state that lasts is named once and then only now and then.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainshed.observe.health import format_ranks

SPIKE_SIGMAS = 6.0
"""A loss that is so many standard deviations above the mean of the steps before it is a spike."""
SPIKE_FRACTION = 0.05
"""A smaller jump than this part of the mean is none, however even the losses before it were."""
SPIKE_WINDOW = 100
_SPIKE_MIN_STEPS = 30
_SPIKE_QUIET_STEPS = 50

DIVERGENCE_WINDOW = 100
"""Over so many steps the mean loss is taken that is compared with the best such mean."""
DIVERGENCE_FRACTION = 0.1
"""So far above the best mean, as a part of it, a run counts as diverging."""
_DIVERGENCE_QUIET_STEPS = 500

SLOWER = 1.25
"""A rank that computes so many times as long as the median of the other ranks of its pipeline stage is slow.

Routing to experts and the documents of a batch make even ranks differ by some percent, in single steps by more.
"""
_STRAGGLER_QUIET_WINDOWS = 20


@dataclass(frozen=True)
class Alarm:
    """What an `alarm` event says."""

    name: Literal["loss_spike", "divergence", "straggler"]
    what: str
    step: int | None = None
    ranks: list[int] | None = None
    hosts: list[str] | None = None


class AlarmWatcher:
    """Follows the events of one attempt and returns the alarms that they give.

    `stage_ranks` is how many ranks share the work of a pipeline stage: only these are compared. `ranks_per_node` tells
    the node and the GPU of a rank.
    """

    def __init__(self, *, stage_ranks: int | None = None, ranks_per_node: int | None = None) -> None:
        self._losses = LossWatcher()
        self._stragglers = StragglerWatcher(stage_ranks)
        self._ranks_per_node = ranks_per_node
        self._hosts: Sequence[str] = ()
        self._on_gpus = False

    def alarms(self, event: Mapping[str, Any]) -> Iterator[Alarm]:
        """Yield the alarms that an event gives rise to."""
        if event["kind"] == "start":
            self._hosts = event.get("hosts") or ()
            self._on_gpus = event["device"] != "cpu"
        elif event["kind"] == "step" and event["loss"] is not None:
            yield from self._losses.alarms(event["step"], event["loss"])
        elif event["kind"] == "ranks":
            slow = self._stragglers.lasting(event["compute_seconds"])
            if slow:
                yield self._straggler_alarm(event, slow)

    def _straggler_alarm(self, event: Mapping[str, Any], slow: Mapping[int, float]) -> Alarm:
        ranks, compute = sorted(slow), event["compute_seconds"]
        worst = max(slow, key=lambda rank: slow[rank])
        hosts = list(dict.fromkeys(host for rank in ranks if (host := self._host(rank)) is not None))
        place = (
            f" ({self._place(ranks[0])})" if len(ranks) == 1 and hosts else f" on {', '.join(hosts)}" if hosts else ""
        )
        verb, others = ("computes", "it") if len(ranks) == 1 else ("compute", "them")
        most = "" if len(ranks) == 1 else " up to"
        what = (
            f"{format_ranks(ranks)}{place} {verb}{most} {slow[worst]:.1f} times as long as the others of the stage "
            f"({compute[worst]:.3g} s of a step, {compute[worst] / slow[worst]:.3g} s is usual), two windows in a row: "
            f"all ranks wait for {others}"
        )
        return Alarm("straggler", what, event["step"], ranks, hosts or None)

    def _host(self, rank: int) -> str | None:
        node = rank // self._ranks_per_node if self._ranks_per_node else 0
        return self._hosts[node] if node < len(self._hosts) else None

    def _place(self, rank: int) -> str:
        gpu = f", GPU {rank % self._ranks_per_node}" if self._on_gpus and self._ranks_per_node else ""
        return f"{self._host(rank)}{gpu}"


class LossWatcher:
    """Notices spikes of the loss, and a run whose loss rises for long."""

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._recent: deque[float] = deque(maxlen=DIVERGENCE_WINDOW)
        self._best: tuple[float, int] | None = None
        self._quiet_until = {"loss_spike": 0, "divergence": 0}
        self._spikes_in_a_row = 0

    def alarms(self, step: int, loss: float) -> Iterator[Alarm]:
        """Yield what is wrong with the loss of a step, in the light of the steps before it."""
        if (spike := self._spike(loss)) is not None:
            yield from self._once("loss_spike", step, _SPIKE_QUIET_STEPS, spike)
        self._recent.append(loss)
        if len(self._recent) < DIVERGENCE_WINDOW:
            return
        mean = statistics.fmean(self._recent)
        if self._best is None or mean < self._best[0]:
            self._best = mean, step
            return
        best, best_step = self._best
        if mean - best > DIVERGENCE_FRACTION * abs(best):
            above = f"{(mean - best) / abs(best):.0%} above its best ({best:.4f} at step {best_step + 1:,})"
            what = f"the mean loss of the last {DIVERGENCE_WINDOW} steps is {mean:.4f}, {above}: the run diverges"
            yield from self._once("divergence", step, _DIVERGENCE_QUIET_STEPS, what)

    def _spike(self, loss: float) -> str | None:
        """Return what is to be said of a spike. Its loss does not widen the window, unless it has come to stay."""
        if len(self._before) >= _SPIKE_MIN_STEPS:
            mean, sigma = statistics.fmean(self._before), statistics.pstdev(self._before)
            above = loss - mean
            if above > max(SPIKE_SIGMAS * sigma, SPIKE_FRACTION * abs(mean)):
                self._spikes_in_a_row += 1
                if self._spikes_in_a_row >= _SPIKE_MIN_STEPS:
                    self._before.clear()
                sigmas = f"{above / sigma:.0f} standard deviations" if sigma else f"{above:.4f}"
                return (
                    f"the loss jumped to {loss:.4f}: {sigmas} above the {len(self._before) or 'last'} steps before it"
                )
        self._spikes_in_a_row = 0
        self._before.append(loss)
        return None

    def _once(
        self, name: Literal["loss_spike", "divergence"], step: int, quiet_steps: int, what: str
    ) -> Iterator[Alarm]:
        if step >= self._quiet_until[name]:
            self._quiet_until[name] = step + quiet_steps
            yield Alarm(name, what, step)


class StragglerWatcher:
    """Finds ranks that are slow in two windows in a row."""

    def __init__(self, stage_ranks: int | None = None) -> None:
        self._stage_ranks = stage_ranks
        self._slow_before: set[int] = set()
        self._quiet_windows: dict[int, int] = {}

    def lasting(self, compute_seconds: Sequence[float | None]) -> dict[int, float]:
        """Return the ranks that were slow in the last window too and are to be named now, and how slow they are."""
        slow = slow_ranks(compute_seconds, self._stage_ranks or len(compute_seconds))
        lasting = {rank: factor for rank, factor in slow.items() if rank in self._slow_before}
        # A rank that has recovered is named again if it is slow again.
        self._quiet_windows = {
            rank: windows - 1 for rank, windows in self._quiet_windows.items() if rank in slow and windows > 1
        }
        named = {rank: factor for rank, factor in lasting.items() if rank not in self._quiet_windows}
        self._quiet_windows |= dict.fromkeys(named, _STRAGGLER_QUIET_WINDOWS)
        self._slow_before = set(slow)
        return named


def slow_ranks(compute_seconds: Sequence[float | None], stage_ranks: int) -> dict[int, float]:
    """Return the ranks that compute longer than their peers, and how many times as long as their median.

    Peers are the ranks of the same pipeline stage: `stage_ranks` ranks in a row. A rank without peers is never slow:
    stages are not alike.
    """
    slow = {}
    for rank, seconds in enumerate(compute_seconds):
        first = rank // stage_ranks * stage_ranks
        peers = [
            other
            for peer, other in enumerate(compute_seconds[first : first + stage_ranks], first)
            if peer != rank and other is not None
        ]
        if seconds is None or not peers:
            continue
        usual = statistics.median(peers)
        if usual > 0 and seconds > SLOWER * usual:
            slow[rank] = seconds / usual
    return slow
