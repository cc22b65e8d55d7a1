"""What an unquoted word in a recipe means: YAML 1.2's core rules, with the traps of YAML 1.1 left out.

`1e-4` is a number (PyYAML reads text), `no`, `on` and `off` are words (PyYAML reads booleans), `12:30` is a
word (PyYAML reads 750), `2024-01-01` is a word (PyYAML reads a date), `010` is a word (PyYAML reads 8, YAML
1.2 reads 10; where a number is wanted the error says what to write).
"""

from __future__ import annotations

import re

Scalar = None | bool | int | float | str

NULL = re.compile(r"^(?:|~|null|Null|NULL)$")
BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
INT = re.compile(r"^(?:[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)|0x[0-9a-fA-F]+|0o[0-7]+)$")
FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9]+(?:_[0-9]+)*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
LEADING_ZERO = re.compile(r"^[-+]?0[0-9_]+$")
YAML11_BOOL = re.compile(r"^(?:y|n|yes|no|on|off)$", re.IGNORECASE)


def read_plain(text: str) -> Scalar:
    """Return the value of an unquoted word."""
    if NULL.match(text):
        return None
    if BOOL.match(text):
        return text[0] in "tT"
    if INT.match(text):
        return read_int(text)
    return read_float(text) if FLOAT.match(text) else text


def read_int(text: str) -> int:
    """Read `12`, `1_000`, `0x1f` or `0o17`."""
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


def read_float(text: str) -> float:
    """Read `1e-4`, `3.0e-5`, `.5`, `.inf` or `.nan`."""
    sign, name = (-1.0 if text[0] == "-" else 1.0), text.lstrip("+-").lower()
    if name == ".inf":
        return sign * float("inf")
    return float("nan") if name == ".nan" else float(text)
