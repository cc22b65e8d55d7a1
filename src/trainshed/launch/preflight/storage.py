"""Can a run's folder be written from this node, and how fast?"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from trainshed.errors import StorageError
from trainshed.launch.preflight.checks import Check
from trainshed.storage import Store

SAMPLE_BYTES = 64 * 2**20
_MOST_NODES = 4
# One file says little about what many writers reach: only what is far off is worth a word.
_FAR_OFF = 0.25


def sampled_nodes(nodes: int) -> tuple[int, ...]:
    """Return which nodes write: the first, the last, and some between them."""
    count = min(nodes, _MOST_NODES)
    return tuple(sorted({round(index * (nodes - 1) / max(count - 1, 1)) for index in range(count)}))


def check_storage(
    store: Store, path: str, *, expected_gb_per_s: float | None = None, size_bytes: int = SAMPLE_BYTES
) -> Check:
    """Write a file, read it back, remove it; `expected_gb_per_s` is what this node should get of the storage."""
    block = os.urandom(min(size_bytes, 2**20))
    blocks: Sequence[bytes] = [block] * max(1, size_bytes // len(block))
    total = len(block) * len(blocks)
    try:
        started = time.perf_counter()
        with store.writer(path, size=total) as writer:
            for each in blocks:
                writer.write(each)
        written = time.perf_counter() - started
        started = time.perf_counter()
        whole = sum(len(chunk) for chunk in store.stream(path)) == total and store.read(path, 0, len(block)) == block
        read = time.perf_counter() - started
        store.delete(path)
    except (StorageError, OSError) as error:
        return Check("storage", "fail", f"the run's folder cannot be written: {error}", f"is {store.url} reachable?")
    if not whole:
        return Check("storage", "fail", "what was written does not come back", f"is {store.url} mounted everywhere?")
    rates = {"write_gb_per_s": total / written / 1e9, "read_gb_per_s": total / read / 1e9, "bytes": total}
    told = f"{rates['write_gb_per_s']:.2f} GB/s written, {rates['read_gb_per_s']:.2f} read"
    if expected_gb_per_s is None:
        return Check("storage", "pass", f"{told}; measured, nothing to compare with", measured=rates)
    slow = rates["write_gb_per_s"] < _FAR_OFF * expected_gb_per_s
    what = f"{told}; the tier gives this node {expected_gb_per_s:.2f}"
    hint = "checkpoints will take longer than planned" if slow else None
    return Check("storage", "warn" if slow else "pass", what, hint, rates | {"expected_gb_per_s": expected_gb_per_s})
