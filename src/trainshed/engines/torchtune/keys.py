"""A task as keys of torchtune's configuration: the model's builder, the data, and what recipe, plan or cluster decides.

A model is found among torchtune's builders by the catalog's name; tokenizer and checkpoint type go with it. The recipe
says where chat data lies, `engine.args` say what form it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from trainshed.catalog import model_preset
from trainshed.engines.keys import EngineSetting, KnownKeys
from trainshed.engines.launch import EngineTask
from trainshed.recipe import DataSection, Lora, ModelConfig, Recipe
from trainshed.recipe.data import TEXT_DEFAULTS, SourceKeys, ValidationSource
from trainshed.recipe.section import Problem
from trainshed.recipe.yaml_io import KeyPath

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
_COMPARED_KEYS = ("family", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab_size", "rope")


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


_DATASETS = "torchtune.datasets"
DATASET_COMPONENTS = {
    f"{_DATASETS}.chat_dataset": ("source", "conversation_column", "conversation_style"),
    f"{_DATASETS}.instruct_dataset": ("source",),
    f"{_DATASETS}.alpaca_dataset": ("source",),
    f"{_DATASETS}.alpaca_cleaned_dataset": ("source",),
}
"""The components that fine-tune on answers, and the keys that each must be given."""
CONVERSATION_STYLES = ("openai", "sharegpt")
HUB_DATASETS = "hf://datasets/"
_READER_OF_SUFFIX = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
DATASET_HINT = (
    "engine.args: {dataset.conversation_style: openai, dataset.conversation_column: messages} (or sharegpt, "
    "conversations), or {dataset._component_: torchtune.datasets.instruct_dataset} (input, output), or "
    "{dataset._component_: torchtune.datasets.alpaca_dataset} (instruction, input, output)"
)


def dataset_component(recipe: Recipe) -> str | None:
    """Return the component that reads the data, None where nobody said its form."""
    said = recipe.engine.args.get("dataset._component_")
    if isinstance(said, str):
        return said
    return f"{_DATASETS}.chat_dataset" if "dataset.conversation_style" in recipe.engine.args else None


def dataset_settings(recipe: Recipe) -> Iterator[EngineSetting]:
    """Yield the keys of the data to train on and, where there is any, to validate on."""
    data, form = recipe.data, dataset_component(recipe)
    yield EngineSetting("dataset._component_", form, "the form of the data")
    yield from _source_settings("dataset", data.train[0], "data.train")
    # The recipe's fine-tuning: loss on the answers only. alpaca_dataset would train on prompts if not told.
    yield EngineSetting("dataset.train_on_input", False, "train.mode")
    yield EngineSetting("dataset.split", _split_text(data, "train"), "data.split")
    if data.validation is None:
        yield EngineSetting("run_val_every_n_steps", None, "data.validation")
        return
    yield EngineSetting("run_val_every_n_steps", data.validation.every, "data.validation.every")
    yield EngineSetting("dataset_val._component_", form, "the form of the data")
    own = data.validation if data.validation.kind is not None else data.train[0]
    yield from _source_settings("dataset_val", own, "data.validation")
    yield EngineSetting("dataset_val.train_on_input", False, "train.mode")
    yield EngineSetting("dataset_val.split", _split_text(data, "validation"), "data.split")


def dataset_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield what torchtune cannot read."""
    data, form = recipe.data, dataset_component(recipe)
    if data.synthetic:
        yield Problem(("data",), "torchtune has no synthetic data", "write data.train: {path: hf://datasets/…}")
        return
    if len(data.train) > 1:
        yield Problem(("data", "train", 1), "torchtune is rendered for one source", "join them into one file")
    sources: list[tuple[SourceKeys, tuple[str | int, ...]]] = [(data.train[0], ("data", "train", 0))]
    if data.validation is not None and data.validation.kind is not None:
        sources.append((data.validation, ("data", "validation")))
    for source, path in sources:
        yield from _source_problems(source, path)
    yield from _unread_key_problems(data)
    if data.split is not None and any(100 * part % 1 > 1e-9 for part in (data.split.train, data.split.validation)):
        yield Problem(("data", "split"), "torchtune cuts data at whole percents", "{train: 0.95, validation: 0.05}")
    if form is None:
        yield Problem(("engine", "args"), "torchtune must be told what form the chat data has", DATASET_HINT)
    elif form not in DATASET_COMPONENTS:
        yield Problem(
            ("engine", "args", "dataset._component_"),
            f"{form} is not known here",
            f"one of {', '.join(DATASET_COMPONENTS)}",
        )
    else:
        missing = [key for key in DATASET_COMPONENTS[form][1:] if f"dataset.{key}" not in recipe.engine.args]
        if missing:
            yield Problem(("engine", "args"), f"{form} needs dataset.{missing[0]}", DATASET_HINT)
    style = recipe.engine.args.get("dataset.conversation_style")
    if style is not None and style not in CONVERSATION_STYLES:
        yield Problem(
            ("engine", "args", "dataset.conversation_style"),
            f"`{style}` is not a style",
            " or ".join(CONVERSATION_STYLES),
        )


def _unread_key_problems(data: DataSection) -> Iterator[Problem]:
    """Yield the keys by which text becomes tokens: torchtune does that itself, in the form that `engine.args` says."""
    usual = DataSection.model_fields
    for key in ("shards", "eod", "bos", "on_bad_line"):
        if getattr(data, key) != usual[key].default:
            yield Problem(("data", key), "torchtune tokenises by itself, and does not read it", "delete it")
    sources: list[tuple[KeyPath, SourceKeys]] = [(("data", "train", n), source) for n, source in enumerate(data.train)]
    if data.validation is not None:
        sources.append((("data", "validation"), data.validation))
    for path, source in sources:
        for key in ("key", "documents", "name"):
            if getattr(source, key) not in (None, TEXT_DEFAULTS.get(key)):
                what = "torchtune finds its data by the form that `engine.args` says, and does not read it"
                yield Problem((*path, key), what, "delete it")
    if data.validation is not None and data.validation.batches != ValidationSource.model_fields["batches"].default:
        what = "torchtune validates on all of the validation data, not on `batches` of it"
        yield Problem(("data", "validation", "batches"), what, "delete it")


def _source_problems(source: SourceKeys, path: tuple[str | int, ...]) -> Iterator[Problem]:
    hint = "write path: hf://datasets/org/name, or the path of a .jsonl file that every node sees"
    if source.path is None:
        yield Problem(path, "torchtune reads chat data itself: neither tokens nor a script", hint)
        return
    if source.format is not None:
        yield Problem((*path, "format"), "torchtune tells formats by the names of files", "delete it")
    for address in source.path:
        if "://" in address and not address.startswith(HUB_DATASETS):
            yield Problem((*path, "path"), f"torchtune cannot read {address}", hint)
        elif "://" not in address and PurePosixPath(address).suffix not in _READER_OF_SUFFIX:
            known = ", ".join(_READER_OF_SUFFIX)
            yield Problem((*path, "path"), f"torchtune cannot read {address}", f"write one of {known}")
    if len(source.path) > 1 and any(address.startswith(HUB_DATASETS) for address in source.path):
        yield Problem((*path, "path"), "torchtune reads one dataset of the Hub", "write one address")


def _source_settings(section: str, source: SourceKeys, key: str) -> Iterator[EngineSetting]:
    addresses = list(source.path or ())
    if addresses and addresses[0].startswith(HUB_DATASETS):
        name, _, revision = addresses[0].removeprefix(HUB_DATASETS).partition("@")
        revision, _, inside = revision.partition("/")
        org_name = "/".join(name.split("/")[:2])
        inside = inside or "/".join(name.split("/")[2:])
        yield EngineSetting(f"{section}.source", org_name, key)
        if revision:
            yield EngineSetting(f"{section}.revision", revision, key)
        if inside:
            yield EngineSetting(f"{section}.data_files", inside, key)
        return
    yield EngineSetting(f"{section}.source", _READER_OF_SUFFIX.get(PurePosixPath(addresses[0]).suffix), key)
    files: Any = addresses[0] if len(addresses) == 1 else addresses
    yield EngineSetting(f"{section}.data_files", files, key)


def _split_text(data: DataSection, part: str) -> str:
    if data.split is None or (data.validation is not None and data.validation.kind is not None):
        return "train"
    first = round(100 * data.split.train)
    last = first + round(100 * data.split.validation)
    if part == "train":
        return f"train[:{first}%]" if first < 100 else "train"
    return f"train[{first}%:]" if last >= 100 else f"train[{first}%:{last}%]"


TORCHTUNE_KEYS = KnownKeys("torchtune 0.7.0", Path(__file__).with_name("keys-0.7.0.yaml"))
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""torchtune adapts all three of a feed-forward block or none."""
ATTENTION_PROJECTIONS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}
"""Our names of the attention's projections to torchtune's."""
COSINE_SCHEDULER = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
_LOGGERS = "torchtune.training.metric_logging"
_PROFILER_WARMUP_STEPS = 3


def fixed_settings(*, lora: bool, tied: bool = False) -> dict[str, Any]:
    """Return what is written whatever the recipe says: the values of ml-cookbook's Slurm recipe."""
    values: dict[str, Any] = {
        "dataset.packed": False,
        "shuffle": True,
        "loss._component_": "torchtune.modules.loss.LinearCrossEntropyLoss",
        "device": "cuda",
        "enable_activation_offloading": False,
        "compile": not lora,
        "log_every_n_steps": 1,
        "log_peak_memory_stats": True,
        "log_level": "INFO",
        "profiler._component_": "torchtune.training.setup_torch_profiler",
    }
    if lora:
        return values | {"save_adapter_weights_only": True, "model.apply_lora_to_output": False}
    # Large vocabularies are sharded apart from the layers; a tied head is no layer of its own.
    sharded = ["tok_embeddings"] if tied else ["tok_embeddings", "output"]
    return values | {"custom_sharded_layers": sharded, "fsdp_cpu_offload": False, "optimizer_in_bwd": False}


def task_settings(task: EngineTask, builder: TorchtuneBuilder) -> list[EngineSetting]:
    """Return what recipe, plan and cluster decide."""
    return [
        *_model_settings(task, builder),
        *_path_settings(task, builder),
        *dataset_settings(task.recipe),
        *_training_settings(task),
        *_layout_settings(task, builder),
        *_profiler_settings(task),
    ]


def _model_settings(task: EngineTask, builder: TorchtuneBuilder) -> Iterator[EngineSetting]:
    lora = task.recipe.train.lora
    yield EngineSetting("model._component_", builder.component(lora=lora is not None), "model")
    yield EngineSetting("checkpointer.model_type", builder.family.model_type, "model")
    if lora is not None:
        yield from _lora_settings(lora)


def _lora_settings(lora: Lora) -> Iterator[EngineSetting]:
    modules = [theirs for ours, theirs in ATTENTION_PROJECTIONS.items() if ours in lora.targets]
    alpha = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha
    yield EngineSetting("model.lora_attn_modules", modules, "train.lora.targets")
    yield EngineSetting(
        "model.apply_lora_to_mlp", all(name in lora.targets for name in MLP_PROJECTIONS), "train.lora.targets"
    )
    yield EngineSetting("model.lora_rank", lora.rank, "train.lora.rank")
    yield EngineSetting("model.lora_alpha", alpha, "train.lora.alpha")
    yield EngineSetting("model.lora_dropout", lora.dropout, "train.lora.dropout")


def _path_settings(task: EngineTask, builder: TorchtuneBuilder) -> Iterator[EngineSetting]:
    run, engine, store = task.place.run, task.place.engine, "the cluster's store"
    tokenizer, length = f"{engine}/tokenizer", task.recipe.data.sequence_length
    names = {"tiktoken": "original/tokenizer.model", "sentencepiece": "tokenizer.model", "vocabulary": "vocab.json"}
    yield EngineSetting("output_dir", f"{run}/checkpoints", store)
    yield EngineSetting("tokenizer._component_", builder.family.tokenizer, "tokenizer")
    yield EngineSetting("tokenizer.path", f"{tokenizer}/{names[builder.family.files]}", "tokenizer")
    if builder.family.files == "vocabulary":
        yield EngineSetting("tokenizer.merges_file", f"{tokenizer}/merges.txt", "tokenizer")
    yield EngineSetting("tokenizer.max_seq_len", length, "data.sequence_length")
    yield EngineSetting("checkpointer._component_", "torchtune.training.FullModelHFCheckpointer", "checkpoint")
    yield EngineSetting("checkpointer.checkpoint_dir", f"{engine}/base", "model.from")
    yield EngineSetting("checkpointer.output_dir", f"{run}/checkpoints", store)
    yield EngineSetting("checkpointer.keep_last_n_checkpoints", task.recipe.checkpoint.keep, "checkpoint.keep")
    yield EngineSetting("save_every_n_steps", task.recipe.checkpoint.every, "checkpoint.every")
    # It has one logger. Its own text is what `trainshed` reads.
    tensorboard = bool(task.recipe.observe.tensorboard)
    logger = "TensorBoardLogger" if tensorboard else "DiskLogger"
    yield EngineSetting("metric_logger._component_", f"{_LOGGERS}.{logger}", "observe.tensorboard")
    yield EngineSetting("metric_logger.log_dir", f"{run}/{'tensorboard' if tensorboard else 'torchtune'}", store)


def _training_settings(task: EngineTask) -> Iterator[EngineSetting]:
    train = task.recipe.train
    optimizer, schedule = train.optimizer, train.schedule
    whole = train.epochs is not None and train.epochs.is_integer()
    yield EngineSetting("seed", task.recipe.seed, "seed")
    yield EngineSetting("epochs", int(train.epochs) if whole and train.epochs else 1, "train.epochs")
    yield EngineSetting("max_steps_per_epoch", None if whole else task.steps, "train.steps")
    yield EngineSetting("dtype", "fp32" if train.precision == "fp32" else "bf16", "train.precision")
    if train.precision == "fp8":
        yield EngineSetting("enable_fp8_training", True, "train.precision")
        yield EngineSetting("fp8_recipe_name", "tensorwise", "train.precision")
    yield EngineSetting("optimizer._component_", "torch.optim.AdamW", "train.optimizer.name")
    yield EngineSetting("optimizer.lr", optimizer.lr, "train.optimizer.lr")
    yield EngineSetting("optimizer.betas", list(optimizer.betas), "train.optimizer.betas")
    yield EngineSetting("optimizer.eps", optimizer.eps, "train.optimizer.eps")
    yield EngineSetting("optimizer.weight_decay", optimizer.weight_decay, "train.optimizer.weight_decay")
    # PyTorch's fused AdamW does not take the DTensors of tensor parallel beside plain ones.
    yield EngineSetting("optimizer.fused", task.layout.tp == 1, "layout.tp")
    yield EngineSetting("clip_grad_norm", optimizer.clip, "train.optimizer.clip")
    if schedule.name == "cosine":
        yield EngineSetting("lr_scheduler._component_", COSINE_SCHEDULER, "train.schedule.name")
        yield EngineSetting("lr_scheduler.num_warmup_steps", schedule.warmup, "train.schedule.warmup")


def _layout_settings(task: EngineTask, builder: TorchtuneBuilder) -> Iterator[EngineSetting]:
    layout, batch = task.layout, task.recipe.train.global_batch
    yield EngineSetting("batch_size", layout.micro_batch, "layout.micro_batch")
    yield EngineSetting("gradient_accumulation_steps", layout.micro_batches(batch), "train.global_batch")
    yield EngineSetting("enable_activation_checkpointing", layout.recompute == "full", "layout.recompute")
    if task.recipe.data.validation is not None:
        yield EngineSetting("batch_size_val", layout.micro_batch, "layout.micro_batch")
    if task.recipe.train.lora is not None:
        return
    yield EngineSetting("tensor_parallel_dim", layout.tp, "layout.tp")
    if layout.tp > 1:
        yield EngineSetting("tensor_parallel_plan._component_", builder.family.tp_plan, "layout.tp")
    yield EngineSetting("data_parallel_shard_dim", layout.dp, "layout.dp")
    yield EngineSetting("data_parallel_replicate_dim", 1, "layout.replicate")


def _profiler_settings(task: EngineTask) -> Iterator[EngineSetting]:
    profile = task.recipe.observe.profile
    yield EngineSetting("profiler.enabled", profile is not None, "observe.profile")
    if profile is None:
        return
    warmup = min(_PROFILER_WARMUP_STEPS, profile.steps_before)
    yield EngineSetting("profiler.output_dir", f"{task.place.run}/profiles", "the cluster's store")
    yield EngineSetting("profiler.wait_steps", profile.steps_before - warmup, "observe.profile.start")
    yield EngineSetting("profiler.warmup_steps", warmup, "observe.profile.start")
    yield EngineSetting("profiler.active_steps", profile.steps, "observe.profile.steps")
    yield EngineSetting("profiler.num_cycles", 1, "observe.profile")
