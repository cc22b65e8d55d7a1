"""What a trace of PyTorch's profiler says in a few figures: compute, communication, what hides it, idle time.

A trace is the JSON that Chrome, Perfetto and TensorBoard's profiler plugin open. Each moment of the recorded time
counts once:

    compute                  a kernel runs that is not communication
    exposed communication    a collective runs, and no other kernel beside it: nothing hides it
    copies                   only copies to or from the host run
    idle                     nothing runs

A collective's kernel also waits for the other ranks, so a slow rank shows as exposed communication on all others. In
a trace without GPUs operations take the place of kernels, and threads that of streams.

No torch here: traces of any engine are read, wherever they come from.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from trainshed.errors import CorruptData, InputError
from trainshed.run_folder import PROFILE, TENSORBOARD

SUMMARY_SCHEMA = "trainshed.profile/1"
TRACE_SUFFIX = ".pt.trace.json.gz"
"""How a trace's name ends: TensorBoard's plugin takes `<worker>.<number>.pt.trace.json[.gz]`."""
SUMMARY_SUFFIX = ".summary.json"
MEGATRON_TRACES = "torch_profile"
"""The folder beside `tensorboard/` in which newer Megatron-LM writes its traces."""
TRACE_FOLDERS = (PROFILE, MEGATRON_TRACES, TENSORBOARD)
"""The folders of a run that may hold traces."""
_TRACE_NAME = re.compile(r"(?P<stem>.+?)(\.pt\.trace\.json|(?<=\d)\.json)(\.gz)?")
_NSYS_SUFFIX = ".nsys-rep"

_DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_COLLECTIVE_KERNEL = re.compile(r"nccl|rccl|nvshmem|multimem|memcpy ptop", re.IGNORECASE)
_COLLECTIVE_OPERATION = re.compile(r"(gloo|nccl|mpi):|c10d|record_param_comms")
_STEP_NAME = re.compile(r"ProfilerStep#\d+")
_TOP = 10
_SHOWN_CHARACTERS = 60

Interval = tuple[float, float]


@dataclass(frozen=True)
class KernelTime:
    """All calls of one kernel; of an operation on CPUs without the operations that it calls."""

    name: str
    calls: int
    seconds: float
    share: float
    """Of the recorded time; kernels of several streams run at once."""
    communication: bool


@dataclass(frozen=True)
class ProfileSummary:
    """The figures of one trace. `compute`, `exposed_communication`, `copies` and `idle` are shares that add up to 1."""

    trace: str
    rank: int | None
    device: str
    """`gpu` or `cpu`."""
    steps: int
    """How many steps it holds; 0 where it does not mark them."""
    seconds: float
    """The recorded time."""
    compute: float
    communication: float
    """The share in which collectives run, hidden or not."""
    exposed_communication: float
    copies: float
    idle: float
    kernels: tuple[KernelTime, ...]
    """Those that take the most time."""

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        return {"schema": SUMMARY_SCHEMA} | asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ProfileSummary:
        """Read what `to_plain` returned."""
        values = {key: value for key, value in plain.items() if key != "schema"}
        return cls(**values | {"kernels": tuple(KernelTime(**kernel) for kernel in values["kernels"])})


def shares_text(summary: Mapping[str, Any]) -> str:
    """Return the shares of a summary as one sentence; `summary` is what `to_plain` returned."""
    text = (
        f"compute {summary['compute']:.1%}, communication that nothing hides {summary['exposed_communication']:.1%} "
        f"(of {summary['communication']:.1%}), idle {summary['idle']:.1%}"
    )
    if not summary["kernels"]:
        return text
    top = summary["kernels"][0]
    return f"{text}; most time in {shorten_kernel(top['name'])} ({top['share']:.1%})"


def shorten_kernel(name: str) -> str:
    """Return the name of a kernel on one line; templates make names of hundreds of characters."""
    return name if len(name) <= _SHOWN_CHARACTERS else f"{name[: _SHOWN_CHARACTERS - 1]}…"


def find_traces(run: Path) -> list[Path]:
    """Return the traces in a run's folder, of any engine, each once."""
    traces: dict[str, Path] = {}
    # What our own engine writes into `profile/` is linked into `tensorboard/profile/` under the same name.
    for part in TRACE_FOLDERS:
        for path in sorted((run / part).rglob("*.json*")):
            if _is_trace(path):
                traces.setdefault(_trace_key(run / part, path), path)
    return list(traces.values())


def find_reports(run: Path) -> list[Path]:
    """Return the reports of `nsys` in a run's folder, which only Nsight Systems opens."""
    return sorted((run / PROFILE).rglob(f"*{_NSYS_SUFFIX}"))


def _is_trace(path: Path) -> bool:
    hidden = path.name.startswith(".")
    return not hidden and not path.name.endswith(SUMMARY_SUFFIX) and bool(_TRACE_NAME.fullmatch(path.name))


def _trace_key(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix().removeprefix(f"{PROFILE}/")


def summary_file(trace: Path) -> Path:
    """Return where the summary of a trace is kept: beside it."""
    match = _TRACE_NAME.fullmatch(trace.name)
    stem = match["stem"] if match else trace.name
    return trace.with_name(f"{stem}{SUMMARY_SUFFIX}")


def read_summary(trace: Path) -> ProfileSummary:
    """Return the summary beside a trace, or make one."""
    kept = summary_file(trace)
    if kept.is_file():
        try:
            plain = orjson.loads(kept.read_bytes())
            if plain.get("schema") == SUMMARY_SCHEMA:
                return ProfileSummary.from_plain(plain)
        except (ValueError, KeyError, TypeError, AttributeError):
            pass  # made again from the trace
    return summarize_trace(trace)


def summarize_trace(path: Path) -> ProfileSummary:
    """Read a trace, plain or compressed, and return its figures."""
    document = _read_trace(path)
    events = [event for event in document["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    on_gpu = [event for event in events if event.get("cat") in _DEVICE_CATEGORIES]
    marks = [_interval(event) for event in events if _STEP_NAME.fullmatch(str(event.get("name")))]
    steps = len({event["name"] for event in events if _STEP_NAME.fullmatch(str(event.get("name")))})
    if on_gpu:
        busy = _device_activity(on_gpu)
    else:
        operations = [event for event in events if event.get("cat") == "cpu_op"]
        busy = _operation_activity(operations)
    if not busy.compute and not busy.communication:
        raise InputError(
            "holds no kernels and no operations", where=str(path), hint="profile at least one whole step of training"
        )
    everything = [*busy.compute, *busy.communication, *busy.copies]
    # On a GPU the kernels of a step end after its mark on the host does: there the kernels say how long it was.
    span = marks if marks and not on_gpu else everything
    start, end = min(begin for begin, _ in span), max(end for _, end in span)
    return _build_summary(path, document, busy, start, end, steps, device="gpu" if on_gpu else "cpu")


@dataclass(frozen=True)
class _Activity:
    """When something ran, by what it was, and how long each kernel ran; times are microseconds."""

    compute: list[Interval]
    communication: list[Interval]
    copies: list[Interval]
    kernel_times: Mapping[str, list[float]]
    collectives: frozenset[str]


def _read_trace(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
        document = orjson.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    except FileNotFoundError:
        raise InputError("there is no such trace", where=str(path)) from None
    except (ValueError, EOFError, OSError, zlib.error) as error:
        raise CorruptData(f"cannot be read as a trace: {error}", where=str(path), hint="profile again") from None
    if isinstance(document, list):  # the older form of the format: events alone
        document = {"traceEvents": document}
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise InputError(
            "is JSON, and not a trace: it has no `traceEvents`",
            where=str(path),
            hint="name a file that PyTorch's profiler wrote (*.pt.trace.json.gz)",
        )
    return document


def _device_activity(events: Sequence[Mapping[str, Any]]) -> _Activity:
    compute, communication, copies = [], [], []
    times: dict[str, list[float]] = defaultdict(list)
    collectives = set()
    for event in events:
        name = event["name"]
        if _COLLECTIVE_KERNEL.search(name):
            communication.append(_interval(event))
            collectives.add(name)
        elif event["cat"] == "gpu_memcpy":
            copies.append(_interval(event))
        else:
            compute.append(_interval(event))
        times[name].append(float(event["dur"]))
    return _Activity(compute, communication, copies, times, frozenset(collectives))


def _operation_activity(events: Sequence[Mapping[str, Any]]) -> _Activity:
    """Take operations for kernels: those that call no other one for work, and the time of each without its callees."""
    compute, communication = [], []
    times: dict[str, list[float]] = defaultdict(list)
    collectives = set()
    for event, own_time, is_leaf in _own_times(events):
        name = event["name"]
        if _COLLECTIVE_OPERATION.search(name):
            communication.append(_interval(event))
            collectives.add(name)
        elif is_leaf:
            compute.append(_interval(event))
        times[name].append(own_time)
    return _Activity(compute, communication, [], times, frozenset(collectives))


def _own_times(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], float, bool]]:
    """Yield each operation with its time without those that it calls, and whether it calls none."""
    by_thread: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        by_thread[event.get("pid"), event.get("tid")].append(event)
    for thread in by_thread.values():
        thread.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
        called: list[float] = [0.0] * len(thread)
        callers: list[int] = []
        for number, event in enumerate(thread):
            start, end = _interval(event)
            while callers and _interval(thread[callers[-1]])[1] < end:
                callers.pop()
            if callers:
                called[callers[-1]] += end - start
            callers.append(number)
        for event, seconds in zip(thread, called, strict=True):
            yield event, max(0.0, float(event["dur"]) - seconds), seconds == 0.0


def _build_summary(
    path: Path, document: Mapping[str, Any], busy: _Activity, start: float, end: float, steps: int, *, device: str
) -> ProfileSummary:
    window = max(end - start, 1e-9)
    compute = _covered(busy.compute, start, end)
    communication = _covered(busy.communication, start, end)
    with_communication = _covered([*busy.compute, *busy.communication], start, end)
    everything = _covered([*busy.compute, *busy.communication, *busy.copies], start, end)
    longest = sorted(busy.kernel_times.items(), key=lambda item: sum(item[1]), reverse=True)
    rank = (document.get("distributedInfo") or {}).get("rank")
    return ProfileSummary(
        trace=path.name,
        rank=rank if isinstance(rank, int) else None,
        device=device,
        steps=steps,
        seconds=window / 1e6,
        compute=compute / window,
        communication=communication / window,
        exposed_communication=(with_communication - compute) / window,
        copies=(everything - with_communication) / window,
        idle=max(0.0, window - everything) / window,
        kernels=tuple(
            KernelTime(name, len(times), sum(times) / 1e6, sum(times) / window, name in busy.collectives)
            for name, times in longest[:_TOP]
        ),
    )


def _interval(event: Mapping[str, Any]) -> Interval:
    start = float(event["ts"])
    return start, start + float(event["dur"])


def _covered(intervals: Iterable[Interval], start: float, end: float) -> float:
    """Return how much of [start, end] is inside of one interval at least."""
    total, reached = 0.0, start
    for begin, stop in sorted(intervals):
        begin, stop = max(begin, reached), min(stop, end)
        if stop > begin:
            total += stop - begin
            reached = stop
    return total
