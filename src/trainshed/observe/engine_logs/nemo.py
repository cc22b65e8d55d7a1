"""NeMo's log: lines of NVIDIA's DLLogger, NeMo 2's console, and the progress bar of NeMo 1 (Lightning).

    DLLL {"timestamp": "1728595441.95", "datetime": "2024-10-10 21:24:01.95", "step": 36, "data": {"reduced_train_loss":
    7.97, "lr": 8.4e-06, "global_step": 36, "consumed_samples": 37888, "train_step_timing in s": 45.8, "epoch": 0}}
    Training epoch 0, iteration 36/49 | lr: 8.4e-06 | global_batch_size: 1024 | global_step: 36 | reduced_train_loss:
    7.976 | train_step_timing in s: 45.81 | consumed_samples: 37888
    Epoch 0: :  74%|███▋ | 37/50 [28:15<09:55, v_num=1, reduced_train_loss=7.980, global_step=36.00,
    consumed_samples=37888.0, train_step_timing in s=45.80]

NeMo counts steps from 0. Where a log has DLLogger lines besides others, these are taken: they have more digits and the
time. What NeMo calls `train_step_timing in s` is the mean of its `buffer_size` last steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainshed.observe.engine_logs.program_reader import (
    LogEvent,
    ProgramReader,
    figure,
    named_figures,
    other_event,
    parse_number,
    parse_time,
    step_event,
)

_DLLOGGER = "DLLL {"
_STEP_SECONDS = ("train_step_timing in s", "train_step_timing", "step_time", "train_step_time")
"""Keys for the seconds of a step: NeMo's first, then those of other programs that write DLLogger files."""
_LOSS = ("reduced_train_loss", "train_loss", "loss")
_VALIDATION_LOSS = ("val_loss", "validation_loss")
_CONSOLE = re.compile(r"Training epoch \d+, iteration (?P<step>\d+)/(?P<last>\d+) \|(?P<figures>.*)")
_BAR = re.compile(r"Epoch \d+:.*?\|\s*(?P<done>\d+)/(?P<steps>\d+)\b(?P<rest>.*)")
_BAR_FIGURE = re.compile(r"(?P<name>[A-Za-z_][\w ./]*)=(?P<value>[^,\]\s]+)")
_SAVED = re.compile(
    r"(?:Async checkpoint save for step (?P<done>\d+).*?finalized successfully"
    r"|Successfully saved checkpoint from iteration\s+(?P<iteration>\d+) to)"
)


class NemoReader(ProgramReader):
    """Reads DLLogger lines, NeMo 2's console and NeMo 1's bar."""

    program = "nemo"
    first_step = 0

    def __init__(self) -> None:
        super().__init__()
        self._writes_dllogger = False
        self._is_bar_or_console = False
        self._validation_loss: float | None = None
        self._last_saved = -1

    @property
    def name(self) -> str:
        """`dllogger` for a file that holds nothing else: other programs write such files too."""
        return "dllogger" if self._writes_dllogger and not self._is_bar_or_console else self.program

    def read(self, line: str) -> Iterator[LogEvent]:
        """Yield steps, validations and checkpoints."""
        if (start := line.find(_DLLOGGER)) >= 0:
            yield from self._read_dllogger(line[start + len(_DLLOGGER) - 1 :])
        elif match := _CONSOLE.search(line):
            self._is_bar_or_console = True
            self.facts.steps = int(match["last"]) + 1
            yield from self._step_once(int(match["step"]), None, named_figures(match["figures"]))
        elif (match := _BAR.search(line)) and "train" in match["rest"]:
            self._is_bar_or_console = True
            self.facts.steps = int(match["steps"])
            figures = {name.strip(): value for name, value in _BAR_FIGURE.findall(match["rest"])}
            yield from self._step_once(max(0, int(match["done"]) - 1), None, figures)
        elif match := _SAVED.search(line):
            done = int(match["done"] or match["iteration"])
            if done != self._last_saved:  # every rank may say it
                self._last_saved = done
                yield other_event("checkpoint", done, phase="committed")

    def _read_dllogger(self, text: str) -> Iterator[LogEvent]:
        try:
            body = json.loads(text)  # DLLogger writes a loss that is not finite as `NaN`, which only this one reads
            data, step = body["data"], body["step"]
        except (ValueError, RecursionError, KeyError, TypeError):
            return  # a line that was cut off by a kill, or of another program
        if not isinstance(data, dict):
            return
        if step == "PARAMETER":
            self._read_parameters(data)
            return
        if isinstance(step, list):  # DLLogger's own way to say epoch and step
            step = step[-1] if step else None
        if not isinstance(step, int):
            return
        self._writes_dllogger = True
        figures = {name: str(value) for name, value in data.items() if isinstance(value, int | float)}
        time = parse_number(str(body.get("timestamp"))) or parse_time(body.get("datetime"))
        yield from self._step(step, time, figures)

    def _step_once(self, step: int, time: float | None, figures: Mapping[str, str]) -> Iterator[LogEvent]:
        if not self._writes_dllogger:
            yield from self._step(step, time, figures)

    def _step(self, step: int, time: float | None, figures: Mapping[str, str]) -> Iterator[LogEvent]:
        global_step, seconds = figure(figures, "global_step"), figure(figures, *_STEP_SECONDS)
        loss, validation_loss = figure(figures, *_LOSS), figure(figures, *_VALIDATION_LOSS)
        number = int(global_step) if global_step is not None else step
        is_step = seconds is not None or any(name in figures for name in _LOSS)  # also one whose loss is not finite
        if is_step and self.is_new(number):
            batch, consumed = figure(figures, "global_batch_size"), figure(figures, "consumed_samples")
            self.facts.global_batch = int(batch) if batch else self.facts.global_batch
            length = self.facts.sequence_length
            yield step_event(
                number,
                time,
                loss=loss,
                grad_norm=figure(figures, "grad_norm"),
                lr=figure(figures, "lr"),
                tokens=int(consumed) * length if consumed and length else None,
                step_seconds=seconds,
                samples=int(consumed) if consumed else None,
                global_batch=int(batch) if batch else None,
            )
        if validation_loss is not None and validation_loss != self._validation_loss:
            # The bar shows the last one until there is another.
            self._validation_loss = validation_loss
            done = max(number, self._last_step + 1)
            yield other_event("validation", done, time, loss=validation_loss)

    def _read_parameters(self, data: Mapping[str, Any]) -> None:
        """Take what the dump of the configuration says: `cfg/model/global_batch_size` and the like."""
        facts = self.facts
        for name, value in data.items():
            key = name.rpartition("/")[2].rpartition(".")[2]
            if isinstance(value, bool) or value is None:
                if key == "fp8" and value is True:
                    facts.precision = "fp8"
            elif key in ("global_batch_size", "encoder_seq_length", "max_steps", "world_size") and str(value).isdigit():
                names = {"global_batch_size": "global_batch", "encoder_seq_length": "sequence_length"}
                setattr(facts, names.get(key, "steps" if key == "max_steps" else key), int(value))
            elif key == "precision" and facts.precision is None:
                facts.precision = {"bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "32": "fp32"}.get(str(value))
