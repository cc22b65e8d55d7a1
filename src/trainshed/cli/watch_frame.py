"""How `trainshed watch` draws a run: one frame of a terminal of any width, in Unicode or ASCII, with or without colour.

Colour never says anything by itself: what is unusual also has a word.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainshed.cli import is_plain_locale
from trainshed.observe.event_text import format_duration, rate_unit

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from trainshed.observe.live_view import DeviceSummary, LiveSnapshot, RankSpread

_LABEL = 10
_FEWEST_COLUMNS = 30
_SPREAD_WARNING = 0.1
"""A rank that computes this much longer than the median is worth a look."""
_STATE_STYLES = {
    "running": "bold green",
    "serving": "bold green",
    "done": "bold green",
    "failed": "bold red",
    "cancelled": "bold red",
    "stopped": "bold yellow",
    "waiting": "bold yellow",
    "unknown": "bold yellow",
}
_LEVEL_STYLES = {"note": "", "good": "green", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True)
class Glyphs:
    """The characters that a frame is drawn with."""

    levels: str
    bar: str
    bar_left: str
    missing: str
    ascii: bool = False

    def spark(self, values: Sequence[float | None]) -> str:
        """Draw numbers as a line of small bars; None is a number that is not finite."""
        known = sorted(value for value in values if value is not None)
        if not known:
            return self.missing * len(values)
        low, high = known[0], known[min(len(known) - 1, int(0.95 * len(known)))]  # the first losses would flatten all
        top = len(self.levels) - 1

        def level(value: float) -> str:
            share = (value - low) / (high - low) if high > low else 0.0
            return self.levels[max(0, min(top, round(share * top)))]

        return "".join(self.missing if value is None else level(value) for value in values)

    def safe(self, text: str) -> str:
        """Return a text on one line, in characters that the terminal shows."""
        line = " ".join(text.split("\n"))
        line = "".join(character if character.isprintable() else " " for character in line)
        return line.encode("ascii", "replace").decode() if self.ascii else line


UNICODE = Glyphs("▁▂▃▄▅▆▇█", "━", "─", "×")
ASCII = Glyphs("_.-~=+*#", "#", "-", "x", ascii=True)


def glyphs_for(encoding: str) -> Glyphs:
    """Return what a terminal can show: Python writes UTF-8 in the C locale too, whose terminals may not read it."""
    return ASCII if is_plain_locale() or not encoding.lower().startswith("utf") else UNICODE


@dataclass(frozen=True)
class RunAccount:
    """How a run stands, beside what its events say."""

    run: str
    place: str
    """`here`, `on CLUSTER`, `in s3://bucket`."""
    state: str
    reason: str = ""
    scheduler: str | None = None
    """What the scheduler says of its stages, or that it cannot be asked."""
    problem: str | None = None
    """Why the events cannot be read now."""


class Frame:
    """One picture of a run; rich draws it in whatever size its console has."""

    def __init__(self, account: RunAccount, snapshot: LiveSnapshot, glyphs: Glyphs, *, height: int | None) -> None:
        self.account, self.snapshot, self.glyphs, self.height = account, snapshot, glyphs, height

    def lines(self, width: int) -> list[Text]:
        """Draw it `width` columns wide; the last events take what is left of the height."""
        width = max(width, _FEWEST_COLUMNS)
        figures = [*self._head(width), *self._losses(width), *self._figures()]
        room = 12 if self.height is None else max(0, self.height - len(figures) - 1)
        events = self._events(room)
        rows = [*figures, *([self._text("")] if events else []), *events]
        for row in rows:
            row.truncate(width, overflow="crop")
        return rows if self.height is None else rows[: self.height]

    def __rich_console__(self, console: Console, options: object) -> list[Text]:
        """Draw it for a console."""
        return self.lines(console.width)

    def _text(self, text: str, style: str = "") -> Text:
        from rich.text import Text

        return Text(self.glyphs.safe(text), style=style, no_wrap=True)

    def _row(self, label: str, *parts: tuple[str, str] | str) -> Text:
        row = self._text(f"{label:<{_LABEL}}", "dim")
        row.style = ""
        row.stylize("dim", 0, _LABEL)
        for part in parts:
            text, style = (part, "") if isinstance(part, str) else part
            row.append(self.glyphs.safe(text), style or None)
        return row

    def _head(self, width: int) -> list[Text]:
        account, status = self.account, self.snapshot.status
        head = self._text(f"{account.run} {account.place}: ", "")
        head.append(account.state, _STATE_STYLES.get(account.state, "bold"))
        if status.attempt:
            head.append(f", attempt {status.attempt}")
        rows = [head]
        start = self.snapshot.start
        if start is not None:
            engine = f" with {start['engine']}" if start.get("engine") else ""
            ranks = f"{start['world_size']} rank{'' if start['world_size'] == 1 else 's'} on {start['device']}"
            rows.append(self._text(f"{start['parameters']:,} parameters, {start['layout']}, {ranks}{engine}", "dim"))
        if account.reason:
            rows.append(self._text(account.reason, "yellow" if account.state != "running" else "dim"))
        if account.scheduler:
            rows.append(self._text(account.scheduler, "dim"))
        if account.problem:
            rows.append(self._text(account.problem, "bold yellow"))
        if status.last_error and account.state != "running":
            rows.append(self._text(f"last error: {status.last_error}", "bold red"))
        if self.snapshot.stall:
            rows.append(self._text(f"STALL {self.snapshot.stall}", "bold red"))
        elif account.state == "running" and (silent := self._silent_seconds()) is not None:
            rows.append(self._text(f"no step for {format_duration(silent)}", "bold yellow"))
        rows.append(self._progress(width))
        return rows

    def _silent_seconds(self) -> float | None:
        """How long there has been no step, where that is much longer than steps take."""
        last, step_seconds = self.snapshot.last_step, self.snapshot.step_seconds
        if last is None or step_seconds is None or self.snapshot.status.ended or self.snapshot.status.stage:
            return None
        silent = time.time() - (last["time"] or 0.0)
        return silent if silent > 60 + 10 * step_seconds else None

    def _progress(self, width: int) -> Text:
        status = self.snapshot.status
        if status.step is None:
            return self._text(status.summary() or "no step yet")
        words = f"step {status.step:,}"
        share = None
        if status.steps:
            share = status.step / status.steps
            words += f" of {status.steps:,}  {share:.0%}"
        if status.eta_seconds:
            words += f"  ETA {format_duration(status.eta_seconds)}"
        elif status.stage:
            words += f"  {status.stage}"
        row = self._text("")
        columns = min(40, width - len(words) - 2)
        if share is not None and columns >= 8:
            done = round(columns * min(1.0, share))
            row.append(self.glyphs.bar * done, "green")
            row.append(self.glyphs.bar_left * (columns - done), "dim")
            row.append("  ")
        row.append(self.glyphs.safe(words))
        return row

    def _losses(self, width: int) -> list[Text]:
        from trainshed.observe.live_view import fewer_bins

        rows = []
        status, snapshot = self.snapshot.status, self.snapshot
        columns = max(8, width - _LABEL - 26)
        if snapshot.losses:
            value = "not finite" if status.loss is None else f"{status.loss:.4f}"
            row = self._row("loss")
            bins = fewer_bins(snapshot.losses, columns)
            drawn = self.glyphs.spark([point.loss for point in bins])
            for character, point in zip(drawn, bins, strict=True):
                row.append(character, "bold red" if point.alarm or point.loss is None else "cyan")
            row.append(f"  {value}", "bold" if status.loss is not None else "bold red")
            rows.append(row)
        if snapshot.validations:
            step, loss = snapshot.validations[-1]
            drawn = self.glyphs.spark([loss for _, loss in snapshot.validations[-columns:]])
            value = "not finite" if loss is None else f"{loss:.4f}"
            rows.append(self._row("validation", (f" {drawn}", "magenta"), f"  {value} at {step:,}"))
        return rows

    def _figures(self) -> list[Text]:
        snapshot, rows = self.snapshot, []
        step, status = snapshot.last_step, snapshot.status
        if status.tokens_per_second_per_gpu is not None:
            parts = [f"{status.tokens_per_second_per_gpu:,.0f} {rate_unit(status.device)}"]
            parts += [f"MFU {status.mfu:.1%}"] if status.mfu is not None else []
            parts += [f"{format_duration(snapshot.step_seconds)}/step"] if snapshot.step_seconds is not None else []
            rows.append(self._row("speed", "  ".join(parts)))
        if step is not None:
            norm = "not finite" if step["grad_norm"] is None else f"{step['grad_norm']:.3f}"
            parts = [f"norm {norm}", f"lr {step['lr']:.2e}", f"{step['tokens']:,} tokens"]
            parts += [f"{step['memory_gib']:.1f} GiB"] if step["memory_gib"] is not None else []
            rows.append(self._row("gradient", "  ".join(parts)))
        if snapshot.ranks is not None:
            rows.append(self._row("ranks", *_ranks_text(snapshot.ranks)))
        if snapshot.devices is not None:
            rows.append(self._row("devices", *_devices_text(snapshot.devices)))
        if (text := self._checkpoint_text()) is not None:
            rows.append(self._row("saved", *text))
        if snapshot.stages and (status.step is None or status.stage):
            rows += [self._row("stage", (stage.text(), _STAGE_STYLES[stage.state])) for stage in snapshot.stages]
        return rows

    def _checkpoint_text(self) -> list[tuple[str, str] | str] | None:
        saved = self.snapshot.checkpoint
        parts: list[tuple[str, str] | str] = []
        if saved.step is not None:
            words = [f"step {saved.step:,}"]
            words += [f"in {format_duration(saved.seconds)}"] if saved.seconds is not None else []
            words += [f"stall {format_duration(saved.stall_seconds)}"] if saved.stall_seconds is not None else []
            words += [f"{format_duration(max(0.0, time.time() - saved.time))} ago"] if saved.time else []
            parts.append(", ".join(words))
        if saved.best_step is not None:
            loss = "" if saved.best_loss is None else f" at {saved.best_loss:.4f}"
            parts.append(f"{'; ' if parts else ''}best step {saved.best_step:,}{loss}")
        if saved.failed is not None:
            parts.append((f"{'; ' if parts else ''}NOT saved since: {saved.failed}", "bold red"))
        return parts or None

    def _events(self, room: int) -> list[Text]:
        rows = []
        for line in self.snapshot.lines[-room:] if room else ():
            at = time.strftime("%H:%M:%S", time.localtime(line.time))
            row = self._text(f"{at}  {line.text}", _LEVEL_STYLES[line.level])
            rows.append(row)
        return rows


_STAGE_STYLES = {"started": "bold", "done": "green", "skipped": "dim", "failed": "bold red"}


def _ranks_text(ranks: RankSpread) -> list[tuple[str, str] | str]:
    host = f" ({ranks.slowest_host})" if ranks.slowest_host else ""
    slow = f"slowest {ranks.slowest_rank}{host} {ranks.slowest_seconds:.3f} s"
    apart = f", {ranks.excess:.0%} over the median"
    style = "bold yellow" if ranks.excess >= _SPREAD_WARNING else ""
    return [(slow + apart, style), f"; fastest {ranks.fastest_rank} {ranks.fastest_seconds:.3f} s"]


def _devices_text(devices: DeviceSummary) -> list[tuple[str, str] | str]:
    words = [f"{devices.utilization:.0%} busy"] if devices.utilization is not None else []
    if devices.hottest_celsius is not None:
        words.append(f"hottest {devices.hottest_celsius:.0f} C (rank {devices.hottest_rank})")
    words += [f"{devices.power_watts:,.0f} W"] if devices.power_watts is not None else []
    words += [f"fullest {devices.memory_gib:.1f} GiB"] if devices.memory_gib is not None else []
    parts: list[tuple[str, str] | str] = [", ".join(words) or "nothing can be read"]
    if devices.throttled:
        reasons = ", ".join(sorted(set(devices.throttled.values())))
        parts.append((f"; {len(devices.throttled)} THROTTLED: {reasons}", "bold yellow"))
    return parts
