"""A piece: the rectangular part of one global tensor that a rank holds.

Layouts differ only in how tensors are cut into pieces, so a checkpoint written as pieces loads on any layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Piece:
    """`tensor` is elements [offset, offset + tensor.shape) of the global tensor of this `shape`.

    Several ranks may hold the same piece (replicas); exactly one of them is its `owner` and writes it. A rank that
    holds nothing of a tensor (more ranks than rows) has a piece with a 0 in its shape.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor
    owner: bool = True
