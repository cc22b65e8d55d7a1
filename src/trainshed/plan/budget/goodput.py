"""How much of the time trains: failures, saves, restarts, and the interval between saves that loses least.

Young's interval is sqrt(2 · save · MTBF) (CACM 17(9), 1974); Daly's is its higher-order form, and his expected run
time under exponential failures (FGCS 22(3), 2006, equations 20 and 37) is what `expected_goodput` divides by:

    wall time per interval = M · e^(R/M) · (e^((interval + save)/M) - 1)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil, exp, expm1, sqrt
from typing import Any

from trainshed.plan.budget.checkpoint_cost import MOST_WRITING, CheckpointCost

LLAMA3_GPU_HOURS_PER_FAILURE = 54 * 24 * 16384 / 419
"""Meta's Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100 (The Llama 3 Herd of Models, 3.3.4)."""
MTBF_SOURCE = "The Llama 3 Herd of Models, 419 unexpected interruptions in 54 days on 16,384 H100"
START_SECONDS = 300.0
"""From a failure to the first step without loading: noticing it, another node, starting, compiling. An estimate."""
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class Goodput:
    """The share of time that moves training forward, with the interval as written and with the best one."""

    mtbf_hours: float
    """Of the whole job: any node stops it."""
    mtbf_source: str
    restart_seconds: float
    interval_steps: int | None
    """As the recipe says; None: it saves at the end only."""
    stall_seconds: float
    """What one save holds training up, at that interval."""
    goodput: float | None
    """None where nothing is saved on the way: a failure loses all."""
    best_interval_steps: int
    best_goodput: float

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        return asdict(self)


def node_mtbf_hours(gpus_per_node: int, stated: float | None = None) -> tuple[float, str]:
    """Return the mean time between failures of one node, and who says so."""
    if stated is not None:
        return stated, "as given"
    return LLAMA3_GPU_HOURS_PER_FAILURE / gpus_per_node, MTBF_SOURCE


def best_interval_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """Return Daly's interval between the end of one save and the start of the next."""
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = save_seconds / (2 * mtbf_seconds)
    return sqrt(2 * save_seconds * mtbf_seconds) * (1 + sqrt(ratio) / 3 + ratio / 9) - save_seconds


def expected_goodput(
    interval_seconds: float, save_seconds: float, restart_seconds: float, mtbf_seconds: float
) -> float:
    """Return the share of time that trains, with a save after every interval."""
    waiting, trying = restart_seconds / mtbf_seconds, (interval_seconds + save_seconds) / mtbf_seconds
    if waiting + trying > _LARGEST_EXPONENT:
        return 0.0
    return interval_seconds / (mtbf_seconds * exp(waiting) * expm1(trying))


def goodput(
    cost: CheckpointCost,
    *,
    step_seconds: float,
    nodes: int,
    mtbf_hours: float,
    mtbf_source: str = "as given",
    interval_steps: int | None,
    asynchronous: bool = True,
    start_seconds: float = START_SECONDS,
) -> Goodput:
    """Return the expected goodput of a run; `mtbf_hours` is one node's.

    A save that is written while training goes on counts from its snapshot but protects only when it is written, so
    each failure loses the time of one write more.
    """
    mtbf_seconds = mtbf_hours * 3600 / nodes
    write = cost.write_seconds or 0.0
    restart = start_seconds + (cost.read_seconds or 0.0)
    lost = restart + (write if asynchronous else 0.0)

    def share(steps: int) -> float:
        interval = steps * step_seconds
        stall = cost.stall_seconds(interval, asynchronous=asynchronous)
        return expected_goodput(interval, stall, lost, mtbf_seconds)

    # Shorter than this, `checkpoint_warning` says that saves come too often.
    shortest = max(1, ceil(write / MOST_WRITING / step_seconds)) if asynchronous else 1
    save = cost.stall_seconds(shortest * step_seconds, asynchronous=asynchronous)
    best = max(shortest, round(best_interval_seconds(save, mtbf_seconds) / step_seconds))
    given = interval_steps * step_seconds if interval_steps is not None else 0.0
    return Goodput(
        mtbf_hours=mtbf_seconds / 3600,
        mtbf_source=mtbf_source,
        restart_seconds=restart,
        interval_steps=interval_steps,
        stall_seconds=cost.stall_seconds(given, asynchronous=asynchronous) if interval_steps is not None else 0.0,
        goodput=share(interval_steps) if interval_steps is not None else None,
        best_interval_steps=best,
        best_goodput=share(best),
    )
