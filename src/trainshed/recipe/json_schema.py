"""JSON schemas (draft 2020-12) of the recipe and the cluster file, for editors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from trainshed.recipe.architecture import FILLED_IN
from trainshed.recipe.cluster import Cluster
from trainshed.recipe.keys import known_keys
from trainshed.recipe.schema import FORMAT, Recipe


def recipe_json_schema(presets: Sequence[str] = ()) -> dict[str, Any]:
    """Return the schema of a recipe; `presets` (from the catalog) become the choices of `model.preset`."""
    schema = _schema(Recipe, "recipe")
    if presets:
        preset = schema["$defs"]["ModelSection"]["properties"]["preset"]
        for choice in preset["anyOf"]:
            if choice.get("type") == "string":
                choice["enum"] = list(presets)
    return schema


def cluster_json_schema() -> dict[str, Any]:
    """Return the schema of a cluster file."""
    return _schema(Cluster, "cluster")


def key_list(kind: type[BaseModel]) -> list[str]:
    """Return every key of a schema, dotted, list elements as `*`."""
    return [".".join(str(step) for step in path) for path in known_keys(kind)]


def _schema(kind: type[BaseModel], name: str) -> dict[str, Any]:
    schema = kind.model_json_schema(mode="validation", by_alias=True)
    if model := schema["$defs"].get("ModelConfig"):
        # The family fills these in, so an editor must not ask for them.
        model["required"] = [key for key in model["required"] if key not in FILLED_IN]
    header = {
        "$schema": GenerateJsonSchema.schema_dialect,
        "$id": f"urn:trainshed:{name}:{FORMAT}",
        "title": f"Trainshed {name}",
    }
    return header | {key: value for key, value in schema.items() if key != "title"}
