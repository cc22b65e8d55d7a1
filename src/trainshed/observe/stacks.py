"""The stacks of all ranks side by side: identical ones as one group, each with what its ranks are doing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainshed.observe.health import FlightRecord, format_ranks
from trainshed.observe.process_stacks import RankStack
from trainshed.observe.stall_advice import Activity, activity_of, short_frame

SHOWN_FRAMES = 8
_PLURALS = {"is": "are", "waits": "wait", "shows": "show"}


@dataclass(frozen=True)
class StackGroup:
    """Ranks whose stacks are the same."""

    ranks: list[int]
    stacks: list[RankStack]

    @property
    def first(self) -> RankStack:
        """The stack of its first rank, which is that of all."""
        return self.stacks[0]

    @property
    def activity(self) -> Activity:
        """What its ranks are doing."""
        return activity_of(self.first.stack, self.first.state)

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        activity = self.activity
        return {
            "ranks": self.ranks,
            "hosts": sorted({stack.host for stack in self.stacks if stack.host}),
            "pids": {str(stack.rank): stack.pid for stack in self.stacks if stack.pid is not None},
            "activity": activity.name,
            "what": activity.text if self.first.stack or activity.name == "stopped" else self.first.problem,
            "advice": activity.advice,
            "stack": self.first.stack,
            "source": self.first.source,
        }


def group_stacks(stacks: Iterable[RankStack]) -> list[StackGroup]:
    """Return the groups, the largest first; of groups of one size, that of the lowest rank."""
    by_stack: dict[tuple[Any, ...], list[RankStack]] = {}
    for stack in sorted(stacks, key=lambda stack: stack.rank):
        stopped = stack.state in ("T", "t")
        by_stack.setdefault((tuple(stack.stack), stopped, stack.problem), []).append(stack)
    groups = [StackGroup([stack.rank for stack in same], same) for same in by_stack.values()]
    return sorted(groups, key=lambda group: (-len(group.ranks), group.ranks[0]))


def recorded_stacks(records: Mapping[int, FlightRecord], hosts: Mapping[int, str]) -> list[RankStack]:
    """Return the stacks that the ranks of a dead attempt have left in their flight records."""
    return [
        RankStack(
            rank,
            hosts.get(rank, ""),
            stack=[frame.partition(": ")[0] for frame in record.stack],
            source="flight record",
            problem=None if record.stack else "its flight record has no stack",
        )
        for rank, record in sorted(records.items())
    ]


def format_groups(groups: Iterable[StackGroup], *, full: bool = False) -> str:
    """Return the groups as text; without `full`, the innermost frames of each."""
    lines: list[str] = []
    for group in groups:
        stack, activity = group.first, group.activity
        count = f"{len(group.ranks)} ranks: " if len(group.ranks) > 1 else ""
        place = f" on {stack.host}" if len(group.ranks) == 1 and stack.host else ""
        process = f" (process {stack.pid})" if len(group.ranks) == 1 and stack.pid is not None else ""
        is_known = bool(stack.stack) or activity.name == "stopped"
        text = _for_many(activity.text) if len(group.ranks) > 1 else activity.text
        text = text if is_known else f"no stack: {stack.problem}"
        lines.append(f"{count}{format_ranks(group.ranks)}{place}{process} {text}")
        shown = stack.stack if full else stack.stack[-SHOWN_FRAMES:]
        if len(shown) < len(stack.stack):
            lines.append(f"    … {len(stack.stack) - len(shown)} outer frames (--full)")
        lines += [f"    {frame if full else short_frame(frame)}" for frame in shown]
        if activity.advice is not None:
            lines.append(f"  → {activity.advice}")
        lines.append("")
    return "\n".join(lines)


def _for_many(text: str) -> str:
    """Return the rest of a sentence about one rank as that about several."""
    verb, _, rest = text.partition(" ")
    return f"{_PLURALS[verb]} {rest}"
