"""The train stage on one node: wait for orders, run the ranks of this node, say how they ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import orjson

import trainshed
from trainshed.errors import InputError, TrainshedError
from trainshed.launch.agent.leading import Leader, SignsOfLife
from trainshed.launch.agent.meeting import Joined, Meeting, Order
from trainshed.launch.agent.place import AgentTimes, NodePlace
from trainshed.launch.agent.proof import prove_node
from trainshed.launch.agent.pulse import gpu_samples, pulse
from trainshed.launch.agent.records import AttemptRecords, NodeRecord
from trainshed.launch.agent.requests import StopRequests
from trainshed.launch.here import (
    PLAN_SCHEMA,
    WatchedFolder,
    keep_stall,
    logs_folder,
    machine_environment,
    rank_command,
)
from trainshed.launch.job import JobFile, Stage
from trainshed.launch.ranks import run_ranks, stopped_text
from trainshed.launch.run_logs import LogEcho
from trainshed.observe.events import EventWriter
from trainshed.plan import RankLayout
from trainshed.reporting import Reporter
from trainshed.storage import LocalStore

PEER_FAILED_EXIT_CODE = 76
"""This node did nothing wrong, and the first node is gone and cannot say how it ends (EX_PROTOCOL of sysexits.h)."""


class NodeTraining:
    """One node's part in the training of a job."""

    def __init__(
        self, job: JobFile, stage: Stage, folder: Path, place: NodePlace, times: AgentTimes, reporter: Reporter
    ) -> None:
        self._job, self._stage, self._folder = job, stage, folder
        self._place, self._times, self._reporter = place, times, reporter
        self._run = Path(job.run)
        self._meeting = Meeting(self._run, place.start)
        self._requests = StopRequests()

    def run(self) -> int:
        """See it through; returns 0, 128 + the signal of a requested stop, or `PEER_FAILED_EXIT_CODE`, else raises."""
        problem = version_problem(self._job)
        with self._requests:
            self._meeting.join(Joined(self._place.slot, self._place.host, trainshed.__version__, problem))
            with pulse(self._meeting, self._place.slot, self._times):
                if self._place.leads:
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
            self._place,
            self._meeting,
            self._times,
            self._requests,
            self._reporter,
        )
        try:
            order = leader.first_order()
            while order.exit_code is None:
                self._take_part(order, leader)
                order = leader.next_order(order)
        except TrainshedError as error:
            leader.fail(error)
            raise
        if leader.error is not None:
            raise leader.error
        return order.exit_code

    def _follow(self) -> int:
        done = 0
        while True:
            order = self._next_order(done)
            if order is None:
                self._reporter.warn("the first node shows no sign of life: this one ends too")
                return PEER_FAILED_EXIT_CODE
            if order.exit_code is not None:
                if order.what:
                    self._reporter.note(order.what)
                return order.exit_code
            done = order.number
            self._take_part(order)

    def _next_order(self, done: int) -> Order | None:
        """Wait for an order that is not done yet; None where nobody is left to give one."""
        signs = SignsOfLife(self._meeting)
        called = False
        looked = 0.0
        while True:
            order = self._meeting.order()
            if order is not None and order.number > done:
                return order
            if time.monotonic() - looked >= self._times.look_seconds:
                looked = time.monotonic()
                if not called and self._meeting.roll_is_called:
                    called = True
                    signs.begin()
                patience = self._times.roll_call_seconds if called else self._times.lost_seconds
                if signs.silent((0,), max(patience, 0 if done else self._times.meet_seconds)):
                    return None
            time.sleep(min(0.2, self._times.look_seconds))

    def _take_part(self, order: Order, leader: Leader | None = None) -> None:
        """Run this node's ranks of an attempt, where it has any, and leave an account of their end."""
        assert order.attempt is not None
        if self._place.slot not in order.slots:
            self._reporter.note(f"{self._place.host} is a spare node of attempt {order.attempt}")
            return
        node = order.slots.index(self._place.slot)
        records = AttemptRecords(self._run, order.attempt)
        record = self._refusal(node, order, records)
        if record is None and self._stage.only_preflight:
            record = NodeRecord(node, self._place.slot, self._place.host, "finished", 0)
        elif record is None:
            record = self._run_ranks(node, order, records, leader)
        if record.ended == "failed":
            records.say_failed(record.host, record.what or _how(record))
        self._meeting.call_the_roll()
        records.keep(record)

    def _refusal(self, node: int, order: Order, records: AttemptRecords) -> NodeRecord | None:
        """Say why this node's ranks are not started; None: they are."""
        place = self._place
        if self._requests.exit_code is not None:
            records.say_failed(place.host, "asked to stop before its ranks started")
            return NodeRecord(node, place.slot, place.host, "stopped", self._requests.exit_code)
        if not self._stage.preflight:
            return None
        began = time.monotonic()
        refused = prove_node(self._run, self._stage, self._folder, order, node, place, self._reporter)
        if node == 0 and refused is None:
            self._keep_phase(order, "preflight", time.monotonic() - began)
        if refused is None and self._requests.exit_code is not None:
            return self._refusal(node, order, records)
        return refused

    def _keep_phase(self, order: Order, name: str, seconds: float) -> None:
        assert order.attempt is not None
        with EventWriter(LocalStore(self._run), "", attempt=order.attempt, rank=None) as events:
            events.emit("phase", name=name, seconds=seconds)

    def _run_ranks(self, node: int, order: Order, records: AttemptRecords, leader: Leader | None) -> NodeRecord:
        assert order.attempt is not None
        per_node, place = self._stage.ranks_per_node, self._place
        own_failure = False

        def say_failed() -> None:
            nonlocal own_failure
            if not records.has_failed:
                own_failure = True
                records.say_failed(place.host, "a rank failed")

        logs = logs_folder(self._run, order.attempt)
        # What rank 0 says is what a person wants to see in the scheduler's own log.
        echo = LogEcho(logs / f"rank-{0:05d}.log", self._reporter.note) if node == 0 else None

        watched = WatchedFolder(self._run, seconds=3 * self._times.look_seconds)

        def poll() -> None:
            watched.check()
            if echo is not None:
                echo.poll()
            if leader is not None:
                leader.watch(order, records)

        peer_failed = _slowly(self._times.look_seconds, lambda: self._overtaken(order) or records.has_failed)
        with gpu_samples(records.folder / f"gpus-{node:05d}.jsonl", self._times.beat_seconds):
            result = run_ranks(
                rank_command(self._run, order.attempt, ("--on", str(self._folder / "cluster.yaml"))),
                ranks=per_node,
                logs=logs,
                world_size=len(order.slots) * per_node,
                first_rank=node * per_node,
                master=order.master,
                environment={"TRAINSHED_ATTEMPT": str(order.attempt)} | machine_environment(self._job.precision),
                grace_seconds=self._job.grace_seconds,
                failure_grace_seconds=self._times.failure_grace_seconds,
                on_poll=poll,
                on_failure=say_failed,
                others_failed=peer_failed,
                on_asked=self._say_stopping,
                on_stopped=partial(self._say_stopped, order.attempt),
            )
        if echo is not None:
            echo.poll(at_once=True)
        fell_to_peer = not own_failure and records.has_failed
        return NodeRecord.of(result, node=node, slot=place.slot, host=place.host, peer_failed=fell_to_peer)

    def _say_stopping(self, signum: int, again: bool) -> None:
        name = signal.Signals(signum).name
        how = "are stopped at once and save nothing" if again else "stop after their step and save a checkpoint"
        self._reporter.note(f"{name}{' again' if again else ''}: the ranks of {self._place.host} {how}")

    def _say_stopped(self, attempt: int, rank: int, process: int) -> None:
        self._reporter.warn(f"{self._place.host}: {stopped_text(rank, process)}")
        keep_stall(LocalStore(self._run), attempt, rank, process)

    def _overtaken(self, order: Order) -> bool:
        """Whether all were given another order meanwhile: this node was taken for lost."""
        newest = self._meeting.order()
        return newest is not None and newest.number > order.number


def version_problem(job: JobFile) -> str | None:
    """Say why this node's Trainshed must not do the job's work."""
    if job.version == trainshed.__version__:
        return None
    return f"this node has Trainshed {trainshed.__version__}, and the job was written by {job.version}"


def read_job_plan(folder: Path) -> tuple[RankLayout, tuple[str, ...]]:
    """Return the layout that travelled with a job, and why it was chosen."""
    path = folder / "plan.json"
    body = orjson.loads(path.read_bytes())
    if body.get("schema") != PLAN_SCHEMA:
        raise TrainshedError(f"this plan was written as {body.get('schema')}, not {PLAN_SCHEMA}", where=str(path))
    layout = RankLayout(**body["layout"] | {"stages": tuple(body["layout"]["stages"])})
    return layout, tuple(body.get("reasons", ()))


def _how(record: NodeRecord) -> str:
    return f"rank {record.failed[0].rank} {record.failed[0].how}" if record.failed else "its ranks failed"


def _slowly(seconds: float, ask: Callable[[], bool]) -> Callable[[], bool]:
    """The same question, asked at most so often: the answer lies on a disk that a thousand nodes share."""
    asked, answer = 0.0, False

    def question() -> bool:
        nonlocal asked, answer
        if not answer and time.monotonic() - asked >= seconds:
            asked, answer = time.monotonic(), ask()
        return answer

    return question
