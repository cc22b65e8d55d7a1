"""The shipped recipes of the AKS and MinIO seeds, held argument by argument against what their charts start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainshed.engines.megatron.arguments import parse_arguments
from trainshed.engines.megatron.script import find_arguments
from trainshed.launch.job import CodeArchive
from trainshed.recipe import load_cluster, load_recipe
from trainshed.workflow.submit import build_job

DATA = Path(__file__).parent / "data"
FOLDERS = {
    **dict.fromkeys(("save", "load", "tensorboard_dir", "data_cache_path"), "the run's own folder"),
    "tokenizer_model": "the run's own folder",
    "data_args_path": "the sources of data.json",
}
OF_EVERY_RUN = {
    "async_save": "training goes on while a checkpoint is written",
    "attention_dropout": "Megatron's default of 0.1 is for small corpora",
    "create_attention_mask_in_dataloader": "attention is causal, and no kernel reads the mask",
    "distributed_timeout_minutes": "`budgets`",
    "exit_signal_handler": "a checkpoint before it is stopped",
    "hidden_dropout": "as attention_dropout",
    "kv_channels": "hidden / heads, which is its default",
    "ffn_hidden_size": "of the model",
    "log_memory_to_tensorboard": "more is logged",
    "log_timers_to_tensorboard": "more is logged",
    "lr_decay_iters": "the rate decays within the run",
    "make_vocab_size_divisible_by": "so many rows as a checkpoint of any tp has",
    "override_opt_param_scheduler": "a longer run resumes with its own schedule",
    "split": "of the recipe",
    "vocab_size": "of the model",
}
AKS = {
    **dict.fromkeys(("train_iters", "global_batch_size", "save_interval", "eval_interval"), "its README's large run"),
    **dict.fromkeys(("train_data_path", "valid_data_path", "test_data_path"), "data.json and `split`"),
    **dict.fromkeys(("vocab_file", "merge_file"), "the tokenizer's folder"),
    "add_qkv_bias": "what linear layers with biases have",
    "dataloader_type": "its default, written out",
    "log_interval": "every step is logged",
    "log_throughput": "more is logged",
    **dict.fromkeys(("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_init"), "0.001 of the run, in steps"),
    **dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather"), "faster, and the same sums"),
    "tokenizer_type": "the tokenizer's folder",
    "use_sharp": "`sharp: true` in the cluster file",
}
MINIO = {
    **dict.fromkeys(("no_load_optim", "no_load_rng", "no_save_optim", "no_save_rng"), "a run resumes"),
    **dict.fromkeys(("use_checkpoint_args", "exit_on_missing_checkpoint"), "every fact of the model is said"),
    **dict.fromkeys(
        (
            *("add_bias_linear", "group_query_attention", "hidden_size", "max_position_embeddings", "normalization"),
            *("num_attention_heads", "num_layers", "num_query_groups", "position_embedding_type", "rotary_base"),
            *("swiglu", "untie_embeddings_and_output_weights", "use_rope_scaling"),
        ),
        "of the model, where the seed has --use-checkpoint-args",
    ),
    **dict.fromkeys(
        ("recompute_activations", "recompute_granularity", "recompute_modules"), "the same by its new name"
    ),
    "async_tensor_model_parallel_allreduce": "with sequence parallel there is none",
    "ckpt_format": "torch_dist loads on any layout",
    "dataloader_type": "samples come in the order of the index",
    "num_workers": "its default: tokens are mapped, and 64 workers had 8 CPUs",
    "pretrained_checkpoint": "the base weights, apart from the run's own",
    "use_persistent_ckpt_worker": "with async_save",
}


@pytest.mark.parametrize(
    ("recipe", "cluster", "file", "different"),
    [
        ("aks-gpt-175b", "aks-nd-h100-v5", "aks-train-175b.sh", AKS),
        ("minio-llama3-1-70b-cpt", "minio-mi300x-ray", "minio-llama-70b-cpt.txt", MINIO),
    ],
)
def test_every_argument_is_the_seeds_but_for_what_is_said(
    recipe: str, cluster: str, file: str, different: dict[str, str]
) -> None:
    code = CodeArchive("code.tar.xz", "0" * 64, b"code")
    job = build_job(load_recipe(recipe), load_cluster(cluster), offline=True, code=code)
    ours = parse_arguments(tuple(json.loads(job.files["image.json"])["arguments"]), "launch")
    theirs = parse_arguments(find_arguments((DATA / file).read_text(), file).words, file)
    # What either of them says, and what the other leaves to Megatron's default.
    found = {name for name in {*theirs.given, *ours.given} if theirs[name] != ours[name]}
    known = FOLDERS | OF_EVERY_RUN | different
    assert found - set(known) == set(), {name: (theirs[name], ours[name]) for name in found - set(known)}
    assert set(different) - found == set(), "said to differ, and it does not"
