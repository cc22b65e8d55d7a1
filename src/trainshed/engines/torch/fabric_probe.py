"""Measure one group of ranks before training starts: versions, matrix products of each GPU, all-reduces of them all.

Every rank is a process that reads RANK, LOCAL_RANK, WORLD_SIZE and MASTER_*:
`python -m trainshed.engines.torch.fabric_probe REQUEST OUT`, with the request as text. The first rank of each node
writes the result to OUT.
"""

from __future__ import annotations

import datetime
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist

from trainshed.engines.probe_request import ProbeRequest
from trainshed.engines.torch.machine_probe import bus_gb_per_s, time_all_reduce

_WARM_UP_CALLS = 2
_LONGEST_ROUND_SECONDS = 1.0
_GEMM_SIZE, _GEMM_ROUNDS, _GEMM_CALLS = 8192, 5, 10


def probe(request: ProbeRequest, out: Path) -> None:
    """Measure as one rank."""
    rank, local, world = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    device = torch.device("cuda", local) if request.kind == "cuda" else torch.device("cpu")
    if request.kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    result: dict[str, Any] = {"versions": _versions(request.kind), "ranks": world}
    dist.init_process_group(
        "nccl" if request.kind == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=request.timeout_seconds),
        device_id=device if request.kind == "cuda" else None,
    )
    try:
        if request.products:
            result["tflops"] = _all_gather_values(_tflops(device), device, world)
        result["all_reduces"] = [
            _all_reduce(mebibytes, request.seconds, device, world) for mebibytes in request.mebibytes if world > 1
        ]
    finally:
        dist.destroy_process_group()
    if local == 0:
        partial = out.with_suffix(f".{rank}.part")
        partial.write_bytes(orjson.dumps(result))
        partial.rename(out)


def _versions(kind: str) -> dict[str, str]:
    if kind != "cuda":
        return {"torch": torch.__version__}
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    return {"torch": torch.__version__, "cuda": str(torch.version.cuda or torch.version.hip), "nccl": nccl}


def _all_reduce(mebibytes: float, seconds: float, device: torch.device, world: int) -> dict[str, float]:
    """Measure rounds until the time is up. Ranks count the slowest rank's time, so all stop after the same round."""
    size = int(mebibytes * 2**20)
    message = torch.zeros(size // 4, device=device)
    once = _all_reduce_max_seconds(time_all_reduce(message, device, _WARM_UP_CALLS), device)
    calls = max(1, min(20, int(_LONGEST_ROUND_SECONDS / max(once, 1e-6) / 5)))
    rounds: list[float] = []
    while not rounds or (sum(rounds) * calls < seconds and len(rounds) < 10_000):
        rounds.append(_all_reduce_max_seconds(time_all_reduce(message, device, calls), device))
    rates = [bus_gb_per_s(world, size, round_seconds) for round_seconds in rounds]
    return {
        "mebibytes": mebibytes,
        "rounds": len(rounds),
        "best_gb_per_s": max(rates),
        "median_gb_per_s": statistics.median(rates),
        "worst_gb_per_s": min(rates),
    }


def _all_reduce_max_seconds(seconds: float, device: torch.device) -> float:
    slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.item())


def _all_gather_values(value: float, device: torch.device, world: int) -> list[float]:
    parts = [torch.zeros(1, dtype=torch.float64, device=device) for _ in range(world)]
    dist.all_gather(parts, torch.tensor([value], dtype=torch.float64, device=device))
    return [float(part.item()) for part in parts]


def _tflops(device: torch.device) -> float:
    """Return the best rate of some rounds of large bf16 products."""
    left = torch.randn(_GEMM_SIZE, _GEMM_SIZE, device=device, dtype=torch.bfloat16)
    right = torch.randn(_GEMM_SIZE, _GEMM_SIZE, device=device, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(_GEMM_ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_GEMM_CALLS):
            left @ right
        end.record()
        torch.cuda.synchronize(device)
        best = min(best, start.elapsed_time(end) / 1e3 / _GEMM_CALLS)
    return 2 * _GEMM_SIZE**3 / best / 1e12


if __name__ == "__main__":
    probe(ProbeRequest.from_text(sys.argv[1]), Path(sys.argv[2]))
