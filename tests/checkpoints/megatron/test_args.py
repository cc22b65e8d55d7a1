"""The arguments that travel with the weights: an architecture comes back as it went, or is refused by name."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from support.models.megatron_folders import LLAMA3
from support.models.tiny_models import MEGATRON_VARIANTS, tiny_config
from trainshed.checkpoints.megatron.args import FAMILY_ARG, MegatronLayout, read_args, read_layout, to_args
from trainshed.errors import InputError
from trainshed.recipe import ModelConfig


def args_of(config: ModelConfig, layout: MegatronLayout = MegatronLayout()) -> Namespace:  # noqa: B008 (it is frozen)
    return to_args(
        config,
        layout=layout,
        spec="te",
        experts="grouped",
        dtype=torch.bfloat16,
        padded_vocab_size=128,
        vocab_divisible_by=128,
        checkpoint_format="torch_dist",
    )


@pytest.mark.parametrize("variant", MEGATRON_VARIANTS)
def test_an_architecture_comes_back_as_it_went(variant: str) -> None:
    config = tiny_config(variant, init_std=0.01, **(LLAMA3 if variant == "llama3" else {}))
    args = args_of(config, MegatronLayout(4, 2, 1, 2, 1))
    assert read_args(args, "here") == config
    assert read_layout(args) == MegatronLayout(4, 2, 1, 2, 1)
    # Of a checkpoint that others wrote, the family is seen in how it is put together.
    delattr(args, FAMILY_ARG)
    seen = "llama" if variant == "phi3" else config.family  # which turns whole heads, and so is put together alike
    assert read_args(args, "here") == config.model_copy(update={"family": seen})


def test_all_that_megatron_does_otherwise_in_latent_attention_is_refused_at_once() -> None:
    with pytest.raises(InputError) as caught:
        args_of(tiny_config("deepseek_v3"))
    for key in ("original_positions: 16", "beta_fast: 8", "beta_slow: 0.5"):
        assert f"`rope.scaling.{key}`" in str(caught.value)
    assert "`moe.top_k: 3, top_groups: 2`" in str(caught.value)
    assert "it chooses groups by their 1 best experts" in str(caught.value)
    with pytest.raises(InputError) as caught:
        args_of(tiny_config("deepseek-plain"))
    for key in ("mla.rope_interleaved: false", "moe.scores: sigmoid, normalize_top_k: false", "norm_eps: 0.001, with"):
        assert f"`{key}" in str(caught.value)


def test_latent_attention_and_its_routers_are_said_in_megatrons_words() -> None:
    args = args_of(tiny_config("deepseek-megatron"))
    assert (args.multi_latent_attention, args.qk_layernorm, args.kv_channels) == (True, True, 5)
    assert (args.q_lora_rank, args.kv_lora_rank, args.qk_head_dim, args.qk_pos_emb_head_dim) == (12, 10, 6, 8)
    assert (args.rope_type, args.rotary_scaling_factor, args.mscale, args.mscale_all_dim) == ("yarn", 4.0, 1.0, 0.7)
    assert (args.ffn_hidden_size, args.moe_ffn_hidden_size, args.moe_layer_freq) == (48, 12, [0, 1, 1])
    assert (args.moe_router_num_groups, args.moe_router_group_topk, args.moe_router_topk_scaling_factor) == (4, 2, 2.5)
    plain = args_of(tiny_config("moonlight-megatron"))
    assert (plain.rope_type, plain.rotary_scaling_factor, plain.q_lora_rank) == ("rope", 1.0, None)
    assert (plain.moe_router_num_groups, plain.moe_router_group_topk) == (None, None)


def test_yarn_of_versions_before_0_14_stretches_from_the_longest_text_on() -> None:
    args = args_of(tiny_config("deepseek-megatron"))
    del args.rope_type
    rope = read_args(args, "here").rope
    assert rope is not None
    assert rope.scaling is not None
    assert rope.scaling.original_positions == 16384
    args.rotary_scaling_factor = 1.0
    rope = read_args(args, "here").rope
    assert rope is not None
    assert rope.scaling is None


@pytest.mark.parametrize("pattern", ["([0]*1+[1]*2)", "[0]+[1]*2", [0, 1, 1]])
def test_a_pattern_of_layers_is_read_as_megatron_evaluates_it(pattern: Any) -> None:
    args = args_of(tiny_config("deepseek-megatron"))
    args.moe_layer_freq = pattern
    assert read_args(args, "here") == tiny_config("deepseek-megatron")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"moe_router_score_function": "softmax"}, "nothing for `moe_router_score_function: softmax`"),
        ({"qk_layernorm": False}, "nothing for `qk_layernorm: False`"),
        ({"mla_down_proj_fusion": True}, "nothing for `mla_down_proj_fusion: True`"),
        ({"use_rope_scaling": True}, "nothing for `use_rope_scaling: True`"),
        ({"moe_layer_freq": "[1]+[0]*2"}, "gives some layers no experts"),
        ({"moe_layer_freq": "[1]*9999*9999*9999"}, "gives some layers no experts"),
        ({"moe_layer_freq": "__import__('os').name"}, "gives some layers no experts"),
        ({"moe_layer_freq": 2}, "gives some layers no experts"),
        ({"moe_router_topk": 6}, "chosen by their 3 best experts"),
        ({"mscale": 0.7, "mscale_all_dim": 0.0}, "is not that of a model here"),
        ({"rope_type": "rope"}, "stretches no position and makes scores grow"),
    ],
)
def test_latent_attention_that_the_decoder_has_nothing_for_is_named(changes: dict[str, Any], match: str) -> None:
    args = Namespace(**(vars(args_of(tiny_config("deepseek-megatron"))) | changes))
    with pytest.raises(InputError, match=match):
        read_args(args, "here")


def test_the_switches_of_llama_3_1_are_megatrons_own() -> None:
    args = args_of(tiny_config("llama3", **LLAMA3))
    assert args.use_rope_scaling
    assert args.rope_scaling_factor == 8.0
    assert (args.rotary_base, type(args.rotary_base)) == (500000, int)
    assert not args.untie_embeddings_and_output_weights
    assert args.params_dtype == torch.bfloat16


@pytest.mark.parametrize("other", ["norm_epsilon", "layernorm_epsilon"])
def test_the_epsilon_is_read_by_the_name_that_a_version_has_for_it(other: str) -> None:
    config = tiny_config("llama", norm_eps=3e-6)
    args = args_of(config)
    delattr(args, other)  # Megatron has one of them: until 0.16 the first, then the second
    assert read_args(args, "here").norm_eps == 3e-6


def test_a_null_tokenizer_counts_its_end_of_document_until_0_18() -> None:
    args = args_of(tiny_config("llama"))
    args.tokenizer_type = "NullTokenizer"
    assert read_args(args, "here").vocab_size == args.vocab_size + 1
    args.null_tokenizer_eod_id = None
    assert read_args(args, "here").vocab_size == args.vocab_size


def test_a_window_of_megatron_does_not_count_the_token_itself() -> None:
    assert args_of(tiny_config("mistral")).window_size == (7, 0)


@pytest.mark.parametrize(
    ("variant", "changes", "match"),
    [
        ("llama3", {}, "`rope.scaling.original_positions: 32` has no argument"),
        ("llama", {"rope": {"base": 10000.5}}, "`rope.base: 10000.5` has no argument"),
        ("llama", {"activation": "gelu"}, "`activation: gelu, gated: true` has no argument"),
        ("gpt2", {"activation": "relu"}, "`activation: relu` has no argument"),
        ("olmo2", {}, "`norm_placement: post`, `qk_norm_span: projection` has no argument"),
        ("gemma3_text", {}, "`zero_centered_norms: true`, `scaled_embeddings: true`, `attention_pattern`"),
        ("gemma2", {}, "`attention_soft_cap: 2.0`, `logit_soft_cap: 3.0`"),
        ("nemotron", {}, "`zero_centered_norms: true` has no argument"),
        ("llama-yarn", {}, "`rope.scaling.kind: yarn`"),
        ("llama-biases", {}, "`qkv_bias: true`, `output_bias: true`, `mlp_bias: true`"),
        ("mixtral", {"moe": {"experts": 4, "top_k": 1, "ffn": 8}}, "top_k: 1, normalize_top_k: true"),
        (
            "mixtral",
            {"moe": {"experts": 4, "top_k": 2, "ffn": 8, "scores": "sigmoid", "scale": 2.0}},
            "`moe.scores: sigmoid`, `moe.scale: 2.0`",
        ),
        (
            "moonlight-megatron",
            {"rope": {"base": 1e4, "scaling": {"kind": "linear", "factor": 2.0}}},
            "`rope.scaling.kind: linear` has no argument",
        ),
        (
            "deepseek-megatron",
            {"rope": {"base": 1e4, "scaling": {"kind": "yarn", "factor": 1.0, "original_positions": 4096}}},
            "`rope.scaling.factor: 1` has no argument",
        ),
        ("moonlight-megatron", {"norm_eps": 1e-7}, "`norm_eps: 1e-07, with 1e-06 in the norms of latents`"),
    ],
)
def test_what_megatron_cannot_be_told_is_named(variant: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        args_of(tiny_config(variant, **changes))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"multi_latent_attention": True, "squared_relu": True}, "nothing for `squared_relu: True`, `qk_layernorm"),
        ({"moe_router_score_function": "sigmoid"}, "nothing for `moe_router_score_function: sigmoid`"),
        ({"num_experts": 4, "moe_router_topk": 2, "moe_layer_freq": [0, 1]}, "gives some layers no experts"),
        ({"position_embedding_type": "none"}, "`position_embedding_type: none` is not known"),
        (
            {"normalization": "LayerNorm", "trainshed_family": None},
            "no family here is put together like this: norm: layer",
        ),
        ({"num_layers": None}, "its args have no `num_layers`"),
        ({"window_size": (8, 8)}, "looks ahead"),
    ],
)
def test_arguments_that_the_decoder_has_nothing_for_are_named(changes: dict[str, Any], match: str) -> None:
    args = Namespace(**(vars(args_of(tiny_config("llama"))) | changes))
    with pytest.raises(InputError, match=match):
        read_args(args, "here")


def test_the_tokenizer_that_counts_its_last_token_apart() -> None:
    args = args_of(tiny_config("llama"))
    args.tokenizer_type = "NullTokenizer"
    assert read_args(args, "here").vocab_size == 97
