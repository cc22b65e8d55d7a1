"""A rank's training state: what a checkpoint holds, and how it is put back, on this layout or another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainshed.checkpoints.pieces import Piece
from trainshed.data.order import DataOrder
from trainshed.data.sampling.schedule import SkipList
from trainshed.engines.torch.build import RankModel
from trainshed.engines.torch.learning_rate import DecaySpan
from trainshed.engines.torch.optimizer import AdamW
from trainshed.errors import InputError


def state_pieces(model: RankModel, optimizer: AdamW) -> dict[str, Piece]:
    """Every tensor of the state under its global name; loading fills the same tensors in place."""
    pieces = {
        f"model.{weight.name}": Piece(weight.parameter.shape, weight.offset, weight.local, weight.owner)
        for weight in model.weights
    }
    at = model.mesh.at
    speaks = not any((at.pp, at.dp, at.cp, at.tp))
    return pieces | dict(optimizer.pieces()) | {"optimizer.updates": Piece((), (), optimizer.updates, speaks)}


def state_facts(order: DataOrder, step: int, skipped: int, decay: DecaySpan | None) -> dict[str, Any]:
    """What besides tensors a resumed run must know; `step` is the next one, `decay` where the learning rate decays."""
    return {
        "step": step,
        "consumed_samples": order.consumed(step),
        "skipped_steps": skipped,
        "data_skip": [list(each) for each in order.skip.ranges],
        "sequence_length": order.sequence_length,
        "lr_decay": decay,
    }


def check_facts(facts: Mapping[str, Any], order: DataOrder) -> None:
    """Refuse to go on where the data behind the checkpoint is no longer what the recipe says."""
    step, consumed = facts["step"], facts["consumed_samples"]
    if order.sequence_length != facts["sequence_length"]:
        raise InputError(
            f"the checkpoint was trained on sequences of {facts['sequence_length']} tokens, "
            f"the recipe says {order.sequence_length}",
            where="data.sequence_length",
            hint="write what it was, or start another run with --id",
        )
    if order.consumed(step) != consumed:
        raise InputError(
            f"the checkpoint of step {step} has consumed {consumed} samples, the recipe says {order.consumed(step)}",
            where="train.global_batch",
            hint="write the batch it was trained with, or start another run with --id",
        )
    before = SkipList([(start, stop) for start, stop in facts["data_skip"]])
    end = before.stream_end(consumed)
    if _until(before, end) != _until(order.skip, end):
        raise InputError(
            f"`data.skip` says something else about the first {end} samples, which this run has already passed",
            where="data.skip",
            hint=f"skip samples from {end} on, or start another run with --id",
        )


def _until(skip: SkipList, end: int) -> list[tuple[int, int]]:
    """The skipped ranges below a sample of the stream."""
    return [(start, min(stop, end)) for start, stop in skip.ranges if start < end]
