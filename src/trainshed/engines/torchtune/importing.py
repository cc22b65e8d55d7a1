"""A torchtune file (`70B_full.yaml`, `70B_lora.yaml`) read as a recipe."""

from __future__ import annotations

from pathlib import PurePosixPath

from trainshed.engines.importing import ConfigImport, ImportedConfig, recipe_name
from trainshed.engines.keys import flatten
from trainshed.engines.torchtune.builders import config_builder
from trainshed.engines.torchtune.keys import TORCHTUNE_TABLE, has_adapters
from trainshed.engines.torchtune.versions import DEFAULT_VERSION, SOURCE_VERSION, torchtune_version
from trainshed.errors import InputError
from trainshed.recipe.yaml_io import YamlDocument, parse_yaml

_OTHER_RECIPES = {
    "teacher_model._component_": "distillation",
    "kd_loss._component_": "distillation",
    "policy_model._component_": "reinforcement learning",
    "reward_and_value_model._component_": "reinforcement learning",
    "quantizer._component_": "quantisation",
    "inference._component_": "generation",
}
"""Keys that files of fine-tuning do not have, and what the recipes that read them do."""
_PAIRS = ("PreferenceDataset", "preference_dataset", "stack_exchange_paired_dataset", "hh_rlhf_helpful_dataset")
_ONLY_FROM_SOURCE = (
    "run_val_every_n_steps",
    "save_every_n_steps",
    "checkpointer.keep_last_n_checkpoints",
    "enable_fp8_training",
)
"""Keys that ask for something, where they are set, that only torchtune's last state does."""


def read_torchtune(text: str, name: str, *, gpus: int | None = None) -> ImportedConfig:
    """Read torchtune's YAML; errors call the file `name`, and `gpus` is how many the run had, which no file says."""
    document = parse_yaml(text, name)
    config = ConfigImport.from_yaml(document, "torchtune", name)
    config.gpus = gpus
    _refuse_other_recipes(config)
    config.set_recipe("name", _run_name(config))
    TORCHTUNE_TABLE.read(config)
    config.set_recipe("engine.name", "torchtune")
    version = _needed_version(config)
    if version != DEFAULT_VERSION:
        config.set_recipe("engine.version", version)
    _drop_references(config, document)
    config.keep_rest(torchtune_version(version).keys)
    _note_mistakes(config)
    return config.imported()


def _refuse_other_recipes(config: ConfigImport) -> None:
    """Refuse files of recipes that do not fine-tune on answers: read as if they did, they would train another model."""
    pairs = str(config.get("dataset._component_", "")).rpartition(".")[2]
    what = next((what for key, what in _OTHER_RECIPES.items() if key in config), None)
    if what is None and (pairs in _PAIRS or ".rlhf." in str(config.get("loss._component_", ""))):
        what = "learning from pairs of answers"
    if what is None and "optimizer._component_" not in config:
        what = "generation or evaluation: it has no optimizer"
    if what is not None:
        raise InputError(
            f"is a file of torchtune for {what}, and those of fine-tuning are read",
            where=config.name,
            hint="write the recipe by hand: `train.mode: dpo` is learning from pairs, and `trainshed generate` takes a "
            "checkpoint",
        )


def _needed_version(config: ConfigImport) -> str:
    """Return the version that does what a file asks for: the one on PyPI, unless only the last state does it."""
    needed = [key for key in _ONLY_FROM_SOURCE if config.get(key)]
    if has_adapters(config):
        needed = [key for key in needed if key != "save_every_n_steps"]  # named as a mistake
    if config.get("data_parallel_replicate_dim", 1) != 1:
        needed.append("data_parallel_replicate_dim")
    module = config_builder(config).module
    if module in torchtune_version(DEFAULT_VERSION).without_models:
        needed.append("model._component_")
    if not needed:
        return DEFAULT_VERSION
    config.ask(
        f"torchtune {DEFAULT_VERSION} does not have {', '.join(needed)}: engine.version is {SOURCE_VERSION}, its last "
        "state, which is installed from its source"
    )
    return SOURCE_VERSION


def _run_name(config: ConfigImport) -> str:
    base = PurePosixPath(str(config.get("checkpointer.checkpoint_dir", ""))).name or config_builder(config).preset
    return recipe_name(f"{base}-{'lora' if has_adapters(config) else 'full'}", "run")


def _drop_references(config: ConfigImport, document: YamlDocument) -> None:
    """Drop the keys of the top level that torchtune does not read and that others refer to."""
    texts = [value for value in flatten(document.value).values() if isinstance(value, str)]
    for key in config.unread_keys():
        if "." not in key and any(f"${{{key}}}" in text for text in texts):
            config.drop("is only referred to by others", key)


def _note_mistakes(config: ConfigImport) -> None:
    if "checkpoint_dir" in config:
        config.add_mistake(
            "checkpoint_dir",
            "a top-level checkpoint_dir is read by nobody: the weights are those of checkpointer.checkpoint_dir",
            "checkpointer.checkpoint_dir, here model.from",
        )
    if config.recipe["layout"]["tp"] > 1 and config.get("optimizer.fused"):
        config.add_mistake("optimizer.fused", "the fused AdamW does not work with tensor parallel", "fused: False")
