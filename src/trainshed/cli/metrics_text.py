"""What `trainshed metrics` prints for people: one run line by line, or several side by side."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trainshed.observe.event_text import format_duration, rate_unit

if TYPE_CHECKING:
    from trainshed.observe.goodput import RunGoodput
    from trainshed.observe.metrics import MeasuredStepTimes, RunMetrics
    from trainshed.workflow.run_metrics import MeasuredTraining

_BARS, _PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
_BINS = 24
_SHOWN_LOSSES = 8
_SMALLEST_LOSS = 0.0005
_LONGEST_VALUE = 44


def run_text(run: MeasuredTraining) -> str:
    """Return the figures of one run."""
    metrics = run.metrics
    what = "run" if run.kind == "run" else f"log of {run.kind}"
    lines = [f"{run.name}: {what}, {_training_text(metrics)}"]
    rows = [
        ("step time", _step_time_text(metrics.times)),
        ("", _distribution_text(metrics)),
        ("steps", _steps_text(metrics)),
        ("throughput", _throughput_text(metrics)),
        *_arithmetic_rows(metrics),
        ("loss", _loss_text(metrics)),
        ("memory", f"{metrics.memory_gib:.1f} GiB" if metrics.memory_gib else ""),
        *_goodput_rows(metrics.goodput),
        *(("note", note) for note in run.notes),
    ]
    lines += [f"  {label:<11} {text}".rstrip() for label, text in rows if text]
    return "\n".join(lines)


def comparison_text(runs: Sequence[MeasuredTraining], differences: dict[str, list[Any]]) -> str:
    """Return the figures of several runs side by side, and what differs in their recipes."""
    plain = [run.metrics.to_plain() for run in runs]
    device = "cpu" if all(run.metrics.facts.device == "cpu" for run in runs) else None

    def against_first(path: str, form: Callable[[float], str]) -> list[str]:
        """Each run's figure, with how far it is from that of the first run."""
        base, cells = _figure(plain[0], path), []
        for number, figures in enumerate(plain):
            own = _figure(figures, path)
            ratio = f" ({own / base - 1:+.1%})" if own is not None and base and number else ""
            cells.append("-" if own is None else f"{form(own)}{ratio}")
        return cells

    rows: list[tuple[str, list[str]]] = [
        ("", [run.name for run in runs]),
        ("engine", [run.metrics.facts.engine or "-" for run in runs]),
        ("GPUs", [_gpus_text(run.metrics) for run in runs]),
        ("steps", [_counted_text(run.metrics) for run in runs]),
        ("step time, mean", against_first("step_seconds.mean", _seconds)),
        ("step time, median", against_first("step_seconds.median", _seconds)),
        ("step time, p95", against_first("step_seconds.p95", _seconds)),
        ("spread", [f"{run.metrics.times.spread:.1%}" if run.metrics.times else "-" for run in runs]),
        ("tokens/s", against_first("tokens_per_second", "{:,.0f}".format)),
        (rate_unit(device), against_first("tokens_per_second_per_gpu", "{:,.1f}".format)),
        ("arithmetic", against_first("mfu.model_tflops", lambda tflops: _flops(tflops, device))),
        ("MFU", against_first("mfu.mfu", "{:.1%}".format)),
        ("MFU, full attention", against_first("mfu.mfu_full_attention", "{:.1%}".format)),
        ("goodput", against_first("goodput.goodput", "{:.1%}".format)),
        ("loss", against_first("loss", "{:.4f}".format)),
        ("validation loss", against_first("validation_loss", "{:.4f}".format)),
        ("memory, GiB", against_first("memory_gib", "{:.1f}".format)),
    ]
    lines = _table([row for row in rows if any(cell != "-" for cell in row[1])])
    if differences:
        shown = [(key, [_short(value) for value in values]) for key, values in differences.items()]
        lines += ["", "in their recipes:", *_table(shown)]
    elif all(run.recipe for run in runs):
        lines += ["", "their recipes are the same but for the name"]
    else:
        lines += ["", "a log has no recipe: what differs is not known"]
    return "\n".join(lines)


def histogram(seconds: Sequence[float]) -> str:
    """Return how step times are distributed, as one line of bars from the shortest to the longest."""
    low, high = min(seconds, default=0.0), max(seconds, default=0.0)
    if high - low < 1e-9 * max(high, 1e-9):
        return ""
    counts = [0] * _BINS
    for value in seconds:
        counts[min(_BINS - 1, int((value - low) / (high - low) * _BINS))] += 1
    bars = _BARS if _can_print(_BARS) else _PLAIN_BARS
    most = max(counts)
    return "".join(" " if not count else bars[(count * (len(bars) - 1) + most - 1) // most] for count in counts)


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _training_text(metrics: RunMetrics) -> str:
    facts = metrics.facts
    batch = f"batch {facts.global_batch:,}" if facts.global_batch else "batch unknown"
    length = f" of {facts.sequence_length:,} tokens" if facts.sequence_length else ""
    parts = [facts.model or "model unknown", f"{batch}{length}", _gpus_text(metrics), facts.precision or ""]
    return ", ".join(filter(None, parts))


def _gpus_text(metrics: RunMetrics) -> str:
    facts = metrics.facts
    name = facts.gpu.name if facts.gpu is not None else facts.device
    if facts.gpus is None:
        return name or "GPUs unknown"
    return f"{facts.gpus} x {name}" if name else f"{facts.gpus} GPUs"


def _distribution_text(metrics: RunMetrics) -> str:
    bars = histogram(metrics.seconds)
    if metrics.times is None or not bars:
        return ""
    return f"{bars}  {_seconds(metrics.times.minimum)} to {_seconds(metrics.times.maximum)}"


def _step_time_text(times: MeasuredStepTimes | None) -> str:
    if times is None:
        return "not in this log, which has rates only"
    return (
        f"{_seconds(times.mean)} mean, {_seconds(times.median)} median, {_seconds(times.p95)} p95, "
        f"spread {times.spread:.1%}"
    )


def _steps_text(metrics: RunMetrics) -> str:
    left_out = ", ".join(f"{count} {why}" for why, count in metrics.left_out.items())
    counted = _counted_text(metrics)
    return f"{counted}; left out: {left_out}" if left_out else counted


def _counted_text(metrics: RunMetrics) -> str:
    between = f"{metrics.first} to {metrics.last}"
    return f"{metrics.times.steps} of {between}" if metrics.times is not None else between


def _throughput_text(metrics: RunMetrics) -> str:
    parts = []
    if metrics.tokens_per_second is not None:
        parts.append(f"{metrics.tokens_per_second:,.0f} tokens/s")
    if metrics.tokens_per_second_per_gpu is not None:
        parts.append(f"{metrics.tokens_per_second_per_gpu:,.1f} {rate_unit(metrics.facts.device)}")
    return ", ".join(parts)


def _arithmetic_rows(metrics: RunMetrics) -> list[tuple[str, str]]:
    mfu = metrics.mfu
    if mfu is None:
        return [("MFU", metrics.unknown or "")]
    causal, full = (
        _flops(tflops, metrics.facts.device) for tflops in (mfu.model_tflops, mfu.model_tflops_full_attention)
    )
    rows = [("arithmetic", f"{causal} with causal attention, {full} with full attention")]
    if mfu.mfu is None or mfu.mfu_full_attention is None:
        return [*rows, ("MFU", mfu.unknown or "")]
    peak = f"of {mfu.peak_tflops:,.1f} TFLOP/s, dense {mfu.peak_dtype}"
    rows.append(("MFU", f"{mfu.mfu:.1%} with causal attention, {mfu.mfu_full_attention:.1%} with full, {peak}"))
    if mfu.mfu_of_bf16_peak is not None:
        rows.append(("", f"{mfu.mfu_of_bf16_peak:.1%} of the bf16 peak, with causal attention"))
    rows.append(("peak", mfu.source or ""))
    rows.append(("counted", _convention(metrics)))
    return rows


def _convention(metrics: RunMetrics) -> str:
    """Say what the FLOPs are: conventions differ by a third."""
    facts = metrics.facts
    parts = ["2 FLOPs a weight and token, three times for training"]
    if facts.lora is not None:
        parts = ["2 FLOPs a weight and token, twice for frozen weights and three times for adapters"]
    parts.append("causal: only keys that a token may see; full: all keys, as NeMo 24.07 and the GKE recipes do")
    if facts.config is not None and facts.config.moe is not None:
        parts.append(f"of {facts.config.moe.experts} experts the {facts.config.moe.top_k} that a token visits")
    recompute = f" (recompute: {facts.recompute})" if facts.recompute not in (None, "none") else ""
    parts.append(f"recomputation is not counted{recompute}")
    return "; ".join(parts)


def _loss_text(metrics: RunMetrics) -> str:
    parts = [f"{metrics.loss:.4f}" if metrics.loss is not None else ""]
    if metrics.validation_loss is not None:
        parts.append(f"validation {metrics.validation_loss:.4f}")
    return ", ".join(filter(None, parts))


def _goodput_rows(goodput: RunGoodput | None) -> list[tuple[str, str]]:
    if goodput is None:
        return [("goodput", "not known: the log does not say when its steps were")]
    attempts = f", {goodput.attempts} attempts" if goodput.attempts > 1 else ""
    share = f"{goodput.goodput:.1%} of {format_duration(goodput.wall_seconds)}{attempts}"
    rows = [("goodput", f"{share}: {goodput.steps} steps that count")]
    for lost in goodput.lost[:_SHOWN_LOSSES]:
        times = f", {lost.count} times" if lost.count > 1 else ""
        part = lost.seconds / goodput.wall_seconds if goodput.wall_seconds else 0.0
        if part < _SMALLEST_LOSS:
            continue
        rows.append(("", f"{part:6.1%}  {lost.reason} ({format_duration(lost.seconds)}{times})"))
    return rows


def _figure(plain: dict[str, Any], path: str) -> float | None:
    """Return a figure by its path in the JSON report."""
    value: Any = plain
    for key in path.split("."):
        value = value[key] if value is not None else None
    return value


def _table(rows: Sequence[tuple[str, list[str]]]) -> list[str]:
    label_width = max(len(label) for label, _ in rows)
    widths = [max(len(cells[column]) for _, cells in rows) for column in range(len(rows[0][1]))]
    return [
        "  ".join([label.ljust(label_width), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])
        for label, cells in rows
    ]


def _short(value: Any) -> str:
    text = "default" if value is None else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"


def _flops(tflops: float, device: str | None) -> str:
    of = rate_unit(device).rpartition("/")[2]
    return f"{tflops:,.1f} TFLOP/s/{of}" if tflops >= 1 else f"{1000 * tflops:,.2f} GFLOP/s/{of}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
