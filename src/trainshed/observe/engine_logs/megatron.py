"""Megatron-LM's and Megatron-Bridge's log.

Both print one line per `--log-interval` iterations, by the last rank, with the mean time of the iterations since the
line before:

     [2025-03-01 10:20:30.123456] iteration       10/     500 | consumed samples:        10240 | elapsed time per
    iteration (ms): 5012.3 | throughput per GPU (TFLOP/s/GPU): 612.4 | learning rate: 1.500000E-04 | global batch size:
    1024 | lm loss: 7.976485E+00 | loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 | number of
    nan iterations:   0 |

Rank 0 prints the arguments, the world size and when checkpoints are written. Some versions have further figures between
these (energy, MoE losses, the norm of parameters), and those before 0.16 have no fraction of a second. Bridge also
prints `Step Time : …s GPU utilization: …MODEL_TFLOP/s/GPU` by rank 0: without an iteration, it is only a sign of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

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

_TIME = r"\[(?P<time>20\d\d-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)\]\s*"
_ITERATION = re.compile(rf"(?:{_TIME})?iteration\s+(?P<done>\d+)/\s*(?P<steps>\d+)\s*\|(?P<figures>.*)")
_ELAPSED = "elapsed time per iteration (ms)"
_VALIDATION = re.compile(
    r"validation[^|]*? loss at iteration (?P<done>\d+)(?P<set>[^|]*)\|\s*lm loss value:\s*(?P<loss>\S+)"
)
_SAVING = re.compile(rf"(?:{_TIME})?saving checkpoint at iteration\s+(?P<done>\d+) to (?P<path>\S+)")
_SAVED = re.compile(
    rf"(?:{_TIME})?successfully saved checkpoint from iteration\s+(?P<done>\d+) to (?P<path>\S+)", re.IGNORECASE
)
_LOADED = re.compile(r"successfully loaded checkpoint from (?P<path>\S+).*?at iteration\s+(?P<done>\d+)")
_ARGUMENT = re.compile(r"^\s*(?:\[\w+\]:)?\s*(?P<name>[a-z0-9_]+) \.{2,} (?P<value>\S+)\s*$")
_WORLD_SIZE = re.compile(r"using world size: (\d+)")
_MEMORY_MB = re.compile(r"memory \(MB\).*?max allocated:\s*([\d.]+)")
_MEMORY_GB = re.compile(r"memory \(GB\).*?peak[ _-]allocated[ _-]\w+:\s*([\d.]+)")
_BRIDGE = re.compile(r"Step Time : [\d.]+s GPU utilization: [\d.]+MODEL_TFLOP/s/GPU")
_NOT_A_LOSS = frozenset({"loss scale"})


class MegatronReader(ProgramReader):
    """Reads the lines of Megatron-LM and Megatron-Bridge."""

    program = "megatron"

    def __init__(self) -> None:
        super().__init__()
        self._done: int | None = None
        self._log_interval = 1
        self._is_first_line = True
        self._first_covered = 0
        self._saving: dict[int, tuple[float | None, int | None]] = {}
        self._is_bridge = False

    @property
    def name(self) -> str:
        """Which of the two it is, as far as its lines have shown it."""
        return "megatron-bridge" if self._is_bridge else self.program

    def read(self, line: str) -> Iterator[LogEvent]:
        """Yield steps, validations and checkpoints."""
        if "iteration" in line:
            yield from self._read_iteration(line)
        else:
            self._read_facts(line)

    def _read_iteration(self, line: str) -> Iterator[LogEvent]:
        if _ELAPSED in line and (match := _ITERATION.search(line)):
            yield self._step(match)
        elif match := _VALIDATION.search(line):
            if "test set" not in match["set"]:
                yield other_event("validation", int(match["done"]), loss=parse_number(match["loss"]))
        elif match := _SAVED.search(line):
            yield self._saved(match)
        elif match := _SAVING.search(line):
            self._saving[int(match["done"])] = (parse_time(match["time"]), self._done)
        elif match := _LOADED.search(line):
            self._done = int(match["done"])
            yield other_event("resume", self._done, from_attempt=None, checkpoint=match["path"])
        else:
            self._read_facts(line)  # the line about memory names an iteration too

    def _step(self, match: re.Match[str]) -> LogEvent:
        done, facts = int(match["done"]), self.facts
        figures = named_figures(match["figures"])
        facts.steps = int(match["steps"])
        batch, consumed = figure(figures, "global batch size"), figure(figures, "consumed samples")
        facts.global_batch = int(batch) if batch else facts.global_batch
        elapsed_ms = figure(figures, _ELAPSED)
        covered = self._covered(done, has_fraction="." in (match["time"] or ""))
        self._done = done
        skipped = (figure(figures, "number of skipped iterations") or 0) + (
            figure(figures, "number of nan iterations") or 0
        )
        length = facts.sequence_length
        return step_event(
            done - 1,
            parse_time(match["time"]),
            loss=figure(figures, "lm loss", *(name for name in figures if _is_loss(name))),
            grad_norm=figure(figures, "grad norm"),
            lr=figure(figures, "learning rate"),
            tokens=int(consumed) * length if consumed and length else None,
            step_seconds=elapsed_ms / 1000 if elapsed_ms is not None else None,
            skipped=skipped > 0,
            moe_balance=figure(figures, "load_balancing_loss"),
            moe_z=figure(figures, "z_loss"),
            memory_gib=facts.memory_gib,
            samples=int(consumed) if consumed else None,
            global_batch=int(batch) if batch else None,
            steps=covered if covered > 1 else None,
        )

    def _covered(self, done: int, *, has_fraction: bool) -> int:
        """Return of how many iterations a line has the mean."""
        first, self._is_first_line = self._is_first_line, False
        if first and self._done is None:
            self._first_covered = 1 if has_fraction else min(done, self._log_interval)
            return self._first_covered
        covered = max(1, done - (self._done or 0))
        # Since 0.16, whose times have a fraction, a line for the first iteration does not restart the clock.
        repeated = self._first_covered if has_fraction else 0
        self._first_covered = 0
        return covered + repeated

    def _saved(self, match: re.Match[str]) -> LogEvent:
        done, ended = int(match["done"]), parse_time(match["time"])
        began, done_then = self._saving.pop(done, (None, None))
        seconds = ended - began if began is not None and ended is not None else None
        return other_event(
            "checkpoint",
            done,
            ended,
            phase="committed",
            path=match["path"],
            seconds=seconds,
            # Steps between the two lines went on beside the writing.
            stall_seconds=seconds if done_then == self._done else None,
        )

    def _read_facts(self, line: str) -> None:
        facts = self.facts
        if match := _MEMORY_MB.search(line):
            facts.memory_gib = max(facts.memory_gib or 0.0, float(match[1]) / 1024) or None
        elif match := _MEMORY_GB.search(line):
            facts.memory_gib = max(facts.memory_gib or 0.0, float(match[1]) * 1e9 / 2**30)
            self._is_bridge = True
        elif match := _WORLD_SIZE.search(line):
            facts.world_size = int(match[1])
        elif _BRIDGE.search(line):
            self._is_bridge = True
        elif match := _ARGUMENT.match(line):
            self._read_argument(match["name"], match["value"])

    def _read_argument(self, name: str, value: str) -> None:
        facts = self.facts
        if name in ("seq_length", "world_size", "global_batch_size", "train_iters") and value.isdigit():
            key = {"seq_length": "sequence_length", "global_batch_size": "global_batch", "train_iters": "steps"}
            setattr(facts, key.get(name, name), int(value))
        elif name == "log_interval" and value.isdigit():
            self._log_interval = int(value)
        elif name == "params_dtype" and facts.precision is None:
            facts.precision = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}.get(value)
        elif name == "fp8" and value not in ("None", "False"):
            facts.precision = "fp8"


def _is_loss(name: str) -> bool:
    return name.endswith("loss") and name not in _NOT_A_LOSS and "balancing" not in name and not name.startswith("mtp")
