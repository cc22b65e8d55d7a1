"""The figures of a trace: each moment counts once, and communication counts as exposed where nothing runs beside it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from trainshed.cli.profile_report import profile_data, profile_text
from trainshed.errors import CorruptData, InputError
from trainshed.observe.event_text import EventFormatter
from trainshed.observe.profile_summary import find_traces, read_summary, summarize_trace


def event(name: str, start: float, length: float, *, cat: str = "kernel", thread: int = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": thread, "ts": start, "dur": length}


ON_GPU = [
    event("ProfilerStep#1", 0, 90, cat="user_annotation"),
    event("gemm", 100, 40),
    event("ncclDevKernel_AllReduce_Sum_bf16", 120, 40, thread=20),
    event("gemm", 150, 20),
    event("Memcpy HtoD (Pinned -> Device)", 160, 30, cat="gpu_memcpy", thread=21),
    event("norm", 190, 10),
    event("aten::mm", 0, 90, cat="cpu_op"),
]


def write(path: Path, events: list[dict[str, Any]], **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"traceEvents": events} | more).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def test_kernels_of_a_gpu(tmp_path: Path) -> None:
    trace = write(tmp_path / "a.1.pt.trace.json.gz", ON_GPU, distributedInfo={"rank": 3})
    summary = summarize_trace(trace)
    assert (summary.device, summary.rank, summary.steps, summary.seconds) == ("gpu", 3, 1, pytest.approx(1e-4))
    assert summary.compute == pytest.approx(0.7)
    assert summary.communication == pytest.approx(0.4)
    assert summary.exposed_communication == pytest.approx(0.1)
    assert summary.copies == pytest.approx(0.2)
    assert summary.idle == pytest.approx(0.0)
    assert [(kernel.name, kernel.calls) for kernel in summary.kernels[:2]] == [
        ("gemm", 2),
        ("ncclDevKernel_AllReduce_Sum_bf16", 1),
    ]
    assert [kernel.communication for kernel in summary.kernels[:2]] == [False, True]


def test_operations_of_a_cpu_count_without_those_they_call(tmp_path: Path) -> None:
    events = [
        event("ProfilerStep#3", 0, 100, cat="user_annotation", thread=1),
        event("aten::linear", 0, 50, cat="cpu_op", thread=1),
        event("aten::addmm", 10, 40, cat="cpu_op", thread=1),
        event("gloo:all_reduce", 40, 30, cat="cpu_op", thread=2),
    ]
    summary = summarize_trace(write(tmp_path / "a.pt.trace.json", events))
    assert {kernel.name: kernel.seconds for kernel in summary.kernels} == pytest.approx(
        {"aten::addmm": 40e-6, "gloo:all_reduce": 30e-6, "aten::linear": 10e-6}
    )
    assert summary.compute == pytest.approx(0.4)
    assert summary.exposed_communication == pytest.approx(0.2)
    assert summary.idle == pytest.approx(0.4)


def test_traces_of_all_engines_are_found_once(tmp_path: Path) -> None:
    ours = write(tmp_path / "profile/attempt-0001/rank-00000.00000012.pt.trace.json.gz", ON_GPU)
    write(tmp_path / "tensorboard/profile/attempt-0001/rank-00000.00000012.pt.trace.json.gz", ON_GPU)
    (tmp_path / "profile/attempt-0001/rank-00000.00000012.summary.json").write_text("{}")
    megatron = write(tmp_path / "tensorboard/host_12.1619499959628.pt.trace.json", ON_GPU)
    newer = write(tmp_path / "torch_profile/rank-0.json.gz", ON_GPU)
    torchtune = write(tmp_path / "profile/iteration_12/r0-2026-1-1-0-0.161.pt.trace.json.gz", ON_GPU)
    assert set(find_traces(tmp_path)) == {ours, megatron, newer, torchtune}
    assert read_summary(ours).device == "gpu"  # what lies beside it is not a summary: it is made again


def test_a_report_shows_shares_and_kernels(tmp_path: Path) -> None:
    write(tmp_path / "profile/attempt-0001/rank-00000.00000012.pt.trace.json.gz", ON_GPU)
    (tmp_path / "profile/attempt-0001/rank-00001.nsys-rep").touch()
    data = profile_data(tmp_path)
    text = profile_text(data)
    assert "communication that nothing hides 10.0% (of 40.0%)" in text
    assert "rank-00001.nsys-rep: a report of nsys" in text
    assert json.loads(json.dumps(data))["profiles"][0]["kernels"][0]["name"] == "gemm"


def test_an_event_says_what_the_profile_found(tmp_path: Path) -> None:
    summary = summarize_trace(write(tmp_path / "a.pt.trace.json", ON_GPU)).to_plain()
    told = {"kind": "profile", "step": 12, "steps": 3, "path": "profile/a", "rank_profiled": 0, "summary": summary}
    text = EventFormatter(100).format(told) or ""
    assert text.startswith("profile of steps 10 to 12 on rank 0: profile/a\n")
    assert "communication that nothing hides 10.0%" in text
    assert "\n" not in (EventFormatter(100).format(told | {"summary": None}) or "")


def test_what_is_no_trace_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no `traceEvents`"):
        summarize_trace(_file(tmp_path / "a.json", b"{}"))
    with pytest.raises(CorruptData, match="cannot be read as a trace"):
        summarize_trace(_file(tmp_path / "b.json.gz", b"not compressed"))
    with pytest.raises(CorruptData, match="cannot be read as a trace"):
        summarize_trace(_file(tmp_path / "c.json.gz", gzip.compress(b"{}" * 99)[:20]))
    with pytest.raises(InputError, match="holds no kernels"):
        summarize_trace(write(tmp_path / "d.json", []))
    with pytest.raises(InputError, match="no profiles"):
        profile_data(tmp_path / "empty")


def _file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_a_trace_of_a_real_gpu_adds_up() -> None:
    """Two steps on an H200: matrix products, their backward, and a copy from the host (PyTorch 2.11)."""
    summary = summarize_trace(Path(__file__).parent / "data" / "h200.pt.trace.json.gz")
    assert (summary.device, summary.rank, summary.steps) == ("gpu", 0, 2)
    assert summary.compute + summary.exposed_communication + summary.copies + summary.idle == pytest.approx(1)
    assert summary.kernels[0].name == "Memcpy HtoD (Pinned -> Device)"
    assert summary.copies == pytest.approx(0.276, abs=1e-3)
    assert summary.compute == pytest.approx(0.138, abs=1e-3)
