"""Starting NeMo 26.06: a Megatron-Bridge script that builds its ConfigContainer and calls `pretrain`.

Every name the script uses was read in Megatron-Bridge v0.5.0 (fcbb603) and in the Megatron-LM commit it pins (d0b3b77).
"""

from __future__ import annotations

from typing import Any

from trainshed.engines.engine_arguments import argument_problems
from trainshed.engines.foreign import EngineLaunch, EngineTask, Wanted
from trainshed.engines.nemo.bridge_settings import KNOWN, PRECISION, bridge_settings
from trainshed.engines.nemo.rules import bridge_problems
from trainshed.recipe.messages import as_recipe_error
from trainshed.recipe.section import Problem

FILE = "pretrain.py"
_CLASSES = {
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
# torch.nn.functional's; megatron-core asks for the function itself.
_ACTIVATIONS = {
    "silu": "F.silu",
    "gelu": "F.gelu",
    "gelu_tanh": "partial(F.gelu, approximate='tanh')",
    "relu": "F.relu",
}
_ENVIRONMENT = {
    # megatron-core: with tp or cp, kernels and communication must be queued in the order they are launched.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NVTE_FWD_LAYERNORM_SM_MARGIN": "8",
    "NVTE_BWD_LAYERNORM_SM_MARGIN": "8",
}


def bridge_launch(task: EngineTask) -> EngineLaunch:
    """Return how NeMo 26.06 is started for a task."""
    recipe = task.recipe
    settings = bridge_settings(task)
    decided = {setting.key: setting for setting in settings}
    problems: list[Problem] = [*bridge_problems(task), *argument_problems(recipe.engine.args, KNOWN, decided)]
    if problems:
        raise as_recipe_error(problems, recipe.places)
    extra = {key: value for key, value in recipe.engine.args.items() if key not in decided}
    wanted: list[Wanted] = ["tokenizer"]
    if not recipe.data.synthetic:
        wanted.insert(0, "data-args")
    if recipe.model.from_ is not None:
        wanted.append("base-hf")
    return EngineLaunch(
        program=f"{task.place.job}/{FILE}",
        arguments=(),
        files={FILE: _script(task, {setting.key: setting.value for setting in settings}, extra)},
        environment=_ENVIRONMENT,
        wanted=tuple(wanted),
        notes=tuple(_notes(task)),
    )


def _script(task: EngineTask, values: dict[str, Any], extra: dict[str, Any]) -> str:
    data = task.recipe.data
    classes = dict(_CLASSES)
    if data.synthetic:
        classes["dataset"] = "MockGPTDatasetConfig"
    sections = {name: _section(values, name) for name in classes}
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
            *_config_function(task, sections, used, extra),
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
    values = _section(values, "model")
    if task.recipe.model.from_ is not None:
        start = [
            f"    bridge = AutoBridge.from_hf_pretrained({f'{task.place.engine}/base'!r})",
            "    model = bridge.to_megatron_provider(load_weights=True)",
        ]
    else:
        sizes = ("num_layers", "hidden_size", "num_attention_heads")
        given = ", ".join(f"{key}={values.pop(key)!r}" for key in sizes)
        start = [
            f"    model = GPTModelProvider({given})",
            f"    model.activation_func = {_ACTIVATIONS[task.config.activation]}",
        ]
    fields = [f"    model.{key} = {value!r}" for key, value in values.items()]
    return ["def provider():", *start, *fields, "    return model"]


def _config_function(
    task: EngineTask, sections: dict[str, dict[str, Any]], used: dict[str, str], extra: dict[str, Any]
) -> list[str]:
    lines = ["def configuration():"]
    if not task.recipe.data.synthetic:
        lines += [
            f"    splits = json.loads(Path({f'{task.place.engine}/data.json'!r}).read_text())",
            '    blends = [get_blend_from_list(splits.get(name) or None) for name in ("train", "valid", "test")]',
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
    precision = PRECISION[task.recipe.train.precision]
    lines += [f"        mixed_precision=get_mixed_precision_config({precision!r}),", "    )"]
    lines += [f"    config.{key} = {value!r}" for key, value in extra.items()]
    return [*lines, "    return config"]


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    prefix = f"{name}."
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _notes(task: EngineTask) -> list[str]:
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
