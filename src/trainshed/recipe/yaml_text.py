"""Plain values written as YAML that every reader takes for the same values."""

from __future__ import annotations

import re
from typing import Any

import yaml

from trainshed.recipe import scalars

OTHER_BREAKS = re.compile("[\x85\u2028\u2029]")
"""Line breaks to a YAML reader, though not to most people: only double quotes keep them."""


class PlainDumper(yaml.SafeDumper):
    """PyYAML's dumper, without aliases and with every line break kept."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value out wherever it stands."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = '"' if OTHER_BREAKS.search(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


PlainDumper.add_representer(str, _represent_text)


class _RecipeDumper(PlainDumper):
    """Quotes also the words that only our reader takes for numbers (`1e-4`)."""


for _tag, _pattern in (
    ("null", scalars.NULL),
    ("bool", scalars.BOOL),
    ("int", scalars.INT),
    ("float", scalars.FLOAT),
):
    _RecipeDumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, None)


def dump(plain: dict[str, Any]) -> str:
    """Write plain values as recipes and cluster files are: one key to a line, short mappings below it on one."""
    flat = not any(isinstance(value, dict | list) for value in plain.values())
    style = False if flat else None  # PyYAML would put a mapping without mappings on one line as a whole
    return yaml.dump(
        plain, Dumper=_RecipeDumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=style
    )
