"""One attempt at a stage whose processes run together: a rank per GPU, or a foreign engine's script per node."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import orjson

from trainshed.errors import InputError, TrainshedError
from trainshed.launch.agent.training import read_job_plan
from trainshed.launch.explaining import explain
from trainshed.launch.fabric import fabric_setup
from trainshed.launch.here import logs_folder, write_plan
from trainshed.launch.job import Stage
from trainshed.launch.ranks import RanksResult, rank_environment
from trainshed.launch.ray.crew import FAILURE_GRACE_SECONDS, Crew, Member
from trainshed.launch.ray.host import DEVICE_VARIABLES, Host, HostPlace, HostTask, device_environment
from trainshed.launch.ray.placing import reserved
from trainshed.launch.ray.proof import prove
from trainshed.launch.ray.resources import CPU, GPU, bundle_of
from trainshed.launch.ray.work import Work, actor_options
from trainshed.observe.rank_error import health_folder
from trainshed.observe.reading import EventFollower
from trainshed.storage import LocalStore
from trainshed.storage.attempts import take_attempt

_SCRIPT_GRACE_SECONDS = 5.0  # foreign engines leave no flight records of ours
Placed = tuple[Any, HostPlace]
"""An actor, and where it is."""


class Training:
    """One attempt; `run` once."""

    def __init__(self, work: Work, stage: Stage, listener: Callable[[dict[str, Any]], None]) -> None:
        self._work, self._stage, self._listener = work, stage, listener
        self._per_node = 1 if stage.script is not None else stage.ranks_per_node

    def run(self) -> RanksResult:
        """Place the actors, run their processes, and raise what ended them, unless somebody asked for a stop."""
        work, stage = self._work, self._stage
        bundle = bundle_of(stage, work.gpu_resource)
        with reserved(
            stage.nodes, bundle, stopped=work.stopped, on_wait=lambda why: work.says_waits(stage, why)
        ) as group:
            nodes = self._placed(group, bundle)
            attempt = take_attempt(LocalStore(work.run_folder), "").number
            if stage.script is None:
                layout, reasons = read_job_plan(work.folder)
                write_plan(LocalStore(work.run_folder), attempt, layout, reasons)
            self._keep_hosts(attempt, nodes)
            if stage.preflight:
                devices = [device_environment([each for _, each in node]) for node in nodes]
                prove(work, stage, attempt, [node[0] for node in nodes], devices)
            members = self._members(nodes, attempt)
            grace = FAILURE_GRACE_SECONDS if stage.script is None else _SCRIPT_GRACE_SECONDS
            crew = Crew(members, failure_grace_seconds=grace)
            result = crew.see_through(lambda: work.asked, self._following())
        if result.failed:
            raise self._failure(attempt, result, len(members))
        return result

    def _placed(self, group: Any, bundle: dict[str, float]) -> list[list[Placed]]:
        """Start the actors, and put them in the order of their ranks: by node, and on a node by GPU."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        share = {name: amount / self._per_node for name, amount in bundle.items()}
        actors = []
        for node in range(self._stage.nodes):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
            made = ray.remote(Host).options(**actor_options(share), scheduling_strategy=strategy)
            actors += [made.remote() for _ in range(self._per_node)]
        # When the driver ends, however it does, Ray kills its actors, and the kernel their processes with them.
        places = ray.get([actor.place.remote() for actor in actors])
        placed = sorted(zip(actors, places, strict=True), key=lambda each: _order(each[1]))
        return [list(each) for _, each in groupby(placed, key=lambda each: each[1].node)]

    def _members(self, nodes: Sequence[Sequence[Placed]], attempt: int) -> dict[int, Member]:
        import ray

        first, place = nodes[0][0]
        master = (place.address, ray.get(first.free_port.remote()))
        members = {}
        for number, node in enumerate(nodes):
            devices = device_environment([each for _, each in node])
            for local, (actor, where) in enumerate(node):
                task = self._task(number, local, attempt, master)
                members[task.rank] = Member(
                    actor, where, replace(task, environment={**task.environment, **devices}, hidden=self._hidden())
                )
        return members

    def _task(self, node: int, local: int, attempt: int, master: tuple[str, int]) -> HostTask:
        work, stage = self._work, self._stage
        rank = node * self._per_node + local
        places = {
            **stage.environment,
            "TRAINSHED_ATTEMPT": str(attempt),
            "NODE_RANK": str(node),
            "NNODES": str(stage.nodes),
            "MASTER_ADDR": master[0],
            "MASTER_PORT": str(master[1]),
        }
        if stage.script is None:
            sizes = {"ranks": self._per_node, "world_size": stage.world_size}
            places |= rank_environment(rank, local, **sizes, master=master)
            arguments = ("-P", "-m", "trainshed", "worker", "train", "--run", work.job.run, "--attempt", str(attempt))
            arguments += ("--on", str(work.folder / "cluster.yaml"))
        else:
            arguments = (str(work.folder / stage.script),)
        return HostTask(
            arguments,
            rank,
            str(logs_folder(work.run_folder, attempt)),
            places,
            program=None if stage.script is None else "bash",
            prologue=self._prologue(),
            secrets=work.cluster.secrets,
            precision=work.job.precision,
            grace_seconds=work.job.grace_seconds,
        )

    def _prologue(self) -> tuple[str, ...]:
        """What a node runs before a rank: the site's lines, and what its fabric needs besides; pods have that."""
        cluster, own = self._work.cluster, self._work.site_setup
        if cluster.target != "ray":
            return own
        setup = fabric_setup(cluster, nodes=self._stage.nodes)
        if setup.profile_script is None and not setup.library_path and not own:
            return ()
        return own + replace(setup, environment={**setup.environment, **cluster.environment}).shell_prologue()

    def _hidden(self) -> tuple[str, ...]:
        """Ray blanks these for actors that take no "GPU", also where GPUs have another name there."""
        other_name = self._work.gpu_resource not in (CPU, GPU)
        return DEVICE_VARIABLES if other_name and self._stage.gpus_per_node else ()

    def _keep_hosts(self, attempt: int, nodes: Sequence[Sequence[Placed]]) -> None:
        """Keep and say which node has which ranks."""
        self._work.says_runs(self._stage, [node[0][1].address for node in nodes])
        listed = []
        for number, node in enumerate(nodes):
            first = number * self._per_node
            place = node[0][1]
            listed.append(
                {
                    "node": number,
                    "host": place.address,
                    "hostname": place.hostname,
                    "ray_node": place.node,
                    "ranks": list(range(first, first + len(node))),
                    "processes": [each.process for _, each in node],
                }
            )
            last = first + len(node) - 1
            ranks = f"rank {first}" if last == first else f"ranks {first}-{last}"
            self._work.reporter.note(f"attempt {attempt}: {ranks} on {place.address} ({place.hostname})")
        folder = health_folder(self._work.run_folder, attempt)
        LocalStore(folder).put("hosts.json", orjson.dumps({"nodes": listed}, option=orjson.OPT_INDENT_2) + b"\n")

    def _following(self) -> Callable[[], None]:
        follower = EventFollower(self._work.run_folder)
        follower.poll()  # what earlier attempts wrote is no news

        def follow() -> None:
            for event in follower.poll():
                self._listener(event)

        return follow

    def _failure(self, attempt: int, result: RanksResult, world_size: int) -> TrainshedError:
        first = result.failed[0]
        if self._stage.script is None:
            self._work.says_log(first, f"rank {first.rank}")
            failed = [each.rank for each in result.failed]
            return explain(self._work.run_folder, attempt, world_size, ends=result.ends, failed=failed)
        self._work.says_log(first, f"node {first.rank}")
        kind = InputError if first.exit_code == InputError.exit_code else TrainshedError
        log = logs_folder(self._work.run_folder, attempt) / f"rank-{first.rank:05d}.log"
        return kind(f"{self._stage.name} failed: node {first.rank} {first.how}", where=str(log))


def _order(place: HostPlace) -> tuple[int, str, tuple[int, ...], int]:
    """Nodes by address as numbers, alike at every start; on a node by GPU."""
    gpus = tuple(int(gpu) if gpu.isdecimal() else 0 for gpu in place.gpus)
    return int(ipaddress.ip_address(place.address)), place.node, gpus, place.process
