"""The keys of other engines' nested configurations: dotted names, YAML, and `engine.args` checked against them.

`flatten` and `nest` go between a tree and dotted keys (`model.optim.lr`). A value `${other.key}` is OmegaConf's
reference to another key; it is replaced by what it refers to. `KnownKeys` are the keys that one version of an engine
reads; `argument_problems` finds `engine.args` that the engine does not read or that contradict the recipe, the plan or
the cluster.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from trainshed.recipe.section import Problem
from trainshed.recipe.yaml_io import PlainDumper, parse_yaml


@dataclass(frozen=True)
class EngineSetting:
    """One key of an engine's configuration, and the key of the recipe, plan or cluster that decides it."""

    key: str
    value: Any
    decided_by: str | None
    """None: chosen here, and `engine.args` may choose another value."""


@dataclass(frozen=True)
class KnownKeys:
    """The keys that one version of an engine reads, from a data file: sections by dotted name, each a list of keys.

    A `*` in a section's list allows any key there: the engine passes them to the component that the section names.
    """

    engine: str
    file: Path

    @cached_property
    def sections(self) -> dict[str, tuple[str, ...]]:
        """The keys of each section; the root's is called `-`."""
        document = parse_yaml(self.file.read_text(encoding="utf-8"), self.file.name).value
        return {section: tuple(keys) for section, keys in document["sections"].items()}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every known key, dotted."""
        return tuple(
            key if section == "-" else f"{section}.{key}"
            for section, keys in self.sections.items()
            for key in keys
            if key != "*"
        )

    def knows(self, key: str) -> bool:
        """Whether the engine reads a dotted key."""
        section = key.rpartition(".")[0] or "-"
        return key in self._set or "*" in self.sections.get(section, ())

    def nearest(self, key: str) -> str | None:
        """Return the known key that was probably meant."""
        last = key.rpartition(".")[2]
        same = [name for name in self.names if name.rpartition(".")[2] == last]
        near = same or difflib.get_close_matches(key, self.names, n=1, cutoff=0.6)
        return near[0] if near else None

    @cached_property
    def _set(self) -> frozenset[str]:
        return frozenset(self.names)


def argument_problems(
    arguments: Mapping[str, Any], known: KnownKeys, settings: Iterable[EngineSetting]
) -> Iterator[Problem]:
    """Yield what is wrong with `engine.args`: keys nobody reads, and those that contradict recipe, plan or cluster."""
    decided = {setting.key: setting for setting in settings if setting.decided_by is not None}
    for key, value in arguments.items():
        path = ("engine", "args", key)
        if key in decided:
            setting = decided[key]
            if setting.value != value:
                yield Problem(
                    path,
                    f"contradicts `{setting.decided_by}`, which makes it {format_value(setting.value)}",
                    f"change {setting.decided_by}, and delete it here",
                )
        elif not known.knows(key):
            near = known.nearest(key)
            yield Problem(
                path,
                f"{known.engine} reads no `{key}`",
                f"did you mean {near}?" if near else f"its keys are in {known.file.name}",
            )


def added_arguments(arguments: Mapping[str, Any], settings: Iterable[EngineSetting]) -> dict[str, Any]:
    """Return the `engine.args` that add to a configuration: those that nothing decides."""
    decided = {setting.key for setting in settings if setting.decided_by is not None}
    return {key: value for key, value in arguments.items() if key not in decided}


def format_value(value: Any) -> str:
    """Show a value as a person would write it in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {format_value(item)}" for key, item in value.items()) + "}"
    return str(value)


_REFERENCE = re.compile(r"\$\{([A-Za-z_.][\w.]*)\}")
_PRODUCT = re.compile(r"^\$\{multiply:\s*([^{}]*)\}$")
# A reference may lead to another; a file that needs more steps than this refers to itself.
_MAX_REFERENCES = 20


def flatten(tree: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    """Return every value of a tree by its dotted key, in order; lists and empty mappings are values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        dotted = f"{parent}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{dotted}."))
        else:
            flat[dotted] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of dotted keys; the opposite of `flatten`."""
    tree: dict[str, Any] = {}
    for dotted, value in flat.items():
        *parents, last = dotted.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = value
    return tree


def to_yaml(flat: Mapping[str, Any], heading: str) -> str:
    """Write dotted keys as a YAML file with a comment on top."""
    comment = "".join(f"# {line}\n" for line in heading.splitlines())
    body = yaml.dump(nest(flat), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return comment + body


class _Dumper(PlainDumper):
    """Lists on one line; numbers as YAML 1.1 reads them too (`1.0e-05`: OmegaConf and PyYAML disagree on `1e-05`)."""


def _represent_list(dumper: yaml.SafeDumper, data: Any) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(tuple, _represent_list)


def resolve_references(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys with every reference that can be followed replaced by what it refers to."""
    return {key: _resolve(value, key, flat) for key, value in flat.items()}


def _resolve(value: Any, key: str, flat: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_resolve(item, key, flat) for item in value]
    for _ in range(_MAX_REFERENCES):
        if not isinstance(value, str):
            return value
        reference = _REFERENCE.search(value)
        if reference is None:
            return _product(value)
        target = _target(reference[1], key)
        if target not in flat:
            return value
        whole = reference[0] == value
        value = flat[target] if whole else value.replace(reference[0], str(flat[target]))
    return value


def _target(reference: str, key: str) -> str:
    """Follow OmegaConf's relative references: one dot is the mapping that holds the key, each further dot one up."""
    dots = len(reference) - len(reference.lstrip("."))
    if not dots:
        return reference
    parents = key.split(".")[:-dots]
    return ".".join([*parents, reference.lstrip(".")])


def _product(value: str) -> Any:
    """Read NeMo's `${multiply:4,4}` once its references are numbers."""
    product = _PRODUCT.match(value)
    parts = [part.strip() for part in product[1].split(",")] if product else []
    return math.prod(map(int, parts)) if parts and all(part.isdigit() for part in parts) else value
