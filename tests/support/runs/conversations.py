"""Prepared conversations written without a chat template: token files with `.learned`, as preparation leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainshed.data.tokens.indexed_dataset import write_index


def write_conversations(
    prefix: Path,
    documents: Sequence[Sequence[int] | np.ndarray],
    learned: Sequence[Sequence[int] | np.ndarray] | None = None,
    dtype: str = "<u2",
) -> str:
    """Write a shard of conversations and return its prefix; without `learned` the later half of each is learned."""
    masks = learned if learned is not None else [np.arange(len(tokens)) >= len(tokens) // 2 for tokens in documents]
    prefix.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{prefix}.bin").write_bytes(b"".join(np.asarray(tokens, dtype).tobytes() for tokens in documents))
    Path(f"{prefix}.learned").write_bytes(b"".join(np.asarray(mask, np.uint8).tobytes() for mask in masks))
    lengths = np.array([len(tokens) for tokens in documents], "<i4")
    write_index(f"{prefix}.idx", np.dtype(dtype), lambda: [lengths])
    return str(prefix)


def numbered_documents(lengths: Sequence[int] | np.ndarray, first: int = 1) -> list[np.ndarray]:
    """Documents whose tokens are all different and not 0, so that a token tells where it came from."""
    ends = first + np.cumsum(lengths, dtype=np.int64)
    return [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
