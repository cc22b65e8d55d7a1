"""Objects as YAML that every reader understands alike.

Readers differ in what they take for a number, a date or a truth value (`1e3`, `y`, `0o17`), so everything but plain
words is quoted. Texts of several lines are written as blocks, for people.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import yaml

from trainshed.launch.kubernetes.kinds import Object
from trainshed.recipe.yaml_text import OTHER_BREAKS, PlainDumper

WORD = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
NOT_TEXT = frozenset(["null", "true", "false", "yes", "no", "on", "off", "y", "n"])
_NEVER_FOLD = 1 << 30


class _Dumper(PlainDumper):
    """Quotes everything but plain words."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style: str | None = '"'
    if WORD.fullmatch(text) and text.lower() not in NOT_TEXT:
        style = None
    elif "\n" in text and not OTHER_BREAKS.search(text):
        style = "|"  # where a block cannot hold it (tabs, spaces before a line's end) PyYAML quotes it after all
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def to_yaml(found: Object) -> str:
    """Write one object; the same object gives the same bytes."""
    return yaml.dump(found, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_NEVER_FOLD)


def to_documents(objects: Iterable[Object]) -> str:
    """Write objects one after another, as `kubectl apply -f -` reads them."""
    return "".join(f"---\n{to_yaml(found)}" for found in objects)


def documents(text: str) -> list[str]:
    """Cut a text into its objects without changing a byte of them; inside of one, every line is indented."""
    return [each for each in re.split(r"(?m)^(?=---\n)", text) if each]


def read_documents(text: str) -> list[Object]:
    """Read objects back."""
    return [found for found in yaml.load_all(text, Loader=_LOADER) if found]


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
