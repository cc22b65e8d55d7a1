"""Reading YAML with the file, line and column of every key and value.

PyYAML parses and composes; what a word means is decided by `scalars`. Refused on purpose, each with a line:
duplicate keys, merge keys (`<<`), tags (`!!python/…`), several documents, aliases that contain themselves.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from trainshed.errors import RecipeError
from trainshed.recipe import scalars
from trainshed.recipe.places import Document, KeyPath, Place, Places

_TAG = "tag:yaml.org,2002:"
# Aliases can multiply: nine lines of them make a billion values. No recipe comes near this number.
_MOST_VALUES = 100_000


def _loader_on(base: Any) -> Any:
    loader: Any = type("RecipeLoader", (base,), {"yaml_implicit_resolvers": {}})
    loader.add_implicit_resolver(_TAG + "null", scalars.NULL, None)
    loader.add_implicit_resolver(_TAG + "bool", scalars.BOOL, None)
    loader.add_implicit_resolver(_TAG + "int", scalars.INT, None)
    loader.add_implicit_resolver(_TAG + "float", scalars.FLOAT, None)
    return loader


# libyaml is ten times faster; both give the same marks, and the tests hold both to the same messages.
PURE_LOADER = _loader_on(yaml.SafeLoader)
FAST_LOADER = _loader_on(yaml.CSafeLoader) if hasattr(yaml, "CSafeLoader") else PURE_LOADER


def decode(data: bytes, source: str) -> str:
    """Decode the bytes of a file as UTF-8, or say at which line they are not."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RecipeError(
            "the file is not UTF-8 text", where=f"{source}:{line}", hint="save the file as UTF-8"
        ) from None


def parse(text: str, source: str, *, loader: Any = FAST_LOADER) -> Document:
    """Parse YAML text whose top is a mapping; `source` is how errors name it."""
    try:
        root = loader(text).get_single_node()
    except yaml.YAMLError as error:
        raise _explain(error, text, source) from None
    if root is None:
        raise RecipeError("the file is empty", where=source, hint="`trainshed recipes` lists files to start from")
    reader = _Reader(source)
    value = reader.read(root, ())
    if not isinstance(value, dict):
        raise RecipeError(
            f"the file holds {_kind(root)}, not keys and values",
            where=f"{source}:{root.start_mark.line + 1}",
            hint="write lines like `name: my-run`",
        )
    return Document(value, reader.places)


class _Reader:
    """Turns composed nodes into plain values and remembers where each stood."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.places = Places(source)
        self.open_nodes: set[int] = set()
        self.count = 0

    def read(self, node: Any, path: KeyPath) -> Any:
        self.count += 1
        if self.count > _MOST_VALUES:
            raise self._error(node, f"more than {_MOST_VALUES} values", "an alias (*name) repeats too much")
        self.places.values[path] = self._place(node)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if id(node) in self.open_nodes:
            raise self._error(node, "an alias refers to the value it stands in", "write the value out")
        self.open_nodes.add(id(node))
        value = self._mapping(node, path) if isinstance(node, yaml.MappingNode) else self._sequence(node, path)
        self.open_nodes.discard(id(node))
        return value

    def _scalar(self, node: Any) -> scalars.Scalar:
        kind, text = node.tag.removeprefix(_TAG), node.value
        if kind == "str":
            if any("\ud800" <= letter <= "\udfff" for letter in text):
                raise self._error(node, "half a Unicode character (a lone surrogate)", "write the whole character")
            return text
        patterns = {
            "null": scalars.NULL,
            "bool": scalars.BOOL,
            "int": scalars.INT,
            "float": scalars.FLOAT,
        }
        if kind not in patterns or not patterns[kind].match(text):
            raise self._tagged(node)
        return scalars.read_plain(text)

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

    def _place(self, node: Any) -> Place:
        return Place(self.source, node.start_mark.line + 1, node.start_mark.column + 1)

    def _error(self, node: Any, what: str, hint: str) -> RecipeError:
        return RecipeError(what, where=str(self._place(node)), hint=hint)

    def _tagged(self, node: Any) -> RecipeError:
        shown = node.tag.replace(_TAG, "!!")
        return self._error(node, f"the tag `{shown}` does not fit here", "recipes hold plain values: delete the tag")


def _kind(node: Any) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "nothing" if node.tag == _TAG + "null" else "a single value"


def _explain(error: yaml.YAMLError, text: str, source: str) -> RecipeError:
    """Say in plain words what the parser stumbled over."""
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
