"""What healthy machines reach, from `expected_rates.yaml`, and the verdict on what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from trainshed.catalog.fabrics import fabric
from trainshed.catalog.machines import Machine
from trainshed.recipe.messages import validate
from trainshed.recipe.section import PositiveFloat, PositiveInt, Section, Text
from trainshed.recipe.yaml_source import parse

RateVerdict = Literal["pass", "warn", "fail"]
# Of the planner's estimate, which is no measurement: far below it something is wrong, near it nothing is proven.
_OF_ESTIMATE = 2 / 3


class Threshold(Section):
    """A figure and how far below it a machine may fall."""

    expected: PositiveFloat = Field(description="The usual figure")
    warn: PositiveFloat = Field(description="Below it a node is worth a look")
    replace: PositiveFloat = Field(description="Below it a node is bad")


class BusRate(Threshold):
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
    tflops: Threshold = Field(description="bf16 products, 10^12 FLOP a second")


class RatesFile(Section):
    """The whole file."""

    machines: dict[str, MachineRates]
    gpus: dict[str, GpuRates]


@dataclass(frozen=True)
class Expected:
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
def expected_rates() -> RatesFile:
    """Return the file."""
    file = Path(__file__).with_name("expected_rates.yaml")
    return validate(RatesFile, parse(file.read_text(encoding="utf-8"), file.name))


def expected_inside(machine: Machine | None) -> Expected | None:
    """Return what the GPUs of one node should reach together, None where nobody says."""
    rates = expected_rates().machines.get(machine.name) if machine is not None else None
    return _expected(rates.inside, rates.source) if rates is not None and rates.inside is not None else None


def expected_between(machine: Machine | None, nodes: int, fabric_name: str | None) -> Expected | None:
    """Return what that many nodes should reach together; the planner's estimate where nobody measured it."""
    if machine is None:
        return None
    rates = expected_rates().machines.get(machine.name)
    # A figure of a machine holds on the network it is sold with.
    if rates is not None and fabric_name == machine.fabric:
        joined = machine.link_domain is not None and nodes * machine.gpus <= machine.link_domain
        found = rates.rack if joined else rates.network
        if found is not None and found.nodes in (None, nodes):
            return _expected(found, rates.source)
        if joined:
            return None
    if fabric_name is None:
        return None
    entry = fabric(fabric_name)
    estimate = entry.reached * machine.network_gbps / 8
    return Expected(estimate, _OF_ESTIMATE * estimate, None, None, f"estimate, line rate x {entry.reached:g}")


def _expected(rate: BusRate, source: str) -> Expected:
    return Expected(rate.expected, rate.warn, rate.replace, rate.mebibytes, source)
