"""Measure all-reduces among the GPUs of this machine, or between two processes on its CPU.

Every rank is a process of its own, `python -m trainshed.engines.torch.collective_probe RANK RANKS KIND FOLDER`: a GPU
belongs to one process, and whatever NCCL or gloo keep goes away with theirs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import orjson
import torch
import torch.distributed as dist

from trainshed.errors import TrainshedError
from trainshed.plan.measured.machine_measurements import AllReduce

_GPU_MESSAGES_MIB = (1, 16, 256, 1024)
_CPU_MESSAGES_MIB = (0.25, 4, 32)
_CPU_RANKS = 2
_ROUNDS, _CALLS = 3, 5
_LONGEST_SECONDS = 180
"""A fabric that does not come up waits for ever; starting takes seconds, the sizes below a second each."""


def measure_all_reduce(kind: str) -> tuple[AllReduce, ...]:
    """Measure every message size; nothing where there is one GPU only."""
    ranks = torch.cuda.device_count() if kind == "cuda" else _CPU_RANKS
    if ranks < 2:
        return ()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-m", "trainshed.engines.torch.collective_probe"]
        started: list[subprocess.Popen[bytes]] = []
        for rank in range(ranks):
            with open(Path(folder) / f"rank-{rank}.log", "wb") as log:
                arguments = [str(rank), str(ranks), kind, folder]
                started.append(subprocess.Popen([*command, *arguments], stdout=log, stderr=log))
        _see_through(started, Path(folder))
        found = orjson.loads((Path(folder) / "found.json").read_bytes())
    return tuple(AllReduce(**one) for one in found)


def _see_through(started: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait for all ranks; one that fails ends the others, which would wait for it."""
    until = time.monotonic() + _LONGEST_SECONDS
    try:
        while running := [process for process in started if process.poll() is None]:
            if time.monotonic() > until or any(process.returncode for process in started):
                break
            time.sleep(0.02)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    failed = [rank for rank, process in enumerate(started) if process.returncode and process not in running]
    if failed:
        said = (folder / f"rank-{failed[0]}.log").read_text(encoding="utf-8", errors="replace").strip()
        last = said.rpartition("\n")[2]
        raise TrainshedError(f"measuring all-reduces failed: {last}", hint="is every GPU of the machine free?")
    if running:
        raise TrainshedError(
            f"all-reduces did not end within {_LONGEST_SECONDS} s", hint="NCCL_DEBUG=INFO shows what they wait for"
        )


def _measure_rank(rank: int, ranks: int, kind: str, folder: str) -> None:
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
    found: list[dict[str, float]] = []
    for mebibytes in _GPU_MESSAGES_MIB if kind == "cuda" else _CPU_MESSAGES_MIB:
        size = int(mebibytes * 2**20)
        message = torch.zeros(size // 4, device=device)
        seconds_of_calls(message, device, _CALLS)
        seconds = min(seconds_of_calls(message, device, _CALLS) for _ in range(_ROUNDS))
        bus = bus_gb_per_s(ranks, size, seconds)
        found.append({"ranks": ranks, "mebibytes": mebibytes, "seconds": seconds, "bus_gb_per_s": bus})
    if rank == 0:
        (Path(folder) / "found.json").write_bytes(orjson.dumps(found))
    dist.destroy_process_group()


def bus_gb_per_s(ranks: int, message_bytes: int, seconds: float) -> float:
    """Return the bus bandwidth of an all-reduce, 10^9 bytes a second, as nccl-tests count it."""
    return 2 * (ranks - 1) / ranks * message_bytes / seconds / 1e9


def seconds_of_calls(message: torch.Tensor, device: torch.device, calls: int) -> float:
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
    _measure_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
