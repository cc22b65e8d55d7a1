"""MaxText's log.

    completed step: 5, seconds: 1.234, TFLOP/s/device: 185.400, Tokens/s/device: 3456.700, total_weights: 32768, loss:
    6.543
    completed profiler activation/deactivation step: 6, total_weights: 32768, loss: 6.543
    eval metrics after step: 10, loss=6.321, total_weights=65536

`total_weights` are the tokens of the step that have a label. While the batch still grows, its rates are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from trainshed.observe.engine_logs.program_reader import (
    LogEvent,
    ProgramReader,
    figure,
    named_figures,
    other_event,
    step_event,
)

_STEP = re.compile(r"completed (?P<profiled>profiler activation/deactivation )?step: (?P<step>\d+),(?P<figures>.*)")
_VALIDATION = re.compile(r"eval metrics after step: (?P<step>\d+),(?P<figures>.*)")


class MaxTextReader(ProgramReader):
    """Reads the lines of MaxText, which counts steps from 0."""

    program = "maxtext"
    first_step = 0

    def read(self, line: str) -> Iterator[LogEvent]:
        """Yield steps and validations; a step at an edge of the profile has no time, and says so."""
        if match := _STEP.search(line):
            figures = named_figures(match["figures"], between=",")
            step, rate = int(match["step"]), figure(figures, "Tokens/s/device")
            seconds, tokens = figure(figures, "seconds"), figure(figures, "total_weights")
            if rate and seconds and tokens:
                # Tokens without a label are in the rate, but not in `total_weights`.
                self.facts.world_size = max(self.facts.world_size or 1, math.ceil(tokens / (rate * seconds) - 0.05))
            yield step_event(
                step,
                loss=figure(figures, "loss"),
                step_seconds=seconds,
                tokens_per_second_per_gpu=rate,
                learned_tokens=int(tokens) if tokens else None,
            )
            if match["profiled"]:
                yield other_event("profile", step + 1, steps=1, path="", rank_profiled=0)
        elif match := _VALIDATION.search(line):
            figures = named_figures(match["figures"], sign="=", between=",")
            yield other_event("validation", int(match["step"]) + 1, loss=figure(figures, "loss"))
