"""Alarms: a loss that jumps, a run that diverges, a rank that is slower than its peers.

All are decided from the run's events alone, so that they work for every engine, and none of them changes the training.
A state that lasts is named once and then only now and then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainshed.observe.health import format_ranks

SPIKE_SIGMAS = 6.0
"""A loss is a spike if it is this many standard deviations above the mean of the steps before it."""
SPIKE_FRACTION = 0.05
"""A jump smaller than this fraction of the mean is not a spike, however even the losses before it were."""
SPIKE_WINDOW = 100
_SPIKE_MIN_STEPS = 30
_SPIKE_QUIET_STEPS = 50

DIVERGENCE_WINDOW = 100
"""The mean loss over this many steps is compared with the best such mean of the run."""
DIVERGENCE_FRACTION = 0.1
"""A run diverges if its mean loss is above the best one by this fraction of it."""
_DIVERGENCE_ERRORS = 6.0
"""It must also be this many standard errors above: losses of small batches, or near zero, vary by more than that."""
_DIVERGENCE_QUIET_STEPS = 500

SLOWER = 1.25
"""A rank is slow if it computes this many times as long as the median of the other ranks of its pipeline stage.

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

    def begin_phase(self, *, stage_ranks: int, keeps_losses: bool) -> None:
        """Go on with a phase of `train.phases`: with its stages, and with the losses so far if they are comparable."""
        self._stragglers.compare_within(stage_ranks)
        if not keeps_losses:
            self._losses = LossWatcher()

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
        place = f" ({', '.join(hosts) if len(ranks) > 1 else self._place(ranks[0])})" if hosts else ""
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
        mean = sum(self._recent) / DIVERGENCE_WINDOW
        if self._best is None or mean < self._best[0]:
            self._best = mean, step
            return
        best, best_step = self._best
        rise = mean - best
        # The second sum is only needed where the first bound is passed.
        if rise > DIVERGENCE_FRACTION * abs(best) and rise > _DIVERGENCE_ERRORS * _standard_error(self._recent, mean):
            far = f" ({rise / abs(best):.0%})" if best else ""
            what = (
                f"the mean loss of the last {DIVERGENCE_WINDOW} steps is {mean:.4f}, {rise:.4f}{far} above its best "
                f"({best:.4f} at step {best_step + 1:,}): the run diverges"
            )
            yield from self._once("divergence", step, _DIVERGENCE_QUIET_STEPS, what)

    def _spike(self, loss: float) -> str | None:
        """Return the alarm for a spike. Its loss does not enter the window, unless the losses stay that high."""
        if len(self._before) >= _SPIKE_MIN_STEPS:
            steps, mean = len(self._before), sum(self._before) / len(self._before)
            sigma = _standard_error(self._before, mean) * steps**0.5
            above = loss - mean
            if above > max(SPIKE_SIGMAS * sigma, SPIKE_FRACTION * abs(mean)):
                far = f", {above / sigma:.0f} standard deviations," if sigma else ""
                self._spikes_in_a_row += 1
                if self._spikes_in_a_row >= _SPIKE_MIN_STEPS:
                    self._before.clear()
                return f"the loss jumped to {loss:.4f}: {above:.4f}{far} above the mean of the {steps} steps before it"
        self._spikes_in_a_row = 0
        self._before.append(loss)
        return None

    def _once(
        self, name: Literal["loss_spike", "divergence"], step: int, quiet_steps: int, what: str
    ) -> Iterator[Alarm]:
        if step >= self._quiet_until[name]:
            self._quiet_until[name] = step + quiet_steps
            yield Alarm(name, what, step)


def _standard_error(values: Collection[float], mean: float) -> float:
    # Plain sums: those of `statistics` are exact, and take longer than a short step may.
    return sum((value - mean) ** 2 for value in values) ** 0.5 / len(values)


class StragglerWatcher:
    """Finds ranks that are slow in two windows in a row."""

    def __init__(self, stage_ranks: int | None = None) -> None:
        self._stage_ranks = stage_ranks
        self._slow_before: set[int] = set()
        self._quiet_windows: dict[int, int] = {}

    def compare_within(self, stage_ranks: int) -> None:
        """Compare within stages of so many ranks from now on; if they are others, nothing counts that was before."""
        if stage_ranks != self._stage_ranks:
            self._stage_ranks = stage_ranks
            self._slow_before, self._quiet_windows = set(), {}

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
    for first in range(0, len(compute_seconds), stage_ranks):
        stage = enumerate(compute_seconds[first : first + stage_ranks], first)
        ordered = sorted((seconds, rank) for rank, seconds in stage if seconds is not None)
        for place, (seconds, rank) in enumerate(ordered):
            usual = _median_without(ordered, place)
            if usual and seconds > SLOWER * usual:
                slow[rank] = seconds / usual
    return dict(sorted(slow.items()))


def _median_without(ordered: Sequence[tuple[float, int]], place: int) -> float | None:
    """Return the median of all but one of some sorted values; None where it is the only one."""
    count = len(ordered) - 1
    if count == 0:
        return None
    # The places of the middle two (or one) among the others.
    middle = ((count - 1) // 2, count // 2)
    return sum(ordered[index + (index >= place)][0] for index in middle) / 2
