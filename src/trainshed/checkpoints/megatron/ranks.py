"""Which files a legacy checkpoint has, and which layers are in them.

Files are named by tensor-, pipeline- and expert-parallel rank. Megatron numbers the ranks of a pipeline stage twice,
with tp fastest for dense layers and etp fastest, then ep, for experts; so not every pair of tp and ep rank exists, and
where two ranks of one name would hold different experts the format cannot say it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainshed.checkpoints.megatron.args import Layout
from trainshed.errors import InputError
from trainshed.recipe import ModelConfig

FILE = "model_optim_rng.pt"


@dataclass(frozen=True)
class Rank:
    """The place of a file's ranks in both orders."""

    tp: int
    pp: int
    ep: int
    etp: int


def ranks(layout: Layout) -> list[Rank]:
    """Return a rank for each file of a checkpoint."""
    found: dict[tuple[int, int], int] = {}
    for rank in range(math.lcm(layout.tp, layout.etp * layout.ep)):
        name, etp = (rank % layout.tp, rank // layout.etp % layout.ep), rank % layout.etp
        if found.setdefault(name, etp) != etp:
            raise InputError(
                f"with tp {layout.tp}, ep {layout.ep} and etp {layout.etp}, ranks with different parts of an expert "
                "share one file of the legacy format",
                hint="choose an etp that divides tp, or write torch_dist",
            )
    return [Rank(tp, pp, ep, etp) for pp in range(layout.pp) for (tp, ep), etp in sorted(found.items())]


def folder_name(rank: Rank, layout: Layout) -> str:
    """Return the folder of a file: Megatron's `get_checkpoint_name`."""
    name = f"mp_rank_{rank.tp:02d}"
    name += f"_{rank.pp:03d}" if layout.pp > 1 else ""
    return name + (f"_{rank.ep:03d}" if layout.ep > 1 else "")


def chunk_name(layout: Layout, virtual: int) -> str:
    """Return the key of a model chunk in its file."""
    return f"model{virtual}" if layout.vp > 1 else "model"


def check(config: ModelConfig, layout: Layout) -> None:
    """Raise where Megatron could not load such a checkpoint."""
    tp, kv_heads = layout.tp, config.kv_heads
    if config.layers % (layout.pp * layout.vp):
        raise _illegal(f"{config.layers} layers cannot be shared out evenly by pp {layout.pp} · vp {layout.vp}")
    if layout.vp > 1 and layout.pp == 1:
        raise _illegal(f"vp {layout.vp} needs a pipeline")
    if config.heads % tp or (kv_heads % tp and tp % kv_heads):
        raise _illegal(f"tp {tp} does not go with {config.heads} heads and {kv_heads} key/value heads")
    experts = config.moe.experts if config.moe else 0
    if not experts and layout.ep > 1:
        raise _illegal(f"ep {layout.ep} needs experts")
    if experts % layout.ep:
        raise _illegal(f"ep {layout.ep} does not divide the {experts} experts")


def _illegal(what: str) -> InputError:
    return InputError(
        f"Megatron has no such layout: {what}", hint="choose another, or write torch_dist, which has none"
    )
