"""Every event as one line of text for the page, also the kinds that a terminal does not show."""

from __future__ import annotations

from typing import Any

from trainshed.observe.event_text import EventFormatter, format_duration

SERIOUS_KINDS = {
    "failure": "bad",
    "stall": "bad",
    "non_finite": "bad",
    "spike": "warn",
    "alarm": "warn",
    "warning": "warn",
    "signal": "warn",
    "early_stop": "warn",
}
"""Kinds that a person should not overlook."""
_FORMATTER = EventFormatter(1)
_NOT_SHOWN = ("v", "time", "attempt", "rank", "kind", "step")


def event_text(event: dict[str, Any]) -> str:
    """Return an event as text."""
    kind = event["kind"]
    if kind == "phase":
        return f"{event['name']} took {format_duration(event['seconds'])}"
    if kind == "stage":
        seconds = event.get("seconds")
        took = f" in {format_duration(seconds)}" if seconds is not None else ""
        what = f": {event['what']}" if event.get("what") else ""
        return f"{event['name']} {event['state']}{took}{what}"
    if kind in ("alarm", "failure", "stall", "preflight"):
        name = f"{event['name'].replace('_', ' ')}: " if kind == "alarm" else ""
        return f"{name}{event['what']}"
    if kind == "end":
        return f"ended: {event['reason']}, exit code {event['exit_code']}"
    if kind == "checkpoint":
        return _checkpoint_text(event)
    if kind == "profile":
        return f"profile of {event['steps']} steps of rank {event['rank_profiled']}: {event['path']}"
    if kind == "answers":
        return f"{len(event['answers'])} prompts answered"
    try:
        text = _FORMATTER.format(event)
    except (KeyError, TypeError, ValueError):  # of a version that wrote other keys
        text = None
    if text is not None:
        return text
    return ", ".join(f"{key} {value}" for key, value in event.items() if key not in _NOT_SHOWN)


def event_level(event: dict[str, Any]) -> str:
    """Return `bad`, `warn` or `plain`."""
    kind = event["kind"]
    if kind in ("end", "stage", "checkpoint", "preflight"):
        outcome = event.get("reason") or event.get("state") or event.get("phase") or event.get("verdict")
        return {"failed": "bad", "fail": "bad", "replace": "warn", "warn": "warn"}.get(str(outcome), "plain")
    return SERIOUS_KINDS.get(kind, "plain")


def _checkpoint_text(event: dict[str, Any]) -> str:
    phase = event["phase"]
    if phase == "best":
        return f"step {event['step']} is the best so far, validation loss {event['loss']:.4f}"
    parts = [f"checkpoint of step {event['step']} {phase}"]
    if event.get("seconds") is not None:
        parts.append(f"in {format_duration(event['seconds'])}")
    if event.get("stall_seconds") is not None:
        parts.append(f"training stood still for {format_duration(event['stall_seconds'])}")
    if event.get("what"):
        parts.append(event["what"])
    return ", ".join(parts)
