"""Storage tiers by name, from `storage_tiers.yaml`: their speed, the sizes that are sold, and the price."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from trainshed.catalog.table import CatalogEntry, CatalogTable
from trainshed.errors import InputError
from trainshed.recipe.section import NotNegativeFloat, PositiveFloat, Problem, Section, Text

# Sizes are written with few digits: 1.2 TiB stands for 1200 GiB.
_TOLERANCE_TIB = 0.05


class StorageRate(Section):
    """The speed of reads or writes: the smallest of the given limits."""

    mb_per_s_per_tib: PositiveFloat | None = Field(None, description="Of the size that was bought")
    gb_per_s_per_node: PositiveFloat | None = Field(None, description="Of the nodes that use it")
    gb_per_s_per_server: PositiveFloat | None = Field(None, description="Of the servers it stands on")
    gb_per_s: PositiveFloat | None = Field(None, description="Of the whole")

    def problems(self) -> Iterator[Problem]:
        """At least one limit."""
        if not self.model_fields_set:
            yield Problem((), "says no limit", "write for example {gb_per_s_per_node: 4.0}")


class TierSizes(Section):
    """The sizes that are sold, in TiB."""

    least: PositiveFloat = Field(description="The smallest")
    step: PositiveFloat | None = Field(None, description="What every size is a multiple of")
    most: PositiveFloat | None = Field(None, description="The largest")

    def fits(self, size_tib: float) -> bool:
        """Whether a size is sold."""
        if size_tib < self.least - _TOLERANCE_TIB or (self.most is not None and size_tib > self.most + _TOLERANCE_TIB):
            return False
        return self.step is None or abs(size_tib - round(size_tib / self.step) * self.step) <= _TOLERANCE_TIB

    def __str__(self) -> str:
        step = f" in steps of {self.step:g}" if self.step is not None else ""
        return f"from {self.least:g} TiB{step}" + (f" to {self.most:g}" if self.most is not None else "")


class StorageTier(CatalogEntry):
    """One kind of storage."""

    as_of: Text = Field(description="When the figures were written down")
    kind: Literal["file", "object", "disk"] = Field(description="A file system, an object store, disks in the nodes")
    write: StorageRate = Field(description="How fast it is written")
    read: StorageRate = Field(description="How fast it is read")
    latency_ms: NotNegativeFloat = Field(description="Until the first byte of a read")
    size_tib: TierSizes | None = Field(None, description="What can be bought; null: it has no size")
    usd_per_gb_month: PositiveFloat | None = Field(description="List price; null: unknown, or part of the machine")

    @property
    def needs_size(self) -> bool:
        """Whether its speed depends on how much of it was bought."""
        return self.write.mb_per_s_per_tib is not None or self.read.mb_per_s_per_tib is not None

    @property
    def needs_servers(self) -> bool:
        """Whether its speed depends on how many servers it stands on."""
        return self.write.gb_per_s_per_server is not None or self.read.gb_per_s_per_server is not None


_TABLE = CatalogTable(Path(__file__).with_name("storage_tiers.yaml"), StorageTier, "storage tier")


def tier_names() -> list[str]:
    """Return the names of all tiers, in the order of the catalog."""
    return _TABLE.names()


def storage_tier(name: str) -> StorageTier:
    """Return a tier by its name."""
    return _TABLE.entry(name)


def check_tier_size(tier: StorageTier, size_tib: float | None, servers: int | None = None) -> None:
    """Raise if the speed depends on a size or on servers that are not given, or if the size is not sold."""
    if tier.needs_size and size_tib is None:
        raise InputError(
            f"the speed of {tier.name} grows with its size, and no size is given",
            hint=f"write storage: {{tier: {tier.name}, size_tib: {tier.size_tib.least if tier.size_tib else 16:g}}}",
        )
    if tier.needs_servers and servers is None:
        raise InputError(
            f"the speed of {tier.name} grows with its servers, and no number is given",
            hint=f"write storage: {{tier: {tier.name}, servers: 4}}",
        )
    if size_tib is not None and tier.size_tib is not None and not tier.size_tib.fits(size_tib):
        raise InputError(f"{tier.name} cannot be bought in {size_tib:g} TiB", hint=f"it is sold {tier.size_tib}")
