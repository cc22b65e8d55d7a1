"""The recipe as a whole, and what its sections ask of each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from trainshed.recipe.address import Address
from trainshed.recipe.architecture import ModelConfig
from trainshed.recipe.data import DataSection, expand_data
from trainshed.recipe.execution import Checkpoint, Elastic, Engine, Export, Observe, Resources, expand_engine
from trainshed.recipe.layout import LayoutSection
from trainshed.recipe.model import ModelSection, TokenizerSection, TrainedTokenizer
from trainshed.recipe.places import Places
from trainshed.recipe.section import NotNegativeInt, Problem, Section
from trainshed.recipe.serving import Serve
from trainshed.recipe.train import TrainSection

FORMAT = 1
RESERVED = ("eval", "budgets", "engine_options")
"""Top-level keys that later versions will read; writing one today is an error, not a silence."""

CHECKPOINT_DEFAULTS: dict[Any, dict[str, Any]] = {"megatron": {"keep": None}, "torchtune": {"async": False}}
"""Megatron-LM deletes no checkpoints, torchtune writes them while training waits."""

# Names of objects are name + id + suffix, 63 characters at most; a service's name begins with a letter.
LONGEST_NAME = 40
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"


class Recipe(Section):
    """What to train: one file that carries a model from text to weights."""

    trainshed: Annotated[int, Field(ge=1, le=FORMAT)] = Field(FORMAT, description="Version of the recipe format")
    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=LONGEST_NAME)] = Field(
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
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="Saving and resuming")
    observe: Observe = Field(default_factory=Observe, description="What is written besides the run's events")
    resources: Resources = Field(default_factory=Resources, description="What the run asks of the cluster")
    elastic: Elastic | None = Field(
        None, description="Spare nodes, and with how few to go on; left out: all or nothing"
    )
    export: Export | None = Field(None, description="Weights to write when training has ended; left out: none")
    serve: Serve | None = Field(None, description="How the exported weights are served; left out: they are not")
    store: Address | None = Field(None, description="Where artefacts and runs are kept; left out: the cluster's store")
    seed: NotNegativeInt = Field(1234, description="Seed of fresh weights and dropout (`data.seed` orders the data)")

    _places: Places = PrivateAttr(default_factory=Places)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        """Give keys that are left out the value which the engine has in any case."""
        if not isinstance(given, dict):
            return given
        engine, saving = given.get("engine"), given.get("checkpoint", {})
        name = engine.get("name") if isinstance(engine, dict) else engine
        if name not in CHECKPOINT_DEFAULTS or not isinstance(saving, dict):
            return given
        return given | {"checkpoint": CHECKPOINT_DEFAULTS[name] | saving}

    def where(self, key: str) -> str:
        """Return the place of a key for an error: `recipe.yaml:12 (data.train.0.path)`."""
        steps = (int(step) if step.isdigit() else step for step in key.split("."))
        return self._places.where(tuple(steps))

    @property
    def places(self) -> Places:
        """Return where each key was written."""
        return self._places

    @property
    def folder(self) -> Path:
        """Return the folder of the recipe file; `script` paths are relative to it."""
        return self._places.folder

    def problems(self) -> Iterator[Problem]:
        """What only the whole recipe can tell."""
        yield from self._weights_problems()
        yield from self._tokenizer_problems()
        if self.train.precision == "fp16" and self.engine.name == "torch":
            yield Problem(
                ("train", "precision"),
                "the torch engine has no loss scale, and fp16 needs one",
                "write `precision: bf16`, or `engine: megatron`",
            )
        if self.data.synthetic and self.train.mode == "finetune":
            yield Problem(("data",), "synthetic data has no answers to fine-tune on", "write `train.mode: pretrain`")
        if self.data.synthetic and self.train.epochs is not None:
            yield Problem(("train", "epochs"), "synthetic data has no end to pass", "write `steps` or `tokens`")
        steps = self._known_steps()
        if steps is not None:
            yield from self.warmup_problems(steps)
        profile, steps = self.observe.profile, self.train.steps
        if profile is not None and steps is not None and profile.start > steps:
            yield Problem(
                ("observe", "profile", "start"), f"the run ends after {steps} steps, before it", "write a smaller one"
            )
        if self.serve is not None:
            yield from self._serving_problems()
        if self.model.config is not None:
            yield from fit_problems(self, self.model.config)

    def _known_steps(self) -> int | None:
        """The length of the run in steps, where it can be known without its data."""
        train, length = self.train, self.data.sequence_length
        if train.tokens is None or train.batch_ramp is not None or length is None:
            return train.steps
        return -(-train.tokens // (length * train.global_batch))

    def warmup_problems(self, steps: int) -> Iterator[Problem]:
        """A run of so many steps that ends before its warm-up does. Other engines have schedules of their own."""
        problem = self.train.warmup_problem(steps) if self.engine.name == "torch" else None
        if problem is not None:
            yield Problem(("train", *problem.path), problem.what, problem.hint)

    def _weights_problems(self) -> Iterator[Problem]:
        if self.model.from_:
            return
        if self.train.mode == "finetune":
            yield Problem(("model", "from"), "is missing: there is nothing to fine-tune", "from: hf://org/name")
        if self.train.lora is not None:
            yield Problem(("model", "from"), "is missing: adapters need weights to sit on", "from: hf://org/name")

    def _serving_problems(self) -> Iterator[Problem]:
        if self.export is None or self.export.format != "hf":
            found = "the recipe exports no weights" if self.export is None else "Megatron's format is not served"
            yield Problem(("serve",), f"there is nothing to serve: {found}", "write `export: {format: hf}`")
        if self.tokenizer is None:
            like = self.model.from_ or "hf://org/name"
            yield Problem(("tokenizer",), "is missing: a server must know the model's words", f"tokenizer: {like}")

    def _tokenizer_problems(self) -> Iterator[Problem]:
        sources = [*self.data.train, *([self.data.validation] if self.data.validation else [])]
        reads_text = any(source.kind in ("path", "script") for source in sources)
        trained = isinstance(self.tokenizer, TrainedTokenizer)
        if self.tokenizer is None and (reads_text or self.train.mode == "finetune"):
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
        if trained and not any(source.kind in ("path", "script") for source in self.data.train):
            yield Problem(("tokenizer",), "there is no text to learn a tokenizer from", "write the address of one")


def fit_problems(recipe: Recipe, config: ModelConfig) -> Iterator[Problem]:
    """Yield where an architecture is too small for the recipe; the catalog asks this for presets."""
    length = recipe.data.sequence_length
    if length is not None and length > config.max_positions:
        hint = f"write {config.max_positions} or less"
        if config.positions == "rope":
            written = recipe.model.config is not None
            how = "raise `model.config.max_positions`" if written else "write `model.config` with more `max_positions`"
            hint += f"; to go beyond it on purpose, {how}"
        does = "learns" if config.positions == "learned" else "is made for"
        yield Problem(
            ("data", "sequence_length"),
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
    if recipe.train.moe is not None and config.moe is None:
        yield Problem(("train", "moe"), "the model has no experts", "delete it")
    if config.moe is None and not isinstance(recipe.layout, str) and recipe.layout.ep > 1:
        yield Problem(("layout", "ep"), "the model has no experts to spread", "delete it")
