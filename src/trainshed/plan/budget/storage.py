"""The storage of a run: how fast nodes write and read it, and whether tokens are read as fast as GPUs need them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, Literal

from trainshed.catalog.machines import Machine
from trainshed.catalog.storage_tiers import StorageRate, StorageTier, check_tier_size, storage_tier
from trainshed.errors import InputError, RecipeError
from trainshed.plan.layout import RankLayout
from trainshed.plan.training_shape import TrainingShape
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
        """Return its list price: of the size that was bought, or of the used bytes if it has no size."""
        if self.tier.usd_per_gb_month is None:
            return None
        size_bytes = used_bytes if self.size_tib is None else self.size_tib * TIB
        return size_bytes / 1e9 * self.tier.usd_per_gb_month

    def __str__(self) -> str:
        size = f", {self.size_tib:g} TiB" if self.size_tib is not None else ""
        servers = f", {self.servers} servers" if self.servers is not None else ""
        return f"{self.tier.name}{size}{servers}"

    def _rate(self, rate: StorageRate, nodes: int, machine: Machine | None) -> float:
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
    """Return a tier by name; raises if it does not exist, or if its size cannot be bought or is missing."""
    tier = storage_tier(name)
    check_tier_size(tier, size_tib, servers)
    return PlannedStorage(tier, size_tib, servers)


def cluster_storage(cluster: Cluster) -> PlannedStorage | None:
    """Return the storage that a cluster file names; None if it names none."""
    wanted = cluster.storage
    if wanted is None:
        return None
    try:
        return planned_storage(wanted.tier, wanted.size_tib, wanted.servers)
    except InputError as error:
        raise RecipeError(error.what, where=cluster.where("storage"), hint=error.hint) from None


TokenStaging = Literal["direct", "nvme", "shm"]
_SMALL_VOCABULARY = 65500


@dataclass(frozen=True)
class TokenSupply:
    """What a step's tokens cost to read; the next step is read while this one trains."""

    stage: TokenStaging
    bytes_per_token: int
    readers: int
    """How many ranks read each token."""
    needed_gb_per_s: float
    given_gb_per_s: float | None
    """None if no storage is named, or if tokens are in memory."""
    read_seconds: float | None
    limits_the_step: bool
    staging_seconds: float | None = None
    """Before the first step: a copy of all tokens to every node; None if they are read in place."""
    staged_gib_per_node: float | None = None

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        return asdict(self)


def bytes_per_token(vocab_size: int) -> int:
    """Return the width of a stored token: Megatron's rule, which `data prepare` follows."""
    return 2 if vocab_size < _SMALL_VOCABULARY else 4


def readers_per_token(layout: RankLayout, engine: str = "torch") -> int:
    """Return how many ranks read each token: those of the first and the last stage.

    Of Megatron's tensor-parallel ranks only the first reads, and broadcasts.
    """
    ranks = layout.cp * (layout.tp if engine == "torch" else 1)
    return ranks * (2 if layout.pp > 1 else 1)


def token_supply(
    training: TrainingShape,
    layout: RankLayout,
    step_seconds: float,
    *,
    storage: PlannedStorage | None,
    machine: Machine | None = None,
    stage: TokenStaging = "direct",
    engine: str = "torch",
    corpus_tokens: int | None = None,
) -> TokenSupply:
    """Return what reading a step's tokens costs; latencies add up, since a rank reads sample by sample."""
    width, readers = bytes_per_token(training.model.vocab_size), readers_per_token(layout, engine)
    nodes = ceil(training.gpus / training.hardware.gpus_per_node)
    step_bytes = float(training.tokens_per_step) * width * readers
    source = planned_storage("nvme") if stage == "nvme" else storage if stage == "direct" else None
    rate = source.read_gb_per_s(nodes, machine) if source is not None else None
    seconds = None
    if source is not None and rate is not None:
        samples = ceil(training.global_batch / layout.dp)
        seconds = step_bytes / (rate * 1e9) + samples * source.tier.latency_ms / 1e3
    staged = corpus_tokens * width if stage != "direct" and corpus_tokens is not None else None
    copying = storage.read_gb_per_s(nodes, machine) if storage is not None else None
    return TokenSupply(
        stage=stage,
        bytes_per_token=width,
        readers=readers,
        needed_gb_per_s=step_bytes / step_seconds / 1e9,
        given_gb_per_s=rate,
        read_seconds=seconds,
        limits_the_step=seconds is not None and seconds > step_seconds,
        staging_seconds=staged * nodes / (copying * 1e9) if staged is not None and copying is not None else None,
        staged_gib_per_node=staged / 2**30 if staged is not None else None,
    )


def supply_warning(supply: TokenSupply, step_seconds: float, engine: str = "torch") -> str | None:
    """Say that the step waits for its tokens; None if it does not."""
    if not supply.limits_the_step or supply.read_seconds is None:
        return None
    advice = "keep the tokens on faster storage, and name it as `storage:` in the cluster file"
    if engine == "torch" and supply.stage == "direct":
        advice = f"copy them to the nodes with `data.stage: nvme` or `shm`, or {advice}"
    return (
        f"a step's tokens take {supply.read_seconds:.3g} s to read and the step {step_seconds:.3g} s: the data limits "
        f"it; {advice}"
    )
