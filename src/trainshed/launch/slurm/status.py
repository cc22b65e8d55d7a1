"""How a stage stands on Slurm, in one sentence: why it waits, or why it failed.

Asked first is `scontrol` (it forgets a job some minutes after its end), then `sacct` (where there is accounting), then
the run's own folder, where the node agents have written down how each start ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import orjson

from trainshed.launch.slurm.client import SlurmClient
from trainshed.launch.slurm.fields import fields_of
from trainshed.launch.target import StageState, State

_STATES: dict[str, State] = {
    "PENDING": "waiting",
    "REQUEUED": "waiting",
    "REQUEUE_HOLD": "waiting",
    "REQUEUE_FED": "waiting",
    "RESV_DEL_HOLD": "waiting",
    "SPECIAL_EXIT": "waiting",
    "SUSPENDED": "waiting",
    "STOPPED": "waiting",
    "CONFIGURING": "running",
    "RUNNING": "running",
    "COMPLETING": "running",
    "SIGNALING": "running",
    "STAGE_OUT": "running",
    "RESIZING": "running",
    "COMPLETED": "done",
    "FAILED": "failed",
    "BOOT_FAIL": "failed",
    "DEADLINE": "failed",
    "NODE_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
    "TIMEOUT": "failed",
    "PREEMPTED": "failed",
    "REVOKED": "failed",
    "CANCELLED": "cancelled",
}
_WAITS = {
    "Resources": "waits for nodes to become free",
    "Priority": "waits behind jobs of higher priority",
    "Dependency": "waits for the stage before it",
    "DependencyNeverSatisfied": "never runs: the stage before it failed",
    "BeginTime": "was queued again a moment ago and may start shortly",
    "PartitionNodeLimit": "asks for more nodes than its partition gives a job; it never runs",
    "PartitionTimeLimit": "asks for more time than its partition gives (limits.hours); it never runs",
    "PartitionDown": "waits for its partition, which is down",
    "PartitionInactive": "waits for its partition, which is inactive",
    "ReqNodeNotAvail": "waits for nodes that are down, drained or reserved",
    "Reservation": "waits for its reservation to begin",
    "ReservationDeleted": "never runs: its reservation was deleted (capacity.reservation)",
    "JobHeldUser": "is held by its owner (`scontrol release ID`)",
    "JobHeldAdmin": "is held by an administrator",
    "JobArrayTaskLimit": "waits for other parts of its array to end",
    "Licenses": "waits for licenses",
    "NodeDown": "waits for a node that is down",
    "BadConstraints": "asks for features that no node has (slurm.constraint); it never runs",
    "InvalidAccount": "names an account that does not exist (slurm.account); it never runs",
    "InvalidQOS": "names a quality of service that does not exist (slurm.qos); it never runs",
    "Cleaning": "is still being cleaned up after its last start",
    "Prolog": "waits for its nodes to be made ready",
    "None": "waits to be looked at by the scheduler",
}
_FAILED = {
    "NODE_FAIL": "a node was lost",
    "OUT_OF_MEMORY": "was killed for want of memory",
    "TIMEOUT": "ran into its time limit",
    "BOOT_FAIL": "its nodes did not boot",
    "DEADLINE": "its deadline passed",
    "PREEMPTED": "was preempted by another job",
}

# As the script names a start: the job or the part of an array, its restarts, the time it began.
_START = re.compile(r"/slurm-(?P<task>[0-9_]+)-(?P<restart>[0-9]+)-[0-9]+(-part-[0-9]+)?/order\.json$")


@dataclass(frozen=True)
class Account:
    """What somebody knows about one job, or about one part of an array."""

    state: str
    reason: str = ""
    exit_code: int | None = None
    signal: int = 0
    nodes: str = ""
    restarts: int = 0


def stage_state(client: SlurmClient, run: str, stage: str, id: str) -> StageState:
    """Say how a stage stands."""
    found = _from_scontrol(client, id) or _from_sacct(client, id)
    own = _from_the_run(client, run, id)
    if not found:
        return _by_own_account(stage, id, own)
    worst = min(found, key=lambda each: _ORDER.index(_state(each)))
    state = _state(worst)
    why = _why(state, worst)
    if len(found) > 1:
        count = sum(_state(each) == state for each in found)
        why = f"{count} of {len(found)} parts {why}" if why else f"{count} of {len(found)} parts"
    last = next((each.reason for each in own if each.reason), "")
    if state == "failed" and last:
        why = f"{why}: {last}" if why else last
    elif state == "waiting" and worst.restarts and last:
        why = f"{why}; its last start ended: {last}"
    return StageState(
        stage,
        state,
        why,
        id,
        nodes=_hosts(client, worst.nodes) if state == "running" else (),
        restarts=worst.restarts,
        exit_code=worst.exit_code if state in ("done", "failed") else None,
    )


_ORDER: tuple[State, ...] = ("failed", "cancelled", "running", "waiting", "done", "unknown")
"""Of several parts the first of these decides."""


def _state(account: Account) -> State:
    return _STATES.get(account.state.split("+")[0].split(" ")[0], "unknown")


def _why(state: State, account: Account) -> str:
    if state == "waiting":
        reason = account.reason.strip("()")
        plain = reason.split(",")[0]
        if plain in _WAITS:
            return _WAITS[plain]
        if plain.startswith(("QOS", "Assoc", "MaxNode", "MaxCpu")):
            return f"waits for a limit of its account or quality of service ({reason})"
        return f"waits: {reason}" if reason else "waits"
    if account.reason == "DependencyNeverSatisfied":
        return _WAITS[account.reason]
    if state != "failed":
        return ""
    kind = account.state.split("+")[0]
    if kind in _FAILED:
        return _FAILED[kind]
    if account.signal:
        return f"was killed by signal {account.signal}"
    return f"exit code {account.exit_code}" if account.exit_code is not None else kind.lower()


def _from_scontrol(client: SlurmClient, id: str) -> list[Account]:
    done = client.attempt("scontrol", "--oneliner", "show", "job", id)
    if done.returncode:
        return []
    found = []
    for line in done.stdout.decode(errors="replace").splitlines():
        fields = fields_of(line)
        if "JobState" not in fields:
            continue
        code, _, signal = fields.get("ExitCode", "0:0").partition(":")
        nodes = fields.get("NodeList", "")
        found.append(
            Account(
                fields["JobState"],
                fields.get("Reason", ""),
                int(code or 0),
                int(signal or 0),
                "" if nodes == "(null)" else nodes,
                int(fields.get("Restarts", "0")),
            )
        )
    return found


def _from_sacct(client: SlurmClient, id: str) -> list[Account]:
    done = client.attempt(
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        f"--jobs={id}",
        "--format=State,Reason,ExitCode,NodeList",
    )
    if done.returncode:
        return []
    found = []
    for line in done.stdout.decode(errors="replace").splitlines():
        state, reason, exits, nodes = (line.split("|") + [""] * 4)[:4]
        code, _, signal = exits.partition(":")
        found.append(Account(state, reason, int(code or 0), int(signal or 0), nodes))
    return found


def _from_the_run(client: SlurmClient, run: str, id: str) -> list[Account]:
    """How the last start of a job, or of each of its parts, ended by the word of the agents."""
    starts = {path: _START.search(path) for path in client.files(f"{run}/starts", f"slurm-{id}[-_]*/order.json")}
    known = [(found["task"], int(found["restart"]), path) for path, found in starts.items() if found]
    last: dict[str, Account] = {}
    for task, restart, path in sorted(known):
        try:
            order = orjson.loads(client.read(path) or b"")
        except orjson.JSONDecodeError:
            continue
        if order.get("exit_code") is not None:
            code = int(order["exit_code"])
            last[task] = Account("FAILED" if code else "COMPLETED", str(order["what"]), code, restarts=restart)
    return list(last.values())


def _by_own_account(stage: str, id: str, own: list[Account]) -> StageState:
    if not own:
        return StageState(stage, "unknown", "Slurm no longer knows it, and it left no account of its end", id)
    worst = next((each for each in own if each.exit_code), own[-1])
    state: State = "failed" if worst.exit_code else "done"
    why = worst.reason or (f"exit code {worst.exit_code}" if worst.exit_code else "")
    return StageState(stage, state, why, id, restarts=worst.restarts, exit_code=worst.exit_code)


def _hosts(client: SlurmClient, nodes: str) -> tuple[str, ...]:
    if not nodes:
        return ()
    return tuple(client.run("scontrol", "show", "hostnames", nodes).split())
