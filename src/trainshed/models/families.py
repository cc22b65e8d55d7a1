"""Hugging Face's model families: one row of data for each, and `config.json` read and written by these rows.

A row says how a family writes its config and names its tensors; `hf_tensors.py` finds tensors by it. No key of a
config is ignored in silence: it is read, or it is known not to change the model's result, or it is switched off.
Otherwise it is an error that names it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trainshed.errors import InputError
from trainshed.models.hf_attention import HfAttentionReader, WindowStyle, as_json, write_rope, write_windows
from trainshed.models.hf_family_keys import HARMLESS_KEYS, MTP_KEYS, deepseek_keys, float8_keys, llama4_keys, text_part
from trainshed.models.hf_names import (
    DEEPSEEK_NAMES,
    DENSE_NAMES,
    GEMMA_NAMES,
    GPT2_NAMES,
    GPT_OSS_NAMES,
    LLAMA4_NAMES,
    MIXTRAL_NAMES,
    NEMOTRON_NAMES,
    OLMO2_NAMES,
    PHI3_NAMES,
    QWEN_MOE_NAMES,
    HfTensorNames,
)
from trainshed.plugins import Registry
from trainshed.recipe import ModelConfig
from trainshed.recipe.model import FamilyName, family_decoder, fixed_by_family
from trainshed.recipe.validation import validate
from trainshed.recipe.yaml_io import KeyPath, SourceMap, SourcePosition, YamlDocument


@dataclass(frozen=True)
class HfFamily:
    """How transformers writes one family.

    `keys` maps our keys to theirs. `defaults` is what transformers uses if a key is left out; any other key must be
    present. `experts` maps the keys inside `moe`; the first name that is present is read.
    """

    architecture: str
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    names: HfTensorNames
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The switches for biases of a family that has any, and which of ours each is; left out, there are none."""
    latent: Mapping[str, str] = field(default_factory=dict)
    """The keys inside `mla`, of a family with latent attention."""
    rope_base: float = 10000.0
    local_rope_base: float | Literal["base"] | None = None
    """Of layers with a window, if they have a rotary table of their own, which is never stretched."""
    rope_fraction: float | None = None
    """Which part of a head is turned if the config does not say; None: all of it, and the config has no say."""
    refused_rope_kinds: tuple[str, ...] = ("longrope",)
    """Kinds of stretching that this family does not have."""
    rope_kind_names: Mapping[str, str] = field(default_factory=dict)
    """Other names of kinds of stretching in this family."""
    default_scaling: Mapping[str, Any] = field(default_factory=dict)
    """How transformers stretches positions if the config says nothing of it, in its own words."""
    window_style: WindowStyle = "none"
    full_attention_every: int = 1
    """With `layer_types` left out, one layer in this many has no window."""
    asks_window_layers: bool = True
    """Whether the first `max_window_layers` have no window, where windows are switched."""
    unread: frozenset[str] = frozenset()
    """Keys that stand in published configs and that no layer of this family reads."""
    decoder: FamilyName = "llama"
    """Of a family that a plugin registers: the built-in one whose decoder it has, and whose config it writes."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Of such a family: keys of `model.config` that it fixes otherwise than that one (`qkv_bias`, `qk_norm`)."""
    filled_in: Mapping[str, Any] = field(default_factory=dict)
    """Of such a family: keys of `model.config` that it gives another default (`norm_eps`, `tied_embeddings`)."""


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
_ATTENTION_BIAS = {"attention_bias": ("qkv_bias", "output_bias")}
_BIASES = {**_ATTENTION_BIAS, "mlp_bias": ("mlp_bias",)}
_WITH_EXPERTS = {native_key: hf_key for native_key, hf_key in _COMMON.items() if native_key != "ffn"}
# The signatures of transformers' configuration classes, 4.40 to 5.22; sizes are always written, so they have none.
_DEFAULTS = {
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
_GEMMA_KEYS = _COMMON | {
    "activation": "hidden_activation",
    "query_scalar": "query_pre_attn_scalar",
    "logit_soft_cap": "final_logit_softcapping",
}
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "query_pre_attn_scalar": 256,
    "final_logit_softcapping": None,
    "sliding_window": 4096,
}
_BUILT_IN_FAMILIES: dict[str, HfFamily] = {
    "llama": HfFamily(
        "LlamaForCausalLM",
        _COMMON,
        _DEFAULTS | {"num_key_value_heads": None},
        DENSE_NAMES,
        biases=_BIASES,
        unread=frozenset({"is_llama_config"}),  # nanotron's word for the family, in SmolLM
    ),
    "mistral": HfFamily(
        "MistralForCausalLM", _COMMON, _DEFAULTS | {"sliding_window": 4096}, DENSE_NAMES, window_style="all"
    ),
    "qwen2": HfFamily("Qwen2ForCausalLM", _COMMON, _DEFAULTS, DENSE_NAMES, window_style="switched"),
    "qwen3": HfFamily(
        "Qwen3ForCausalLM",
        _COMMON,
        _DEFAULTS | {"head_dim": 128},
        DENSE_NAMES,
        biases=_ATTENTION_BIAS,
        window_style="switched",
    ),
    "olmo2": HfFamily(
        "Olmo2ForCausalLM",
        _COMMON,
        _DEFAULTS | {"rms_norm_eps": 1e-5, "num_key_value_heads": None},
        OLMO2_NAMES,
        biases=_ATTENTION_BIAS,
    ),
    "olmo3": HfFamily(
        "Olmo3ForCausalLM",
        _COMMON,
        _DEFAULTS | {"rms_norm_eps": 1e-5, "num_key_value_heads": None, "sliding_window": 4096},
        OLMO2_NAMES,
        biases=_ATTENTION_BIAS,
        local_rope_base="base",
        window_style="pattern",
        full_attention_every=4,
    ),
    "gemma2": HfFamily(
        "Gemma2ForCausalLM",
        _GEMMA_KEYS | {"attention_soft_cap": "attn_logit_softcapping"},
        _GEMMA_DEFAULTS | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        GEMMA_NAMES,
        biases=_ATTENTION_BIAS,
        window_style="pattern",
        full_attention_every=2,
        # The window stands twice in the 9B and 27B; transformers reads `sliding_window`.
        unread=frozenset({"hidden_act", "cache_implementation", "sliding_window_size"}),
    ),
    "gemma3_text": HfFamily(
        "Gemma3ForCausalLM",
        _GEMMA_KEYS,
        _GEMMA_DEFAULTS,
        GEMMA_NAMES,
        biases=_ATTENTION_BIAS,
        rope_base=1e6,
        local_rope_base=10000.0,
        window_style="pattern",
        full_attention_every=6,
        unread=frozenset({"cache_implementation"}),
    ),
    "phi3": HfFamily(
        "Phi3ForCausalLM",
        _COMMON,
        _DEFAULTS | {"rms_norm_eps": 1e-5, "num_key_value_heads": None, "sliding_window": None},
        PHI3_NAMES,
        rope_fraction=1.0,
        refused_rope_kinds=("yarn", "linear", "llama3"),
        # What Phi-3's first configs wrote; transformers takes both for `longrope`.
        rope_kind_names={"su": "longrope", "yarn": "longrope"},
        window_style="all",
        # Phi-3's and Phi-4-mini's configs name code of their own (`auto_map`), older than the family in transformers;
        # no layer there reads Phi-4-mini's other two.
        unread=frozenset({"original_max_position_embeddings", "auto_map", "full_attn_mod", "interpolate_factor"}),
    ),
    "nemotron": HfFamily(
        "NemotronForCausalLM",
        _COMMON | {"norm_eps": "norm_eps"},
        {
            "head_dim": None,
            "num_key_value_heads": None,
            "norm_eps": 1e-5,
            "hidden_act": "relu2",
            "tie_word_embeddings": False,
            "initializer_range": 0.0134,
        },
        NEMOTRON_NAMES,
        biases=_BIASES,
        rope_fraction=0.5,
    ),
    "mixtral": HfFamily(
        "MixtralForCausalLM",
        _WITH_EXPERTS,
        _DEFAULTS | {"rms_norm_eps": 1e-5, "sliding_window": None},
        MIXTRAL_NAMES,
        {"experts": ("num_local_experts",), "top_k": ("num_experts_per_tok",), "ffn": ("intermediate_size",)},
        rope_base=1e6,
        window_style="all",
    ),
    "qwen3_moe": HfFamily(
        "Qwen3MoeForCausalLM",
        _WITH_EXPERTS,
        _DEFAULTS | {"norm_topk_prob": False},
        QWEN_MOE_NAMES,
        {
            # transformers 4 writes the first, 5 the second.
            "experts": ("num_experts", "num_local_experts"),
            "top_k": ("num_experts_per_tok",),
            "ffn": ("moe_intermediate_size",),
            "normalize_top_k": ("norm_topk_prob",),
        },
        biases=_ATTENTION_BIAS,
        window_style="switched",
        asks_window_layers=False,
        unread=frozenset({"use_qk_norm"}),  # true in Qwen3-Coder; the family always has the norm
    ),
    "deepseek_v3": HfFamily(
        "DeepseekV3ForCausalLM",
        {key: name for key, name in _COMMON.items() if key not in ("kv_heads", "head_dim")},
        _DEFAULTS
        | {
            "rms_norm_eps": 1e-6,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "q_lora_rank": 1536,
            "n_group": 8,
            "topk_group": 4,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "rope_interleave": True,
        },
        DEEPSEEK_NAMES,
        {
            "experts": ("n_routed_experts", "num_local_experts"),
            "top_k": ("num_experts_per_tok",),
            "ffn": ("moe_intermediate_size",),
            "normalize_top_k": ("norm_topk_prob",),
            "groups": ("n_group",),
            "top_groups": ("topk_group",),
            "scale": ("routed_scaling_factor",),
            "dense_first": ("first_k_dense_replace",),
        },
        latent={
            "query_rank": "q_lora_rank",
            "kv_rank": "kv_lora_rank",
            "nope_dim": "qk_nope_head_dim",
            "rope_dim": "qk_rope_head_dim",
            "value_dim": "v_head_dim",
            "rope_interleaved": "rope_interleave",
        },
    ),
    "gpt_oss": HfFamily(
        "GptOssForCausalLM",
        {key: name for key, name in _WITH_EXPERTS.items() if key != "activation"}
        | {"swiglu_alpha": "swiglu_alpha", "swiglu_limit": "swiglu_limit"},
        _DEFAULTS
        | {
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "sliding_window": 128,
            "num_experts_per_tok": 4,
        },
        GPT_OSS_NAMES,
        {
            "experts": ("num_local_experts", "num_experts"),
            "top_k": ("num_experts_per_tok",),
            "ffn": ("intermediate_size",),
        },
        rope_base=150000.0,
        default_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        window_style="pattern",
        full_attention_every=2,
        unread=frozenset({"hidden_act", "initial_context_length", "experts_per_token"}),
    ),
    "llama4_text": HfFamily(
        "Llama4ForCausalLM",
        {key: name for key, name in _COMMON.items() if key != "ffn"} | {"qk_l2_norm": "use_qk_norm"},
        _DEFAULTS
        | {
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "use_qk_norm": True,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 16384,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        LLAMA4_NAMES,
        {
            "experts": ("num_local_experts", "num_experts"),
            "top_k": ("num_experts_per_tok",),
            "ffn": ("intermediate_size",),
            "every": ("interleave_moe_layer_step",),
        },
        rope_base=500000.0,
        window_style="chunked",
        unread=frozenset({"cache_implementation"}),
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
        GPT2_NAMES,
        unread=frozenset({"output_past", "predict_special_tokens"}),  # of transformers before 3
    ),
}


HF_FAMILIES: Registry[HfFamily] = Registry("model family", _BUILT_IN_FAMILIES)
"""By transformers' `model_type`, which is also the name of the family in a recipe."""

# Families that are not here, by the beginning of their `model_type`, and what is nearest to them.
_NEAREST_FAMILY = {
    "gemma3n": "gemma3_text",
    "gemma": "gemma2",
    "phi": "phi3",
    "olmo": "olmo2",
    "nemotron": "nemotron",
    "gpt": "gpt2",
    "qwen3": "qwen3",
    "qwen": "qwen2",
    "mixtral": "mixtral",
    "ministral": "mistral",
    "deepseek_v2": "deepseek_v3",
    "llama4": "llama4_text",
    "llama": "llama",
    "smollm": "llama",
    "granite": "llama",
    "yi": "llama",
}

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
# Keys with one value that is ours; left out, transformers takes that value too.
_ONLY_VALUE = {"scale_attn_weights": True, "is_causal": True, "decoder_sparse_step": 1, "partial_rotary_factor": 1.0}
_UNREAD_HINT = (
    "no key of a config is ignored: if this one changes nothing, take it out of a copy of config.json; "
    "if the architecture is known to fit, write it out under `model.config` in the recipe"
)


def read_hf_config(config: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the architecture a parsed `config.json` describes; `where` is its address, for errors."""
    reader = _ConfigReader(config, where)
    architecture = reader.architecture()
    reader.check_unread_keys()
    source_map = SourceMap(
        where, keys={path: SourcePosition(f"{where}, {key}") for path, key in reader.key_locations.items()}
    )
    return validate(ModelConfig, YamlDocument(architecture, source_map))


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return the `config.json` of an architecture, as transformers 4 and 5 read it.

    Raises `InputError` if Hugging Face's family cannot express a part of it.
    """
    family = HF_FAMILIES[config.family]
    written: dict[str, Any] = {"architectures": [family.architecture], "model_type": config.family}
    written |= {hf_key: getattr(config, native_key) for native_key, hf_key in family.keys.items()}
    if "activation" in family.keys:
        written[family.keys["activation"]] = _activation_name(config)
    if "query_scalar" in family.keys:
        written[family.keys["query_scalar"]] = config.query_scalar or config.head_dim
    written |= {hf_key: getattr(config, native_keys[0]) for hf_key, native_keys in _bias_switches(config.family)}
    decoder = family_decoder(config.family)
    if config.rope is not None:
        written |= write_rope(config, HF_FAMILIES[decoder]) | write_windows(config, HF_FAMILIES[decoder])
    if config.moe is not None:
        written |= {hf_key[0]: getattr(config.moe, native_key) for native_key, hf_key in family.experts.items()}
    if decoder == "deepseek_v3":
        written |= deepseek_keys(config, family.latent)
    if decoder == "llama4_text":
        written |= llama4_keys(config)
    if decoder == "gpt_oss":
        written |= {"attention_bias": True, "hidden_act": "silu"}
    if decoder == "qwen3_moe" and config.moe is not None:
        # Read by no layer; the published models have this product here.
        written["intermediate_size"] = config.moe.ffn * config.moe.top_k
        written |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    # The tensors say how many layers multi-token prediction has.
    back = read_hf_config(written, "config.json").with_mtp_layers(config.mtp_layers)
    meant = config
    if config.rope is not None and config.rope.scaling is None and config.rope.local_base == config.rope.base:
        # Layers with a window turn as all others do, and a config that is read does not say it.
        meant = config.model_copy(update={"rope": config.rope.model_copy(update={"local_base": None})})
    lost = [key for key in ModelConfig.model_fields if getattr(back, key) != getattr(meant, key)]
    if lost:
        shown = ", ".join(f"`{key}: {getattr(config, key)}`" for key in lost)
        raise InputError(
            f"Hugging Face's {config.family} cannot be told {shown}", hint="choose another family, or keep it native"
        )
    return written


def _bias_switches(family: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the switches for biases that a family has: none for what a plugin's family fixes."""
    fixed = fixed_by_family(family).keys()
    return [switch for switch in HF_FAMILIES[family].biases.items() if not fixed & set(switch[1])]


def config_differences(wanted: ModelConfig, stored: ModelConfig) -> list[str]:
    """Say where two architectures differ, key by key: that of a recipe and that of its base weights."""
    return [
        f"`{key}` is {as_json(getattr(wanted, key))}, of the weights it is {as_json(getattr(stored, key))}"
        for key in ModelConfig.model_fields
        if key != "init_std" and getattr(wanted, key) != getattr(stored, key)
    ]


class _ConfigReader:
    """Reads one `config.json` into our keys; remembers which keys were read."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self._where = text_part(config, where), where
        config = self._config
        self._read: set[str] = set()
        self.key_locations: dict[KeyPath, str] = {}
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in HF_FAMILIES:
            raise self._error(f"`model_type: {as_json(model_type)}` is not a family here", _nearest_family(model_type))
        self._name = model_type
        self._family, self._decoder = HF_FAMILIES[self._name], family_decoder(self._name)
        architectures = config.get("architectures") or [self._family.architecture]
        if architectures != [self._family.architecture]:
            raise self._error(
                f"`architectures: {as_json(architectures)}` is not the language model of {self._name}",
                f"only {self._family.architecture} is read",
            )

    def architecture(self) -> dict[str, Any]:
        config: dict[str, Any] = {"family": self._name}
        for native_key, hf_key in self._family.keys.items():
            config[native_key] = self._take(hf_key)
            self.key_locations[(native_key,)] = hf_key
            if native_key in ("layers", "hidden", "heads") and (
                type(config[native_key]) is not int or config[native_key] < 1
            ):
                raise self._error(
                    f"`{hf_key}: {as_json(config[native_key])}` is not a size", "write a whole number from 1 up"
                )
        for hf_key, native_keys in _bias_switches(self._name):
            self._read.add(hf_key)
            config |= dict.fromkeys(native_keys, self._config.get(hf_key, False))
            self.key_locations |= {(native_key,): hf_key for native_key in native_keys}
        if "activation" in self._family.keys:
            config["activation"] = self._activation(self._family.keys["activation"])
        config["kv_heads"] = config.get("kv_heads") or config["heads"]
        config["head_dim"] = config.get("head_dim") or config["hidden"] // config["heads"]
        if config.get("query_scalar") == config["head_dim"]:
            config["query_scalar"] = None
        if self._decoder == "gpt2":
            config["ffn"] = config["ffn"] or 4 * config["hidden"]
        else:
            built_in = HF_FAMILIES[self._decoder]
            defaults = {**built_in.defaults, **self._family.defaults}
            row = replace(built_in, rope_base=self._family.rope_base, defaults=defaults)
            attention = HfAttentionReader(self._config, row, self._where, _UNREAD_HINT)
            config |= attention.windows(config["layers"])
            config["rope"] = attention.rope(windowed=config.get("sliding_window") is not None)
            self._read |= attention.read
            self.key_locations |= attention.key_locations
        if self._family.experts:
            config["moe"] = {}
            for native_key, names in self._family.experts.items():
                hf_key = next((name for name in names if name in self._config), names[0])
                config["moe"][native_key] = self._take(hf_key)
                self.key_locations[("moe", native_key)] = hf_key
        if self._decoder == "deepseek_v3":
            self._read_deepseek(config)
        if self._decoder == "llama4_text":
            self._read_llama4(config)
        if self._decoder == "gpt_oss":
            self._read_gpt_oss(config)
        if self._decoder == "nemotron":
            self._read_nemotron(config)
        if self._decoder == "qwen3_moe":
            self._read.add("intermediate_size")  # of layers without experts, and `mlp_only_layers` must name none
        return config

    def _read_deepseek(self, config: dict[str, Any]) -> None:
        """Read latent attention and the shared experts; see that routing is the kind that the family has."""
        config["mla"] = {}
        for native_key, hf_key in self._family.latent.items():
            config["mla"][native_key] = self._take(hf_key)
            self.key_locations[("mla", native_key)] = hf_key
        del config["head_dim"]  # filled in from the two parts of a head
        moe, kinds = config["moe"], {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
        for key, kind in kinds.items():
            self._read.add(key)
            if self._config.get(key, kind) != kind:
                raise self._error(
                    f"`{key}: {as_json(self._config[key])}` is not how DeepSeek-V3 routes", f"only {kind} is read"
                )
        shared = self._take("n_shared_experts") or 0
        moe |= {"scores": "sigmoid", "score_bias": True, "shared_ffn": shared * moe["ffn"]}
        if not moe["dense_first"]:
            config["ffn"] = None  # no layer reads it
        heads = self._config.get("num_key_value_heads")
        if heads is not None and heads != config["heads"]:
            raise self._error(f"`num_key_value_heads: {heads}` is not its {config['heads']} heads", _UNREAD_HINT)
        # Widths that follow from others, settings of a training, and how many layers multi-token prediction has: the
        # tensors say it, since transformers writes the number without them.
        self._read.update(("num_key_value_heads", "head_dim", "qk_head_dim", *MTP_KEYS))
        self._read.update(("aux_loss_alpha", "seq_aux", "ep_size", "auto_map"))
        if "quantization_config" in self._config and not float8_keys(self._config):
            method = (self._config["quantization_config"] or {}).get("quant_method")
            raise self._error(
                f"the weights are quantised (`quantization_config.quant_method: {as_json(method)}`)",
                "read are bf16, fp16 and fp32, and fp8 in blocks as DeepSeek publishes it (`weight_block_size`)",
            )

    def _read_llama4(self, config: dict[str, Any]) -> None:
        """Read which layers have experts, and what those without positions do instead."""
        moe, layers = config["moe"], config["layers"]
        nope = "full" in (config["attention_pattern"] or ())
        config["rope"] |= {"interleaved": True, "local_only": nope}
        moe |= {"scores": "sigmoid", "normalize_top_k": False, "scale_inputs": True, "shared_ffn": moe["ffn"]}
        dense = self._take("intermediate_size_mlp")
        config["ffn"] = dense if moe["every"] > 1 else None  # otherwise no layer reads it
        self._read.add("moe_layers")
        every = list(range(moe["every"] - 1, layers, moe["every"]))
        if (written := self._config.get("moe_layers")) is not None and list(written) != every:
            raise self._error(
                f"`moe_layers: {as_json(written)}` is not every {moe['every']} layers from the {moe['every'] - 1}th on",
                "only what `interleave_moe_layer_step` says is read",
            )
        tuned, scale, tokens = map(self._take, ("attn_temperature_tuning", "attn_scale", "floor_scale"))
        if tuned and nope:
            whole = int(tokens) if isinstance(tokens, float) and tokens.is_integer() else tokens
            config["attention_temperature"] = {"scale": scale, "tokens": whole}

    def _read_nemotron(self, config: dict[str, Any]) -> None:
        """See that NeMo's word for the width of a head, which its conversion leaves beside ours, says the same."""
        self._read.add("kv_channels")
        width = self._config.get("kv_channels")
        if width is not None and width != config["head_dim"]:
            raise self._error(
                f"`kv_channels: {as_json(width)}` is not the {config['head_dim']} of `head_dim`",
                "write the width of a head as `head_dim`",
            )

    def _read_gpt_oss(self, config: dict[str, Any]) -> None:
        """See that biases are where the family has them, and that weights are stored as they can be read."""
        self._read.update(("attention_bias", "quantization_config"))
        if self._config.get("attention_bias", True) is not True:
            raise self._error("`attention_bias: false` is not gpt-oss", "only true is read")
        config["moe"]["router_bias"] = True
        method = (self._config.get("quantization_config") or {}).get("quant_method", "mxfp4")
        if method != "mxfp4":
            raise self._error(
                f"the weights are quantised (`quantization_config.quant_method: {as_json(method)}`)",
                "read are mxfp4, as gpt-oss is published, and bf16, fp16 and fp32",
            )

    def check_unread_keys(self) -> None:
        read = self._read | HARMLESS_KEYS | self._family.unread | float8_keys(self._config)
        rest = {key: value for key, value in self._config.items() if key not in read}
        refused = [key for key, value in rest.items() if (value != _ONLY_VALUE[key] if key in _ONLY_VALUE else value)]
        if refused:
            shown = ", ".join(f"`{key}: {as_json(rest[key])}`" for key in sorted(refused))
            raise self._error(f"the {self._name} decoder here has nothing for {shown}", _UNREAD_HINT)

    def _take(self, key: str) -> Any:
        self._read.add(key)
        if key in self._config:
            return self._config[key]
        if key not in self._family.defaults:
            raise self._error(f"`{key}` is missing", f"a {self._name} config has it")
        return self._family.defaults[key]

    def _activation(self, key: str) -> str:
        name = self._take(key)
        if name not in _ACTIVATIONS:
            raise self._error(f"`{key}: {as_json(name)}` is not known", f"known are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def _error(self, what: str, hint: str) -> InputError:
        return InputError(what, where=self._where, hint=hint)


def _activation_name(config: ModelConfig) -> str:
    if config.activation == "gelu_tanh":
        return "gelu_new" if family_decoder(config.family) == "gpt2" else "gelu_pytorch_tanh"
    return config.activation


def _nearest_family(model_type: Any) -> str:
    """Say which family here is nearest to a `model_type` that is none of them."""
    names = list(HF_FAMILIES)
    known = f"known are {', '.join(names)}"
    if not isinstance(model_type, str):
        return known
    begins = [nearest for start, nearest in _NEAREST_FAMILY.items() if model_type.startswith(start)]
    candidates = [*begins, *difflib.get_close_matches(model_type, names, n=1, cutoff=0.5)]
    near = next((name for name in candidates if name in names), None)
    return known if near is None else f"the nearest here is {near}, which computes something else; {known}"
