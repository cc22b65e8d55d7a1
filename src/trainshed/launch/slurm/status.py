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
from trainshed.launch.stage_state import StageState, StageStateName

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

# The name that the script gives to a start: the job or the part of an array, its restarts, the time it began.
_START_RECORD = re.compile(r"/slurm-(?P<task>[0-9_]+)-(?P<restart>[0-9]+)-[0-9]+(-part-[0-9]+)?/order\.json$")


@dataclass(frozen=True)
class SlurmJobState:
    """What scontrol, sacct or the run's folder says about one job, or about one part of an array."""

    state: str
    reason: str = ""
    exit_code: int | None = None
    signal: int = 0
    hostlist: str = ""
    restarts: int = 0


def stage_state(client: SlurmClient, run: str, stage: str, id: str) -> StageState:
    """Return the state of a stage."""
    jobs = _from_scontrol(client, id) or _from_sacct(client, id)
    recorded = _from_run_folder(client, run, id)
    if not jobs:
        return _state_from_run_folder(stage, id, recorded)
    worst = min(jobs, key=lambda job: _WORST_FIRST.index(_state(job)))
    state = _state(worst)
    why = _reason(state, worst)
    if len(jobs) > 1:
        count = sum(_state(job) == state for job in jobs)
        why = f"{count} of {len(jobs)} parts {why}" if why else f"{count} of {len(jobs)} parts"
    last_error = next((job.reason for job in recorded if job.reason), "")
    if state == "failed" and last_error:
        why = f"{why}: {last_error}" if why else last_error
    elif state == "waiting" and worst.restarts and last_error:
        why = f"{why}; its last start ended: {last_error}"
    return StageState(
        stage,
        state,
        why,
        id,
        nodes=_hostnames(client, worst.hostlist) if state == "running" else (),
        restarts=worst.restarts,
        exit_code=worst.exit_code if state in ("done", "failed") else None,
    )


_WORST_FIRST: tuple[StageStateName, ...] = ("failed", "cancelled", "running", "waiting", "done", "unknown")
"""The first of these that any part is in is the state of the stage."""


def _state(job: SlurmJobState) -> StageStateName:
    return _STATE_BY_SLURM_STATE.get(job.state.split("+")[0].split(" ")[0], "unknown")


def _reason(state: StageStateName, job: SlurmJobState) -> str:
    if state == "waiting":
        reason = job.reason.strip("()")
        plain = reason.split(",")[0]
        if plain in _PENDING_REASONS:
            return _PENDING_REASONS[plain]
        if plain.startswith(("QOS", "Assoc", "MaxNode", "MaxCpu")):
            return f"waits for a limit of its account or quality of service ({reason})"
        return f"waits: {reason}" if reason else "waits"
    if job.reason == "DependencyNeverSatisfied":
        return _PENDING_REASONS[job.reason]
    if state == "cancelled":
        return "was cancelled: by `scancel` or `trainshed cancel`"
    if state != "failed":
        return ""
    kind = job.state.split("+")[0]
    if kind in _FAILURE_REASONS:
        return _FAILURE_REASONS[kind]
    if job.signal:
        return f"was killed by signal {job.signal}"
    return f"exit code {job.exit_code}" if job.exit_code is not None else kind.lower()


def _from_scontrol(client: SlurmClient, id: str) -> list[SlurmJobState]:
    done = client.run_unchecked("scontrol", "--oneliner", "show", "job", id)
    if done.returncode:
        return []
    jobs = []
    for line in done.stdout.decode(errors="replace").splitlines():
        fields = parse_scontrol(line)
        if "JobState" not in fields:
            continue
        code, _, signal = fields.get("ExitCode", "0:0").partition(":")
        hostlist = fields.get("NodeList", "")
        jobs.append(
            SlurmJobState(
                fields["JobState"],
                fields.get("Reason", ""),
                int(code or 0),
                int(signal or 0),
                "" if hostlist == "(null)" else hostlist,
                int(fields.get("Restarts", "0")),
            )
        )
    return jobs


def _from_sacct(client: SlurmClient, id: str) -> list[SlurmJobState]:
    done = client.run_unchecked(
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        f"--jobs={id}",
        "--format=State,Reason,ExitCode,NodeList",
    )
    if done.returncode:
        return []
    jobs = []
    for line in done.stdout.decode(errors="replace").splitlines():
        state, reason, exit_code_text, hostlist = (line.split("|") + [""] * 4)[:4]
        code, _, signal = exit_code_text.partition(":")
        jobs.append(SlurmJobState(state, reason, int(code or 0), int(signal or 0), hostlist))
    return jobs


def _from_run_folder(client: SlurmClient, run: str, id: str) -> list[SlurmJobState]:
    """Return how the last start of a job, or of each of its parts, ended, as the agents recorded it."""
    starts = {
        path: _START_RECORD.search(path) for path in client.find_files(f"{run}/starts", f"slurm-{id}[-_]*/order.json")
    }
    starts_of_tasks = [(match["task"], int(match["restart"]), path) for path, match in starts.items() if match]
    last: dict[str, SlurmJobState] = {}
    for task, restart, path in sorted(starts_of_tasks):
        try:
            order = orjson.loads(client.read(path) or b"")
        except orjson.JSONDecodeError:
            continue
        if order.get("exit_code") is not None:
            code = int(order["exit_code"])
            last[task] = SlurmJobState("FAILED" if code else "COMPLETED", str(order["what"]), code, restarts=restart)
    return list(last.values())


def _state_from_run_folder(stage: str, id: str, recorded: list[SlurmJobState]) -> StageState:
    if not recorded:
        return StageState(stage, "unknown", "Slurm no longer knows it, and it left no account of its end", id)
    worst = next((job for job in recorded if job.exit_code), recorded[-1])
    state: StageStateName = "failed" if worst.exit_code else "done"
    why = worst.reason or (f"exit code {worst.exit_code}" if worst.exit_code else "")
    return StageState(stage, state, why, id, restarts=worst.restarts, exit_code=worst.exit_code)


def _hostnames(client: SlurmClient, hostlist: str) -> tuple[str, ...]:
    if not hostlist:
        return ()
    return tuple(client.run("scontrol", "show", "hostnames", hostlist).split())


# With bash's own /dev/tcp: a login node may have no curl.
_HTTP_GET = (
    'exec 3<>"/dev/tcp/$1/$2" && printf "GET %s HTTP/1.0\\r\\nHost: %s\\r\\n\\r\\n" "$3" "$1" >&3 && head -n 1 <&3'
)
_HTTP_TIMEOUT_SECONDS = "5"


def serving_state(client: SlurmClient, state: StageState, port: int, ready: str) -> StageState:
    """Return the state of a serving stage: a running job serves once its server says that it is ready."""
    if state.state == "done":
        return replace(state, reason="Its server was told to end, and has.")
    if state.state != "running" or not state.nodes:
        return state
    node = state.nodes[0]
    code = _http_status(client, _node_address(client, node), port, ready)
    if code == "200":
        return replace(state, state="serving", reason=f"Serving at {node}:{port}, 1 of 1 ready.")
    answer = f"answers {code} at {ready}" if code else f"does not answer at {node}:{port} yet"
    return replace(state, reason=f"Its server {answer}: it starts, loads its weights or drains.")


def _node_address(client: SlurmClient, node: str) -> str:
    """Return the address at which Slurm itself reaches a node; its name if Slurm has no other."""
    done = client.run_unchecked("scontrol", "--oneliner", "show", "node", node)
    return parse_scontrol(done.stdout.decode(errors="replace")).get("NodeAddr") or node


def _http_status(client: SlurmClient, address: str, port: int, path: str) -> str:
    """Return the HTTP status of an answer; empty if there is none."""
    done = client.run_unchecked(
        "timeout", _HTTP_TIMEOUT_SECONDS, "bash", "-c", _HTTP_GET, "bash", address, str(port), path
    )
    words = done.stdout.decode(errors="replace").split()
    return words[1] if len(words) > 1 and words[0].startswith("HTTP/") else ""
