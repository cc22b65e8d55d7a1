"""Tables of vectors, as rows of a weight: the embedding, the learned positions, the head; and rows of added tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from trainshed.models.loss import replace_rows
from trainshed.models.parameters import AddedRows


class Embedding(nn.Module):
    """A table of vectors, as rows of a weight: the embedding, the learned positions or the head."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.added: TrainedRows | None = None

    def trained_rows(self) -> torch.Tensor | None:
        """The rows of this rank that are trained while the others are frozen; None where there are none."""
        return None if self.added is None or not self.added.enabled else self.added.rows()

    @property
    def trained_start(self) -> int:
        """Where they begin among the rows of this rank."""
        return 0 if self.added is None else self.added.start

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids [...], counted from the first of this rank: [..., H]."""
        # `where` lays its result out as the condition is, and pipeline stages send only contiguous tensors.
        ids = ids.contiguous()
        vectors = F.embedding(ids, self.weight)
        return vectors if self.added is None or not self.added.enabled else self.added.put_into(vectors, ids)

    def with_rows(
        self, function: Callable[[Embedding, torch.Tensor], torch.Tensor], hidden: torch.Tensor
    ) -> torch.Tensor:
        """Return function(this table, hidden). Under FSDP the rows are gathered for the time of the call."""
        return function(self, hidden)

    def matrix(self) -> torch.Tensor:
        """Return all rows of this rank as they are used."""
        return replace_rows(self.weight, self.trained_rows(), self.trained_start)


class TrainedRows(nn.Module):
    """The rows of added tokens, which are trained beside adapters. Each tp rank holds all and uses those it has."""

    enabled = True
    """Whether they are used, and not those of the frozen table; see `adapters_disabled`."""

    def __init__(self, added: AddedRows, width: int, vocab_start: int, vocab_stop: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(added.count, width))
        self._first, self._last = added.within(vocab_start, vocab_stop)
        self._offset = added.start - vocab_start
        self.start = max(self._offset, 0)
        """Where they begin among the rows of this rank."""

    def put_into(self, vectors: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the vectors [..., H] of ids [...] with those of added tokens in place of the frozen ones.

        A rank that has no added token computes the same, so that all ranks of tp have a gradient and meet in backward.
        """
        index = ids - self._offset
        is_added = (index >= self._first) & (index < self._last)
        trained = F.embedding(torch.where(is_added, index, 0), self.weight).to(vectors.dtype)
        return torch.where(is_added[..., None], trained, vectors)

    def rows(self) -> torch.Tensor | None:
        """Return those that this rank has; None where it has none."""
        return self.weight[self._first : self._last] if self._last > self._first else None
