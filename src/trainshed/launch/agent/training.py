"""The train stage on one node: wait for an order, check the node, run its ranks, record how they ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import trainshed
from trainshed.errors import InputError, TrainshedError
from trainshed.launch.agent.leader import Leader
from trainshed.launch.agent.notices import notify_of_job
from trainshed.launch.agent.records import AttemptRecords, NodeRecord
from trainshed.launch.attempt import (
    LogEcho,
    RunFolderWatcher,
    emit_stall,
    logs_folder,
    machine_environment,
    rank_command,
    read_job_plan,
)
from trainshed.launch.device_sampling import DeviceSampler
from trainshed.launch.job import JobFile, Stage, version_problem
from trainshed.launch.preflight import preflight_job, run_preflight
from trainshed.launch.ranks import run_ranks, stopped_rank_text
from trainshed.launch.rendezvous import (
    PREFLIGHT_PORT_OFFSET,
    AgentOrder,
    AgentTimeouts,
    HeartbeatMonitor,
    JoinedNode,
    NodeEnv,
    Rendezvous,
    send_heartbeats,
)
from trainshed.launch.run_report import report_run
from trainshed.observe.events import EventWriter
from trainshed.observe.process_stacks import RUN_FOLDER_VARIABLE
from trainshed.recipe import load_cluster
from trainshed.reporting import Reporter
from trainshed.run_folder import CLUSTER_FILE, rank_name
from trainshed.signals import StopSignals
from trainshed.storage import LocalStore

PEER_FAILED_EXIT_CODE = 76
"""The first node is gone, so nothing says how the start ends; this node did not fail (EX_PROTOCOL of sysexits.h)."""


class NodeTraining:
    """One node's part in the training of a job."""

    def __init__(
        self, job: JobFile, stage: Stage, folder: Path, node_env: NodeEnv, timeouts: AgentTimeouts, reporter: Reporter
    ) -> None:
        self._job, self._stage, self._folder = job, stage, folder
        self._node_env, self._timeouts, self._reporter = node_env, timeouts, reporter
        self._run = Path(job.run)
        self._rendezvous = Rendezvous(self._run, node_env.start)
        self._requests = StopSignals()
        self._devices = DeviceSampler(node_env.host)

    def run(self) -> int:
        """Train; returns 0, 128 + the signal of a requested stop, or `PEER_FAILED_EXIT_CODE`; raises a failure."""
        problem = version_problem(self._job)
        with self._requests:
            self._rendezvous.join(JoinedNode(self._node_env.slot, self._node_env.host, trainshed.__version__, problem))
            with send_heartbeats(self._rendezvous, self._node_env.slot, self._timeouts, self._devices.latest_json):
                if self._node_env.is_leader:
                    return self._lead()
                if problem is not None:
                    raise InputError(problem, hint="submit it again, so that its own code travels with it")
                return self._follow()

    def _lead(self) -> int:
        leader = Leader(
            self._job,
            self._stage,
            self._folder,
            read_job_plan(self._folder),
            self._node_env,
            self._rendezvous,
            self._timeouts,
            self._requests,
            self._reporter,
        )
        with notify_of_job(self._job, self._folder) as notifier:
            try:
                order = leader.first_order()
                while order.exit_code is None:
                    self._run_attempt(order, leader)
                    order = leader.next_order(order)
            except TrainshedError as error:
                leader.fail(error)
                notifier.fail(error.what)
                raise
            finally:
                report_run(self._run, self._reporter)
            if leader.error is not None:
                notifier.fail(leader.error.what)
                raise leader.error
        return order.exit_code

    def _follow(self) -> int:
        done_number = 0
        while True:
            order = self._next_order(done_number)
            if order is None:
                self._reporter.warn("the first node shows no sign of life: this one ends too")
                return PEER_FAILED_EXIT_CODE
            if order.exit_code is not None:
                if order.what:
                    self._reporter.note(order.what)
                return order.exit_code
            done_number = order.number
            self._run_attempt(order)

    def _next_order(self, done_number: int) -> AgentOrder | None:
        """Wait for an order after the last one; None where the first node is gone."""
        heartbeats = HeartbeatMonitor(self._rendezvous)
        fast = False
        checked_at = 0.0
        while True:
            order = self._rendezvous.latest_order()
            if order is not None and order.number > done_number:
                return order
            if time.monotonic() - checked_at >= self._timeouts.look_seconds:
                checked_at = time.monotonic()
                if not fast and self._rendezvous.wants_fast_heartbeats:
                    fast = True
                    heartbeats.reset()
                silence_seconds = self._timeouts.roll_call_seconds if fast else self._timeouts.lost_seconds
                if not done_number:
                    silence_seconds = max(silence_seconds, self._timeouts.meet_seconds)
                if heartbeats.silent_slots((0,), silence_seconds):
                    return None
            time.sleep(min(0.2, self._timeouts.look_seconds))

    def _run_attempt(self, order: AgentOrder, leader: Leader | None = None) -> None:
        """Run this node's ranks of an attempt, where it has any, and record how they ended."""
        assert order.attempt is not None
        if self._node_env.slot not in order.slots:
            self._reporter.note(f"{self._node_env.host} is a spare node of attempt {order.attempt}")
            return
        node = order.slots.index(self._node_env.slot)
        records = AttemptRecords(self._run, order.attempt)
        record = self._reason_not_to_start(node, order, records)
        if record is None and (self._stage.only_preflight or self._stage.script is not None):
            record = NodeRecord(node, self._node_env.slot, self._node_env.host, "finished", 0)
        elif record is None:
            record = self._run_ranks(node, order, records, leader)
        if record.ended == "failed":
            records.mark_failed(record.host, record.what or _failure_text(record))
        self._rendezvous.request_fast_heartbeats()
        records.write_node(record)

    def _reason_not_to_start(self, node: int, order: AgentOrder, records: AttemptRecords) -> NodeRecord | None:
        """Return the record of a node whose ranks are not started; None: they are."""
        node_env = self._node_env
        if self._requests.exit_code is not None:
            records.mark_failed(node_env.host, "asked to stop before its ranks started")
            return NodeRecord(node, node_env.slot, node_env.host, "stopped", self._requests.exit_code)
        if not self._stage.preflight:
            return None
        began = time.monotonic()
        refused = preflight_node(self._run, self._stage, self._folder, order, node, node_env, self._reporter)
        if node == 0 and refused is None:
            self._emit_phase(order, "preflight", time.monotonic() - began)
        if refused is None and self._requests.exit_code is not None:
            return self._reason_not_to_start(node, order, records)
        return refused

    def _emit_phase(self, order: AgentOrder, name: str, seconds: float) -> None:
        assert order.attempt is not None
        with EventWriter(LocalStore(self._run), "", attempt=order.attempt, rank=None) as events:
            events.emit("phase", name=name, seconds=seconds)

    def _run_ranks(self, node: int, order: AgentOrder, records: AttemptRecords, leader: Leader | None) -> NodeRecord:
        assert order.attempt is not None
        per_node, node_env = self._stage.ranks_per_node, self._node_env
        own_failure = False

        def mark_failed() -> None:
            nonlocal own_failure
            if not records.has_failed:
                own_failure = True
                records.mark_failed(node_env.host, "a rank failed")

        logs = logs_folder(self._run, order.attempt)
        # What rank 0 prints is what a person wants to see in the scheduler's own log.
        echo = LogEcho(logs / f"{rank_name(0)}.log", self._reporter.note) if node == 0 else None
        run_folder = RunFolderWatcher(self._run, seconds=3 * self._timeouts.look_seconds)

        def poll() -> None:
            run_folder.check()
            if echo is not None:
                echo.poll()
            if leader is not None:
                leader.watch(order, records)

        peer_failed = _at_most_every(
            self._timeouts.look_seconds, lambda: self._is_superseded(order) or records.has_failed
        )
        with self._devices.sampling(self._timeouts.beat_seconds):
            result = run_ranks(
                rank_command(self._run, order.attempt, ("--on", str(self._folder / CLUSTER_FILE))),
                ranks=per_node,
                logs=logs,
                world_size=len(order.slots) * per_node,
                first_rank=node * per_node,
                master=order.master,
                environment={
                    "TRAINSHED_ATTEMPT": str(order.attempt),
                    RUN_FOLDER_VARIABLE: str(self._run),
                    **machine_environment(self._job.precision),
                },
                grace_seconds=self._job.grace_seconds,
                failure_grace_seconds=self._timeouts.failure_grace_seconds,
                on_poll=poll,
                on_failure=mark_failed,
                peer_failed=peer_failed,
                on_stop_request=self._report_stop_request,
                on_stopped=partial(self._report_suspended_rank, order.attempt),
            )
        if echo is not None:
            echo.poll(at_once=True)
        ended_by_peer = not own_failure and records.has_failed
        return NodeRecord.of(result, node=node, slot=node_env.slot, host=node_env.host, peer_failed=ended_by_peer)

    def _report_stop_request(self, signum: int, again: bool) -> None:
        name = signal.Signals(signum).name
        effect = "are stopped at once and save nothing" if again else "stop after their step and save a checkpoint"
        self._reporter.note(f"{name}{' again' if again else ''}: the ranks of {self._node_env.host} {effect}")

    def _report_suspended_rank(self, attempt: int, rank: int, process: int) -> None:
        self._reporter.warn(f"{self._node_env.host}: {stopped_rank_text(rank, process)}")
        emit_stall(LocalStore(self._run), attempt, rank, process)

    def _is_superseded(self, order: AgentOrder) -> bool:
        """Whether there is a newer order: the first agent took this node for lost."""
        newest = self._rendezvous.latest_order()
        return newest is not None and newest.number > order.number


def _failure_text(record: NodeRecord) -> str:
    return f"rank {record.failed[0].rank} {record.failed[0].how}" if record.failed else "its ranks failed"


def _at_most_every(seconds: float, check: Callable[[], bool]) -> Callable[[], bool]:
    """Return a check that is repeated after `seconds` at the earliest: it reads a disk that a thousand nodes share."""
    checked_at, result = 0.0, False

    def rare_check() -> bool:
        nonlocal checked_at, result
        if not result and time.monotonic() - checked_at >= seconds:
            checked_at, result = time.monotonic(), check()
        return result

    return rare_check


def preflight_node(
    run: Path, stage: Stage, folder: Path, order: AgentOrder, node: int, node_env: NodeEnv, reporter: Reporter
) -> NodeRecord | None:
    """Take part in the preflight of an attempt; returns the record of a node that does not train, None: it trains."""
    assert order.attempt is not None
    cluster = load_cluster(folder / CLUSTER_FILE)
    on_cpu = cluster.ray is not None and cluster.ray.gpu_resource == "CPU"
    checks = preflight_job(
        cluster,
        store=LocalStore(run),
        run_folder="",
        attempt=order.attempt,
        nodes=len(order.slots),
        gpus=0 if on_cpu else stage.gpus_per_node,
        full=stage.full_preflight,
    )
    board = (order.master[0], order.master[1] + PREFLIGHT_PORT_OFFSET)
    record = NodeRecord(node, node_env.slot, node_env.host, "peer", 1)
    try:
        verdict = run_preflight(checks, node_rank=node, key_value_address=board, host=node_env.host, reporter=reporter)
    except TrainshedError as error:
        return replace(record, ended="failed", what=f"preflight: {error.what}")
    if verdict.outcome in ("pass", "warn"):
        (reporter.note if verdict.outcome == "pass" else reporter.warn)(f"preflight: {verdict.sentence}")
        return None
    what = f"preflight: {verdict.sentence}"
    if verdict.outcome == "fail":
        return replace(record, ended="failed", what=what)
    if node in verdict.replace:
        return replace(record, ended="failed", bad_node="preflight says to replace it", what=what)
    return record
