"""Megatron-core on a CPU: loads what we wrote into its own GPTModel, and writes a checkpoint of its own.

    python mcore_driver.py FOLDER TP PP EP CASE…

Each case has `dist/` and may have `legacy/` (ours, local spec, one rank). It gets `dist.pt`, `legacy.pt` (logits) and
`saved/`; and `further.pt`, the logits of a layer for multi-token prediction, where there is one.
On several ranks it has `dist/` and gets `rank0.pt`, `rank1.pt`, …: what each holds when it has loaded its part.
Models are built from the arguments in our checkpoints and from nothing else: what is lost on the way is seen in the
logits. The patches that let Megatron run without a GPU want a process of their own.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from trainshed.checkpoints.prove.megatron_process import patch_out_gpu

LATENT_ARGUMENTS = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "rotary_base"),
    *("rotary_percent", "rotary_scaling_factor", "mscale", "mscale_all_dim"),
)


def built_from(args: Any) -> Any:
    """As Megatron-LM's core_transformer_config_from_args and gpt_builder do."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    keys: dict[str, Any] = {}
    if args.num_experts:
        keys = {
            "num_moe_experts": args.num_experts,
            "moe_ffn_hidden_size": args.moe_ffn_hidden_size,
            "moe_router_topk": args.moe_router_topk,
            "moe_router_pre_softmax": args.moe_router_pre_softmax,
            "moe_shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size,
            "moe_router_load_balancing_type": "none",
            "moe_layer_freq": args.moe_layer_freq,
            "moe_router_score_function": args.moe_router_score_function,
            "moe_router_enable_expert_bias": args.moe_router_enable_expert_bias,
            "moe_router_num_groups": args.moe_router_num_groups,
            "moe_router_group_topk": args.moe_router_group_topk,
            "moe_router_topk_scaling_factor": args.moe_router_topk_scaling_factor,
            "mtp_num_layers": getattr(args, "mtp_num_layers", None),
        }
    if args.multi_latent_attention:
        keys |= {name: getattr(args, name) for name in LATENT_ARGUMENTS}
    config = (MLATransformerConfig if args.multi_latent_attention else TransformerConfig)(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm,
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else F.gelu,
        bias_activation_fusion=args.bias_gelu_fusion and not args.swiglu,
        window_size=args.window_size,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        **keys,
    )
    if args.num_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    mtp_layers = getattr(args, "mtp_num_layers", None)
    return GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=None if mtp_layers is None else mtp_spec(config),
    ).eval()


def mtp_spec(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs, get_gpt_mtp_block_spec

    layers = get_gpt_decoder_layer_specs(config, use_transformer_engine=False, normalization=config.normalization)
    return get_gpt_mtp_block_spec(config, layers[-1], use_transformer_engine=False)


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """All logits that are computed: those of layers for multi-token prediction, then those of the next token."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    computed: list[torch.Tensor] = []

    def keep(_: Any, __: Any, result: Any) -> None:
        computed.append(result[0].transpose(0, 1).float().clone())  # the loss is computed in their place

    hook = model.output_layer.register_forward_hook(keep)
    # With such layers a model has labels always; which ones makes no difference to logits.
    model(tokens, positions, None, labels=tokens if model.config.mtp_num_layers else None)
    hook.remove()
    return computed


def run(folder: Path, tokens: torch.Tensor) -> None:
    from megatron.core import dist_checkpointing

    iteration = folder / "dist" / "release"
    # As Megatron-LM: the arguments first, the model by them, then the weights.
    args = dist_checkpointing.load_common_state_dict(str(iteration))["args"]
    model = built_from(args)
    loaded: Any = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(iteration))
    model.load_state_dict(loaded["model"])
    if torch.distributed.get_world_size() > 1:
        torch.save(model.state_dict(), folder / f"rank{torch.distributed.get_rank()}.pt")
        return
    *further, following = logits(model, tokens)
    torch.save(following, folder / "dist.pt")
    if further:
        torch.save(further[0], folder / "further.pt")

    if (folder / "legacy").exists():
        rank = torch.load(folder / "legacy" / "release" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
        other = built_from(rank["args"])
        other.load_state_dict(rank["model"])
        torch.save(logits(other, tokens)[-1], folder / "legacy.pt")

    saved = folder / "saved" / "iter_0000007"
    saved.mkdir(parents=True)
    state = {"model": model.sharded_state_dict(), "args": args, "iteration": 7, "checkpoint_version": 3.0}
    dist_checkpointing.save(state, str(saved))
    (saved.parent / "latest_checkpointed_iteration.txt").write_text("7")


def main() -> None:
    folder, (tp, pp, ep), cases = Path(sys.argv[1]), map(int, sys.argv[2:5]), sys.argv[5:]
    warnings.simplefilter("ignore")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = f"file://{folder / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    from megatron.core import parallel_state

    patch_out_gpu()
    torch.Tensor.cuda = lambda self, *_, **__: self  # its own loaders move what they have read
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    tokens = torch.load(folder / "tokens.pt") if world_size == 1 else torch.empty(0)
    for case in cases:
        run(folder / case, tokens)


if __name__ == "__main__":
    main()
