"""Measure this machine for the planner: its GPUs, or its CPU if it has none.

Matrix products, attention, memory, kernel launches and all_reduces are each measured until the figure is certain:
seconds on a GPU, under a minute on two cores. The best of several rounds counts, because other work on the machine can
only slow a round down. Network cards are listed as Linux describes them; nothing is sent.

The ranks of an all_reduce are processes of their own, `python -m trainshed.engines.torch.machine_probe RANK RANKS KIND
FOLDER`: each GPU belongs to one process, and what NCCL or gloo keep ends with it.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import torch
import torch.distributed as dist
from torch.nn import functional

from trainshed.errors import TrainshedError
from trainshed.plan.machine_file import AllReduceRate, AttentionRate, GemmRate, MachineMeasurements
from trainshed.reporting import SILENT, Reporter
from trainshed.this_machine import memory_bytes

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
_TIMING_ROUNDS = 3
_BACKWARD_PER_FORWARD = 2.5
"""Attention's backward pass has five products, its forward pass two: backward computes the scores again."""


def measure_machine(reporter: Reporter = SILENT) -> MachineMeasurements:
    """Measure this machine; its GPUs must be idle for the figures to mean anything."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gemms: list[GemmRate] = []
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
    host_gib = memory_bytes() / _GIB
    return MachineMeasurements(
        device=torch.cuda.get_device_name(0) if on_gpu else _cpu_name(),
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


def _best_seconds(work: Callable[[], object], device: torch.device, at_least: float = 0.05) -> float:
    """Return the seconds of one call: the best of some rounds, each long enough for the clock."""
    _timed(work, device, 1)
    once = max(_timed(work, device, 1), 1e-7)
    calls = max(1, min(1000, int(at_least / once)))
    return min(_timed(work, device, calls) for _ in range(_TIMING_ROUNDS)) / calls


def _timed(work: Callable[[], object], device: torch.device, calls: int) -> float:
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(calls):
        work()
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gemms(device: torch.device) -> Iterator[GemmRate]:
    on_gpu = device.type == "cuda"
    for rows, inputs, outputs in _GPU_SHAPES if on_gpu else _CPU_SHAPES:
        for dtype in ("bf16", "fp8") if on_gpu else ("fp32", "bf16"):
            work = _matmul(rows, inputs, outputs, dtype, device)
            if work is None:
                continue
            seconds = _best_seconds(work, device)
            yield GemmRate(rows, inputs, outputs, dtype, 2 * rows * inputs * outputs / seconds / 1e12)


def _matmul(rows: int, inputs: int, outputs: int, dtype: str, device: torch.device) -> Callable[[], object] | None:
    """Return a product of tokens with the weight of a linear layer; None if the device has no units for the dtype."""
    input_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    tokens = torch.randn(rows, inputs, device=device).to(input_dtype)
    weight = torch.randn(outputs, inputs, device=device).to(input_dtype)
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
            once = _best_seconds(forward, device)
        backward = max(_best_seconds(both, device) - once, 1e-9)
        rates = (flops / once / 1e12, _BACKWARD_PER_FORWARD * flops / backward / 1e12)
        yield AttentionRate(length, heads, width, "bf16" if on_gpu else "fp32", *rates)


def _copy_gb_per_s(device: torch.device) -> float:
    size = _GIB if device.type == "cuda" else _GIB // 8
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best_seconds(lambda: target.copy_(source), device) / 1e9


def _launch_us(device: torch.device) -> float:
    tiny = torch.zeros(1, device=device)
    return _best_seconds(lambda: tiny.add_(1.0), device, at_least=0.02) * 1e6


def _cpu_name() -> str:
    """Return the processor's name from Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


_PORT_RATE = re.compile(r"([\d.]+) Gb/sec")


def find_network(root: Path = Path("/sys/class")) -> tuple[str | None, float | None]:
    """Return the fabric between nodes by its name in the catalog, and the cards' rates together in Gbit a second.

    Cards that GPUs reach each other through (InfiniBand, RoCE, EFA) come before plain Ethernet; None where there is no
    card, or where a virtual one does not know its rate.
    """
    rates: dict[str, list[float]] = {}
    for port in sorted(root.glob("infiniband/*/ports/*")):
        rate = _PORT_RATE.search(_read_text(port / "rate"))
        if rate and "ACTIVE" in _read_text(port / "state"):
            rates.setdefault(_fabric_of_port(port, float(rate[1])), []).append(float(rate[1]))
    if rates:
        fabric = max(rates, key=lambda name: sum(rates[name]))
        return fabric, sum(rates[fabric])
    # Only real cards have a `device`; their speed is in megabits a second, -1 if it is unknown.
    speeds = [_read_text(card / "speed") for card in sorted(root.glob("net/*")) if (card / "device").exists()]
    known = [int(speed) / 1000 for speed in speeds if speed.isdecimal() and int(speed)]
    return ("ethernet", sum(known)) if known else (None, None)


def _fabric_of_port(port: Path, rate: float) -> str:
    card, layer = port.parents[1], _read_text(port / "link_layer")
    if (card / "device" / "driver").resolve().name == "efa":
        return "efa-v3" if rate >= 200 else "efa-v1"
    if layer == "Ethernet":
        return "roce"
    return "infiniband-xdr" if rate >= 800 else "infiniband-ndr" if rate >= 400 else "infiniband-hdr"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


_GPU_MESSAGES_MIB = (1, 16, 256, 1024)
_CPU_MESSAGES_MIB = (0.25, 4, 32)
_CPU_RANKS = 2
_ALL_REDUCE_ROUNDS, _ALL_REDUCE_CALLS = 3, 5
_TIMEOUT_SECONDS = 180
"""A fabric that does not come up waits for ever; starting takes seconds, each size less than one."""


def measure_all_reduce(kind: str) -> tuple[AllReduceRate, ...]:
    """Measure every message size; nothing if there is only one GPU."""
    ranks = torch.cuda.device_count() if kind == "cuda" else _CPU_RANKS
    if ranks < 2:
        return ()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-m", "trainshed.engines.torch.machine_probe"]
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(ranks):
            with open(Path(folder) / f"rank-{rank}.log", "wb") as log:
                arguments = [str(rank), str(ranks), kind, folder]
                processes.append(subprocess.Popen([*command, *arguments], stdout=log, stderr=log))
        _wait_for_ranks(processes, Path(folder))
        results = orjson.loads((Path(folder) / "results.json").read_bytes())
    return tuple(AllReduceRate(**result) for result in results)


def _wait_for_ranks(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait for all ranks; one that fails ends the others, which would wait for it."""
    until = time.monotonic() + _TIMEOUT_SECONDS
    try:
        while running := [process for process in processes if process.poll() is None]:
            if time.monotonic() > until or any(process.returncode for process in processes):
                break
            time.sleep(0.02)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    failed = [rank for rank, process in enumerate(processes) if process.returncode and process not in running]
    if failed:
        log = (folder / f"rank-{failed[0]}.log").read_text(encoding="utf-8", errors="replace").strip()
        last = log.rpartition("\n")[2]
        raise TrainshedError(f"measuring all-reduces failed: {last}", hint="is every GPU of the machine free?")
    if running:
        raise TrainshedError(
            f"all-reduces did not end within {_TIMEOUT_SECONDS} s",
            hint="with GPUs, NCCL_DEBUG=INFO shows what they wait for; on a CPU other programs take its cores: "
            "run it again when they have ended",
        )


def _run_rank(rank: int, ranks: int, kind: str, folder: str) -> None:
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        device_id=device if kind == "cuda" else None,
    )
    results: list[dict[str, float]] = []
    for mebibytes in _GPU_MESSAGES_MIB if kind == "cuda" else _CPU_MESSAGES_MIB:
        size = int(mebibytes * 2**20)
        message = torch.zeros(size // 4, device=device)
        time_all_reduce(message, device, _ALL_REDUCE_CALLS)
        seconds = min(time_all_reduce(message, device, _ALL_REDUCE_CALLS) for _ in range(_ALL_REDUCE_ROUNDS))
        bus = bus_gb_per_s(ranks, size, seconds)
        results.append({"ranks": ranks, "mebibytes": mebibytes, "seconds": seconds, "bus_gb_per_s": bus})
    if rank == 0:
        (Path(folder) / "results.json").write_bytes(orjson.dumps(results))
    dist.destroy_process_group()


def bus_gb_per_s(ranks: int, message_bytes: int, seconds: float) -> float:
    """Return the bus bandwidth of an all-reduce, 10^9 bytes a second, as nccl-tests count it."""
    return 2 * (ranks - 1) / ranks * message_bytes / seconds / 1e9


def time_all_reduce(message: torch.Tensor, device: torch.device, calls: int) -> float:
    """Return the seconds of one all-reduce out of some; all ranks must make the same number of calls."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(message)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / calls


if __name__ == "__main__":
    _run_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
