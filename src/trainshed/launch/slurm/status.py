"""The state of a stage on Slurm, in one sentence: why it waits, why it failed, or whether its server is ready.

`scontrol` is asked first (it forgets a job some minutes after its end), then `sacct` (where there is accounting),
then the run's own folder, where the node agents have recorded how each start ended. Slurm knows of a server only
that its job runs, so the server itself is asked whether it is ready.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import orjson

from trainshed.launch.slurm.client import SlurmClient, parse_scontrol
from trainshed.launch.target import StageState, StageStateName

_STATE_BY_SLURM_STATE: dict[str, StageStateName] = {
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
_PENDING_REASONS = {
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
_FAILURE_REASONS = {
    "NODE_FAIL": "a node was lost",
    "OUT_OF_MEMORY": "was killed for want of memory",
    "TIMEOUT": "ran into its time limit",
    "BOOT_FAIL": "its nodes did not boot",
    "DEADLINE": "its deadline passed",
    "PREEMPTED": "was preempted by another job",
}

# As the script names a start: the job or the part of an array, its restarts, the time it began.
_START_RECORD = re.compile(r"/slurm-(?P<task>[0-9_]+)-(?P<restart>[0-9]+)-[0-9]+(-part-[0-9]+)?/order\.json$")


@dataclass(frozen=True)
class SlurmJobState:
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
    own = _from_run_folder(client, run, id)
    if not found:
        return _state_from_run_folder(stage, id, own)
    worst = min(found, key=lambda each: _WORST_FIRST.index(_state(each)))
    state = _state(worst)
    why = _reason(state, worst)
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
        nodes=_hostnames(client, worst.nodes) if state == "running" else (),
        restarts=worst.restarts,
        exit_code=worst.exit_code if state in ("done", "failed") else None,
    )


_WORST_FIRST: tuple[StageStateName, ...] = ("failed", "cancelled", "running", "waiting", "done", "unknown")
"""Of several parts the first of these decides."""


def _state(account: SlurmJobState) -> StageStateName:
    return _STATE_BY_SLURM_STATE.get(account.state.split("+")[0].split(" ")[0], "unknown")


def _reason(state: StageStateName, account: SlurmJobState) -> str:
    if state == "waiting":
        reason = account.reason.strip("()")
        plain = reason.split(",")[0]
        if plain in _PENDING_REASONS:
            return _PENDING_REASONS[plain]
        if plain.startswith(("QOS", "Assoc", "MaxNode", "MaxCpu")):
            return f"waits for a limit of its account or quality of service ({reason})"
        return f"waits: {reason}" if reason else "waits"
    if account.reason == "DependencyNeverSatisfied":
        return _PENDING_REASONS[account.reason]
    if state != "failed":
        return ""
    kind = account.state.split("+")[0]
    if kind in _FAILURE_REASONS:
        return _FAILURE_REASONS[kind]
    if account.signal:
        return f"was killed by signal {account.signal}"
    return f"exit code {account.exit_code}" if account.exit_code is not None else kind.lower()


def _from_scontrol(client: SlurmClient, id: str) -> list[SlurmJobState]:
    done = client.attempt("scontrol", "--oneliner", "show", "job", id)
    if done.returncode:
        return []
    found = []
    for line in done.stdout.decode(errors="replace").splitlines():
        fields = parse_scontrol(line)
        if "JobState" not in fields:
            continue
        code, _, signal = fields.get("ExitCode", "0:0").partition(":")
        nodes = fields.get("NodeList", "")
        found.append(
            SlurmJobState(
                fields["JobState"],
                fields.get("Reason", ""),
                int(code or 0),
                int(signal or 0),
                "" if nodes == "(null)" else nodes,
                int(fields.get("Restarts", "0")),
            )
        )
    return found


def _from_sacct(client: SlurmClient, id: str) -> list[SlurmJobState]:
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
        found.append(SlurmJobState(state, reason, int(code or 0), int(signal or 0), nodes))
    return found


def _from_run_folder(client: SlurmClient, run: str, id: str) -> list[SlurmJobState]:
    """How the last start of a job, or of each of its parts, ended by the word of the agents."""
    starts = {path: _START_RECORD.search(path) for path in client.files(f"{run}/starts", f"slurm-{id}[-_]*/order.json")}
    known = [(found["task"], int(found["restart"]), path) for path, found in starts.items() if found]
    last: dict[str, SlurmJobState] = {}
    for task, restart, path in sorted(known):
        try:
            order = orjson.loads(client.read(path) or b"")
        except orjson.JSONDecodeError:
            continue
        if order.get("exit_code") is not None:
            code = int(order["exit_code"])
            last[task] = SlurmJobState("FAILED" if code else "COMPLETED", str(order["what"]), code, restarts=restart)
    return list(last.values())


def _state_from_run_folder(stage: str, id: str, own: list[SlurmJobState]) -> StageState:
    if not own:
        return StageState(stage, "unknown", "Slurm no longer knows it, and it left no account of its end", id)
    worst = next((each for each in own if each.exit_code), own[-1])
    state: StageStateName = "failed" if worst.exit_code else "done"
    why = worst.reason or (f"exit code {worst.exit_code}" if worst.exit_code else "")
    return StageState(stage, state, why, id, restarts=worst.restarts, exit_code=worst.exit_code)


def _hostnames(client: SlurmClient, nodes: str) -> tuple[str, ...]:
    if not nodes:
        return ()
    return tuple(client.run("scontrol", "show", "hostnames", nodes).split())


# bash itself can speak to a port, so that this needs no program which a login node may lack.
_HTTP_GET = (
    'exec 3<>"/dev/tcp/$1/$2" && printf "GET %s HTTP/1.0\\r\\nHost: %s\\r\\n\\r\\n" "$3" "$1" >&3 && head -n 1 <&3'
)
_HTTP_TIMEOUT_SECONDS = "5"


def serving_state(client: SlurmClient, state: StageState, port: int, ready: str) -> StageState:
    """Return how a stage that serves stands: a running job serves once its server says that it is ready."""
    if state.state == "done":
        return replace(state, reason="Its server was told to end, and has.")
    if state.state != "running" or not state.nodes:
        return state
    node = state.nodes[0]
    code = _http_status(client, _node_address(client, node), port, ready)
    if code == "200":
        return replace(state, state="serving", reason=f"Serving at {node}:{port}, 1 of 1 ready.")
    said = f"answers {code} at {ready}" if code else f"does not answer at {node}:{port} yet"
    return replace(state, reason=f"Its server {said}: it starts, loads its weights or drains.")


def _node_address(client: SlurmClient, node: str) -> str:
    """Where Slurm itself reaches a node; its name where Slurm has no other."""
    done = client.attempt("scontrol", "--oneliner", "show", "node", node)
    return parse_scontrol(done.stdout.decode(errors="replace")).get("NodeAddr") or node


def _http_status(client: SlurmClient, address: str, port: int, path: str) -> str:
    """The code of an answer; empty where there is none."""
    done = client.attempt("timeout", _HTTP_TIMEOUT_SECONDS, "bash", "-c", _HTTP_GET, "bash", address, str(port), path)
    words = done.stdout.decode(errors="replace").split()
    return words[1] if len(words) > 1 and words[0].startswith("HTTP/") else ""
