"""Machines by name and by instance type, from `machines.yaml`: GPUs, links, networks, memory, power."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from trainshed.catalog.gpus import Gpu, find_gpu, gpu
from trainshed.catalog.table import Entry, Table, is_path
from trainshed.errors import InputError
from trainshed.recipe.section import PositiveFloat, PositiveInt, Problem, Text

HOW_TO_DESCRIBE = (
    "describe another in a file and give its path (machine: ./mynode.yaml): NAME: {source: who says so, gpu: h100, "
    "gpus: 8, fabric: infiniband-ndr, network_gbps: 3200.0, cpus: 192, memory_gib: 2048.0, watts: 10200.0}"
)


class Machine(Entry):
    """One node as it is rented or bought."""

    names: Annotated[tuple[Text, ...], Field(strict=False)] = Field((), description="Instance types it goes by")
    gpu: Text = Field(description="Its GPUs: a name in gpus.yaml, or a file that describes one")
    gpus: PositiveInt = Field(description="How many of them")
    link_domain: PositiveInt | None = Field(
        None, description="How many GPUs NVLink or xGMI joins; null: all of the node"
    )
    fabric: Text = Field(description="The network between GPUs of different nodes, a name in fabrics.yaml")
    network_gbps: PositiveFloat = Field(description="That network per node and direction, 10^9 bits a second")
    nics: PositiveInt | None = Field(
        None, description="Cards of that network (InfiniBand or RoCE cards, EFA devices); null: unknown"
    )
    frontend_gbps: PositiveFloat | None = Field(
        None, description="The network that storage is reached over, 10^9 bits a second; null: the same one"
    )
    cpus: PositiveInt = Field(description="Threads that the system shows")
    memory_gib: PositiveFloat = Field(description="Memory of the host")
    local_disk_tb: PositiveFloat | None = Field(
        None, description="NVMe in the node, 10^12 bytes; null: none, or unknown"
    )
    watts: PositiveFloat | None = Field(None, description="The node's rated maximum; null: unknown")

    def problems(self) -> Iterator[Problem]:
        """A domain is a part of the node, or whole nodes."""
        domain = self.link_domain or self.gpus
        if domain % self.gpus and self.gpus % domain:
            yield Problem(
                ("link_domain",),
                f"{domain} is neither a part of {self.gpus} GPUs nor a multiple of them",
                "write how many GPUs NVLink or xGMI joins",
            )

    @property
    def storage_gb_per_s(self) -> float:
        """What one node can move to or from storage at most, 10^9 bytes a second."""
        return (self.frontend_gbps or self.network_gbps) / 8


_TABLE = Table(Path(__file__).with_name("machines.yaml"), Machine, "machine", HOW_TO_DESCRIBE, other_names="names")


def machine_names() -> list[str]:
    """Return the names of all machines, in the order of the catalog."""
    return _TABLE.names()


def machine(name: str) -> Machine:
    """Return a machine by its name in the catalog (`a3-mega`) or by an instance type (`a3-megagpu-8g`)."""
    return _TABLE.entry(name)


def machine_from_file(path: str | os.PathLike[str]) -> Machine:
    """Return the machine that a file describes; a `gpu:` that is a file lies beside it."""
    found = _TABLE.from_file(path)
    if not is_path(found.gpu):
        return found
    beside = found.model_copy(update={"gpu": str(Path(path).parent / found.gpu)})
    beside._name = found.name
    return beside


def find_machine(name_or_path: str | os.PathLike[str]) -> Machine:
    """Return a machine by name, or from the file that describes it."""
    text = os.fspath(name_or_path)
    return machine_from_file(text) if is_path(text) else machine(text)


def machines_with(gpu_name: str) -> list[Machine]:
    """Return the machines that have a GPU, in the order of the catalog."""
    wanted = gpu(gpu_name).name
    return [found for found in map(machine, machine_names()) if gpu(found.gpu).name == wanted]


def machine_of_gpu(wanted: Gpu | str) -> Machine:
    """Return the machine that is meant where only a GPU is named: its own entry says which."""
    found = find_gpu(wanted) if isinstance(wanted, str) else wanted
    if found.machine is None:
        raise InputError(
            f"the GPU {found.name} does not say which machine it is in",
            hint="write `machine: NAME` into its entry; `trainshed plan --on CLUSTER` takes the cluster's machine",
        )
    return find_machine(found.machine)
