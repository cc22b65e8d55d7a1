"""The fields of Megatron-Bridge's ConfigContainer (NeMo 26.06), each once: the table by which scripts are written and
read.

A field is called `section.field`. Two names without a section are what the script calls functions and classes by:
`dataset` is the class of the data's section, `mixed_precision` the name of a mixed precision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainshed.engines.document_flags import document_mask_row
from trainshed.engines.importing import ConfigImport
from trainshed.engines.key_table import (
    OMIT,
    PRETRAINING_UNSAID,
    REFUSED,
    WRITTEN_ANYWAY,
    KeyRow,
    KeyTable,
    budget_rows,
    follows,
    recipe_value,
    same,
)
from trainshed.engines.keys import KnownKeys
from trainshed.engines.launch import EngineTask
from trainshed.engines.nemo.bridge_model import (
    ARCHITECTURE,
    has_architecture,
    read_architecture,
    read_base,
    render_architecture,
)
from trainshed.engines.nemo.hydra_data import read_split, split_text
from trainshed.engines.nemo.hydra_model import has_experts
from trainshed.engines.profiles import profiles, task_profile
from trainshed.recipe import MoeLosses

BRIDGE_KEYS = KnownKeys("Megatron-Bridge 0.5.0", Path(__file__).with_name("keys-bridge-0.5.0.yaml"))
MOCK_DATASET = "MockGPTDatasetConfig"
# bf16 elsewhere; hybrid fp8 with delayed scaling over 1024 steps is what NeMo 24.07's configuration asks for too.
_PRECISION = {"bf16": "bf16_mixed", "fp8": "bf16_with_fp8_delayed_scaling_mixed"}
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "WSD"}
_RECOMPUTE = {"none": (None, None, None), "selective": ("selective", None, None), "full": ("full", "uniform", 1)}
_STORE = "the cluster's store"
_RUN_FOLDER = "the run has its own folder"


def _sequence_length(task: EngineTask) -> int:
    return task.recipe.data.sequence_length or task.config.max_positions


def _losses(task: EngineTask) -> MoeLosses:
    return task.recipe.train.moe or MoeLosses()


def _of_experts(key: str, path: str, **more: Any) -> KeyRow:
    """Return the row of a key that scripts of models with experts have."""
    row = same(key, path, **more)
    read = row.read
    assert read is not None
    return KeyRow(
        row.keys,
        row.path,
        row.render,
        lambda config: read(config) if config.get("model.num_moe_experts") or key in config else OMIT,
        when=has_experts,
    )


def _read_balance_loss(config: ConfigImport) -> Any:
    factor = config.get("model.moe_aux_loss_coeff")
    return OMIT if factor is None else factor


def _read_router_loss(config: ConfigImport) -> Any:
    return config.get("model.moe_z_loss_coeff", 0.0) if "model.moe_z_loss_coeff" in config else OMIT


def _is_deterministic(task: EngineTask) -> bool:
    return task.recipe.train.deterministic


def _has_ramp(task: EngineTask) -> bool:
    return task.recipe.train.batch_ramp is not None


def _render_ramp(task: EngineTask) -> list[int]:
    ramp = task.recipe.train.batch_ramp
    assert ramp is not None, "asked for a ramp"
    return [ramp.start, ramp.increment, ramp.samples]


def _read_ramp(config: ConfigImport) -> Any:
    ramp = config.get("train.rampup_batch_size")
    return OMIT if ramp is None else dict(zip(("start", "increment", "samples"), ramp, strict=True))


def _read_validation(config: ConfigImport) -> Any:
    every, batches = config.get("validation.eval_interval"), config.get("validation.eval_iters")
    config.note_mapped(f"data.validation.batches: {batches}", "validation.eval_iters")
    if not batches or config.get("dataset") == MOCK_DATASET:
        config.drop("nothing is validated", "validation.eval_interval")
        return OMIT
    own = {}
    if "dataset.blend_per_split" in config:
        own = {"tokens": "write the prefix of the .bin/.idx files here"}
        config.ask("data.validation: the script does not say where its tokens are stored")
    return own | {"every": every or 1000, "batches": batches}


def _read_sources(config: ConfigImport) -> Any:
    if config.get("dataset") == MOCK_DATASET:
        return OMIT
    config.ask("data.train: the script does not say where the tokens are stored")
    config.note_mapped("data.train", "dataset.blend", "dataset.blend_per_split")
    return [{"tokens": "write the prefix of the .bin/.idx files here"}]


def _read_data_split(config: ConfigImport) -> Any:
    split = read_split(config.get("dataset.split"))
    return OMIT if split is None or split["train"] == 1 else {name: part for name, part in split.items() if part}


def _read_sharp(config: ConfigImport) -> Any:
    if config.get("dist.use_sharp"):
        config.set_cluster("dist.use_sharp", "sharp", True)
    return OMIT


def _end_of_profile(task: EngineTask) -> int:
    return task_profile(task).recorded()[0].stop


def _read_profile(config: ConfigImport) -> Any:
    if not config.get("profiling.use_pytorch_profiler"):
        return OMIT
    start, end = config.get("profiling.profile_step_start", 10), config.get("profiling.profile_step_end", 12)
    options = {"shapes": "collect_shapes", "stacks": "collect_callstack"}
    chosen = {key: True for key, theirs in options.items() if config.get(f"profiling.pytorch_profiler_{theirs}")}
    steps = {"start": start + 1, "steps": max(1, end - start)}
    return steps | {"ranks": config.get("profiling.profile_ranks", [0])} | chosen


def _is_wsd(task: EngineTask) -> bool:
    return task.recipe.train.schedule.name == "wsd"


def _schedule_end(task: EngineTask) -> int:
    return task.steps if _is_wsd(task) else task.recipe.train.schedule.decay or task.steps


def _read_decay(config: ConfigImport) -> Any:
    shape, end = config.recipe["train"]["schedule"]["name"], config.get("scheduler.lr_decay_iters")
    if shape == "wsd":
        return config.get("scheduler.lr_wsd_decay_iters", 1)
    steps = config.get("train.train_iters")
    return OMIT if shape == "constant" or end in (None, steps) else end


def _read_lowest_rate(config: ConfigImport) -> Any:
    if config.recipe["train"]["schedule"]["name"] != "constant":
        return config.get("optimizer.min_lr", 0.0)
    config.drop("a constant rate has no end", "optimizer.min_lr")
    return OMIT


def _render_resume(task: EngineTask) -> dict[str, Any]:
    resume = task.recipe.checkpoint.resume
    return {
        "checkpoint.load": None if resume == "fresh" else f"{task.site.run_folder}/checkpoints",
        "checkpoint.exit_on_missing_checkpoint": resume == "must",
    }


def _read_resume(config: ConfigImport) -> str:
    if config.get("checkpoint.load") is None:
        return "fresh"
    return "must" if config.get("checkpoint.exit_on_missing_checkpoint") else "auto"


def _read_tensorboard(config: ConfigImport) -> Any:
    return False if config.get("logger.tensorboard_dir") is None else OMIT


def _fixed(key: str, path: str, value: Any, note: str = WRITTEN_ANYWAY) -> KeyRow:
    """Return the row of a field that every script sets to the same value."""
    return follows(key, path, lambda task: value, note)


BRIDGE_TABLE = KeyTable(
    rows=(
        KeyRow(
            tuple(f"model.{key}" for key in ARCHITECTURE),
            "model.config",
            render_architecture,
            read_architecture,
            when=has_architecture,
            decided_by="model",
            note="model.config",
        ),
        KeyRow(("from_hf_pretrained",), "model.from", read=read_base),
        follows("model.seq_length", "data.sequence_length", _sequence_length, "data.sequence_length"),
        same("model.tensor_model_parallel_size", "layout.tp", default=1),
        same("model.pipeline_model_parallel_size", "layout.pp", default=1),
        same(
            "model.virtual_pipeline_model_parallel_size",
            "layout.vp",
            default=1,
            to_engine=lambda chunks: chunks if chunks > 1 else None,
        ),
        same("model.context_parallel_size", "layout.cp", default=1),
        follows("model.sequence_parallel", "layout.tp", lambda task: task.layout.tp > 1, "on with tp"),
        same(
            "model.recompute_granularity",
            "layout.recompute",
            default="none",
            to_engine=lambda recompute: _RECOMPUTE[recompute][0],
        ),
        follows(
            "model.recompute_method",
            "layout.recompute",
            lambda task: _RECOMPUTE[task.layout.recompute][1],
            "follows layout.recompute",
        ),
        follows(
            "model.recompute_num_layers",
            "layout.recompute",
            lambda task: _RECOMPUTE[task.layout.recompute][2],
            "follows layout.recompute",
        ),
        same("model.hidden_dropout", "train.dropout", default=0.0),
        follows("model.attention_dropout", "train.dropout", lambda task: task.recipe.train.dropout, "train.dropout"),
        same("model.deterministic_mode", "train.deterministic", default=False, unless=False, when=_is_deterministic),
        follows(
            "model.cross_entropy_loss_fusion",
            "train.deterministic",
            lambda task: False,
            "off with train.deterministic",
            when=_is_deterministic,
        ),
        _of_experts("model.expert_model_parallel_size", "layout.ep", default=1),
        _of_experts("model.expert_tensor_parallel_size", "layout.etp", default=1),
        # Per sequence, as the recipe's balance loss is, so that it does not change with the layout.
        follows(
            "model.moe_router_load_balancing_type",
            "train.moe",
            lambda task: "seq_aux_loss",
            "train.moe.balance_loss: per sequence",
            when=has_experts,
        ),
        KeyRow(
            ("model.moe_aux_loss_coeff",),
            "train.moe.balance_loss",
            lambda task: _losses(task).balance_loss,
            _read_balance_loss,
            when=has_experts,
        ),
        KeyRow(
            ("model.moe_z_loss_coeff",),
            "train.moe.z_loss",
            lambda task: _losses(task).z_loss or None,
            _read_router_loss,
            when=has_experts,
        ),
        follows("model.moe_grouped_gemm", "model", lambda task: True, WRITTEN_ANYWAY, when=has_experts),
        follows("model.moe_token_dispatcher_type", "model", lambda task: "alltoall", WRITTEN_ANYWAY, when=has_experts),
        KeyRow(
            ("train.train_iters",),
            "train.steps",
            lambda task: task.steps,
            lambda config: config.get("train.train_iters", 1000),
        ),
        same("train.global_batch_size", "train.global_batch", default=1),
        same("train.micro_batch_size", "layout.micro_batch", default=1),
        KeyRow(("train.rampup_batch_size",), "train.batch_ramp", _render_ramp, _read_ramp, when=_has_ramp),
        # A checkpoint when the scheduler says stop: the agent forwards TERM and waits.
        _fixed("train.exit_signal_handler", "checkpoint", True),
        _fixed("train.manual_gc", "the plan", True),
        _fixed("train.manual_gc_interval", "the plan", 100),
        KeyRow(
            ("validation.eval_interval",),
            "data.validation",
            lambda task: task.recipe.data.validation.every if task.recipe.data.validation else None,
            _read_validation,
            decided_by="data.validation.every",
        ),
        follows(
            "validation.eval_iters",
            "data.validation",
            lambda task: task.recipe.data.validation.batches if task.recipe.data.validation else 0,
            "data.validation.batches",
            decided_by="data.validation.batches",
        ),
        same("rng.seed", "seed", default=1234),
        KeyRow(("dist.use_sharp",), "the cluster's sharp", lambda task: task.site.sharp, _read_sharp),
        KeyRow(("profiling.use_pytorch_profiler",), "observe.profile", lambda task: True, _read_profile, when=profiles),
        follows(
            "profiling.profile_step_start",
            "observe.profile.start",
            lambda task: recipe_value(task, "observe.profile.steps_before"),
            "observe.profile",
            when=profiles,
        ),
        follows(
            "profiling.profile_step_end", "observe.profile.steps", _end_of_profile, "observe.profile", when=profiles
        ),
        follows(
            "profiling.profile_ranks",
            "observe.profile.ranks",
            lambda task: recipe_value(task, "observe.profile.ranks"),
            "observe.profile",
            when=profiles,
        ),
        follows(
            "profiling.pytorch_profiler_collect_shapes",
            "observe.profile.shapes",
            lambda task: recipe_value(task, "observe.profile.shapes"),
            "observe.profile",
            when=profiles,
        ),
        follows(
            "profiling.pytorch_profiler_collect_callstack",
            "observe.profile.stacks",
            lambda task: recipe_value(task, "observe.profile.stacks"),
            "observe.profile",
            when=profiles,
        ),
        _fixed("optimizer.optimizer", "train.optimizer.name", "adam", "train.optimizer.name: adamw"),
        same("optimizer.lr", "train.optimizer.lr"),
        KeyRow(
            ("optimizer.min_lr",),
            "train.schedule.min_lr",
            lambda task: task.recipe.train.schedule.min_lr,
            _read_lowest_rate,
        ),
        same("optimizer.weight_decay", "train.optimizer.weight_decay", default=0.01),
        KeyRow(
            ("optimizer.adam_beta1", "optimizer.adam_beta2"),
            "train.optimizer.betas",
            lambda task: dict(
                zip(("optimizer.adam_beta1", "optimizer.adam_beta2"), task.recipe.train.optimizer.betas, strict=True)
            ),
            lambda config: [config.get("optimizer.adam_beta1", 0.9), config.get("optimizer.adam_beta2", 0.999)],
        ),
        same("optimizer.adam_eps", "train.optimizer.eps", default=1e-8),
        same(
            "optimizer.clip_grad",
            "train.optimizer.clip",
            default=1.0,
            to_engine=lambda clip: clip or 0.0,
            to_recipe=lambda clip: clip or None,
        ),
        _fixed("optimizer.bf16", "train.precision", True, "follows train.precision"),
        _fixed("optimizer.use_distributed_optimizer", "layout.shard", True, "layout.shard: zero1"),
        same(
            "scheduler.lr_decay_style",
            "train.schedule.name",
            default="linear",
            to_engine=_SCHEDULES.__getitem__,
            to_recipe={theirs: ours for ours, theirs in _SCHEDULES.items()}.__getitem__,
        ),
        same("scheduler.lr_warmup_iters", "train.schedule.warmup", default=0),
        KeyRow(("scheduler.lr_decay_iters",), "train.schedule.decay", _schedule_end, _read_decay),
        follows(
            "scheduler.lr_wsd_decay_style",
            "train.schedule",
            lambda task: "linear",
            "train.schedule.decay",
            when=_is_wsd,
        ),
        follows(
            "scheduler.lr_wsd_decay_iters",
            "train.schedule.decay",
            lambda task: task.recipe.train.schedule.decay,
            "train.schedule.decay",
            when=_is_wsd,
        ),
        *(
            follows(
                f"scheduler.{key}",
                "train.optimizer.weight_decay",
                lambda task: task.recipe.train.optimizer.weight_decay,
                "train.optimizer.weight_decay",
            )
            for key in ("start_weight_decay", "end_weight_decay")
        ),
        # A run that is made longer goes on with its new schedule instead of stopping at the difference.
        _fixed("scheduler.override_opt_param_scheduler", "train.schedule", True),
        _fixed("ddp.overlap_grad_reduce", "layout.shard", True),
        _fixed("ddp.overlap_param_gather", "layout.shard", True),
        _fixed("ddp.grad_reduce_in_fp32", "layout.shard", True),
        _fixed("ddp.average_in_collective", "layout.shard", True),
        _fixed("ddp.use_distributed_optimizer", "layout.shard", True, "layout.shard: zero1"),
        _fixed("ddp.check_for_nan_in_grad", "train.non_finite", True, "train.non_finite: stop"),
        same(
            "ddp.num_distributed_optimizer_instances",
            "layout.replicate",
            default=1,
            unless=1,
            when=lambda task: task.layout.replicate > 1,
        ),
        KeyRow(
            ("dataset.seq_length",),
            "data.sequence_length",
            _sequence_length,
            lambda config: config.get("dataset.seq_length") or config.get("model.seq_length"),
        ),
        KeyRow(
            ("dataset.random_seed",),
            "data.seed",
            lambda task: task.recipe.data.seed,
            lambda config: config.get("dataset.random_seed", config.get("rng.seed", 1234)),
        ),
        # Its layers are TransformerEngine's, always.
        document_mask_row("dataset.", reads_mask=lambda config: False),
        _fixed("dataset.dataloader_type", "data", "single", "samples come in the order of the index, once each"),
        KeyRow(
            ("dataset.split",),
            "data.split",
            lambda task: split_text(task.recipe),
            _read_data_split,
            when=lambda task: task.recipe.data.split is not None,
        ),
        KeyRow(
            ("dataset.path_to_cache",),
            _STORE,
            lambda task: f"{task.site.input_folder}/index",
            drop="the index is kept in the run's folder",
        ),
        # The script reads the tokens' files from data.json.
        KeyRow(("dataset.blend", "dataset.blend_per_split"), "data.train", read=_read_sources),
        _fixed("tokenizer.tokenizer_type", "tokenizer", "HuggingFaceTokenizer", "tokenizer"),
        KeyRow(
            ("tokenizer.tokenizer_model",),
            "tokenizer",
            lambda task: f"{task.site.input_folder}/tokenizer",
            lambda config: config.get("tokenizer.tokenizer_model") or OMIT,
        ),
        KeyRow(("checkpoint.save",), _STORE, lambda task: f"{task.site.run_folder}/checkpoints", drop=_RUN_FOLDER),
        KeyRow(
            ("checkpoint.load", "checkpoint.exit_on_missing_checkpoint"),
            "checkpoint.resume",
            _render_resume,
            _read_resume,
        ),
        KeyRow(
            ("checkpoint.save_interval",),
            "checkpoint.every",
            lambda task: task.recipe.checkpoint.every or task.steps,
            lambda config: config.get("checkpoint.save_interval"),
        ),
        same(
            "checkpoint.most_recent_k",
            "checkpoint.keep",
            default=-1,
            to_engine=lambda keep: keep or -1,
            to_recipe=lambda keep: keep if keep > 0 else None,
        ),
        same("checkpoint.async_save", "checkpoint.async", default=False),
        _fixed("checkpoint.ckpt_format", "checkpoint", "torch_dist"),
        _fixed("checkpoint.fully_parallel_save", "checkpoint", True),
        _fixed("logger.log_interval", "observe", 1),
        _fixed("logger.log_throughput", "observe", True),
        KeyRow(
            ("logger.tensorboard_dir",),
            "observe.tensorboard",
            lambda task: (
                f"{task.site.run_folder}/tensorboard" if task.recipe.observe.tensorboard is not False else None
            ),
            _read_tensorboard,
        ),
        same(
            "mixed_precision",
            "train.precision",
            default="bf16_mixed",
            to_engine=_PRECISION.get,
            to_recipe={theirs: ours for ours, theirs in _PRECISION.items()}.__getitem__,
        ),
        KeyRow(
            ("dataset",),
            "data.synthetic",
            lambda task: MOCK_DATASET if task.recipe.data.synthetic else "GPTDatasetConfig",
            lambda config: True if config.get("dataset") == MOCK_DATASET else OMIT,
        ),
        *budget_rows("dist.distributed_timeout_minutes", "dist.distributed_timeout_seconds_after_init"),
        KeyRow((), "layout.shard", read=lambda config: "zero1"),
    ),
    read_order=(
        *("model", "tokenizer", "data.sequence_length", "data.synthetic", "data.train", "data.split"),
        *(
            "data.document_mask",
            "data.validation",
            "data.seed",
            "train.steps",
            "train.global_batch",
            "train.batch_ramp",
            "train.precision",
        ),
        *("train.optimizer", "train.schedule.name", "train.schedule", "train.dropout", "train.moe"),
        *("train.deterministic", "seed", "layout", "checkpoint", "observe"),
    ),
    unsaid={
        **PRETRAINING_UNSAID,
        "model.config.max_positions": "Megatron-Bridge takes the length of the samples",
        **dict.fromkeys(("layout.stages", "observe.dllogger", "train.optimizer.states"), REFUSED),
    },
)
