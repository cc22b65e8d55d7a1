"""The figures of a run by its events: step time, throughput, TFLOP/s and MFU, and which steps they are made of.

The first step of an attempt compiles and fills caches; a profile, a validation or a checkpoint slows the steps beside
it; a batch that still grows has shorter steps. Such steps are left out, and how many is part of the result.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median, pstdev
from typing import Any

from trainshed.catalog import Gpu
from trainshed.errors import InputError
from trainshed.observe.event_log import completed_steps
from trainshed.observe.goodput import RunGoodput, measure_goodput
from trainshed.observe.mfu import Mfu, measure_mfu
from trainshed.recipe import Lora, ModelConfig
from trainshed.recipe.optimizer import ParameterGroup

FEWEST_STEPS = 3
"""If leaving out the neighbours of validations and checkpoints left fewer steps, they are kept."""
_MOST_TIMES = 4096
"""How many step times a result keeps, for plots."""


@dataclass(frozen=True)
class TrainingFacts:
    """What was trained, and on what: all that step times alone do not say. None where it is not known."""

    model: str | None = None
    """What it is called."""
    config: ModelConfig | None = None
    sequence_length: int | None = None
    global_batch: int | None = None
    gpus: int | None = None
    gpu: Gpu | None = None
    device: str | None = None
    """What the driver, the cluster file or the user calls the GPU."""
    precision: str | None = None
    lora: Lora | None = None
    groups: Sequence[ParameterGroup] = ()
    """Those of the optimizer: what they freeze has no weight gradients."""
    reference: bool = False
    """A reference model runs its forward pass too (DPO)."""
    recompute: str | None = None
    engine: str | None = None
    first_step: int = 1
    """The number that people give to the first step."""
    documents_apart: bool = False
    """Tokens attend to their own document only; the log does not say how long these are."""

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of one step."""
        if self.global_batch is None or self.sequence_length is None:
            return None
        return self.global_batch * self.sequence_length

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        names = ("model", "sequence_length", "global_batch", "gpus", "device", "precision", "recompute", "engine")
        return {
            **{name: getattr(self, name) for name in names},
            "gpu": self.gpu.name if self.gpu is not None else None,
            "lora": self.lora is not None,
        }


@dataclass(frozen=True)
class MeasuredStepTimes:
    """Step times in seconds, over the steps that count."""

    steps: int
    mean: float
    median: float
    p95: float
    minimum: float
    maximum: float
    deviation: float
    """Standard deviation."""

    @property
    def spread(self) -> float:
        """Standard deviation as a fraction of the mean."""
        return self.deviation / self.mean if self.mean else 0.0

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        return {**asdict(self), "spread": self.spread}


@dataclass(frozen=True)
class RunMetrics:
    """The figures of one run or log."""

    facts: TrainingFacts
    first: int
    """The first and the last step that count, as people number them."""
    last: int
    times: MeasuredStepTimes | None
    """None where a log has only rates."""
    left_out: dict[str, int]
    """How many steps do not count, by why."""
    tokens_per_second: float | None
    tokens_per_second_per_gpu: float | None
    mfu: Mfu | None
    """None where too little is known; `unknown` says what."""
    unknown: str | None
    loss: float | None
    """Of the last step."""
    validation_loss: float | None
    memory_gib: float | None
    goodput: RunGoodput | None
    seconds: tuple[float, ...] = field(default=(), repr=False)
    """The times of the steps that count, in order; those of a long run are thinned out evenly."""

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        return {
            "facts": self.facts.to_plain(),
            "first_step": self.first,
            "last_step": self.last,
            "step_seconds": self.times.to_plain() if self.times is not None else None,
            "left_out": self.left_out,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "mfu": asdict(self.mfu) if self.mfu is not None else None,
            "mfu_unknown": self.unknown,
            "loss": self.loss,
            "validation_loss": self.validation_loss,
            "memory_gib": self.memory_gib,
            "goodput": self.goodput.to_plain() if self.goodput is not None else None,
        }


def measure_events(
    events: Iterable[dict[str, Any]],
    facts: TrainingFacts,
    *,
    start: int | None = None,
    end: int | None = None,
    where: str | None = None,
) -> RunMetrics:
    """Return the figures of a run, by its events in the order they were written.

    `start` and `end` are the first and the last step that may count, as people number them.
    """
    events = list(events)
    selected = select_steps(events, facts, start=start, end=end)
    if not selected.steps:
        raise _no_steps(events, facts, start, end, where)
    times = _step_times(selected.steps)
    last = completed_steps(events)[-1]
    rate = _tokens_per_second(selected.steps, facts, times)
    per_gpu = rate / facts.gpus if rate is not None and facts.gpus else _logged_rate(selected.steps)
    mfu, unknown = _mfu(selected.steps, per_gpu, facts)
    validations = [event["loss"] for event in events if event["kind"] == "validation"]
    memory = [event["memory_gib"] for event in selected.steps if event.get("memory_gib")]
    seconds = _expand(selected.steps)
    return RunMetrics(
        facts=facts,
        first=selected.steps[0]["step"] + facts.first_step,
        last=selected.steps[-1]["step"] + facts.first_step,
        times=times,
        left_out=dict(selected.left_out),
        tokens_per_second=rate if rate is not None else per_gpu * facts.gpus if per_gpu and facts.gpus else None,
        tokens_per_second_per_gpu=per_gpu,
        mfu=mfu,
        unknown=unknown,
        loss=last["loss"],
        validation_loss=validations[-1] if validations else None,
        memory_gib=max(memory, default=None),
        goodput=measure_goodput(events),
        seconds=tuple(seconds[:: math.ceil(len(seconds) / _MOST_TIMES) or 1]),
    )


@dataclass(frozen=True)
class SelectedSteps:
    """The step events that count, and how many do not, by why."""

    steps: list[dict[str, Any]]
    left_out: Counter[str]


def select_steps(
    events: Sequence[dict[str, Any]], facts: TrainingFacts, *, start: int | None = None, end: int | None = None
) -> SelectedSteps:
    """Choose the steps by which a run is measured."""
    done = completed_steps(events)
    firsts = _first_steps(events)
    slowed = _slowed_steps(events)
    same_batch = {id(event) for event in with_final_batch(done)}
    left_out: Counter[str] = Counter()
    kept: list[dict[str, Any]] = []
    beside: list[tuple[str, dict[str, Any]]] = []
    for event in done:
        covered = range(event["step"] - (event.get("steps") or 1) + 1, event["step"] + 1)
        number = event["step"] + facts.first_step
        if (start is not None and number < start) or (end is not None and number > end):
            continue
        why = next((slowed[step] for step in covered if step in slowed), None)
        if event["step_seconds"] is None and event["tokens_per_second_per_gpu"] is None:
            left_out["without a time"] += len(covered)
        elif id(event) in firsts and (start is None or number > facts.first_step):
            left_out["first of an attempt"] += len(covered)
        elif event.get("skipped"):
            left_out["skipped"] += len(covered)
        elif id(event) not in same_batch:
            left_out["with another batch"] += len(covered)
        elif why == "profiled":
            left_out[why] += len(covered)
        elif why is not None:
            beside.append((why, event))
        else:
            kept.append(event)
    if sum(event.get("steps") or 1 for event in kept) < FEWEST_STEPS:
        kept = sorted([*kept, *(event for _, event in beside)], key=lambda event: event["step"])
    else:
        left_out.update(why for why, event in beside for _ in range(event.get("steps") or 1))
    return SelectedSteps(kept, left_out)


def _first_steps(events: Sequence[dict[str, Any]]) -> set[int]:
    """The ids of the events that are, or that include, the first step of their attempt."""
    first_step: dict[int, int] = {}
    ids: set[int] = set()
    for event in events:
        if event["kind"] == "step":
            first = first_step.setdefault(event.get("attempt", 1), event["step"])
            if event["step"] - (event.get("steps") or 1) < first:
                ids.add(id(event))
    return ids


def _slowed_steps(events: Sequence[dict[str, Any]]) -> dict[int, str]:
    """Return the steps beside a validation or checkpoint, and those of a profile, with why.

    A validation or checkpoint after N steps is beside the steps N - 1 and N. The profile's own last step may be
    followed by the writing of its file, so that one more is counted.
    """
    slowed: dict[int, str] = {}
    for event in events:
        kind, step = event["kind"], event.get("step")
        if step is None:
            continue
        if kind == "validation":
            slowed |= dict.fromkeys((step - 1, step), "beside a validation")
        elif kind == "checkpoint" and event["phase"] in ("staged", "committed", "failed"):
            for number in (step - 1, step):
                slowed.setdefault(number, "beside a checkpoint")
    for event in events:
        if event["kind"] == "profile":
            slowed |= dict.fromkeys(range(event["step"] - event["steps"], event["step"] + 1), "profiled")
    return slowed


def with_final_batch(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps that have the batch and the phase of the last one; all where the batch is not known."""
    sizes = [_batch_size(steps[index - 1] if index else None, step) for index, step in enumerate(steps)]
    known = [size for size in sizes if size is not None]
    phase = steps[-1].get("train_phase") if steps else None
    same_phase = (step.get("train_phase") == phase for step in steps)
    return [
        step
        for step, size, is_same in zip(steps, sizes, same_phase, strict=True)
        if is_same and (size is None or size == known[-1])
    ]


def _batch_size(before: dict[str, Any] | None, step: dict[str, Any]) -> int | None:
    """Return the sequences of a step, or else how many tokens it added; None where neither is known."""
    if step.get("global_batch") is not None:
        return step["global_batch"]
    if before is None or step["tokens"] is None or before["tokens"] is None:
        return None
    covered = step["step"] - before["step"]
    return (step["tokens"] - before["tokens"]) // covered if covered > 0 else None


def _expand(steps: Sequence[dict[str, Any]]) -> list[float]:
    timed = [event for event in steps if event["step_seconds"] is not None]
    return [event["step_seconds"] for event in timed for _ in range(event.get("steps") or 1)]


def _step_times(steps: Sequence[dict[str, Any]]) -> MeasuredStepTimes | None:
    seconds = sorted(_expand(steps))
    if not seconds:
        return None
    return MeasuredStepTimes(
        steps=len(seconds),
        mean=fmean(seconds),
        median=median(seconds),
        p95=seconds[math.ceil(0.95 * len(seconds)) - 1],
        minimum=seconds[0],
        maximum=seconds[-1],
        deviation=pstdev(seconds),
    )


def _tokens_per_second(
    steps: Sequence[dict[str, Any]], facts: TrainingFacts, times: MeasuredStepTimes | None
) -> float | None:
    if times is None:
        return None
    tokens = facts.tokens_per_step
    if tokens is None:
        added = {
            later["tokens"] - earlier["tokens"]
            for earlier, later in pairwise(steps)
            if later["step"] == earlier["step"] + 1 and later["tokens"] is not None and earlier["tokens"] is not None
        }
        tokens = added.pop() if len(added) == 1 else None
    return tokens / times.mean if tokens else None


def _logged_rate(steps: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean of the rates that a log has itself, each as long as its step."""
    rated = [event for event in steps if event["tokens_per_second_per_gpu"] is not None]
    weights = [event["step_seconds"] or 1.0 for event in rated]
    if not rated:
        return None
    rates = (event["tokens_per_second_per_gpu"] for event in rated)
    return sum(rate * weight for rate, weight in zip(rates, weights, strict=True)) / sum(weights)


def _mfu(steps: Sequence[dict[str, Any]], per_gpu: float | None, facts: TrainingFacts) -> tuple[Mfu | None, str | None]:
    """Return the utilisation, or what is missing for it."""
    missing = {
        "the model": facts.config is None,
        "the sequence length": facts.sequence_length is None,
        "the precision": facts.precision is None,
        "the batch and the number of GPUs": per_gpu is None,
    }
    if any(missing.values()):
        return None, f"not known: {', '.join(name for name, absent in missing.items() if absent)}"
    assert facts.config is not None
    assert facts.sequence_length is not None
    assert facts.precision is not None
    assert per_gpu is not None
    measured = measure_mfu(
        per_gpu,
        facts.config,
        facts.sequence_length,
        precision=facts.precision,
        gpu=facts.gpu,
        device_name=facts.device,
        lora=facts.lora,
        groups=facts.groups,
        reference=facts.reference,
        engine=facts.engine,
    )
    if facts.documents_apart and measured.mfu is not None:
        return _logged_mfu(steps, measured)
    return measured, measured.unknown


def _logged_mfu(steps: Sequence[dict[str, Any]], measured: Mfu) -> tuple[Mfu | None, str | None]:
    """Return the mean of the steps' own MFU: only the engine knows how long the documents of a step were."""
    known = [event for event in steps if event["mfu"] is not None]
    if not known:
        return None, "documents are kept apart, and the log does not say how long they are"
    assert measured.peak_tflops is not None
    assert measured.mfu is not None
    seconds = sum(event["step_seconds"] for event in known)
    mfu, mfu_full = (
        sum((event[key] or 0.0) * event["step_seconds"] for event in known) / seconds
        for key in ("mfu", "mfu_full_attention")
    )
    bf16 = measured.mfu_of_bf16_peak
    return replace(
        measured,
        model_tflops=mfu * measured.peak_tflops,
        model_tflops_full_attention=mfu_full * measured.peak_tflops,
        mfu=mfu,
        mfu_full_attention=mfu_full,
        mfu_of_bf16_peak=None if bf16 is None else bf16 * mfu / measured.mfu,
    ), None


def _no_steps(
    events: Sequence[dict[str, Any]], facts: TrainingFacts, start: int | None, end: int | None, where: str | None
) -> InputError:
    done = completed_steps(events)
    if not done:
        return InputError("no step is done yet, so there is nothing to measure", where=where)
    numbers = [event["step"] + facts.first_step for event in done]
    if start is not None or end is not None:
        asked = f"{start if start is not None else numbers[0]} to {end if end is not None else numbers[-1]}"
        return InputError(
            f"of the steps {asked} none can be measured",
            where=where,
            hint=f"it has the steps {numbers[0]} to {numbers[-1]}: write --start and --end among them",
        )
    return InputError(
        f"{len(done)} steps are too few to measure by: none is left without the first one of each attempt, skipped "
        "ones, those without a time and those of another batch",
        where=where,
        hint="let it run for some more steps, or write --start",
    )
