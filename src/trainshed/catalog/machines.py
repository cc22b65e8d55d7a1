"""Machines by name and by instance type: what they have, what they cost, and which rates healthy ones reach.

`machines.yaml` has GPUs, links, networks, memory and power. `prices.yaml` has list prices with their date, or why there
is none. `expected_rates.yaml` has the rates of collectives and matmuls that `preflight` compares measurements with.
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
        """A link domain is a part of the node, or several nodes."""
        domain = self.link_domain or self.gpus
        if domain % self.gpus and self.gpus % domain:
            yield Problem(
                ("link_domain",),
                f"{domain} is neither a part of {self.gpus} GPUs nor a multiple of them",
                "write how many GPUs NVLink or xGMI joins",
            )

    @property
    def storage_gb_per_s(self) -> float:
        """The most that one node can move to or from storage, 10^9 bytes a second."""
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
    """Return the machine that a file describes; a `gpu:` that is a file is relative to its folder."""
    entry = _TABLE.from_file(path)
    if not is_path(entry.gpu):
        return entry
    with_gpu_path = entry.model_copy(update={"gpu": str(Path(path).parent / entry.gpu)})
    with_gpu_path._name = entry.name
    return with_gpu_path


def find_machine(name_or_path: str | os.PathLike[str]) -> Machine:
    """Return a machine by name, or from the file that describes it."""
    text = os.fspath(name_or_path)
    return machine_from_file(text) if is_path(text) else machine(text)


def machines_with(gpu_name: str) -> list[Machine]:
    """Return the machines that have a GPU, in the order of the catalog."""
    wanted = gpu(gpu_name).name
    return [entry for entry in map(machine, machine_names()) if gpu(entry.gpu).name == wanted]


def machine_of_gpu(gpu_or_name: Gpu | str) -> Machine:
    """Return the machine for a GPU that is named without a machine: the GPU's entry says which."""
    entry = find_gpu(gpu_or_name) if isinstance(gpu_or_name, str) else gpu_or_name
    if entry.machine is None:
        raise InputError(
            f"the GPU {entry.name} does not say which machine it is in",
            hint="write `machine: NAME` into its entry; `trainshed plan --on CLUSTER` takes the cluster's machine",
        )
    return find_machine(entry.machine)


NO_PRICE_HINT = "no price known: write price_per_gpu_hour in the cluster file, or `plan --price DOLLARS`"


class MachinePrice(CatalogEntry):
    """The list price of a machine on demand; exactly one of `usd_per_hour` and `unknown_because`."""

    as_of: Text = Field(description="When the price was read, as 2026-08-22")
    region: Text | None = Field(description="Where it applies")
    usd_per_hour: PositiveFloat | None = Field(description="US dollars per machine and hour")
    unknown_because: Text | None = Field(None, description="Why there is no price")

    def problems(self) -> Iterator[Problem]:
        """Exactly one of a price and the reason why there is none."""
        if (self.usd_per_hour is None) == (self.unknown_because is None):
            yield Problem((), "needs exactly one of usd_per_hour and unknown_because", "write the one that is known")


_PRICE_TABLE = CatalogTable(Path(__file__).with_name("prices.yaml"), MachinePrice, "price")


def priced_machines() -> list[str]:
    """Return the names of the machines in the price list."""
    return _PRICE_TABLE.names()


def price_of(machine: Machine) -> MachinePrice | None:
    """Return the entry of a machine in the price list; None for one that is not rented out."""
    return _PRICE_TABLE.entry(machine.name) if machine.name in _PRICE_TABLE.names() else None


RateVerdict = Literal["pass", "warn", "fail"]
# Share of the planner's estimate. It is not a measurement, so only a rate far below it is worth a warning.
_WARN_SHARE_OF_ESTIMATE = 2 / 3


class RateThreshold(Section):
    """An expected figure, and how far below it a machine may be."""

    expected: PositiveFloat = Field(description="The usual figure")
    warn: PositiveFloat = Field(description="Below it a node is worth a look")
    replace: PositiveFloat = Field(description="Below it a node is bad")


class BusRate(RateThreshold):
    """Bus bandwidth of an all-reduce, in 10^9 bytes a second."""

    mebibytes: PositiveInt = Field(description="Size of the message")
    nodes: PositiveInt | None = Field(None, description="Only among so many nodes")


class MachineRates(Section):
    """The rates of one machine."""

    source: Text = Field(description="Where they are published")
    inside: BusRate | None = Field(None, description="Among the GPUs of a node")
    rack: BusRate | None = Field(None, description="Among nodes that NVLink joins")
    network: BusRate | None = Field(None, description="Among nodes that the network joins")


class GpuRates(Section):
    """The rates of one GPU."""

    source: Text = Field(description="Where they are published")
    tflops: RateThreshold = Field(description="bf16 products, 10^12 FLOP a second")


class ExpectedRatesFile(Section):
    """`expected_rates.yaml`."""

    machines: dict[str, MachineRates]
    gpus: dict[str, GpuRates]


@dataclass(frozen=True)
class ExpectedRate:
    """The rate that an all-reduce should reach; `replace` is None if it is an estimate."""

    gb_per_s: float
    warn: float
    replace: float | None
    mebibytes: int | None
    source: str

    def verdict(self, measured: float) -> RateVerdict:
        """Compare a measurement with it."""
        if self.replace is not None and measured < self.replace:
            return "fail"
        return "warn" if measured < self.warn else "pass"


@cache
def expected_rates() -> ExpectedRatesFile:
    """Return `expected_rates.yaml`."""
    file = Path(__file__).with_name("expected_rates.yaml")
    return validate(ExpectedRatesFile, parse_yaml(file.read_text(encoding="utf-8"), file.name))


def expected_in_node(machine: Machine | None) -> ExpectedRate | None:
    """Return the rate among the GPUs of one node; None if none is published."""
    rates = expected_rates().machines.get(machine.name) if machine is not None else None
    return _published_rate(rates.inside, rates.source) if rates is not None and rates.inside is not None else None


def expected_between_nodes(machine: Machine | None, nodes: int, fabric_name: str | None) -> ExpectedRate | None:
    """Return the rate among that many nodes: the published one, or the planner's estimate."""
    if machine is None:
        return None
    rates = expected_rates().machines.get(machine.name)
    # Published rates are for the network that the machine is sold with.
    if rates is not None and fabric_name == machine.fabric:
        joined = machine.link_domain is not None and nodes * machine.gpus <= machine.link_domain
        rate = rates.rack if joined else rates.network
        if rate is not None and rate.nodes in (None, nodes):
            return _published_rate(rate, rates.source)
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
