"""A task as fields of Megatron-Bridge's ConfigContainer (NeMo 26.06), with who decides each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainshed.engines.keys import EngineSetting, KnownKeys
from trainshed.engines.launch import EngineTask
from trainshed.engines.nemo.hydra_keys import split_text
from trainshed.recipe import MoeLosses

BRIDGE_KEYS = KnownKeys("Megatron-Bridge 0.5.0", Path(__file__).with_name("keys-bridge-0.5.0.yaml"))
# bf16 elsewhere; hybrid fp8 with delayed scaling over 1024 steps is what NeMo 24.07's configuration asks for too.
PRECISION = {"bf16": "bf16_mixed", "fp8": "bf16_with_fp8_delayed_scaling_mixed"}
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "WSD"}
_RECOMPUTE = {"none": (None, None, None), "selective": ("selective", None, None), "full": ("full", "uniform", 1)}


def bridge_settings(task: EngineTask) -> list[EngineSetting]:
    """Return every field that recipe, plan and cluster decide, by `section.field`."""
    return [
        *(_architecture(task) if task.recipe.model.from_ is None else ()),
        *_layout(task),
        *_training(task),
        *_optimisation(task),
        *_data(task),
        *_checkpoints(task),
    ]


def _architecture(task: EngineTask) -> Iterator[EngineSetting]:
    config = task.config
    fields: dict[str, Any] = {
        "num_layers": config.layers,
        "hidden_size": config.hidden,
        "ffn_hidden_size": config.ffn or (config.moe.ffn if config.moe else None),
        "num_attention_heads": config.heads,
        "num_query_groups": config.kv_heads,
        "kv_channels": config.head_dim,
        "init_method_std": config.init_std,
        "normalization": "RMSNorm" if config.norm == "rms" else "LayerNorm",
        "layernorm_epsilon": config.norm_eps,
        "add_bias_linear": config.mlp_bias,
        "add_qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_norm,
        "gated_linear_unit": config.gated,
        "bias_activation_fusion": config.activation == "silu",
        "position_embedding_type": "rope" if config.positions == "rope" else "learned_absolute",
        "share_embeddings_and_output_weights": config.tied_embeddings,
    }
    if config.vocab_size % task.layout.tp == 0:
        # Written out, the vocabulary is not padded; left out, it is the tokenizer's, padded to a multiple of tp.
        fields["vocab_size"] = config.vocab_size
    if config.sliding_window is not None:
        fields["window_size"] = (config.sliding_window - 1, 0)
    if config.rope is not None:
        fields["rotary_base"] = int(config.rope.base)
        if (scaling := config.rope.scaling) is not None:
            if scaling.kind == "llama3":
                fields |= {"rope_scaling": True, "rope_scaling_factor": scaling.factor}
            else:
                fields["seq_len_interpolation_factor"] = scaling.factor
    if (moe := config.moe) is not None:
        fields |= {
            "num_moe_experts": moe.experts,
            "moe_router_topk": moe.top_k,
            "moe_ffn_hidden_size": moe.ffn,
            "moe_router_pre_softmax": not moe.normalize_top_k,
            "moe_shared_expert_intermediate_size": moe.shared_ffn or None,
        }
    yield from (EngineSetting(f"model.{key}", value, "model") for key, value in fields.items())


def _layout(task: EngineTask) -> Iterator[EngineSetting]:
    layout, train = task.layout, task.recipe.train
    granularity, method, layers = _RECOMPUTE[layout.recompute]
    yield EngineSetting("model.seq_length", _sequence_length(task), "data.sequence_length")
    yield EngineSetting("model.tensor_model_parallel_size", layout.tp, "layout.tp")
    yield EngineSetting("model.pipeline_model_parallel_size", layout.pp, "layout.pp")
    interleaved = layout.vp if layout.vp > 1 else None
    yield EngineSetting("model.virtual_pipeline_model_parallel_size", interleaved, "layout.vp")
    yield EngineSetting("model.context_parallel_size", layout.cp, "layout.cp")
    yield EngineSetting("model.sequence_parallel", layout.tp > 1, "layout.tp")
    yield EngineSetting("model.recompute_granularity", granularity, "layout.recompute")
    yield EngineSetting("model.recompute_method", method, "layout.recompute")
    yield EngineSetting("model.recompute_num_layers", layers, "layout.recompute")
    yield EngineSetting("model.hidden_dropout", train.dropout, "train.dropout")
    yield EngineSetting("model.attention_dropout", train.dropout, "train.dropout")
    if train.deterministic:
        yield EngineSetting("model.deterministic_mode", True, "train.deterministic")
        yield EngineSetting("model.cross_entropy_loss_fusion", False, "train.deterministic")
    if task.config.moe is not None:
        losses = train.moe or MoeLosses()
        yield EngineSetting("model.expert_model_parallel_size", layout.ep, "layout.ep")
        yield EngineSetting("model.expert_tensor_parallel_size", layout.etp, "layout.etp")
        # Per sequence, as the recipe's balance loss is, so that it does not change with the layout.
        yield EngineSetting("model.moe_router_load_balancing_type", "seq_aux_loss", "train.moe")
        yield EngineSetting("model.moe_aux_loss_coeff", losses.balance_loss, "train.moe.balance_loss")
        yield EngineSetting("model.moe_z_loss_coeff", losses.z_loss or None, "train.moe.z_loss")
        yield EngineSetting("model.moe_grouped_gemm", True, "model")
        yield EngineSetting("model.moe_token_dispatcher_type", "alltoall", "model")


def _training(task: EngineTask) -> Iterator[EngineSetting]:
    recipe, train, validation = task.recipe, task.recipe.train, task.recipe.data.validation
    ramp = train.batch_ramp
    yield EngineSetting("train.train_iters", task.steps, "train.steps")
    yield EngineSetting("train.global_batch_size", train.global_batch, "train.global_batch")
    yield EngineSetting("train.micro_batch_size", task.layout.micro_batch, "layout.micro_batch")
    if ramp is not None:
        ramped = [ramp.start, ramp.increment, ramp.samples]
        yield EngineSetting("train.rampup_batch_size", ramped, "train.batch_ramp")
    # A checkpoint when the scheduler says stop: the agent forwards TERM and waits.
    yield EngineSetting("train.exit_signal_handler", True, "checkpoint")
    yield EngineSetting("train.manual_gc", True, "the plan")
    yield EngineSetting("train.manual_gc_interval", 100, "the plan")
    yield EngineSetting("validation.eval_interval", validation.every if validation else None, "data.validation.every")
    yield EngineSetting("validation.eval_iters", validation.batches if validation else 0, "data.validation.batches")
    yield EngineSetting("rng.seed", recipe.seed, "seed")
    yield EngineSetting("dist.use_sharp", task.place.sharp, "the cluster's sharp")
    if (profile := recipe.observe.profile) is not None:
        yield EngineSetting("profiling.use_pytorch_profiler", True, "observe.profile")
        yield EngineSetting("profiling.profile_step_start", profile.steps_before, "observe.profile.start")
        yield EngineSetting("profiling.profile_step_end", profile.steps_before + profile.steps, "observe.profile.steps")
        yield EngineSetting("profiling.profile_ranks", list(profile.ranks), "observe.profile.ranks")


def _optimisation(task: EngineTask) -> Iterator[EngineSetting]:
    optimizer, schedule = task.recipe.train.optimizer, task.recipe.train.schedule
    for key, value, source in (
        ("optimizer", "adam", "train.optimizer.name"),
        ("lr", optimizer.lr, "train.optimizer.lr"),
        ("min_lr", schedule.min_lr, "train.schedule.min_lr"),
        ("weight_decay", optimizer.weight_decay, "train.optimizer.weight_decay"),
        ("adam_beta1", optimizer.betas[0], "train.optimizer.betas"),
        ("adam_beta2", optimizer.betas[1], "train.optimizer.betas"),
        ("adam_eps", optimizer.eps, "train.optimizer.eps"),
        ("clip_grad", optimizer.clip or 0.0, "train.optimizer.clip"),
        ("bf16", True, "train.precision"),
        ("use_distributed_optimizer", True, "layout.shard"),
    ):
        yield EngineSetting(f"optimizer.{key}", value, source)
    yield EngineSetting("scheduler.lr_decay_style", _SCHEDULES[schedule.name], "train.schedule.name")
    yield EngineSetting("scheduler.lr_warmup_iters", schedule.warmup, "train.schedule.warmup")
    wsd = schedule.name == "wsd"
    end = task.steps if wsd else schedule.decay or task.steps
    yield EngineSetting("scheduler.lr_decay_iters", end, "train.schedule.decay")
    if wsd:
        yield EngineSetting("scheduler.lr_wsd_decay_style", "linear", "train.schedule")
        yield EngineSetting("scheduler.lr_wsd_decay_iters", schedule.decay, "train.schedule.decay")
    yield EngineSetting("scheduler.start_weight_decay", optimizer.weight_decay, "train.optimizer.weight_decay")
    yield EngineSetting("scheduler.end_weight_decay", optimizer.weight_decay, "train.optimizer.weight_decay")
    # A run that is made longer goes on with its new schedule instead of stopping at the difference.
    yield EngineSetting("scheduler.override_opt_param_scheduler", True, "train.schedule")
    for key in ("overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_fp32", "average_in_collective"):
        yield EngineSetting(f"ddp.{key}", True, "layout.shard")
    yield EngineSetting("ddp.use_distributed_optimizer", True, "layout.shard")
    yield EngineSetting("ddp.check_for_nan_in_grad", True, "train.non_finite")
    if task.layout.replicate > 1:
        copies = task.layout.replicate
        yield EngineSetting("ddp.num_distributed_optimizer_instances", copies, "layout.replicate")


def _data(task: EngineTask) -> Iterator[EngineSetting]:
    yield EngineSetting("dataset.seq_length", _sequence_length(task), "data.sequence_length")
    yield EngineSetting("dataset.random_seed", task.recipe.data.seed, "data.seed")
    for key in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        yield EngineSetting(f"dataset.{key}", False, "data")
    yield EngineSetting("dataset.dataloader_type", "single", "data")
    if task.recipe.data.split is not None:
        yield EngineSetting("dataset.split", split_text(task.recipe), "data.split")
    yield EngineSetting("dataset.path_to_cache", f"{task.place.engine}/index", "the cluster's store")
    yield EngineSetting("tokenizer.tokenizer_type", "HuggingFaceTokenizer", "tokenizer")
    yield EngineSetting("tokenizer.tokenizer_model", f"{task.place.engine}/tokenizer", "tokenizer")


def _checkpoints(task: EngineTask) -> Iterator[EngineSetting]:
    saving, run = task.recipe.checkpoint, task.place.run
    folder = f"{run}/checkpoints"
    yield EngineSetting("checkpoint.save", folder, "the cluster's store")
    yield EngineSetting("checkpoint.load", None if saving.resume == "fresh" else folder, "checkpoint.resume")
    yield EngineSetting("checkpoint.exit_on_missing_checkpoint", saving.resume == "must", "checkpoint.resume")
    yield EngineSetting("checkpoint.save_interval", saving.every or task.steps, "checkpoint.every")
    yield EngineSetting("checkpoint.most_recent_k", saving.keep or -1, "checkpoint.keep")
    yield EngineSetting("checkpoint.async_save", saving.async_, "checkpoint.async")
    yield EngineSetting("checkpoint.ckpt_format", "torch_dist", "checkpoint")
    yield EngineSetting("checkpoint.fully_parallel_save", True, "checkpoint")
    yield EngineSetting("logger.log_interval", 1, "observe")
    yield EngineSetting("logger.log_throughput", True, "observe")
    tensorboard = f"{run}/tensorboard" if task.recipe.observe.tensorboard is not False else None
    yield EngineSetting("logger.tensorboard_dir", tensorboard, "observe.tensorboard")


def _sequence_length(task: EngineTask) -> int:
    return task.recipe.data.sequence_length or task.config.max_positions
