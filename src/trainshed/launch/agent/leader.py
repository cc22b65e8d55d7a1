"""What the first agent decides for all: which nodes train, when an attempt has failed, and what happens then."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainshed.data.sampling.schedule import BatchRampUp, BatchSchedule
from trainshed.errors import InputError, TrainshedError
from trainshed.launch.agent.records import AttemptRecords, NodeRecord
from trainshed.launch.attempt import explain_failure, write_plan
from trainshed.launch.device_sampling import DeviceEvents, parse_samples
from trainshed.launch.job import JobFile, Stage
from trainshed.launch.rendezvous import (
    AgentOrder,
    AgentTimeouts,
    HeartbeatMonitor,
    JoinedNode,
    NodeEnv,
    Rendezvous,
    startup_phases,
    unused_port,
)
from trainshed.observe.event_log import read_events
from trainshed.observe.events import EventWriter
from trainshed.plan import RankLayout
from trainshed.plan.shrink import layout_for_nodes
from trainshed.recipe import load_recipe
from trainshed.reporting import Reporter
from trainshed.run_folder import RECIPE_FILE
from trainshed.signals import StopSignals
from trainshed.storage import LocalStore
from trainshed.storage.attempts import take_attempt

_NEAR_TIME_LIMIT_EXIT_CODE = 128 + signal.SIGUSR1
_FEW_NODES = 16


class Leader:
    """Gives the orders of one start; only the agent of the first node does."""

    def __init__(
        self,
        job: JobFile,
        stage: Stage,
        folder: Path,
        plan: tuple[RankLayout, Sequence[str], Mapping[str, Any] | None],
        node_env: NodeEnv,
        rendezvous: Rendezvous,
        timeouts: AgentTimeouts,
        requests: StopSignals,
        reporter: Reporter,
    ) -> None:
        self._job, self._stage, self._folder, self._node_env = job, stage, folder, node_env
        self._rendezvous, self._timeouts, self._requests, self._reporter = rendezvous, timeouts, requests, reporter
        self._planned, self._reasons, self._predicted = plan
        self._layout = self._planned
        self._run = Path(job.run)
        self._elastic = stage.spares > 0 or job.min_nodes is not None
        self._joined: dict[int, JoinedNode] = {}
        self._bad_slots: dict[int, str] = {}
        self._heartbeats = HeartbeatMonitor(rendezvous)
        self._orders = 0
        self._watched_at = self._devices_at = time.monotonic()
        self._devices: DeviceEvents | None = None
        # Every look opens one file per node.
        self._pause = timeouts.look_seconds if node_env.slots > _FEW_NODES else min(0.2, timeouts.look_seconds)
        self.error: TrainshedError | None = None
        """What ended the start, where it failed."""

    def first_order(self) -> AgentOrder:
        """Wait for all nodes, then begin the first attempt, or end the start and say why."""
        began = time.monotonic()
        slots = range(self._node_env.slots)
        while True:
            # Read before the joined nodes: a node that refuses writes why, and its end then stops the others.
            stop_exit_code = self._requests.exit_code
            self._joined = self._rendezvous.joined()
            missing = [slot for slot in slots if slot not in self._joined]
            problem = next((node.problem for node in self._joined.values() if node.problem), None)
            if problem is not None:
                return self.fail(InputError(problem))
            if stop_exit_code is not None and missing:
                # Most likely one of them could not even start its agent, and the scheduler ends the rest.
                return self.fail(TrainshedError(f"asked to stop while {_format_slots(missing)} had not started"))
            if stop_exit_code is not None:
                return self._finish(stop_exit_code, "asked to stop before training began")
            if not missing or time.monotonic() - began >= self._timeouts.meet_seconds:
                break
            time.sleep(self._pause)
        training = first_training_slots(self._stage)
        if not missing:
            return self._begin_attempt(training, startup_phases() | {"meeting": time.monotonic() - began})
        seconds = f"{self._timeouts.meet_seconds:.0f} s"
        self._bad_slots = {slot: f"node {slot} did not start within {seconds}" for slot in missing}
        what = ", ".join(self._bad_slots.values())
        if not self._elastic:
            return self.fail(TrainshedError(what, hint="look at the scheduler's own log"))
        return self._restart_without_bad_nodes(training, TrainshedError(what))

    def watch(self, order: AgentOrder, records: AttemptRecords) -> None:
        """Check from time to time whether a node of the attempt has stopped sending heartbeats."""
        if time.monotonic() - self._watched_at < self._timeouts.beat_seconds:
            return
        self._watched_at = time.monotonic()
        for slot in self._heartbeats.silent_slots(order.slots, self._timeouts.lost_seconds):
            records.mark_failed(self._joined[slot].host, f"{self._joined[slot].host} shows no sign of life")
        self._write_devices(order)

    def _write_devices(self, order: AgentOrder) -> None:
        """Write what the devices of all nodes report, with every second heartbeat: once a minute."""
        if self._devices is None or time.monotonic() - self._devices_at < 2 * self._timeouts.beat_seconds:
            return
        self._devices_at = time.monotonic()
        reports = {node: self._heartbeats.devices.get(slot, b"") for node, slot in enumerate(order.slots)}
        self._devices.update(parse_samples(reports))

    def next_order(self, order: AgentOrder) -> AgentOrder:
        """Wait until the ranks of all nodes have ended, then decide what comes next."""
        assert order.attempt is not None
        nodes = self._collect_records(order, AttemptRecords(self._run, order.attempt))
        self._close_devices()
        if all(node.ended == "finished" for node in nodes):
            return self._finish(0, "")
        if not any(node.ended in ("failed", "lost") for node in nodes):
            stopped = [node.exit_code for node in nodes if node.ended == "stopped"]
            if stopped:
                return self._stopped(order.attempt, max(stopped))
        error = self._explain(order.attempt, nodes)
        self._bad_slots |= {node.slot: f"{node.host}: {node.bad_node}" for node in nodes if node.bad_node is not None}
        if self._elastic and any(node.bad_node is not None for node in nodes) and error.exit_code != 2:
            return self._restart_without_bad_nodes(order.slots, error)
        return self.fail(error)

    def _close_devices(self) -> None:
        if self._devices is not None:
            self._devices.close()
            self._devices = None

    def _stopped(self, attempt: int, exit_code: int) -> AgentOrder:
        events = read_events(LocalStore(self._run), "", attempt=attempt)
        if exit_code == _NEAR_TIME_LIMIT_EXIT_CODE and not any(event["kind"] == "step" for event in events):
            # It would be queued again after each time limit, and never end.
            what = "the time limit came before the first step was done"
            return self.fail(TrainshedError(what, hint="raise limits.hours in the cluster file"))
        return self._finish(exit_code, "asked to stop")

    def _restart_without_bad_nodes(self, training: tuple[int, ...], error: TrainshedError) -> AgentOrder:
        """Begin another attempt without the bad nodes, or end the start."""
        slots = replace_bad_slots(training, self._node_env.slots, self._bad_slots)
        bad = "; ".join(self._bad_slots.values())
        if slots is not None:
            self._reporter.warn(f"{bad}: a spare node steps in")
            return self._begin_attempt(slots, {})
        smaller = plan_for_fewer_nodes(self._job, self._stage, self._folder, self._planned, self._bad_slots)
        if isinstance(smaller, str):
            return self.fail(TrainshedError(f"{error.what}; {smaller}", where=error.where, hint=error.hint))
        slots, self._layout = smaller
        self._reasons = (f"planned anew as {self._layout} for {len(slots)} nodes: {bad}",)
        self._reporter.warn(self._reasons[0])
        return self._begin_attempt(slots, {})

    def _begin_attempt(self, training: tuple[int, ...], phases: dict[str, float]) -> AgentOrder:
        """Take the next attempt number and tell all agents who has which ranks."""
        store = LocalStore(self._run)
        attempt = take_attempt(store, "").number
        # What was predicted is of the whole job, not of fewer nodes.
        predicted = self._predicted if self._layout == self._planned else None
        write_plan(store, attempt, self._layout, self._reasons, predicted=predicted)
        self._orders += 1
        host, port = self._node_env.master
        # Not the port of the previous attempt: a rank that was killed may hold it a little longer.
        port += self._orders - 1
        if training[0] == 0:
            port = unused_port(port)  # rank 0 is on this node, which others may use too
        else:
            host = self._joined[training[0]].host
        order = AgentOrder(self._orders, attempt, training, (host, port))
        records = AttemptRecords(self._run, attempt)
        per_node = self._stage.ranks_per_node
        lines = records.write_hosts(self._node_env.start, order, self._joined, self._bad_slots, per_node)
        self._reporter.note(f"attempt {attempt}: {self._layout}, rank 0 at {host}:{order.master[1]}")
        with EventWriter(store, "", attempt=attempt, rank=None) as events:
            for name, seconds in phases.items():
                events.emit("phase", name=name, seconds=seconds)
            for line in lines:
                self._reporter.note(line)
                events.emit("note", text=line)
        self._rendezvous.end_fast_heartbeats()
        self._rendezvous.publish(order)
        self._heartbeats.reset()
        self._close_devices()
        self._devices = DeviceEvents(store, attempt, nodes=len(training), ranks_per_node=per_node)
        return order

    def _collect_records(self, order: AgentOrder, records: AttemptRecords) -> list[NodeRecord]:
        """Wait for the record of every node; for a node that stops sending heartbeats it is written here."""
        by_node: dict[int, NodeRecord] = {}
        fast = False
        while True:
            # Slow heartbeats are enough until ranks have ended somewhere: this node may not train itself.
            if not fast and self._rendezvous.wants_fast_heartbeats:
                fast = True
                self._heartbeats.reset()
            silence_seconds = self._timeouts.roll_call_seconds if fast else self._timeouts.lost_seconds
            for node in range(len(order.slots)):
                if node not in by_node and (record := records.read_node(node)) is not None:
                    by_node[node] = record
            missing = {order.slots[node]: node for node in range(len(order.slots)) if node not in by_node}
            if not missing:
                return [by_node[node] for node in sorted(by_node)]
            for slot in self._heartbeats.silent_slots(tuple(missing), silence_seconds):
                by_node[missing[slot]] = self._record_lost_node(missing[slot], slot, records)
            if not by_node:  # this node may not train itself
                self._write_devices(order)
            time.sleep(self._pause)

    def _record_lost_node(self, node: int, slot: int, records: AttemptRecords) -> NodeRecord:
        host = self._joined[slot].host
        return records.write_lost_node(
            node,
            slot,
            host,
            self._stage.ranks_per_node,
            ranks_text=f"was on {host}, which shows no sign of life",
            node_text="shows no sign of life",
        )

    def _explain(self, attempt: int, nodes: list[NodeRecord]) -> TrainshedError:
        refusal = next((node.what for node in nodes if node.what), None)
        if refusal is not None:
            health = AttemptRecords(self._run, attempt).folder
            with EventWriter(LocalStore(self._run), "", attempt=attempt, rank=None) as events:
                events.emit("failure", ranks=[], collective=None, what=refusal)
            return TrainshedError(refusal, where=str(health), hint="its files say what was found on each node")
        failed = [rank for node in nodes for rank in node.failed]
        ends = {rank.rank: rank.how for rank in failed if not rank.killed}
        failed.sort(key=lambda rank: rank.killed)
        world_size = len(nodes) * self._stage.ranks_per_node
        error = explain_failure(
            self._run, attempt, world_size, rank_ends=ends, failed_ranks=[rank.rank for rank in failed]
        )
        hosts = [node.host for node in nodes if node.ended in ("failed", "lost")]
        self._reporter.warn(f"attempt {attempt} failed on {', '.join(hosts) or 'no node in particular'}")
        return error

    def fail(self, error: TrainshedError) -> AgentOrder:
        """End the start with an error, on all nodes."""
        self.error = error
        return self._publish_end(AgentOrder.failed(self._orders + 1, error))

    def _finish(self, exit_code: int, what: str) -> AgentOrder:
        return self._publish_end(AgentOrder(self._orders + 1, exit_code=exit_code, what=what))

    def _publish_end(self, order: AgentOrder) -> AgentOrder:
        self._orders = order.number
        bad_slots = [slot for slot in sorted(self._bad_slots) if slot in self._joined]
        self._rendezvous.write_bad_nodes([self._joined[slot].host for slot in bad_slots])
        self._rendezvous.publish(order)
        return order


def _format_slots(slots: list[int]) -> str:
    return f"node {slots[0]}" if len(slots) == 1 else f"{len(slots)} nodes (first of all node {slots[0]})"


def first_training_slots(stage: Stage) -> tuple[int, ...]:
    """Return the slots that train when no node is bad: the first ones, in the scheduler's order."""
    return tuple(range(stage.nodes))


def replace_bad_slots(training: tuple[int, ...], slots: int, bad: Collection[int]) -> tuple[int, ...] | None:
    """Return the slots that train, with spares in place of the bad ones; None where there are too few spares.

    Ranks are static: every other node keeps its node rank.
    """
    free = [slot for slot in range(slots) if slot not in bad and slot not in training]
    replaced = [slot if slot not in bad else (free.pop(0) if free else None) for slot in training]
    slots_left = tuple(slot for slot in replaced if slot is not None)
    return slots_left if len(slots_left) == len(training) else None


def plan_for_fewer_nodes(
    job: JobFile, stage: Stage, folder: Path, layout: RankLayout, bad: Collection[int]
) -> tuple[tuple[int, ...], RankLayout] | str:
    """Plan for the nodes that are left; returns the slots that train and their layout, or why nothing can train."""
    good = [slot for slot in range(stage.nodes + stage.spares) if slot not in bad]
    left = f"{len(good)} of {stage.nodes + stage.spares} nodes are left"
    if job.min_nodes is None:
        return f"{left}, and {stage.nodes} are needed"
    if len(good) < job.min_nodes:
        return f"{left}, and elastic.min_nodes asks for {job.min_nodes}"
    resolved = Path(job.run) / RECIPE_FILE  # has the architecture, which the job's file may leave to base weights
    recipe = load_recipe(str(resolved if resolved.is_file() else folder / RECIPE_FILE))
    config = recipe.model.config
    if config is None:
        return f"{left}, and the architecture to plan them for is not known"
    config = recipe.trained_architecture(config)
    ramp = recipe.train.batch_ramp
    schedule = BatchSchedule(
        recipe.train.global_batch, BatchRampUp(ramp.start, ramp.increment, ramp.samples) if ramp is not None else None
    )
    planned = layout_for_nodes(
        layout,
        config,
        nodes=min(len(good), stage.nodes),
        min_nodes=job.min_nodes,
        ranks_per_node=stage.ranks_per_node,
        sequence_length=recipe.data.sequence_length or config.max_positions,
        batch_sizes=schedule.sizes,
    )
    if isinstance(planned, str):
        return f"{left}, and {planned}"
    smaller, count = planned
    return tuple(good[:count]), smaller
