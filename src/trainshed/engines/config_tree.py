"""Nested configurations of other engines as dotted keys (`model.optim.lr`), and back as YAML.

A value `${other.key}` is OmegaConf's reference to another key; foreign files use it, and what they mean is what counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

from trainshed.recipe.yaml_text import PlainDumper

_REFERENCE = re.compile(r"\$\{([A-Za-z_.][\w.]*)\}")
_PRODUCT = re.compile(r"^\$\{multiply:\s*([^{}]*)\}$")
# A reference may lead to another; a file that needs more steps than this refers to itself.
_MOST_REFERENCES = 20


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
    return {key: _resolved(value, key, flat) for key, value in flat.items()}


def _resolved(value: Any, key: str, flat: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_resolved(item, key, flat) for item in value]
    for _ in range(_MOST_REFERENCES):
        if not isinstance(value, str):
            return value
        found = _REFERENCE.search(value)
        if found is None:
            return _product(value)
        target = _target(found[1], key)
        if target not in flat:
            return value
        whole = found[0] == value
        value = flat[target] if whole else value.replace(found[0], str(flat[target]))
    return value


def _target(reference: str, key: str) -> str:
    """Follow OmegaConf's relative references: one dot is the mapping the key stands in, each further dot one up."""
    dots = len(reference) - len(reference.lstrip("."))
    if not dots:
        return reference
    parents = key.split(".")[:-dots]
    return ".".join([*parents, reference.lstrip(".")])


def _product(value: str) -> Any:
    """Read NeMo's `${multiply:4,4}` once its references are numbers."""
    found = _PRODUCT.match(value)
    parts = [part.strip() for part in found[1].split(",")] if found else []
    return math.prod(map(int, parts)) if parts and all(part.isdigit() for part in parts) else value
