"""Starting NeMo by its release: 24.07 takes a Hydra file, 26.06 a Megatron-Bridge script.

What a release cannot do is refused before anything is rendered. Paths are overrides on the Hydra command line. The
Bridge script builds its ConfigContainer and calls `pretrain`; every name it uses was read in
Megatron-Bridge v0.5.0 (fcbb603) and in the Megatron-LM commit it pins (d0b3b77).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trainshed.checkpoints.megatron.unsupported import uncommon_parts
from trainshed.engines.document_flags import DOCUMENT_MASK_KEY, MASK_IGNORED, document_problems
from trainshed.engines.key_table import budget_problems, mirror_problems, unhonoured_problems
from trainshed.engines.keys import added_arguments, argument_problems, format_value, to_yaml
from trainshed.engines.launch import (
    NODE_NUMBER,
    EngineInput,
    EngineLaunch,
    EngineTask,
    ImageExpectation,
    staging_command,
    staging_files,
)
from trainshed.engines.nemo.bridge_keys import BRIDGE_KEYS, BRIDGE_TABLE
from trainshed.engines.nemo.hydra_data import READS_MASK
from trainshed.engines.nemo.hydra_keys import HYDRA_KEYS, HYDRA_PLACES, HYDRA_TABLE
from trainshed.engines.nemo.hydra_model import architecture_problems
from trainshed.engines.profiles import (
    NSYS_SCRIPT,
    ONCE_WITH_ONE_STEP_BEFORE,
    nsys_script,
    nsys_stage,
    profile_problems,
)
from trainshed.errors import RecipeError
from trainshed.plan import layout_problems
from trainshed.recipe import Recipe, TrainedTokenizer
from trainshed.recipe.section import Problem
from trainshed.recipe.validation import recipe_error

_ADAM_EPSILON = 1e-8
"""What megatron-core's Adam uses; NeMo 24.07 hands no other on to it."""
_UNREADABLE_BY_HYDRA = "$'\"\\\n"
"""Characters of a path that Hydra reads as its own."""


def shared_problems(task: EngineTask) -> Iterator[Problem]:
    """Yield what neither release takes."""
    recipe, train = task.recipe, task.recipe.train
    if task.site.vendor != "nvidia":
        yield Problem(("engine",), "NeMo's images run on NVIDIA GPUs only", "write engine: torch or megatron")
    yield from unhonoured_problems(recipe, "NeMo")
    if parts := uncommon_parts(task.config).values():
        yield Problem(("model",), f"nothing here writes {', '.join(parts)} for NeMo", "write engine: torch")
    yield from document_problems(task)
    if train.mode == "finetune":
        yield Problem(("train", "mode"), "NeMo is rendered for pretraining only", "write engine: torch or torchtune")
    if train.lora is not None:
        yield Problem(("train", "lora"), "NeMo is rendered for training all weights", "engine: torch or torchtune")
    if train.optimizer.states == "bf16":
        yield Problem(
            ("train", "optimizer", "states"), "NeMo is rendered with states in fp32", "delete it, or engine: megatron"
        )
    if train.precision not in ("bf16", "fp8"):
        yield Problem(
            ("train", "precision"), f"NeMo is rendered for bf16 and fp8, not for {train.precision}", "precision: bf16"
        )
    if train.z_loss:
        yield Problem(("train", "z_loss"), "NeMo has no z-loss on the logits", "delete it, or write engine: torch")
    if train.non_finite == "skip":
        yield Problem(
            ("train", "non_finite"), "megatron-core stops at a non-finite gradient in bf16, and cannot skip it", "stop"
        )
    if recipe.data.skip:
        yield Problem(("data", "skip"), "NeMo reads its samples in an order of its own", "delete it")
    yield from mirror_problems(recipe, "NeMo")
    yield from layout_problems(
        task.layout,
        task.config,
        sequence_length=recipe.data.sequence_length or task.config.max_positions,
        batch_sizes=[train.global_batch, *([train.batch_ramp.start] if train.batch_ramp else [])],
        engine="nemo",
        stages_written=True,
    )
    if len(set(task.layout.stages)) > 1:
        yield Problem(("layout", "stages"), "uneven stages are not rendered for NeMo", "write engine: megatron")
    if recipe.seed != recipe.data.seed:
        yield Problem(
            ("data", "seed"),
            f"NeMo has one seed for weights and data, and `seed: {recipe.seed}` is another",
            f"seed: {recipe.seed}",
        )
    yield from _tokenizer_problems(recipe)


def hydra_problems(task: EngineTask) -> Iterator[Problem]:
    """Yield what release 24.07 does not take."""
    recipe, train, layout = task.recipe, task.recipe.train, task.layout
    newer = 'write engine: {name: nemo, version: "26.06"}'
    yield from shared_problems(task)
    yield from budget_problems(recipe, "NeMo 24.07")
    yield from architecture_problems(task.config)
    if recipe.model.from_ is not None:
        yield Problem(
            ("model", "from"),
            "NeMo 24.07 starts from .nemo archives only, which nothing here writes",
            f"{newer}, which starts from Hugging Face weights",
        )
    if recipe.document_mask and any(recipe.engine.args.get(key) != value for key, value in READS_MASK.items()):
        yield Problem(
            DOCUMENT_MASK_KEY, MASK_IGNORED, f"write engine.args: {format_value(READS_MASK)}, or engine: torch"
        )
    if train.deterministic:
        yield Problem(("train", "deterministic"), "NeMo 24.07 has no deterministic mode", "delete it")
    if train.optimizer.eps != _ADAM_EPSILON:
        yield Problem(("train", "optimizer", "eps"), "NeMo 24.07 does not hand an epsilon on", f"eps: {_ADAM_EPSILON}")
    if layout.dp > 1 and layout.shard != "zero1":
        yield Problem(
            ("layout", "shard"),
            f"NeMo 24.07 is rendered with megatron-core's distributed optimizer, and shard is {layout.shard}",
            "shard: zero1",
        )
    if layout.replicate > 1:
        yield Problem(("layout", "replicate"), "NeMo 24.07 has one instance of its distributed optimizer", "delete it")
    if task.config.moe is not None:
        if layout.etp != layout.tp:
            yield Problem(
                ("layout", "etp"),
                f"NeMo 24.07 cuts experts by tp: {layout.tp}, and etp is {layout.etp}",
                f"etp: {layout.tp}",
            )
        if layout.dp % layout.ep:
            yield Problem(
                ("layout", "ep"), f"NeMo 24.07 spreads experts over dp: {layout.dp} alone", "write a divisor of dp"
            )
    yield from profile_problems(
        recipe,
        "NeMo 24.07",
        {"cycles": "marks the profiled steps once", "warmup": "has no warm-up: nsys records the marked steps alone"},
        own_warmup=0,
    )
    for path in (task.site.run_folder, task.site.job_folder):
        if any(letter in path for letter in _UNREADABLE_BY_HYDRA):
            yield Problem(("store",), f"Hydra would not read `{path}` as a path", "use letters, digits and -_./:")


def bridge_problems(task: EngineTask) -> Iterator[Problem]:
    """Yield what the Megatron-Bridge script does not do."""
    config, layout = task.config, task.layout
    yield from shared_problems(task)
    if not task.recipe.checkpoint.save:
        yield Problem(
            ("checkpoint", "save"),
            "Megatron-Bridge is rendered with checkpoints",
            'delete it, or write engine: {name: nemo, version: "24.07"}',
        )
    if task.recipe.document_mask:
        yield Problem(DOCUMENT_MASK_KEY, MASK_IGNORED, "write engine: torch, or megatron with engine.version: head")
    if task.recipe.observe.dllogger:
        yield Problem(
            ("observe", "dllogger"), "Megatron-Bridge writes no DLLogger file", "delete it: its log has the figures"
        )
    yield from profile_problems(task.recipe, "Megatron-Bridge", ONCE_WITH_ONE_STEP_BEFORE)
    if layout.shard != "zero1" and layout.dp > 1:
        yield Problem(
            ("layout", "shard"),
            f"NeMo is rendered with megatron-core's distributed optimizer, and shard is {layout.shard}",
            "shard: zero1, or engine: megatron",
        )
    length = task.recipe.data.sequence_length or config.max_positions
    if config.positions == "learned" and config.max_positions != length:
        yield Problem(
            ("data", "sequence_length"),
            "Megatron-Bridge learns as many positions as a sample has tokens, and the model has "
            f"{config.max_positions}",
            f"write {config.max_positions}, or engine: megatron",
        )
    if config.rope is not None and not float(config.rope.base).is_integer():
        yield Problem(
            ("model", "config", "rope", "base"),
            f"Megatron-Bridge takes a whole number, and it is {config.rope.base}",
            "write engine: torch",
        )
    schedule = task.recipe.train.schedule
    end = task.steps if schedule.name == "wsd" else schedule.decay or task.steps
    if schedule.warmup >= end:
        yield Problem(
            ("train", "schedule", "warmup"),
            f"Megatron-Bridge would cut a warm-up of {schedule.warmup} steps in silence: its schedule ends at {end}",
            "write a shorter one, or a later `decay`",
        )
    if config.activation != "silu" and config.gated:
        yield Problem(("model",), f"a gated {config.activation} is not rendered for NeMo", "write engine: megatron")
    scaling = config.rope.scaling if config.rope is not None else None
    if scaling is not None and scaling.kind == "llama3":
        # megatron-core has these three as constants of RotaryEmbedding; only the factor is a setting.
        given = (scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_positions)
        if given != (1.0, 4.0, 8192):
            yield Problem(("model",), "megatron-core stretches rotary frequencies as Llama 3.1 does only", "1, 4, 8192")


def _tokenizer_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.tokenizer is None:
        yield Problem(
            ("tokenizer",),
            "is missing: NeMo takes the size of the vocabulary from a tokenizer, for synthetic data too",
            "tokenizer: hf://org/name",
        )
    if isinstance(recipe.tokenizer, TrainedTokenizer) and recipe.data.synthetic:
        yield Problem(("tokenizer",), "there is no text to learn a tokenizer from", "write the address of one")


HYDRA_PROGRAM = "/opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py"
HYDRA_FILE = "nemo.yaml"
_HYDRA_ENVIRONMENT = {
    # The seed's: layer norms leave SMs to the communication that runs beside them.
    "NVTE_FWD_LAYERNORM_SM_MARGIN": "8",
    "NVTE_BWD_LAYERNORM_SM_MARGIN": "8",
    "OMP_NUM_THREADS": "12",
}
_PLAIN_VALUE = re.compile(r"^[A-Za-z0-9_./:-]+$")


def hydra_launch(task: EngineTask) -> EngineLaunch:
    """Return how NeMo 24.07 is started for a task."""
    recipe = task.recipe
    problems = list(hydra_problems(task))
    if problems:
        raise recipe_error(problems, recipe.places)
    config = hydra_config(task)
    overrides = [f"++{setting.key}={_hydra_value(setting.value)}" for setting in HYDRA_PLACES.render(task)]
    inputs: tuple[EngineInput, ...] = ("tokenizer",) if recipe.data.synthetic else ("data-prefix", "tokenizer")
    late = {} if recipe.data.synthetic else {"++model.data.data_prefix=": f"{task.site.input_folder}/data_prefix.txt"}
    heading = f"NeMo 24.07, written by Trainshed for {recipe.name}; overrides on the command line say where things lie."
    files, profile = {HYDRA_FILE: to_yaml(config, heading)}, recipe.observe.profile
    if profile is not None:
        files[NSYS_SCRIPT] = nsys_script(profile)
    files |= staging_files(task)
    return EngineLaunch(
        program=HYDRA_PROGRAM,
        arguments=(
            f"--config-path={task.site.job_folder}",
            f"--config-name={HYDRA_FILE}",
            *(word for word in overrides if NODE_NUMBER not in word),
        ),
        node_arguments=tuple(word for word in overrides if NODE_NUMBER in word),
        files=files,
        cpu_stages=(nsys_stage(),) if profile is not None else (),
        rank_script=NSYS_SCRIPT if profile is not None else None,
        environment=_HYDRA_ENVIRONMENT,
        inputs=inputs,
        late_arguments=late,
        staging=staging_command(task),
        expects=ImageExpectation(("torch", "nemo", "hydra", "omegaconf"), parser="hydra", config=HYDRA_FILE),
        notes=tuple(_hydra_notes(task)),
    )


def hydra_config(task: EngineTask) -> dict[str, Any]:
    """Return the whole configuration but the places, by dotted key."""
    recipe = task.recipe
    settings = HYDRA_TABLE.render(task)
    decided = [*HYDRA_PLACES.render(task), *settings]
    problems = list(argument_problems(recipe.engine.args, HYDRA_KEYS, decided))
    if problems:
        raise recipe_error(problems, recipe.places)
    return {setting.key: setting.value for setting in settings} | added_arguments(recipe.engine.args, decided)


def _hydra_value(value: Any) -> str:
    text = format_value(value)
    return text if _PLAIN_VALUE.match(text.replace(NODE_NUMBER, "0")) else f"'{text}'"


def _hydra_notes(task: EngineTask) -> list[str]:
    notes = [
        "NeMo 24.07 orders samples its own way (megatron-core's index, one seed): the order of `data` does not hold",
        "its first rank builds the sample index when training starts, while the others wait; it is kept in the run",
        "the embedding has as many rows as the tokenizer has tokens, padded to a multiple of 128 · tp",
    ]
    if task.recipe.observe.dllogger is not False:
        notes.append("NeMo begins its DLLogger file anew at every start; the log of each attempt is kept")
    if task.recipe.checkpoint.resume == "fresh":
        notes.append("NeMo does not refuse to start where checkpoints already are: `resume: fresh` starts beside them")
    if task.recipe.observe.profile is not None:
        notes.append("the profiled ranks are started by `nsys profile`: its reports lie in the run's profile folder")
    return notes


BRIDGE_FILE = "pretrain.py"
_CONFIG_CLASSES = {
    "train": "TrainingConfig",
    "validation": "ValidationConfig",
    "optimizer": "OptimizerConfig",
    "scheduler": "SchedulerConfig",
    "ddp": "DistributedDataParallelConfig",
    "dataset": "GPTDatasetConfig",
    "logger": "LoggerConfig",
    "tokenizer": "TokenizerConfig",
    "checkpoint": "CheckpointConfig",
    "rng": "RNGConfig",
    "dist": "DistributedInitConfig",
    "profiling": "ProfilingConfig",
}
_BRIDGE_ENVIRONMENT = {
    # megatron-core: with tp or cp, kernels and communication must be queued in the order they are launched.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NVTE_FWD_LAYERNORM_SM_MARGIN": "8",
    "NVTE_BWD_LAYERNORM_SM_MARGIN": "8",
}


def bridge_launch(task: EngineTask) -> EngineLaunch:
    """Return how NeMo 26.06 is started for a task."""
    recipe = task.recipe
    settings = BRIDGE_TABLE.render(task)
    problems = [*bridge_problems(task), *argument_problems(recipe.engine.args, BRIDGE_KEYS, settings)]
    if problems:
        raise recipe_error(problems, recipe.places)
    extra = added_arguments(recipe.engine.args, settings)
    inputs: list[EngineInput] = ["tokenizer"]
    if not recipe.data.synthetic:
        inputs.insert(0, "data-args")
    if recipe.model.from_ is not None:
        inputs.append("base-hf")
    return EngineLaunch(
        program=f"{task.site.job_folder}/{BRIDGE_FILE}",
        arguments=(),
        files={BRIDGE_FILE: _script(task, {setting.key: setting.value for setting in settings}, extra)},
        environment=_BRIDGE_ENVIRONMENT,
        inputs=tuple(inputs),
        expects=ImageExpectation(("torch", "megatron.bridge"), parser="script", program_in_image=False),
        notes=tuple(_bridge_notes(task)),
    )


def _script(task: EngineTask, values: dict[str, Any], extra: dict[str, Any]) -> str:
    data = task.recipe.data
    classes = {**_CONFIG_CLASSES, "dataset": values["dataset"]}
    sections = {name: _section_values(values, name) for name in classes}
    used = {name: kind for name, kind in classes.items() if sections[name]}
    imports = ",\n    ".join(sorted({"ConfigContainer", *used.values()}))
    base = task.recipe.model.from_ is not None
    return "\n".join(
        [
            f'"""Pretraining of {task.recipe.name}, written by Trainshed for Megatron-Bridge 0.5.0 (NeMo 26.06)."""',
            "",
            *([] if data.synthetic else ["import json", "from pathlib import Path", ""]),
            *([] if base else _activation_imports(task)),
            *(["from megatron.bridge import AutoBridge"] if base else []),
            *([] if base else ["from megatron.bridge.models import GPTModelProvider"]),
            f"from megatron.bridge.training.config import (\n    {imports},\n)",
            "from megatron.bridge.training.gpt_step import forward_step",
            "from megatron.bridge.training.mixed_precision import get_mixed_precision_config",
            "from megatron.bridge.training.pretrain import pretrain",
            *([] if data.synthetic else ["from megatron.core.datasets.utils import get_blend_from_list"]),
            "",
            "",
            *_model_function(task, values),
            "",
            "",
            *_config_function(task, values["mixed_precision"], sections, used, extra),
            "",
            "",
            'if __name__ == "__main__":',
            "    pretrain(config=configuration(), forward_step_func=forward_step)",
            "",
        ]
    )


def _activation_imports(task: EngineTask) -> list[str]:
    partial = ["from functools import partial", ""] if task.config.activation == "gelu_tanh" else []
    return [*partial, "import torch.nn.functional as F"]


def _model_function(task: EngineTask, values: dict[str, Any]) -> list[str]:
    values = _section_values(values, "model")
    if task.recipe.model.from_ is not None:
        start = [
            f"    bridge = AutoBridge.from_hf_pretrained({f'{task.site.input_folder}/base'!r})",
            "    model = bridge.to_megatron_provider(load_weights=True)",
        ]
    else:
        sizes = ("num_layers", "hidden_size", "num_attention_heads")
        given = ", ".join(f"{key}={values.pop(key)!r}" for key in sizes)
        start = [f"    model = GPTModelProvider({given})"]
    fields = [f"    model.{key} = {value!r}" for key, value in values.items()]
    return ["def provider():", *start, *fields, "    return model"]


def _config_function(
    task: EngineTask, precision: str, sections: dict[str, dict[str, Any]], used: dict[str, str], extra: dict[str, Any]
) -> list[str]:
    lines = ["def configuration():"]
    if not task.recipe.data.synthetic:
        lines += [
            f"    splits = json.loads(Path({f'{task.site.input_folder}/data.json'!r}).read_text())",
            # Documents that are trained on are not validated on: what has none of its own gets none.
            f"    own = {('train', 'valid') if task.recipe.data.validation else ('train',)!r}",
            '    names = ("train", "valid", "test")',
            "    blends = [get_blend_from_list(splits[name]) if name in own else None for name in names]",
        ]
    lines += ["    config = ConfigContainer(", "        model=provider(),"]
    for name, kind in used.items():
        lines.append(f"        {name}={kind}(")
        lines += [f"            {key}={value!r}," for key, value in sections[name].items()]
        if name == "dataset" and not task.recipe.data.synthetic:
            # One corpus that `split` shares out, or documents of its own for each.
            shared_out = task.recipe.data.split is not None
            lines.append(f"            {'blend=blends[0]' if shared_out else 'blend_per_split=blends'},")
        lines.append("        ),")
    lines += [f"        mixed_precision=get_mixed_precision_config({precision!r}),", "    )"]
    lines += [f"    config.{key} = {value!r}" for key, value in extra.items()]
    return [*lines, "    return config"]


def _section_values(values: dict[str, Any], name: str) -> dict[str, Any]:
    prefix = f"{name}."
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _bridge_notes(task: EngineTask) -> list[str]:
    notes = [
        "Megatron-Bridge orders samples its own way (megatron-core's index): the order of `data` does not hold",
        "its first rank builds the sample index when training starts, while the others wait; it is kept in the run",
    ]
    if task.recipe.model.from_ is not None:
        notes.append("every start reads the base weights from Hugging Face files; a checkpoint then replaces them")
    elif task.config.vocab_size % task.layout.tp:
        notes.append("the embedding has as many rows as the tokenizer has tokens, padded to a multiple of 128 · tp")
    if task.recipe.checkpoint.resume == "fresh":
        notes.append("Megatron-Bridge does not refuse to start where checkpoints already are: it writes beside them")
    return notes


HYDRA_RELEASE = "24.07"
BRIDGE_RELEASE = "26.06"
NEMO_IMAGES = {HYDRA_RELEASE: "nvcr.io/nvidia/nemo:24.07", BRIDGE_RELEASE: "nvcr.io/nvidia/nemo:26.06"}
_LAUNCHES = {HYDRA_RELEASE: hydra_launch, BRIDGE_RELEASE: bridge_launch}
# NVIDIA's releases are a year and a month; images that others build on them keep the tag (nemo_workload:24.07).
_IMAGE_TAG = re.compile(r"nemo[^/]*:(\d\d\.\d\d)\b")


def nemo_release(recipe: Recipe, image: str | None) -> str:
    """Return which release is meant: that of `engine.version`, of the image, or the newest that is known."""
    tag = _IMAGE_TAG.search(image or "")
    return recipe.engine.version or (tag[1] if tag else BRIDGE_RELEASE)


def nemo_launch(task: EngineTask) -> EngineLaunch:
    """Return how NeMo is started for a task; `engine.version` says which release."""
    recipe = task.recipe
    image = recipe.engine.image or task.site.image
    tag = _IMAGE_TAG.search(image or "")
    version = nemo_release(recipe, image)
    if version not in _LAUNCHES:
        raise RecipeError(
            f"NeMo {version} is not known here",
            where=recipe.where("engine.version"),
            hint=f'version: "{HYDRA_RELEASE}" (Hydra) or "{BRIDGE_RELEASE}" (Megatron-Bridge)',
        )
    if tag and tag[1] != version:
        raise RecipeError(
            f"the image {image} is release {tag[1]}, and engine.version is {version}",
            where=recipe.where("engine.version"),
            hint=f"write the same release in both, for example {NEMO_IMAGES[version]}",
        )
    launch = _LAUNCHES[version](task)
    notes = list(launch.notes)
    if recipe.engine.version is None:
        why = "the release of the image" if tag else "the newest that is known here"
        notes.insert(0, f"NeMo {version} is meant, {why}; engine.version says another")
    if image is None:
        notes.append(f"no image is named; {NEMO_IMAGES[version]} has this release")
    return replace(launch, notes=tuple(notes))
