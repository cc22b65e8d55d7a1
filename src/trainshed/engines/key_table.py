"""One table per foreign engine: each of its keys once, the key of the recipe that it stands for, and both directions.

Three things are derived from a `KeyTable`: the configuration that the engine reads (`render`), the recipe that a
configuration becomes (`read`), and what `engine.args` may not contradict (`EngineSetting.decided_by`). A conversion
that needs several keys at once is one row with functions. Reading what was rendered gives the same recipe again, which
property tests hold for every engine and version.

`unsaid` lists the keys of a recipe that the engine's format has no place for, each with the reason. A key of the
recipe that is neither in a row nor listed there fails a test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from trainshed.engines.importing import ConfigImport
from trainshed.engines.keys import EngineSetting, format_value
from trainshed.engines.launch import EngineTask
from trainshed.errors import InputError
from trainshed.recipe import Recipe
from trainshed.recipe.data import CHAT_KEYS, SourceKeys
from trainshed.recipe.section import Problem
from trainshed.recipe.yaml_io import KeyPath


class _NoValue:
    pass


OMIT: Final = _NoValue()
"""No value: the engine's key is not rendered, the recipe's key is not written."""
KEEP: Final = _NoValue()
"""No value either, and the engine's keys are left to `engine.args`."""
WRITTEN_ANYWAY = "always set by Trainshed"


def _always(task: EngineTask) -> bool:
    return True


@dataclass(frozen=True)
class KeyRow:
    """Some keys of an engine, the key of the recipe that they stand for, and how each becomes the other."""

    keys: tuple[str, ...]
    """The engine's keys. `section.*` are those of a section that no other row has read."""
    path: str
    """The recipe's key, or in words who else decides it."""
    render: Callable[[EngineTask], Any] | None = None
    """From a task to the key's value, or to a mapping where the row has several keys; None: it is never rendered."""
    read: Callable[[Any], Any] | None = None
    """From a `ConfigImport` to the value of `path`; None: another row has read it."""
    when: Callable[[EngineTask], bool] = _always
    """The tasks for which it is rendered."""
    decided_by: str = ""
    """Who decides it, where that is more than `path`."""
    chosen: bool = False
    """Nothing decides it: Trainshed chooses a value, and `engine.args` may choose another."""
    note: str = ""
    """What an import says about the keys; the recipe's key and its value if empty."""
    drop: str = ""
    """Why an import leaves the keys out."""
    versions: tuple[str, ...] = ()
    """The only versions of the engine for which it is rendered; all if empty."""

    def settings(self, task: EngineTask, version: str | None) -> Iterable[EngineSetting]:
        """Yield what is rendered for a task."""
        if self.render is None or (self.versions and version not in self.versions) or not self.when(task):
            return
        value = self.render(task)
        values: Mapping[str, Any] = {self.keys[0]: value} if len(self.keys) == 1 else value
        assert set(values) <= set(self.keys), f"the row of {self.path} has no {set(values) - set(self.keys)}"
        decided_by = None if self.chosen else self.decided_by or self.path
        for key, item in values.items():
            if item is not OMIT:
                yield EngineSetting(key, item, decided_by)

    def _value_read(self, config: ConfigImport) -> Any:
        try:
            return OMIT if self.read is None else self.read(config)
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            # A person's file may hold a value of any kind anywhere.
            there = [config.written[key] for key in self.keys if key in config.written]
            raise InputError(
                f"{'; '.join(there) or f'without {self.keys[0]}' if self.keys else 'the file'}: no {self.path} can be "
                f"read from it ({error})",
                where=config.name,
                hint=f"write a value that {config.kind} takes",
            ) from error

    def read_into(self, config: ConfigImport) -> None:
        """Read the keys of a configuration that is imported."""
        if self.drop:
            config.drop(self.drop, *self.keys)
            return
        value = self._value_read(config)
        if self.chosen:
            # A configuration that says what is written anyway needs no `engine.args`.
            usual: Any = {self.keys[0]: value} if len(self.keys) == 1 else value
            config.note_mapped(WRITTEN_ANYWAY, *(key for key, item in usual.items() if config.get(key) == item))
            return
        if value is KEEP:
            return
        if value is not OMIT:
            config.set_recipe(self.path, value)
        became = self.path if value is OMIT else f"{self.path}: {format_value(value)}"
        config.note_mapped(self.note or became, *self.keys)


@dataclass(frozen=True)
class KeyTable:
    """The rows of one engine, in the order in which its configuration is written."""

    rows: tuple[KeyRow, ...]
    read_order: tuple[str, ...]
    """Keys of the recipe, or the beginnings of some, in the order in which they are read and written."""
    unsaid: Mapping[str, str] = field(default_factory=dict)
    """Keys of the recipe, or the beginnings of some, that the engine's format cannot say, and why."""

    def render(self, task: EngineTask, version: str | None = None) -> list[EngineSetting]:
        """Return the configuration of a task, each key with who decides it."""
        settings = [setting for row in self.rows for setting in row.settings(task, version)]
        keys = [setting.key for setting in settings]
        assert len(keys) == len(set(keys)), f"decided twice: {sorted(key for key in keys if keys.count(key) > 1)}"
        return settings

    def read(self, config: ConfigImport) -> None:
        """Read a configuration of the engine into the recipe."""
        for row in sorted(self.rows, key=self._position):
            row.read_into(config)

    def _position(self, row: KeyRow) -> int:
        """Where a row is read: with the longest beginning of its key that `read_order` has, or at the end."""
        beginnings = [start for start in self.read_order if f"{row.path}.".startswith(f"{start}.")]
        return self.read_order.index(max(beginnings, key=len)) if beginnings else len(self.read_order)


START_BUDGETS = ("rendezvous", "load", "first_step")
STEP_BUDGETS = ("step", "validation", "checkpoint")


def budget_seconds(task: EngineTask, phases: tuple[str, ...]) -> float | None:
    """Return the longest of some budgets, for an engine with one limit for all of them; None where none is written."""
    written = task.recipe.budgets.written if task.recipe.budgets is not None else {}
    return max((written[phase] for phase in phases if phase in written), default=None)


def has_start_budget(task: EngineTask) -> bool:
    """Whether the recipe says how long the way to the first step may take."""
    return budget_seconds(task, START_BUDGETS) is not None


def budget_rows(minutes_to_first_step: str, seconds_after: str) -> tuple[KeyRow, ...]:
    """Return the rows of megatron-core's two limits of collectives, up to the first step and after it."""
    return (
        KeyRow(
            (minutes_to_first_step,),
            "budgets",
            lambda task: math.ceil((budget_seconds(task, START_BUDGETS) or 0) / 60),
            lambda config: KEEP,
            when=has_start_budget,
        ),
        KeyRow(
            (seconds_after,),
            "budgets",
            lambda task: math.ceil(budget_seconds(task, STEP_BUDGETS) or 0),
            lambda config: KEEP,
            when=lambda task: budget_seconds(task, STEP_BUDGETS) is not None,
        ),
    )


REFUSED = "the engine does not have it: refused before anything is rendered"
_COPY = "the engine reads a copy in the run's folder"
_TOKENS = "the engine reads prepared tokens, and another stage lists their files"
COMMON_UNSAID: Mapping[str, str] = {
    "trainshed": "the version of the recipe's format",
    "name": "the engine is told where to write, not what the run is called",
    "model.from": _COPY,
    "model.init": "what does not start from weights starts from random ones",
    "model.verdict": "base weights are proven before the engine starts",
    "model.added_tokens": REFUSED,
    "tokenizer": _COPY,
    "checkpoint.save": REFUSED,
    **dict.fromkeys(("data.skip", "train.z_loss"), REFUSED),
    "data.stage": "the job copies tokens to the nodes before the engine starts, or it is refused",
    "checkpoint.to": "another stage copies what the engine has committed to the bucket, or it is refused",
    **dict.fromkeys(("data.validation.prompts", "data.validation.answer_tokens", "train.dpo"), REFUSED),
    **dict.fromkeys(("train.early_stop", "checkpoint.best", "train.phases", "data.validation.*"), REFUSED),
    "train.optimizer.name": "there is one, AdamW, and another is refused",
    **dict.fromkeys((f"train.optimizer.{key}" for key in ("decoupled", "muon", "groups")), REFUSED),
    **dict.fromkeys(("train.spikes", "train.ema", "train.mtp"), REFUSED),
    **dict.fromkeys(("model.config.mla", "train.moe.bias_update"), REFUSED),
    "model.config.mtp_layers": "`train.mtp` says it",
    "plugins": "they extend the stages that run before and after the engine",
    **dict.fromkeys(("train.optimizer.options", "train.loss.name", "train.loss.options", "observe.exporters"), REFUSED),
    "budgets": "where the engine has a limit it stands for several of them, and is rendered as the longest",
    **dict.fromkeys((f"observe.{tool}" for tool in ("prometheus", "wandb", "mlflow", "trackio")), REFUSED),
    "notify": "our agent tells what happens, and it does not run beside the engine: refused",
    "train.non_finite": "foreign engines stop, and skipping is refused",
    "train.tokens": "the length of the run is written in steps",
    "layout.dp": "it is what the other keys leave of the ranks",
    "layout.schedule": "it follows pp and vp",
    "layout.overlap": REFUSED,
    **dict.fromkeys(("engine.name", "engine.version"), "the form of the file tells it"),
    **dict.fromkeys(("engine.image", "engine.program"), "the job says it"),
    **dict.fromkeys(("elastic", "export", "eval", "serve", "store", "resources"), "the engine has no part in it"),
}
"""Keys of a recipe that no foreign engine's configuration gets, and why."""
PRETRAINING_UNSAID: Mapping[str, str] = {
    **COMMON_UNSAID,
    "model.preset": "the architecture is written out",
    "data.train": _TOKENS,
    **dict.fromkeys((f"data.validation.{key}" for key in SourceKeys.model_fields), _TOKENS),
    **dict.fromkeys(
        (f"data.{key}" for key in ("shards", "eod", "bos", "on_bad_line")),
        "text becomes tokens before the engine starts",
    ),
    **dict.fromkeys(("data.format", *(f"data.{key}" for key in CHAT_KEYS)), "the engine pretrains on text"),
    "train.epochs": "the length of the run is written in steps",
    **dict.fromkeys(("train.mode", "train.lora", "layout.offload"), REFUSED),
}
"""Further keys that engines which pretrain on prepared tokens do not get, and why."""


def mirror_problems(recipe: Recipe, engine: str) -> Iterator[Problem]:
    """Yield why checkpoints cannot be copied to where `checkpoint.to` says; the engine writes them into the run."""
    to = recipe.checkpoint.to
    if to is not None and "://" not in to:
        yield Problem(
            ("checkpoint", "to"),
            f"{engine} writes its checkpoints into the run's folder; only a bucket gets a copy of them",
            "write an address such as s3://bucket/checkpoints, or delete it: `store` says where runs lie",
        )


_BENCHMARKED_WITHOUT_SAVING = ("NeMo", "Megatron")
"""Engines whose adapter can switch checkpoints off (`checkpoint: off`), or refuses it itself."""


def unhonoured_problems(recipe: Recipe, engine: str) -> Iterator[Problem]:
    """Yield what no foreign engine does of a recipe, and ours does."""
    validation, train = recipe.data.validation, recipe.train
    absent: tuple[tuple[bool, KeyPath, str], ...] = (
        (train.mode == "dpo", ("train", "mode"), "is not rendered for pairs of answers (dpo)"),
        (bool(recipe.data.named_validations), ("data", "validation"), "measures one validation set, not several"),
        (train.early_stop is not None, ("train", "early_stop"), "does not end a run by its validation loss"),
        (
            train.optimizer.name == "muon",
            ("train", "optimizer", "name"),
            "is rendered with AdamW: its Muon takes gate and up as one matrix, or it has none",
        ),
        (
            train.optimizer.decoupled,
            ("train", "optimizer", "decoupled"),
            "multiplies the weight decay by the learning rate",
        ),
        (
            train.optimizer.groups is not None,
            ("train", "optimizer", "groups"),
            "is rendered with one group of tensors that decay and one of those that do not",
        ),
        (train.spikes is not None, ("train", "spikes"), "does not skip spikes"),
        (train.ema is not None, ("train", "ema"), "does not average weights"),
        (train.mtp is not None, ("train", "mtp"), "is rendered without multi-token prediction"),
        (
            not recipe.checkpoint.save and engine not in _BENCHMARKED_WITHOUT_SAVING,
            ("checkpoint", "save"),
            "is rendered with checkpoints, and saves at its end at the latest",
        ),
        (recipe.checkpoint.best is not None, ("checkpoint", "best"), "does not keep the best checkpoint apart"),
        (recipe.model.added_tokens is not None, ("model", "added_tokens"), "does not add tokens to a model"),
        *(
            (
                getattr(recipe.observe, tool) is not None,
                ("observe", tool),
                f"has no exporter to {tool} that Trainshed sets up: `trainshed export-figures RUN --to …` may do it "
                "afterwards",
            )
            for tool in ("prometheus", "wandb", "mlflow", "trackio")
        ),
        (
            validation is not None and validation.prompts is not None,
            ("data", "validation", "prompts"),
            "answers no questions during a run",
        ),
        (
            validation is not None and validation.answer_tokens is not None,
            ("data", "validation", "answer_tokens"),
            "answers no questions during a run",
        ),
    )
    for is_asked, path, what in absent:
        if is_asked:
            yield Problem(path, f"{engine} {what}", "delete it, or write engine: torch")


def budget_problems(recipe: Recipe, engine: str) -> Iterator[Problem]:
    """Yield the budgets of a recipe for an engine that has no limits of its own."""
    for phase in recipe.budgets.written if recipe.budgets is not None else ():
        yield Problem(
            ("budgets", phase), f"{engine} takes no limit for its collectives", "delete it, or write engine: torch"
        )


def recipe_value(task: EngineTask, path: str) -> Any:
    """Return what a task has at a key of the recipe: its layout and its model are those of the plan."""
    section, _, rest = path.partition(".")
    value: Any = task.recipe
    if section == "layout":
        value, path = task.layout, rest
    elif path.startswith("model.config."):
        value, path = task.config, path.removeprefix("model.config.")
    for name in path.split("."):
        value = getattr(value, f"{name}_" if name == "async" else name)
    return list(value) if isinstance(value, tuple) else value


def same(
    key: str,
    path: str,
    *,
    to_engine: Callable[[Any], Any] | None = None,
    to_recipe: Callable[[Any], Any] | None = None,
    default: Any = None,
    unless: Any = OMIT,
    **more: Any,
) -> KeyRow:
    """Return the row of one key that is one key of the recipe, with a function for each direction where they differ.

    `default` is the engine's own, for configurations that leave the key out. A value that is `unless` is not written
    into the recipe: it is the recipe's own default.
    """

    def render(task: EngineTask) -> Any:
        value = recipe_value(task, path)
        return to_engine(value) if to_engine else value

    def read(config: ConfigImport) -> Any:
        value = config.get(key, default)
        value = to_recipe(value) if to_recipe else value
        if unless is not OMIT and value == unless:
            config.note_mapped(f"{path}: {format_value(value)}", key)
            return OMIT
        return value

    return KeyRow((key,), path, render, read, **more)


def follows(key: str, path: str, render: Callable[[EngineTask], Any], note: str, **more: Any) -> KeyRow:
    """Return the row of a key that follows from a key of the recipe which another row reads."""
    return KeyRow((key,), path, render, note=note, **more)


def choice(key: str, value: Any, **more: Any) -> KeyRow:
    """Return the row of a key that Trainshed sets to one value, unless `engine.args` say another."""
    return KeyRow((key,), "engine.args", lambda task: value, lambda config: value, chosen=True, **more)


def choice_if(key: str, value: Any, when: Callable[[EngineTask], bool], read: Callable[[Any], Any]) -> KeyRow:
    """Return the row of a key that Trainshed chooses for some tasks; `read` tells the same of a `ConfigImport`."""
    return KeyRow(
        (key,),
        "engine.args",
        lambda task: value,
        lambda config: value if read(config) else OMIT,
        when=when,
        chosen=True,
    )


def not_read(drop: str, *keys: str) -> KeyRow:
    """Return the row of keys that are never rendered and that an import leaves out."""
    return KeyRow(keys, "", drop=drop)


def to_floats(value: Any) -> Any:
    """Return a number, or a list of numbers, as floats: YAML has whole ones as integers."""
    return [float(item) for item in value] if isinstance(value, list | tuple) else float(value)
