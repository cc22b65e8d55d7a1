"""A task in the words of Megatron-Bridge: the fields of its ConfigContainer, with who decides each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainshed.engines.engine_arguments import KnownKeys, Setting
from trainshed.engines.foreign import EngineTask
from trainshed.engines.nemo.settings import split_text
from trainshed.recipe import MoeLosses

KNOWN = KnownKeys("Megatron-Bridge 0.5.0", Path(__file__).with_name("keys-bridge-0.5.0.yaml"))
# bf16 elsewhere; hybrid fp8 with delayed scaling over 1024 steps is what NeMo 24.07's configuration asks for too.
PRECISION = {"bf16": "bf16_mixed", "fp8": "bf16_with_fp8_delayed_scaling_mixed"}
_STYLES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "WSD"}
_RECOMPUTE = {"none": (None, None, None), "selective": ("selective", None, None), "full": ("full", "uniform", 1)}


def bridge_settings(task: EngineTask) -> list[Setting]:
    """Return every field that recipe, plan and cluster decide, by `section.field`."""
    return [
        *(_architecture(task) if task.recipe.model.from_ is None else ()),
        *_layout(task),
        *_training(task),
        *_optimisation(task),
        *_data(task),
        *_keeping(task),
    ]


def _architecture(task: EngineTask) -> Iterator[Setting]:
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
    yield from (Setting(f"model.{key}", value, "model") for key, value in fields.items())


def _layout(task: EngineTask) -> Iterator[Setting]:
    layout, train = task.layout, task.recipe.train
    granularity, method, layers = _RECOMPUTE[layout.recompute]
    yield Setting("model.seq_length", _length(task), "data.sequence_length")
    yield Setting("model.tensor_model_parallel_size", layout.tp, "layout.tp")
    yield Setting("model.pipeline_model_parallel_size", layout.pp, "layout.pp")
    interleaved = layout.vp if layout.vp > 1 else None
    yield Setting("model.virtual_pipeline_model_parallel_size", interleaved, "layout.vp")
    yield Setting("model.context_parallel_size", layout.cp, "layout.cp")
    yield Setting("model.sequence_parallel", layout.tp > 1, "layout.tp")
    yield Setting("model.recompute_granularity", granularity, "layout.recompute")
    yield Setting("model.recompute_method", method, "layout.recompute")
    yield Setting("model.recompute_num_layers", layers, "layout.recompute")
    yield Setting("model.hidden_dropout", train.dropout, "train.dropout")
    yield Setting("model.attention_dropout", train.dropout, "train.dropout")
    if train.deterministic:
        yield Setting("model.deterministic_mode", True, "train.deterministic")
        yield Setting("model.cross_entropy_loss_fusion", False, "train.deterministic")
    if task.config.moe is not None:
        losses = train.moe or MoeLosses()
        yield Setting("model.expert_model_parallel_size", layout.ep, "layout.ep")
        yield Setting("model.expert_tensor_parallel_size", layout.etp, "layout.etp")
        # Per sequence, as the recipe's balance loss is, so that it does not change with the layout.
        yield Setting("model.moe_router_load_balancing_type", "seq_aux_loss", "train.moe")
        yield Setting("model.moe_aux_loss_coeff", losses.balance_loss, "train.moe.balance_loss")
        yield Setting("model.moe_z_loss_coeff", losses.z_loss or None, "train.moe.z_loss")
        yield Setting("model.moe_grouped_gemm", True, "model")
        yield Setting("model.moe_token_dispatcher_type", "alltoall", "model")


def _training(task: EngineTask) -> Iterator[Setting]:
    recipe, train, validation = task.recipe, task.recipe.train, task.recipe.data.validation
    ramp = train.batch_ramp
    yield Setting("train.train_iters", task.steps, "train.steps")
    yield Setting("train.global_batch_size", train.global_batch, "train.global_batch")
    yield Setting("train.micro_batch_size", task.layout.micro_batch, "layout.micro_batch")
    if ramp is not None:
        ramped = [ramp.start, ramp.increment, ramp.samples]
        yield Setting("train.rampup_batch_size", ramped, "train.batch_ramp")
    # A checkpoint when the scheduler says stop: the agent forwards TERM and waits.
    yield Setting("train.exit_signal_handler", True, "checkpoint")
    yield Setting("train.manual_gc", True, "the plan")
    yield Setting("train.manual_gc_interval", 100, "the plan")
    yield Setting("validation.eval_interval", validation.every if validation else None, "data.validation.every")
    yield Setting("validation.eval_iters", validation.batches if validation else 0, "data.validation.batches")
    yield Setting("rng.seed", recipe.seed, "seed")
    yield Setting("dist.use_sharp", task.place.sharp, "the cluster's sharp")
    if (profile := recipe.observe.profile) is not None:
        yield Setting("profiling.use_pytorch_profiler", True, "observe.profile")
        yield Setting("profiling.profile_step_start", profile.steps_before, "observe.profile.start")
        yield Setting("profiling.profile_step_end", profile.steps_before + profile.steps, "observe.profile.steps")
        yield Setting("profiling.profile_ranks", list(profile.ranks), "observe.profile.ranks")


def _optimisation(task: EngineTask) -> Iterator[Setting]:
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
        yield Setting(f"optimizer.{key}", value, source)
    yield Setting("scheduler.lr_decay_style", _STYLES[schedule.name], "train.schedule.name")
    yield Setting("scheduler.lr_warmup_iters", schedule.warmup, "train.schedule.warmup")
    wsd = schedule.name == "wsd"
    end = task.steps if wsd else schedule.decay or task.steps
    yield Setting("scheduler.lr_decay_iters", end, "train.schedule.decay")
    if wsd:
        yield Setting("scheduler.lr_wsd_decay_style", "linear", "train.schedule")
        yield Setting("scheduler.lr_wsd_decay_iters", schedule.decay, "train.schedule.decay")
    yield Setting("scheduler.start_weight_decay", optimizer.weight_decay, "train.optimizer.weight_decay")
    yield Setting("scheduler.end_weight_decay", optimizer.weight_decay, "train.optimizer.weight_decay")
    # A run that is made longer goes on with its new schedule instead of stopping at the difference.
    yield Setting("scheduler.override_opt_param_scheduler", True, "train.schedule")
    for key in ("overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_fp32", "average_in_collective"):
        yield Setting(f"ddp.{key}", True, "layout.shard")
    yield Setting("ddp.use_distributed_optimizer", True, "layout.shard")
    yield Setting("ddp.check_for_nan_in_grad", True, "train.non_finite")
    if task.layout.replicate > 1:
        copies = task.layout.replicate
        yield Setting("ddp.num_distributed_optimizer_instances", copies, "layout.replicate")


def _data(task: EngineTask) -> Iterator[Setting]:
    yield Setting("dataset.seq_length", _length(task), "data.sequence_length")
    yield Setting("dataset.random_seed", task.recipe.data.seed, "data.seed")
    for key in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        yield Setting(f"dataset.{key}", False, "data")
    yield Setting("dataset.dataloader_type", "single", "data")
    if task.recipe.data.split is not None:
        yield Setting("dataset.split", split_text(task.recipe), "data.split")
    yield Setting("dataset.path_to_cache", f"{task.place.engine}/index", "the cluster's store")
    yield Setting("tokenizer.tokenizer_type", "HuggingFaceTokenizer", "tokenizer")
    yield Setting("tokenizer.tokenizer_model", f"{task.place.engine}/tokenizer", "tokenizer")


def _keeping(task: EngineTask) -> Iterator[Setting]:
    saving, run = task.recipe.checkpoint, task.place.run
    folder = f"{run}/checkpoints"
    yield Setting("checkpoint.save", folder, "the cluster's store")
    yield Setting("checkpoint.load", None if saving.resume == "fresh" else folder, "checkpoint.resume")
    yield Setting("checkpoint.exit_on_missing_checkpoint", saving.resume == "must", "checkpoint.resume")
    yield Setting("checkpoint.save_interval", saving.every or task.steps, "checkpoint.every")
    yield Setting("checkpoint.most_recent_k", saving.keep or -1, "checkpoint.keep")
    yield Setting("checkpoint.async_save", saving.async_, "checkpoint.async")
    yield Setting("checkpoint.ckpt_format", "torch_dist", "checkpoint")
    yield Setting("checkpoint.fully_parallel_save", True, "checkpoint")
    yield Setting("logger.log_interval", 1, "observe")
    yield Setting("logger.log_throughput", True, "observe")
    tensorboard = f"{run}/tensorboard" if task.recipe.observe.tensorboard is not False else None
    yield Setting("logger.tensorboard_dir", tensorboard, "observe.tensorboard")


def _length(task: EngineTask) -> int:
    return task.recipe.data.sequence_length or task.config.max_positions
