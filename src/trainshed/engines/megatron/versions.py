"""The version of Megatron-LM that a task is for, and what versions do differently beyond their lists of arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from trainshed.engines.keys import EngineSetting
from trainshed.engines.launch import EngineTask
from trainshed.engines.megatron.arguments import (
    DEFAULT_VERSION,
    KNOWN_VERSIONS,
    KnownArguments,
    known_arguments,
    versions_with,
)
from trainshed.recipe import ModelConfig, Recipe
from trainshed.recipe.section import Problem

PROGRAM = "/opt/megatron-lm/pretrain_gpt.py"
"""Where NVIDIA's images have it; the CPU stage says so at once where it is not there."""


@dataclass(frozen=True)
class KnownImage:
    """Where an image has pretrain_gpt.py, and of which version, where that is known."""

    program: str
    version: str | None = None


# By the beginning of their name. Azure's Dockerfile clones commit 878d65f to /megatron-lm; AMD's and what is built on
# it begin in the folder of Megatron-LM.
_IMAGES = {
    "ghcr.io/azure/ai-infrastructure-on-azure/megatron-lm": KnownImage("/megatron-lm/pretrain_gpt.py", "878d65f"),
    "ghcr.io/silogen/megatron-lm-ray": KnownImage("pretrain_gpt.py"),
    "rocm/megatron-lm": KnownImage("pretrain_gpt.py"),
    "docker.io/rocm/megatron-lm": KnownImage("pretrain_gpt.py"),
}


def known_image(image: str | None) -> KnownImage:
    """Return what is known of an image by its name."""
    name = re.split("[:@]", image)[0] if image is not None else ""
    return _IMAGES.get(name, KnownImage(PROGRAM))


def recipe_version(recipe: Recipe, image: str | None) -> str:
    """Return the version that a recipe is rendered for: its own, that of a known image, or the default."""
    return recipe.engine.version or known_image(recipe.engine.image or image).version or DEFAULT_VERSION


def task_version(task: EngineTask) -> str:
    """Return the version that a task is rendered for."""
    return recipe_version(task.recipe, task.site.image)


def version_note(recipe: Recipe, image: str | None) -> str | None:
    """Return whose arguments are written where the recipe does not say; None where it does."""
    if recipe.engine.version is not None:
        return None
    used = recipe.engine.image or image
    version = recipe_version(recipe, image)
    if known_image(used).version is not None:
        return f"arguments are those of Megatron-LM {version}, which {used} has (engine.version)"
    return (
        f"arguments are those of Megatron-LM {version}, as engine.version is not written: it must be what the image has"
    )


def since(version: str) -> tuple[str, ...]:
    """Return a version and all newer ones."""
    return KNOWN_VERSIONS[KNOWN_VERSIONS.index(version) :]


# Until 0.19, `gpt_builder` (before 0.16: `model_provider` of pretrain_gpt.py) does not hand it to GPTModel.
LINEAR_ROPE_VERSIONS = since("0.19.0")
"""Versions whose pretrain_gpt.py reads --rotary-seq-len-interpolation-factor."""


FLOAT32_BIAS_VERSIONS = since("0.14.0")
"""Versions whose router keeps the biases of scores in float32 while it loads (`_save_to_state_dict` of router.py)."""
ROPE_TYPE_VERSIONS = versions_with("rope_type")
"""Versions whose latent attention has plain rope, and YaRN from 4096 positions on."""


def rope_problem(config: ModelConfig, version: str) -> tuple[str, tuple[str, ...]] | None:
    """Return why pretrain_gpt.py of a version would compute other positions than a model has, and which ones would not.

    None: it computes those of the model.
    """
    scaling = config.rope.scaling if config.rope is not None else None
    if scaling is None:
        return None
    if scaling.kind == "linear" and version not in LINEAR_ROPE_VERSIONS:
        return (
            f"pretrain_gpt.py of Megatron-LM {version} does not read the factor of linear rope scaling "
            f"({scaling.factor:g}): positions would not be scaled"
        ), LINEAR_ROPE_VERSIONS
    if scaling.kind == "yarn" and version not in ROPE_TYPE_VERSIONS:
        return (
            f"Megatron-LM {version} stretches positions from --max-position-embeddings on "
            f"({config.max_positions}), and this model from {scaling.original_positions} on"
        ), ROPE_TYPE_VERSIONS
    return None


def fit_to_version(settings: list[EngineSetting], known: KnownArguments) -> Iterator[EngineSetting | Problem]:
    """Yield the settings that a version has arguments for, and what is asked for in vain."""
    for setting in settings:
        if known.has(setting.key) and known.accepts(setting.key, setting.value):
            yield setting
        elif setting.value not in (None, False):
            having = [
                version
                for version in versions_with(setting.key)
                if known_arguments(version).accepts(setting.key, setting.value)
            ]
            option = f"--{setting.key.replace('_', '-')}"
            yield Problem(
                tuple((setting.decided_by or "engine.args").split(".")),
                f"Megatron-LM {known.version} has no argument for it "
                f"({f'{option} {setting.value}' if known.has(setting.key) else option})",
                f"write engine.version: {' or '.join(having)}, with an image that has it, or delete it",
            )
