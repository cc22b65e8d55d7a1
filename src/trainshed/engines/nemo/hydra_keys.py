"""A task as keys of NeMo 24.07's Hydra file: every key that recipe, plan or cluster decides, with who decides it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainshed.engines.keys import EngineSetting, KnownKeys, flatten
from trainshed.engines.launch import EngineTask
from trainshed.recipe import ModelConfig, MoeLosses, Recipe, Schedule
from trainshed.recipe.section import Problem
from trainshed.recipe.yaml_io import parse_yaml

_FIXED_FILE = Path(__file__).with_name("fixed-24.07.yaml")
HYDRA_KEYS = KnownKeys("NeMo 24.07", Path(__file__).with_name("keys-24.07.yaml"))
GPT2_TOKENIZER_NAME = "gpt2"
"""The Hub's name of the tokenizer that NeMo has a class of its own for."""
_RECOMPUTE = {
    "none": (None, None, None),
    "selective": ("selective", None, None),
    "full": ("full", "uniform", 1),  # groups of one layer: every layer is computed again
}


def fixed_settings() -> dict[str, Any]:
    """Return what is written whatever the recipe says, by dotted key."""
    return flatten(parse_yaml(_FIXED_FILE.read_text(encoding="utf-8"), _FIXED_FILE.name).value)


def task_settings(task: EngineTask) -> list[EngineSetting]:
    """Return what recipe, plan and cluster decide; places are in `place_settings`."""
    return [
        *_trainer(task),
        *_experiment(task),
        *_layout(task),
        *architecture_settings(task.config),
        *_model_options(task),
        *_optimisation(task),
        *_data(task),
    ]


def place_settings(task: EngineTask) -> list[EngineSetting]:
    """Return what hangs on where the job runs: given as overrides, so that the file is the same everywhere."""
    place, store = task.place, "the cluster's store"
    settings = [
        EngineSetting("trainer.num_nodes", place.nodes, "the number of nodes"),
        EngineSetting("exp_manager.name", task.recipe.name, "name"),
        EngineSetting("exp_manager.explicit_log_dir", f"{place.run}/nemo", store),
        EngineSetting("exp_manager.checkpoint_callback_params.dirpath", f"{place.run}/checkpoints", store),
        EngineSetting("model.data.index_mapping_dir", f"{place.engine}/index", store),
    ]
    if task.recipe.observe.dllogger is not False:
        log = f"{place.run}/dllogger/rank-0/dllogger.json"
        settings.append(EngineSetting("exp_manager.dllogger_logger_kwargs.json_file", log, store))
    folder = f"{place.engine}/tokenizer"
    if is_gpt2(task.recipe):
        settings.append(EngineSetting("model.tokenizer.vocab_file", f"{folder}/vocab.json", "tokenizer"))
        settings.append(EngineSetting("model.tokenizer.merge_file", f"{folder}/merges.txt", "tokenizer"))
    else:
        settings.append(EngineSetting("model.tokenizer.type", folder, "tokenizer"))
    return settings


def is_gpt2(recipe: Recipe) -> bool:
    """Whether the recipe's tokenizer is GPT-2's own."""
    name = recipe.tokenizer if isinstance(recipe.tokenizer, str) else ""
    return name.startswith("hf://") and name.rpartition("/")[2].partition("@")[0] == GPT2_TOKENIZER_NAME


def _trainer(task: EngineTask) -> Iterator[EngineSetting]:
    recipe, validation = task.recipe, task.recipe.data.validation
    clip = recipe.train.optimizer.clip
    yield EngineSetting("trainer.devices", task.place.gpus_per_node, "the cluster's machine")
    yield EngineSetting("trainer.precision", "bf16", "train.precision")
    yield EngineSetting("trainer.max_steps", task.steps, "train.steps")
    yield EngineSetting("trainer.val_check_interval", validation.every if validation else None, "data.validation.every")
    # Not validating is a float 0.0: NeMo counts an integer as batches and a float as a share.
    batches = validation.batches if validation else 0.0
    yield EngineSetting("trainer.limit_val_batches", batches, "data.validation.batches")
    tested = validation.batches if validation and recipe.data.split and recipe.data.split.test else 0
    yield EngineSetting("trainer.limit_test_batches", tested, "data.split.test")
    # megatron-core compares the number: 0.0 and not null is no clipping.
    yield EngineSetting("trainer.gradient_clip_val", clip or 0.0, "train.optimizer.clip")


def _experiment(task: EngineTask) -> Iterator[EngineSetting]:
    recipe, saving = task.recipe, task.recipe.checkpoint
    callback = "exp_manager.checkpoint_callback_params"
    yield EngineSetting(
        "exp_manager.create_tensorboard_logger", recipe.observe.tensorboard is not False, "observe.tensorboard"
    )
    yield EngineSetting("exp_manager.create_dllogger_logger", recipe.observe.dllogger is not False, "observe.dllogger")
    yield EngineSetting("exp_manager.resume_if_exists", saving.resume != "fresh", "checkpoint.resume")
    yield EngineSetting("exp_manager.resume_ignore_no_checkpoint", saving.resume != "must", "checkpoint.resume")
    yield EngineSetting("exp_manager.create_checkpoint_callback", True, "checkpoint")
    yield EngineSetting(f"{callback}.every_n_train_steps", saving.every, "checkpoint.every")
    yield EngineSetting(f"{callback}.save_top_k", saving.keep or -1, "checkpoint.keep")
    yield EngineSetting(f"{callback}.async_save", saving.async_, "checkpoint.async")
    yield EngineSetting(f"{callback}.model_parallel_size", task.layout.tp * task.layout.pp, "layout")


def _layout(task: EngineTask) -> Iterator[EngineSetting]:
    layout, train = task.layout, task.recipe.train
    ramp = train.batch_ramp
    interleaved = layout.vp > 1
    granularity, method, layers = _RECOMPUTE[layout.recompute]
    yield EngineSetting("model.micro_batch_size", layout.micro_batch, "layout.micro_batch")
    yield EngineSetting("model.global_batch_size", train.global_batch, "train.global_batch")
    ramped = [ramp.start, ramp.increment, ramp.samples] if ramp else None
    yield EngineSetting("model.rampup_batch_size", ramped, "train.batch_ramp")
    yield EngineSetting("model.tensor_model_parallel_size", layout.tp, "layout.tp")
    yield EngineSetting("model.pipeline_model_parallel_size", layout.pp, "layout.pp")
    yield EngineSetting("model.virtual_pipeline_model_parallel_size", layout.vp if interleaved else None, "layout.vp")
    yield EngineSetting("model.context_parallel_size", layout.cp, "layout.cp")
    yield EngineSetting("model.expert_model_parallel_size", layout.ep, "layout.ep")
    yield EngineSetting("model.sequence_parallel", layout.tp > 1, "layout.tp")
    yield EngineSetting("model.overlap_p2p_comm", interleaved, "layout.vp")
    yield EngineSetting("model.batch_p2p_comm", not interleaved, "layout.vp")
    yield EngineSetting("model.activations_checkpoint_granularity", granularity, "layout.recompute")
    yield EngineSetting("model.activations_checkpoint_method", method, "layout.recompute")
    yield EngineSetting("model.activations_checkpoint_num_layers", layers, "layout.recompute")


def _model_options(task: EngineTask) -> Iterator[EngineSetting]:
    train, fp8 = task.recipe.train, task.recipe.train.precision == "fp8"
    yield EngineSetting("model.precision", "bf16", "train.precision")
    yield EngineSetting("model.fp8", fp8, "train.precision")
    yield EngineSetting("model.fp8_hybrid", fp8, "train.precision")
    yield EngineSetting("model.hidden_dropout", train.dropout, "train.dropout")
    yield EngineSetting("model.attention_dropout", train.dropout, "train.dropout")
    yield EngineSetting("model.seed", task.recipe.seed, "seed")
    if task.place.sharp:
        yield EngineSetting("model.sharp", True, "the cluster's sharp")
    if task.config.moe is not None:
        losses = train.moe or MoeLosses()
        yield EngineSetting("model.moe_router_load_balancing_type", "aux_loss", "train.moe")
        yield EngineSetting("model.moe_aux_loss_coeff", losses.balance_loss, "train.moe.balance_loss")
        yield EngineSetting("model.moe_z_loss_coeff", losses.z_loss or None, "train.moe.z_loss")
        yield EngineSetting("model.moe_grouped_gemm", True, "model")
        yield EngineSetting("model.moe_token_dispatcher_type", "alltoall", "model")
    if (profile := task.recipe.observe.profile) is not None:
        yield EngineSetting("model.nsys_profile.enabled", True, "observe.profile")
        yield EngineSetting("model.nsys_profile.start_step", profile.steps_before, "observe.profile.start")
        yield EngineSetting(
            "model.nsys_profile.end_step", profile.steps_before + profile.steps - 1, "observe.profile.steps"
        )
        yield EngineSetting("model.nsys_profile.ranks", list(profile.ranks), "observe.profile.ranks")


def _optimisation(task: EngineTask) -> Iterator[EngineSetting]:
    optimizer = task.recipe.train.optimizer
    yield EngineSetting("model.optim.name", "mcore_distributed_optim", "layout.shard")
    yield EngineSetting("model.optim.lr", optimizer.lr, "train.optimizer.lr")
    yield EngineSetting("model.optim.weight_decay", optimizer.weight_decay, "train.optimizer.weight_decay")
    yield EngineSetting("model.optim.betas", list(optimizer.betas), "train.optimizer.betas")
    yield EngineSetting("model.optim.check_for_nan_in_grad", True, "train.non_finite")
    for key, value in _schedule(task.recipe.train.schedule, task.steps).items():
        yield EngineSetting(f"model.optim.sched.{key}", value, "train.schedule")


def _schedule(schedule: Schedule, steps: int) -> dict[str, Any]:
    """Each of NeMo's schedules ends at `max_steps`, which is the run's end where it is not given."""
    keys: dict[str, Any] = {"warmup_steps": schedule.warmup, "min_lr": schedule.min_lr}
    if schedule.name == "constant":
        return {"name": "WarmupPolicy", **keys}
    if schedule.name == "wsd":
        assert schedule.decay is not None, "the schema asks for it"
        held = max(0, steps - schedule.decay - schedule.warmup)
        return {"name": "PolynomialHoldDecayAnnealing", **keys, "hold_steps": held, "power": 1.0}
    end = {} if schedule.decay is None else {"max_steps": schedule.decay}
    if schedule.name == "linear":
        return {"name": "WarmupAnnealing", **keys, **end}
    return {"name": "CosineAnnealing", **keys, "constant_steps": 0, **end}


def _data(task: EngineTask) -> Iterator[EngineSetting]:
    data = task.recipe.data
    length = data.sequence_length or task.config.max_positions
    yield EngineSetting("model.encoder_seq_length", length, "data.sequence_length")
    yield EngineSetting("model.data.seq_length", length, "data.sequence_length")
    yield EngineSetting("model.data.data_impl", "mock" if data.synthetic else "mmap", "data.synthetic")
    yield EngineSetting("model.data.splits_string", split_text(task.recipe), "data.split")
    if data.synthetic:
        yield EngineSetting("model.data.data_prefix", [], "data.synthetic")
    if is_gpt2(task.recipe):
        yield EngineSetting("model.tokenizer.library", "megatron", "tokenizer")
        yield EngineSetting("model.tokenizer.type", "GPT2BPETokenizer", "tokenizer")
    else:
        yield EngineSetting("model.tokenizer.library", "huggingface", "tokenizer")
        yield EngineSetting("model.tokenizer.use_fast", True, "tokenizer")
    yield EngineSetting("model.tokenizer.model", None, "tokenizer")
    yield EngineSetting("model.tokenizer.delimiter", None, "tokenizer")


def split_text(recipe: Recipe) -> str | None:
    """Return the parts of one corpus; None where validation has documents of its own and prefixes are by split."""
    split = recipe.data.split
    if split is None:
        own = recipe.data.validation is not None and recipe.data.validation.kind is not None
        return None if own else "100,0,0"
    return ",".join(f"{100 * part:g}" for part in (split.train, split.validation, split.test))


NORMALIZATION = {"rms": "rmsnorm", "layer": "layernorm"}
POSITIONS = {"rope": "rope", "learned": "learned_absolute"}
# (our activation, gated) to NeMo's name. Its tanh approximation is a flag of `gelu`.
ACTIVATIONS = {
    ("silu", True): "fast-swiglu",
    ("gelu", True): "fast-geglu",
    ("gelu", False): "gelu",
    ("gelu_tanh", False): "gelu",
}


def architecture_settings(config: ModelConfig) -> Iterator[EngineSetting]:
    """Yield the keys that a model's sizes decide."""
    usual_head = config.hidden // config.heads
    for key, value in {
        "max_position_embeddings": config.max_positions,
        "num_layers": config.layers,
        "hidden_size": config.hidden,
        "ffn_hidden_size": config.moe.ffn if config.moe else config.ffn,
        "num_attention_heads": config.heads,
        "num_query_groups": config.kv_heads,
        "kv_channels": None if config.head_dim == usual_head else config.head_dim,
        "init_method_std": config.init_std,
        "normalization": NORMALIZATION[config.norm],
        "layernorm_epsilon": config.norm_eps,
        "bias": config.mlp_bias,
        "activation": ACTIVATIONS.get((config.activation, config.gated)),
        "openai_gelu": config.activation == "gelu_tanh",
        # megatron-core's fused kernel is the tanh approximation: neither of the two others may use it.
        "bias_activation_fusion": config.activation == "silu",
        "position_embedding_type": POSITIONS[config.positions],
        "apply_rope_fusion": config.positions == "rope",
        "share_embeddings_and_output_weights": config.tied_embeddings,
    }.items():
        yield EngineSetting(f"model.{key}", value, "model")
    if config.qkv_bias and not config.mlp_bias:
        yield EngineSetting("model.qkv_bias", True, "model")
    if config.rope is not None:
        scaling = config.rope.scaling
        yield EngineSetting("model.rotary_base", config.rope.base, "model")
        yield EngineSetting("model.seq_len_interpolation_factor", scaling.factor if scaling else None, "model")
    if config.moe is not None:
        yield EngineSetting("model.num_moe_experts", config.moe.experts, "model")
        yield EngineSetting("model.moe_router_topk", config.moe.top_k, "model")


def architecture_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield what NeMo 24.07 cannot build."""
    newer = 'write engine: {name: nemo, version: "26.06"}, which can'
    for absent, what in (
        (config.qk_norm, "normalised queries and keys (qk_norm)"),
        (
            config.rope is not None and config.rope.scaling is not None and config.rope.scaling.kind == "llama3",
            "Llama 3.1's stretched rotary frequencies",
        ),
        (config.sliding_window is not None, "a sliding window"),
        (config.moe is not None and config.moe.shared_ffn > 0, "a shared expert"),
        (config.moe is not None and not config.moe.normalize_top_k, "expert weights that do not sum to 1"),
    ):
        if absent:
            yield Problem(("model",), f"NeMo 24.07 has no {what}", newer)
    if (config.activation, config.gated) not in ACTIVATIONS:
        gate = "with" if config.gated else "without"
        yield Problem(("model",), f"NeMo 24.07 has no {config.activation} {gate} a gate", "write engine: megatron")
