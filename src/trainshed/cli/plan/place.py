"""Where a plan is for: which machine, and how many GPUs of it. Flags win over the recipe, it wins over the cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trainshed.catalog.gpus import find_gpu
from trainshed.catalog.machines import Machine, find_machine, machine_of_gpu
from trainshed.cli.plan.flags import Flags
from trainshed.errors import InputError
from trainshed.plan.performance.hardware import Hardware, hardware_of, hardware_of_gpu
from trainshed.recipe import Cluster, Layout, Recipe

Found = TypeVar("Found")


def asked_machine(flags: Flags, cluster: Cluster) -> tuple[Machine, Hardware]:
    """The machine of the flags, or of the cluster; for a GPU alone the one its entry names."""
    if flags.machine is not None:
        machine = named("--machine", find_machine, flags.machine)
        if flags.gpu is not None:
            wanted, has = named("--gpu", find_gpu, flags.gpu).name, find_gpu(machine.gpu).name
            if wanted != has:
                raise InputError(
                    f"--machine {flags.machine} has {has}, and --gpu says {wanted}",
                    where="--gpu",
                    hint="leave --gpu out: the machine says it",
                )
        return machine, hardware_of(machine)
    if flags.gpu is not None:
        machine = named("--gpu", machine_of_gpu, flags.gpu)
        return machine, hardware_of_gpu(flags.gpu)
    if cluster.machine is None:
        raise InputError(
            f"the cluster {cluster.name} does not say what machines it has",
            where="--on" if flags.on else None,
            hint="write --gpu h100, --machine a3-mega, or --on CLUSTER with a `machine:` in its file",
        )
    if cluster.gpu_machine is None:
        raise InputError(
            f"the cluster {cluster.name} has no GPUs, and nothing is predicted for CPUs",
            where=cluster.where("machine"),
            hint="write --gpu h100 or --machine a3-mega to plan for GPUs",
        )
    machine = named(cluster.where("machine"), find_machine, cluster.gpu_machine)
    return machine, hardware_of(machine)


def asked_gpu_counts(
    flags: Flags, cluster: Cluster, recipe: Recipe | None, hardware: Hardware, layout: Layout | None
) -> tuple[int, ...]:
    """How many GPUs, smallest first: flags win over the recipe, the recipe over the cluster."""
    counts, where = flags.gpu_counts(), "--gpus"
    if not counts:
        nodes, where = _nodes(flags, cluster, recipe)
        if nodes is not None:
            counts = (nodes * hardware.gpus_per_node,)
        elif layout is not None:
            counts, where = (layout.tp * layout.pp * layout.cp * (layout.dp or 1),), "layout"
        else:
            raise InputError("on how many GPUs?", hint="write --gpus 128, --nodes 16, or --gpus 8..4096 for a curve")
    per_node, most = hardware.gpus_per_node, cluster.nodes.max
    for count in counts:
        if count > per_node and count % per_node:
            machine = hardware.machine or hardware.gpu_name
            raise InputError(
                f"{count} GPUs are no whole number of {machine} machines with {per_node} each",
                where=where,
                hint=f"write {count // per_node * per_node} or {-(-count // per_node) * per_node}",
            )
        if flags.on is not None and most is not None and count > most * per_node:
            raise InputError(
                f"{count} GPUs are {-(-count // per_node)} nodes, and the cluster {cluster.name} has {most} at most",
                where=where,
                hint=f"write {most * per_node} or less, or leave --on out",
            )
    return counts


def _nodes(flags: Flags, cluster: Cluster, recipe: Recipe | None) -> tuple[int | None, str]:
    if flags.nodes is not None:
        return flags.nodes, "--nodes"
    if recipe is not None and recipe.resources.nodes is not None:
        return recipe.resources.nodes, recipe.where("resources.nodes")
    # On this machine the world size is the product of the layout.
    return (None, "") if cluster.target == "local" else (cluster.nodes.default, "--on")


def named(where: str, find: Callable[[str], Found], name: str) -> Found:
    """Find something of the catalog; an error says who asked for it."""
    try:
        return find(name)
    except InputError as error:
        raise InputError(error.what, where=error.where or where, hint=error.hint) from None
