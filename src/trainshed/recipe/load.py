"""From a file, a shipped name or text to a checked recipe, and back: `to_yaml` writes it, `run_id` names its run."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainshed.errors import InputError, RecipeError
from trainshed.recipe.overrides import Override, apply_overrides
from trainshed.recipe.phases import without_lengths
from trainshed.recipe.registered import load_named_plugins
from trainshed.recipe.schema import FORMAT_VERSION, Recipe
from trainshed.recipe.section import Section
from trainshed.recipe.validation import validate
from trainshed.recipe.yaml_io import YamlDocument, decode_utf8, dump_yaml, parse_yaml
from trainshed.shipped import shipped_folder

YAML_SUFFIXES = (".yaml", ".yml")
RUN_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def load_recipe(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Recipe:
    """Load a recipe from a file, or a shipped one by name, with overrides (`train.steps=100`)."""
    file = find_recipe(path)
    return parse_recipe(_read_bytes(file), overrides, source=_display_path(file), folder=file.parent)


def as_recipe(recipe: Recipe | str | os.PathLike[str], overrides: Iterable[str] = ()) -> Recipe:
    """Return a recipe that is at hand, or load it; with overrides in both cases."""
    return recipe.with_overrides(overrides) if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)


def parse_recipe(
    text: str | bytes,
    overrides: Iterable[str | Override] = (),
    *,
    source: str = "recipe.yaml",
    folder: Path | None = None,
) -> Recipe:
    """Load a recipe from text; errors call it `source`, and `script` paths are relative to `folder`."""
    decoded = decode_utf8(text, source) if isinstance(text, bytes) else text
    document = parse_yaml(decoded, source)
    document.places.text = decoded
    apply_overrides(document, overrides)
    check_format(document)
    document.places.folder = folder or Path()
    load_named_plugins(document)
    recipe = validate(Recipe, document)
    recipe._places = document.places
    return recipe


def check_format(document: YamlDocument) -> None:
    """Stop at a newer format before its keys are called unknown."""
    written: Any = document.value.get("trainshed", FORMAT_VERSION)
    if isinstance(written, int) and not isinstance(written, bool) and written > FORMAT_VERSION:
        raise RecipeError(
            f"the file has format {written}, and this Trainshed reads up to {FORMAT_VERSION}",
            where=document.places.where(("trainshed",)),
            hint="pip install --upgrade trainshed",
        )


def find_recipe(path: str | os.PathLike[str]) -> Path:
    """Return the file of a recipe: a path, or the name of a shipped one."""
    if not os.fspath(path):
        raise RecipeError("the name of the recipe is empty", hint="write its file, or the name of a shipped one")
    file = Path(path)
    if file.is_file():
        return file
    if file.is_dir():
        beside = Path(f"{file}.yaml")  # `recipes copy quickstart` leaves quickstart.yaml and quickstart/
        there = beside if beside.is_file() else file / "recipe.yaml"
        raise RecipeError("is a folder, not a recipe", where=str(path), hint=f"write the file: {there}")
    shipped = shipped_recipes()
    name = os.fspath(path)
    if name in shipped:
        return shipped[name]
    beside = sorted(str(other) for other in _files_in(file.parent) if other.suffix in YAML_SUFFIXES)
    near = difflib.get_close_matches(name, [*beside, *shipped], n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"shipped recipes: {', '.join(shipped) or 'none'}"
    raise RecipeError("there is no such recipe", where=name, hint=hint)


def shipped_recipes() -> dict[str, Path]:
    """Return the shipped recipes by name."""
    return {file.stem: file for file in _files_in(shipped_folder("recipes")) if file.suffix in YAML_SUFFIXES}


def _files_in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}", where=str(file)) from None


def _display_path(file: Path) -> str:
    """Name a file as a person would type it: relative where it is below the current directory."""
    if file.is_absolute() and file.is_relative_to(Path.cwd()):
        return str(file.relative_to(Path.cwd()))
    return str(file)


# Keys whose change continues the same run. The length may grow; a skip list may grow while the run goes on;
# `stage` says where tokens are read, never which; `verdict` whether weights are taken, never which; `early_stop` is a
# length, too.
NOT_IN_ID = {"model": ("verdict",), "train": ("steps", "tokens", "epochs", "early_stop"), "data": ("skip", "stage")}
# Keys of `data.validation` that show what the model says and change nothing of it.
PROMPT_KEYS = ("prompts", "answer_tokens")
# Schedules whose `decay` says to which step of the run it goes: whoever makes the run longer is asked for it. That of
# wsd is a length, and stays as it is.
DECAY_NOT_IN_ID = ("cosine", "linear")


def to_yaml(recipe: Section) -> str:
    """Write a recipe (or cluster) in full, defaults included; loading it gives an equal one."""
    return dump_yaml(to_plain(recipe))


def to_plain(section: Section, *, defaults: bool = True) -> dict[str, Any]:
    """Return a section as plain values in the order of the schema.

    A key that is null by default and null here says nothing (`steps` beside `tokens`) and is left out; with
    `defaults=False` so is every key that has its default.
    """
    plain: dict[str, Any] = {}
    derived_values = section.derived_values()
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        usual = field.get_default(call_default_factory=True, validated_data={})
        if value == usual and (value is None or not defaults) and not field.is_required():
            continue
        if not defaults and name in derived_values and derived_values[name] == value:
            continue
        plain[field.alias or name] = _plain_value(value, defaults)
    return plain


def _plain_value(value: Any, defaults: bool) -> Any:
    if isinstance(value, Section):
        return to_plain(value, defaults=defaults)
    if isinstance(value, tuple | list):
        return [_plain_value(item, defaults) for item in value]
    if isinstance(value, dict):
        return {key: _plain_value(item, defaults) for key, item in value.items()}
    return value


def run_id(recipe: Recipe) -> str:
    """Return 8 hex digits of what makes this training this training, so that a rerun finds its run.

    Model, tokenizer, data, train and seed count, except the length of the run, of its phases and of its cosine or
    linear decay, the name and the layout of a phase, `train.early_stop`, `data.skip`, `data.stage`, the prompts of
    `data.validation` and `model.verdict`. So does the source of plugins, where there are any. Layout, engine,
    checkpoint, observe, resources and store do not: a run may continue elsewhere. Files at an address do not either
    (their artefacts have hashes of their own): pin revisions to tell them apart.
    """
    canonical = json.dumps(run_identity(recipe), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:8]


def chosen_run_id(recipe: Recipe, written: str | None) -> str:
    """Return the id that a person wrote, or the recipe's own; refuses what cannot name a folder and a job."""
    if written is None:
        return run_id(recipe)
    if not RUN_ID_PATTERN.fullmatch(written):
        raise InputError(
            f"`{written}` cannot name a run" if written else "the id of the run is empty",
            where="--id",
            hint="use letters, digits, dashes, dots and underscores; begin with a letter or a digit",
        )
    return written


def run_identity(recipe: Recipe) -> dict[str, Any]:
    """Return the keys that `run_id` is made of, with their values."""
    # Without defaults, so that a key which a later version adds does not rename the runs of today. In
    # exchange no default of these sections may ever change.
    plain = to_plain(recipe, defaults=False)
    if recipe.train.schedule.name in DECAY_NOT_IN_ID:
        plain["train"]["schedule"].pop("decay", None)
    identity = {key: plain.get(key) for key in ("model", "tokenizer", "data", "train", "seed")}
    for section, keys in NOT_IN_ID.items():
        identity[section] = {key: value for key, value in plain[section].items() if key not in keys}
    if isinstance(validation := plain["data"].get("validation"), dict):
        shown = _without_prompts(validation)
        if recipe.data.named_validations:
            shown = {name: _without_prompts(one_set) for name, one_set in validation.items()}
        identity["data"] = {**(identity["data"] or {}), "validation": shown}
    if recipe.train.phases is not None:
        phases = [without_lengths(phase) for phase in plain["train"]["phases"]]
        identity["train"] = {**(identity["train"] or {}), "phases": phases}
    if recipe.plugins:
        identity["plugins"] = {source.name: source.sha256 for source in recipe.plugin_sources}
    return identity


def _without_prompts(validation: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in validation.items() if key not in PROMPT_KEYS}


def copy_shipped_recipe(name: str, destination: Path) -> list[Path]:
    """Copy a recipe to a folder or a new file, its scripts beside it; return the files, the recipe first.

    Nothing is overwritten: if any of the files exists, none is written.
    """
    source = shipped_recipes().get(name) or find_recipe(name)
    recipe = load_recipe(source)
    target = destination if destination.suffix in YAML_SUFFIXES else destination / source.name
    copies = {target: source}
    for _, entry in recipe.sources():
        if entry.script is not None and not Path(entry.script).is_absolute():
            copies[target.parent / entry.script] = source.parent / entry.script
    template = recipe.data.template_file
    if template is not None and not Path(template).is_absolute():
        copies[target.parent / template] = source.parent / template
    asked = recipe.eval.questions if recipe.eval is not None else None
    if asked is not None and not Path(asked).is_absolute():
        copies[target.parent / asked] = source.parent / asked
    for plugin in recipe.plugin_sources:
        if plugin.root == source.parent.absolute():
            copies |= {target.parent / name: plugin.root / name for name in plugin.files}
    for copy in copies:
        if copy.exists():
            raise InputError("is there already, and nothing is overwritten", where=str(copy), hint="name another file")
    for copy, original in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(original, copy)
    return list(copies)
