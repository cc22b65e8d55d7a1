"""Networks between nodes: `fabrics.yaml` has their speed, `fabric_setups/` what jobs need to use them.

A file of `fabric_setups/` is one `FabricSetupFile` with its source. It has what every job needs, and what is added for
a version of the plugin, for SHARP, for AMD's GPUs, for one machine, and for pods on the host network. `{name}` in any
text is replaced from `fill`; `{gpus}`, `{nics}` and `{nodes}` are those of the machine and the job, `{job}` is the name
of the job. `launch/fabric.py` combines the parts.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from trainshed.catalog.table import CatalogEntry, CatalogTable
from trainshed.recipe.section import Fraction, PositiveFloat, Section, Text
from trainshed.recipe.validation import validate
from trainshed.recipe.yaml_io import SourceMap, YamlDocument, parse_yaml


class Fabric(CatalogEntry):
    """One kind of network, whatever its line rate on a machine."""

    latency_us: PositiveFloat = Field(description="One hop of a small message inside a collective")
    reached: Annotated[float, Field(gt=0, le=1)] = Field(
        description="Part of the line rate that large all-reduces keep between many nodes"
    )
    rdma: bool = Field(description="Whether NICs write into GPU memory without the host's help")
    setup: Text = Field(description="What jobs need to use it: the name of a file in fabric_setups/")


# Names of the networks in other files and manuals.
_SHORT_NAMES = {
    "ib": "infiniband",
    "mellanox": "infiniband",
    "quantum": "infiniband",
    "rdma": "infiniband",
    "hdr": "infiniband-hdr",
    "ndr": "infiniband-ndr",
    "xdr": "infiniband-xdr",
    "rocev2": "roce",
    "roce-v2": "roce",
    "fastrak": "tcpxo",
    "gpudirect-tcpx": "tcpx",
    "gpudirect-tcpxo": "tcpxo",
    "libfabric": "efa",
    "eth": "ethernet",
    "tcp": "ethernet",
    "cxi": "slingshot",
}
_TABLE = CatalogTable(Path(__file__).with_name("fabrics.yaml"), Fabric, "fabric", short_names=_SHORT_NAMES)


def fabric_names() -> list[str]:
    """Return the names of all fabrics, in the order of the catalog."""
    return _TABLE.names()


def fabric(name: str) -> Fabric:
    """Return a fabric by its name."""
    return _TABLE.entry(name)


_SETUPS_FOLDER = Path(__file__).with_name("fabric_setups")
_VARIABLES_FILE = "variables"

TextList = Annotated[tuple[Text, ...], Field(strict=False)]
ObjectList = Annotated[tuple[dict[str, Any], ...], Field(strict=False)]


class RefusedVariable(Section):
    """An environment variable that is refused, and why."""

    value: Text | None = Field(None, description="Which values are meant, as a regular expression; null: any")
    because: Text = Field(description="What it would do")
    instead: Text | None = Field(None, description="What to write; null: leave it out")
    severity: Literal["refuse", "warn"] = Field("refuse", description="refuse: an error; warn: a note")


class FabricPodPart(Section):
    """What a pod needs; the fields are named as in Kubernetes."""

    annotations: dict[str, str] = Field(default_factory=dict, description="Of the pod")
    init_containers: ObjectList = Field((), description="In order; with restartPolicy Always they stay beside the job")
    volumes: ObjectList = Field((), description="Of the pod")
    mounts: ObjectList = Field((), description="Of the job's container")
    resources: dict[str, str | int] = Field(default_factory=dict, description="Requests and limits of the container")
    capabilities: TextList = Field((), description="Of the container")
    privileged: bool = Field(False, description="The container is")
    privileged_init_containers: TextList = Field((), description="These init containers are, too")
    host_network: bool = Field(False, description="The pod is on the node's network")
    tolerations: ObjectList = Field((), description="Of the pod")
    resource_claims: ObjectList = Field((), description="The pod's resourceClaims")
    claims: ObjectList = Field((), description="The container's resources.claims")
    objects: ObjectList = Field((), description="Further objects, made beside the job's own")
    notes: TextList = Field((), description="What the cluster must have")


class FabricSlurmPart(Section):
    """What a job on Slurm needs."""

    mounts: TextList = Field((), description="Into its container, as FROM:TO[:ro]")
    prologue: TextList = Field((), description="Lines of shell before the agent starts")
    notes: TextList = Field((), description="What the nodes must have")


class FabricDeviceFiles(Section):
    """Device files that a node must have."""

    path: Text = Field(description="As a glob", examples=["/dev/infiniband/uverbs*"])
    count: int | Text = Field(description="How many")


class PairThresholds(Section):
    """How much slower than the others a pair of nodes may be."""

    warn: Fraction = Field(0.035, description="More is worth a look")
    replace: Fraction = Field(0.07, description="More is a bad node")


class FabricSetupPart(Section):
    """A part that is added to a setup."""

    source: Text | None = Field(None, description="Where it is published")
    fill: dict[str, str] = Field(default_factory=dict, description="What `{name}` stands for")
    environment: dict[str, str] = Field(default_factory=dict, description="Of the job, set after the profile script")
    sharp_environment: dict[str, str] = Field(default_factory=dict, description="The same, only where `sharp` is asked")
    library_path: TextList = Field((), description="In front of LD_LIBRARY_PATH")
    libraries: TextList = Field((), description="What the image must hold, as the loader names it; `a|b`: one of them")
    profile_script: Text | None = Field(None, description="Sourced before the agent starts")
    profile_sets: TextList = Field((), description="Variables that are the script's business")
    selected: TextList = Field((), description="What NCCL's log of every node must show, as regular expressions")
    rejected: TextList = Field((), description="What it must not show")
    kubernetes: FabricPodPart = Field(default_factory=FabricPodPart, description="What a pod needs")
    slurm: FabricSlurmPart = Field(default_factory=FabricSlurmPart, description="What a job on Slurm needs")
    drop_annotations: bool = Field(False, description="The pod's annotations of the setup are not needed")
    notes: TextList = Field((), description="What a person should know")


class FabricSetupFile(FabricSetupPart):
    """One file of `fabric_setups/`."""

    source: Text = Field(description="Where it is published")
    default: Text = Field(description="The version that is taken where none is named")
    versions: dict[str, FabricSetupPart] = Field(description="By the version of the plugin, or of what it depends on")
    sharp: FabricSetupPart | None = Field(None, description="Where the switches sum; null: they cannot")
    amd: FabricSetupPart = Field(default_factory=FabricSetupPart, description="With AMD's GPUs")
    machines: dict[str, FabricSetupPart] = Field(
        default_factory=dict, description="By the machine's name in machines.yaml"
    )
    host_network: FabricSetupPart = Field(default_factory=FabricSetupPart, description="For pods on the node's network")
    refused: dict[str, RefusedVariable] = Field(default_factory=dict, description="Variables that do not belong")
    devices: FabricDeviceFiles | None = Field(None, description="Device files that a node must show")
    pairs: PairThresholds = Field(default_factory=PairThresholds, description="How far pairs of nodes may differ")


class RefusedVariables(Section):
    """Variables that are refused on every fabric, and those that only some fabrics may have."""

    everywhere: dict[str, RefusedVariable] = Field(description="Refused on all")
    families: dict[str, TextList] = Field(description="The setups they belong to; refused on the others")


@cache
def fabric_setup_names() -> tuple[str, ...]:
    """Return the names of all setups."""
    return tuple(sorted(file.stem for file in _SETUPS_FOLDER.glob("*.yaml") if file.stem != _VARIABLES_FILE))


@cache
def fabric_setup_file(name: str) -> FabricSetupFile:
    """Return a setup by its name."""
    return validate(FabricSetupFile, _setup_document(name))


@cache
def refused_variables() -> RefusedVariables:
    """Return the variables that are refused on every fabric."""
    return validate(RefusedVariables, _setup_document(_VARIABLES_FILE))


def _setup_document(name: str) -> YamlDocument:
    file = _SETUPS_FOLDER / f"{name}.yaml"
    parsed = parse_yaml(file.read_text(encoding="utf-8"), file.name)
    return YamlDocument(parsed.value, SourceMap(f"fabric_setups/{file.name}"))
