"""A recipe and its plan as a launch of Megatron-LM's pretrain_gpt.py."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainshed.engines.foreign import EngineLaunch, EngineTask, Wanted
from trainshed.engines.megatron.escape import add_engine_args
from trainshed.engines.megatron.index_job import index_files, index_stage
from trainshed.engines.megatron.keeping import put_checkpoints, put_data, put_logs
from trainshed.engines.megatron.known import NEWEST, known_arguments
from trainshed.engines.megatron.model import padded_vocabulary, put_model, sequence_length
from trainshed.engines.megatron.parallel import put_layout, uses_fsdp
from trainshed.engines.megatron.refusals import refuse
from trainshed.engines.megatron.settings import Settings
from trainshed.engines.megatron.training import put_training
from trainshed.errors import InputError

PROGRAM = "/opt/megatron-lm/pretrain_gpt.py"
"""Where NVIDIA's images have it; the CPU stage says so at once where it is not there."""
# Images that have it elsewhere, by the beginning of their name: Azure's Dockerfile clones to /megatron-lm; AMD's and
# what is built on it begin in the folder of Megatron-LM.
_PROGRAMS = {
    "ghcr.io/azure/ai-infrastructure-on-azure/megatron-lm": "/megatron-lm/pretrain_gpt.py",
    "ghcr.io/silogen/megatron-lm-ray": "pretrain_gpt.py",
    "rocm/megatron-lm": "pretrain_gpt.py",
    "docker.io/rocm/megatron-lm": "pretrain_gpt.py",
}

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

    The arguments are those of `engine.version`, the newest known where the recipe does not say; pretrain_gpt.py is
    `engine.program`, or where images of that name have it.
    """
    program = task.recipe.engine.program or program_in(task.recipe.engine.image or task.place.image)
    try:
        known = known_arguments(task.recipe.engine.version or NEWEST)
    except InputError as error:
        raise InputError(error.what, where=task.recipe.where("engine.version"), hint=error.hint) from None
    refuse(task)
    settings = Settings(known)
    for put in (put_model, put_training, put_layout, put_data, put_checkpoints, put_logs):
        put(settings, task)
    add_engine_args(settings, task)
    return EngineLaunch(
        program=program,
        arguments=settings.words(),
        files=index_files(settings, task, program),
        environment=_environment(task),
        wanted=tuple(_wanted(task, settings)),
        before=(index_stage(task),),
        notes=(f"pretrain_gpt.py is started as {program}", *_notes(task, settings)),
    )


def program_in(image: str | None) -> str:
    """Return where an image has pretrain_gpt.py."""
    names = (name for name in _PROGRAMS if image is not None and re.split("[:@]", image)[0] == name)
    return _PROGRAMS[name] if (name := next(names, None)) is not None else PROGRAM


def _wanted(task: EngineTask, settings: Settings) -> Iterator[Wanted]:
    if not task.recipe.data.synthetic:
        yield "data-args"
        if task.recipe.tokenizer is not None:
            yield "tokenizer"
    if settings.value("pretrained_checkpoint") is not None:
        yield "base-megatron"


def _environment(task: EngineTask) -> dict[str, str]:
    layout = task.layout
    found = {"TOKENIZERS_PARALLELISM": "false"}
    # Before Blackwell, Megatron stops without it where tp or cp overlap; its FSDP stops with it.
    if not uses_fsdp(layout) and (layout.tp > 1 or layout.cp > 1):
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if task.place.vendor == "amd":
        found |= _AMD
    if task.recipe.train.deterministic:
        found |= _DETERMINISTIC
    return dict(sorted(found.items()))


def _notes(task: EngineTask, settings: Settings) -> Iterator[str]:
    recipe, config, layout = task.recipe, task.config, task.layout
    if recipe.engine.version is None:
        yield f"arguments are those of Megatron-LM {settings.known.version}, the newest known (engine.version)"
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
    if recipe.checkpoint.keep is not None:
        yield f"Megatron deletes no checkpoints: `keep: {recipe.checkpoint.keep}` is left to `trainshed checkpoints`"
    if recipe.checkpoint.resume == "must" and settings.known.version == "0.16.1":
        yield "without a checkpoint 0.16.1 ends with exit code 0; build_index.py looks for one before"
    if recipe.observe.dllogger:
        yield "Megatron writes no DLLogger file: its figures are in the log (`trainshed logs RUN`)"
    if config.moe is not None and recipe.train.moe is None:
        yield "the router's losses are as the schema defaults them: train.moe"
    if task.place.sharp and layout.dp == 1:
        yield "SHARP has nothing to sum: it works between data-parallel ranks, and dp is 1"
    if config.max_positions < (length := sequence_length(task)):
        yield f"sequences of {length} tokens are longer than the {config.max_positions} the model is made for"
