"""Fresh weights: a function of name and seed alone, with the spread their place in the model asks for."""

from __future__ import annotations

import torch

from support.models.tiny_models import tiny_config
from trainshed.models.init import INIT_VERSION, init_parameter
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig

CONFIG = tiny_config("gpt2", layers=2, init_std=0.04)
BY_NAME = {parameter.name: parameter for parameter in parameters(CONFIG)}


def fresh(parameter: Parameter, config: ModelConfig = CONFIG, seed: int = 1) -> torch.Tensor:
    out = torch.full(parameter.shape, torch.nan)
    init_parameter(out, parameter, [0] * out.dim(), config, seed)
    return out


def test_version_1_never_changes() -> None:
    assert INIT_VERSION == 1
    first = fresh(BY_NAME["layers.1.mlp.down.weight"])[0, :4]
    torch.testing.assert_close(
        first, torch.tensor([0.0147446152, -0.0001658158, -0.0355012119, 0.0215632562]), rtol=1e-6, atol=0
    )


def test_every_tensor_starts_as_its_place_asks() -> None:
    for name, parameter in BY_NAME.items():
        x = fresh(parameter)
        if name.endswith("bias"):
            assert bool((x == 0).all()), name
        elif "norm" in name:
            assert bool((x == 1).all()), name
        else:
            # What is added to the residual stream is smaller: 1 / sqrt(2 · 2 layers).
            std = 0.02 if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.04
            assert abs(x.std() / std - 1) < 5 / (2 * x.numel()) ** 0.5, name
            assert abs(x.mean()) < 5 * std / x.numel() ** 0.5, name


def test_names_and_seeds_give_other_weights() -> None:
    first, second = BY_NAME["layers.0.mlp.up.weight"], BY_NAME["layers.1.mlp.up.weight"]
    assert torch.equal(fresh(first), fresh(first))
    for other in (fresh(second), fresh(first, seed=2)):
        assert (fresh(first) == other).float().mean() < 1e-3


def test_a_box_of_stacked_experts_is_the_same_as_in_the_whole() -> None:
    config = tiny_config("mixtral")
    parameter = next(each for each in parameters(config) if each.expert)
    whole = fresh(parameter, config)
    box = torch.empty(2, 10, 32)
    init_parameter(box, parameter, (1, 6, 0), config, 1)
    assert torch.equal(box, whole[1:3, 6:16])


def test_lower_precision_is_the_same_numbers_rounded() -> None:
    parameter = BY_NAME["embedding.weight"]
    wide, narrow = torch.empty(parameter.shape, dtype=torch.float64), torch.empty(parameter.shape, dtype=torch.bfloat16)
    for out in (wide, narrow):
        init_parameter(out, parameter, (0, 0), CONFIG, 1)
    assert torch.equal(fresh(parameter), wide.float())
    assert torch.equal(narrow, wide.bfloat16())
