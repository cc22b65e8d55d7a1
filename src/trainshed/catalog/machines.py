"""Machines by name and by instance type: what they have, what they cost, and what healthy ones reach.

`machines.yaml` has GPUs, links, networks, memory and power; `prices.yaml` list prices with their date, or why there
is none; `expected_rates.yaml` the collective and matmul rates that `preflight` compares measurements with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from trainshed.catalog.fabrics import fabric
from trainshed.catalog.gpus import Gpu, find_gpu, gpu
from trainshed.catalog.table import CatalogEntry, CatalogTable, is_path
from trainshed.errors import InputError
from trainshed.recipe.section import PositiveFloat, PositiveInt, Problem, Section, Text
from trainshed.recipe.validation import validate
from trainshed.recipe.yaml_io import parse_yaml

HOW_TO_DESCRIBE_MACHINE = (
    "describe another in a file and give its path (machine: ./mynode.yaml): NAME: {source: who says so, gpu: h100, "
    "gpus: 8, fabric: infiniband-ndr, network_gbps: 3200.0, cpus: 192, memory_gib: 2048.0, watts: 10200.0}"
)


class Machine(CatalogEntry):
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


_TABLE = CatalogTable(
    Path(__file__).with_name("machines.yaml"), Machine, "machine", HOW_TO_DESCRIBE_MACHINE, other_names="names"
)


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


NO_PRICE_HINT = "no price known: write price_per_gpu_hour in the cluster file, or `plan --price DOLLARS`"


class MachinePrice(CatalogEntry):
    """The list price of a machine on demand; exactly one of `usd_per_hour` and `unknown_because`."""

    as_of: Text = Field(description="When the price was read, as 2026-08-22")
    region: Text | None = Field(description="Where it applies")
    usd_per_hour: PositiveFloat | None = Field(description="US dollars per machine and hour")
    unknown_because: Text | None = Field(None, description="Why there is no price")

    def problems(self) -> Iterator[Problem]:
        """A price, or the reason why not."""
        if (self.usd_per_hour is None) == (self.unknown_because is None):
            yield Problem((), "needs exactly one of usd_per_hour and unknown_because", "write the one that is known")


_PRICE_TABLE = CatalogTable(Path(__file__).with_name("prices.yaml"), MachinePrice, "price")


def priced_machines() -> list[str]:
    """Return the names of the machines that the price list speaks of."""
    return _PRICE_TABLE.names()


def price_of(machine: Machine) -> MachinePrice | None:
    """Return the list entry of a machine; None for one that nobody rents out (bought, or a person's own)."""
    return _PRICE_TABLE.entry(machine.name) if machine.name in _PRICE_TABLE.names() else None


RateVerdict = Literal["pass", "warn", "fail"]
# Of the planner's estimate, which is no measurement: far below it something is wrong, near it nothing is proven.
_WARN_SHARE_OF_ESTIMATE = 2 / 3


class RateThreshold(Section):
    """A figure and how far below it a machine may fall."""

    expected: PositiveFloat = Field(description="The usual figure")
    warn: PositiveFloat = Field(description="Below it a node is worth a look")
    replace: PositiveFloat = Field(description="Below it a node is bad")


class BusRate(RateThreshold):
    """Bus bandwidth of an all-reduce, 10^9 bytes a second."""

    mebibytes: PositiveInt = Field(description="Size of the message")
    nodes: PositiveInt | None = Field(None, description="Only among so many nodes")


class MachineRates(Section):
    """One machine's figures."""

    source: Text = Field(description="Where they are published")
    inside: BusRate | None = Field(None, description="Among the GPUs of a node")
    rack: BusRate | None = Field(None, description="Among nodes that NVLink joins")
    network: BusRate | None = Field(None, description="Among nodes that the network joins")


class GpuRates(Section):
    """One GPU's figures."""

    source: Text = Field(description="Where they are published")
    tflops: RateThreshold = Field(description="bf16 products, 10^12 FLOP a second")


class ExpectedRatesFile(Section):
    """The whole file."""

    machines: dict[str, MachineRates]
    gpus: dict[str, GpuRates]


@dataclass(frozen=True)
class ExpectedRate:
    """What an all-reduce should reach; `replace` is None where the figure is an estimate."""

    gb_per_s: float
    warn: float
    replace: float | None
    mebibytes: int | None
    source: str

    def verdict(self, measured: float) -> RateVerdict:
        """Hold a measurement against it."""
        if self.replace is not None and measured < self.replace:
            return "fail"
        return "warn" if measured < self.warn else "pass"


@cache
def expected_rates() -> ExpectedRatesFile:
    """Return the file."""
    file = Path(__file__).with_name("expected_rates.yaml")
    return validate(ExpectedRatesFile, parse_yaml(file.read_text(encoding="utf-8"), file.name))


def expected_in_node(machine: Machine | None) -> ExpectedRate | None:
    """Return what the GPUs of one node should reach together, None where nobody says."""
    rates = expected_rates().machines.get(machine.name) if machine is not None else None
    return _published_rate(rates.inside, rates.source) if rates is not None and rates.inside is not None else None


def expected_between_nodes(machine: Machine | None, nodes: int, fabric_name: str | None) -> ExpectedRate | None:
    """Return what that many nodes should reach together; the planner's estimate where nobody measured it."""
    if machine is None:
        return None
    rates = expected_rates().machines.get(machine.name)
    # A figure of a machine holds on the network it is sold with.
    if rates is not None and fabric_name == machine.fabric:
        joined = machine.link_domain is not None and nodes * machine.gpus <= machine.link_domain
        found = rates.rack if joined else rates.network
        if found is not None and found.nodes in (None, nodes):
            return _published_rate(found, rates.source)
        if joined:
            return None
    if fabric_name is None:
        return None
    entry = fabric(fabric_name)
    estimate = entry.reached * machine.network_gbps / 8
    return ExpectedRate(
        estimate, _WARN_SHARE_OF_ESTIMATE * estimate, None, None, f"estimate, line rate x {entry.reached:g}"
    )


def _published_rate(rate: BusRate, source: str) -> ExpectedRate:
    return ExpectedRate(rate.expected, rate.warn, rate.replace, rate.mebibytes, source)
