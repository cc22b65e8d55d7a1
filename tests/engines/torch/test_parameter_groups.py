"""Groups of tensors by name: their learning rate, their decay, and those that are frozen; on every layout."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch

from support.models.one_process import CPU, gradients, one_process_model, token_rows
from support.models.tiny_models import tiny_config
from support.recipes.small_recipes import ALONE
from support.runs.small_runs import SmallRuns, difference, state
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.optimizer_registry import build_rank_optimizer
from trainshed.engines.torch.step import squared_grad_norm
from trainshed.models.parameter_groups import group_problems
from trainshed.models.parameters import lora_parameters, parameters
from trainshed.recipe import Lora
from trainshed.recipe.optimizer import Optimizer, ParameterGroup

_MORE = "{match: '*norm.weight', weight_decay: 0.2}, {match: '*.mlp.*', lr_scale: 0.3}"
GROUPS = f"[{{match: embedding.*, freeze: true}}, {_MORE}]"
OPTIMIZER = f"train.optimizer={{lr: 3.0e-3, groups: {GROUPS}}}"
WITHOUT_FIRST_STAGE = (
    "train.optimizer={lr: 3.0e-3, groups: [{match: embedding.*, freeze: true}, {match: layers.0.*, freeze: true}]}"
)
WITH_MUON = f"train.optimizer={{name: muon, lr: 3.0e-3, groups: {GROUPS}}}"
GOOD = torch.zeros((), dtype=torch.float64)


def test_five_steps_are_those_of_torch_with_param_groups() -> None:
    model = one_process_model(tiny_config("llama", layers=1), length=8, precision="fp64")
    keys = {"lr": 1e-2, "weight_decay": 0.3, "clip": None}
    groups = [
        {"match": "embedding.*", "freeze": True},
        {"match": "*norm.weight", "weight_decay": 0.2},
        {"match": "*.mlp.*", "lr_scale": 0.3},
    ]
    optimizer = build_rank_optimizer(model, Optimizer.model_validate(keys | {"groups": groups}))
    copies = {shard.name: torch.nn.Parameter(shard.local_tensor.clone()) for shard in model.shards}
    rates = {name: 0.3 if ".mlp." in name and "norm" not in name else 1.0 for name in copies}
    theirs = torch.optim.AdamW(
        [
            {"params": [copy], "weight_decay": 0.2 if "norm" in name else 0.3, "factor": rates[name]}
            for name, copy in copies.items()
            if not name.startswith("embedding.")
        ],
        betas=(0.9, 0.95),
    )
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        for shard in model.shards:
            gradient = torch.randn(shard.tensor.shape, generator=generator, dtype=torch.float64)
            shard.tensor.grad, copies[shard.name].grad = gradient, gradient.clone()
        lr = 1e-2 / (step + 1)
        optimizer.step(lr, squared_grad_norm(model.shards).sqrt(), GOOD)
        for group in theirs.param_groups:
            group["lr"] = lr * group["factor"]
        theirs.step()
    for shard in model.shards:
        torch.testing.assert_close(shard.local_tensor, copies[shard.name].detach(), rtol=1e-12, atol=1e-12)
    assert not any("embedding" in name for name in optimizer.state_tensors())


def test_decoupled_decay_follows_the_schedule_and_not_the_rate() -> None:
    """Loshchilov and Hutter's: at half of the peak, half of it. PyTorch's has it with weight_decay / peak."""
    model = one_process_model(tiny_config("llama", layers=1), length=8, precision="fp64")
    options = Optimizer.model_validate({"lr": 1e-2, "weight_decay": 1e-3, "decoupled": True, "clip": None})
    optimizer = AdamW(model.shards, options, CPU)
    copies = [torch.nn.Parameter(shard.local_tensor.clone()) for shard in model.shards]
    theirs = torch.optim.AdamW(
        [
            {"params": [copy for copy in copies if copy.dim() > 1], "weight_decay": 1e-3 / 1e-2},
            {"params": [copy for copy in copies if copy.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    for lr in (1e-2, 5e-3, 2e-3):
        before = [copy.detach().clone() for copy in copies]
        for shard, copy in zip(model.shards, copies, strict=True):
            shard.tensor.grad, copy.grad = torch.zeros_like(shard.tensor), torch.zeros_like(copy)
        optimizer.step(lr, squared_grad_norm(model.shards).sqrt(), GOOD)
        for group in theirs.param_groups:
            group["lr"] = lr
        theirs.step()
        for shard, copy, old in zip(model.shards, copies, before, strict=True):
            torch.testing.assert_close(shard.local_tensor, copy.detach(), rtol=1e-13, atol=1e-13)
            if copy.dim() > 1:
                torch.testing.assert_close(copy.detach(), old * (1 - 1e-3 * lr / 1e-2), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("model", "layout", "optimizer"),
    [
        ("dense", "dp=2,shard=full,micro_batch=2", OPTIMIZER),
        ("tied", "tp=2,pp=2,micro_batch=4", OPTIMIZER),
        # The whole first stage is frozen.
        ("dense", "pp=2,micro_batch=2", WITHOUT_FIRST_STAGE),
        pytest.param("olmo3", "pp=2,vp=2,micro_batch=2,schedule=zero_bubble", WITHOUT_FIRST_STAGE),
        pytest.param("moe", "tp=2,dp=2,micro_batch=2,shard=full,recompute=full", WITHOUT_FIRST_STAGE),
        pytest.param("moe", "tp=2,ep=2,micro_batch=4", WITH_MUON, marks=pytest.mark.full),
        pytest.param("dense", "pp=2,micro_batch=2", OPTIMIZER, marks=pytest.mark.full),
        pytest.param("dense", "tp=2,micro_batch=4", WITH_MUON, marks=pytest.mark.full),
    ],
)
def test_a_layout_trains_groups_as_one_process_does(
    small_runs: SmallRuns, model: str, layout: str, optimizer: str
) -> None:
    expected, folder = small_runs.alone(model, optimizer), small_runs.new_folder()
    small_runs.train(folder, model, layout, optimizer, "train.steps=9")
    actual = small_runs.train(folder, model, ALONE, optimizer)
    assert difference(expected, actual, "loss") <= 1e-9
    assert difference(expected, actual, "grad_norm") <= 1e-9
    first, last = state(folder, 9), state(folder, 20)
    assert torch.equal(first["model.embedding.weight"], last["model.embedding.weight"])
    assert not torch.equal(first["model.norm.weight"], last["model.norm.weight"])
    assert not [name for name in last if name.startswith("optimizer.") and name.endswith("embedding.weight")]


def test_the_bias_of_a_frozen_router_stays(small_runs: SmallRuns) -> None:
    folder, bias = small_runs.new_folder(), "model.layers.{}.mlp.router.score_bias"
    groups = "train.optimizer={lr: 3.0e-3, groups: [{match: layers.1.*, freeze: true}]}"
    keys = (groups, "model.config.layers=3", "train.steps=3")
    small_runs.train(folder, "latent", ALONE, *keys)
    last = state(folder, 3)
    assert not last[bias.format(1)].any()
    assert last[bias.format(2)].any()


@pytest.mark.parametrize("precision", ["fp64", "bf16", "fp8"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3"])
def test_a_frozen_tensor_has_no_gradient_and_others_have_the_same(family: str, precision: str) -> None:
    """Also where the products read copies of the weights, which a model without recomputation keeps."""
    config = tiny_config(family, hidden=32, vocab_size=64)
    groups = [
        ParameterGroup.model_validate({"match": match, "freeze": True})
        for match in ("embedding.*", "layers.0.*", "*.attention.out.weight", "*.mlp.experts.*", "head.weight")
    ]
    tokens = token_rows(config, 2, 9)
    results = []
    for frozen in ([], groups):
        model = one_process_model(config, length=8, precision=precision, micro_batch=2, groups=frozen)
        kept: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved, k=kept: (k.append(saved.shape), saved)[1], lambda saved: saved
        ):
            loss = model.stages[0](tokens[:, :-1], tokens[:, 1:])[0]
        loss.backward()
        results.append((gradients(model), len(kept)))
    (expected, kept_for_all), (actual, kept_for_some) = results
    assert {name for name in expected if name not in actual} == {
        name for name in expected if any(fnmatchcase(name, group.match) for group in groups)
    }
    assert actual
    for name, gradient in actual.items():
        assert torch.equal(gradient, expected[name]), name
    assert kept_for_some < kept_for_all


def test_frozen_tensors_are_saved_and_not_counted_as_the_base_of_adapters() -> None:
    config = tiny_config("llama")
    groups = [ParameterGroup.model_validate({"match": "layers.0.*", "freeze": True})]
    frozen = one_process_model(config, length=8, groups=groups)
    assert [shard.name for shard in frozen.shards] == [one.name for one in parameters(config)]
    lora = Lora(rank=2, alpha=4.0)
    adapted = one_process_model(config, length=8, lora=lora, groups=groups)
    assert {shard.name for shard in adapted.shards} == {one.name for one in lora_parameters(config, lora)}
    assert {shard.name for shard in adapted.shards if not shard.tensor.requires_grad} == {
        one.name for one in lora_parameters(config, lora) if one.layer == 0
    }


def problems(*patterns: str, freeze: bool = False) -> list[str]:
    keys = {"freeze": True} if freeze else {"lr_scale": 0.5}
    groups = [ParameterGroup.model_validate({"match": pattern, **keys}) for pattern in patterns]
    names = [parameter.name for parameter in parameters(tiny_config("llama"))]
    return [f"{problem.path}: {problem.what}; {problem.hint}" for problem in group_problems(groups, names)]


def test_a_pattern_without_a_tensor_is_refused_with_the_nearest_names() -> None:
    (problem,) = problems("*.norm.weight", "layers.*.attention.query.weight")
    assert problem.startswith(
        "(1, 'match'): no tensor is called `layers.*.attention.query.weight`; near it: layers.*.attention.q"
    )


def test_a_group_that_an_earlier_one_leaves_nothing_is_refused() -> None:
    assert problems("layers.*", "layers.0.*") == [
        "(1, 'match'): an earlier group has every tensor that is called `layers.0.*`; "
        "put it before that group, or delete it"
    ]


def test_a_model_that_is_frozen_as_a_whole_is_refused() -> None:
    assert problems("*", freeze=True) == ["(): every tensor is frozen: nothing would be trained; leave some out"]


def test_the_bias_of_a_router_can_be_frozen_and_nothing_else() -> None:
    match, name = "*.router.score_bias", "layers.1.mlp.router.score_bias"
    frozen, scaled = (
        list(group_problems([ParameterGroup.model_validate({"match": match, **keys})], ["norm.weight"], [name]))
        for keys in ({"freeze": True}, {"lr_scale": 0.5})
    )
    assert not frozen
    assert [problem.what for problem in scaled] == [
        f"`{match}` moves by `train.moe.bias_update`: it has neither a learning rate nor weight decay"
    ]
