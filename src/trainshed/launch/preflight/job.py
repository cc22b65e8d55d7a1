"""Preflight from a cluster file: what each node must know of it, and the stage that runs it alone."""

from __future__ import annotations

from trainshed.launch.fabric import fabric_setup, machine_of
from trainshed.launch.job import Stage
from trainshed.launch.preflight.run import PreflightJob
from trainshed.launch.preflight.storage import sampled_nodes
from trainshed.plan.budget.planned_storage import storage_of
from trainshed.recipe import Cluster
from trainshed.storage import Store


def preflight_job(
    cluster: Cluster, *, store: Store, run_folder: str, attempt: int, nodes: int, gpus: int, full: bool = False
) -> PreflightJob:
    """Return what every node of a job is to prove; `gpus` of each node that the job uses, 0 on processors."""
    machine = machine_of(cluster)
    storage = storage_of(cluster)
    writers = len(sampled_nodes(nodes))
    return PreflightJob(
        store,
        run_folder,
        attempt,
        nodes,
        gpus,
        fabric_setup(cluster, nodes=nodes),
        machine,
        full,
        storage_gb_per_s=None if storage is None else storage.write_gb_per_s(writers, machine) / writers,
    )


def preflight_stage(cluster: Cluster, *, nodes: int | None = None) -> Stage:
    """Return a stage that takes a training's nodes and proves them; what runs behind the proof is the submitter's."""
    machine = machine_of(cluster)
    gpus = machine.gpus if machine is not None else 0
    return Stage("train", nodes or cluster.nodes.default, gpus, max(gpus, 1), preflight=True)
