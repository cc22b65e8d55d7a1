"""Arguments that Megatron-LM takes and ignores, takes and refuses, calls otherwise today, or has no more.

Sources: `validate_args` and the `*_deprecated` arguments of arguments.py at core_v0.16.1 and d98e8a64dd; for those that
are gone, the difference of the two lists and older release notes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Retired:
    """What became of an argument."""

    fate: Literal["ignored", "refused", "renamed", "gone"]
    instead: str
    """What to write; empty: nothing, it is so anyway."""

    def __str__(self) -> str:
        says = {
            "ignored": "Megatron takes it and ignores it",
            "refused": "Megatron stops with an error",
            "renamed": "Megatron calls it otherwise today",
            "gone": "newer versions of Megatron have it no more",
        }[self.fate]
        return f"{says}: {self.instead}" if self.instead else says


def _all(fate: Literal["ignored", "refused", "renamed", "gone"], **instead: str) -> dict[str, Retired]:
    return {f"--{name.replace('_', '-')}": Retired(fate, text) for name, text in instead.items()}


RETIRED: dict[str, Retired] = {
    **_all(
        "refused",
        batch_size="--micro-batch-size",
        warmup="--lr-warmup-fraction",
        model_parallel_size="--tensor-model-parallel-size",
        checkpoint_activations="--recompute-granularity",
    ),
    **_all(
        "ignored",
        use_mcore_models="",
        use_dist_ckpt="--ckpt-format says it",
        dist_ckpt_format="--ckpt-format says it",
        ckpt_fully_parallel_save="it is on; --no-ckpt-fully-parallel-save turns it off",
        fp8_interval="",
    ),
    **_all(
        "renamed",
        use_rotary_position_embeddings="--position-embedding-type rope",
        recompute_activations="--recompute-granularity selective",
        enable_cuda_graph="--cuda-graph-impl local",
        external_cuda_graph="--cuda-graph-impl transformer_engine",
        cuda_graph_scope="--cuda-graph-modules (from 0.17 on)",
        moe_enable_deepep="--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep",
        moe_deepep_num_sms="--moe-flex-dispatcher-num-sms (from 0.17 on)",
        moe_hybridep_num_sms="--moe-flex-dispatcher-num-sms (from 0.17 on)",
        no_weight_decay_cond_type="--apply-wd-to-qk-layernorm",
        moe_layer_recompute="--recompute-modules moe",
        moe_router_padding_for_fp8="--moe-router-padding-for-quantization",
        hybrid_override_pattern="--hybrid-layer-pattern (from 0.17 on)",
        no_position_embedding="--position-embedding-type",
        persistent_save_interval="--save-interval",
    ),
    **_all(
        "gone",
        use_legacy_models="",
        legacy_tokenizer="",
        moe_extended_tp="--expert-tensor-parallel-size",
        moe_use_legacy_grouped_gemm="--moe-grouped-gemm",
        no_async_tensor_model_parallel_allreduce="",
        no_scatter_gather_tensors_in_pipeline="",
        hybrid_attention_ratio="--hybrid-layer-pattern",
        hybrid_mlp_ratio="--hybrid-layer-pattern",
        tiktoken_special_tokens="--tokenizer-special-tokens",
        tokenizer_hf_use_fast="--tokenizer-hf-no-use-fast is the other way round",
        tokenizer_hf_include_special_tokens="--tokenizer-hf-no-include-special-tokens is the other way round",
        inference_max_batch_size="--inference-max-requests",
        muon_use_nesterov="--muon-nesterov",
        standalone_embedding_stage="--account-for-embedding-in-pipeline-split",
        pipeline_model_parallel_split_rank="",
        encoder_tensor_model_parallel_size="",
        encoder_pipeline_model_parallel_size="",
        use_custom_fsdp="--use-megatron-fsdp",
        s3_cache_path="--object-storage-cache-path",
    ),
}
