"""An adapter, wherever it is stored: which tensors of its base it changes, and how.

Tensors have the names that transformers saves them under (`models/hf_tensors.py`), so that an adapter of PEFT's and one
of ours are the same thing. A matrix is changed by two factors (LoRA), and its rows may get lengths of their own (DoRA).
A tensor may also be replaced whole (PEFT's `modules_to_save`), or in some rows: those of tokens that were trained
(`trainable_token_indices`).

Shapes: R rows (outputs) and C columns (inputs) of a matrix, r rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trainshed.errors import InputError
from trainshed.models.hf_tensors import HfTensor, projection_tensors
from trainshed.recipe import ModelConfig


@dataclass(frozen=True)
class LoraFactors:
    """The change of a matrix W [R, C] to W + scale · b @ a; with a magnitude, each row of it at that length (DoRA)."""

    a: torch.Tensor
    """[r, C]"""
    b: torch.Tensor
    """[R, r]"""
    scale: float
    magnitude: torch.Tensor | None = None
    """[R]"""

    def delta(self) -> torch.Tensor:
        """Return scale · b @ a, computed in float32 as PEFT does (float64 factors stay float64): [R, C]."""
        dtype = torch.promote_types(self.a.dtype, torch.float32)
        return (self.b.to(dtype) @ self.a.to(dtype)) * self.scale

    def to(self, dtype: torch.dtype) -> LoraFactors:
        """Return the factors in another dtype."""
        magnitude = None if self.magnitude is None else self.magnitude.to(dtype)
        return LoraFactors(self.a.to(dtype), self.b.to(dtype), self.scale, magnitude)


@dataclass(frozen=True)
class TokenRows:
    """The rows of trained tokens, in place of those of an embedding or a head."""

    ids: tuple[int, ...]
    values: torch.Tensor
    """[tokens, hidden], in the order of the ids."""

    def to(self, dtype: torch.dtype) -> TokenRows:
        """Return the rows in another dtype."""
        return TokenRows(self.ids, self.values.to(dtype))

    def put_into(self, box: torch.Tensor, first: int = 0, columns: slice = slice(None)) -> torch.Tensor:
        """Return rows [first, …) of a tensor with these in them; of a tensor's columns, some."""
        here = [(id - first, number) for number, id in enumerate(self.ids) if first <= id < first + box.shape[0]]
        if not here:
            return box
        index, numbers = (torch.tensor(part) for part in zip(*here, strict=True))
        return box.index_copy(0, index, self.values[numbers][:, columns].to(box.dtype))


@dataclass(frozen=True)
class MatrixChange:
    """What factors make of one matrix: `delta` [R, C] is added, then each row is multiplied by `row_scale` [R]."""

    delta: torch.Tensor
    row_scale: torch.Tensor | None

    @classmethod
    def of(cls, factors: LoraFactors, weight: torch.Tensor | None) -> MatrixChange:
        """Compute it; only a magnitude needs the matrix [R, C] itself."""
        delta = factors.delta()
        if factors.magnitude is None:
            return cls(delta, None)
        assert weight is not None, "the length of a row is that of the changed matrix"
        # In one order of memory: the norm of a transposed view rounds differently.
        changed = (weight.to(torch.promote_types(weight.dtype, delta.dtype)) + delta).contiguous()
        return cls(delta, factors.magnitude.to(changed.dtype) / torch.linalg.norm(changed, dim=1))

    def applied(self, box: torch.Tensor, rows: slice = slice(None), columns: slice = slice(None)) -> torch.Tensor:
        """Return a box of the matrix, changed, in float32 or better."""
        changed = box.to(torch.promote_types(box.dtype, self.delta.dtype)) + self.delta[rows, columns]
        return changed if self.row_scale is None else self.row_scale[rows, None] * changed


class LoraAdapter(ABC):
    """An adapter over a base of the architecture `config`, checked against it."""

    def __init__(self, where: str, config: ModelConfig) -> None:
        self.where, self.config = where, config
        self.tensors: Mapping[str, HfTensor] = {tensor.name: tensor for tensor in projection_tensors(config)}
        """What transformers saves for the base."""

    @property
    @abstractmethod
    def version(self) -> str:
        """What changes whenever the adapter does."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of its factors, unless some modules have another."""

    @property
    @abstractmethod
    def adapted(self) -> frozenset[str]:
        """The tensors that have factors."""

    @property
    def replaced(self) -> frozenset[str]:
        """The tensors that are replaced whole."""
        return frozenset()

    @property
    def token_rows(self) -> Mapping[str, TokenRows]:
        """The rows of trained tokens, by the tensor that they are rows of."""
        return {}

    @property
    def changed_tensors(self) -> frozenset[str]:
        """All tensors that merging changes."""
        return self.adapted | self.replaced | self.token_rows.keys()

    @abstractmethod
    def factors(self, name: str) -> LoraFactors:
        """Return the factors of an adapted tensor."""

    def replacement(self, name: str) -> torch.Tensor:
        """Return what replaces a tensor."""
        raise KeyError(name)

    @torch.no_grad()
    def merge(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a base tensor, as transformers saves it, with the adapter in it and in its own dtype."""
        dtype = tensor.dtype
        if name in self.replaced:
            tensor = self.replacement(name).to(dtype)
        if (rows := self.token_rows.get(name)) is not None:
            return rows.put_into(tensor)
        if name not in self.adapted:
            return tensor
        transposed = self.tensors[name].row_mappings[0].transposed
        matrix = tensor.T if transposed else tensor
        merged = MatrixChange.of(self.factors(name), matrix).applied(matrix).to(dtype)
        return merged.T if transposed else merged

    def error(self, what: str, hint: str) -> InputError:
        """Return the error for something that is wrong with it."""
        return InputError(what, where=self.where, hint=hint)
