"""YAML as recipes and cluster files are written: read with the file, line and column of every value, and written back.

PyYAML parses and composes; what an unquoted word means is decided here, by YAML 1.2's core rules without the
traps of YAML 1.1: `1e-4` is a number (PyYAML reads text), `no`, `on` and `off` are words (PyYAML reads
booleans), `12:30` is a word (PyYAML reads 750), `2024-01-01` is a word (PyYAML reads a date), `010` is a word
(PyYAML reads 8, YAML 1.2 reads 10; where a number is wanted the error says what to write). Refused on purpose,
each with a line: duplicate keys, merge keys (`<<`), tags (`!!python/…`), several documents, aliases that contain
themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trainshed.errors import RecipeError
from trainshed.plugins import PluginSource

if TYPE_CHECKING:
    from trainshed.recipe.overrides import Override

Scalar = None | bool | int | float | str

NULL_PATTERN = re.compile(r"^(?:|~|null|Null|NULL)$")
BOOL_PATTERN = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
INT_PATTERN = re.compile(r"^(?:[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)|0x[0-9a-fA-F]+|0o[0-7]+)$")
FLOAT_PATTERN = re.compile(
    r"^(?:[-+]?(?:[0-9]+(?:_[0-9]+)*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
LEADING_ZERO_PATTERN = re.compile(r"^[-+]?0[0-9_]+$")
YAML11_BOOL_PATTERN = re.compile(r"^(?:y|n|yes|no|on|off)$", re.IGNORECASE)


def parse_scalar(text: str) -> Scalar:
    """Return the value of an unquoted word."""
    if NULL_PATTERN.match(text):
        return None
    if BOOL_PATTERN.match(text):
        return text[0] in "tT"
    if INT_PATTERN.match(text):
        return parse_int(text)
    return parse_float(text) if FLOAT_PATTERN.match(text) else text


_MOST_INT = 2**63 - 1
_MOST_DIGITS = 100
TOO_LARGE = (
    "is more than the 64 bits that a number has",
    "write a smaller one; digits that are not a number stand in quotes",
)


def too_large(value: Scalar) -> bool:
    """Whether a value is a whole number that no file of a run could hold."""
    return isinstance(value, int) and abs(value) > _MOST_INT


def parse_int(text: str) -> int:
    """Read `12`, `1_000`, `0x1f` or `0o17`; what has more digits than Python reads is only too large."""
    if len(text) > _MOST_DIGITS:
        return _MOST_INT + 1
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


def parse_float(text: str) -> float:
    """Read `1e-4`, `3.0e-5`, `.5`, `.inf` or `.nan`."""
    sign, name = (-1.0 if text[0] == "-" else 1.0), text.lstrip("+-").lower()
    if name == ".inf":
        return sign * float("inf")
    return float("nan") if name == ".nan" else float(text)


KeyStep = str | int
KeyPath = tuple[KeyStep, ...]
"""A key from the root: `("data", "train", 0, "path")`."""


@dataclass(frozen=True)
class SourcePosition:
    """A spot in a file (lines and columns count from 1), or an override on the command line."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass
class SourceMap:
    """The place of every key by path, and the folder of the file.

    Two `SourceMap`s are always equal: where a value was written is not part of what the recipe says.
    """

    source: str = field(default="recipe", compare=False)
    folder: Path = field(default_factory=Path, compare=False)
    keys: dict[KeyPath, SourcePosition] = field(default_factory=dict, compare=False, repr=False)
    values: dict[KeyPath, SourcePosition] = field(default_factory=dict, compare=False, repr=False)
    plugins: tuple[PluginSource, ...] = field(default=(), compare=False, repr=False)
    """The source of the plugins that the file names."""
    text: str | None = field(default=None, compare=False, repr=False)
    """What the file said; None for what was made in Python."""
    overrides: tuple[Override, ...] = field(default=(), compare=False, repr=False)
    """What was written over it since, in order."""

    def where(self, path: KeyPath) -> str:
        """Describe the place of a key: `recipe.yaml:12 (train.optimizer.lr)`.

        A key that was not written (a missing one, a default) gets the line of the nearest key around it.
        """
        place = self._nearest(path) or SourcePosition(self.source)
        dotted = dotted_key(path)
        if not dotted or (place.line is None and _shows_key(place.source, dotted)):
            return str(place)
        return f"{place} ({dotted})"

    def _nearest(self, path: KeyPath) -> SourcePosition | None:
        for length in range(len(path), -1, -1):
            prefix = path[:length]
            place = self.keys.get(prefix) or self.values.get(prefix)
            if place is not None and (length or place.line is None):
                return place
        return None

    def drop_below(self, path: KeyPath) -> None:
        """Drop every place at or below `path`: its value was replaced."""
        for table in (self.keys, self.values):
            for known in [known for known in table if known[: len(path)] == path]:
                del table[known]

    def insert_step(self, path: KeyPath, step: KeyStep) -> None:
        """Move everything below `path` one level down: `data.train.path` became `data.train.0.path`."""
        size = len(path)
        for table in (self.keys, self.values):
            for known in [known for known in table if len(known) > size and known[:size] == path]:
                table[(*path, step, *known[size:])] = table.pop(known)


@dataclass
class YamlDocument:
    """One parsed YAML file: plain values, and where each was written."""

    value: Any
    places: SourceMap


def dotted_key(path: Iterable[KeyStep]) -> str:
    """Write a path the way overrides do: `data.train.0.path`; a step with a dot in it is quoted."""
    return ".".join(f'"{step}"' if isinstance(step, str) and "." in step else str(step) for step in path)


def _shows_key(source: str, dotted: str) -> bool:
    """Whether an override (`command line: cluster.nodes.max=4`, `with_: train.steps=…`) already shows the key."""
    return source.partition(": ")[2].removeprefix("cluster.").startswith(f"{dotted}=")


_TAG = "tag:yaml.org,2002:"
# Aliases can multiply: nine lines of them make a billion values. No recipe comes near this number.
_MAX_VALUES = 100_000


def _loader_class(base: Any) -> Any:
    loader: Any = type("RecipeLoader", (base,), {"yaml_implicit_resolvers": {}})
    loader.add_implicit_resolver(_TAG + "null", NULL_PATTERN, None)
    loader.add_implicit_resolver(_TAG + "bool", BOOL_PATTERN, None)
    loader.add_implicit_resolver(_TAG + "int", INT_PATTERN, None)
    loader.add_implicit_resolver(_TAG + "float", FLOAT_PATTERN, None)
    return loader


# libyaml is ten times faster; both give the same marks, and the tests hold both to the same messages.
PURE_LOADER = _loader_class(yaml.SafeLoader)
FAST_LOADER = _loader_class(yaml.CSafeLoader) if hasattr(yaml, "CSafeLoader") else PURE_LOADER


def decode_utf8(data: bytes, source: str) -> str:
    """Decode the bytes of a file as UTF-8, or say at which line they are not."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RecipeError(
            "the file is not UTF-8 text", where=f"{source}:{line}", hint="save the file as UTF-8"
        ) from None


def parse_yaml(text: str, source: str, *, loader: Any = FAST_LOADER) -> YamlDocument:
    """Parse YAML text whose top is a mapping; `source` is how errors name it."""
    try:
        root = loader(text).get_single_node()
    except yaml.YAMLError as error:
        raise _yaml_error(error, text, source) from None
    if root is None:
        raise RecipeError("the file is empty", where=source, hint="`trainshed recipes` lists files to start from")
    reader = _NodeReader(source)
    value = reader.read(root, ())
    if not isinstance(value, dict):
        raise RecipeError(
            f"the file holds {_node_kind(root)}, not keys and values",
            where=f"{source}:{root.start_mark.line + 1}",
            hint="write lines like `name: my-run`",
        )
    return YamlDocument(value, reader.places)


class _NodeReader:
    """Turns composed nodes into plain values and remembers where each stood."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.places = SourceMap(source)
        self.open_nodes: set[int] = set()
        self.count = 0

    def read(self, node: Any, path: KeyPath) -> Any:
        self.count += 1
        if self.count > _MAX_VALUES:
            raise self._error(node, f"more than {_MAX_VALUES} values", "an alias (*name) repeats too much")
        self.places.values[path] = self._place(node)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if id(node) in self.open_nodes:
            raise self._error(node, "an alias refers to the value it stands in", "write the value out")
        self.open_nodes.add(id(node))
        value = self._mapping(node, path) if isinstance(node, yaml.MappingNode) else self._sequence(node, path)
        self.open_nodes.discard(id(node))
        return value

    def _scalar(self, node: Any) -> Scalar:
        kind, text = node.tag.removeprefix(_TAG), node.value
        if kind == "str":
            if any("\ud800" <= letter <= "\udfff" for letter in text):
                raise self._error(node, "half a Unicode character (a lone surrogate)", "write the whole character")
            return text
        patterns = {
            "null": NULL_PATTERN,
            "bool": BOOL_PATTERN,
            "int": INT_PATTERN,
            "float": FLOAT_PATTERN,
        }
        if kind not in patterns or not patterns[kind].match(text):
            raise self._tagged(node)
        value = parse_scalar(text)
        if too_large(value):
            raise self._error(node, f"{text} {TOO_LARGE[0]}", TOO_LARGE[1])
        return value

    def _sequence(self, node: Any, path: KeyPath) -> list[Any]:
        if node.tag != _TAG + "seq":
            raise self._tagged(node)
        return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]

    def _mapping(self, node: Any, path: KeyPath) -> dict[str, Any]:
        if node.tag != _TAG + "map":
            raise self._tagged(node)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            if key in result:
                first = self.places.keys[(*path, key)].line
                raise self._error(
                    key_node,
                    f"the key `{key}` is written twice, on lines {first} and {key_node.start_mark.line + 1}",
                    "keep one of them",
                )
            self.places.keys[(*path, key)] = self._place(key_node)
            result[key] = self.read(value_node, (*path, key))
        return result

    def _key(self, node: Any) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._error(node, "a key must be a word", "write `key: value`")
        if node.value == "<<" and not node.style:
            raise self._error(
                node,
                "merge keys (`<<`) are not supported: each key of a recipe stands where it is read",
                "write the keys out; an alias (*name) for a whole value is fine",
            )
        if node.tag != _TAG + "str":
            raise self._error(node, f"the key `{node.value}` is not a word", f'write it in quotes: "{node.value}"')
        return node.value

    def _place(self, node: Any) -> SourcePosition:
        return SourcePosition(self.source, node.start_mark.line + 1, node.start_mark.column + 1)

    def _error(self, node: Any, what: str, hint: str) -> RecipeError:
        return RecipeError(what, where=str(self._place(node)), hint=hint)

    def _tagged(self, node: Any) -> RecipeError:
        shown = node.tag.replace(_TAG, "!!")
        return self._error(node, f"the tag `{shown}` does not fit here", "recipes hold plain values: delete the tag")


def _node_kind(node: Any) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "nothing" if node.tag == _TAG + "null" else "a single value"


def _yaml_error(error: yaml.YAMLError, text: str, source: str) -> RecipeError:
    """Say in plain words what the parser could not read."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or ""
    if mark is None:  # a ReaderError: a character that YAML forbids, at a position instead of a mark
        position = getattr(error, "position", None)
        bad = re.search("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", text)
        line = text.count("\n", 0, bad.start() if bad else position or 0) + 1
        return RecipeError(
            "a control character stands in the file",
            where=f"{source}:{line}",
            hint="delete it, or write it as an escape",
        )
    where = f"{source}:{mark.line + 1}"
    lines = text.splitlines()
    for number in (mark.line, mark.line - 1):
        if 0 <= number < len(lines) and "\t" in re.match(r"\s*", lines[number]).group():  # type: ignore[union-attr]
            return RecipeError(
                "a tab indents this line; YAML wants spaces",
                where=f"{source}:{number + 1}",
                hint="replace the tab by spaces",
            )
    if "expected a single document" in (getattr(error, "context", None) or ""):
        return RecipeError("a second document begins here (`---`)", where=where, hint="keep one document in the file")
    context = getattr(error, "context_mark", None)
    since = f" (in what begins at line {context.line + 1})" if context and context.line != mark.line else ""
    return RecipeError(
        f"this is not YAML: {problem}{since}",
        where=where,
        hint="look for a missing colon, quote, bracket or comma here or on the line above",
    )


UNICODE_LINE_BREAKS = re.compile("[\x85\u2028\u2029]")
"""Line breaks to a YAML reader, though not to most people: only double quotes keep them."""


class PlainDumper(yaml.SafeDumper):
    """PyYAML's dumper, without aliases and with every line break kept."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value out in full each time, without anchors."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = '"' if UNICODE_LINE_BREAKS.search(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


PlainDumper.add_representer(str, _represent_text)


class _RecipeDumper(PlainDumper):
    """Quotes also the words that only our reader takes for numbers (`1e-4`)."""


for _tag, _pattern in (
    ("null", NULL_PATTERN),
    ("bool", BOOL_PATTERN),
    ("int", INT_PATTERN),
    ("float", FLOAT_PATTERN),
):
    _RecipeDumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, None)


def dump_yaml(plain: dict[str, Any]) -> str:
    """Write plain values as recipes and cluster files are: one key to a line, short mappings below it on one."""
    flat = not any(isinstance(value, dict | list) for value in plain.values())
    style = False if flat else None  # PyYAML would put a mapping without mappings on one line as a whole
    return yaml.dump(
        plain, Dumper=_RecipeDumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=style
    )
