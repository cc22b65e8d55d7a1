"""Training events as text, for a terminal, a log file and a scheduler's own log.

The command line imports this at its start, so nothing heavy may be imported here.
"""

from __future__ import annotations

from collections import deque
from typing import Any

_RECENT_STEPS = 20  # what the time left is drawn from


class EventFormatter:
    """Says the events of one training of so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.recent: deque[float] = deque(maxlen=_RECENT_STEPS)

    def text(self, event: dict[str, Any]) -> str | None:
        """An event in words; None for those nobody waits for."""
        kind = event["kind"]
        if kind == "step":
            return self.step_text(event)
        if kind in ("note", "warning"):
            return event["text"]
        if kind == "stall":
            return event["what"]
        if kind == "start":
            return (
                f"training {event['run']}: {event['parameters']:,} parameters on {event['device']}, {event['layout']}"
            )
        if kind == "resume":
            return f"going on after step {event['step']} from {event['checkpoint']}"
        if kind == "probe":
            return f"base weights: loss {event['loss']:.4f} on the probe batch, {event['expected']:.4f} when fetched"
        if kind == "validation":
            return f"validation after step {event['step']}: loss {_format_number(event['loss'], '.4f')}"
        if kind == "non_finite":
            return f"step {event['step'] + 1}: {event['what']}; {_POLICIES[event['policy']]}"
        if kind == "checkpoint" and event["phase"] in ("committed", "failed"):
            what = event.get("what") or event.get("path") or ""
            return f"checkpoint of step {event['step']} {event['phase']}  {what}".rstrip()
        if kind == "signal":
            return f"asked to stop by {event['name']}: stopped after step {event['step']}"
        return None

    def step_text(self, event: dict[str, Any]) -> str:
        """One step: how far, how long still, how well, how fast."""
        self.recent.append(event["step_seconds"])
        done = event["step"] + 1
        left = (self.steps - done) * sum(self.recent) / len(self.recent)
        parts = [
            f"step {done}/{self.steps}  {done / self.steps:4.0%}  ETA {format_duration(left)}",
            f"loss {_format_number(event['loss'], '.4f')}",
            f"grad norm {_format_number(event['grad_norm'], '.3f')}",
            f"lr {event['lr']:.2e}",
            f"{event['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU",
        ]
        if event.get("mfu") is not None:
            parts.append(f"MFU {event['mfu']:.1%}")
        return "  ".join(parts)


def format_stop_request(asked: str, attempt: int, done: int | None, saved: int | None, *, again: bool) -> str:
    """What is said at once when somebody asks a run to stop, and when the same person will not wait.

    `done` and `saved` are the last step that is done and the last that is in a checkpoint, as far as is known.
    """
    if again:
        lost = f"what came after the checkpoint of step {saved:,} is lost" if saved else "there is no checkpoint"
        return f"{asked} again: attempt {attempt} is stopped at once and does not save; {lost}"
    more = "; a second Ctrl-C stops it at once, without saving" if asked == CTRL_C else ""
    if done is None:
        return f"{asked}: attempt {attempt} has done no step yet, and stops as soon as it can{more}"
    return f"{asked}: attempt {attempt}, in step {done + 1:,}, stops within a step or two and saves a checkpoint{more}"


CTRL_C = "Ctrl-C"
_POLICIES = {"stop": "stopping", "skip": "nothing was updated, going on"}


def _format_number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def format_duration(seconds: float) -> str:
    """Write seconds as h:mm:ss, a short time with a decimal."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
