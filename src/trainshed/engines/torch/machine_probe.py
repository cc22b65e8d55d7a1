"""Measure what the planner's arithmetic rests on, on the machine this runs on: its GPUs, or its CPU without any.

Products, attention, memory, launches and all-reduces, each for as long as it takes to be sure and not longer: seconds
on a GPU, under a minute on two cores. The best of several rounds counts, as others on the machine only ever slow it.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.nn import functional

from trainshed.engines.torch.collective_probe import measure_all_reduce
from trainshed.engines.torch.network_cards import find_network
from trainshed.plan.measured.machine_measurements import AttentionRate, Gemm, MachineMeasurements
from trainshed.reporting import SILENT, Reporter

_GIB = 2**30
# (rows, inputs, outputs): squares show the peak; the others are a Llama-3-8B layer whole and cut over 8 ranks.
_GPU_SHAPES = (
    *((size, size, size) for size in (1024, 2048, 4096, 8192)),
    (8192, 4096, 6144),
    (8192, 4096, 28672),
    (8192, 14336, 4096),
    (8192, 4096, 768),
    (8192, 1792, 4096),
)
_CPU_SHAPES = tuple((size, size, size) for size in (256, 512, 1024, 2048))
_GPU_ATTENTION = ((2048, 32, 128), (8192, 32, 128), (4096, 32, 64))
_CPU_ATTENTION = ((512, 8, 64), (1024, 8, 64))
_ROUNDS = 3
_BACKWARD_PER_FORWARD = 2.5
"""Products of attention's backward pass (five) to those of its forward pass (two): it computes the scores again."""


def measure_machine(reporter: Reporter = SILENT) -> MachineMeasurements:
    """Measure this machine; its GPUs must be idle for the figures to mean anything."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gemms: list[Gemm] = []
    with reporter.task("products", total=None, unit="shapes") as task:
        for gemm in _gemms(device):
            gemms.append(gemm)
            task.advance(1)
    attention: list[AttentionRate] = []
    with reporter.task("attention", total=None, unit="shapes") as task:
        for rate in _attention(device):
            attention.append(rate)
            task.advance(1)
    with reporter.task("memory", total=None, unit="measurements") as task:
        copy, launch = _copy_gb_per_s(device), _launch_us(device)
        task.advance(2)
    with reporter.task("all-reduce", total=None, unit="sizes") as task:
        all_reduces = measure_all_reduce(device.type)
        task.advance(len(all_reduces))
    fabric, network_gbps = find_network()
    on_gpu = device.type == "cuda"
    host_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    return MachineMeasurements(
        device=torch.cuda.get_device_name(0) if on_gpu else _processor(),
        kind=device.type,
        devices=torch.cuda.device_count() if on_gpu else 1,
        memory_gib=torch.cuda.get_device_properties(0).total_memory / _GIB if on_gpu else host_gib,
        host_memory_gib=host_gib,
        cpus=os.cpu_count() or 1,
        torch=torch.__version__,
        gemms=tuple(gemms),
        attention=tuple(attention),
        copy_gb_per_s=copy,
        launch_us=launch,
        all_reduces=all_reduces,
        fabric=fabric,
        network_gbps=network_gbps,
    )


def _seconds(work: Callable[[], object], device: torch.device, at_least: float = 0.05) -> float:
    """Seconds of one call: the best of some rounds, each long enough for the clock."""
    _timed(work, device, 1)
    once = max(_timed(work, device, 1), 1e-7)
    calls = max(1, min(1000, int(at_least / once)))
    return min(_timed(work, device, calls) for _ in range(_ROUNDS)) / calls


def _timed(work: Callable[[], object], device: torch.device, calls: int) -> float:
    _wait(device)
    started = time.perf_counter()
    for _ in range(calls):
        work()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gemms(device: torch.device) -> Iterator[Gemm]:
    on_gpu = device.type == "cuda"
    for rows, inputs, outputs in _GPU_SHAPES if on_gpu else _CPU_SHAPES:
        for dtype in ("bf16", "fp8") if on_gpu else ("fp32", "bf16"):
            work = _product(rows, inputs, outputs, dtype, device)
            if work is None:
                continue
            seconds = _seconds(work, device)
            yield Gemm(rows, inputs, outputs, dtype, 2 * rows * inputs * outputs / seconds / 1e12)


def _product(rows: int, inputs: int, outputs: int, dtype: str, device: torch.device) -> Callable[[], object] | None:
    """A product of tokens with a weight as a linear layer holds it; None where the device has no such units."""
    wide = torch.float32 if dtype == "fp32" else torch.bfloat16
    tokens = torch.randn(rows, inputs, device=device).to(wide)
    weight = torch.randn(outputs, inputs, device=device).to(wide)
    if dtype != "fp8":
        return lambda: functional.linear(tokens, weight)
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 9):
        return None  # ROCm's fp8 has other formats on other generations; its figure would need its own code
    narrow_tokens, narrow_weight = tokens.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(
        narrow_tokens, narrow_weight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _attention(device: torch.device) -> Iterator[AttentionRate]:
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    for length, heads, width in _GPU_ATTENTION if on_gpu else _CPU_ATTENTION:
        shape = (1, heads, length, width)
        query, key, value = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
        upstream = torch.randn(shape, device=device).to(dtype)

        def forward(query: torch.Tensor = query, key: torch.Tensor = key, value: torch.Tensor = value) -> torch.Tensor:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

        def both(forward: Callable[[], torch.Tensor] = forward, upstream: torch.Tensor = upstream) -> None:
            forward().backward(upstream)

        flops = 2 * heads * width * length * (length + 1)
        with torch.no_grad():
            once = _seconds(forward, device)
        backward = max(_seconds(both, device) - once, 1e-9)
        rates = (flops / once / 1e12, _BACKWARD_PER_FORWARD * flops / backward / 1e12)
        yield AttentionRate(length, heads, width, "bf16" if on_gpu else "fp32", *rates)


def _copy_gb_per_s(device: torch.device) -> float:
    size = _GIB if device.type == "cuda" else _GIB // 8
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device) / 1e9


def _launch_us(device: torch.device) -> float:
    tiny = torch.zeros(1, device=device)
    return _seconds(lambda: tiny.add_(1.0), device, at_least=0.02) * 1e6


def _processor() -> str:
    """The processor's name, as Linux has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
