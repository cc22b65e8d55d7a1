"""A recipe and its plan as a launch of Megatron-LM's pretrain_gpt.py.

`megatron_launch` first refuses what Megatron cannot do, by the recipe's own keys, then renders the arguments. A CPU
stage runs before training: `build_index.py` with the settings it is given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from trainshed.checkpoints.megatron import retention
from trainshed.checkpoints.megatron.unsupported import latent_norm_note
from trainshed.engines.document_flags import DOCUMENT_MASK_KEY, MASK_IGNORED, document_problems
from trainshed.engines.key_table import mirror_problems, unhonoured_problems
from trainshed.engines.keys import EngineSetting
from trainshed.engines.launch import PROGRAMS, CpuStage, EngineInput, EngineLaunch, EngineTask, ImageExpectation
from trainshed.engines.megatron import run_program
from trainshed.engines.megatron.arguments import known_arguments
from trainshed.engines.megatron.data_args import BOUNDARIES, PROFILE_OPTION_VERSIONS, PROFILE_OPTIONS
from trainshed.engines.megatron.keys import MEGATRON_TABLE, checkpoint_folder
from trainshed.engines.megatron.layout_args import uses_fsdp
from trainshed.engines.megatron.model_args import padded_vocabulary, sequence_length
from trainshed.engines.megatron.settings import MegatronSettings, add_engine_args
from trainshed.engines.megatron.training_args import run_length
from trainshed.engines.megatron.versions import (
    FLOAT32_BIAS_VERSIONS,
    fit_to_version,
    known_image,
    since,
    task_version,
    version_note,
)
from trainshed.engines.profiles import ONCE_WITH_ONE_STEP_BEFORE, profile_problems
from trainshed.errors import InputError
from trainshed.plan.legality import layout_problems
from trainshed.recipe import ModelConfig
from trainshed.recipe.section import Problem
from trainshed.recipe.validation import recipe_error

# AMD's own choices for Megatron on MI300X (rocm/megatron-lm); what concerns the network belongs to the fabric.
_AMD = {
    "GPU_MAX_HW_QUEUES": "2",
    "HSA_ENABLE_IPC_MODE_LEGACY": "1",
    "HSA_NO_SCRATCH_RECLAIM": "1",
    "PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True",
    "TORCH_NCCL_HIGH_PRIORITY": "1",
}
# What Megatron asks for with --deterministic-mode (determinism.py; 0.16 wants NCCL_ALGO set).
_DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


def megatron_launch(task: EngineTask) -> EngineLaunch:
    """Return how Megatron-LM trains a task; raise `InputError` for what it cannot do.

    The arguments are those of `task_version`; pretrain_gpt.py is `engine.program`, or where images of that name have
    it.
    """
    program = task.recipe.engine.program or known_image(task.recipe.engine.image or task.site.image).program
    try:
        known = known_arguments(task_version(task))
    except InputError as error:
        raise InputError(error.what, where=task.recipe.where("engine.version"), hint=error.hint) from None
    check_task(task)
    fitted = list(fit_to_version(MEGATRON_TABLE.render(task, known.version), known))
    if missing := [problem for problem in fitted if isinstance(problem, Problem)]:
        raise recipe_error(missing, task.recipe.places)
    settings = MegatronSettings(known, [setting for setting in fitted if isinstance(setting, EngineSetting)])
    add_engine_args(settings, task)
    if problems := [*_mask_problems(task, settings), *_profile_option_problems(task, known.version)]:
        raise recipe_error(problems, task.recipe.places)
    return EngineLaunch(
        program=program,
        arguments=settings.words(),
        files=index_files(settings, task, program) | _retention_files(task) | {RUN_SCRIPT: _source_of(run_program)},
        runner=RUN_SCRIPT,
        companion=_retention_command(task),
        environment=_environment(task),
        inputs=tuple(_inputs(task, settings)),
        cpu_stages=(index_stage(task),),
        last_checkpoint=_last_checkpoint(task),
        expects=ImageExpectation(
            ("torch", "megatron.core", "megatron.training"), "megatron.core", known.version, parser="megatron"
        ),
        notes=(f"pretrain_gpt.py is started as {program}", *_notes(task, settings)),
    )


KEEP_SCRIPT = f"{PROGRAMS}/keep_checkpoints.py"
RUN_SCRIPT = f"{PROGRAMS}/run_program.py"


def _source_of(module: ModuleType) -> str:
    """Return the text of a module of ours that is a program in the job."""
    return Path(str(module.__file__)).read_text(encoding="utf-8")


def _last_checkpoint(task: EngineTask) -> tuple[str, str] | None:
    """Return where Megatron writes which iteration it has saved, and the last one.

    Where it cannot load a checkpoint (on another layout, say) it may end with exit code 0 before its first step. With
    a ramp it counts samples, and how many iterations those are is its own affair.
    """
    if task.recipe.train.batch_ramp is not None or not task.recipe.checkpoint.save:
        return None
    return f"{checkpoint_folder(task.site)}/latest_checkpointed_iteration.txt", str(task.steps)


def _retention_files(task: EngineTask) -> dict[str, str]:
    """Return the job's file that removes old checkpoints, where not all are kept."""
    return {} if _kept(task) is None else {KEEP_SCRIPT: _source_of(retention)}


def _kept(task: EngineTask) -> int | None:
    """Return how many checkpoints stay; None where there is nothing to remove."""
    return task.recipe.checkpoint.keep if task.recipe.checkpoint.save else None


def _retention_command(task: EngineTask) -> tuple[str, ...]:
    if (keep := _kept(task)) is None:
        return ()
    return ("python3", f"{task.site.job_folder}/{KEEP_SCRIPT}", checkpoint_folder(task.site), str(keep))


def _inputs(task: EngineTask, settings: MegatronSettings) -> Iterator[EngineInput]:
    if not task.recipe.data.synthetic:
        yield "data-args"
        if task.recipe.tokenizer is not None:
            yield "tokenizer"
    if settings.value("pretrained_checkpoint") is not None:
        yield "base-megatron"


def _environment(task: EngineTask) -> dict[str, str]:
    layout = task.layout
    environment = {"TOKENIZERS_PARALLELISM": "false"}
    # Before Blackwell, Megatron stops without it where tp or cp overlap; its FSDP stops with it.
    if not uses_fsdp(layout) and (layout.tp > 1 or layout.cp > 1):
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if task.site.vendor == "amd":
        environment |= _AMD
    if task.recipe.train.deterministic:
        environment |= _DETERMINISTIC
    return dict(sorted(environment.items()))


def _notes(task: EngineTask, settings: MegatronSettings) -> Iterator[str]:
    recipe, config, layout = task.recipe, task.config, task.layout
    if note := version_note(recipe, task.site.image):
        yield note
    yield f"Megatron-LM shuffles its own way, from seed {recipe.seed}: another order of samples than engine: torch has"
    if not recipe.data.synthetic:
        yield "its order depends on the length of the run: a longer run does not continue a shorter one's order"
        yield "the index of samples is built on CPUs before GPUs are asked for (build_index.py)"
    if (padded := padded_vocabulary(task)) != config.vocab_size:
        yield (
            f"the vocabulary of {config.vocab_size} is padded to {padded}, and Megatron counts the padded rows in the "
            "loss of every token"
        )
    if recipe.train.batch_ramp is not None:
        yield "with a ramp Megatron counts warm-up and decay in samples, not in steps: the rate rises faster at first"
    if recipe.train.precision == "fp16":
        yield "fp16 trains with a dynamic loss scale: a step that overflows is skipped, whatever non_finite says"
    if _swaps_groups(task, settings):
        yield (
            f"after a resume Megatron-LM {settings.known.version} decays norms and biases, and nothing else, on stages "
            "after the first, where transformer-impl is local: take Transformer Engine's, or 0.14.0"
        )
    keep = recipe.checkpoint.keep
    if not recipe.checkpoint.save:
        yield "Megatron saves nothing, not even at its end: checkpoint: off"
    elif keep is None:
        yield "all checkpoints are kept: checkpoint.keep is null"
    else:
        yield f"Megatron deletes no checkpoints: the first node removes all but the newest {keep} (keep_checkpoints.py)"
    if recipe.checkpoint.resume == "must" and settings.known.version != "head":
        version = settings.known.version
        yield f"without a checkpoint {version} ends with exit code 0; build_index.py looks for one before"
    profile = recipe.observe.profile
    if profile is not None and settings.known.version not in PROFILE_OPTION_VERSIONS:
        yield f"Megatron-LM {settings.known.version} records shapes and stacks in every profile"
    if note := latent_norm_note(config):
        yield note
    if config.moe is not None and config.moe.score_bias and settings.known.version not in FLOAT32_BIAS_VERSIONS:
        yield (
            f"Megatron-LM {settings.known.version} rounds the biases of experts' scores to the weights' precision when "
            f"it loads a checkpoint: {FLOAT32_BIAS_VERSIONS[0]} and newer do not"
        )
    if config.moe is not None and recipe.train.moe is None:
        yield "the router's losses are as the schema defaults them: train.moe"
    if task.site.sharp and layout.dp == 1:
        yield "SHARP has nothing to sum: it works between data-parallel ranks, and dp is 1"
    if config.max_positions < (length := sequence_length(task)):
        yield f"sequences of {length} tokens are longer than the {config.max_positions} the model is made for"


def _swaps_groups(task: EngineTask, settings: MegatronSettings) -> bool:
    """Whether later stages load the parameter groups of the first in another order than they have them.

    Versions before 0.14.0 load them by number. A stage numbers them as its parameters come: the first begins with an
    embedding, which is decayed, and one of local layers with a norm, which is not.
    """
    return (
        settings.known.version not in since("0.14.0")
        and settings.value("transformer_impl") == "local"
        and task.layout.pp > 1
        and task.layout.shard == "zero1"
        and task.recipe.train.optimizer.weight_decay != 0
    )


# TransformerEngine's fp8 GEMMs take rows and columns in multiples of it.
FP8_MULTIPLE = 16


def check_task(task: EngineTask) -> None:
    """Raise one error with everything that Megatron cannot do of a task."""
    problems = [*_training_problems(task), *_data_problems(task), *_checkpoint_problems(task), *_layout_problems(task)]
    if problems:
        raise recipe_error(problems, task.recipe.places)


def _training_problems(task: EngineTask) -> Iterator[Problem]:
    train = task.recipe.train
    yield from unhonoured_problems(task.recipe, "Megatron")
    if train.mode == "finetune":
        yield Problem(
            ("train", "mode"),
            "pretrain_gpt.py has no chat data with loss on the answers",
            "write engine: torch or torchtune, or `mode: pretrain`",
        )
    if train.lora is not None:
        yield Problem(("train", "lora"), "pretrain_gpt.py trains no adapters", "write engine: torch or torchtune")
    if train.optimizer.states == "bf16" and task.layout.shard != "zero1":
        yield Problem(
            ("train", "optimizer", "states"),
            f"Megatron has states in bf16 with its distributed optimizer only, and shard is {task.layout.shard}",
            "write `layout.shard: zero1`, or delete it",
        )
    if train.precision == "fp64":
        yield Problem(("train", "precision"), "Megatron has no fp64", "write fp32, bf16, fp16 or fp8")
    if train.z_loss:
        yield Problem(("train", "z_loss"), "Megatron has no z-loss on the logits", "delete it, or write engine: torch")
    if train.non_finite == "skip" and train.precision != "fp16":
        yield Problem(
            ("train", "non_finite"),
            "Megatron skips a step that is not finite with fp16's loss scale only",
            "write `non_finite: stop`",
        )
    if train.precision == "fp8":
        yield from _fp8_problems(task)


def _fp8_problems(task: EngineTask) -> Iterator[Problem]:
    config, layout = task.config, task.layout
    width = config.ffn if config.moe is None else config.moe.ffn
    ranks = layout.tp if config.moe is None else layout.etp
    cut = {
        "hidden": config.hidden,
        "heads · head_dim / tp": config.heads * config.head_dim // layout.tp,
        "ffn / tp": (width or 0) // ranks,
        **_latent_widths(config),
        "tokens of a micro-batch on a rank": layout.micro_batch * sequence_length(task) // layout.cp // layout.tp,
    }
    for what, size in cut.items():
        if size % FP8_MULTIPLE:
            yield Problem(
                ("train", "precision"),
                f"fp8 products take multiples of {FP8_MULTIPLE}, and {what} is {size}",
                "write `precision: bf16`, or a smaller tp",
            )
            return


def _latent_widths(config: ModelConfig) -> dict[str, int]:
    if (mla := config.mla) is None:
        return {}
    return {"mla.query_rank": mla.query_rank or 0, "mla.kv_rank + rope_dim": mla.kv_rank + mla.rope_dim}


def _profile_option_problems(task: EngineTask, version: str) -> Iterator[Problem]:
    """Yield options of a profile that a version cannot be asked for, as it always has them."""
    profile = task.recipe.observe.profile
    if profile is None or version in PROFILE_OPTION_VERSIONS:
        return
    for key in PROFILE_OPTIONS:
        if getattr(profile, key):
            yield Problem(
                ("observe", "profile", key), f"Megatron-LM {version} records {key} in every profile", "delete it"
            )


def _mask_problems(task: EngineTask, settings: MegatronSettings) -> Iterator[Problem]:
    """Yield why attention would not read what keeps documents apart."""
    if not task.recipe.document_mask:
        return
    own = settings.value("transformer_impl") == "local"
    if settings.value(BOUNDARIES):
        if own:
            yield Problem(
                DOCUMENT_MASK_KEY, "Megatron's own attention takes no packed documents", "delete transformer_impl"
            )
        return
    unfused = not settings.value("masked_softmax_fusion") and settings.value("create_attention_mask_in_dataloader")
    if own and unfused:
        return
    yield Problem(
        DOCUMENT_MASK_KEY,
        f"in Megatron-LM {settings.known.version} {MASK_IGNORED}",
        "write engine.version: head, or engine.args: {transformer_impl: local, no-masked-softmax-fusion: true}, or "
        "engine: torch",
    )


def _data_problems(task: EngineTask) -> Iterator[Problem]:
    recipe = task.recipe
    yield from document_problems(task)
    if recipe.data.seed != recipe.seed:
        yield Problem(
            ("data", "seed"),
            f"Megatron has one seed for weights and data, and here are {recipe.seed} and {recipe.data.seed}",
            "write the same number as `seed` and `data.seed`",
        )
    if recipe.data.skip:
        yield Problem(("data", "skip"), "Megatron cannot leave out ranges of samples", "delete it, or engine: torch")
    if recipe.data.stage != "direct":
        yield Problem(
            ("data", "stage"), "Megatron maps the token files where they lie in the store", "write `stage: direct`"
        )


def _checkpoint_problems(task: EngineTask) -> Iterator[Problem]:
    recipe = task.recipe
    yield from mirror_problems(recipe, "Megatron")
    yield from profile_problems(recipe, "Megatron", ONCE_WITH_ONE_STEP_BEFORE)
    if recipe.observe.dllogger:
        yield Problem(("observe", "dllogger"), "Megatron writes no DLLogger file", "delete it: its log has the figures")
    if recipe.model.from_ is not None and uses_fsdp(task.layout):
        yield Problem(
            ("layout", "shard"),
            "Megatron's FSDP reads checkpoints of its own format only, and base weights are converted to torch_dist",
            "write `shard: zero1`",
        )


def _layout_problems(task: EngineTask) -> Iterator[Problem]:
    layout, site, recipe = task.layout, task.site, task.recipe
    ranks = site.nodes * site.gpus_per_node
    if layout.world_size != ranks:
        yield Problem(
            ("layout",),
            f"the layout {layout} is for {layout.world_size} GPUs, and there are {site.nodes} nodes of "
            f"{site.gpus_per_node} = {ranks}",
            "plan for as many nodes as there are",
        )
    # The planner writes out the stages of the layouts that it chooses.
    written = isinstance(recipe.layout, str) or recipe.layout.stages is not None
    yield from layout_problems(
        layout,
        task.config,
        sequence_length=sequence_length(task),
        batch_sizes=run_length(task).schedule.sizes,
        engine="megatron",
        stages_written=written,
    )
    version = task_version(task)
    if layout.ep > 1 and recipe.train.precision == "fp16" and version not in since("0.16.1"):
        yield Problem(
            ("layout", "ep"),
            f"Megatron-LM {version} has no expert parallelism in fp16",
            "write `precision: bf16`, or the engine.version of a newer image: 0.16.1, 0.19.0 or head",
        )
    if layout.cp > 1 and sequence_length(task) % (2 * layout.cp):
        yield Problem(
            ("layout", "cp"),
            f"Megatron cuts a sequence of {sequence_length(task)} into 2 · cp = {2 * layout.cp} equal pieces",
            "write a sequence_length that divides, or a smaller cp",
        )
    if layout.shard == "none" and layout.replicate > 1:
        yield Problem(("layout", "replicate"), "there is nothing to share out with `shard: none`", "delete it")


SCRIPT, REQUEST_FILE = f"{PROGRAMS}/build_index.py", "index.json"
# What pretrain_gpt.py hands to GPTDatasetConfig, by Megatron's names of the arguments; a version takes what it has.
_CONFIG = {
    "random_seed": "seed",
    "sequence_length": "seq_length",
    "split": "split",
    "path_to_cache": "data_cache_path",
    "mmap_bin_files": "mmap_bin_files",
    "reset_position_ids": "reset_position_ids",
    "reset_attention_mask": "reset_attention_mask",
    "eod_mask_loss": "eod_mask_loss",
    "create_attention_mask": "create_attention_mask_in_dataloader",
    "mid_level_dataset_surplus": "mid_level_dataset_surplus",
    "allow_ambiguous_pad_tokens": "allow_ambiguous_pad_tokens",
    "multiple_validation_sets": "multiple_validation_sets",
    "full_validation": "full_validation",
    "inter_document_masking": "dataloader_inter_document_masking",
}
# What `build_tokenizer` reads of its arguments, in any version.
_TOKENIZER = (
    *("tokenizer_type", "tokenizer_model", "vocab_size", "vocab_file", "merge_file", "trust_remote_code"),
    *("tokenizer_metadata", "metadata_path", "tokenizer_special_tokens", "special_tokens", "chat_template"),
    *("tokenizer_hf_use_fast", "tokenizer_hf_include_special_tokens", "use_gigatoken"),
    *("tokenizer_hf_no_use_fast", "tokenizer_hf_no_include_special_tokens"),
    *("null_tokenizer_eod_id", "null_tokenizer_pad_id"),
    *("padded_vocab_size", "pad_vocab_size"),
)


def sample_counts(task: EngineTask) -> tuple[int, int, int]:
    """Return how many samples of each split Megatron asks its datasets for, which is a part of their cache's name.

    As `get_train_valid_test_num_samples` of its training.py counts them.
    """
    train, length = task.recipe.train, run_length(task)
    validation = task.recipe.data.validation
    every, batches = (validation.every, validation.batches) if validation else (task.steps, 0)
    rounds = task.steps // every + 1
    return (length.samples(task.steps), rounds * batches * train.global_batch, batches * train.global_batch)


def index_files(settings: MegatronSettings, task: EngineTask, program: str) -> dict[str, str]:
    """Return the job's files for the stage."""
    known, site, data = settings.known, task.site, task.recipe.data
    request: dict[str, Any] = {
        "program": program,
        "resume": task.recipe.checkpoint.resume,
        "checkpoints": checkpoint_folder(site),
        "data": None if data.synthetic else f"{site.input_folder}/data.json",
        "data_args": settings.value("data_args_path"),
        "samples": sample_counts(task),
        "config": {field: settings.value(dest) for field, dest in _CONFIG.items() if known.has(dest)},
        "tokenizer": {dest: settings.value(dest) for dest in _TOKENIZER if known.has(dest)},
    }
    # Versions without the argument count the rows when they build the tokenizer, unless they are there.
    request["tokenizer"].setdefault("padded_vocab_size", padded_vocabulary(task))
    script = Path(__file__).with_name(Path(SCRIPT).name).read_text(encoding="utf-8")
    return {SCRIPT: script, REQUEST_FILE: json.dumps(request, indent=1) + "\n"}


def index_stage(task: EngineTask) -> CpuStage:
    """Return the stage that runs before training: checks first, then the index."""
    return CpuStage("index", ("python3", f"{task.site.job_folder}/{SCRIPT}", f"{task.site.job_folder}/{REQUEST_FILE}"))
