"""What NCCL's own log says about the network between nodes, held against what it must show on a fabric.

`watch_node.py` has this file beside it in the image of a foreign engine, so it needs the standard library of Python 3.8
and nothing of Trainshed. Preflight reads the logs of its probes with it.
"""

from __future__ import annotations

import re
from glob import escape, glob
from typing import Any, Iterable, Mapping, NamedTuple  # noqa: UP035 - Python 3.8

MAX_LOG_BYTES = 4 * 2**20
"""Of each log: the network is named where it begins."""
SHOWN_SECONDS = 600.0
"""How long after NCCL's first line what must be there may be missing: groups of ranks are made at their first use."""
_NAMED_HOSTS = 4
_USING_NETWORK = re.compile(r"Using network (.+)$", re.MULTILINE)


class ExpectedNetwork(NamedTuple):
    """What the logs of a node must show and must not show, as regular expressions."""

    fabric: str
    selected: Iterable[str]
    rejected: Iterable[str]
    hint: str
    """What to look at where they do not."""

    @classmethod
    def from_plain(cls, body: Mapping[str, Any]) -> ExpectedNetwork:
        """Read what a job's file says."""
        return cls(body["fabric"], tuple(body["selected"]), tuple(body["rejected"]), body["hint"])


def read_logs(prefix: str) -> str:
    """Return the logs whose path begins so, one after the other."""
    texts = []
    for path in sorted(glob(escape(prefix) + "*.log")):
        with open(path, "rb") as log:
            texts.append(log.read(MAX_LOG_BYTES).decode(errors="replace"))
    return "\n".join(texts)


def network_taken(log: str) -> str | None:
    """Return the network that NCCL says it uses, None if it names none."""
    match = _USING_NETWORK.search(log)
    return match[1].strip() if match else None


def first_matching_line(log: str, patterns: Iterable[str]) -> str | None:
    """Return the first line that matches one of the patterns, without NCCL's prefix."""
    for pattern in patterns:
        if match := re.search(f"^.*(?:{pattern}).*$", log, re.MULTILINE):
            return re.sub(r"^.*NCCL (INFO|WARN) ", "", match[0]).strip()
    return None


def rejected_line(log: str, expected: ExpectedNetwork) -> str | None:
    """Return a line that says that the fabric is not used."""
    return first_matching_line(log, expected.rejected)


def missing_pattern(log: str, expected: ExpectedNetwork) -> str | None:
    """Return the first pattern that no line matches, None if every one is there."""
    return next((pattern for pattern in expected.selected if not re.search(pattern, log, re.MULTILINE)), None)


def not_shown(log: str, pattern: str) -> str:
    """Say that a log does not show a pattern, and which network it names."""
    network = network_taken(log)
    says = f"it says `Using network {network}`" if network else "it names no network"
    return f"NCCL's log does not show /{pattern}/; {says}"


class NetworkWatch:
    """The logs of one node's ranks, looked at until they have told which network is used."""

    def __init__(self, expected: ExpectedNetwork, prefix: str) -> None:
        self._expected, self._prefix = expected, prefix
        self._began: float | None = None
        self.verdict: dict[str, str | None] | None = None
        """`network` and `problem`; None while the logs do not tell."""

    def look(self, now: float) -> None:
        """Look once; `now` is in seconds."""
        log = "" if self.verdict is not None else read_logs(self._prefix)
        if not log.strip():
            return
        self._began = now if self._began is None else self._began
        problem = None
        if line := rejected_line(log, self._expected):
            problem = f"NCCL says `{line}`"
        elif pattern := missing_pattern(log, self._expected):
            if now - self._began < SHOWN_SECONDS:
                return
            problem = not_shown(log, pattern)
        self.verdict = {"network": network_taken(log), "problem": problem}


def network_alarm(expected: ExpectedNetwork, verdicts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return what an `alarm` event says about the nodes (by host) that do not use the fabric; None if all do."""
    hosts = sorted(host for host, verdict in verdicts.items() if verdict["problem"] is not None)
    if not hosts:
        return None
    named = ", ".join(hosts[:_NAMED_HOSTS]) + (f" and {len(hosts) - _NAMED_HOSTS} more" * (len(hosts) > _NAMED_HOSTS))
    what = f"{expected.fabric} is not used as it should be on {named}: {verdicts[hosts[0]]['problem']}; {expected.hint}"
    return {"name": "fabric", "what": what, "hosts": hosts}
