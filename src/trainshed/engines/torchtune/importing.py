"""A torchtune file (`70B_full.yaml`, `70B_lora.yaml`) read as a recipe."""

from __future__ import annotations

from pathlib import PurePosixPath

from trainshed.engines.importing import ConfigImport, ImportedConfig, recipe_name
from trainshed.engines.keys import flatten
from trainshed.engines.torchtune.builders import config_builder
from trainshed.engines.torchtune.keys import TORCHTUNE_KEYS, TORCHTUNE_TABLE, has_adapters
from trainshed.recipe.yaml_io import YamlDocument, parse_yaml


def read_torchtune(text: str, name: str, *, gpus: int | None = None) -> ImportedConfig:
    """Read torchtune's YAML; errors call the file `name`, and `gpus` is how many the run had, which no file says."""
    document = parse_yaml(text, name)
    config = ConfigImport.from_yaml(document, "torchtune", name)
    config.gpus = gpus
    config.set_recipe("name", _run_name(config))
    TORCHTUNE_TABLE.read(config)
    config.set_recipe("engine.name", "torchtune")
    _drop_references(config, document)
    config.keep_rest(TORCHTUNE_KEYS)
    _note_mistakes(config)
    return config.imported()


def _run_name(config: ConfigImport) -> str:
    base = PurePosixPath(config.get("checkpointer.checkpoint_dir", "")).name or config_builder(config).preset
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
    if config.get("tensor_parallel_dim", 1) > 1 and config.get("optimizer.fused"):
        config.add_mistake("optimizer.fused", "the fused AdamW does not work with tensor parallel", "fused: False")
