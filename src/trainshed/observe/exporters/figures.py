"""Which figures of an event are curves, and under which names tools show them: `train/loss`, `performance/mfu`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainshed.observe.events import REWARD_KEYS

STEP_TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "z_loss": "train/z_loss",
    "mtp_loss": "train/mtp_loss",
    "moe_balance": "train/moe_balance",
    "moe_z": "train/moe_z",
    **{name: f"train/{name}" for name in REWARD_KEYS},
    "tokens": "train/tokens",
    "step_seconds": "performance/step_seconds",
    "tokens_per_second_per_gpu": "performance/tokens_per_second_per_gpu",
    "mfu": "performance/mfu",
    "memory_gib": "performance/memory_gib",
}
VALIDATION_TAGS = {key: f"validation/{key}" for key in ("loss", *REWARD_KEYS)}


@dataclass(frozen=True)
class FigurePoint:
    """The figures of one step; steps are counted from 1."""

    step: int
    figures: Mapping[str, float]
    time: float | None
    """Seconds since 1970; None: now."""


def figure_point(event: Mapping[str, Any]) -> FigurePoint | None:
    """Return what an event adds to the curves, None if nothing. What is not finite has no figure."""
    kind = event["kind"]
    if kind == "evaluation":
        scores = {f"eval/{event['name']}/{key}": value for key, value in event["scores"].items() if value is not None}
        return FigurePoint(event["step"], scores, event.get("time")) if scores else None
    if kind not in ("step", "validation") or event.get("step") is None:
        return None
    # A validation says how many steps are done, a step its own number.
    step, tags = (event["step"] + 1, STEP_TAGS) if kind == "step" else (event["step"], VALIDATION_TAGS)
    figures = {tag: event[key] for key, tag in tags.items() if event.get(key) is not None}
    named = event.get("source_losses") or event.get("set_losses") or {}
    figures |= {f"{tags['loss']}/{name}": loss for name, loss in named.items() if loss is not None}
    return FigurePoint(step, figures, event.get("time")) if figures else None
