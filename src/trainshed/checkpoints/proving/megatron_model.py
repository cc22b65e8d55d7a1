"""megatron-core's GPTModel from the arguments in a checkpoint, on one process, without a GPU and without memory.

What is patched and begun here stays for as long as the process lives: only `megatron_process.py` does so.
"""

from __future__ import annotations

import dataclasses
import re
from argparse import Namespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainshed.checkpoints.megatron.pickled import Record

# Settings of how a job computes and not of what: one process, float32 and plain layers stand for them here.
_HOW = re.compile(
    r"parallel|pipeline|_comm|p2p|overlap|recompute|offload|cuda_graph|fp8|fp4|fp16|bf16|fus(ion|ed)|dtype|dispatcher"
    r"|deepep|hybridep|(^|_)te_|kitchen|inference|init|grouped_gemm|grad|_func$|backend|dropout|persist|memory|logg"
    r"|load_balancing|(aux|z)_loss|barrier|rng|deterministic|batch_invariant|autocast|cross_entropy|mempool|_sms$"
    r"|transformer_impl|quant|cache|test_mode|vp_stage|microbatch|saved_activations|_ar_type|seq_?len"
    r"|qk_clip|max_attention_logit|timers|amax|routing_replay|per_token_loss|jitter|bias_update|scatter_output"
)


class Refused(Exception):
    """Something for which megatron-core has no layers here."""


def without_gpu() -> None:
    """Let Megatron run where there is no GPU: it asks for one in these few places."""
    cpu = torch.device("cpu")
    patches: dict[str, Any] = {
        "current_device": lambda: cpu,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda *_, **__: None,
        "_lazy_call": lambda *_, **__: None,
        "manual_seed": torch.manual_seed,
        "synchronize": lambda *_: None,
    }
    for name, patch in patches.items():
        setattr(torch.cuda, name, patch)
        setattr(torch.cuda.random, name, patch)
    from megatron.core.fusions import fused_softmax
    from megatron.core.transformer import utils
    from megatron.core.transformer.moe import moe_utils

    def causal(length: int) -> torch.Tensor:
        return torch.triu(torch.ones(length, length), diagonal=1).bool()

    def windowed(queries: int, keys: int, window_size: tuple[int, int]) -> torch.Tensor:
        # Megatron's own, but for its device.
        seen = torch.triu(torch.ones(queries, keys, dtype=torch.bool), diagonal=keys - queries - window_size[0])
        return ~torch.tril(seen, diagonal=keys - queries + window_size[1])

    for module in (fused_softmax, utils):
        setattr(module, "get_default_causal_mask", causal)  # noqa: B010
        setattr(module, "get_sliding_window_causal_mask", windowed)  # noqa: B010
    if not hasattr(moe_utils, "te_general_gemm"):
        # 0.16.1 forgets to define it where Transformer Engine is missing.
        setattr(moe_utils, "te_general_gemm", None)  # noqa: B010


def alone() -> None:
    """Make the groups that Megatron wants, of one process."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)


def built_from(args: Namespace, vocab_size: int) -> nn.Module:
    """As Megatron-LM's core_transformer_config_from_args and gpt_builder do, on one process and without memory."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    said = vars(args)
    keys = {
        field.name: said[field.name]
        for field in dataclasses.fields(TransformerConfig)
        if said.get(field.name) is not None and not _HOW.search(field.name)
    }
    for name, value in keys.items():
        if isinstance(value, Record):
            raise Refused(f"its args have a {value.kind} as `{name}`")
    if "moe_expert_capacity_factor" in keys:
        factor = keys["moe_expert_capacity_factor"]
        raise Refused(f"`moe_expert_capacity_factor: {factor}` drops tokens by what else is in a batch")
    gated, biases = bool(said.get("swiglu", False)), bool(said.get("add_bias_linear", True))
    keys |= {
        "layernorm_epsilon": said.get("layernorm_epsilon") or said["norm_epsilon"],
        "num_query_groups": said["num_query_groups"] if said.get("group_query_attention") else None,
        "num_moe_experts": said.get("num_experts"),
        "gated_linear_unit": gated,
        "activation_func": F.silu if gated else F.gelu,
        # Fused with its bias, Megatron's gelu is the tanh approximation; by itself it is the exact one.
        "bias_activation_fusion": not gated and biases and bool(said.get("bias_gelu_fusion", True)),
        "moe_router_load_balancing_type": "none",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "transformer_impl": "local",
    }
    config = TransformerConfig(**keys)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        qk_l2_norm=config.qk_l2_norm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    with torch.device("meta"):
        return GPTModel(
            config,
            spec,
            vocab_size=vocab_size,
            max_sequence_length=said["max_position_embeddings"],
            share_embeddings_and_output_weights=not said.get("untie_embeddings_and_output_weights", False),
            position_embedding_type=said.get("position_embedding_type", "learned_absolute"),
            rotary_percent=said.get("rotary_percent", 1.0),
            rotary_base=said.get("rotary_base", 10000),
            rope_scaling=bool(said.get("use_rope_scaling", False)),
            rope_scaling_factor=said.get("rope_scaling_factor", 8.0),
            seq_len_interpolation_factor=said.get("rotary_seq_len_interpolation_factor"),
        ).eval()
