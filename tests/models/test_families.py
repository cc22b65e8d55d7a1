"""Configs of the Hub become our architecture, every key accounted for, and go back as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.models.tiny_models import FAMILIES, VARIANTS, tiny_config, transformers_config
from trainshed.catalog import model_preset, preset_names
from trainshed.errors import InputError
from trainshed.models.families import config_differences, read_hf_config, to_hf_config
from trainshed.recipe import ModelConfig

# As published, by transformers 4.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama2-7b": {
        "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
        "transformers_version": "4.31.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "llama3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
    },
    "mistral-7b-v0.1": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151643, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
        "max_position_embeddings": 32768, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "olmo2-7b": {
        "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
        "torch_dtype": "float32", "transformers_version": "4.47.0.dev0", "use_cache": False, "vocab_size": 100352,
    },
    "olmo3-7b": {
        "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
        "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
        "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.57.0", "use_cache": False, "vocab_size": 100278,
    },
    "gemma2-2b": {
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
        "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2",
        "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
        "torch_dtype": "float32", "transformers_version": "4.42.4", "use_cache": True, "vocab_size": 256000,
    },
    "gemma2-27b": {
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
        "final_logit_softcapping": 30.0, "head_dim": 128, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 4608, "initializer_range": 0.02,
        "intermediate_size": 36864, "max_position_embeddings": 8192, "model_type": "gemma2",
        "num_attention_heads": 32, "num_hidden_layers": 46, "num_key_value_heads": 16, "pad_token_id": 0,
        "query_pre_attn_scalar": 144, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
        "sliding_window_size": 4096, "torch_dtype": "float32", "transformers_version": "4.42.0.dev0",
        "use_cache": True, "vocab_size": 256000, "_attn_implementation": "eager",
    },
    "gemma3-1b": {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
    },
    "phi4": {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 100257, "embd_pdrop": 0.0, "eos_token_id": 100265, "hidden_act": "silu",
        "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 17920,
        "max_position_embeddings": 16384, "model_type": "phi3", "num_attention_heads": 40, "num_hidden_layers": 40,
        "num_key_value_heads": 10, "original_max_position_embeddings": 16384, "pad_token_id": 100349,
        "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 250000,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.47.0", "use_cache": True, "vocab_size": 100352,
    },
    "phi4-mini": {
        "_name_or_path": "Phi-4-mini-instruct", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
            "AutoTokenizer": "Xenova/gpt-4o",
        },
        "bos_token_id": 199999, "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1, "hidden_act": "silu",
        "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192, "interpolate_factor": 1,
        "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "phi3",
        "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096, "pad_token_id": 199999, "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "long_factor": [
                1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649,
                2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845,
                5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129,
                13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418,
                28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28,
                33.49, 33.5, 44.16, 47.77,
            ],
            "short_factor": [1.0] * 48, "type": "longrope",
        },
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0", "use_cache": True, "vocab_size": 200064,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3,
        "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "pretraining_tp": 1,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
    },
    "moonlight-16b-a3b": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163585, "ep_size": 1,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 11264, "kv_lora_rank": 512, "max_position_embeddings": 8192,
        "model_type": "deepseek_v3", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
        "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True,
        "vocab_size": 201088,
    },
    "llama4-scout": {
        "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
        "image_token_index": 200092, "model_type": "llama4", "tie_word_embeddings": False,
        "text_config": {
            "_attn_implementation_autoset": True, "attention_bias": False, "attention_chunk_size": 8192,
            "attention_dropout": 0.0, "attn_scale": 0.1, "attn_temperature_tuning": 4, "bos_token_id": 200000,
            "cache_implementation": "hybrid", "eos_token_id": [200001, 200007, 200008], "floor_scale": 8192,
            "for_llm_compression": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
            "initializer_range": 0.02, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
            "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760, "model_type": "llama4_text",
            "moe_layers": list(range(48)), "no_rope_layers": [1, 1, 1, 0] * 12, "num_attention_heads": 40,
            "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16,
            "output_router_logits": False, "pad_token_id": 200018, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
            "torch_dtype": "bfloat16", "use_cache": True, "use_qk_norm": True, "vocab_size": 202048,
        },
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0.dev0", "vision_config": {"hidden_size": 1408},
    },
    "gpt2": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
    },
    "gpt2-medium": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 1024, "n_head": 16, "n_layer": 24,
        "n_positions": 1024, "n_special": 0, "predict_special_tokens": True, "resid_pdrop": 0.1,
        "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
        "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
    },
}  # fmt: skip
SMOLLM2_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
SLIDING = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}


def written(family: str, **changes: object) -> dict[str, Any]:
    return to_hf_config(tiny_config(family)) | changes


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_catalogs_preset(name: str) -> None:
    assert read_hf_config(PUBLISHED[name], "config.json") == model_preset(name)


@pytest.mark.parametrize("family", ["olmo3", "gemma3_text"])
def test_windows_with_the_base_of_all_layers_are_written_as_such(family: str) -> None:
    config = tiny_config(family, rope={"base": 5e5, "local_base": 5e5})
    assert config.rope is not None
    back = read_hf_config(to_hf_config(config), "config.json")
    assert back.rope == config.rope.model_copy(update={"local_base": None})
    assert [key for key in ModelConfig.model_fields if getattr(back, key) != getattr(config, key)] == ["rope"]


def test_a_config_that_nanotron_wrote_is_llamas() -> None:
    config = read_hf_config(SMOLLM2_135M, "config.json")
    assert (config.layers, config.hidden, config.heads, config.kv_heads, config.ffn) == (30, 576, 9, 3, 1536)
    with pytest.raises(InputError, match="nothing for `rope_interleaved: true`"):
        read_hf_config(SMOLLM2_135M | {"rope_interleaved": True}, "config.json")


def test_qwen3_coders_config_is_read() -> None:
    # Of Qwen3-Coder-480B-A35B-Instruct, what no other Qwen3 has.
    extra = {"qkv_bias": False, "router_aux_loss_coef": 0.0, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
    assert read_hf_config(written("qwen3_moe", **extra), "config.json") == tiny_config("qwen3_moe")


def test_nemos_width_of_a_head_must_be_that_of_the_config() -> None:
    head_dim = tiny_config("nemotron").head_dim
    assert read_hf_config(written("nemotron", kv_channels=head_dim), "config.json") == tiny_config("nemotron")
    with pytest.raises(InputError, match=f"`kv_channels: {head_dim + 2}` is not the {head_dim} of `head_dim`"):
        read_hf_config(written("nemotron", kv_channels=head_dim + 2), "config.json")


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_transformers_5_saves_is_the_architecture_made_by_hand(variant: str, tmp_path: Path) -> None:
    config = tiny_config(variant)
    transformers_config(config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert ("rope_parameters" in saved) == (config.positions == "rope")
    assert read_hf_config(saved, "config.json") == config


@pytest.mark.parametrize("variant", VARIANTS)
def test_our_config_json_means_the_same_to_transformers(variant: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = tiny_config(variant)
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(config)))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert read_hf_config(theirs.to_dict(), "config.json") == config
    for key in ("rope_parameters", "layer_types", "hidden_act", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(theirs, key, None) == getattr(transformers_config(config), key, None)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_goes_there_and_back(name: str) -> None:
    config = model_preset(name)
    assert read_hf_config(to_hf_config(config), "config.json") == config


@pytest.mark.parametrize("family", ["mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"])
def test_a_window_goes_there_and_back_through_transformers(family: str) -> None:
    from transformers import AutoConfig

    config = tiny_config(family, sliding_window=16)
    saved = to_hf_config(config)
    theirs = AutoConfig.for_model(**saved)
    assert theirs.sliding_window == 16
    assert set(getattr(theirs, "layer_types", None) or ["sliding_attention"]) == {"sliding_attention"}
    assert read_hf_config(theirs.to_dict(), "config.json") == config


def test_a_window_that_is_switched_off_is_none() -> None:
    off = written("qwen2", use_sliding_window=False, sliding_window=16, max_window_layers=1)
    assert read_hf_config(off, "config.json").sliding_window is None
    beyond_the_last_layer = written("qwen3", **SLIDING | {"max_window_layers": 2})
    assert read_hf_config(beyond_the_last_layer, "config.json").sliding_window is None


@pytest.mark.parametrize(
    "legacy", [{"type": "linear"}, {"rope_type": "linear"}, {"type": "linear", "rope_type": "linear"}]
)
def test_rope_scaling_is_read_in_the_spellings_of_all_versions(legacy: dict[str, str]) -> None:
    config = written("llama", rope_scaling={**legacy, "factor": 4.0})
    assert read_hf_config(config, "config.json") == tiny_config("llama-linear")


def test_what_is_left_out_is_what_transformers_takes() -> None:
    from transformers import AutoConfig

    for family in FAMILIES:
        whole = written(family)
        optional = ("rope_theta", "rope_scaling", "tie_word_embeddings", "rms_norm_eps", "hidden_act", "head_dim",
                    "sliding_window", "n_inner", "layer_norm_epsilon", "activation_function", "norm_topk_prob",
                    "initializer_range", "architectures")  # fmt: skip
        short = {key: value for key, value in whole.items() if key not in optional}
        filled = AutoConfig.for_model(**short).to_dict()
        assert read_hf_config(short, "config.json") == read_hf_config(filled, "config.json"), family


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("mistral", {"attention_bias": True}, "`attention_bias: true`"),
        ("qwen3", {"mlp_bias": True}, "`mlp_bias: true`"),
        ("llama", {"clip_qkv": 8.0}, "`clip_qkv: 8.0`"),
        ("llama", {"partial_rotary_factor": 0.5}, "`partial_rotary_factor: 0.5`"),
        ("llama", {"final_logit_softcapping": 30.0, "embedding_multiplier": 12}, "`embedding_multiplier: 12`, `final_"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "`rope_scaling.rope_type: longrope`"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "gives kinds of layers tables"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "`rope_scaling.rope_type: dynamic`"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "`rope_scaling.rope_type: dynamic`"),
        ("llama", {"rope_scaling": {"mrope_section": [4, 4]}}, "`rope_scaling.mrope_section: "),
        ("llama", {"rope_parameters": {"rope_theta": 5.0}}, "`rope_theta` stands there twice"),
        ("llama", {"rope_parameters": [1]}, "`rope_parameters: [1]` is not an object"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "`rope_scaling` and `rope_parameters` contradict",
        ),
        ("llama", {"quantization_config": {"bits": 4}}, "`quantization_config: "),
        ("llama", {"auto_map": {"AutoConfig": "theirs.Config"}}, "`auto_map: "),
        ("llama", {"hidden_act": "gelu_fast"}, "`hidden_act: \"gelu_fast\"`"),
        ("llama", {"hidden_size": "32"}, "`hidden_size: \"32\"` is not a size"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "`architectures: "),
        ("llama", {"is_causal": False}, "`is_causal: false`"),
        ("llama", {"sliding_window": 8}, "`sliding_window: 8`"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "`rope_scaling.rope_type: linear`"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "`attn_logit_softcapping: 50.0`"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "`use_bidirectional_attention: true`"),
        ("gemma2", {"layer_types": ["full_attention"]}, "`layer_types: "),
        ("llama", {"model_type": "mamba2"}, "`model_type: \"mamba2\"` is not a family here"),
        ("qwen3", SLIDING | {"layer_types": ["full_attention"]}, "`layer_types: "),
        ("qwen3", SLIDING | {"layer_types": ["full_attention", "linear_attention"]}, "`layer_types: "),
        ("qwen2", {"attention_bias": True}, "`attention_bias: true`"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "`mlp_only_layers: [0]`"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "`decoder_sparse_step: 2`"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "`scoring_func: \"softmax\"`"),
        ("deepseek_v3", {"topk_method": "greedy"}, "`topk_method: \"greedy\"`"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "`moe_layer_freq: 2`"),
        ("deepseek_v3", {"attention_bias": True}, "`attention_bias: true`"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "`num_key_value_heads: 2`"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quant_method: \"fp8\"`"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "awq"}}, "quant_method: \"awq\"`"),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "quant_method: \"awq\"`"),
        ("llama4_text", {"moe_layers": [0, 3]}, "`moe_layers: [0, 3]` is not every 2 layers"),
        ("llama4_text", {"layer_types": ["full_attention"] * 5}, "is not what `no_rope_layers` gives"),
        ("llama4_text", {"no_rope_layers": [0] * 5, "layer_types": None}, "leaves no layer of 5 with positions"),
        ("llama4_text", {"attention_chunk_size": None}, "`attention_chunk_size` is null"),
        ("llama4_text", {"attention_bias": True}, "`attention_bias: true`"),
        ("gpt_oss", {"attention_bias": False}, "`attention_bias: false` is not gpt-oss"),
        ("mixtral", {"router_jitter_noise": 0.1}, "`router_jitter_noise: 0.1`"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "`scale_attn_by_inverse_layer_idx: true`"),
        ("gpt2", {"scale_attn_weights": False}, "`scale_attn_weights: false`"),
        ("gpt2", {"add_cross_attention": True}, "`add_cross_attention: true`"),
    ],
)  # fmt: skip
def test_what_changes_the_maths_and_is_not_ours_is_refused_by_name(
    family: str, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(InputError) as caught:
        read_hf_config(written(family, **changes), "hf://org/name/config.json")
    assert named in caught.value.what
    assert caught.value.where == "hf://org/name/config.json"
    assert caught.value.hint


def test_longrope_is_read_as_phi_3_and_phi_4_mini_are_published() -> None:
    """The names of its kind in all versions; the context before the stretch beside it; the factor by the positions."""
    config = tiny_config("phi3-longrope")
    assert config.rope is not None
    scaling = config.rope.scaling
    assert scaling is not None
    assert scaling.short_factors is not None
    assert scaling.long_factors is not None
    lists = {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    for kind in ("longrope", "su", "yarn"):
        beside = {"rope_theta": 10000.0, "original_max_position_embeddings": 20, "rope_scaling": lists | {"type": kind}}
        body = written("phi3-longrope") | beside
        assert read_hf_config(body, "config.json") == config
    lacking = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": lists["long_factor"]}
    with pytest.raises(InputError, match="has 2 divisors, and 6 pairs of channels are turned"):
        read_hf_config(written("phi3-longrope", rope_scaling=lacking), "config.json")
    with pytest.raises(InputError, match=r"long_factors\): is missing"):
        read_hf_config(written("phi3-longrope", rope_scaling={"type": "longrope", "short_factor": [1.0]}), "c")


def test_a_missing_size_is_not_guessed() -> None:
    config = written("mistral")
    del config["num_key_value_heads"]
    with pytest.raises(InputError, match="`num_key_value_heads` is missing"):
        read_hf_config(config, "config.json")


def test_a_value_that_cannot_be_is_named_in_both_words() -> None:
    with pytest.raises(
        InputError, match=r"config.json, num_key_value_heads \(kv_heads\): 3 does not divide the 4 heads"
    ):
        read_hf_config(written("llama", num_key_value_heads=3), "config.json")
    lacking = {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
    with pytest.raises(InputError, match=r"rope_scaling \(rope.scaling.low_frequency_factor\): is missing"):
        read_hf_config(written("llama3", rope_scaling=lacking), "config.json")


@pytest.mark.parametrize(
    ("model_type", "nearest"),
    [
        ("gemma3n", "gemma3_text"),
        ("phi", "phi3"),
        ("olmo", "olmo2"),
        ("qwen3_next", "qwen3"),
        ("ministral", "mistral"),
    ],
)
def test_a_family_that_is_not_here_is_refused_with_the_nearest(model_type: str, nearest: str) -> None:
    with pytest.raises(InputError) as caught:
        read_hf_config(written("llama", model_type=model_type), "config.json")
    assert caught.value.what == f'`model_type: "{model_type}"` is not a family here'
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(f"the nearest here is {nearest}, ")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (tiny_config("gpt2", kv_heads=2), "`kv_heads: 2`"),
        (tiny_config("llama", sliding_window=8), "`sliding_window: 8`"),
        (tiny_config("llama", qkv_bias=True), "`output_bias: False`"),
        (tiny_config("mixtral", moe={"experts": 4, "top_k": 2, "ffn": 24, "normalize_top_k": False}), "`moe: "),
        (tiny_config("qwen3_moe", moe={"experts": 4, "top_k": 2, "ffn": 24, "shared_ffn": 8}), "`moe: "),
    ],
)
def test_what_hugging_face_has_no_word_for_is_not_written(config: ModelConfig, named: str) -> None:
    with pytest.raises(InputError, match=f"Hugging Face's {config.family} cannot be told {named}"):
        to_hf_config(config)


def test_two_architectures_are_compared_key_by_key() -> None:
    recipe = tiny_config("llama", rope={"base": 500000.0}, init_std=0.01)
    (difference,) = config_differences(recipe, tiny_config("llama"))
    assert difference.startswith("`rope` is")
    assert config_differences(recipe, recipe) == []
