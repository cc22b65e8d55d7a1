"""Our own log, as `event_text.py` writes it: what there is where a run's events cannot be read.

step 5/100    5%  ETA 0:03:10  loss 2.3151  grad norm 1.234  lr 1.00e-04  1,842 tokens/s/GPU  MFU 41.0%
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainshed.observe.engine_logs.program_reader import (
    LogEvent,
    ProgramReader,
    other_event,
    parse_number,
    step_event,
)

_STEP = re.compile(
    r"step (?P<step>\d+)/(?P<steps>\d+) .*ETA (?P<eta>[\d.]+ s|\d+:\d\d:\d\d)  loss (?P<loss>[\d.]+|not finite)"
    r"(?:.*?  grad norm (?P<grad_norm>[\d.]+|not finite))?(?:.*?  lr (?P<lr>[\d.e+-]+))?"
    r".*?  (?P<rate>[\d,]+) tokens/s/(?:GPU|rank)(?:  MFU (?P<mfu>[\d.]+)%)?"
)
_VALIDATION = re.compile(r"validation after step (?P<step>\d+): loss (?P<loss>[\d.]+|not finite)")
_CHECKPOINT = re.compile(r"checkpoint of step (?P<step>\d+) committed(?:  (?P<path>\S+))?")


class TrainshedReader(ProgramReader):
    """Reads the lines that our own engine prints."""

    program = "torch"

    def read(self, line: str) -> Iterator[LogEvent]:
        """Yield steps, validations and checkpoints."""
        if match := _STEP.search(line):
            self.facts.steps, self.facts.eta_seconds = int(match["steps"]), _parse_duration(match["eta"])
            mfu = parse_number(match["mfu"])
            yield step_event(
                int(match["step"]) - 1,
                loss=parse_number(match["loss"]),
                grad_norm=parse_number(match["grad_norm"]),
                lr=parse_number(match["lr"]),
                tokens_per_second_per_gpu=float(match["rate"].replace(",", "")),
                mfu=None if mfu is None else mfu / 100,
            )
        elif match := _VALIDATION.search(line):
            yield other_event("validation", int(match["step"]), loss=parse_number(match["loss"]))
        elif match := _CHECKPOINT.search(line):
            yield other_event("checkpoint", int(match["step"]), phase="committed", path=match["path"])


def _parse_duration(text: str) -> float:
    if text.endswith(" s"):
        return float(text.removesuffix(" s"))
    hours, minutes, seconds = map(int, text.split(":"))
    return 3600.0 * hours + 60 * minutes + seconds
