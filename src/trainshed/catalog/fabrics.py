"""Networks between nodes by name, from `fabrics.yaml`: what they cost a collective beside their line rate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from trainshed.catalog.table import Entry, Table
from trainshed.recipe.section import PositiveFloat, Text


class Fabric(Entry):
    """One kind of network, whatever its line rate on a machine."""

    latency_us: PositiveFloat = Field(description="One hop of a small message inside a collective")
    reached: Annotated[float, Field(gt=0, le=1)] = Field(
        description="Part of the line rate that large all-reduces keep between many nodes"
    )
    rdma: bool = Field(description="Whether NICs write into GPU memory without the host's help")
    setup: Text = Field(description="What jobs need to use it: the name of a file in fabric_setups/")


# What the networks are called in other files and manuals.
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
_TABLE = Table(Path(__file__).with_name("fabrics.yaml"), Fabric, "fabric", short_names=_SHORT_NAMES)


def fabric_names() -> list[str]:
    """Return the names of all fabrics, in the order of the catalog."""
    return _TABLE.names()


def fabric(name: str) -> Fabric:
    """Return a fabric by its name."""
    return _TABLE.entry(name)
