"""What a job needs to use the network between its nodes: variables, a script, devices, privileges, and its proof.

`fabric_setup` puts a setup together from the catalog (`catalog/fabric_setups/`) for one cluster and number of nodes.
Every setup names its network (`NCCL_NET`), so that a plugin that is missing ends the job instead of leaving it on
sockets, and says what NCCL's own log must show, which `preflight` looks for before step 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trainshed.catalog import Fabric, Machine, fabric, fabric_names, find_gpu, find_machine
from trainshed.catalog.fabric_setups import PodPart, SetupFile, SetupPart, setup_file
from trainshed.errors import InputError, RecipeError
from trainshed.launch.fabric_needs import DeviceFiles, FabricSetup, NodeNeeds, PodNeeds, filled
from trainshed.recipe import Cluster
from trainshed.recipe.cluster import Kubernetes

__all__ = ["SINGLE_NODE", "UNKNOWN", "FabricSetup", "NodeNeeds", "PodNeeds", "fabric_setup", "machine_of"]

SINGLE_NODE, UNKNOWN = "single-node", "unknown"


def fabric_setup(cluster: Cluster, *, nodes: int) -> FabricSetup:
    """Return the setup of a cluster's fabric: the machine's unless `fabric:` says another, as NAME or NAME@VERSION."""
    machine = machine_of(cluster)
    if nodes == 1:
        return FabricSetup(SINGLE_NODE, None, "")
    written = cluster.fabric
    if written is None and machine is None:
        note = "the nodes have no GPUs, and no `fabric` is named: gloo chooses a network, and nothing can be proven"
        return FabricSetup(UNKNOWN, None, "", notes=(note,))
    name, _, version = (written or (machine.fabric if machine else "")).partition("@")
    found = _fabric(name, cluster)
    file = setup_file(found.setup)
    version = version or file.default
    if version not in file.versions:
        raise RecipeError(
            f"there is no version `{version}` of the setup of {name}",
            where=cluster.where("fabric"),
            hint=f"write one of {', '.join(f'{name}@{known}' for known in file.versions)}",
        )
    return _assemble(found, file, version, cluster, machine, nodes)


def machine_of(cluster: Cluster) -> Machine | None:
    """Return the cluster's machine, None where it names none."""
    if cluster.gpu_machine is None:
        return None
    try:
        return find_machine(cluster.gpu_machine)
    except InputError as error:
        raise RecipeError(error.what, where=cluster.where("machine"), hint=error.hint) from None


def _fabric(name: str, cluster: Cluster) -> Fabric:
    try:
        return fabric(name)
    except InputError as error:
        known = f"known fabrics: {', '.join(fabric_names())}"
        hint = error.hint if error.hint and "did you mean" in error.hint else known
        raise RecipeError(f"there is no fabric `{name}`", where=cluster.where("fabric"), hint=hint) from None


def _assemble(
    found: Fabric, file: SetupFile, version: str, cluster: Cluster, machine: Machine | None, nodes: int
) -> FabricSetup:
    parts: list[SetupPart] = [file, file.versions[version]]
    if cluster.sharp:
        if file.sharp is None:
            raise RecipeError(
                f"{found.name} has no switches that sum",
                where=cluster.where("sharp"),
                hint="delete it; SHARP is InfiniBand's",
            )
        parts.append(file.sharp)
    if machine is not None:
        parts += [file.amd] if find_gpu(machine.gpu).vendor == "amd" else []
        parts += [file.machines[machine.name]] if machine.name in file.machines else []
    on_host = cluster.on_kubernetes.host_network is True
    parts += [file.host_network] if on_host else []
    fill: dict[str, str | int] = {"nodes": nodes}
    if machine is not None:
        fill |= {"gpus": machine.gpus} | ({"nics": machine.nics} if machine.nics is not None else {})
    for part in parts:
        fill |= part.fill
    selected = next(part.selected for part in reversed(parts) if part.selected)
    setup = FabricSetup(
        name=found.setup,
        fabric=found.name,
        version=version,
        environment=_environment(parts, sharp=cluster.sharp),
        library_path=tuple(path for part in parts for path in part.library_path),
        profile_script=next((part.profile_script for part in reversed(parts) if part.profile_script), None),
        kubernetes=_pod(parts, cluster.on_kubernetes),
        slurm=NodeNeeds(
            tuple(mount for part in parts for mount in part.slurm.mounts),
            tuple(line for part in parts for line in part.slurm.prologue),
        ),
        selected=selected,
        rejected=tuple(pattern for part in parts for pattern in part.rejected),
        devices=DeviceFiles(file.devices.path, _count(file.devices.count, fill)) if file.devices else None,
        pairs=file.pairs,
        refused=file.refused,
        profile_sets=file.profile_sets,
        notes=_notes(parts, cluster),
    )
    complete = _filled_in(setup, fill, cluster, machine)
    bare = cluster.target == "slurm" and cluster.on_slurm.container == "none"
    return _without_container(complete) if bare else complete


def _without_container(setup: FabricSetup) -> FabricSetup:
    """On nodes as they are, things lie where a container would mount them from."""
    places = [mount.split(":")[:2] for mount in setup.slurm.mounts]

    def outside(path: str) -> str:
        for source, target in places:
            if path == target or path.startswith(f"{target}/"):
                return source + path[len(target) :]
        return path

    return replace(
        setup,
        environment={name: outside(value) for name, value in setup.environment.items()},
        library_path=tuple(outside(path) for path in setup.library_path),
        profile_script=outside(setup.profile_script) if setup.profile_script is not None else None,
    )


def _environment(parts: list[SetupPart], *, sharp: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in parts:
        found |= part.environment | (part.sharp_environment if sharp else {})
    return found


def _notes(parts: list[SetupPart], cluster: Cluster) -> tuple[str, ...]:
    """What a person should know of the fabric, and of it on this target."""
    found = [note for part in parts for note in part.notes]
    if cluster.target in ("slurm", "kubernetes"):
        found += [note for part in parts for note in getattr(part, cluster.target).notes]
    written = cluster.on_kubernetes.resources
    if written is not None:
        own = {name for part in parts for name in part.kubernetes.resources}
        found = [note for note in found if not any(name in note for name in own)]
        asked = " and ".join(f"{count} {name}" for name, count in written.items()) or "none"
        found.append(f"of the network's devices each pod asks for {asked} ({cluster.where('kubernetes.resources')})")
    return tuple(found)


def _pod(parts: list[SetupPart], written: Kubernetes) -> PodNeeds:
    """What all parts ask of a pod; the cluster file may name other devices, and forbid the node's network."""
    pods: list[PodPart] = [part.kubernetes for part in parts]
    kept = [] if any(part.drop_annotations for part in parts) else pods
    privileged = {name for pod in pods for name in pod.privileged_init_containers}
    containers = [dict(container) for pod in pods for container in pod.init_containers]
    for container in containers:
        if container["name"] in privileged:
            container["securityContext"] = {**container.get("securityContext", {}), "privileged": True}
    return PodNeeds(
        annotations={name: value for pod in kept for name, value in pod.annotations.items()},
        init_containers=tuple(containers),
        volumes=tuple(volume for pod in pods for volume in pod.volumes),
        mounts=tuple(mount for pod in pods for mount in pod.mounts),
        resources=_devices(pods) if written.resources is None else written.resources,
        capabilities=tuple(dict.fromkeys(name for pod in pods for name in pod.capabilities)),
        privileged=any(pod.privileged for pod in pods),
        host_network=written.host_network is not False and any(pod.host_network for pod in pods),
        tolerations=tuple(each for pod in pods for each in pod.tolerations),
        resource_claims=tuple(each for pod in pods for each in pod.resource_claims),
        claims=tuple(each for pod in pods for each in pod.claims),
        objects=tuple(each for pod in pods for each in pod.objects),
    )


def _devices(pods: list[PodPart]) -> dict[str, str | int]:
    return {name: value for pod in pods for name, value in pod.resources.items()}


def _filled_in(
    setup: FabricSetup, fill: Mapping[str, str | int], cluster: Cluster, machine: Machine | None
) -> FabricSetup:
    pod = setup.kubernetes
    complete = replace(
        setup,
        environment=filled(setup.environment, fill),
        selected=filled(setup.selected, fill),
        kubernetes=replace(pod, **{key: filled(getattr(pod, key), fill) for key in _FILLED_KEYS}),
    )
    if "nics" not in fill and cluster.target == "kubernetes" and "{nics}" in repr(complete.kubernetes):
        subject = f"the machine {machine.name} does not say" if machine else "no `machine` says"
        raise RecipeError(
            f"{subject} how many cards of {setup.fabric} a node has, and pods must ask for each",
            where=cluster.where("machine"),
            hint="describe the machine in a file with `nics: N` and write its path: machine: ./mynode.yaml; "
            "or say what pods ask for: kubernetes: {resources: {rdma/ib: 8}}",
        )
    return complete


_FILLED_KEYS = ("annotations", "init_containers", "resources", "objects")


def _count(written: int | str, fill: Mapping[str, str | int]) -> int:
    """How many devices a node must show; 1 where the machine does not say."""
    value = filled(written, fill)
    return value if isinstance(value, int) else 1
