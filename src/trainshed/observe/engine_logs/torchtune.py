"""torchtune's log: the lines of its metric logger, and its progress bar.

    Step 5 | loss:2.3151 lr:2e-05 tokens_per_second_per_gpu:1842.1 peak_memory_alloc:30.2 grad_norm:1.5
    1|5|Loss: 2.3151:  50%|█████     | 5/10 [00:12<00:12,  2.47s/it]

The first are in the file of `DiskLogger`, or printed by `StdoutLogger`; rank 0 draws the bar. The tokens that it counts
are those with a label. The seconds of a step are tqdm's, which smooths them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainshed.observe.engine_logs.program_reader import (
    LogEvent,
    ProgramReader,
    figure,
    other_event,
    parse_number,
    step_event,
)

_METRICS = re.compile(r"\bStep (?P<step>\d+) \| (?P<figures>(?:[A-Za-z_][\w/]*:\S+ ?)+)")
_BAR = re.compile(
    r"(?P<epoch>\d+)\|(?P<step>\d+)\|Loss: (?P<loss>[-\w.+]+):\s+\d+%\|.*?\|\s*(?P<done>\d+)/(?P<steps>\d+)"
    r" \[[^\]]*?(?P<rate>[\d.]+|\?)(?P<unit>s/it|it/s)"
)
_LENGTH = re.compile(r"^(?P<steps>\d+) steps: \d+ passes of \d+")
_WRITTEN = re.compile(r"(?:Model|Adapter) checkpoint of size .*? saved to (?P<path>\S+)/[^/\s]+$")
_SAVED = re.compile(r"Saving checkpoint took (?P<seconds>[\d.]+) secs")


class TorchtuneReader(ProgramReader):
    """Reads the lines of torchtune's metric logger and its bar; both have a step once."""

    program = "torchtune"

    def __init__(self) -> None:
        super().__init__()
        self._checkpoint: str | None = None

    def read(self, line: str) -> Iterator[LogEvent]:
        """Yield steps, validations and checkpoints."""
        if match := _METRICS.search(line):
            yield from self._read_metrics(int(match["step"]), match["figures"])
        elif (match := _BAR.search(line)) and self.is_new(int(match["step"]) - 1):
            rate = parse_number(match["rate"])
            seconds = None if not rate else rate if match["unit"] == "s/it" else 1 / rate
            yield step_event(int(match["step"]) - 1, loss=parse_number(match["loss"]), step_seconds=seconds)
        elif match := _LENGTH.search(line):
            self.facts.steps = int(match["steps"])
        elif match := _WRITTEN.search(line):
            self._checkpoint = match["path"]
        elif (match := _SAVED.search(line)) and self._last_step >= 0:
            seconds, path = float(match["seconds"]), self._checkpoint
            yield other_event(
                "checkpoint",
                self._last_step + 1,
                phase="committed",
                seconds=seconds,
                stall_seconds=seconds,
                path=path,
            )

    def _read_metrics(self, step: int, text: str) -> Iterator[LogEvent]:
        figures = dict(part.split(":", 1) for part in text.split())
        if "loss" in figures and self.is_new(step - 1):
            memory = figure(figures, "peak_memory_alloc", "peak_memory_active")
            self.facts.memory_gib = max(self.facts.memory_gib or 0.0, memory or 0.0) or None
            yield step_event(
                step - 1,
                loss=figure(figures, "loss"),
                grad_norm=_tensor_figure(figures.get("grad_norm")),
                lr=figure(figures, "lr"),
                tokens_per_second_per_gpu=figure(figures, "tokens_per_second_per_gpu"),
                memory_gib=memory,
            )
        if (loss := figure(figures, "val_loss", "validation_loss")) is not None:
            yield other_event("validation", step, loss=loss)


def _tensor_figure(text: str | None) -> float | None:
    """Return a number that may be written as a tensor: `tensor(1.5)`, or `1.5`."""
    if text is None:
        return None
    match = re.search(r"[-+]?\d+\.?\d*(?:[eE][-+]?\d+)?", text)
    return parse_number(match[0]) if match else None
