"""Folders of runs that nobody trained: the events that a rank would have written, by the real writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.recipes.small_recipes import recipe_text
from trainshed.observe.events import EventWriter
from trainshed.storage import LocalStore
from trainshed.storage.attempts import take_attempt

STEP: dict[str, Any] = {
    "grad_norm": 0.5,
    "lr": 1e-4,
    "step_seconds": 2.0,
    "tokens_per_second_per_gpu": 1234.0,
    "mfu": 0.41,
    "mfu_full_attention": 0.42,
    "batch_hash": "0f",
    "skipped": False,
    "memory_gib": 3.5,
}
START = {"run": "proof/x", "layout": "dp 2", "world_size": 2, "versions": {}, "device": "NVIDIA H100", "parameters": 12}


def write_run(store: Path) -> Path:
    """Write the folder of a run `proof/x` of six steps that was never started."""
    folder = store / "runs" / "proof" / "x"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe_text("dense").replace("steps: 20", "steps: 6"))
    return folder


def write_training(run: Path, *, end: str | None = "finished") -> None:
    """Write the events of six steps with a validation, a checkpoint and an alarm."""
    take_attempt(LocalStore(run), "")
    with EventWriter(LocalStore(run), "", attempt=1, rank=0) as events:
        events.emit("start", **START, hosts=["node-a", "node-b"])
        for step in range(6):
            events.emit("step", step, loss=3.0 - step / 10, tokens=64 * (step + 1), **STEP)
        events.emit("ranks", 5, steps=6, compute_seconds=[1.0, 1.0, 1.25])
        events.emit("validation", 6, loss=2.75, batches=1)
        events.emit("checkpoint", 6, phase="committed", seconds=1.0, stall_seconds=0.2, path="p")
        events.emit("alarm", 5, name="loss_spike", what="9.1 after 2.6 … at once")
        if end is not None:
            events.emit("end", reason=end, exit_code=0)
