"""What a rank is doing, by its stack, and what to do about a rank that the others wait for.

This is also a job file: `watch_node.py` imports it in the image of a foreign engine. It needs the standard library of
Python 3.8 and nothing of Trainshed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Sequence  # noqa: UP035 - Python 3.8


@dataclass(frozen=True)
class Activity:
    """What a rank does: a name for programs, the rest of a sentence that begins with the rank, and advice."""

    name: str
    text: str
    advice: str | None = None

    @property
    def waits_for_others(self) -> bool:
        """Whether it is only waiting for other ranks: whoever they wait for is doing something else."""
        return self.name in ("collective", "rendezvous")


_RULES = (
    (
        "rendezvous",
        r"/torch/distributed/(rendezvous|elastic/rendezvous)|distributed_c10d\.py:\d+ in (init_process_group|"
        r"new_group|_new_process_group_helper|_store_based_barrier|split_group)",
        "is still meeting the other ranks",
        "check that every node reaches MASTER_ADDR and that NCCL_SOCKET_IFNAME names the interface between nodes: "
        "`trainshed doctor --on CLUSTER --nodes 2` tries it",
    ),
    (
        "data",
        r"/torch/utils/data/|/trainshed/data/|/batch_loader\.py|/megatron/core/datasets/|/datasets/(arrow_|iterable_)",
        "waits for data",
        "look at the disk or bucket that the tokens are on; with engine: torch, `data.stage: nvme` or `shm` copies "
        "them to the node first",
    ),
    (
        "checkpoint",
        r"/torch/distributed/checkpoint/|/torch/serialization\.py|/trainshed/checkpoints/|/dist_checkpointing/|"
        r" in (save_checkpoint|_save_checkpoint|save_checkpoint_and_time)",
        "is writing or reading a checkpoint",
        "look whether the disk of the run is full or slow; `checkpoint.async: true` writes beside training",
    ),
    (
        "compile",
        r"/torch/_(dynamo|inductor|functorch)/|/triton/(compiler|runtime)/|/torch/utils/cpp_extension\.py",
        "is compiling",
        "other ranks wait until it has finished; a cache on a shared or slow disk makes it long "
        "(TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR on a local disk)",
    ),
    (
        "load",
        r"/safetensors/|/trainshed/engines/torch/weights\.py|/transformers/modeling_utils\.py| in load_checkpoint",
        "is loading weights",
        "look at the disk or bucket that the weights are on",
    ),
    (
        "point-to-point",
        r"/torch/distributed/pipelining/|p2p_communication\.py",
        "waits for its neighbour in the pipeline",
        None,
    ),
    (
        "gpu",
        r"/torch/cuda/(__init__|streams|memory)\.py:\d+ in (synchronize|wait|query)|/torch/cuda/graphs\.py",
        "waits for its GPU",
        "its GPU is busy with a collective or a kernel that does not end: the flight recorder names the collective",
    ),
)
_COMPILED_RULES = [(name, re.compile(pattern), text, advice) for name, pattern, text, advice in _RULES]
# Frames between a wait and its caller; they say nothing about who waits.
_SKIPPED = re.compile(r"/torch/(_ops|_utils|utils/_contextlib)\.py|/torch/autograd/|/torch/distributed/c10d_logger\.py")
_COLLECTIVE = re.compile(r"/torch/distributed/(distributed_c10d|_functional_collectives)\.py:\d+ in (\w+)")
_INNER_FRAMES = 15


def activity_of(stack: Sequence[str], state: str = "") -> Activity:
    """Return what a rank does; `stack` has the innermost frame last, `state` is that of its process."""
    if state in ("T", "t"):
        return Activity(
            "stopped",
            "is stopped (SIGSTOP, or a debugger)",
            "`kill -CONT` with its process id lets it go on",
        )
    frames = [frame for frame in stack if not _SKIPPED.search(frame)]
    rendezvous = _COMPILED_RULES[0]
    inner = frames[-_INNER_FRAMES:]
    if any(rendezvous[1].search(frame) for frame in inner):
        return Activity(rendezvous[0], rendezvous[2], rendezvous[3])
    innermost = _COLLECTIVE.search(frames[-1]) if frames else None
    if innermost is not None:
        calls = [match for frame in inner if (match := _COLLECTIVE.search(frame))]
        return Activity("collective", f"waits for other ranks in {calls[0][2]}")
    for frame in reversed(inner):
        for name, pattern, text, advice in _COMPILED_RULES[1:]:
            if pattern.search(frame):
                return Activity(name, text, advice)
    if state == "D":
        return Activity(
            "kernel", "waits for a disk or a driver", "`dmesg` on its node says whether a disk or a GPU failed"
        )
    if not frames:
        return Activity("unknown", "shows no stack")
    return Activity("code", f"is at {short_frame(frames[-1])}")


def exit_advice(how: str) -> str | None:
    """Return advice for how a rank ended ("was killed by SIGKILL"), None where there is none."""
    if "SIGKILL" in how:
        return (
            "the kernel or the scheduler killed it, mostly because the node ran out of memory: `dmesg` or `sacct` says "
            "so, `kubectl describe pod` shows OOMKilled"
        )
    if "SIGBUS" in how:
        return "SIGBUS comes from a full /dev/shm, or from a file on a mount that went away"
    if "SIGSEGV" in how or "SIGILL" in how or "SIGABRT" in how:
        return "its own log has the last lines of the library that failed"
    if "SIGSTOP" in how:
        return "find out who stopped it: a debugger, a scheduler that suspends jobs, Ctrl-Z"
    return None


def short_frame(frame: str) -> str:
    """Return a frame without the folders in which packages are installed."""
    path, colon, rest = frame.partition(":")
    for mark in ("/site-packages/", "/dist-packages/", "/src/"):
        if mark in path:
            return path.rpartition(mark)[2] + colon + rest
    parts = path.split("/")
    return ("/".join(parts[-3:]) if len(parts) > 3 else path) + colon + rest
