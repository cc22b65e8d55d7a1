"""What `train.lora` asks for and an architecture or a layout cannot do is refused by its key."""

from __future__ import annotations

from typing import Any

import pytest

from trainshed.errors import RecipeError
from trainshed.plan import resolve_layout
from trainshed.recipe import Layout, Lora, ModelConfig, Recipe, parse_recipe
from trainshed.recipe.train import lora_problems
from trainshed.workflow.runnable import check_layout

SIZES: dict[str, Any] = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "vocab_size": 96, "max_positions": 64}
ROPE = {"rope": {"base": 10000.0}}
MOE = {"experts": 4, "top_k": 2, "ffn": 24}
LLAMA = ModelConfig.model_validate({"family": "llama", **SIZES, **ROPE, "ffn": 256})
MIXTRAL = ModelConfig.model_validate({"family": "mixtral", **SIZES, **ROPE, "moe": MOE})
SHARED = ModelConfig.model_validate({"family": "mixtral", **SIZES, **ROPE, "moe": MOE | {"shared_ffn": 32}})
GPT2 = ModelConfig.model_validate({"family": "gpt2", **SIZES, "kv_heads": 4, "ffn": 200})


def problems(config: ModelConfig, **options: Any) -> dict[str, str]:
    lora = Lora.model_validate({"rank": 4, "alpha": 8, **options})
    return {".".join(map(str, problem.path)): problem.what for problem in lora_problems(lora, config)}


@pytest.mark.parametrize(
    ("config", "options", "key", "what"),
    [
        (LLAMA, {"targets": ["experts"]}, "targets", "the model has no `experts`"),
        (GPT2, {"targets": ["q_proj", "gate_proj"]}, "targets", "the model has no `gate_proj`"),
        (MIXTRAL, {"targets": ["mlp"]}, "targets", "the model has no `mlp`"),
        (MIXTRAL, {"targets": ["up_proj"]}, "targets", "the model has no `up_proj`"),
        (MIXTRAL, {"targets": ["all-linear"], "dora": True}, "dora", "adapters of experts have no `dora`"),
        (SHARED, {"targets": ["experts"], "dropout": 0.1}, "dropout", "adapters of experts have no `dropout`"),
        (SHARED, {"quantize": "int8"}, "quantize", "weights of experts are not held in fewer bits"),
        (GPT2, {"quantize": "nf4"}, "quantize", "nf4 has blocks of 64 columns, which do not divide 200"),
    ],
)
def test_what_an_architecture_cannot_do(config: ModelConfig, options: dict[str, Any], key: str, what: str) -> None:
    refused = problems(config, **options)
    assert list(refused) == [key]
    assert what in refused[key]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (LLAMA, {"targets": ["all-linear"], "dora": True, "dropout": 0.1, "quantize": "nf4"}),
        (GPT2, {"targets": ["all-linear"], "quantize": "int8"}),
        (MIXTRAL, {"targets": ["attn"], "dora": True}),
        (MIXTRAL, {"targets": ["all-linear"]}),
        (SHARED, {"targets": ["mlp"], "dropout": 0.1}),
    ],
)
def test_what_it_can_do_passes(config: ModelConfig, options: dict[str, Any]) -> None:
    assert problems(config, **options) == {}


def adapted(quantize: str, layout: str = "{tp: 1}") -> Recipe:
    return parse_recipe(f"""
name: adapted
model: {{config: {LLAMA.model_dump_json(by_alias=True, exclude_none=True)}, from: /weights}}
data: {{synthetic: true, sequence_length: 64}}
train: {{steps: 2, global_batch: 8, optimizer: {{lr: 1.0e-3}}, lora: {{rank: 4, alpha: 8, quantize: {quantize}}}}}
layout: {layout}
""")


@pytest.mark.parametrize(
    ("quantize", "layout", "where", "what"),
    [
        ("nf4", {"tp": 4}, "layout.tp", "tp: 4 cuts blocks of 64 columns"),
    ],
)
def test_what_a_layout_cannot_do(quantize: str, layout: dict[str, Any], where: str, what: str) -> None:
    with pytest.raises(RecipeError, match=what) as caught:
        check_layout(adapted(quantize), LLAMA, resolve_layout(Layout.model_validate(layout), LLAMA))
    assert where in str(caught.value)


@pytest.mark.parametrize(
    ("quantize", "layout"),
    [
        ("int8", {"dp": 2}),
        ("int8", {"tp": 2, "shard": "full"}),
        ("nf4", {"tp": 2}),
        ("nf4", {"dp": 4, "shard": "none"}),
    ],
)
def test_what_it_can_do_passes_too(quantize: str, layout: dict[str, Any]) -> None:
    check_layout(adapted(quantize), LLAMA, resolve_layout(Layout.model_validate(layout), LLAMA))


def test_a_recipe_says_it_with_its_line() -> None:
    with pytest.raises(RecipeError, match="the model has no `experts`") as caught:
        parse_recipe(
            """
name: adapted
model: {preset: llama3-8b, from: /weights}
data: {synthetic: true, sequence_length: 64}
train: {steps: 2, global_batch: 8, optimizer: {lr: 1.0e-3}, lora: {rank: 4, alpha: 8, targets: [experts]}}
""".replace("preset: llama3-8b", f"config: {LLAMA.model_dump_json(by_alias=True, exclude_none=True)}")
        )
    assert "train.lora.targets" in str(caught.value)
