"""What torchtune's distributed recipes can run: FSDP2 and tensor parallel, for whole models; FSDP2 alone for LoRA."""

from __future__ import annotations

from collections.abc import Iterator

from trainshed.plan.layout import RankLayout
from trainshed.plan.legality.asked import Asked
from trainshed.plan.legality.wording import problem
from trainshed.plan.performance.anatomy import Anatomy
from trainshed.recipe.section import Problem

_ABSENT = {
    "pp": "a pipeline",
    "vp": "an interleaved pipeline",
    "cp": "context parallel",
    "ep": "expert parallel",
    "etp": "tensor parallel within experts",
    "replicate": "hybrid sharding",
}


def absent_axes(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """tp and dp are all there is."""
    for key, name in _ABSENT.items():
        if (size := getattr(layout, key)) > 1:
            yield problem(key, f"{key}: {size} is {name}, which torchtune does not have", "delete it")


def tensor_parallel(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """tp is for whole models, and cuts their width too."""
    if asked.lora and layout.tp > 1:
        yield problem("tp", f"tp: {layout.tp} with LoRA is not in torchtune: adapters are not cut", "delete it")
    elif model.hidden % layout.tp:
        yield problem(
            "tp", f"tp: {layout.tp} does not divide the width of {model.hidden}", "write a tp that divides it"
        )


def sharding(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """FSDP2 shares out everything, or there is one dp rank."""
    if layout.dp > 1 and layout.shard != "full":
        yield problem(
            "shard",
            f"torchtune's {layout.dp} dp ranks share out weights, gradients and optimiser states (FSDP2), "
            f"and shard is {layout.shard}",
            "write shard: full",
        )


def recompute(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """Activation checkpointing is on for every layer or off."""
    if layout.recompute == "selective":
        yield problem(
            "recompute", "torchtune recomputes every layer or none, not selectively", "write recompute: full or none"
        )
