"""What Hugging Face's families call their tensors, and how they lay them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class HfTensorNames:
    """What a family calls its tensors.

    `base` is the prefix of all tensors but the head; checkpoints saved without a head lack it. `layer` is the prefix of
    a layer's tensors. `tensors` maps our names (without layer and without `.weight` or `.bias`) to theirs: several if
    only ours is fused, one if theirs is fused as well. Weights of `transposed` tensors are [in, out] (Conv1D).
    `endings` are their words for what is neither `.weight` nor `.bias`.

    `stacked` tensors hold all experts of a layer, as ours do, and their names have no ending. In `alternating` ones
    rows of gate and up alternate, as ours do. `says_transposed`: transformers' module says that they are [in, out].
    """

    base: str
    layer: str
    tensors: Mapping[str, tuple[str, ...]]
    transposed: frozenset[str] = frozenset()
    endings: Mapping[str, str] = field(default_factory=dict)
    stacked: frozenset[str] = frozenset()
    alternating: frozenset[str] = frozenset()
    says_transposed: bool = True


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
DENSE_NAMES = HfTensorNames(
    "model.",
    "model.layers.{layer}.",
    _ATTENTION | {"mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"), "mlp.down": ("mlp.down_proj",)},
)
_POST_NORMS = {
    "attention.post_norm": ("post_attention_layernorm",),
    "mlp.post_norm": ("post_feedforward_layernorm",),
}
OLMO2_NAMES = HfTensorNames(
    DENSE_NAMES.base,
    DENSE_NAMES.layer,
    {name: theirs for name, theirs in DENSE_NAMES.tensors.items() if name not in ("attention.norm", "mlp.norm")}
    | _POST_NORMS,
)
GEMMA_NAMES = HfTensorNames(
    DENSE_NAMES.base,
    DENSE_NAMES.layer,
    dict(DENSE_NAMES.tensors) | _POST_NORMS | {"mlp.norm": ("pre_feedforward_layernorm",)},
)
PHI3_NAMES = HfTensorNames(
    DENSE_NAMES.base,
    DENSE_NAMES.layer,
    dict(DENSE_NAMES.tensors) | {"attention.qkv": ("self_attn.qkv_proj",), "mlp.gate_up": ("mlp.gate_up_proj",)},
)
NEMOTRON_NAMES = HfTensorNames(
    DENSE_NAMES.base, DENSE_NAMES.layer, dict(DENSE_NAMES.tensors) | {"mlp.up": ("mlp.up_proj",)}
)
MIXTRAL_NAMES = HfTensorNames(
    "model.",
    "model.layers.{layer}.",
    _ATTENTION
    | {
        "mlp.router": ("block_sparse_moe.gate",),
        "mlp.experts.gate_up": ("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
        "mlp.experts.down": ("block_sparse_moe.experts.{expert}.w2",),
    },
)
QWEN_MOE_NAMES = HfTensorNames(
    "model.",
    "model.layers.{layer}.",
    _ATTENTION
    | {
        "mlp.router": ("mlp.gate",),
        "mlp.experts.gate_up": ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
        "mlp.experts.down": ("mlp.experts.{expert}.down_proj",),
    },
)
DEEPSEEK_NAMES = HfTensorNames(
    "model.",
    "model.layers.{layer}.",
    {
        **QWEN_MOE_NAMES.tensors,
        "attention.q": ("self_attn.q_proj",),
        "attention.q_down": ("self_attn.q_a_proj",),
        "attention.q_norm": ("self_attn.q_a_layernorm",),
        "attention.q_up": ("self_attn.q_b_proj",),
        "attention.kv_down": ("self_attn.kv_a_proj_with_mqa",),
        "attention.kv_norm": ("self_attn.kv_a_layernorm",),
        "attention.kv_up": ("self_attn.kv_b_proj",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
        "mlp.shared.gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        "mlp.shared.down": ("mlp.shared_experts.down_proj",),
        "mtp.embedding_norm": ("enorm",),
        "mtp.hidden_norm": ("hnorm",),
        "mtp.projection": ("eh_proj",),
        "mtp.norm": ("shared_head.norm",),
    },
    endings={"score_bias": "e_score_correction_bias"},
)
GPT_OSS_NAMES = HfTensorNames(
    "model.",
    "model.layers.{layer}.",
    {
        **_ATTENTION,
        "attention": ("self_attn",),
        "mlp.router": ("mlp.router",),
        "mlp.experts.gate_up": ("mlp.experts.gate_up_proj",),
        "mlp.experts.gate_up_bias": ("mlp.experts.gate_up_proj_bias",),
        "mlp.experts.down": ("mlp.experts.down_proj",),
        "mlp.experts.down_bias": ("mlp.experts.down_proj_bias",),
    },
    transposed=frozenset({"mlp.experts.gate_up", "mlp.experts.down"}),
    stacked=frozenset({"mlp.experts.gate_up", "mlp.experts.gate_up_bias", "mlp.experts.down", "mlp.experts.down_bias"}),
    alternating=frozenset({"mlp.experts.gate_up", "mlp.experts.gate_up_bias"}),
)
LLAMA4_NAMES = HfTensorNames(
    "model.",
    "model.layers.{layer}.",
    {
        **_ATTENTION,
        "mlp.gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
        "mlp.down": ("feed_forward.down_proj",),
        "mlp.router": ("feed_forward.router",),
        "mlp.experts.gate_up": ("feed_forward.experts.gate_up_proj",),
        "mlp.experts.down": ("feed_forward.experts.down_proj",),
        "mlp.shared.gate_up": ("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
        "mlp.shared.down": ("feed_forward.shared_expert.down_proj",),
    },
    transposed=frozenset({"mlp.experts.gate_up", "mlp.experts.down"}),
    stacked=frozenset({"mlp.experts.gate_up", "mlp.experts.down"}),
    says_transposed=False,
)
GPT2_NAMES = HfTensorNames(
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
