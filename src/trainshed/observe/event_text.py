"""Training events as text, for a terminal, a log file and a scheduler's own log.

The command line imports this at its start, so nothing heavy may be imported here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

RECENT_STEPS = 20
"""How many of the last steps the remaining time is estimated from."""


def rate_unit(device: str | None) -> str:
    """Return the unit of `tokens_per_second_per_gpu`: a rank has one GPU, or none at all."""
    return "tokens/s/rank" if device == "cpu" else "tokens/s/GPU"


class EventFormatter:
    """Formats the events of a training of `steps` steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.device: str | None = None
        self.recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def format(self, event: dict[str, Any]) -> str | None:
        """Return an event as text; None for an event that is not shown."""
        kind = event["kind"]
        if kind == "step":
            return self.format_step(event)
        if kind in ("note", "warning"):
            return event["text"]
        if kind == "stall":
            return event["what"]
        if kind == "alarm":
            step = event.get("step")
            return event["what"] if step is None else f"step {step + 1}: {event['what']}"
        if kind == "start":
            self.device = event["device"]
            return (
                f"training {event['run']}: {event['parameters']:,} parameters on {event['device']}, {event['layout']}"
            )
        if kind == "resume":
            return f"going on after step {event['step']} from {event['checkpoint']}"
        if kind == "probe":
            return f"base weights: loss {event['loss']:.4f} on the probe batch, {event['expected']:.4f} when fetched"
        if kind == "validation":
            parts = [f"validation after step {event['step']}: loss {_format_number(event['loss'], '.4f')}"]
            sets = (f"{name} {_format_number(loss, '.4f')}" for name, loss in (event.get("set_losses") or {}).items())
            return "  ".join([*parts, *sets, *_reward_parts(event)])
        if kind == "train_phase":
            return (
                f"phase {event['name']} ({event['number']} of {event['of']}), up to step {event['last_step']}: "
                f"{event['global_batch']} × {event['sequence_length']} tokens a step on {event['layout']}"
            )
        if kind == "answers":
            return format_answers(event["answers"])
        if kind == "evaluation":
            scores = (f"{name} {_format_number(value, '.4f')}" for name, value in event["scores"].items())
            return "  ".join([f"evaluated step {event['step']} by {event['name']}:", *scores])
        if kind == "early_stop":
            return f"stopped early after step {event['step']}: {event['reason']}"
        if kind == "non_finite":
            return f"step {event['step'] + 1}: {event['what']}; {_POLICIES[event['policy']]}"
        if kind == "spike":
            return f"step {event['step'] + 1} is a spike and was skipped: {event['what']}"
        if kind == "checkpoint" and event["phase"] == "best":
            return f"step {event['step']} is the best so far, with a validation loss of {event['loss']:.4f}"
        if kind == "checkpoint" and event["phase"] in ("committed", "failed"):
            what = event.get("what") or event.get("path") or ""
            return f"checkpoint of step {event['step']} {event['phase']}  {what}".rstrip()
        if kind == "profile":
            return format_profile(event)
        if kind == "signal":
            return f"asked to stop by {event['name']}: stopped after step {event['step']}"
        return None

    def format_step(self, event: dict[str, Any]) -> str:
        """Return one step as text: progress, remaining time, loss and speed; without what is not known."""
        if event["step_seconds"] is not None:
            self.recent.append(event["step_seconds"])
        done = event["step"] + 1
        left = (self.steps - done) * sum(self.recent) / len(self.recent) if self.recent else None
        eta = f"  ETA {format_duration(left)}" if left is not None else ""
        parts = [
            f"step {done}/{self.steps}  {done / self.steps:4.0%}{eta}",
            f"loss {_format_number(event['loss'], '.4f')}",
            *_reward_parts(event),
        ]
        if "batch_hash" in event or event["grad_norm"] is not None:  # our own engine always knows it
            parts.append(f"grad norm {_format_number(event['grad_norm'], '.3f')}")
        if event["lr"] is not None:
            parts.append(f"lr {event['lr']:.2e}")
        if event["tokens_per_second_per_gpu"] is not None:
            parts.append(f"{event['tokens_per_second_per_gpu']:,.0f} {rate_unit(self.device)}")
        if event.get("mfu") is not None:
            parts.append(f"MFU {event['mfu']:.1%}")
        return "  ".join(parts)


def format_profile(event: Mapping[str, Any]) -> str:
    """Return where a profile is, and its figures where rank 0 has them."""
    # Reading traces is not needed at the start of the command line.
    from trainshed.observe.profile_summary import shares_text

    first, last = event["step"] - event["steps"] + 1, event["step"]
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    text = f"profile of {steps} on rank {event['rank_profiled']}: {event['path']}"
    summary = event.get("summary")
    return text if summary is None else f"{text}\n  {shares_text(summary)}"


_SHOWN_ANSWERS = 5
_SHOWN_CHARACTERS = 100


def format_answers(answers: Sequence[Mapping[str, Any]]) -> str:
    """Return the first answers to the prompts of a validation, one line each; `trainshed status` shows all of them."""
    lines = [
        f"  {_shorten(answer['prompt'])} -> {_shorten(answer['answer'])}"
        for answer in answers[:_SHOWN_ANSWERS]
        if answer["answer"] is not None
    ]
    more = len(answers) - len(lines)
    rest = [f"  {more} more: `trainshed status RUN --answers`"] if more else []
    return "\n".join(["answers:", *lines, *rest])


def _shorten(text: str) -> str:
    """Return a text on one line, cut where it is long."""
    line = text.replace("\r", " ").replace("\n", " ")
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[: _SHOWN_CHARACTERS - 1]}…"


def format_stop_request(source: str, attempt: int, done: int | None, saved: int | None, *, repeated: bool) -> str:
    """Return the answer to a request to stop, and to a second one (`repeated`), which stops the run at once.

    `done` and `saved` are the last step that is done and the last one in a checkpoint, if they are known.
    """
    if repeated:
        lost = f"what came after the checkpoint of step {saved:,} is lost" if saved else "there is no checkpoint"
        return f"{source} again: attempt {attempt} is stopped at once and does not save; {lost}"
    more = "; a second Ctrl-C stops it at once, without saving" if source == CTRL_C else ""
    if done is None:
        return f"{source}: attempt {attempt} has done no step yet, and stops as soon as it can{more}"
    return f"{source}: attempt {attempt}, in step {done + 1:,}, stops within a step or two and saves a checkpoint{more}"


def _reward_parts(event: dict[str, Any]) -> list[str]:
    """Say how often, and by how much, the better answer of a pair is preferred; nothing where no pairs are compared."""
    if event.get("reward_accuracy") is None or event.get("reward_margin") is None:
        return []
    return [f"reward accuracy {event['reward_accuracy']:.1%}", f"margin {event['reward_margin']:.3f}"]


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
