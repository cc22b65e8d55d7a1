"""What is written from the schemas of recipe and cluster file, so that it is always up to date: JSON schemas
(draft 2020-12) for editors, and the reference pages of the documentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticUndefined

from trainshed.recipe.cluster import Cluster
from trainshed.recipe.data import SourceKeys, ValidationSource
from trainshed.recipe.load import to_plain
from trainshed.recipe.model import FILLED_IN
from trainshed.recipe.registered import RegisteredName
from trainshed.recipe.schema import FORMAT_VERSION, RESERVED_KEYS, Recipe
from trainshed.recipe.section import Section
from trainshed.recipe.validation import ELEMENT, SchemaKey, known_keys


def recipe_json_schema(presets: Sequence[str] = ()) -> dict[str, Any]:
    """Return the schema of a recipe; `presets` (from the catalog) become the choices of `model.preset`."""
    schema = _json_schema(Recipe, "recipe")
    if presets:
        preset = schema["$defs"]["ModelSection"]["properties"]["preset"]
        for choice in preset["anyOf"]:
            if choice.get("type") == "string":
                choice["enum"] = list(presets)
    return schema


def cluster_json_schema() -> dict[str, Any]:
    """Return the schema of a cluster file."""
    return _json_schema(Cluster, "cluster")


def key_list(kind: type[BaseModel]) -> list[str]:
    """Return every key of a schema, dotted, list elements as `*`."""
    return [".".join(str(step) for step in path) for path in known_keys(kind)]


def _json_schema(kind: type[BaseModel], name: str) -> dict[str, Any]:
    schema = kind.model_json_schema(mode="validation", by_alias=True)
    if model := schema["$defs"].get("ModelConfig"):
        # The family fills these in, so an editor must not ask for them.
        model["required"] = [key for key in model["required"] if key not in FILLED_IN]
    header = {
        "$schema": GenerateJsonSchema.schema_dialect,
        "$id": f"urn:trainshed:{name}:{FORMAT_VERSION}",
        "title": f"Trainshed {name}",
    }
    return header | {key: value for key, value in schema.items() if key != "title"}


_HEADER = "<!-- Written by docs/write_reference.py from the schema; edit the descriptions there. -->\n"


def recipe_reference() -> str:
    """Return the page that lists every key of a recipe."""
    reserved = ", ".join(f"`{key}`" for key in RESERVED_KEYS)
    return (
        f"{_HEADER}# Every key of a recipe\n\n{_tables(Recipe)}\n"
        f"Reserved for later versions, and an error today: {reserved}.\n"
    )


def cluster_reference() -> str:
    """Return the page that lists every key of a cluster file."""
    return f"{_HEADER}# Every key of a cluster file\n\n{_tables(Cluster)}"


_OWN_VALIDATION_KEYS = ValidationSource.model_fields.keys() - SourceKeys.model_fields.keys()


def _tables(kind: type[BaseModel]) -> str:
    groups: dict[str, list[SchemaKey]] = {}
    for key in known_keys(kind).values():
        if key.path[:2] == ("data", "validation") and len(key.path) > 2 and key.path[2] not in _OWN_VALIDATION_KEYS:
            continue  # the keys of a source, listed under data.train
        groups.setdefault(_written(key.path[:-1]), []).append(key)
    return "\n".join(_table(name, keys) for name, keys in groups.items())


def _table(name: str, keys: list[SchemaKey]) -> str:
    title = f"## `{name}`" if name else "## Top level"
    note = "\nAlso takes the keys of `data.train[]`, except `weight`.\n" if name == "data.validation" else ""
    rows = [f"| `{key.path[-1]}` | {_type(key.field)} | {_default(key)} | {_cell(key)} |" for key in keys]
    return "\n".join([title, note, "| key | takes | default | meaning |", "|---|---|---|---|", *rows, ""])


def _cell(key: SchemaKey) -> str:
    return (key.field.description or "").replace("|", "\\|")


def _written(path: tuple[str | int, ...]) -> str:
    return ".".join(str(step) for step in path).replace(f".{ELEMENT}", "[]")


def _type(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    for extra in field.metadata:
        annotation = _as_written(extra, annotation)
    names = list(dict.fromkeys(_type_names(annotation)))
    if field.default is None and not field.is_required():
        names.remove("null")  # a key that is null by default is simply left out
    return " \\| ".join(names)


def _as_written(extra: Any, annotation: Any) -> Any:
    """Return what a person may write where a validator accepts more than the value's own type."""
    written = getattr(extra, "json_schema_input_type", PydanticUndefined)
    return annotation if written is PydanticUndefined else written


def _type_names(annotation: Any) -> Iterator[str]:
    origin = get_origin(annotation)
    if annotation == RegisteredName:
        yield "a plugin's name"
    elif origin is Annotated:
        inner, *extras = get_args(annotation)
        for extra in extras:
            inner = _as_written(extra, inner)
        yield from _type_names(inner)
    elif origin in (Union, UnionType):
        for choice in get_args(annotation):
            yield from _type_names(choice)
    elif origin is Literal:
        yield from (f"`{choice}`" for choice in get_args(annotation))
    elif origin in (tuple, list):
        inner = " \\| ".join(dict.fromkeys(_type_names(get_args(annotation)[0])))
        yield f"list of {inner}"
    elif origin is dict:
        yield "names to " + " \\| ".join(dict.fromkeys(_type_names(get_args(annotation)[1])))
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "mapping"
    else:
        words = {int: "whole number", float: "number", str: "text", bool: "true or false", NoneType: "null"}
        yield words[annotation]


def _default(key: SchemaKey) -> str:
    field = key.field
    if key.path[:2] == ("model", "config") and len(key.path) == 3 and key.path[2] in FILLED_IN:
        return FILLED_IN[str(key.path[2])]
    if field.is_required():
        return "**required**"
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, Section):
        default = to_plain(default)
    if default in ({}, ()) or default is None:
        return ""
    if isinstance(default, dict):
        return "see below"
    if isinstance(default, tuple):
        return f"`[{', '.join(str(item) for item in default)}]`"
    text = str(default).lower() if isinstance(default, bool) else str(default)
    return f"`{text}`".replace("|", "\\|")
