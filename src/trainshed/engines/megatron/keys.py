"""Megatron's arguments, each once: the table by which command lines are written and read.

An argument is called by the name of what it sets (argparse's dest). One that a row renders as None is not written, and
`engine.args` may not write it either.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from trainshed.engines.document_flags import document_mask_row
from trainshed.engines.key_table import (
    KEEP,
    OMIT,
    PRETRAINING_UNSAID,
    REFUSED,
    KeyRow,
    KeyTable,
    budget_rows,
    choice,
    choice_if,
    follows,
    has_start_budget,
    not_read,
    recipe_value,
    same,
)
from trainshed.engines.launch import EngineSite, EngineTask
from trainshed.engines.megatron.argument_import import ArgumentImport
from trainshed.engines.megatron.arguments import KNOWN_VERSIONS, versions_with
from trainshed.engines.megatron.data_args import (
    BOUNDARIES,
    BOUNDARY_VERSIONS,
    PROFILE_OPTION_VERSIONS,
    PROFILE_OPTIONS,
    has_boundaries,
    marks_boundaries,
    read_length,
    read_profile,
    read_resume,
    read_save,
    read_save_interval,
    read_sources,
    read_split,
    read_synthetic,
    read_tensorboard,
    read_tokenizer,
    read_validation,
    reads_mask,
    render_profile,
    render_split,
    writes_tensorboard,
)
from trainshed.engines.megatron.layout_args import (
    OPTIMIZER_FORMAT_ROW,
    read_experts,
    read_recompute,
    read_sharding,
    read_stages,
    read_virtual_stages,
    render_recompute,
    render_sharding,
    render_stages,
    render_virtual_stages,
    sharding,
    slides_over_ranks,
    uses_fsdp,
)
from trainshed.engines.megatron.model_args import (
    ARCHITECTURE,
    groups_experts,
    has_experts,
    has_latents,
    has_tokenizer,
    imports_experts,
    imports_latents,
    padded_vocabulary,
    read_architecture,
    render_architecture,
    sequence_length,
    vocabulary,
)
from trainshed.engines.megatron.training_args import (
    SCHEDULES,
    STATE_TYPES,
    STEPPED_VERSIONS,
    has_ramp,
    imports_fp8,
    is_fp8,
    read_decay,
    read_dropout,
    read_global_batch,
    read_lowest_rate,
    read_optimizer,
    read_precision,
    read_ramp,
    read_rate,
    read_router,
    read_shape,
    read_states,
    read_steps,
    read_warmup,
    render_decay,
    render_final_decay,
    render_global_batch,
    render_precision,
    render_ramp,
    render_router,
    render_states,
    render_stepped_ramp,
    render_steps,
    render_warmup,
)
from trainshed.engines.profiles import profiles
from trainshed.plan.legality.check import MEGATRON_VOCABULARY_MULTIPLE
from trainshed.run_folder import MEGATRON_CHECKPOINTS

# Loading and the first compiled step of a large model may keep a rank from the others for longer than the 10 minutes
# that Megatron gives a collective.
_TIMEOUT_MINUTES = 30
_RUN_FOLDER = "the run has its own folder"
_DECIDED_HERE = "Trainshed decides it"
_STATE_OF_BASE = "base weights have no state, and a run's own checkpoints are loaded completely"
_STATE_IS_SAVED = "state is always saved, so that a run can resume"
_TOKENIZER_FILES = "the tokenizer's own files are found by its address"
_SCHEDULE_COUNTS = "the recipe's schedule always counts"
_FUSED_LATENTS = "mla_down_proj_fusion"
_BIAS_UPDATE = "train.moe.bias_update"
_IN_STORE = "runs are kept in the store"
_WITHOUT_MTP = "engine: megatron is rendered without multi-token prediction; engine: torch has it (train.mtp)"
_PADDING_VERSIONS = versions_with("padded_vocab_size")


def checkpoint_folder(site: EngineSite) -> str:
    """Where Megatron keeps its checkpoints."""
    return f"{site.run_folder}/{MEGATRON_CHECKPOINTS}"


def index_folder(site: EngineSite) -> str:
    """Where the cached order of samples is kept, built before GPUs are asked for."""
    return f"{site.input_folder}/index"


def _is_prepared(task: EngineTask) -> bool:
    return not task.recipe.data.synthetic


def _saves(task: EngineTask) -> bool:
    return task.recipe.checkpoint.save


def _saves_async(task: EngineTask) -> bool:
    return task.recipe.checkpoint.save and task.recipe.checkpoint.async_


def _must_resume(task: EngineTask) -> bool:
    return task.recipe.checkpoint.resume == "must"


def _base_folder(task: EngineTask) -> str | None:
    return f"{task.site.input_folder}/base" if task.recipe.model.from_ is not None and not _must_resume(task) else None


def _betas(task: EngineTask) -> dict[str, float]:
    first, second = task.recipe.train.optimizer.betas
    return {"adam_beta1": first, "adam_beta2": second}


def _every_validation(task: EngineTask) -> dict[str, int]:
    validation = task.recipe.data.validation
    every, batches = (validation.every, validation.batches) if validation else (task.steps, 0)
    return {"eval_interval": every, "eval_iters": batches}


def _read_async(config: ArgumentImport) -> Any:
    if not config.get("save"):
        return OMIT
    return bool(config.get("async_save") and config.get("use_persistent_ckpt_worker"))


def _read_sharp(config: ArgumentImport) -> Any:
    if not config.get("use_sharp"):
        return KEEP
    config.cluster["sharp"] = True
    return OMIT


def _read_mask(config: ArgumentImport) -> Any:
    config.note_mapped("engine: megatron, which needs no tensor of the mask", "create_attention_mask_in_dataloader")
    return OMIT


def _unset(path: str, *keys: str, value: Any = None, drop: str = "") -> KeyRow:
    """Return the row of arguments that are never written; an import drops them, or keeps them as `engine.args`."""
    values = dict.fromkeys(keys, value)
    return KeyRow(
        keys, path, lambda task: value if len(keys) == 1 else values, None if drop else lambda config: KEEP, drop=drop
    )


def _dropped_choice(key: str, value: Any, drop: str, **more: Any) -> KeyRow:
    """Return the row of an argument that Trainshed chooses and that an import leaves out."""
    return KeyRow((key,), "engine.args", lambda task: value, chosen=True, drop=drop, **more)


_MODEL_ROWS = (
    KeyRow(ARCHITECTURE, "model", render_architecture, read_architecture),
    KeyRow(
        ("attention_dropout", "hidden_dropout"),
        "train.dropout",
        lambda task: dict.fromkeys(("attention_dropout", "hidden_dropout"), task.recipe.train.dropout),
        read_dropout,
    ),
    # Said outright: left alone, Megatron makes as many rows as the tokenizer has tokens, and drops the model's others.
    follows("padded_vocab_size", "model", padded_vocabulary, "model", versions=_PADDING_VERSIONS),
    choice("make_vocab_size_divisible_by", MEGATRON_VOCABULARY_MULTIPLE, versions=_PADDING_VERSIONS),
    # Versions that cannot be told the rows round the tokenizer's size up to a multiple of this and tp: a multiple as
    # large as all rows gives exactly these.
    follows(
        "make_vocab_size_divisible_by",
        "model",
        lambda task: padded_vocabulary(task) // task.layout.tp,
        "model",
        versions=tuple(version for version in KNOWN_VERSIONS if version not in _PADDING_VERSIONS),
    ),
    choice("transformer_impl", "transformer_engine"),
    choice_if("moe_grouped_gemm", True, groups_experts, imports_experts),
    choice_if("moe_token_dispatcher_type", "alltoall", has_experts, imports_experts),
    choice_if("moe_router_dtype", "fp32", has_experts, imports_experts),
    # Megatron calls it experimental in latent attention; 0.12 stops with it, others stop with it beside plain rope.
    choice_if("apply_rope_fusion", False, has_latents, imports_latents),
    # Its checkpoints have one matrix for both down projections, which are two in every other format.
    follows(_FUSED_LATENTS, "model", lambda task: False, "model", versions=versions_with(_FUSED_LATENTS)),
    KeyRow(
        ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"),
        "train.moe",
        render_router,
        read_router,
        when=has_experts,
    ),
)
_TRAINING_ROWS = (
    same("micro_batch_size", "layout.micro_batch", default=1, unless=1),
    KeyRow(("global_batch_size",), "train.global_batch", render_global_batch, read_global_batch),
    # A stepped schedule may not stand beside --global-batch-size, without which validation takes the smallest batch.
    follows(
        "eval_global_batch_size",
        "train.global_batch",
        lambda task: task.recipe.train.global_batch,
        "train.global_batch",
        when=has_ramp,
        versions=STEPPED_VERSIONS,
    ),
    KeyRow(("train_iters", "train_samples"), "train.steps", render_steps, read_steps),
    KeyRow(("rampup_batch_size",), "train.batch_ramp", render_ramp, read_ramp),
    follows(
        "step_batch_size_schedule",
        "train.batch_ramp",
        render_stepped_ramp,
        "train.batch_ramp",
        when=has_ramp,
        versions=STEPPED_VERSIONS,
    ),
    KeyRow(("lr",), "train.optimizer.lr", lambda task: task.recipe.train.optimizer.lr, read_rate),
    KeyRow(("min_lr",), "train.schedule.min_lr", lambda task: task.recipe.train.schedule.min_lr, read_lowest_rate),
    KeyRow(
        ("lr_decay_style",),
        "train.schedule.name",
        lambda task: SCHEDULES[task.recipe.train.schedule.name],
        read_shape,
    ),
    KeyRow(
        ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "lr_warmup_init"),
        "train.schedule.warmup",
        render_warmup,
        read_warmup,
    ),
    KeyRow(("lr_decay_iters", "lr_decay_samples"), "train.schedule.decay", render_decay, read_decay),
    KeyRow(
        ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
        "train.schedule.decay",
        render_final_decay,
        lambda config: KEEP,
    ),
    KeyRow(
        ("optimizer",),
        "train.optimizer.name",
        lambda task: "adam",
        read_optimizer,
        note="train.optimizer.name: adamw",
    ),
    KeyRow(
        ("adam_beta1", "adam_beta2"),
        "train.optimizer.betas",
        _betas,
        lambda config: [config.get("adam_beta1"), config.get("adam_beta2")],
    ),
    same("adam_eps", "train.optimizer.eps"),
    KeyRow(STATE_TYPES, "train.optimizer.states", render_states, read_states),
    same("weight_decay", "train.optimizer.weight_decay"),
    same(
        "clip_grad",
        "train.optimizer.clip",
        to_engine=lambda clip: clip or 0.0,
        to_recipe=lambda clip: clip or None,
    ),
    same("seed", "seed"),
    KeyRow((), "data.seed", read=lambda config: config.get("seed")),
    _unset("train.non_finite", "check_for_nan_in_loss_and_grad", value=True),
    same("deterministic_mode", "train.deterministic", unless=False),
    KeyRow(("bf16", "fp16", "fp8"), "train.precision", render_precision, read_precision),
    _unset("train.precision", "fp4"),
    # Delayed scaling as NVIDIA's recipes have it (GKE's llama3-70b-fp8: history 1024, algorithm max).
    choice_if("fp8_recipe", "delayed", is_fp8, imports_fp8),
    choice_if("fp8_amax_history_len", 1024, is_fp8, imports_fp8),
    choice_if("fp8_amax_compute_algo", "max", is_fp8, imports_fp8),
)
_LAYOUT_ROWS = (
    KeyRow((), "layout", read=lambda config: {}),
    same("tensor_model_parallel_size", "layout.tp", unless=1),
    follows("sequence_parallel", "layout.tp", lambda task: task.layout.tp > 1, "always on with layout.tp"),
    same("pipeline_model_parallel_size", "layout.pp", unless=1),
    KeyRow(
        ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
        "layout.vp",
        render_virtual_stages,
        read_virtual_stages,
    ),
    KeyRow(
        ("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        "layout.stages",
        render_stages,
        read_stages,
    ),
    _unset(
        "layout.stages",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        value=False,
    ),
    same("context_parallel_size", "layout.cp", unless=1),
    # The ring (p2p) of TransformerEngine has no window.
    KeyRow(
        ("cp_comm_type",),
        "engine.args",
        lambda task: "all_gather",
        lambda config: (
            ["all_gather"] if config.get("context_parallel_size") > 1 and config.get("window_size") else OMIT
        ),
        when=slides_over_ranks,
        chosen=True,
    ),
    # Said outright: left alone it is tp.
    KeyRow(
        ("expert_tensor_parallel_size",), "layout.etp", lambda task: task.layout.etp, read_experts, when=has_experts
    ),
    same("expert_model_parallel_size", "layout.ep", unless=1, when=has_experts),
    KeyRow(
        ("use_distributed_optimizer", "use_megatron_fsdp", "data_parallel_sharding_strategy"),
        "layout.shard",
        render_sharding,
        read_sharding,
    ),
    _unset("layout.shard", "use_torch_fsdp2", value=False),
    same("num_distributed_optimizer_instances", "layout.replicate", unless=1),
    choice("overlap_grad_reduce", True),
    KeyRow(
        ("overlap_param_gather",),
        "engine.args",
        lambda task: task.layout.shard != "none",
        lambda config: sharding(config) != "none",
        chosen=True,
    ),
    choice_if(
        "gradient_accumulation_fusion",
        False,
        lambda task: uses_fsdp(task.layout),
        lambda config: config.get("use_megatron_fsdp"),
    ),
    KeyRow(
        ("recompute_granularity", "recompute_activations", "recompute_method", "recompute_num_layers"),
        "layout.recompute",
        render_recompute,
        read_recompute,
    ),
    KeyRow(
        ("recompute_modules",),
        "engine.args",
        lambda task: ("core_attn",),
        lambda config: ["core_attn"] if config.recipe["layout"].get("recompute") == "selective" else OMIT,
        when=lambda task: task.layout.recompute == "selective",
        chosen=True,
    ),
    KeyRow(
        ("use_sharp",),
        "the fabric of the cluster file",
        lambda task: task.site.sharp,
        _read_sharp,
        note="sharp: true in the cluster file",
    ),
)
_DATA_ROWS = (
    KeyRow(("seq_length",), "data.sequence_length", sequence_length, read_length),
    KeyRow(("mock_data",), "data.synthetic", lambda task: task.recipe.data.synthetic, read_synthetic),
    KeyRow(
        ("tokenizer_type", "tokenizer_model"),
        "tokenizer",
        lambda task: {
            "tokenizer_type": "HuggingFaceTokenizer" if has_tokenizer(task) else "NullTokenizer",
            "tokenizer_model": f"{task.site.input_folder}/tokenizer" if has_tokenizer(task) else None,
        },
        read_tokenizer,
    ),
    # Tokens are prepared, so nothing is encoded; but only the fast kind reads a tokenizer.json alone.
    _dropped_choice(
        "tokenizer_hf_use_fast",
        True,
        _DECIDED_HERE,
        when=has_tokenizer,
        versions=versions_with("tokenizer_hf_use_fast"),
    ),
    # So that a checkpoint says how many rows of the embedding are tokens.
    follows("vocab_size", "model", vocabulary, "model"),
    _unset("tokenizer", "vocab_file", "merge_file", drop=_TOKENIZER_FILES),
    _unset("tokenizer", "trust_remote_code", value=False, drop="remote code is never run"),
    KeyRow(
        ("data_path", "train_data_path", "test_data_path"),
        "data.train",
        lambda task: dict.fromkeys(("data_path", "train_data_path", "test_data_path")),
        read_sources,
    ),
    _unset("data.train", "valid_data_path"),
    KeyRow(
        ("per_split_data_args_path", "data_args_path"),
        "data",
        lambda task: {
            "per_split_data_args_path": (
                f"{task.site.input_folder}/data.json" if _is_prepared(task) and task.recipe.data.split is None else None
            ),
            "data_args_path": (
                f"{task.site.input_folder}/data-args.txt" if _is_prepared(task) and task.recipe.data.split else None
            ),
        },
        lambda config: KEEP,
    ),
    KeyRow(
        ("data_cache_path",),
        "data",
        lambda task: index_folder(task.site) if _is_prepared(task) else None,
        drop="the index is built in the run's folder, before GPUs are allocated",
    ),
    KeyRow(("split",), "data.split", render_split, read_split),
    document_mask_row(reads_mask=reads_mask, marks_boundaries=has_boundaries),
    # Where documents begin, for TransformerEngine, which reads no tensor of a mask.
    follows(
        BOUNDARIES,
        "data.document_mask",
        lambda task: task.recipe.document_mask,
        "data.document_mask",
        versions=BOUNDARY_VERSIONS,
    ),
    KeyRow(
        ("dataloader_type",),
        "data",
        lambda task: "single",
        drop="samples come in the order of the index, once each",
    ),
    # TransformerEngine needs no tensor of the mask; Megatron's own attention does, where documents are kept apart.
    KeyRow(
        ("create_attention_mask_in_dataloader",),
        "engine.args",
        lambda task: task.recipe.document_mask and not marks_boundaries(task),
        _read_mask,
        chosen=True,
    ),
    KeyRow(("eval_interval", "eval_iters"), "data.validation", _every_validation, read_validation),
)
# `--load` names the run's own checkpoints always: a restart goes on with them. Where there are none, Megatron takes
# `--pretrained-checkpoint` (as with --finetune: weights alone, from step 0); it looks for own ones first.
_CHECKPOINT_ROWS = (
    KeyRow(
        ("save",),
        "checkpoint.save",
        lambda task: checkpoint_folder(task.site) if _saves(task) else None,
        read_save,
        decided_by="checkpoint",
        note="dropped: the run has its own folder; without it `checkpoint: off`",
    ),
    KeyRow(("load",), "checkpoint", lambda task: checkpoint_folder(task.site), drop=_RUN_FOLDER),
    KeyRow(
        ("save_interval",),
        "checkpoint.every",
        lambda task: task.recipe.checkpoint.every or task.steps,
        read_save_interval,
        when=_saves,
    ),
    # Megatron's FSDP knows no other.
    KeyRow(
        ("ckpt_format",),
        "checkpoint",
        lambda task: "fsdp_dtensor" if uses_fsdp(task.layout) else "torch_dist",
        drop="checkpoints are torch_dist (with Megatron's FSDP its own), which load on any layout",
    ),
    OPTIMIZER_FORMAT_ROW,
    KeyRow(("async_save",), "checkpoint.async", _saves_async, _read_async),
    # Without a worker that stays, --async-save is switched off with a warning.
    KeyRow(
        ("use_persistent_ckpt_worker",),
        "checkpoint.async",
        _saves_async,
        drop="it comes with checkpoint.async",
    ),
    # The other one is a package that not every image has.
    _dropped_choice(
        "async_strategy",
        "mcore",
        _DECIDED_HERE,
        when=_saves_async,
        versions=versions_with("async_strategy"),
    ),
    follows("pretrained_checkpoint", "model.from", _base_folder, "model.from"),
    _unset("model.from", "finetune", value=False, drop="a run's own checkpoints are loaded completely"),
    _unset("model", "use_checkpoint_args", value=False, drop="the architecture is in the recipe"),
    KeyRow(("exit_on_missing_checkpoint",), "checkpoint.resume", _must_resume, read_resume),
    _unset("checkpoint", "no_load_optim", "no_load_rng", drop=_STATE_OF_BASE),
    _unset("checkpoint", "no_save_optim", "no_save_rng", drop=_STATE_IS_SAVED),
    # What the recipe says today counts, not what the checkpoint was trained with: a run may be made longer.
    KeyRow(("override_opt_param_scheduler",), "train.schedule", lambda task: True, drop=_SCHEDULE_COUNTS),
    KeyRow(("use_checkpoint_opt_param_scheduler",), "train.schedule", lambda task: False, drop=_SCHEDULE_COUNTS),
    _dropped_choice("exit_signal_handler", True, "it is always on"),
)
_LOG_ROWS = (
    _dropped_choice("log_interval", 1, "every step is logged"),
    _dropped_choice("log_throughput", True, "it is always on"),
    choice("distributed_timeout_minutes", _TIMEOUT_MINUTES, when=lambda task: not has_start_budget(task)),
    *budget_rows("distributed_timeout_minutes", "distributed_timeout_seconds_after_init"),
    choice("attention_backend", "auto"),
    KeyRow(
        ("tensorboard_dir",),
        "observe.tensorboard",
        lambda task: f"{task.site.run_folder}/tensorboard" if writes_tensorboard(task) else None,
        read_tensorboard,
        note="observe.tensorboard; left out, Megatron writes it",
    ),
    choice("log_timers_to_tensorboard", True, when=writes_tensorboard),
    choice("log_memory_to_tensorboard", True, when=writes_tensorboard),
    KeyRow(
        ("profile", "use_pytorch_profiler", "profile_step_start", "profile_step_end", "profile_ranks"),
        "observe.profile",
        render_profile,
        read_profile,
    ),
    *(
        follows(
            theirs,
            f"observe.profile.{key}",
            partial(recipe_value, path=f"observe.profile.{key}"),
            "observe.profile",
            when=profiles,
            versions=PROFILE_OPTION_VERSIONS,
        )
        for key, theirs in PROFILE_OPTIONS.items()
    ),
    # As AMD's own images are started (rocm/megatron-lm): their kernels for these are missing.
    KeyRow(
        ("masked_softmax_fusion",),
        "engine.args",
        lambda task: False,
        when=lambda task: task.site.vendor == "amd",
        chosen=True,
    ),
    KeyRow(
        ("gradient_accumulation_fusion",),
        "engine.args",
        lambda task: False,
        when=lambda task: task.site.vendor == "amd" and not uses_fsdp(task.layout),
        chosen=True,
    ),
)
_SAID_HERE = ("model.config.mla", _BIAS_UPDATE, "checkpoint.save")
MEGATRON_TABLE = KeyTable(
    rows=(
        *_MODEL_ROWS,
        *_TRAINING_ROWS,
        *_LAYOUT_ROWS,
        *_DATA_ROWS,
        *_CHECKPOINT_ROWS,
        *_LOG_ROWS,
        not_read(_WITHOUT_MTP, "mtp_num_layers", "mtp_loss_scaling_factor"),
        not_read(_DECIDED_HERE, "distributed_backend", "legacy_tokenizer"),
        not_read(_IN_STORE, "wandb_project", "wandb_exp_name", "wandb_save_dir"),
    ),
    read_order=(
        *("model", "train.batch_ramp", "train.steps", "train.global_batch", "train.precision"),
        *(f"train.optimizer.{key}" for key in ("lr", "betas", "eps", "weight_decay", "clip", "states", "name")),
        *(f"train.schedule.{key}" for key in ("name", "warmup", "decay", "min_lr")),
        *("train.dropout", "seed", "train.moe", "train.deterministic", "layout"),
        *(f"layout.{key}" for key in ("tp", "pp", "vp", "cp", "ep", "etp", "micro_batch", "shard", "replicate")),
        *("layout.recompute", "layout.stages"),
        *("data.sequence_length", "data.seed", "data.synthetic", "data.train", "data.split", "data.validation"),
        "data.document_mask",
        *(
            "tokenizer",
            "checkpoint.save",
            "checkpoint.every",
            "checkpoint.async",
            "checkpoint.resume",
            "observe",
            "engine.args",
        ),
    ),
    unsaid={
        **{key: why for key, why in PRETRAINING_UNSAID.items() if key not in _SAID_HERE},
        "checkpoint.keep": "Megatron deletes no checkpoints: another program of the job does",
        "observe.dllogger": REFUSED,
    },
)
