"""Data, evaluation, checkpoints and logs on Megatron's command line, and where they lie in the run's folder."""

from __future__ import annotations

from decimal import Decimal

from trainshed.engines.foreign import EnginePlace, EngineTask
from trainshed.engines.megatron.model import sequence_length
from trainshed.engines.megatron.parallel import uses_fsdp
from trainshed.engines.megatron.settings import Settings

# Loading and the first compiled step of a large model may keep a rank from the others for longer than the 10 minutes
# that Megatron gives a collective.
TIMEOUT_MINUTES = 30


CHECKPOINTS = "checkpoints-megatron"
"""Where checkpoints are kept in the run's folder: apart from our own, whose names they share."""


def checkpoint_folder(place: EnginePlace) -> str:
    """Where Megatron keeps its checkpoints."""
    return f"{place.run}/{CHECKPOINTS}"


def index_folder(place: EnginePlace) -> str:
    """Where the cached order of samples lies, built before GPUs are asked for."""
    return f"{place.engine}/index"


def put_data(settings: Settings, task: EngineTask) -> None:
    """Decide what is read."""
    data, place = task.recipe.data, task.place
    settings.put("data.sequence_length", seq_length=sequence_length(task))
    settings.put("data.synthetic", mock_data=data.synthetic)
    _put_tokenizer(settings, task)
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


def _put_tokenizer(settings: Settings, task: EngineTask) -> None:
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


def put_checkpoints(settings: Settings, task: EngineTask) -> None:
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


def put_logs(settings: Settings, task: EngineTask) -> None:
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
