"""`key.sub=value` on the command line, typed by the rules of the file.

An override is written into the parsed file before it is checked, so an unknown key, a wrong type and a
contradiction get the same messages, with the command line as their place. `Recipe.with_` in Python is the same with a
value that is typed already.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from trainshed.errors import RecipeError
from trainshed.recipe import yaml_io
from trainshed.recipe.yaml_io import KeyPath, KeyStep, SourcePosition, YamlDocument, dotted_key, parse_yaml

CLUSTER_PREFIX = "cluster"
_STEP = re.compile(r'"([^"]*)"|([^.="\s]+)')


def split_overrides(overrides: Iterable[str]) -> tuple[list[str], list[str]]:
    """Separate `cluster.k=v` (returned without `cluster.`) from what overrides the recipe."""
    recipe: list[str] = []
    cluster: list[str] = []
    for text in overrides:
        if text.startswith(f"{CLUSTER_PREFIX}."):
            cluster.append(text.removeprefix(f"{CLUSTER_PREFIX}."))
        else:
            recipe.append(text)
    return recipe, cluster


@dataclass(frozen=True)
class Override:
    """A value for one key, and where it was written."""

    path: KeyPath
    value: Any
    origin: str

    @property
    def key(self) -> str:
        """The key as people write it."""
        return dotted_key(self.path)


def apply_overrides(document: YamlDocument, overrides: Iterable[str | Override], *, prefix: str = "") -> None:
    """Write each override into the document; `prefix` is what errors show before the key (`cluster.`)."""
    for written in overrides:
        override = _read_override(written, prefix) if isinstance(written, str) else written
        # A copy: a later override may write into it.
        _set_value(document, override.path, deepcopy(override.value), override.origin)
        document.places.overrides += (override,)


def python_override(key: str, value: Any) -> Override:
    """Return the override of a key by a value of Python, as `Recipe.with_` takes it."""
    path, _ = _split_override(f"{key}=", "", where="with_")
    return Override(path, plain_value(value), f"with_: {dotted_key(path)}=…")


def plain_value(value: Any) -> Any:
    """Return a value of Python as YAML has it: paths as text, sections and tuples as mappings and lists."""
    from trainshed.recipe.load import to_plain
    from trainshed.recipe.section import Section

    if isinstance(value, Section):
        return to_plain(value, defaults=False)
    if isinstance(value, dict):
        return {key: plain_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(inner) for inner in value]
    if isinstance(value, PurePath):
        return str(value)
    # A scalar of numpy or torch, as a sweep over np.logspace has it.
    return value.item() if hasattr(value, "item") and not isinstance(value, bool | int | float | str) else value


def _read_override(text: str, prefix: str) -> Override:
    path, value_text = _split_override(text, prefix)
    # The value stays out of it: it may be long, or a secret in the wrong place.
    origin = f"command line: {prefix}{dotted_key(path)}=…"
    return Override(path, _read_value(value_text, origin), origin)


def _split_override(text: str, prefix: str, where: str = "command line") -> tuple[KeyPath, str]:
    steps: list[KeyStep] = []
    position = 0
    while True:
        step = _STEP.match(text, position)
        if not step:
            break
        name = step[1] if step[1] is not None else step[2]
        steps.append(int(name) if step[1] is None and name.isdigit() else name)
        position = step.end()
        if text[position : position + 1] == "=":
            return tuple(steps), text[position + 1 :].strip()
        if text[position : position + 1] != ".":
            break
        position += 1
    raise RecipeError(
        f"`{prefix}{text}` is not an override",
        where=where,
        hint="write key.sub=value, e.g. train.steps=100",
    )


def _read_value(text: str, origin: str) -> Any:
    """Read `[…]`, `{…}` and quotes as YAML, all else as one word (so `*` and `#` mean themselves)."""
    if text[:1] not in ("[", "{", '"', "'"):
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise RecipeError("the value is not UTF-8 text", where=origin)
        value = yaml_io.parse_scalar(text)
        if yaml_io.too_large(value):
            raise RecipeError(f"{text} {yaml_io.TOO_LARGE[0]}", where=origin, hint=yaml_io.TOO_LARGE[1])
        return value
    try:
        return parse_yaml(f"value: {text}\n", origin).value["value"]
    except RecipeError as error:
        raise RecipeError(error.what, where=origin, hint=error.hint) from None


def _set_value(document: YamlDocument, path: KeyPath, value: Any, origin: str) -> None:
    target = document.value
    for length in range(1, len(path)):
        target = _descend(document, target, path[:length], path[length:], origin)
    last = path[-1]
    if isinstance(target, list):
        _set_element(target, path, value, origin)
    else:
        target[last] = value
    document.places.drop_below(path)
    document.places.keys[path] = SourcePosition(origin)


def _descend(document: YamlDocument, parent: Any, path: KeyPath, rest: KeyPath, origin: str) -> Any:
    """Return the mapping or list at `path`, made where the file had none or a shorter form; `rest` follows it."""
    step, following = path[-1], rest[0]
    if isinstance(parent, list):
        if not isinstance(step, int) or step >= len(parent):
            raise _no_element(parent, path, origin)
        child = parent[step]
    else:
        child = parent.get(step)
    if isinstance(child, dict) and isinstance(following, int) and _may_be_list(path):
        child = [child]
        document.places.insert_step(path, 0)
    elif isinstance(child, dict | list):
        child = child.copy()  # an alias may share it with another key
    else:
        child = [] if isinstance(following, int) else _long_form(path, child)
        document.places.drop_below(path)
        document.places.keys[path] = SourcePosition(origin)
    if isinstance(child, list) and not isinstance(following, int):
        raise RecipeError(
            f"{dotted_key(path)} is a list of {len(child)}",
            where=origin,
            hint=f"say which element: {dotted_key((*path, 0, *_keys_of_element(child, rest)))}=…",
        )
    parent[step] = child
    return child


def _keys_of_element(elements: list[Any], rest: KeyPath) -> KeyPath:
    """Return the keys that an element has; `rest` may begin with a word in place of its number."""
    known = {key for element in elements if isinstance(element, dict) for key in element}
    return rest[1:] if len(rest) > 1 and rest[0] not in known and rest[1] in known else rest


def _may_be_list(path: KeyPath) -> bool:
    return path == ("data", "train")


def _long_form(path: KeyPath, value: Any) -> dict[str, Any]:
    """Return the mapping that a word is short for; a word that is not short for one (`layout: auto`) is replaced."""
    if path == ("engine",) and isinstance(value, str):
        return {"name": value}
    if path == ("data",) and value == "synthetic":
        return {"synthetic": True}
    if path == ("checkpoint",) and value == "off":
        return {"save": False}
    return {}


def _set_element(target: list[Any], path: KeyPath, value: Any, origin: str) -> None:
    step = path[-1]
    if not isinstance(step, int) or step > len(target):
        raise _no_element(target, path, origin)
    if step == len(target):
        target.append(value)
    else:
        target[step] = value


def _no_element(target: list[Any], path: KeyPath, origin: str) -> RecipeError:
    return RecipeError(
        f"{dotted_key(path[:-1])} has {len(target)} element{'s' if len(target) != 1 else ''}, counted from 0",
        where=origin,
        hint=f"{dotted_key((*path[:-1], len(target)))}=… would add one",
    )
