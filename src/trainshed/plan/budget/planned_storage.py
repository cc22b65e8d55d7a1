"""The storage a run would use, as it was bought: how fast a number of nodes writes to it and reads from it."""

from __future__ import annotations

from dataclasses import dataclass

from trainshed.catalog.machines import Machine
from trainshed.catalog.storage_tiers import Rate, StorageTier, check_size, storage_tier
from trainshed.errors import InputError, RecipeError
from trainshed.recipe import Cluster

TIB = 2**40


@dataclass(frozen=True)
class PlannedStorage:
    """A tier of the catalog and how much of it there is."""

    tier: StorageTier
    size_tib: float | None = None
    servers: int | None = None

    def write_gb_per_s(self, nodes: int, machine: Machine | None = None) -> float:
        """Return what `nodes` together write, 10^9 bytes a second; without a machine its network is no limit."""
        return self._rate(self.tier.write, nodes, machine)

    def read_gb_per_s(self, nodes: int, machine: Machine | None = None) -> float:
        """Return what `nodes` together read, 10^9 bytes a second."""
        return self._rate(self.tier.read, nodes, machine)

    def usd_per_month(self, used_bytes: float) -> float | None:
        """Return its list price: of the size that was bought, or of what is used where it has no size."""
        if self.tier.usd_per_gb_month is None:
            return None
        size_bytes = used_bytes if self.size_tib is None else self.size_tib * TIB
        return size_bytes / 1e9 * self.tier.usd_per_gb_month

    def __str__(self) -> str:
        size = f", {self.size_tib:g} TiB" if self.size_tib is not None else ""
        servers = f", {self.servers} servers" if self.servers is not None else ""
        return f"{self.tier.name}{size}{servers}"

    def _rate(self, rate: Rate, nodes: int, machine: Machine | None) -> float:
        limits = [rate.gb_per_s]
        if rate.mb_per_s_per_tib is not None and self.size_tib is not None:
            limits.append(rate.mb_per_s_per_tib * self.size_tib / 1e3)
        if rate.gb_per_s_per_server is not None and self.servers is not None:
            limits.append(rate.gb_per_s_per_server * self.servers)
        if rate.gb_per_s_per_node is not None:
            limits.append(rate.gb_per_s_per_node * nodes)
        if machine is not None and self.tier.kind != "disk":
            limits.append(machine.storage_gb_per_s * nodes)
        return min(limit for limit in limits if limit is not None)


def planned_storage(name: str, size_tib: float | None = None, servers: int | None = None) -> PlannedStorage:
    """Return a tier by name, checked: it exists, it is sold in that size, and nothing its speed needs is missing."""
    tier = storage_tier(name)
    check_size(tier, size_tib, servers)
    return PlannedStorage(tier, size_tib, servers)


def storage_of(cluster: Cluster) -> PlannedStorage | None:
    """Return the storage that a cluster file names, None where it names none."""
    wanted = cluster.storage
    if wanted is None:
        return None
    try:
        return planned_storage(wanted.tier, wanted.size_tib, wanted.servers)
    except InputError as error:
        raise RecipeError(error.what, where=cluster.where("storage"), hint=error.hint) from None
