"""The keys of NeMo 24.07's Hydra file, each once: the table by which it is written and read.

Paths are in a table of their own: they are given as overrides on the command line, so that the file is the same
everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainshed.engines.document_flags import document_mask_row
from trainshed.engines.key_table import (
    KEEP,
    OMIT,
    PRETRAINING_UNSAID,
    REFUSED,
    KeyRow,
    KeyTable,
    choice,
    follows,
    not_read,
    recipe_value,
    same,
    to_floats,
)
from trainshed.engines.keys import KnownKeys, flatten
from trainshed.engines.launch import NODE_NUMBER, EngineTask
from trainshed.engines.nemo.hydra_data import (
    is_gpt2,
    is_not_gpt2,
    read_documents,
    read_length,
    read_prefixes,
    read_synthetic,
    read_tokenizer,
    read_validation,
    reads_mask,
    split_text,
)
from trainshed.engines.nemo.hydra_model import ARCHITECTURE_ORDER, ARCHITECTURE_ROWS, expert_kernel, has_experts
from trainshed.engines.nemo.hydra_training import (
    CALLBACK,
    RECOMPUTE,
    SCHEDULER,
    last_profiled_step,
    losses,
    read_balance_loss,
    read_dropout,
    read_expert_tensor_parallel,
    read_nan_check,
    read_nodes,
    read_optimizer,
    read_precision,
    read_profile,
    read_ramp,
    read_resume,
    read_router_loss,
    read_saving,
    read_schedule,
    read_sharp,
    read_steps,
    render_ramp,
    render_resume,
    render_schedule,
)
from trainshed.engines.profiles import profiles
from trainshed.recipe.yaml_io import parse_yaml

HYDRA_KEYS = KnownKeys("NeMo 24.07", Path(__file__).with_name("keys-24.07.yaml"))
_PLACES = "folders come from the cluster file"
_STORE = "the cluster's store"
_TOKENIZER_FILES = "files come with the tokenizer's address"


def fixed_settings() -> dict[str, Any]:
    """Return what is written whatever the recipe says, by dotted key."""
    file = Path(__file__).with_name("fixed-24.07.yaml")
    return flatten(parse_yaml(file.read_text(encoding="utf-8"), file.name).value)


def _place(key: str, path: str, render: Callable[[EngineTask], str], why: str = _PLACES, **more: Any) -> KeyRow:
    """Return the row of a path, which an import leaves out."""
    return KeyRow((key,), path, render, drop=why, **more)


HYDRA_TABLE = KeyTable(
    rows=(
        follows(
            "trainer.devices",
            "the cluster's machine",
            lambda task: task.site.gpus_per_node,
            "cluster file, machine: one with this many GPUs",
        ),
        KeyRow(("trainer.precision",), "train.precision", lambda task: "bf16", read_precision),
        KeyRow(("trainer.max_steps",), "train.steps", lambda task: task.steps, read_steps),
        KeyRow(
            ("trainer.val_check_interval",),
            "data.validation",
            lambda task: task.recipe.data.validation.every if task.recipe.data.validation else None,
            read_validation,
            decided_by="data.validation.every",
        ),
        # Not validating is a float 0.0: NeMo counts an integer as batches and a float as a share.
        follows(
            "trainer.limit_val_batches",
            "data.validation",
            lambda task: task.recipe.data.validation.batches if task.recipe.data.validation else 0.0,
            "data.validation.batches",
            decided_by="data.validation.batches",
        ),
        KeyRow(
            ("trainer.limit_test_batches",),
            "data.split.test",
            lambda task: (
                task.recipe.data.validation.batches
                if task.recipe.data.validation and task.recipe.data.split and task.recipe.data.split.test
                else 0
            ),
            drop="follows data.split",
        ),
        # megatron-core compares the number: 0.0 and not null means no clipping.
        same(
            "trainer.gradient_clip_val",
            "train.optimizer.clip",
            to_engine=lambda clip: clip or 0.0,
            to_recipe=lambda clip: float(clip) if clip else None,
        ),
        same(
            "exp_manager.create_tensorboard_logger",
            "observe.tensorboard",
            default=True,
            to_engine=lambda wanted: wanted is not False,
            to_recipe=bool,
        ),
        same(
            "exp_manager.create_dllogger_logger",
            "observe.dllogger",
            default=False,
            to_engine=lambda wanted: wanted is not False,
            to_recipe=bool,
        ),
        KeyRow(
            ("exp_manager.resume_if_exists", "exp_manager.resume_ignore_no_checkpoint"),
            "checkpoint.resume",
            render_resume,
            read_resume,
        ),
        follows(
            "exp_manager.create_checkpoint_callback",
            "checkpoint.save",
            lambda task: task.recipe.checkpoint.save,
            "checkpoint.every",
        ),
        KeyRow(
            (f"{CALLBACK}.every_n_train_steps",),
            "checkpoint.every",
            lambda task: task.recipe.checkpoint.every,
            read_saving,
        ),
        same(
            f"{CALLBACK}.save_top_k",
            "checkpoint.keep",
            default=3,
            to_engine=lambda keep: keep or -1,
            to_recipe=lambda keep: keep if keep > 0 else None,
        ),
        same(f"{CALLBACK}.async_save", "checkpoint.async", default=False, to_recipe=bool),
        follows(f"{CALLBACK}.model_parallel_size", "layout", lambda task: task.layout.tp * task.layout.pp, "tp · pp"),
        same("model.micro_batch_size", "layout.micro_batch", default=1),
        same("model.global_batch_size", "train.global_batch", default=1),
        KeyRow(("model.rampup_batch_size",), "train.batch_ramp", render_ramp, read_ramp),
        same("model.tensor_model_parallel_size", "layout.tp", default=1),
        same("model.pipeline_model_parallel_size", "layout.pp", default=1),
        same(
            "model.virtual_pipeline_model_parallel_size",
            "layout.vp",
            default=1,
            to_engine=lambda chunks: chunks if chunks > 1 else None,
        ),
        same("model.context_parallel_size", "layout.cp", default=1),
        same("model.expert_model_parallel_size", "layout.ep", default=1),
        follows("model.sequence_parallel", "layout.tp", lambda task: task.layout.tp > 1, "on with tp"),
        follows("model.overlap_p2p_comm", "layout.vp", lambda task: task.layout.vp > 1, "on with vp"),
        follows("model.batch_p2p_comm", "layout.vp", lambda task: task.layout.vp == 1, "off with vp"),
        same(
            "model.activations_checkpoint_granularity",
            "layout.recompute",
            default="none",
            to_engine=lambda recompute: RECOMPUTE[recompute][0],
        ),
        follows(
            "model.activations_checkpoint_method",
            "layout.recompute",
            lambda task: RECOMPUTE[task.layout.recompute][1],
            "follows layout.recompute",
        ),
        follows(
            "model.activations_checkpoint_num_layers",
            "layout.recompute",
            lambda task: RECOMPUTE[task.layout.recompute][2],
            "follows layout.recompute",
        ),
        *ARCHITECTURE_ROWS,
        follows("model.precision", "train.precision", lambda task: "bf16", "follows train.precision"),
        KeyRow(
            ("model.fp8",),
            "train.precision",
            lambda task: task.recipe.train.precision == "fp8",
            read_precision,
        ),
        follows(
            "model.fp8_hybrid",
            "train.precision",
            lambda task: task.recipe.train.precision == "fp8",
            "follows train.precision",
        ),
        KeyRow(("model.hidden_dropout",), "train.dropout", lambda task: task.recipe.train.dropout, read_dropout),
        # One that differs from the other stays in `engine.args`.
        KeyRow(
            ("model.attention_dropout",), "train.dropout", lambda task: task.recipe.train.dropout, lambda config: KEEP
        ),
        same("model.seed", "seed", default=1234),
        KeyRow((), "data.seed", read=lambda config: config.recipe["seed"]),
        KeyRow(
            ("model.sharp",), "the cluster's sharp", lambda task: True, read_sharp, when=lambda task: task.site.sharp
        ),
        follows("model.moe_router_load_balancing_type", "train.moe", lambda task: "aux_loss", "", when=has_experts),
        KeyRow(
            ("model.moe_aux_loss_coeff",),
            "train.moe.balance_loss",
            lambda task: losses(task).balance_loss,
            read_balance_loss,
            when=has_experts,
        ),
        KeyRow(
            ("model.moe_z_loss_coeff",),
            "train.moe.z_loss",
            lambda task: losses(task).z_loss or None,
            read_router_loss,
            when=has_experts,
        ),
        expert_kernel("moe_grouped_gemm", True),
        expert_kernel("moe_token_dispatcher_type", "alltoall"),
        KeyRow(("model.nsys_profile.enabled",), "observe.profile", lambda task: True, read_profile, when=profiles),
        follows(
            "model.nsys_profile.start_step",
            "observe.profile.start",
            lambda task: recipe_value(task, "observe.profile.steps_before"),
            "observe.profile",
            when=profiles,
        ),
        follows(
            "model.nsys_profile.end_step",
            "observe.profile.steps",
            last_profiled_step,
            "observe.profile",
            when=profiles,
        ),
        follows(
            "model.nsys_profile.ranks",
            "observe.profile.ranks",
            lambda task: recipe_value(task, "observe.profile.ranks"),
            "observe.profile",
            when=profiles,
        ),
        follows(
            "model.nsys_profile.gen_shape",
            "observe.profile.shapes",
            lambda task: recipe_value(task, "observe.profile.shapes"),
            "observe.profile",
            when=profiles,
        ),
        KeyRow(
            ("model.optim.name",),
            "train.optimizer.name",
            lambda task: "mcore_distributed_optim",
            read_optimizer,
            decided_by="layout.shard",
        ),
        # Defaults are those of megatron_gpt_config.yaml.
        same("model.optim.lr", "train.optimizer.lr", default=2e-4, to_recipe=to_floats),
        same("model.optim.weight_decay", "train.optimizer.weight_decay", default=0.01, to_recipe=to_floats),
        same("model.optim.betas", "train.optimizer.betas", default=[0.9, 0.98], to_recipe=to_floats),
        KeyRow(
            ("model.optim.check_for_nan_in_grad",),
            "train.non_finite",
            lambda task: True,
            read_nan_check,
            note="train.non_finite: stop",
        ),
        KeyRow(
            tuple(
                f"{SCHEDULER}.{key}"
                for key in ("name", "warmup_steps", "min_lr", "hold_steps", "power", "constant_steps", "max_steps")
            ),
            "train.schedule",
            render_schedule,
            read_schedule,
        ),
        KeyRow(
            ("model.encoder_seq_length",),
            "data.sequence_length",
            lambda task: task.recipe.data.sequence_length or task.config.max_positions,
            read_length,
        ),
        follows(
            "model.data.seq_length",
            "data.sequence_length",
            lambda task: task.recipe.data.sequence_length or task.config.max_positions,
            "data.sequence_length",
        ),
        KeyRow(
            ("model.data.data_impl",),
            "data.synthetic",
            lambda task: "mock" if task.recipe.data.synthetic else "mmap",
            read_synthetic,
            note="follows data",
        ),
        KeyRow(("model.data.splits_string",), "data.split", lambda task: split_text(task.recipe), read_documents),
        # The tokens' files are known when the job starts: the launch reads the value of this key from a file.
        KeyRow(
            ("model.data.data_prefix",),
            "data.train",
            lambda task: [] if task.recipe.data.synthetic else OMIT,
            read_prefixes,
            decided_by="data.synthetic",
        ),
        KeyRow(
            ("model.tokenizer.library",),
            "tokenizer",
            lambda task: "megatron" if is_gpt2(task) else "huggingface",
            read_tokenizer,
            note="tokenizer",
        ),
        follows("model.tokenizer.type", "tokenizer", lambda task: "GPT2BPETokenizer", "tokenizer", when=is_gpt2),
        KeyRow(("model.tokenizer.use_fast",), "tokenizer", lambda task: True, when=is_not_gpt2, drop=_TOKENIZER_FILES),
        KeyRow(("model.tokenizer.model",), "tokenizer", lambda task: None, drop=_TOKENIZER_FILES),
        KeyRow(("model.tokenizer.delimiter",), "tokenizer", lambda task: None, drop=_TOKENIZER_FILES),
        KeyRow((), "layout.etp", read=read_expert_tensor_parallel),
        KeyRow((), "layout.shard", read=lambda config: "zero1"),
        not_read("belongs to NeMo's launcher", "run.*"),
        not_read(_PLACES, "exp_manager.exp_dir"),
        not_read("the newest checkpoints are kept, not the best", f"{CALLBACK}.monitor", f"{CALLBACK}.mode"),
        not_read("Trainshed names checkpoints by step and samples", f"{CALLBACK}.filename"),
        not_read("the cluster's time limit takes its place", "trainer.max_time"),
        not_read("the recipe has a name of its own", "name"),
        not_read(_TOKENIZER_FILES, "model.tokenizer.sentencepiece_legacy"),
        *(choice(key, value) for key, value in fixed_settings().items()),
        document_mask_row("model.data.", reads_mask=reads_mask),
    ),
    read_order=(
        *ARCHITECTURE_ORDER,
        *("model.init", "model", "train.moe", "tokenizer"),
        *("data.sequence_length", "data.synthetic", "data.train", "data.split", "data.document_mask"),
        *("data.validation", "train.steps", "train.global_batch", "train.batch_ramp", "train.precision"),
        *(f"train.optimizer.{key}" for key in ("lr", "weight_decay", "betas", "name", "clip")),
        *("train.schedule", "train.dropout", "seed", "data.seed"),
        *(f"layout.{key}" for key in ("tp", "pp", "vp", "cp", "ep", "micro_batch", "etp", "recompute", "shard")),
        "resources.nodes",
        *(f"checkpoint.{key}" for key in ("every", "keep", "async", "resume")),
        "observe",
    ),
    unsaid={
        **PRETRAINING_UNSAID,
        "model.config.vocab_size": "NeMo 24.07 takes the tokenizer's",
        "train.optimizer.eps": "NeMo 24.07 does not hand an epsilon on: another than its own is refused",
        **dict.fromkeys(("model.config.sliding_window", "train.deterministic", "layout.replicate"), REFUSED),
        **dict.fromkeys(("layout.stages", "train.optimizer.states"), REFUSED),
        **dict.fromkeys(("model.config.attention_pattern", "model.config.query_scalar"), REFUSED),
        **dict.fromkeys(("model.config.attention_soft_cap", "model.config.logit_soft_cap"), REFUSED),
        **dict.fromkeys(("model.config.attention_chunk", "model.config.attention_temperature"), REFUSED),
        **dict.fromkeys((f"model.config.{key}" for key in ("swiglu_alpha", "swiglu_limit", "qk_l2_norm")), REFUSED),
    },
)
# Given as overrides: they depend on where the job runs.
HYDRA_PLACES = KeyTable(
    rows=(
        KeyRow(
            ("trainer.num_nodes",),
            "resources.nodes",
            lambda task: task.site.nodes,
            read_nodes,
            decided_by="the number of nodes",
        ),
        _place("exp_manager.name", "name", lambda task: task.recipe.name, "the run's name and id take its place"),
        _place("exp_manager.explicit_log_dir", _STORE, lambda task: f"{task.site.run_folder}/nemo"),
        _place(f"{CALLBACK}.dirpath", _STORE, lambda task: f"{task.site.run_folder}/checkpoints"),
        _place(
            "model.data.index_mapping_dir",
            _STORE,
            lambda task: f"{task.site.input_folder}/index",
            "the index is kept in the run's folder",
        ),
        _place(
            "exp_manager.dllogger_logger_kwargs.json_file",
            _STORE,
            # Every rank of NeMo opens the file, and rank 0 writes it: nodes that shared one would empty each other's.
            lambda task: f"{task.site.run_folder}/dllogger/rank-{NODE_NUMBER}/dllogger.json",
            when=lambda task: task.recipe.observe.dllogger is not False,
        ),
        _place(
            "model.tokenizer.vocab_file",
            "tokenizer",
            lambda task: f"{task.site.input_folder}/tokenizer/vocab.json",
            _TOKENIZER_FILES,
            when=is_gpt2,
        ),
        _place(
            "model.tokenizer.merge_file",
            "tokenizer",
            lambda task: f"{task.site.input_folder}/tokenizer/merges.txt",
            _TOKENIZER_FILES,
            when=is_gpt2,
        ),
        _place(
            "model.tokenizer.type",
            "tokenizer",
            lambda task: f"{task.site.input_folder}/tokenizer",
            _TOKENIZER_FILES,
            when=is_not_gpt2,
        ),
    ),
    read_order=(),
)
