"""What a job needs to use the network between its nodes: variables, a script, devices, privileges, and its proof.

`fabric_setup` makes a setup from the catalog (`catalog/fabric_setups/`) for one cluster and number of nodes. Every
setup names its network (`NCCL_NET`), so that a missing plugin ends the job and does not leave it on sockets. A setup
also says what NCCL's own log must show; `preflight` checks that before step 0.

`lint_environment` names the variables of a job's environment that do not belong to its fabric, each with the reason.
Such variables remain when a manifest is copied from one cloud to another. Most of them fail silently: NCCL falls back
to sockets, or to one algorithm for every message.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from trainshed.catalog import Fabric, Machine, fabric, fabric_names, find_gpu, find_machine
from trainshed.catalog.fabrics import (
    FabricPodPart,
    FabricSetupFile,
    FabricSetupPart,
    PairThresholds,
    RefusedVariable,
    fabric_setup_file,
    refused_variables,
)
from trainshed.errors import InputError, RecipeError
from trainshed.observe.nccl_log import ExpectedNetwork
from trainshed.recipe import Cluster
from trainshed.recipe.cluster import Kubernetes


@dataclass(frozen=True)
class PodRequirements:
    """What a pod needs, as values of its Kubernetes spec, into which they are merged."""

    annotations: Mapping[str, str] = field(default_factory=dict)
    init_containers: tuple[dict[str, Any], ...] = ()
    """In order; those with `restartPolicy: Always` are sidecars that Kubernetes ends after the job's container."""
    volumes: tuple[dict[str, Any], ...] = ()
    mounts: tuple[dict[str, Any], ...] = ()
    """volumeMounts of the job's container."""
    resources: Mapping[str, str | int] = field(default_factory=dict)
    """Extended resources of the job's container, for both requests and limits."""
    capabilities: tuple[str, ...] = ()
    privileged: bool = False
    host_network: bool = False
    """With `dnsPolicy: ClusterFirstWithHostNet`."""
    tolerations: tuple[dict[str, Any], ...] = ()
    resource_claims: tuple[dict[str, Any], ...] = ()
    """The pod's `resourceClaims`."""
    claims: tuple[dict[str, Any], ...] = ()
    """The container's `resources.claims`."""
    objects: tuple[dict[str, Any], ...] = ()
    """Further objects, created with the job's own."""

    @property
    def security_context(self) -> dict[str, Any]:
        """The container's securityContext; empty if it needs none."""
        context: dict[str, Any] = {"privileged": True} if self.privileged else {}
        return context | ({"capabilities": {"add": list(self.capabilities)}} if self.capabilities else {})

    def for_job(self, name: str) -> PodRequirements:
        """Fill in the job's name in objects and claims."""
        filled = {
            key: fill_placeholders(getattr(self, key), {"job": name})
            for key in ("resource_claims", "claims", "objects")
        }
        return replace(self, **filled)


@dataclass(frozen=True)
class SlurmRequirements:
    """What a job on Slurm needs."""

    mounts: tuple[str, ...] = ()
    """Mounts of its container, as FROM:TO[:ro] (pyxis' --container-mounts)."""
    prologue: tuple[str, ...] = ()
    """Lines of shell that run before the agent."""


@dataclass(frozen=True)
class DeviceFiles:
    """Device files that a node must have."""

    path: str
    count: int


@dataclass(frozen=True)
class FabricSetup:
    """A network as one cluster uses it."""

    name: str
    """The setup's (`efa`), or `single-node`, or `unknown` if the cluster file names neither machine nor fabric."""
    fabric: str | None
    """Its name in the catalog (`efa-v2`)."""
    version: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """To be set after the profile script, which may give the same variables other values."""
    library_path: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    """Libraries that the image must hold; `a|b`: one of them."""
    profile_script: str | None = None
    kubernetes: PodRequirements = field(default_factory=PodRequirements)
    slurm: SlurmRequirements = field(default_factory=SlurmRequirements)
    selected: tuple[str, ...] = ()
    """Regular expressions: NCCL's log of every node must match all of them."""
    rejected: tuple[str, ...] = ()
    """Regular expressions: the log must match none of them."""
    sharp_rejected: tuple[str, ...] = ()
    """The same where one group of ranks is measured; a job's groups inside a node have no SHARP, and may say so."""
    devices: DeviceFiles | None = None
    pairs: PairThresholds = field(default_factory=PairThresholds)
    refused: Mapping[str, RefusedVariable] = field(default_factory=dict)
    profile_sets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def rdma(self) -> bool:
        """Whether its cards need locked memory."""
        return self.fabric is not None and fabric(self.fabric).rdma

    @property
    def expected_network(self) -> ExpectedNetwork:
        """What NCCL's log must show in a job with several groups of ranks, and what to look at where it does not."""
        network = self.environment.get("NCCL_NET", "")
        hint = (
            f"is the plugin of {self.name} {self.version} in the image (NCCL_NET={network}), and are its devices there?"
        )
        return ExpectedNetwork(self.fabric or self.name, self.selected, self.rejected, hint)

    def shell_prologue(self) -> tuple[str, ...]:
        """Return the lines of bash that a node runs before the agent: libraries, the script, the variables."""
        lines = []
        if self.library_path:
            paths = ":".join(self.library_path)
            lines.append(f'export LD_LIBRARY_PATH={shlex.quote(paths)}"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"')
        if self.profile_script is not None:
            lib_dir = self.environment.get("NCCL_LIB_DIR")
            lines += [f"export NCCL_LIB_DIR={shlex.quote(lib_dir)}"] if lib_dir else []
            # Vendors' scripts read variables that are not set.
            script = f". {shlex.quote(self.profile_script)}"
            lines.append(f"case $- in *u*) set +u; {script}; set -u ;; *) {script} ;; esac")
        return (*lines, *(f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()))


def fill_placeholders(value: Any, values: Mapping[str, str | int]) -> Any:
    """Replace `{name}` by its value wherever it occurs; other braces belong to a shell or to JSON and stay."""
    if isinstance(value, str):
        whole = re.fullmatch(r"\{(\w+)\}", value)
        if whole and whole[1] in values:
            return values[whole[1]]
        return re.sub(r"(?<!\$)\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), value)
    if isinstance(value, Mapping):
        return {key: fill_placeholders(inner, values) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(fill_placeholders(inner, values) for inner in value)
    return value


SINGLE_NODE, UNKNOWN = "single-node", "unknown"


def fabric_setup(cluster: Cluster, *, nodes: int) -> FabricSetup:
    """Return the setup of a cluster's fabric: `fabric: NAME` or `NAME@VERSION`, else the fabric of its machine."""
    machine = machine_of(cluster)
    if nodes == 1:
        return FabricSetup(SINGLE_NODE, None, "")
    written = cluster.fabric
    if written is None and machine is None:
        note = "the nodes have no GPUs, and no `fabric` is named: gloo chooses a network, and nothing can be proven"
        return FabricSetup(UNKNOWN, None, "", notes=(note,))
    name, _, version = (written or (machine.fabric if machine else "")).partition("@")
    catalog_fabric = _find_fabric(name, cluster)
    file = fabric_setup_file(catalog_fabric.setup)
    version = version or file.default
    if version not in file.versions:
        raise RecipeError(
            f"there is no version `{version}` of the setup of {name}",
            where=cluster.where("fabric"),
            hint=f"write one of {', '.join(f'{name}@{known}' for known in file.versions)}",
        )
    return _assemble(catalog_fabric, file, version, cluster, machine, nodes)


def machine_of(cluster: Cluster) -> Machine | None:
    """Return the cluster's machine, None if it names none."""
    if cluster.gpu_machine is None:
        return None
    try:
        return find_machine(cluster.gpu_machine)
    except InputError as error:
        raise RecipeError(error.what, where=cluster.where("machine"), hint=error.hint) from None


def _find_fabric(name: str, cluster: Cluster) -> Fabric:
    try:
        return fabric(name)
    except InputError as error:
        known = f"known fabrics: {', '.join(fabric_names())}"
        hint = error.hint if error.hint and "did you mean" in error.hint else known
        raise RecipeError(f"there is no fabric `{name}`", where=cluster.where("fabric"), hint=hint) from None


def _assemble(
    catalog_fabric: Fabric, file: FabricSetupFile, version: str, cluster: Cluster, machine: Machine | None, nodes: int
) -> FabricSetup:
    parts: list[FabricSetupPart] = [file, file.versions[version]]
    if cluster.sharp:
        if file.sharp is None:
            raise RecipeError(
                f"{catalog_fabric.name} has no switches that sum",
                where=cluster.where("sharp"),
                hint="delete it; SHARP is InfiniBand's",
            )
        parts.append(file.sharp)
    if machine is not None:
        parts += [file.amd] if find_gpu(machine.gpu).vendor == "amd" else []
        parts += [file.machines[machine.name]] if machine.name in file.machines else []
    on_host_network = cluster.on_kubernetes.host_network is True
    parts += [file.host_network] if on_host_network else []
    placeholders: dict[str, str | int] = {"nodes": nodes}
    if machine is not None:
        placeholders |= {"gpus": machine.gpus} | ({"nics": machine.nics} if machine.nics is not None else {})
    for part in parts:
        placeholders |= part.fill
    selected = next(part.selected for part in reversed(parts) if part.selected)
    setup = FabricSetup(
        name=catalog_fabric.setup,
        fabric=catalog_fabric.name,
        version=version,
        environment=_environment(parts, sharp=cluster.sharp),
        library_path=tuple(path for part in parts for path in part.library_path),
        libraries=tuple(name for part in parts for name in part.libraries),
        profile_script=next((part.profile_script for part in reversed(parts) if part.profile_script), None),
        kubernetes=_pod_requirements(parts, cluster.on_kubernetes),
        slurm=SlurmRequirements(
            tuple(mount for part in parts for mount in part.slurm.mounts),
            tuple(line for part in parts for line in part.slurm.prologue),
        ),
        selected=selected,
        rejected=tuple(pattern for part in parts if part is not file.sharp for pattern in part.rejected),
        sharp_rejected=tuple(file.sharp.rejected) if cluster.sharp and file.sharp is not None else (),
        devices=DeviceFiles(file.devices.path, _device_count(file.devices.count, placeholders))
        if file.devices
        else None,
        pairs=file.pairs,
        refused=file.refused,
        profile_sets=file.profile_sets,
        notes=_notes(parts, cluster),
    )
    complete = _fill_setup(setup, placeholders, cluster, machine)
    without_container = cluster.target == "slurm" and cluster.on_slurm.container == "none"
    return _without_container(complete) if without_container else complete


def _without_container(setup: FabricSetup) -> FabricSetup:
    """Replace paths inside a container by the paths on the node that would be mounted there."""
    mounts = [mount.split(":")[:2] for mount in setup.slurm.mounts]

    def host_path(path: str) -> str:
        for source, target in mounts:
            if path == target or path.startswith(f"{target}/"):
                return source + path[len(target) :]
        return path

    return replace(
        setup,
        environment={name: host_path(value) for name, value in setup.environment.items()},
        library_path=tuple(host_path(path) for path in setup.library_path),
        profile_script=host_path(setup.profile_script) if setup.profile_script is not None else None,
    )


def _environment(parts: list[FabricSetupPart], *, sharp: bool) -> dict[str, str]:
    variables: dict[str, str] = {}
    for part in parts:
        variables |= part.environment | (part.sharp_environment if sharp else {})
    return variables


def _notes(parts: list[FabricSetupPart], cluster: Cluster) -> tuple[str, ...]:
    """What a person should know about the fabric, in general and on this target."""
    notes = [note for part in parts for note in part.notes]
    if cluster.target in ("slurm", "kubernetes"):
        notes += [note for part in parts for note in getattr(part, cluster.target).notes]
    written = cluster.on_kubernetes.resources
    if written is not None:
        own = {name for part in parts for name in part.kubernetes.resources}
        notes = [note for note in notes if not any(name in note for name in own)]
        devices = " and ".join(f"{count} {name}" for name, count in written.items()) or "none"
        notes.append(f"of the network's devices each pod asks for {devices} ({cluster.where('kubernetes.resources')})")
    return tuple(notes)


def _pod_requirements(parts: list[FabricSetupPart], written: Kubernetes) -> PodRequirements:
    """What all parts need from a pod; the cluster file may name other devices and forbid the node's network."""
    pods: list[FabricPodPart] = [part.kubernetes for part in parts]
    annotated = [] if any(part.drop_annotations for part in parts) else pods
    privileged = {name for pod in pods for name in pod.privileged_init_containers}
    containers = [dict(container) for pod in pods for container in pod.init_containers]
    for container in containers:
        if container["name"] in privileged:
            container["securityContext"] = {**container.get("securityContext", {}), "privileged": True}
    return PodRequirements(
        annotations={name: value for pod in annotated for name, value in pod.annotations.items()},
        init_containers=tuple(containers),
        volumes=tuple(volume for pod in pods for volume in pod.volumes),
        mounts=tuple(mount for pod in pods for mount in pod.mounts),
        resources=_extended_resources(pods) if written.resources is None else written.resources,
        capabilities=tuple(dict.fromkeys(name for pod in pods for name in pod.capabilities)),
        privileged=any(pod.privileged for pod in pods),
        host_network=written.host_network is not False and any(pod.host_network for pod in pods),
        tolerations=tuple(toleration for pod in pods for toleration in pod.tolerations),
        resource_claims=tuple(claim for pod in pods for claim in pod.resource_claims),
        claims=tuple(claim for pod in pods for claim in pod.claims),
        objects=tuple(obj for pod in pods for obj in pod.objects),
    )


def _extended_resources(pods: list[FabricPodPart]) -> dict[str, str | int]:
    return {name: value for pod in pods for name, value in pod.resources.items()}


def _fill_setup(
    setup: FabricSetup, placeholders: Mapping[str, str | int], cluster: Cluster, machine: Machine | None
) -> FabricSetup:
    pod = setup.kubernetes
    complete = replace(
        setup,
        environment=fill_placeholders(setup.environment, placeholders),
        selected=fill_placeholders(setup.selected, placeholders),
        kubernetes=replace(pod, **{key: fill_placeholders(getattr(pod, key), placeholders) for key in _FILLED_KEYS}),
    )
    if "nics" not in placeholders and cluster.target == "kubernetes" and "{nics}" in repr(complete.kubernetes):
        subject = f"the machine {machine.name} does not say" if machine else "no `machine` says"
        raise RecipeError(
            f"{subject} how many cards of {setup.fabric} a node has, and pods must ask for each",
            where=cluster.where("machine"),
            hint="describe the machine in a file with `nics: N` and write its path: machine: ./mynode.yaml; "
            "or say what pods ask for: kubernetes: {resources: {rdma/ib: 8}}",
        )
    return complete


_FILLED_KEYS = ("annotations", "init_containers", "resources", "objects")


def _device_count(written: int | str, placeholders: Mapping[str, str | int]) -> int:
    """How many devices a node must have; 1 if the machine does not say."""
    value = fill_placeholders(written, placeholders)
    return value if isinstance(value, int) else 1


def lint_environment(
    setup: FabricSetup, environment: Mapping[str, str], where: Callable[[str], str] | None = None
) -> list[str]:
    """Return warnings about an environment; raise `InputError` for a variable that never belongs there.

    `where` gives the file and line of a key of the cluster file (`cluster.where`); without it the variable is named.
    """
    misplaced = misplaced_variables(setup, environment)
    refused = [(name, rule) for name, rule in misplaced if rule.severity == "refuse"]
    if refused:
        place = where or (lambda key: key.removeprefix("environment."))
        name, rule = refused[0]
        others = list(dict.fromkeys(f"{other}: {why.because}" for other, why in refused[1:] if other != name))
        hint = rule.instead or "leave it out"
        raise InputError(
            f"{name} does not belong here: {rule.because}",
            where=place(f"environment.{name}"),
            hint="\n".join([hint, *(f"nor does {other}" for other in others)]),
        )
    return [f"{name} is not needed: {rule.because}" for name, rule in misplaced]


def misplaced_variables(setup: FabricSetup, environment: Mapping[str, str]) -> list[tuple[str, RefusedVariable]]:
    """Return every variable that does not belong to the fabric, with the rule that says so."""
    return [
        (name, rule)
        for name, value in environment.items()
        for rule in _rules_about(setup, name)
        if rule.value is None or re.match(rule.value, value)
    ]


def _rules_about(setup: FabricSetup, name: str) -> Iterator[RefusedVariable]:
    """Yield every rule about a variable, the fabric's own first."""
    tables = refused_variables()
    own = [rule for pattern, rule in setup.refused.items() if fnmatchcase(name, pattern)]
    yield from own
    if any(fnmatchcase(name, pattern) for pattern in setup.profile_sets):
        yield RefusedVariable(because=f"{setup.profile_script} sets it, as the plugin's version needs it")
    yield from (rule for pattern, rule in tables.everywhere.items() if fnmatchcase(name, pattern))
    if own or setup.name in (SINGLE_NODE, UNKNOWN):
        return
    for pattern, owners in tables.families.items():
        if fnmatchcase(name, pattern) and setup.name not in owners:
            yield RefusedVariable(
                because=f"it is a variable of {' and '.join(owners)}, and this fabric is {setup.fabric}"
            )
