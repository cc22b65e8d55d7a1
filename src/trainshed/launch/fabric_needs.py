"""What a fabric asks of pods, of Slurm's nodes and of ranks, as plain values for whoever renders a job."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainshed.catalog import fabric
from trainshed.catalog.fabric_setups import PairThresholds, Refusal


@dataclass(frozen=True)
class PodNeeds:
    """What a pod needs, as plain values in Kubernetes' words, to be merged into its spec."""

    annotations: Mapping[str, str] = field(default_factory=dict)
    init_containers: tuple[dict[str, Any], ...] = ()
    """In order; those with `restartPolicy: Always` are sidecars that Kubernetes ends after the job's container."""
    volumes: tuple[dict[str, Any], ...] = ()
    mounts: tuple[dict[str, Any], ...] = ()
    """volumeMounts of the job's container."""
    resources: Mapping[str, str | int] = field(default_factory=dict)
    """Extended resources of the job's container: requests and limits alike."""
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
    """Further objects, made beside the job's own."""

    @property
    def security_context(self) -> dict[str, Any]:
        """The container's securityContext; empty where it needs none."""
        found: dict[str, Any] = {"privileged": True} if self.privileged else {}
        return found | ({"capabilities": {"add": list(self.capabilities)}} if self.capabilities else {})

    def for_job(self, name: str) -> PodNeeds:
        """Fill in the job's name, which objects and claims carry."""
        named = {key: filled(getattr(self, key), {"job": name}) for key in ("resource_claims", "claims", "objects")}
        return replace(self, **named)


@dataclass(frozen=True)
class NodeNeeds:
    """What a job on Slurm needs."""

    mounts: tuple[str, ...] = ()
    """Into its container, as FROM:TO[:ro] (pyxis' --container-mounts)."""
    prologue: tuple[str, ...] = ()
    """Lines of shell before the agent starts."""


@dataclass(frozen=True)
class DeviceFiles:
    """Device files that a node must show."""

    path: str
    count: int


@dataclass(frozen=True)
class FabricSetup:
    """A network as one cluster uses it."""

    name: str
    """The setup's (`efa`), or `single-node`, or `unknown` where the cluster file names neither machine nor fabric."""
    fabric: str | None
    """In the catalog's words (`efa-v2`)."""
    version: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """To be set behind the profile script, which may set the same variables otherwise."""
    library_path: tuple[str, ...] = ()
    profile_script: str | None = None
    kubernetes: PodNeeds = field(default_factory=PodNeeds)
    slurm: NodeNeeds = field(default_factory=NodeNeeds)
    selected: tuple[str, ...] = ()
    """What NCCL's log of every node must show, as regular expressions; all of them."""
    rejected: tuple[str, ...] = ()
    """What it must not show; none of them."""
    devices: DeviceFiles | None = None
    pairs: PairThresholds = field(default_factory=PairThresholds)
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    profile_sets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def rdma(self) -> bool:
        """Whether its cards need locked memory."""
        return self.fabric is not None and fabric(self.fabric).rdma

    def shell_prologue(self) -> tuple[str, ...]:
        """Return the lines of bash that a node runs before the agent: libraries, the script, the variables."""
        lines = []
        if self.library_path:
            paths = ":".join(self.library_path)
            lines.append(f'export LD_LIBRARY_PATH={shlex.quote(paths)}"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"')
        if self.profile_script is not None:
            lib_dir = self.environment.get("NCCL_LIB_DIR")
            lines += [f"export NCCL_LIB_DIR={shlex.quote(lib_dir)}"] if lib_dir else []
            # Scripts of vendors read variables that are not set.
            script = f". {shlex.quote(self.profile_script)}"
            lines.append(f"case $- in *u*) set +u; {script}; set -u ;; *) {script} ;; esac")
        return (*lines, *(f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()))


def filled(value: Any, fill: Mapping[str, str | int]) -> Any:
    """Put values in the place of `{name}` wherever it stands; other braces are shell's or JSON's and are left alone."""
    if isinstance(value, str):
        whole = re.fullmatch(r"\{(\w+)\}", value)
        if whole and whole[1] in fill:
            return fill[whole[1]]
        return re.sub(r"(?<!\$)\{(\w+)\}", lambda found: str(fill.get(found[1], found[0])), value)
    if isinstance(value, Mapping):
        return {key: filled(inner, fill) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(filled(inner, fill) for inner in value)
    return value
