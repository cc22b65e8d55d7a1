"""The recipe's keys as Megatron's arguments: model, training, layout, data, checkpoints, logs.

Every fact of the architecture is written, since `--use-checkpoint-args` restores only a part. Where Megatron's files
lie in the run's folder is said here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from trainshed.checkpoints.megatron.args import architecture_args
from trainshed.data.sampling.schedule import BatchRampUp, BatchSchedule
from trainshed.engines.launch import EngineSite, EngineTask
from trainshed.engines.megatron.settings import MegatronSettings
from trainshed.errors import InputError
from trainshed.plan.layout import RankLayout
from trainshed.plan.legality.check import MEGATRON_VOCABULARY_MULTIPLE
from trainshed.plan.legality.rules import round_up
from trainshed.recipe import MoeLosses

_ROPE_ARGUMENTS = ("rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor")


def sequence_length(task: EngineTask) -> int:
    """Return the tokens of a sample; synthetic data may leave it to the model."""
    return task.recipe.data.sequence_length or task.config.max_positions


def padded_vocabulary(task: EngineTask) -> int:
    """Return the rows of the embedding, as the planner counts them."""
    return round_up(task.config.vocab_size, MEGATRON_VOCABULARY_MULTIPLE * task.layout.tp)


def render_model(settings: MegatronSettings, task: EngineTask) -> None:
    """Decide the architecture."""
    config, recipe = task.config, task.recipe
    try:
        said = architecture_args(config)
    except InputError as error:
        raise InputError(error.what, where=recipe.where("model"), hint="write `engine: torch`") from None
    said["max_position_embeddings"] = max(config.max_positions, sequence_length(task))
    if config.kv_heads == config.heads:
        said["num_query_groups"] = None
    if config.gated:
        said["bias_gelu_fusion"] = None
    if config.rope is None:
        said |= dict.fromkeys(_ROPE_ARGUMENTS)
    if not said["use_rope_scaling"]:
        said["rope_scaling_factor"] = None
    settings.put("model", **said)
    settings.put("train.dropout", attention_dropout=recipe.train.dropout, hidden_dropout=recipe.train.dropout)
    # Said outright: left alone, Megatron makes as many rows as the tokenizer has tokens, and drops the model's others.
    settings.put("model", padded_vocab_size=padded_vocabulary(task))
    settings.choose(make_vocab_size_divisible_by=MEGATRON_VOCABULARY_MULTIPLE, transformer_impl="transformer_engine")
    if config.moe is not None:
        _render_moe(settings, task)


def _render_moe(settings: MegatronSettings, task: EngineTask) -> None:
    settings.choose(moe_grouped_gemm=True, moe_token_dispatcher_type="alltoall", moe_router_dtype="fp32")
    # As for our own engine: what the recipe does not write is as the schema defaults it.
    losses = task.recipe.train.moe or MoeLosses()
    settings.put(
        "train.moe",
        # Per sequence, as the recipe means it: it does not change with the layout.
        moe_router_load_balancing_type="seq_aux_loss" if losses.balance_loss else "none",
        moe_aux_loss_coeff=losses.balance_loss or None,
        moe_z_loss_coeff=losses.z_loss or None,
    )


@dataclass(frozen=True)
class RunLength:
    """How long a run is: steps, and the samples they take."""

    steps: int
    schedule: BatchSchedule

    def samples(self, steps: int) -> int:
        """Return how many samples the first `steps` steps take."""
        return self.schedule.consumed(steps)


def run_length(task: EngineTask) -> RunLength:
    """Return the length of a run with its ramp."""
    train = task.recipe.train
    ramp = train.batch_ramp
    return RunLength(
        task.steps,
        BatchSchedule(train.global_batch, BatchRampUp(ramp.start, ramp.increment, ramp.samples) if ramp else None),
    )


def render_training(settings: MegatronSettings, task: EngineTask) -> None:
    """Decide how a model is trained."""
    train = task.recipe.train
    settings.put("layout.micro_batch", micro_batch_size=task.layout.micro_batch)
    if train.batch_ramp is None:
        settings.put("train.global_batch", global_batch_size=train.global_batch)
        settings.put("train.steps", train_iters=task.steps, train_samples=None)
        settings.put("train.batch_ramp", rampup_batch_size=None)
    else:
        _render_ramp(settings, task)
    _render_schedule(settings, task)
    optimizer = train.optimizer
    settings.put("train.optimizer.name", optimizer="adam")
    settings.put("train.optimizer.betas", adam_beta1=optimizer.betas[0], adam_beta2=optimizer.betas[1])
    settings.put("train.optimizer.eps", adam_eps=optimizer.eps)
    settings.put("train.optimizer.weight_decay", weight_decay=optimizer.weight_decay)
    settings.put("train.optimizer.clip", clip_grad=optimizer.clip or 0.0)
    settings.put("seed", seed=task.recipe.seed)
    settings.put("train.non_finite", check_for_nan_in_loss_and_grad=True)
    settings.put("train.deterministic", deterministic_mode=train.deterministic)
    _render_precision(settings, train.precision)


def _render_ramp(settings: MegatronSettings, task: EngineTask) -> None:
    train, ramp, length = task.recipe.train, task.recipe.train.batch_ramp, run_length(task)
    assert ramp is not None, "asked for a ramp"
    if length.samples(task.steps) <= ramp.samples:
        # Megatron 0.16 counts one step more than there are samples for where the ramp does not end.
        raise InputError(
            f"the {task.steps} steps take {length.samples(task.steps):,} samples, and the ramp takes {ramp.samples:,}: "
            "Megatron counts the steps of a ramp that does not end wrongly",
            where=task.recipe.where("train.batch_ramp"),
            hint="write a shorter ramp, or a longer run",
        )
    settings.put("train.steps", train_iters=None, train_samples=length.samples(task.steps))
    if not settings.known.has("step_batch_size_schedule"):
        settings.put("train.global_batch", global_batch_size=train.global_batch)
        settings.put("train.batch_ramp", rampup_batch_size=(ramp.start, ramp.increment, ramp.samples))
        return
    # Versions that have this one take --rampup-batch-size and ignore it. Thresholds are counted in tokens.
    increments = (train.global_batch - ramp.start) // ramp.increment
    thresholds = [
        (-(-stage * ramp.samples // increments) * sequence_length(task), ramp.start + stage * ramp.increment)
        for stage in range(increments + 1)
    ]
    settings.put("train.global_batch", global_batch_size=None)
    settings.put(
        "train.batch_ramp",
        rampup_batch_size=None,
        step_batch_size_schedule=" ".join(f"{tokens}:{size}" for tokens, size in thresholds),
    )


def _render_schedule(settings: MegatronSettings, task: EngineTask) -> None:
    schedule, peak = task.recipe.train.schedule, task.recipe.train.optimizer.lr
    end = schedule.decay if schedule.decay is not None and schedule.name != "wsd" else task.steps
    if schedule.name == "constant":
        end = max(end, schedule.warmup + 1)  # not read, but Megatron wants it after the warm-up
    elif schedule.warmup >= end:
        raise InputError(
            f"a warm-up of {schedule.warmup} steps leaves nothing of the {end} for the decay",
            where=task.recipe.where("train.schedule.warmup"),
            hint=f"write less than {end}",
        )
    settings.put("train.optimizer.lr", lr=peak)
    settings.put("train.schedule.min_lr", min_lr=schedule.min_lr)
    settings.put("train.schedule.name", lr_decay_style={"wsd": "WSD"}.get(schedule.name, schedule.name))
    in_samples = task.recipe.train.batch_ramp is not None
    unit, other = ("samples", "iters") if in_samples else ("iters", "samples")

    def counted(steps: int) -> int:
        return run_length(task).samples(steps) if in_samples else steps

    # Megatron's first step of a warm-up has the initial rate; ours is one share of the way up.
    first = peak / (schedule.warmup + 1) if schedule.warmup else None
    settings.put(
        "train.schedule.warmup",
        **{f"lr_warmup_{unit}": counted(schedule.warmup) or None, f"lr_warmup_{other}": None},
        lr_warmup_fraction=None,
        lr_warmup_init=first,
    )
    settings.put("train.schedule.decay", **{f"lr_decay_{unit}": counted(end), f"lr_decay_{other}": None})
    anneal = min(schedule.decay or 0, task.steps - schedule.warmup) if schedule.name == "wsd" else None
    settings.put(
        "train.schedule.decay",
        lr_wsd_decay_style=None if anneal is None else "linear",
        **{
            f"lr_wsd_decay_{unit}": None if anneal is None else counted(task.steps) - counted(task.steps - anneal),
            f"lr_wsd_decay_{other}": None,
        },
    )


def _render_precision(settings: MegatronSettings, precision: str) -> None:
    settings.put(
        "train.precision",
        bf16=precision in ("bf16", "fp8"),
        fp16=precision == "fp16",
        fp8="hybrid" if precision == "fp8" else None,
        fp4=None,
    )
    if precision == "fp8":
        # Delayed scaling as NVIDIA's recipes have it (GKE's llama3-70b-fp8: history 1024, algorithm max).
        settings.choose(fp8_recipe="delayed", fp8_amax_history_len=1024, fp8_amax_compute_algo="max")


_FSDP = {"zero2": "optim_grads", "full": "optim_grads_params"}


def uses_fsdp(layout: RankLayout) -> bool:
    """Tell whether gradients or weights are shared out, which is Megatron's FSDP."""
    return layout.shard in _FSDP


def render_layout(settings: MegatronSettings, task: EngineTask) -> None:
    """Decide which rank does what."""
    layout, config = task.layout, task.config
    settings.put("layout.tp", tensor_model_parallel_size=layout.tp, sequence_parallel=layout.tp > 1)
    settings.put("layout.pp", pipeline_model_parallel_size=layout.pp)
    _render_pipeline(settings, layout)
    settings.put("layout.cp", context_parallel_size=layout.cp)
    if layout.cp > 1 and config.sliding_window is not None:
        # The ring (p2p) of TransformerEngine has no window.
        settings.choose(cp_comm_type="all_gather")
    if config.moe is not None:
        # Said outright: left alone it is tp.
        settings.put("layout.etp", expert_tensor_parallel_size=layout.etp)
        settings.put("layout.ep", expert_model_parallel_size=layout.ep)
    _render_sharding(settings, layout)
    _render_recompute(settings, layout)
    settings.put("the fabric of the cluster file", use_sharp=task.place.sharp)


def _render_pipeline(settings: MegatronSettings, layout: RankLayout) -> None:
    even = len(set(layout.stages)) == 1
    settings.put("layout.vp", num_layers_per_virtual_pipeline_stage=None)
    settings.put("layout.vp", num_virtual_stages_per_pipeline_rank=layout.vp if even and layout.vp > 1 else None)
    settings.put(
        "layout.stages",
        pipeline_model_parallel_layout=None if even else pipeline_layout(layout.stages),
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )


def pipeline_layout(stages: tuple[int, ...]) -> str:
    """Write uneven chunks in Megatron's words: E the embedding, t a layer, L the loss."""
    chunks = "|".join(f"t*{layers}" for layers in stages)
    return f"E{chunks}L"


def _render_sharding(settings: MegatronSettings, layout: RankLayout) -> None:
    fsdp = uses_fsdp(layout)
    settings.put(
        "layout.shard",
        use_distributed_optimizer=layout.shard != "none",
        use_megatron_fsdp=fsdp,
        use_torch_fsdp2=False,
        data_parallel_sharding_strategy=_FSDP.get(layout.shard),
    )
    settings.put("layout.replicate", num_distributed_optimizer_instances=layout.replicate)
    settings.choose(overlap_grad_reduce=True, overlap_param_gather=layout.shard != "none")
    if fsdp:
        settings.choose(gradient_accumulation_fusion=False)


def _render_recompute(settings: MegatronSettings, layout: RankLayout) -> None:
    full = layout.recompute == "full"
    settings.put(
        "layout.recompute",
        recompute_granularity=None if layout.recompute == "none" else layout.recompute,
        recompute_activations=False,
        recompute_method="uniform" if full else None,
        recompute_num_layers=1 if full else None,
    )
    if layout.recompute == "selective":
        settings.choose(recompute_modules=("core_attn",))


# Loading and the first compiled step of a large model may keep a rank from the others for longer than the 10 minutes
# that Megatron gives a collective.
TIMEOUT_MINUTES = 30


MEGATRON_CHECKPOINTS = "checkpoints-megatron"
"""Where checkpoints are kept in the run's folder: apart from our own, whose names they share."""


def checkpoint_folder(place: EngineSite) -> str:
    """Where Megatron keeps its checkpoints."""
    return f"{place.run}/{MEGATRON_CHECKPOINTS}"


def index_folder(place: EngineSite) -> str:
    """Where the cached order of samples lies, built before GPUs are asked for."""
    return f"{place.engine}/index"


def render_data(settings: MegatronSettings, task: EngineTask) -> None:
    """Decide what is read."""
    data, place = task.recipe.data, task.place
    settings.put("data.sequence_length", seq_length=sequence_length(task))
    settings.put("data.synthetic", mock_data=data.synthetic)
    _render_tokenizer(settings, task)
    settings.put("data.train", data_path=None, train_data_path=None, valid_data_path=None, test_data_path=None)
    if data.synthetic:
        settings.put("data", per_split_data_args_path=None, data_args_path=None, split=None, data_cache_path=None)
    else:
        shared_out = data.split is not None
        settings.put(
            "data",
            per_split_data_args_path=None if shared_out else f"{place.engine}/data.json",
            data_args_path=f"{place.engine}/data-args.txt" if shared_out else None,
            data_cache_path=index_folder(place),
        )
        fractions = (data.split.train, data.split.validation, data.split.test) if data.split else ()
        # Never as 1e-05: Megatron picks digits and points out of the text.
        settings.put("data.split", split=",".join(format(Decimal(repr(each)), "f") for each in fractions) or None)
    # Documents follow each other in a sample and every token counts, as with our own engine.
    settings.put("data", eod_mask_loss=False, reset_position_ids=False, reset_attention_mask=False)
    settings.put("data", dataloader_type="single")
    # The mask is causal, and TransformerEngine needs no tensor of it.
    settings.choose(create_attention_mask_in_dataloader=False)
    validation = data.validation
    settings.put(
        "data.validation",
        eval_interval=validation.every if validation else task.steps,
        eval_iters=validation.batches if validation else 0,
    )


def _render_tokenizer(settings: MegatronSettings, task: EngineTask) -> None:
    size = task.config.vocab_size
    if task.recipe.tokenizer is not None and not task.recipe.data.synthetic:
        settings.put(
            "tokenizer", tokenizer_type="HuggingFaceTokenizer", tokenizer_model=f"{task.place.engine}/tokenizer"
        )
        # Tokens are prepared, so nothing is encoded; but only the fast kind reads a tokenizer.json alone.
        settings.choose(tokenizer_hf_use_fast=True)
    else:
        settings.put("tokenizer", tokenizer_type="NullTokenizer", tokenizer_model=None)
        # Until 0.18 it counts the end of a document besides.
        size -= not settings.known.has("null_tokenizer_eod_id")
    # So that a checkpoint says how many rows of the embedding are tokens.
    settings.put("model", vocab_size=size)
    settings.put("tokenizer", vocab_file=None, merge_file=None, trust_remote_code=False)


def render_checkpoints(settings: MegatronSettings, task: EngineTask) -> None:
    """Decide what is saved, and what a start begins with.

    `--load` names the run's own checkpoints always: a restart goes on with them. Where there are none, Megatron takes
    `--pretrained-checkpoint` (as with --finetune: weights alone, from step 0); it looks for own ones first.
    """
    checkpoint, place = task.recipe.checkpoint, task.place
    own = checkpoint_folder(place)
    must = checkpoint.resume == "must"
    settings.put("checkpoint", save=own, load=own)
    settings.put("checkpoint.every", save_interval=checkpoint.every or task.steps)
    # Megatron's FSDP knows no other.
    settings.put("checkpoint", ckpt_format="fsdp_dtensor" if uses_fsdp(task.layout) else "torch_dist")
    # Without a worker that stays, --async-save is switched off with a warning.
    settings.put("checkpoint.async", async_save=checkpoint.async_, use_persistent_ckpt_worker=checkpoint.async_)
    if checkpoint.async_:
        # The other one is a package that not every image has.
        settings.choose(async_strategy="mcore")
    base = task.recipe.model.from_ is not None and not must
    settings.put("model.from", pretrained_checkpoint=f"{place.engine}/base" if base else None, finetune=False)
    settings.put("model", use_checkpoint_args=False)
    settings.put("checkpoint.resume", exit_on_missing_checkpoint=must)
    settings.put("checkpoint", no_load_optim=None, no_load_rng=None, no_save_optim=None, no_save_rng=None)
    # What the recipe says today counts, not what the checkpoint was trained with: a run may be made longer.
    settings.put("train.schedule", override_opt_param_scheduler=True, use_checkpoint_opt_param_scheduler=False)
    settings.choose(exit_signal_handler=True)


def render_logs(settings: MegatronSettings, task: EngineTask) -> None:
    """Decide what is written about the run."""
    observe = task.recipe.observe
    settings.choose(log_interval=1, log_throughput=True, distributed_timeout_minutes=TIMEOUT_MINUTES)
    settings.choose(attention_backend="auto")
    profile = observe.profile
    # The profiler writes its traces there, too.
    tensorboard = observe.tensorboard is not False or profile is not None
    settings.put("observe.tensorboard", tensorboard_dir=f"{task.place.run}/tensorboard" if tensorboard else None)
    if tensorboard:
        settings.choose(log_timers_to_tensorboard=True, log_memory_to_tensorboard=True)
    settings.put("observe.profile", profile=profile is not None)
    if profile is not None:
        settings.put(
            "observe.profile",
            use_pytorch_profiler=True,
            profile_step_start=profile.steps_before,
            profile_step_end=profile.steps_before + profile.steps,
            profile_ranks=profile.ranks,
        )
    if task.place.vendor == "amd":
        # As AMD's own images are started (rocm/megatron-lm): their kernels for these are missing.
        settings.choose(masked_softmax_fusion=False)
        if settings.decided("gradient_accumulation_fusion") is None:
            settings.choose(gradient_accumulation_fusion=False)
