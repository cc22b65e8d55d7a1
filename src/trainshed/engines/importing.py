"""Another engine's file read as a recipe: NeMo or torchtune YAML, a Megatron-Bridge script, Megatron-LM arguments.

`import_file` finds out whose file it is and lets that engine's `importing` module read it by the engine's table of keys
(`key_table.py`). Every setting is mapped to a key of the recipe, dropped with a reason, or kept in `engine.args`;
mistakes that the file makes are listed too. `recipe_text` writes the result as YAML with a comment for each open
question.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from trainshed.catalog import model_preset, preset_names
from trainshed.engines.keys import KnownKeys, flatten, format_value, resolve_references
from trainshed.errors import InputError, RecipeError
from trainshed.recipe import parse_recipe
from trainshed.recipe.schema import MAX_NAME_LENGTH, Recipe
from trainshed.recipe.yaml_io import YamlDocument, decode_utf8, dump_yaml, parse_yaml


@dataclass(frozen=True)
class MappedSetting:
    """One setting of theirs and the key it became."""

    theirs: str
    """As written there, with its value: `model.micro_batch_size: 1`, `--lr 1e-5`."""
    ours: str
    """The key of the recipe or cluster file, with its value."""


@dataclass(frozen=True)
class DroppedSetting:
    """One setting of theirs that has no place in a recipe."""

    theirs: str
    why: str


@dataclass(frozen=True)
class ImportMistake:
    """Something that the file gets wrong for its own engine, too."""

    where: str
    what: str
    instead: str


@dataclass(frozen=True)
class ImportedConfig:
    """A foreign file as a recipe; `recipe` and `cluster` are plain mappings with the keys of our files."""

    kind: str
    """megatron, nemo or torchtune"""
    recipe: dict[str, Any]
    cluster: dict[str, Any] = field(default_factory=dict)
    mapped: tuple[MappedSetting, ...] = ()
    dropped: tuple[DroppedSetting, ...] = ()
    mistakes: tuple[ImportMistake, ...] = ()
    open_questions: tuple[str, ...] = ()
    """What the file leaves open and a recipe must say; the recipe has a placeholder for each."""


ForeignEngine = Literal["megatron", "nemo", "torchtune"]
_MEGATRON_PATTERN = re.compile(r"(^|[\s\"'=(\[])--[a-z][a-z0-9]*-[a-z0-9-]+|pretrain_gpt", re.MULTILINE)
"""An argument of several words, or the name of Megatron-LM's program."""
_BRIDGE_PATTERN = re.compile(r"^from megatron\.bridge\b", re.MULTILINE)
READABLE_FILES = "a NeMo or torchtune YAML file, or a Megatron-LM argument list or script"


def import_file(path: str | os.PathLike[str], *, gpus: int | None = None) -> ImportedConfig:
    """Read another engine's file as a recipe; `gpus` is how many the run had, where the file does not say it."""
    file = Path(path)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(file), hint=f"write {READABLE_FILES}") from None
    text = decode_utf8(data, str(file))
    return _read_config(detect_engine(text, str(file)), text, file.name, gpus)


def import_text(text: str, name: str, *, gpus: int | None = None) -> ImportedConfig:
    """Read another engine's configuration as a recipe; errors call it `name`."""
    return _read_config(detect_engine(text, name), text, name, gpus)


def _read_config(engine: ForeignEngine, text: str, name: str, gpus: int | None) -> ImportedConfig:
    match engine:
        case "nemo":
            from trainshed.engines.nemo.importing import read_bridge, read_nemo

            return read_bridge(text, name) if _BRIDGE_PATTERN.search(text) else read_nemo(text, name)
        case "torchtune":
            from trainshed.engines.torchtune.importing import read_torchtune

            return read_torchtune(text, name, gpus=gpus)
        case "megatron":
            from trainshed.engines.megatron.importing import read_megatron

            return read_megatron(text, name)


def detect_engine(text: str, name: str) -> ForeignEngine:
    """Tell whose configuration a text is; raise `InputError` for one that is none of the three."""
    try:
        tree = parse_yaml(text, name).value
    except RecipeError:
        tree = {}
    keys = flatten(tree)
    if "trainshed" in tree or {"train", "data", "model"} <= set(tree):
        raise InputError("is already a recipe", where=name, hint=f"trainshed plan {name} shows what it would do")
    if any(key.endswith("._component_") for key in keys):
        return "torchtune"
    if isinstance(tree.get("model"), dict) and ({"trainer", "exp_manager"} & set(tree)):
        return "nemo"
    if _BRIDGE_PATTERN.search(text):
        return "nemo"
    if _MEGATRON_PATTERN.search(text):
        return "megatron"
    raise InputError("is not a configuration that Trainshed reads", where=name, hint=f"give {READABLE_FILES}")


class ConfigImport:
    """The settings of one configuration, and what has become of them so far."""

    gpus: int | None = None
    """How many the run had, where the caller says it because the file does not."""

    def __init__(
        self,
        values: Mapping[str, Any],
        written: Mapping[str, str],
        *,
        kind: str,
        name: str,
        where: Callable[[str], str] | None = None,
    ) -> None:
        self.kind, self.name = kind, name
        self.values = values
        """By key, as the engine would take them."""
        self.written = written
        """The same settings as they are written there: `model.seed: 7`, `--seed 7`."""
        self.recipe: dict[str, Any] = {}
        self.cluster: dict[str, Any] = {}
        self._where = where or (lambda key: f"{name} ({key})")
        self._mapped: list[MappedSetting] = []
        self._dropped: list[DroppedSetting] = []
        self._mistakes: list[ImportMistake] = []
        self._questions: list[str] = []
        self._accounted: set[str] = set()

    @classmethod
    def from_yaml(cls, document: YamlDocument, kind: str, name: str) -> Self:
        """Begin with a YAML file: its references are followed."""
        flat = flatten(document.value)
        written = {key: f"{key}: {format_value(value)}" for key, value in flat.items()}

        def where(key: str) -> str:
            return document.places.where(tuple(key.split(".")))

        return cls(resolve_references(flat), written, kind=kind, name=name, where=where)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or the default for a key that is missing or null."""
        value = self.values.get(key)
        return default if value is None else value

    def set_recipe(self, path: str, value: Any) -> None:
        """Write a key of the recipe."""
        _set_dotted(self.recipe, path, value)

    def set_cluster(self, key: str, path: str, value: Any) -> None:
        """Write a key of the cluster file that one of theirs says."""
        _set_dotted(self.cluster, path, value)
        self.note_mapped(f"cluster file, {path}: {format_value(value)}", key)

    def note_mapped(self, ours: str, *keys: str) -> None:
        """Note what some keys became, unless they are missing or already accounted for."""
        for key in keys:
            if self._account_for(key):
                self._mapped.append(MappedSetting(self.written[key], ours))

    def drop(self, why: str, *keys: str) -> None:
        """Leave some keys out, unless they are already accounted for; `section.*` is what is left of a section."""
        for key in keys:
            for name in self._below(key):
                if self._account_for(name):
                    self._dropped.append(DroppedSetting(self.written[name], why))

    def add_mistake(self, key: str, what: str, instead: str) -> None:
        """Note something that the file gets wrong, at the line of a key."""
        self._mistakes.append(ImportMistake(self._where(key), what, instead))

    def ask(self, question: str) -> None:
        """Note what the file leaves open."""
        self._questions.append(question)

    def unread_keys(self) -> list[str]:
        """Return the keys that are not yet accounted for."""
        return [key for key in self.written if key not in self._accounted]

    def keep_rest(self, known: KnownKeys) -> None:
        """Keep the rest as `engine.args`, except what the engine never reads."""
        arguments: dict[str, Any] = {}
        for key in self.unread_keys():
            value = self.values[key]
            if not known.knows(key):
                self.drop(f"{known.engine} has no such key: nobody reads it", key)
            elif value is None or value == {}:
                self.drop("says nothing", key)
            elif _is_argument(value):
                arguments[key] = value
                self.note_mapped(f"engine.args.{key}: {format_value(value)}", key)
            else:
                self.drop("is neither a value nor a list of values", key)
        if arguments:
            self.recipe.setdefault("engine", {})["args"] = arguments

    def imported(self) -> ImportedConfig:
        """Return what was read."""
        order = [field.alias or name for name, field in Recipe.model_fields.items()]
        return ImportedConfig(
            kind=self.kind,
            recipe={key: self.recipe[key] for key in order if key in self.recipe},
            cluster=self.cluster,
            mapped=tuple(self._mapped),
            dropped=tuple(self._dropped),
            mistakes=tuple(self._mistakes),
            open_questions=tuple(self._questions),
        )

    def _account_for(self, key: str) -> bool:
        """Mark a key as accounted for; return whether it is there and was not."""
        is_new = key in self.written and key not in self._accounted
        self._accounted.add(key)
        return is_new

    def _below(self, key: str) -> list[str]:
        if not key.endswith(".*"):
            return [key]
        return [name for name in self.unread_keys() if name.startswith(key.removesuffix("*"))]


def _is_argument(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(item, bool | int | float | str) for item in value)
    return isinstance(value, bool | int | float | str)


def _set_dotted(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value


GPT2_TOKENIZER = "hf://openai-community/gpt2"
GPT2_VOCABULARY = 50257
"""Of GPT-2's tokenizer, which Megatron and NeMo take where none is named."""


def vocabulary_of_sizes(layers: int, hidden: int, heads: int, width: int, tokenizer: str | None = None) -> int | None:
    """Return the vocabulary of the catalog's model of these sizes: often only the tokenizer says it.

    Models of several families have the same sizes and other vocabularies (Llama 3.1 8B and Mistral 7B): the name of the
    tokenizer tells which is meant. None where nothing does.
    """
    vocabularies: dict[str, int] = {}
    for name in preset_names():
        model = model_preset(name)
        known_width = model.ffn if model.moe is None else model.moe.ffn
        if (model.layers, model.hidden, model.heads, known_width) == (layers, hidden, heads, width):
            vocabularies[name] = model.vocab_size
    family = {name: size for name, size in vocabularies.items() if is_of_family(tokenizer, name)}
    # Mistral-7B-v0.1 is called after mistral-7b too: the longest name counts.
    exactly = max((name for name in vocabularies if _plain(name) in _plain(tokenizer or "")), key=len, default=None)
    if exactly is not None:
        return vocabularies[exactly]
    sizes = set((family or vocabularies).values())
    return sizes.pop() if len(sizes) == 1 else None


def is_of_family(tokenizer: str | None, preset: str) -> bool:
    """Whether a tokenizer is called after the family of a preset: Llama-3.1-8B-Instruct and llama3.1-8b."""
    return _plain(preset.partition("-")[0]) in _plain(tokenizer or "")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def recipe_name(text: str, prefix: str) -> str:
    """Return a name for the recipe; one that does not begin with a letter gets a prefix."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:MAX_NAME_LENGTH].strip("-")
    return plain if plain[:1].isalpha() else f"{prefix}-{plain}"[:MAX_NAME_LENGTH].strip("-")


_SECTIONS = "|".join(field.alias or name for name, field in Recipe.model_fields.items())
_RECIPE_KEY = re.compile(rf"(?<![\w.])({_SECTIONS})(?:\.[\w.]+|:)")


def recipe_text(imported: ImportedConfig, source: str) -> str:
    """Return the recipe as YAML; every open question stands above the section that it is about."""
    asked: dict[str, list[str]] = {}
    for question in imported.open_questions:
        asked.setdefault(_section_of(question, imported.recipe), []).append(question)
    lines = [f"# Imported from {source} ({imported.kind}) by `trainshed import`.", *_comments(asked.pop("", []))]
    lines.append("trainshed: 1")
    for key, value in imported.recipe.items():
        lines += _comments(asked.get(key, []))
        lines.append(_dump({key: value}))
    if imported.cluster:
        lines.append("# For the cluster file:")
        lines += [f"#   {line}" for line in _dump(imported.cluster).splitlines()]
    return "\n".join(lines) + "\n"


def cluster_text(imported: ImportedConfig, source: str) -> str:
    """Return what the file says about the cluster, as the beginning of a cluster file."""
    head = [
        f"# What {source} says about where it runs; see clusters/ for whole files.",
        "# open: name, target, store and machine",
    ]
    return "\n".join([*head, "trainshed: 1", _dump(imported.cluster) if imported.cluster else "# nothing"]) + "\n"


def load_problem(text: str) -> str | None:
    """Return why a recipe does not load yet, None where it does."""
    try:
        parse_recipe(text)
    except InputError as error:
        return str(error)
    return None


def _section_of(question: str, recipe: dict[str, Any]) -> str:
    """The section that a question is about: the last key of ours that it names (what is to be written)."""
    named = [section for section in _RECIPE_KEY.findall(question) if section in recipe]
    return named[-1] if named else ""


def _comments(questions: list[str]) -> list[str]:
    return [f"# open: {question}" for question in questions]


def _dump(value: dict[str, Any]) -> str:
    # One key to a line at the top; below it, mappings of plain values stay on one.
    parts = (dump_yaml({key: item}) for key, item in value.items())
    return "".join(parts).rstrip("\n")
