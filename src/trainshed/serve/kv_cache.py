"""The KV cache: how large it is, and which block each sequence has.

When a sequence is admitted it gets one contiguous block with a slot for each token that it can ever need, so no request
is preempted or recomputed because the cache is full. Requests that do not fit wait. (Blocks are as long as their
sequence, not pages of a fixed size.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from trainshed.errors import InputError
from trainshed.recipe import ModelConfig
from trainshed.reporting import SILENT, Reporter
from trainshed.this_machine import memory_bytes

# For what steps need besides weights and cache: activations of a prefill chunk, logits, CUDA graphs.
_GPU_SHARE_KEPT_FREE = 0.12
_HOST_MEMORY_SHARE = 0.25
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
_DEFAULT_SEQUENCES = {"cpu": 8, "cuda": 64}


class BlockAllocator:
    """Allocates blocks of consecutive slots of the cache: the first free one that is long enough."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free: list[tuple[int, int]] = [(0, slots)]
        """(begin, end) of the free blocks, in order, none next to another."""

    @property
    def free_tokens(self) -> int:
        """How many slots are free."""
        return sum(end - begin for begin, end in self._free)

    def allocate(self, length: int) -> int | None:
        """Return where a block of this length begins; None if there is none."""
        for number, (begin, end) in enumerate(self._free):
            if end - begin >= length:
                self._free[number : number + 1] = [(begin + length, end)] if end - begin > length else []
                return begin
        return None

    def free(self, begin: int, length: int) -> None:
        """Free an allocated block."""
        merged: list[tuple[int, int]] = []
        for block in sorted([*self._free, (begin, begin + length)]):
            if merged and merged[-1][1] == block[0]:
                merged[-1] = (merged[-1][0], block[1])
            else:
                merged.append(block)
        self._free = merged


@dataclass(frozen=True)
class ServingLimits:
    """The limits of a generator: sequences at a time, tokens of one (prompt and output), tokens of all."""

    max_sequences: int
    max_length: int
    cache_tokens: int


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the size of one token's keys and values; with latent attention, of what they are computed from."""
    if config.mla is not None:
        return config.layers * (config.mla.kv_rank + config.mla.rope_dim) * dtype.itemsize
    return 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize


def choose_limits(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_sequences: int | None = None,
    max_length: int | None = None,
    cache_tokens: int | None = None,
    reporter: Reporter = SILENT,
) -> ServingLimits:
    """Choose the limits that are not given, by the memory that is free after loading, and report them."""
    for name, given in (("max-sequences", max_sequences), ("max-length", max_length), ("cache-tokens", cache_tokens)):
        if given is not None and given < 1:
            raise InputError(f"--{name} {given} is less than one", hint="write a whole number from 1 up")
    if max_length is not None and max_length > config.max_positions:
        raise InputError(
            f"--max-length {max_length} is longer than the {config.max_positions} positions this model knows",
            hint=f"write --max-length {config.max_positions} or less",
        )
    sequences = max_sequences or _DEFAULT_SEQUENCES.get(device.type, 8)
    bytes_per_token = kv_bytes_per_token(config, dtype)
    free = int(_free_bytes(device) // bytes_per_token)
    wanted = sequences * (max_length or config.max_positions)
    tokens = min(cache_tokens or wanted, wanted)
    if cache_tokens is None and tokens > free:
        tokens = free
        if tokens < (max_length or 1):
            raise InputError(
                f"there is memory for the keys and values of {max(tokens, 0):,} tokens ({bytes_per_token:,} bytes each)"
                + (f", not of {max_length:,}" if max_length else ""),
                hint="free some memory, write a smaller --max-length, or --dtype bf16",
            )
    length = min(max_length or config.max_positions, tokens)
    origin = (
        "as asked" if cache_tokens else "for all at full length" if tokens == wanted else "by the memory that is free"
    )
    shorter = "" if max_length or length == config.max_positions else f" (of {config.max_positions:,} the model knows)"
    reporter.note(
        f"up to {sequences} answers at a time, each with its prompt up to {length:,} tokens long{shorter}; "
        f"a cache of {tokens:,} tokens, {tokens * bytes_per_token / 1e9:.2f} GB, {origin}"
    )
    return ServingLimits(sequences, length, tokens)


def _free_bytes(device: torch.device) -> float:
    """Return how much memory the cache may use: most of a GPU's free memory, a share of the host's."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free - _GPU_SHARE_KEPT_FREE * total
    return min(_available_bytes(), _container_bytes()) * _HOST_MEMORY_SHARE


def _available_bytes() -> float:
    """Return the available memory of this machine, or its whole memory if only that is known."""
    if _MEMINFO.exists():
        lines = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return memory_bytes()


def _container_bytes() -> float:
    """Return what is left of the container's memory: a pod is killed at its own limit, not at the machine's."""
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # none, or one without a limit (`max`)
        return math.inf
    return limit - used
