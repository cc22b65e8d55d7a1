"""Saving a checkpoint: how long steps stand still and how long the write takes, beside PyTorch's own DCP, in one run.

    python benchmarks/checkpoints.py [--gigabytes 1] [--repeat 3] [--device cpu]

Both sides write the same tensors to the same disk. Ours also hashes every byte and commits with a manifest; DCP's
`async_save` needs a process group. The stall is the time until training may go on, the write the time until the
checkpoint counts. The first save of each side is not counted (buffers are made then).
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from measure import table
from trainshed.checkpoints.native.folder import checkpoints_folder, complete_checkpoints
from trainshed.checkpoints.native.reader import load_checkpoint
from trainshed.checkpoints.native.shards import TensorShard
from trainshed.checkpoints.native.writer import CheckpointWriter
from trainshed.storage import LocalStore
from trainshed.storage.attempts import take_attempt

Timing = tuple[float, float]
"""(stall, until the checkpoint counts), in seconds."""


def tensors(gigabytes: float, device: str) -> dict[str, torch.Tensor]:
    """Matrices of 64 MB, as a model of some size has them."""
    count = max(1, round(gigabytes * 1e9 / (4096 * 4096 * 4)))
    return {f"layer.{number}": torch.randn(4096, 4096, device=device) for number in range(count)}


def ours(state: dict[str, torch.Tensor], folder: Path, repeat: int, *, blocking: bool) -> list[Timing]:
    """Our writer."""
    pieces = {name: TensorShard(tuple(tensor.shape), (0, 0), tensor) for name, tensor in state.items()}
    found = []
    with CheckpointWriter(take_attempt(LocalStore(folder), ""), spec={}, keep=1) as writer:
        for step in range(1, repeat + 2):
            began = time.perf_counter()
            writer.save(step, pieces, {"step": step}, blocking=blocking)
            stall = time.perf_counter() - began
            writer.wait()
            found.append((stall, time.perf_counter() - began))
    return found[1:]


def loading(state: dict[str, torch.Tensor], folder: Path) -> float:
    """Seconds to load what `ours` has left, every byte checked."""
    store = LocalStore(folder)
    pieces = {
        name: TensorShard(tuple(tensor.shape), (0, 0), torch.empty_like(tensor)) for name, tensor in state.items()
    }
    began = time.perf_counter()
    load_checkpoint(store, complete_checkpoints(store, checkpoints_folder(""))[0], pieces)
    seconds = time.perf_counter() - began
    assert all(torch.equal(pieces[name].local, tensor) for name, tensor in state.items())
    return seconds


def theirs(state: dict[str, torch.Tensor], folder: Path, repeat: int, *, blocking: bool) -> list[Timing]:
    """DCP's `save` and `async_save`."""
    found = []
    for step in range(1, repeat + 2):
        target = folder / f"step-{step}"
        began = time.perf_counter()
        if blocking:
            dcp.save(state, checkpoint_id=target)
            stall = time.perf_counter() - began
        else:
            future = dcp.async_save(state, checkpoint_id=target)
            stall = time.perf_counter() - began
            assert isinstance(future, Future)
            future.result()
        found.append((stall, time.perf_counter() - began))
        shutil.rmtree(target)
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29555")
    dist.init_process_group("gloo", rank=0, world_size=1)
    state = tensors(arguments.gigabytes, arguments.device)
    size = sum(tensor.nbytes for tensor in state.values())
    sides: dict[str, Callable[[Path], list[Timing]]] = {
        "trainshed, async": lambda folder: ours(state, folder, arguments.repeat, blocking=False),
        "DCP async_save": lambda folder: theirs(state, folder, arguments.repeat, blocking=False),
        "trainshed, blocking": lambda folder: ours(state, folder, arguments.repeat, blocking=True),
        "DCP save": lambda folder: theirs(state, folder, arguments.repeat, blocking=True),
    }
    rows = []
    for name, run in sides.items():
        with tempfile.TemporaryDirectory() as folder:
            timings = run(Path(folder))
            stall, whole = (min(each[part] for each in timings) for part in (0, 1))
            rows.append([name, f"{stall:.3f} s", f"{whole:.2f} s", f"{size / whole / 1e9:.2f} GB/s"])
            if name == "trainshed, blocking":
                seconds = loading(state, Path(folder))
                rows.append(["trainshed, load", "", f"{seconds:.2f} s", f"{size / seconds / 1e9:.2f} GB/s"])
    table(f"{size / 1e9:.2f} GB from {arguments.device}", ["side", "stall", "until it counts", "rate"], rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
