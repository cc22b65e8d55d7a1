"""Which tensors an optimizer treats alike: parameter groups by name, and the matrices that tensors consist of.

A group of `train.optimizer.groups` names tensors as checkpoints do, with `*` for any text, dots included. A tensor
belongs to the first group that names it.

An optimizer that works on whole matrices (Muon) works on the matrices of layers: every tensor of a layer with two
dims, the router's too, and each expert of the stacked ones. Tensors that hold several projections are taken apart:
`qkv` into queries, keys and values, `gate_up` into gate and up. Embeddings, head, norms and biases are not among them.

This module does not import torch: the planner and the checks of a recipe read it on a laptop.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from trainshed.models.parameters import Parameter
from trainshed.recipe import ModelConfig
from trainshed.recipe.optimizer import Optimizer, ParameterGroup
from trainshed.recipe.section import Problem


@dataclass(frozen=True)
class ParameterOptions:
    """How one tensor is updated: its learning rate is `lr_scale` times the step's, call it r, and it shrinks by
    r · `weight_decay`.
    """

    lr_scale: float = 1.0
    weight_decay: float = 0.0
    frozen: bool = False


def parameter_options(parameter: Parameter, optimizer: Optimizer) -> ParameterOptions:
    """Return how an optimizer updates a tensor: as its group says, and as all others where a group says nothing."""
    group = parameter_group(parameter.name, optimizer.groups or ())
    if group is not None and group.freeze:
        return ParameterOptions(frozen=True)
    lr_scale = 1.0 if group is None or group.lr_scale is None else group.lr_scale
    weight_decay = optimizer.weight_decay if parameter.decays else 0.0
    if group is not None and group.weight_decay is not None:
        weight_decay = group.weight_decay
    if optimizer.decoupled:
        # The schedule still scales it: at the peak a step shrinks the tensor by `weight_decay` itself.
        weight_decay /= optimizer.lr * lr_scale
    return ParameterOptions(lr_scale, weight_decay)


def parameter_group(name: str, groups: Sequence[ParameterGroup]) -> ParameterGroup | None:
    """Return the first group that names a tensor; None if none does."""
    return next((group for group in groups if fnmatchcase(name, group.match)), None)


def is_frozen_by_group(name: str, groups: Sequence[ParameterGroup]) -> bool:
    """Whether the first group that names a tensor freezes it."""
    group = parameter_group(name, groups)
    return group is not None and group.freeze


def group_problems(
    groups: Sequence[ParameterGroup], names: Sequence[str], buffers: Sequence[str] = ()
) -> Iterator[Problem]:
    """Yield groups without a tensor, of a model whose trained tensors have these names; paths are within `groups`.

    `buffers` are the biases of routers, which the optimizer does not update: they can be frozen, and nothing else.
    """
    taken: set[str] = set()
    for number, group in enumerate(groups):
        matched = {name for name in names if fnmatchcase(name, group.match)}
        if not matched and any(fnmatchcase(name, group.match) for name in buffers):
            if not group.freeze:
                what = "moves by `train.moe.bias_update`: it has neither a learning rate nor weight decay"
                yield Problem((number, "match"), f"`{group.match}` {what}", "write `freeze: true`, or delete the group")
        elif not matched:
            near = _nearest_names(group.match, names)
            yield Problem((number, "match"), f"no tensor is called `{group.match}`", f"near it: {', '.join(near)}")
        elif not matched - taken:
            yield Problem(
                (number, "match"),
                f"an earlier group has every tensor that is called `{group.match}`",
                "put it before that group, or delete it",
            )
        taken |= matched
    if all(name in taken for name in names) and all(
        group.freeze for name in names if (group := parameter_group(name, groups)) is not None
    ):
        yield Problem((), "every tensor is frozen: nothing would be trained", "leave some out")


def _nearest_names(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that are most like a pattern, those of all layers as one."""
    of_layers = list(dict.fromkeys(re.sub(r"^layers\.\d+\.", "layers.*.", name) for name in names))
    return difflib.get_close_matches(pattern, of_layers, n=3, cutoff=0.0)


@dataclass(frozen=True)
class MatrixRows:
    """The rows of one matrix within a tensor that holds several: of every `period` rows those in [start, stop)."""

    period: int
    start: int
    stop: int

    @property
    def share(self) -> float:
        """Which part of the tensor's rows it has."""
        return (self.stop - self.start) / self.period


WHOLE = MatrixRows(1, 0, 1)


def is_layer_matrix(parameter: Parameter) -> bool:
    """Whether a tensor is a matrix of a layer, or one for each expert."""
    return parameter.layer is not None and len(parameter.shape) == (3 if parameter.expert else 2)


def fused_matrices(config: ModelConfig, parameter: Parameter) -> tuple[MatrixRows, ...]:
    """Return the matrices that a matrix of a layer holds; `models/parameters.py` describes the order of its rows."""
    if parameter.name.endswith("attention.qkv.weight"):
        keys = config.head_dim
        queries = config.heads // config.kv_heads * keys
        ends = (queries, queries + keys, queries + 2 * keys)
        assert parameter.shape[0] == config.kv_heads * ends[-1], (
            "for each group its queries, one key and one value head"
        )
        return tuple(MatrixRows(ends[-1], start, stop) for start, stop in zip((0, *ends[:-1]), ends, strict=True))
    if "gate_up" in parameter.name:
        return (MatrixRows(2, 0, 1), MatrixRows(2, 1, 2))
    return (WHOLE,)


def matrix_shapes(config: ModelConfig, parameter: Parameter) -> list[tuple[int, int]]:
    """Return rows and columns of each matrix in one layer's matrix; of stacked experts, of one of them."""
    rows, columns = parameter.shape[-2:]
    return [(round(rows * part.share), columns) for part in fused_matrices(config, parameter)]
