"""What jobs need to use a fabric, one data file each with its source; `launch/fabric.py` puts the parts together.

A file is one `SetupFile`: what every job needs, and what is added for a version of the plugin, for SHARP, for AMD's
GPUs, for one machine, and for pods on the node's own network. `{name}` in any text is filled in from `fill`; `{gpus}`,
`{nics}` and `{nodes}` are the machine's and the job's, `{job}` is the job's name.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from trainshed.recipe.messages import validate
from trainshed.recipe.places import Document, Places
from trainshed.recipe.section import Fraction, Section, Text
from trainshed.recipe.yaml_source import parse

_FOLDER = Path(__file__).parent
_VARIABLES = "variables"

Words = Annotated[tuple[Text, ...], Field(strict=False)]
Objects = Annotated[tuple[dict[str, Any], ...], Field(strict=False)]


class Refusal(Section):
    """A variable that does not belong, and why."""

    value: Text | None = Field(None, description="Which values are meant, as a regular expression; null: any")
    because: Text = Field(description="What it would do")
    instead: Text | None = Field(None, description="What to write; null: leave it out")
    severity: Literal["refuse", "warn"] = Field("refuse", description="refuse: an error; warn: a note")


class PodPart(Section):
    """What a pod needs, in Kubernetes' words."""

    annotations: dict[str, str] = Field(default_factory=dict, description="Of the pod")
    init_containers: Objects = Field((), description="In order; with restartPolicy Always they stay beside the job")
    volumes: Objects = Field((), description="Of the pod")
    mounts: Objects = Field((), description="Of the job's container")
    resources: dict[str, str | int] = Field(default_factory=dict, description="Requests and limits of the container")
    capabilities: Words = Field((), description="Of the container")
    privileged: bool = Field(False, description="The container is")
    privileged_init_containers: Words = Field((), description="These init containers are, too")
    host_network: bool = Field(False, description="The pod is on the node's network")
    tolerations: Objects = Field((), description="Of the pod")
    resource_claims: Objects = Field((), description="The pod's resourceClaims")
    claims: Objects = Field((), description="The container's resources.claims")
    objects: Objects = Field((), description="Further objects, made beside the job's own")
    notes: Words = Field((), description="What the cluster must have")


class NodePart(Section):
    """What a job on Slurm needs."""

    mounts: Words = Field((), description="Into its container, as FROM:TO[:ro]")
    prologue: Words = Field((), description="Lines of shell before the agent starts")
    notes: Words = Field((), description="What the nodes must have")


class Devices(Section):
    """Device files that a node must show."""

    path: Text = Field(description="As a glob", examples=["/dev/infiniband/uverbs*"])
    count: int | Text = Field(description="How many")


class PairThresholds(Section):
    """How far a pair of nodes may fall short of the others."""

    warn: Fraction = Field(0.035, description="More is worth a look")
    replace: Fraction = Field(0.07, description="More is a bad node")


class SetupPart(Section):
    """Something that is added to a setup."""

    source: Text | None = Field(None, description="Where it is published")
    fill: dict[str, str] = Field(default_factory=dict, description="What `{name}` stands for")
    environment: dict[str, str] = Field(default_factory=dict, description="Of the job, set behind the profile script")
    sharp_environment: dict[str, str] = Field(default_factory=dict, description="The same, only where `sharp` is asked")
    library_path: Words = Field((), description="In front of LD_LIBRARY_PATH")
    profile_script: Text | None = Field(None, description="Sourced before the agent starts")
    profile_sets: Words = Field((), description="Variables that are the script's business")
    selected: Words = Field((), description="What NCCL's log of every node must show, as regular expressions")
    rejected: Words = Field((), description="What it must not show")
    kubernetes: PodPart = Field(default_factory=PodPart, description="What a pod needs")
    slurm: NodePart = Field(default_factory=NodePart, description="What a job on Slurm needs")
    drop_annotations: bool = Field(False, description="The pod's annotations of the setup are not needed")
    notes: Words = Field((), description="What a person should know")


class SetupFile(SetupPart):
    """One file: a fabric's setup."""

    source: Text = Field(description="Where it is published")
    default: Text = Field(description="The version that is taken where none is named")
    versions: dict[str, SetupPart] = Field(description="By the version of the plugin, or of what it depends on")
    sharp: SetupPart | None = Field(None, description="Where the switches sum; null: they cannot")
    amd: SetupPart = Field(default_factory=SetupPart, description="With AMD's GPUs")
    machines: dict[str, SetupPart] = Field(default_factory=dict, description="By the machine's name in machines.yaml")
    host_network: SetupPart = Field(default_factory=SetupPart, description="For pods on the node's network")
    refused: dict[str, Refusal] = Field(default_factory=dict, description="Variables that do not belong")
    devices: Devices | None = Field(None, description="Device files that a node must show")
    pairs: PairThresholds = Field(default_factory=PairThresholds, description="How far pairs of nodes may differ")


class Variables(Section):
    """Variables that do not belong on any fabric, and those that belong to some."""

    everywhere: dict[str, Refusal] = Field(description="Refused on all")
    families: dict[str, Words] = Field(description="The setups they belong to; refused on the others")


@cache
def setup_names() -> tuple[str, ...]:
    """Return the names of all setups."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.yaml") if file.stem != _VARIABLES))


@cache
def setup_file(name: str) -> SetupFile:
    """Return a setup by its name."""
    return validate(SetupFile, _document(name))


@cache
def refused_variables() -> Variables:
    """Return what is refused whatever the fabric."""
    return validate(Variables, _document(_VARIABLES))


def _document(name: str) -> Document:
    file = _FOLDER / f"{name}.yaml"
    parsed = parse(file.read_text(encoding="utf-8"), file.name)
    return Document(parsed.value, Places(f"fabric_setups/{file.name}"))
