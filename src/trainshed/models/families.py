"""The families as data: how Hugging Face writes each one's config and names its tensors.

`hf_config.py` reads and writes configs by these rows, `hf_tensors.py` finds tensors by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class HfNames:
    """What a family calls its tensors.

    `base` is the prefix of all but the head; checkpoints saved without a head lack it. `layer` is the prefix of a
    layer's. `tensors` goes from our names (without layer and without `.weight` or `.bias`) to theirs: as many as are
    fused in ours, or one where theirs is fused as well. Weights of `transposed` ones are [in, out] (Conv1D).
    """

    base: str
    layer: str
    tensors: Mapping[str, tuple[str, ...]]
    transposed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class HfFamily:
    """How transformers writes one family.

    `keys` are plain translations from our keys, `defaults` what transformers takes where a key is left out (any other
    must be there), `experts` the translations inside `moe` (the first that is there is read).
    """

    architecture: str
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    names: HfNames
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rope_base: float = 10000.0


_ATTENTION = {
    "embedding": ("model.embed_tokens",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
    "attention.norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.query_norm": ("self_attn.q_norm",),
    "attention.key_norm": ("self_attn.k_norm",),
    "attention.out": ("self_attn.o_proj",),
    "mlp.norm": ("post_attention_layernorm",),
}
_DENSE = HfNames(
    "model.",
    "model.layers.{layer}.",
    _ATTENTION | {"mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"), "mlp.down": ("mlp.down_proj",)},
)
_MIXTRAL = HfNames(
    "model.",
    "model.layers.{layer}.",
    _ATTENTION
    | {
        "mlp.router": ("block_sparse_moe.gate",),
        "mlp.experts.gate_up": ("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
        "mlp.experts.down": ("block_sparse_moe.experts.{expert}.w2",),
    },
)
_QWEN_MOE = HfNames(
    "model.",
    "model.layers.{layer}.",
    _ATTENTION
    | {
        "mlp.router": ("mlp.gate",),
        "mlp.experts.gate_up": ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
        "mlp.experts.down": ("mlp.experts.{expert}.down_proj",),
    },
)
_GPT2 = HfNames(
    "transformer.",
    "transformer.h.{layer}.",
    {
        "embedding": ("transformer.wte",),
        "positions": ("transformer.wpe",),
        "norm": ("transformer.ln_f",),
        "head": ("lm_head",),
        "attention.norm": ("ln_1",),
        "attention.qkv": ("attn.c_attn",),
        "attention.out": ("attn.c_proj",),
        "mlp.norm": ("ln_2",),
        "mlp.up": ("mlp.c_fc",),
        "mlp.down": ("mlp.c_proj",),
    },
    transposed=frozenset({"attention.qkv", "attention.out", "mlp.up", "mlp.down"}),
)

_COMMON = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "tied_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
_WITH_EXPERTS = {ours: theirs for ours, theirs in _COMMON.items() if ours != "ffn"}
# The signatures of transformers' configuration classes, 4.40 to 5.22; sizes are always written, so they have none.
_DEFAULTS = {
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
HF_FAMILIES: dict[str, HfFamily] = {
    "llama": HfFamily("LlamaForCausalLM", _COMMON, _DEFAULTS | {"num_key_value_heads": None}, _DENSE),
    "mistral": HfFamily("MistralForCausalLM", _COMMON, _DEFAULTS | {"sliding_window": 4096}, _DENSE),
    "qwen2": HfFamily("Qwen2ForCausalLM", _COMMON, _DEFAULTS, _DENSE),
    "qwen3": HfFamily("Qwen3ForCausalLM", _COMMON, _DEFAULTS | {"head_dim": 128}, _DENSE),
    "mixtral": HfFamily(
        "MixtralForCausalLM",
        _WITH_EXPERTS,
        _DEFAULTS | {"rms_norm_eps": 1e-5, "sliding_window": None},
        _MIXTRAL,
        {"experts": ("num_local_experts",), "top_k": ("num_experts_per_tok",), "ffn": ("intermediate_size",)},
        rope_base=1e6,
    ),
    "qwen3_moe": HfFamily(
        "Qwen3MoeForCausalLM",
        _WITH_EXPERTS,
        _DEFAULTS | {"norm_topk_prob": False},
        _QWEN_MOE,
        {
            # transformers 4 writes the first, 5 the second.
            "experts": ("num_experts", "num_local_experts"),
            "top_k": ("num_experts_per_tok",),
            "ffn": ("moe_intermediate_size",),
            "normalize_top_k": ("norm_topk_prob",),
        },
    ),
    "gpt2": HfFamily(
        "GPT2LMHeadModel",
        {
            "layers": "n_layer",
            "hidden": "n_embd",
            "heads": "n_head",
            "ffn": "n_inner",
            "vocab_size": "vocab_size",
            "max_positions": "n_positions",
            "norm_eps": "layer_norm_epsilon",
            "activation": "activation_function",
            "tied_embeddings": "tie_word_embeddings",
            "init_std": "initializer_range",
        },
        {
            "n_inner": None,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
        },
        _GPT2,
    ),
}
