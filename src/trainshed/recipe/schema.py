"""The recipe as a whole, its smaller sections, and what the sections ask of each other.

`model`, `data`, `train`, `layout`, `budgets`, `export`, `eval` and `serve` have modules of their own. The others are
here: `engine`, `checkpoint`, `observe`, `resources` and `elastic`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from trainshed.plugins import PluginSource, load_plugins, registered_names
from trainshed.recipe.budgets import Budgets
from trainshed.recipe.data import CHAT_KEYS, SAMPLE_COLUMNS, DataSection, SampleFormat, SourceKeys, expand_data
from trainshed.recipe.evaluation import Evaluation, evaluation_problems
from trainshed.recipe.exporters import (
    MlflowExperiment,
    PrometheusServer,
    TrackioProject,
    WandbProject,
    expand_prometheus,
)
from trainshed.recipe.layout import LayoutSection
from trainshed.recipe.model import ModelConfig, ModelSection, TokenizerSection, TrainedTokenizer
from trainshed.recipe.notify import Notifications
from trainshed.recipe.overrides import Override
from trainshed.recipe.profile import Profile
from trainshed.recipe.registered import (
    EngineArgument,
    ModuleNames,
    RegisteredName,
    is_registered,
    name_problems,
    option_problems,
)
from trainshed.recipe.section import (
    NotNegativeInt,
    PositiveInt,
    Problem,
    Section,
    StoreAddress,
    Text,
)
from trainshed.recipe.serving import Export, Serve
from trainshed.recipe.train import TrainSection, lora_problems
from trainshed.recipe.unread import unread_problems
from trainshed.recipe.written_file import WrittenFile
from trainshed.recipe.yaml_io import KeyPath


class Engine(Section):
    """What steps the model."""

    name: Literal["torch", "megatron", "nemo", "torchtune"] = Field("torch", description="The engine")
    image: Text | None = Field(None, description="Container image, by digest", examples=["nvcr.io/…@sha256:…"])
    version: Text | None = Field(
        None,
        description="A foreign engine's version, whose arguments are written; left out: that of an image known here "
        "or a stated default (Megatron-LM 0.16.1, torchtune 0.6.1)",
        examples=["0.16.1"],
    )
    program: Text | None = Field(
        None,
        description="Path of a foreign engine's program in its image; left out: where images of that name have it",
        examples=["/opt/megatron-lm/pretrain_gpt.py"],
    )
    args: dict[str, EngineArgument] = Field(
        default_factory=dict,
        description="Arguments handed to a foreign engine as they are (checked against its list)",
    )

    def problems(self) -> Iterator[Problem]:
        """Our own engine takes no arguments and has no version but that of Trainshed."""
        if self.name == "torch" and self.args:
            yield Problem(
                ("args",), "the torch engine takes no `args`: its options are keys of the recipe", "delete it"
            )
        if self.name == "torch" and self.version is not None:
            yield Problem(("version",), "the torch engine has no version of its own", "delete it")
        if self.program is not None and self.name != "megatron":
            yield Problem(("program",), f"{self.name} is started by its own name", "delete it")


class BestCheckpoint(Section):
    """Which checkpoint is kept as the best."""

    by: Literal["validation"] = Field("validation", description="The loss of `data.validation`, the lowest is best")


class Checkpoint(Section):
    """When the state is saved, how many are kept, what a start does with those that are there."""

    save: bool = Field(
        True,
        description="false, or `checkpoint: off`: no checkpoint at all, not even at the end, for a benchmark",
    )
    every: PositiveInt | None = Field(500, description="Steps between two checkpoints; null: only at the end")
    keep: PositiveInt | None = Field(3, description="Number of checkpoints kept; null: all")
    best: BestCheckpoint | None = Field(
        None, description="Keep the best checkpoint beside the newest ones, and export it; left out: the last is"
    )
    to: StoreAddress | None = Field(
        None,
        description="Where checkpoints are kept, under the run's name and id; left out: in the run's folder",
        examples=["s3://bucket/checkpoints"],
    )
    async_: bool = Field(
        True, alias="async", description="Go on training while a checkpoint is written (torchtune: never)"
    )
    resume: Literal["auto", "must", "fresh"] = Field(
        "auto",
        description="auto: go on where there is a checkpoint; must: fail without one; fresh: fail with one",
    )

    @property
    def kept(self) -> int | None:
        """How many checkpoints a run keeps at most: the newest ones and the best; None: all."""
        return None if self.keep is None else self.keep + (self.best is not None)

    def problems(self) -> Iterator[Problem]:
        """What is about checkpoints that are never written."""
        for key in ("best", "to"):
            if not self.save and getattr(self, key) is not None:
                yield Problem((key,), "no checkpoint is written (`save: false`)", "delete one of the two")
        if not self.save and self.resume == "must":
            yield Problem(("resume",), "no checkpoint is written (`save: false`)", "delete one of the two")


OWN_EXPORTERS = ("tensorboard", "dllogger", "prometheus", "wandb", "mlflow", "trackio")
"""Exporters that have a key of their own."""
ExporterNames = list[RegisteredName] | dict[RegisteredName, dict[str, EngineArgument]]


def expand_exporters(value: Any) -> Any:
    """Let a list of names stand for names without options."""
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return {name: {} for name in value}
    return value


class Observe(Section):
    """What is written besides the run's events."""

    tensorboard: bool | None = Field(
        None, description="TensorBoard files in the run's folder; left out: where the engine writes them"
    )
    dllogger: bool | None = Field(
        None, description="DLLogger JSON in the run's folder; left out: where the engine writes it"
    )
    prometheus: Annotated[
        PrometheusServer | None,
        BeforeValidator(expand_prometheus, json_schema_input_type=bool | PrometheusServer | None),
    ] = Field(
        None,
        description="Serve the figures of rank 0 to Prometheus: `true`, or port and host",
        examples=["{port: 9400, host: 0.0.0.0}"],
    )
    wandb: WandbProject | None = Field(None, description="Send the figures to Weights & Biases")
    mlflow: MlflowExperiment | None = Field(None, description="Send the figures to MLflow")
    trackio: TrackioProject | None = Field(None, description="Send the figures to trackio")
    profile: Profile | None = Field(None, description="Profile some steps")
    exporters: (
        Annotated[
            dict[RegisteredName, dict[str, EngineArgument]],
            BeforeValidator(expand_exporters, json_schema_input_type=ExporterNames),
        ]
        | None
    ) = Field(
        None,
        description="Exporters that plugins register, by name, with their options; a list of names where none has any",
        examples=[["csv"]],
    )

    def problems(self) -> Iterator[Problem]:
        """Exporters are registered, and take the options that are written."""
        for name, options in (self.exporters or {}).items():
            path = ("exporters", name)
            if name in OWN_EXPORTERS:
                yield Problem(path, f"{name} has a key of its own", f"write `{name}: …` below `observe`")
            elif not is_registered("exporter", name):
                known = ", ".join(registered_names("exporter")) or "none"
                yield Problem(
                    path, f"no plugin has registered an exporter `{name}`", f"registered: {known}; see docs/plugins.md"
                )
            else:
                yield from option_problems("exporter", name, options, path, positional=1)


class Resources(Section):
    """What the run asks of the cluster."""

    nodes: PositiveInt | None = Field(
        None, description="Number of nodes; `--nodes` wins over it, it wins over the cluster's default"
    )


class Elastic(Section):
    """What becomes of a run that loses nodes."""

    min_nodes: PositiveInt = Field(description="Fewer nodes than this do not train: the run waits")
    spares: NotNegativeInt = Field(0, description="Nodes held in the allocation to stand in for bad ones")


def expand_checkpoint(value: Any) -> Any:
    """Let `checkpoint: off` stand for `checkpoint: {save: false}`."""
    return {"save": False} if value == "off" else value


def expand_engine(value: Any) -> Any:
    """Let `engine: torch` stand for `engine: {name: torch}`."""
    return {"name": value} if isinstance(value, str) else value


FORMAT_VERSION = 1
RESERVED_KEYS = ("engine_options",)
"""Top-level keys that later versions will read; writing one today is an error, not a silence."""

CHECKPOINT_DEFAULTS: dict[Any, dict[str, Any]] = {"torchtune": {"async": False}}
"""torchtune writes checkpoints while training waits."""

# Names of objects are name + id + suffix, 63 characters at most; a service's name begins with a letter.
MAX_NAME_LENGTH = 40
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"


class Recipe(WrittenFile):
    """What to train: one file that carries a model from text to weights."""

    trainshed: Annotated[int, Field(ge=1, le=FORMAT_VERSION)] = Field(
        FORMAT_VERSION, description="Version of the recipe format"
    )
    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=MAX_NAME_LENGTH)] = Field(
        description="Name of the run: lower-case letters, digits and dashes", examples=["llama3-8b-tech"]
    )
    model: ModelSection = Field(
        description="Architecture and starting weights", examples=["{preset: tiny, init: random}"]
    )
    tokenizer: TokenizerSection | None = Field(
        None,
        description="Address of the tokenizer, or `{train: {vocab_size: 8192}}` to learn one",
        examples=["hf://meta-llama/Llama-3.1-8B"],
    )
    data: Annotated[
        DataSection, BeforeValidator(expand_data, json_schema_input_type=DataSection | Literal["synthetic"])
    ] = Field(description="What is read", examples=["{sequence_length: 8192, train: [{path: corpus/*.jsonl}]}"])
    train: TrainSection = Field(
        description="The training", examples=["{steps: 1000, global_batch: 64, optimizer: {lr: 3.0e-4}}"]
    )
    layout: LayoutSection = Field("auto", description="`auto`: the planner chooses; or written out")
    engine: Annotated[
        Engine,
        BeforeValidator(
            expand_engine, json_schema_input_type=Engine | Literal["torch", "megatron", "nemo", "torchtune"]
        ),
    ] = Field(default_factory=Engine, description="What steps the model: a name, or name, image and args")
    checkpoint: Annotated[
        Checkpoint, BeforeValidator(expand_checkpoint, json_schema_input_type=Checkpoint | Literal["off"])
    ] = Field(default_factory=Checkpoint, description="Saving and resuming; off: no checkpoints")
    observe: Observe = Field(default_factory=Observe, description="What is written besides the run's events")
    budgets: Budgets | None = Field(
        None, description="How long each phase may last before a rank counts as stuck; left out: the defaults"
    )
    notify: Notifications | None = Field(
        None,
        description="Who is told what happens to the run, besides those of the cluster file",
        examples=[[{"webhook": {"secret": "SLACK_WEBHOOK"}}]],
    )
    resources: Resources = Field(default_factory=Resources, description="What the run asks of the cluster")
    elastic: Elastic | None = Field(
        None, description="Spare nodes, and with how few to go on; left out: all or nothing"
    )
    export: Export | None = Field(None, description="Weights to write when training has ended; left out: none")
    eval: Evaluation | None = Field(None, description="What checkpoints are measured by; left out: by nothing")
    serve: Serve | None = Field(None, description="How the exported weights are served; left out: they are not")
    store: StoreAddress | None = Field(
        None, description="Where artefacts and runs are kept; left out: the cluster's store"
    )
    seed: NotNegativeInt = Field(1234, description="Seed of fresh weights and dropout (`data.seed` orders the data)")
    plugins: ModuleNames | None = Field(
        None,
        description="Modules of your own that register classes: beside the recipe file, or installed (docs/plugins.md)",
        examples=[["my_plugin"]],
    )

    @classmethod
    def load(cls, path: str | os.PathLike[str], *overrides: str) -> Recipe:
        """Load a recipe from a file, or a shipped one by name; overrides are `train.steps=100`, as in the shell."""
        from trainshed.recipe.load import load_recipe

        return load_recipe(path, overrides)

    def _parse_again(self, text: str, overrides: Iterable[str | Override]) -> Recipe:
        from trainshed.recipe.load import parse_recipe

        return parse_recipe(text, overrides, source=self._places.source, folder=self.folder)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        """Give keys that are left out the value which the engine has in any case."""
        if not isinstance(given, dict):
            return given
        engine, saving = given.get("engine"), given.get("checkpoint", {})
        name = engine.get("name") if isinstance(engine, dict) else engine
        if not isinstance(name, str) or name not in CHECKPOINT_DEFAULTS or not isinstance(saving, dict):
            return given
        return given | {"checkpoint": CHECKPOINT_DEFAULTS[name] | saving}

    @property
    def plugin_sources(self) -> tuple[PluginSource, ...]:
        """Return the files of the plugins, with their hashes."""
        if self.plugins and not self._places.plugins:  # a recipe that was made in Python, not read
            self._places.plugins = load_plugins(self.plugins, self.folder)
        return self._places.plugins if self.plugins else ()

    def problems(self) -> Iterator[Problem]:
        """What only the whole recipe can tell."""
        yield from self._weights_problems()
        yield from self._tokenizer_problems()
        yield from name_problems(self.registered_names(), self.plugins or ())
        if self.train.precision == "fp16" and self.engine.name == "torch":
            yield Problem(
                ("train", "precision"),
                "the torch engine has no loss scale, and fp16 needs one",
                "write `precision: bf16`, or `engine: megatron`",
            )
        yield from self._answer_problems()
        yield from self._phase_problems()
        yield from self._saving_problems()
        if self.data.synthetic and self.train.epochs is not None:
            yield Problem(("train", "epochs"), "synthetic data has no end to pass", "write `steps` or `tokens`")
        steps = self._known_steps()
        if steps is not None:
            yield from self.warmup_problems(steps)
        if self.observe.profile is not None and self.train.steps is not None:
            for problem in self.observe.profile.length_problems(self.train.steps):
                yield Problem(("observe", "profile", *problem.path), problem.what, problem.hint)
        if self.export is not None:
            yield from self._export_problems(self.export)
        if self.eval is not None:
            yield from evaluation_problems(self)
        if self.serve is not None:
            yield from self._serving_problems()
        yield from unread_problems(self)
        if self.model.config is not None:
            yield from fit_problems(self, self.model.config)

    @property
    def sample_format(self) -> SampleFormat:
        """What a line of the data holds: as `data.format` says, or what the mode reads if it says nothing."""
        usual: dict[str, SampleFormat] = {"pretrain": "text", "finetune": "chat", "dpo": "preference"}
        return self.data.format or usual[self.train.mode]

    def trained_architecture(self, config: ModelConfig) -> ModelConfig:
        """Return what is trained of an architecture: with the layers of `train.mtp`."""
        return config.with_mtp_layers(0 if self.train.mtp is None else self.train.mtp.layers)

    @property
    def document_mask(self) -> bool:
        """Whether attention, positions and loss keep the documents of a sample apart."""
        if self.data.document_mask is not None:
            return self.data.document_mask
        return self.sample_format != "text"

    def _answer_problems(self) -> Iterator[Problem]:
        """Modes, what lines hold, and the keys that only some of them read."""
        data, train, form = self.data, self.train, self.sample_format
        if data.synthetic and train.mode != "pretrain":
            yield Problem(("data",), "synthetic data has no answers to fine-tune on", "write `train.mode: pretrain`")
        if train.mode == "pretrain" and form != "text":
            yield Problem(("data", "format"), f"pretraining reads text, not {form}", "write `train.mode: finetune`")
        if (train.mode == "dpo") != (form == "preference"):
            hint = "write `data.format: preference`" if train.mode == "dpo" else "write `train.mode: dpo`"
            yield Problem(("data", "format"), f"`mode: {train.mode}` does not learn from {form} data", hint)
        if form == "text":
            for key in CHAT_KEYS:
                if getattr(data, key) != DataSection.model_fields[key].default:
                    yield Problem(("data", key), "is read with conversations only", "delete it, or `data.format: chat`")
        else:
            for key, written in (("bos", data.bos), ("eod", data.eod is not True)):
                if written:
                    what = f"is not read with {form} data: the chat template writes what begins and ends a conversation"
                    yield Problem(("data", key), what, "delete it")
        if form != "text" and data.document_mask is False:
            yield Problem(("data", "document_mask"), f"{form} samples are always kept apart", "delete it")
        for path, source in self.sources():
            for column in source.columns or {}:
                if column not in SAMPLE_COLUMNS[form]:
                    known = ", ".join(SAMPLE_COLUMNS[form])
                    yield Problem(
                        (*path, "columns", column),
                        f"{form} data has no column `{column}`",
                        f"it has {known}" if known else "write `key` for the column that holds the text",
                    )
        if train.dpo is not None and train.mode != "dpo":
            yield Problem(("train", "dpo"), "is read with `mode: dpo` only", "delete it")
        for path, asked in (
            (("train", "early_stop"), train.early_stop),
            (("checkpoint", "best"), self.checkpoint.best),
        ):
            if asked is not None and not data.validations:
                yield Problem(path, "needs a validation loss, and none is measured", "write `data.validation`")

    def sources(self) -> Iterator[tuple[KeyPath, SourceKeys]]:
        """Every source of documents with its key: those of training, of validation, and of phases."""
        yield from ((("data", "train", number), source) for number, source in enumerate(self.data.train))
        for name, source in self.data.validations.items():
            yield ("data", "validation", name) if self.data.named_validations else ("data", "validation"), source
        for number, phase in enumerate(self.train.phases or ()):
            for index, source in enumerate(phase.data.train if phase.data is not None else ()):
                yield ("train", "phases", number, "data", "train", index), source

    @property
    def publishes(self) -> bool:
        """Whether the export goes to a repository of the Hub."""
        return self.export is not None and self.export.to is not None and self.export.to.startswith("hf://")

    @property
    def saves_by_steps(self) -> bool:
        """Whether it saves at `checkpoint.every`.

        torchtune 0.6.1 saves after every pass over the data, and so does every torchtune that trains adapters.
        """
        if self.engine.name != "torchtune":
            return self.checkpoint.save
        return self.train.lora is None and self.engine.version not in (None, "0.6.1")

    def _saving_problems(self) -> Iterator[Problem]:
        if self.checkpoint.save:
            return
        if self.export is not None:
            yield Problem(("export",), "no checkpoint is written (`checkpoint: off`)", "delete one of the two")
        if self.train.phases is not None:
            yield Problem(
                ("train", "phases"),
                "a phase goes on from a checkpoint, and none is written",
                "delete `checkpoint: off`",
            )
        if self.elastic is not None:
            yield Problem(
                ("elastic",), "a run goes on with other nodes from a checkpoint, and none is written", "delete it"
            )

    def _phase_problems(self) -> Iterator[Problem]:
        """What phases ask of the data and of the run."""
        if self.train.phases is not None and self.engine.name != "torch":
            what = f"{self.engine.name} does not train in phases"
            yield Problem(("train", "phases"), what, "delete it, or write engine: torch")
        if self.train.phases is not None and self.elastic is not None:
            yield Problem(("elastic",), "a run in phases does not go on with fewer nodes", "delete it, or the phases")
        for number, phase in enumerate(self.train.phases or ()):
            path: KeyPath = ("train", "phases", number)
            if phase.sequence_length is None and self.data.sequence_length is None:
                yield Problem((*path, "sequence_length"), "is missing", "write it here, or `data.sequence_length`")
            if phase.data is not None and self.data.synthetic:
                for key in ("train", "skip"):
                    if getattr(phase.data, key):
                        yield Problem((*path, "data", key), "is not read with synthetic data", "delete it")

    def registered_names(self) -> Iterator[tuple[KeyPath, str, str | None]]:
        """Every key that may name a class of a plugin, with the kind of class and the name."""
        yield ("train", "optimizer", "name"), "optimizer", self.train.optimizer.name
        yield ("train", "loss"), "loss", self.train.loss.name if self.train.loss is not None else None
        yield from (((*path, "format"), "text format", source.format) for path, source in self.sources())
        if self.model.config is not None:
            yield ("model", "config", "family"), "model family", self.model.config.family
        yield from ((("observe", "exporters", name), "exporter", name) for name in self.observe.exporters or {})
        if self.serve is not None:
            yield ("serve", "engine"), "serving engine", self.serve.engine

    def _known_steps(self) -> int | None:
        """The length of the run in steps, where it can be known without its data."""
        train, length = self.train, self.data.sequence_length
        if train.phases is not None:
            return None
        if train.tokens is None or train.batch_ramp is not None or length is None:
            return train.steps
        return -(-train.tokens // (length * train.global_batch))

    def warmup_problems(self, steps: int) -> Iterator[Problem]:
        """Yield that a run of `steps` steps ends before its warm-up. Other engines have schedules of their own."""
        problem = self.train.warmup_problem(steps) if self.engine.name == "torch" else None
        if problem is not None:
            yield Problem(("train", *problem.path), problem.what, problem.hint)

    def _weights_problems(self) -> Iterator[Problem]:
        if self.model.from_:
            return
        if self.train.mode != "pretrain":
            yield Problem(("model", "from"), "is missing: there is nothing to fine-tune", "from: hf://org/name")
        # On synthetic data nothing is learned anyway: fresh weights do for a check or a measurement.
        if self.train.lora is not None and not self.data.synthetic:
            yield Problem(("model", "from"), "is missing: adapters need weights to sit on", "from: hf://org/name")

    def _export_problems(self, export: Export) -> Iterator[Problem]:
        """What becomes of adapters: a folder of PEFT's, or merged weights in any format; and averages that exist."""
        if export.format == "gguf" and self.tokenizer is None:
            like = self.model.from_ or "hf://org/name"
            yield Problem(("tokenizer",), "is missing: a GGUF file carries its tokenizer", f"tokenizer: {like}")
        if export.weights == "ema" and self.train.ema is None:
            yield Problem(("export", "weights"), "the run averages no weights", "write `train.ema`, or delete it")
        if self.train.lora is None:
            if export.merge is not None:
                yield Problem(("export", "merge"), "there is nothing to merge: no adapters are trained", "delete it")
        elif export.format != "hf" and not export.merge:
            yield Problem(
                ("export", "format"),
                f"adapters are exported for PEFT, and there is no such format of {export.format}",
                "write `merge: true` beside it, or `format: hf`",
            )
        elif export.dtype == "fp8" and not export.merge:
            yield Problem(("export", "dtype"), "adapters are not quantised", "write `merge: true` beside it, or bf16")

    def _serving_problems(self) -> Iterator[Problem]:
        assert self.serve is not None
        if self.name in (self.serve.adapters or {}):
            yield Problem(
                ("serve", "adapters", self.name), "the served weights themselves have this name", "choose another"
            )
        if self.serve.engine != "torch" and self.train.lora is not None and not (self.export and self.export.merge):
            yield Problem(
                ("export",),
                f"{self.serve.engine} is given whole weights, and a run with `train.lora` exports its adapters",
                "write `export: {merge: true}`, or `serve: {engine: torch}`",
            )
        if self.export is None or self.export.format != "hf":
            reason = "the recipe exports no weights" if self.export is None else f"{self.export.format} is not served"
            yield Problem(("serve",), f"there is nothing to serve: {reason}", "write `export: {format: hf}`")
        if self.tokenizer is None:
            like = self.model.from_ or "hf://org/name"
            yield Problem(("tokenizer",), "is missing: a server must know the model's words", f"tokenizer: {like}")

    def _tokenizer_problems(self) -> Iterator[Problem]:
        reads_text = any(source.kind in ("path", "script") for _, source in self.sources())
        reads_text |= self.data.prompted is not None
        trained = isinstance(self.tokenizer, TrainedTokenizer)
        if self.tokenizer is None and (reads_text or self.train.mode != "pretrain"):
            like = self.model.from_ or "hf://org/name"
            yield Problem(
                ("tokenizer",),
                "is missing: text must become tokens",
                f"tokenizer: {like}, or {{train: {{vocab_size: 8192}}}}",
            )
        if trained and self.model.from_:
            yield Problem(
                ("tokenizer",),
                "a new tokenizer does not fit weights that know another",
                f"tokenizer: {self.model.from_}",
            )
        if self.model.added_tokens and (self.tokenizer is None or self.data.synthetic):
            reason = "synthetic data has no text" if self.data.synthetic else "there is no tokenizer to add them to"
            like = "delete the line" if self.data.synthetic else f"write `tokenizer: {self.model.from_}`"
            yield Problem(("model", "added_tokens"), reason, like)
        if trained and not any(source.kind in ("path", "script") for source in self.data.train):
            yield Problem(("tokenizer",), "there is no text to learn a tokenizer from", "write the address of one")


def fit_problems(recipe: Recipe, config: ModelConfig) -> Iterator[Problem]:
    """Yield where an architecture is too small for the recipe; the catalog asks this for presets."""
    lengths: list[tuple[KeyPath, int | None]] = [(("data", "sequence_length"), recipe.data.sequence_length)]
    for number, phase in enumerate(recipe.train.phases or ()):
        lengths.append((("train", "phases", number, "sequence_length"), phase.sequence_length))
        if phase.rope_base is not None and config.rope is None:
            yield Problem(("train", "phases", number, "rope_base"), "the model has no rotary positions", "delete it")
    for path, length in lengths:
        if length is None or length <= config.max_positions:
            continue
        hint = f"write {config.max_positions} or less"
        if config.positions == "rope":
            written = recipe.model.config is not None
            how = "raise `model.config.max_positions`" if written else "write `model.config` with more `max_positions`"
            hint += f"; to go beyond it on purpose, {how}"
        does = "learns" if config.positions == "learned" else "is made for"
        yield Problem(
            path,
            f"{length} is more than the {config.max_positions} positions the model {does}",
            hint,
        )
    if isinstance(recipe.tokenizer, TrainedTokenizer):
        wanted = recipe.tokenizer.train.vocab_size
        if wanted > config.vocab_size:
            yield Problem(
                ("tokenizer", "train", "vocab_size"),
                f"{wanted} is more than the {config.vocab_size} rows of the model's embedding",
                f"write {config.vocab_size} or less",
            )
    if recipe.train.lora is not None and recipe.engine.name == "torch":
        for problem in lora_problems(recipe.train.lora, config):
            yield Problem(("train", "lora", *problem.path), problem.what, problem.hint)
    if recipe.train.mtp is not None:
        for problem in recipe.train.mtp.problems_of(config):
            yield Problem(("train", "mtp", *problem.path), problem.what, problem.hint)
    if config.mtp_layers:
        yield Problem(("model", "config", "mtp_layers"), "a recipe says it by `train.mtp`", "delete the line")
    if recipe.train.moe is not None and config.moe is None:
        yield Problem(("train", "moe"), "the model has no experts", "delete it")
    elif recipe.train.moe is not None and recipe.train.moe.bias_update is not None and config.moe is not None:
        if not config.moe.score_bias:
            yield Problem(("train", "moe", "bias_update"), "the model's routers have no bias", "delete it")
        elif recipe.train.lora is not None:
            yield Problem(("train", "moe", "bias_update"), "beside adapters the routers stay as they are", "delete it")
    if config.moe is None and not isinstance(recipe.layout, str) and recipe.layout.ep > 1:
        yield Problem(("layout", "ep"), "the model has no experts to spread", "delete it")
