"""What the first agent decides for all: who trains, when an attempt has failed, whether and how it goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from trainshed.errors import InputError, TrainshedError
from trainshed.launch.agent.meeting import Joined, Meeting, Order
from trainshed.launch.agent.place import AgentTimes, NodePlace, phases_before
from trainshed.launch.agent.records import AttemptRecords, FailedRank, NodeRecord
from trainshed.launch.agent.requests import StopRequests
from trainshed.launch.agent.roles import fewer_nodes, first_roles, stand_in
from trainshed.launch.explaining import explain
from trainshed.launch.here import write_plan
from trainshed.launch.job import JobFile, Stage
from trainshed.observe.events import EventWriter
from trainshed.observe.reading import read_events
from trainshed.plan import RankLayout
from trainshed.reporting import Reporter
from trainshed.storage import LocalStore
from trainshed.storage.attempts import take_attempt

_NEAR_TIME_LIMIT = 128 + signal.SIGUSR1
_FEW_NODES = 16


class Leader:
    """Gives the orders of one start. Only the agent of the first node is one."""

    def __init__(
        self,
        job: JobFile,
        stage: Stage,
        folder: Path,
        plan: tuple[RankLayout, Sequence[str]],
        place: NodePlace,
        meeting: Meeting,
        times: AgentTimes,
        requests: StopRequests,
        reporter: Reporter,
    ) -> None:
        self._job, self._stage, self._folder, self._place = job, stage, folder, place
        self._meeting, self._times, self._requests, self._reporter = meeting, times, requests, reporter
        self._planned, self._reasons = plan
        self._layout = self._planned
        self._run = Path(job.run)
        self._elastic = stage.spares > 0 or job.min_nodes is not None
        self._joined: dict[int, Joined] = {}
        self._bad: dict[int, str] = {}
        self._signs = SignsOfLife(meeting)
        self._orders = 0
        self._watched = time.monotonic()
        # Every look opens a file of each node.
        self._pause = times.look_seconds if place.slots > _FEW_NODES else min(0.2, times.look_seconds)
        self.error: TrainshedError | None = None
        """What ended it, once it is over and was no success."""

    def first_order(self) -> Order:
        """Wait for all nodes, then begin the first attempt; or say why not."""
        began = time.monotonic()
        slots = range(self._place.slots)
        while True:
            # Asked first: a node that refuses says why before it ends, and its end is what asks the others to stop.
            asked = self._requests.exit_code
            self._joined = self._meeting.joined()
            late = [slot for slot in slots if slot not in self._joined]
            problem = next((each.problem for each in self._joined.values() if each.problem), None)
            if problem is not None:
                return self.fail(InputError(problem))
            if asked is not None and late:
                # Most likely because one of them could not even start its agent, and the scheduler ends the rest.
                return self.fail(TrainshedError(f"asked to stop while {_counted(late)} had not started"))
            if asked is not None:
                return self._over(asked, "asked to stop before training began")
            if not late or time.monotonic() - began >= self._times.meet_seconds:
                break
            time.sleep(self._pause)
        self._bad = {slot: f"node {slot} did not start within {self._times.meet_seconds:.0f} s" for slot in late}
        if late and not self._elastic:
            return self.fail(TrainshedError(", ".join(self._bad.values()), hint="look at the scheduler's own log"))
        training = first_roles(self._stage)
        if not late:
            return self._begin(training, phases_before() | {"meeting": time.monotonic() - began})
        return self._go_on(training, TrainshedError(", ".join(self._bad.values())))

    def watch(self, order: Order, records: AttemptRecords) -> None:
        """Look now and then whether a node of the attempt has fallen silent."""
        if time.monotonic() - self._watched < self._times.beat_seconds:
            return
        self._watched = time.monotonic()
        for slot in self._signs.silent(order.slots, self._times.lost_seconds):
            records.say_failed(self._joined[slot].host, f"{self._joined[slot].host} shows no sign of life")

    def next_order(self, order: Order) -> Order:
        """Wait until the ranks of all nodes have ended, then say what comes next."""
        assert order.attempt is not None
        nodes = self._collect(order, AttemptRecords(self._run, order.attempt))
        if all(node.ended == "finished" for node in nodes):
            return self._over(0, "")
        if not any(node.ended in ("failed", "lost") for node in nodes):
            stopped = [node.exit_code for node in nodes if node.ended == "stopped"]
            if stopped:
                return self._stopped(order.attempt, max(stopped))
        error = self._explain(order.attempt, nodes)
        self._bad |= {node.slot: f"{node.host}: {node.bad_node}" for node in nodes if node.bad_node is not None}
        if self._elastic and any(node.bad_node is not None for node in nodes) and error.exit_code != 2:
            return self._go_on(order.slots, error)
        return self.fail(error)

    def _stopped(self, attempt: int, exit_code: int) -> Order:
        events = read_events(LocalStore(self._run), "", attempt=attempt)
        if exit_code == _NEAR_TIME_LIMIT and not any(event["kind"] == "step" for event in events):
            # Queued again after each time limit, it would never end.
            what = "the time limit came before the first step was done"
            return self.fail(TrainshedError(what, hint="raise limits.hours in the cluster file"))
        return self._over(exit_code, "asked to stop")

    def _go_on(self, training: tuple[int, ...], error: TrainshedError) -> Order:
        """Begin again without the bad nodes, or give up."""
        found = stand_in(training, self._place.slots, self._bad)
        bad = "; ".join(self._bad.values())
        if found is not None:
            self._reporter.warn(f"{bad}: a spare node steps in")
            return self._begin(found, {})
        smaller = fewer_nodes(self._job, self._stage, self._folder, self._planned, self._bad)
        if isinstance(smaller, str):
            return self.fail(TrainshedError(f"{error.what}; {smaller}", where=error.where, hint=error.hint))
        found, self._layout = smaller
        self._reasons = (f"planned anew as {self._layout} for {len(found)} nodes: {bad}",)
        self._reporter.warn(self._reasons[0])
        return self._begin(found, {})

    def _begin(self, training: tuple[int, ...], phases: dict[str, float]) -> Order:
        """Take the next attempt and tell everybody its place."""
        store = LocalStore(self._run)
        attempt = take_attempt(store, "").number
        write_plan(store, attempt, self._layout, self._reasons)
        self._orders += 1
        host, port = self._place.master
        if training[0] != 0:
            host = self._joined[training[0]].host
        # Not the port of the attempt before: a rank that was killed may hold it a little longer.
        order = Order(self._orders, attempt, training, (host, port + self._orders - 1))
        records = AttemptRecords(self._run, attempt)
        lines = records.keep_hosts(self._place.start, order, self._joined, self._bad, self._stage.ranks_per_node)
        self._reporter.note(f"attempt {attempt}: {self._layout}, rank 0 at {host}:{order.master[1]}")
        with EventWriter(store, "", attempt=attempt, rank=None) as events:
            for name, seconds in phases.items():
                events.emit("phase", name=name, seconds=seconds)
            for line in lines:
                self._reporter.note(line)
                events.emit("note", text=line)
        self._meeting.end_the_roll_call()
        self._meeting.give(order)
        self._signs.begin()
        return order

    def _collect(self, order: Order, records: AttemptRecords) -> list[NodeRecord]:
        """Wait for the account of every node; one that falls silent meanwhile gets one from here."""
        found: dict[int, NodeRecord] = {}
        called = False
        while True:
            # Slow signs of life do until somebody's ranks have ended: this node may be no part of the attempt.
            if not called and self._meeting.roll_is_called:
                called = True
                self._signs.begin()
            patience = self._times.roll_call_seconds if called else self._times.lost_seconds
            for node in range(len(order.slots)):
                if node not in found and (record := records.record(node)) is not None:
                    found[node] = record
            missing = {order.slots[node]: node for node in range(len(order.slots)) if node not in found}
            if not missing:
                return [found[node] for node in sorted(found)]
            for slot in self._signs.silent(tuple(missing), patience):
                found[missing[slot]] = self._lost(missing[slot], slot, records)
            time.sleep(self._pause)

    def _lost(self, node: int, slot: int, records: AttemptRecords) -> NodeRecord:
        host, per_node = self._joined[slot].host, self._stage.ranks_per_node
        how = f"was on {host}, which shows no sign of life"
        failed = tuple(FailedRank(rank, how) for rank in range(node * per_node, (node + 1) * per_node))
        record = NodeRecord(node, slot, host, "lost", 1, failed, "shows no sign of life")
        records.say_failed(host, f"{host} shows no sign of life")
        records.keep(record)
        return record

    def _explain(self, attempt: int, nodes: list[NodeRecord]) -> TrainshedError:
        before = next((node.what for node in nodes if node.what), None)
        if before is not None:
            health = AttemptRecords(self._run, attempt).folder
            with EventWriter(LocalStore(self._run), "", attempt=attempt, rank=None) as events:
                events.emit("failure", ranks=[], collective=None, what=before)
            return TrainshedError(before, where=str(health), hint="its files say what was found on each node")
        failed = [rank for node in nodes for rank in node.failed]
        ends = {rank.rank: rank.how for rank in failed if not rank.killed}
        first = sorted(failed, key=lambda rank: rank.killed)
        found = explain(
            self._run,
            attempt,
            len(nodes) * self._stage.ranks_per_node,
            ends=ends,
            failed=[rank.rank for rank in first],
        )
        hosts = {node.node: node.host for node in nodes if node.ended in ("failed", "lost")}
        self._reporter.warn(f"attempt {attempt} failed on {', '.join(hosts.values()) or 'no node in particular'}")
        return found

    def fail(self, error: TrainshedError) -> Order:
        """End it, everywhere."""
        self.error = error
        return self._over(error.exit_code, error.what)

    def _over(self, exit_code: int, what: str) -> Order:
        self._orders += 1
        self._meeting.blame([self._joined[slot].host for slot in sorted(self._bad) if slot in self._joined])
        order = Order(self._orders, exit_code=exit_code, what=what)
        self._meeting.give(order)
        return order


def _counted(slots: list[int]) -> str:
    return f"node {slots[0]}" if len(slots) == 1 else f"{len(slots)} nodes (first of all node {slots[0]})"


class SignsOfLife:
    """Who has beaten since when, by this machine's clock alone."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._seen: dict[int, tuple[int, float]] = {}
        self._began = time.monotonic()

    def begin(self) -> None:
        """Wait for everybody anew: agents have just been told to beat at another pace."""
        self._began = time.monotonic()

    def silent(self, slots: tuple[int, ...], seconds: float) -> list[int]:
        """Return who has given no sign of life for so long."""
        now = time.monotonic()
        for slot, count in self._meeting.beats(slots).items():
            if slot not in self._seen or self._seen[slot][0] != count:
                self._seen[slot] = (count, now)
        return [slot for slot in slots if now - max(self._began, self._seen[slot][1]) >= seconds]
