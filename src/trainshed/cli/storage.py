"""`trainshed storage`: the volume that a cluster's jobs share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cyclopts import App

if TYPE_CHECKING:
    from trainshed.recipe import Cluster

app = App(name="storage", help="The volume that a cluster's jobs share.")


@app.command
def up(*overrides: str, on: str, dry_run: bool = False) -> int:
    """Make the volumes that a cluster file describes (`volumes: [{pvc: …, create: {…}}]`); they are kept for good.

    Parameters
    ----------
    overrides
        Keys of the cluster file to change, as cluster.key=value.
    on
        The cluster file.
    dry_run
        Print what would be made, and make nothing.
    """
    import sys

    from trainshed.cli.console import reporter
    from trainshed.errors import InputError
    from trainshed.launch.kubernetes.storage import apply_storage, storage_text
    from trainshed.recipe import load_cluster, split_overrides

    cluster = load_cluster(on, split_overrides(overrides)[1])
    if cluster.target != "kubernetes":
        raise InputError(
            f"the nodes of a {cluster.target} cluster mount disks themselves", where=cluster.where("target")
        )
    text = storage_text(cluster)
    for sentence in save_sentences(cluster):
        reporter().note(sentence)
    if dry_run:
        sys.stdout.write(text)
        return 0
    for made in apply_storage(cluster):
        reporter().note(f"made {made}; it is kept whatever becomes of the jobs")
    return 0


def save_sentences(cluster: Cluster) -> list[str]:
    """Say how long checkpoints of known sizes take on the storage that a cluster names."""
    from trainshed.catalog.machines import find_machine
    from trainshed.catalog.models import model_preset
    from trainshed.models.parameters import parameter_count
    from trainshed.plan.budget.checkpoint_cost import checkpoint_cost
    from trainshed.plan.budget.planned_storage import storage_of
    from trainshed.plan.layout import resolve_layout
    from trainshed.plan.performance.hardware import hardware_of
    from trainshed.recipe import Layout

    if cluster.gpu_machine is None or cluster.storage is None:
        return ["no storage is named for the plan (`storage: {tier: …}`): the time of a checkpoint is not known"]
    machine, storage = find_machine(cluster.gpu_machine), storage_of(cluster)
    hardware = hardware_of(machine)
    said = []
    for preset in ("llama3-8b", "llama3-70b", "gpt-175b"):
        config = model_preset(preset)
        layout = resolve_layout(Layout(shard="full"), config, world_size=cluster.nodes.default * machine.gpus)
        cost = checkpoint_cost(parameter_count(config), layout, hardware, storage=storage, machine=machine)
        if cost.write_seconds is not None:
            size = cost.bytes / 1e9
            said.append(f"a checkpoint of {preset} ({size:,.0f} GB) takes {cost.write_seconds / 60:.1f} minutes there")
    return said
