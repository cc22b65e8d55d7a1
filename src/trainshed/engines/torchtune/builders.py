"""The models that torchtune builds, by the catalog's names, with the tokenizer and checkpoint type of each builder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from trainshed.catalog import model_preset
from trainshed.engines.importing import ConfigImport
from trainshed.engines.key_table import OMIT
from trainshed.engines.launch import EngineTask
from trainshed.errors import InputError
from trainshed.recipe import ModelConfig, Recipe

TokenizerFiles = Literal["tiktoken", "sentencepiece", "vocabulary"]


@dataclass(frozen=True)
class TorchtuneFamily:
    """What models of one module of torchtune share."""

    tokenizer: str
    files: TokenizerFiles
    model_type: str
    """The checkpointer's name of the way weights are called."""
    tp_plan: str | None = None


_LLAMA_PLAN = "torchtune.models.llama3.base_llama_tp_plan"
_LLAMA3 = TorchtuneFamily("torchtune.models.llama3.llama3_tokenizer", "tiktoken", "LLAMA3", _LLAMA_PLAN)
_FAMILIES = {
    "llama2": TorchtuneFamily("torchtune.models.llama2.llama2_tokenizer", "sentencepiece", "LLAMA2", _LLAMA_PLAN),
    "llama3": _LLAMA3,
    "llama3_1": _LLAMA3,
    "llama3_2": TorchtuneFamily("torchtune.models.llama3.llama3_tokenizer", "tiktoken", "LLAMA3_2", _LLAMA_PLAN),
    "llama3_3": _LLAMA3,
    "mistral": TorchtuneFamily("torchtune.models.mistral.mistral_tokenizer", "sentencepiece", "MISTRAL"),
    "qwen2_5": TorchtuneFamily("torchtune.models.qwen2_5.qwen2_5_tokenizer", "vocabulary", "QWEN2"),
    "qwen3": TorchtuneFamily("torchtune.models.qwen3.qwen3_tokenizer", "vocabulary", "QWEN3"),
}
# Qwen's builders differ between base and instruct models where both are named.
_BUILDERS: dict[str, tuple[str, ...]] = {
    "llama2-7b": ("llama2_7b",),
    "llama2-13b": ("llama2_13b",),
    "llama2-70b": ("llama2_70b",),
    "llama3-8b": ("llama3_8b",),
    "llama3-70b": ("llama3_70b",),
    "llama3.1-8b": ("llama3_1_8b",),
    "llama3.1-70b": ("llama3_1_70b",),
    "llama3.1-405b": ("llama3_1_405b",),
    "llama3.2-1b": ("llama3_2_1b",),
    "llama3.2-3b": ("llama3_2_3b",),
    "llama3.3-70b": ("llama3_3_70b",),
    "mistral-7b-v0.1": ("mistral_7b",),
    "qwen2.5-0.5b": ("qwen2_5_0_5b",),
    "qwen2.5-1.5b": ("qwen2_5_1_5b_base", "qwen2_5_1_5b_instruct"),
    "qwen2.5-3b": ("qwen2_5_3b",),
    "qwen2.5-7b": ("qwen2_5_7b_base", "qwen2_5_7b_instruct"),
    "qwen2.5-14b": ("qwen2_5_14b_base", "qwen2_5_14b_instruct"),
    "qwen2.5-32b": ("qwen2_5_32b_base", "qwen2_5_32b_instruct"),
    "qwen2.5-72b": ("qwen2_5_72b_base", "qwen2_5_72b_instruct"),
    "qwen3-0.6b": ("qwen3_0_6b_base", "qwen3_0_6b_instruct"),
    "qwen3-1.7b": ("qwen3_1_7b_base", "qwen3_1_7b_instruct"),
    "qwen3-4b": ("qwen3_4b_base", "qwen3_4b_instruct"),
    "qwen3-8b": ("qwen3_8b_base", "qwen3_8b_instruct"),
    "qwen3-14b": ("qwen3_14b_base", "qwen3_14b_instruct"),
    "qwen3-32b": ("qwen3_32b",),
}
_COMPARED_KEYS = (
    *("family", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab_size", "rope"),
    *("attention_pattern", "query_scalar", "attention_soft_cap", "logit_soft_cap"),
    *("qkv_bias", "output_bias", "mlp_bias"),
)


@dataclass(frozen=True)
class TorchtuneBuilder:
    """One builder, with what its module shares."""

    preset: str
    module: str
    name: str

    @property
    def family(self) -> TorchtuneFamily:
        """What the models of its module share."""
        return _FAMILIES[self.module]

    def component(self, *, lora: bool) -> str:
        """Return the name that a configuration calls it by."""
        return f"torchtune.models.{self.module}.{'lora_' if lora else ''}{self.name}"


def builder_of(recipe: Recipe, config: ModelConfig) -> TorchtuneBuilder | None:
    """Return the builder of a recipe's model, None where torchtune has none."""
    names = [name for name in _BUILDERS if _same_architecture(model_preset(name), config)]
    if recipe.model.preset in names:
        preset = recipe.model.preset
    else:
        # Llama 3.1 and 3.3 are built alike: the address says which is meant, and either builds the same model.
        address = (recipe.model.from_ or "").lower()
        named = [name for name in names if name.partition("-")[0].removeprefix("llama") in address]
        preset = next(iter([*named, *names]), None)
    return None if preset is None else _builder_of_preset(preset, recipe.model.from_ or "")


def builder_named(component: str) -> TorchtuneBuilder | None:
    """Return the builder that a configuration names: `torchtune.models.llama3_3.lora_llama3_3_70b`."""
    name = component.rpartition(".")[2].removeprefix("q").removeprefix("lora_")
    for given in (component.rpartition(".")[2], name, name.removeprefix("lora_")):
        for preset, names in _BUILDERS.items():
            if given in names:
                return TorchtuneBuilder(preset, _module_of_preset(preset), given)
    return None


def known_presets() -> tuple[str, ...]:
    """Return the catalog's names of the models that torchtune builds."""
    return tuple(_BUILDERS)


def _builder_of_preset(preset: str, address: str) -> TorchtuneBuilder:
    names = _BUILDERS[preset]
    if len(names) == 1:
        return TorchtuneBuilder(preset, _module_of_preset(preset), names[0])
    lower = address.lower()
    # Qwen2.5-7B is a base model and Qwen3-8B an instruct one; each says so where it is the other.
    instruct = "instruct" in lower if preset.startswith("qwen2.5") else "base" not in lower
    return TorchtuneBuilder(preset, _module_of_preset(preset), names[1] if instruct else names[0])


def _module_of_preset(preset: str) -> str:
    return preset.partition("-")[0].replace(".", "_")


def _same_architecture(ours: ModelConfig, theirs: ModelConfig) -> bool:
    return all(getattr(ours, key) == getattr(theirs, key) for key in _COMPARED_KEYS)


def task_builder(task: EngineTask) -> TorchtuneBuilder:
    """Return the builder of a task's model, which `task_problems` has found."""
    builder = builder_of(task.recipe, task.config)
    assert builder is not None, "a model without a builder is refused before it is rendered"
    return builder


def config_builder(config: ConfigImport) -> TorchtuneBuilder:
    """Return the builder that a configuration names."""
    component = config.get("model._component_", "")
    builder = builder_named(component)
    if builder is None:
        raise InputError(
            f"the model is {component or 'not named'}, and the catalog has no model that torchtune builds so",
            where=f"{config.name} (model._component_)",
            hint="Trainshed reads files of Llama, Mistral and Qwen text models",
        )
    return builder


_HUB_OWNERS = {"llama": "meta-llama", "meta-llama": "meta-llama", "qwen": "Qwen", "mistral": "mistralai"}
_NO_ADDRESS = "hf://org/name"


def read_base(config: ConfigImport) -> str:
    """Return the address of the base weights, whose folder is named after the repository of the Hub."""
    folder = config.get("checkpointer.checkpoint_dir", "")
    base = PurePosixPath(folder).name
    owner = next((owner for start, owner in _HUB_OWNERS.items() if base.lower().startswith(start)), None)
    address = f"hf://{owner}/{base}" if owner else folder or _NO_ADDRESS
    if address == _NO_ADDRESS:
        config.ask("the file names no weights: write model.from and tokenizer")
    elif owner:
        config.ask(f"no revision is named: pin the weights, model.from: {address}@<commit>, and the tokenizer")
    return address


_TOKENIZER_FILES = {
    "tiktoken": "original/tokenizer.model",
    "sentencepiece": "tokenizer.model",
    "vocabulary": "vocab.json",
}


def render_tokenizer_files(task: EngineTask) -> dict[str, Any]:
    """Return the files of the tokenizer in the run's folder."""
    files, folder = task_builder(task).family.files, f"{task.site.input_folder}/tokenizer"
    return {
        "tokenizer.path": f"{folder}/{_TOKENIZER_FILES[files]}",
        "tokenizer.merges_file": f"{folder}/merges.txt" if files == "vocabulary" else OMIT,
    }
