"""The actors of a stage, seen through to their end.

A process fails or an actor dies: the others may be waiting for it in a collective, so that they have a short grace to
notice and to write down where they stood; then they are killed. Somebody asks for a stop: every process is told, and
has the job's grace to write its checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainshed.launch.ranks import RankFailure, RanksResult
from trainshed.launch.ray.host import HostPlace, HostTask

FAILURE_GRACE_SECONDS = 20.0
"""How long ranks may take to write down where they stood when another has failed."""
_POLL_SECONDS = 0.5
_LATE_SECONDS = 30.0  # an actor kills its process itself when the grace is over, and must be able to tell
_LOG_TAIL_BYTES = 4096


@dataclass(frozen=True)
class LostRank(RankFailure):
    """A rank whose actor has died, and what is known about that."""

    cause: str = ""

    @property
    def how(self) -> str:
        """How it ended, for a sentence that begins with the rank."""
        return self.cause


@dataclass(frozen=True)
class Member:
    """One actor, where it is (None: Ray starts it when there is room) and what it runs."""

    actor: Any
    place: HostPlace | None
    task: HostTask


class Crew:
    """Runs the task of each member; `see_through` once."""

    def __init__(self, members: Mapping[int, Member], *, failure_grace_seconds: float = FAILURE_GRACE_SECONDS) -> None:
        self._members = dict(members)
        self._failure_grace_seconds = failure_grace_seconds
        self._results: list[tuple[int, RanksResult]] = []  # in the order of time
        self._deadline = float("inf")
        self._told = False

    def see_through(self, asked: Callable[[], int | None], on_poll: Callable[[], None] = lambda: None) -> RanksResult:
        """Start every task and wait for all; `asked` says which signal has asked for a stop, if any."""
        import ray

        pending = {member.actor.run.remote(member.task): rank for rank, member in self._members.items()}
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=_POLL_SECONDS)
            for reference in done:
                rank = pending.pop(reference)
                self._ended(rank, self._result(rank, reference))
                ray.kill(self._members[rank].actor)  # its place may be waited for
            if (signum := asked()) is not None and not self._told:
                self._tell(signum, list(pending.values()))
            if pending and time.monotonic() >= self._deadline:
                for rank in pending.values():
                    ray.kill(self._members[rank].actor)
                    killed = RankFailure(rank, None, "SIGKILL", self._log_tail(rank), killed=True)
                    self._results.append((rank, RanksResult(137, [killed])))
                pending.clear()
            on_poll()
        return self._merged()

    def _tell(self, signum: int, ranks: list[int]) -> None:
        self._told = True
        grace = max((self._members[rank].task.grace_seconds for rank in ranks), default=0.0)
        self._deadline = min(self._deadline, time.monotonic() + grace + _LATE_SECONDS)
        for rank in ranks:
            self._members[rank].actor.ask_to_stop.remote(signum)

    def _result(self, rank: int, reference: Any) -> RanksResult:
        """What an actor returns, or what became of it."""
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return ray.get(reference)
        except RayActorError as error:
            cause = cause_of_death(str(error), self._members[rank].place)
            return RanksResult(1, [LostRank(rank, None, None, self._log_tail(rank), cause=cause)])
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None

    def _ended(self, rank: int, result: RanksResult) -> None:
        self._results.append((rank, result))
        if result.failed:
            self._deadline = min(self._deadline, time.monotonic() + self._failure_grace_seconds)
        elif result.exit_code:  # it stopped as it was asked to; the others agree with it at the same step
            self._deadline = min(
                self._deadline, time.monotonic() + self._members[rank].task.grace_seconds + _LATE_SECONDS
            )

    def _merged(self) -> RanksResult:
        failed = [failure for _, result in self._results for failure in result.failed]
        # Within one look the order of time is not known; one whose actor died did not fall over another.
        failed.sort(key=lambda each: (each.killed, not isinstance(each, LostRank), each.signal is None))
        if failed:
            first = next(result for rank, result in self._results if rank == failed[0].rank)
            return replace(first, failed=failed)
        return RanksResult(max((result.exit_code for _, result in self._results), default=0), [])

    def _log_tail(self, rank: int) -> str:
        task = self._members[rank].task
        return log_tail(Path(task.logs) / (task.log or f"rank-{task.rank:05d}.log"))


def log_tail(log: Path) -> str:
    """Return the end of a log on the shared disk; empty where there is none yet."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def cause_of_death(said: str, place: HostPlace | None) -> str:
    """Say why an actor died, from Ray's own words about it."""
    lowered = said.lower()
    node = f"node {place.address}" if place is not None else "node"
    if "low on memory" in lowered or "out of memory" in lowered:
        return f"was killed by Ray: its {node} ran low on memory"
    if "node has died" in lowered or "node died" in lowered or "node was terminated" in lowered:
        return f"was lost with its {node}, which has left the Ray cluster"
    actor = f"its Ray actor (process {place.process} on {place.address})" if place is not None else "its Ray actor"
    return f"was lost: {actor} has died"
