"""Fresh weights: a function of the parameter's name and the seed, so every layout starts from the same ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from trainshed.models.counter_random import fill_normal, key_of
from trainshed.models.parameters import Parameter
from trainshed.recipe import ModelConfig

VERSION = 1


@torch.no_grad()
def fill_fresh(out: torch.Tensor, parameter: Parameter, offset: Sequence[int], config: ModelConfig, seed: int) -> None:
    """Fill `out`, the box at `offset` of a parameter, with its starting values."""
    if parameter.start == "ones":
        out.fill_(1.0)
    elif parameter.start == "zeros":
        out.zero_()
    else:
        std = config.init_std
        if parameter.start == "output":
            std /= math.sqrt(2 * config.layers)
        fill_normal(out, key_of("init", VERSION, seed, parameter.name), std, parameter.shape, offset)
