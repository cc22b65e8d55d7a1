"""The schema that editors use accepts what we accept and refuses what we refuse."""

from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from trainshed.catalog import preset_names
from trainshed.recipe import (
    Recipe,
    cluster_json_schema,
    find_recipe,
    known_clusters,
    parse_recipe,
    recipe_json_schema,
    shipped_recipes,
    to_plain,
)
from trainshed.recipe.cluster import Cluster
from trainshed.recipe.schema_export import cluster_reference, key_list, recipe_reference
from trainshed.recipe.validation import known_keys
from trainshed.recipe.yaml_io import parse_yaml


def validator() -> Draft202012Validator:
    schema = recipe_json_schema(preset_names())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_pass_as_written_and_as_resolved(name: str) -> None:
    text = find_recipe(name).read_text()
    validator().validate(parse_yaml(text, name).value)
    validator().validate(to_plain(parse_recipe(text)))


@pytest.mark.parametrize("name", known_clusters())
def test_shipped_clusters_pass(name: str) -> None:
    schema = cluster_json_schema()
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(parse_yaml(known_clusters()[name].read_text(), name).value)


@pytest.mark.parametrize(
    "change",
    [
        {"data": "synthetic"},
        {"engine": "megatron"},
        {"layout": "auto"},
        {"layout": {"tp": 2}},
        {"tokenizer": {"train": {"vocab_size": 300}}},
        {"train": {"tokens": "20B", "global_batch": 1, "optimizer": {"lr": 1e-4}}},
        {"data": {"sequence_length": 8, "train": {"path": "x"}}},
        {"data": {"sequence_length": 8, "train": [{"path": ["x", "y"]}], "eod": "<eos>"}},
        {"model": {"init": "random", "config": {"family": "gpt2", "layers": 1, "hidden": 8, "heads": 1, "ffn": 8,
                                                "vocab_size": 9, "max_positions": 8}}},
    ],
)  # fmt: skip
def test_every_short_form_passes(base: str, change: dict[str, Any]) -> None:
    validator().validate(parse_yaml(base, "r").value | change)


@pytest.mark.parametrize(
    "change",
    [
        {"stpes": 1},
        {"name": "Upper"},
        {"layout": "atuo"},
        {"seed": "x"},
        {"eval": {"at_least": 2}},
        {"model": {"preset": "llama9", "init": "random"}},
        {"train": {"tokens": "20X", "global_batch": 1, "optimizer": {"lr": 1e-4}}},
        {"train": {"steps": 0, "global_batch": 1, "optimizer": {"lr": 1e-4}}},
        {"train": {"steps": 1, "global_batch": 1}},
    ],
)
def test_what_is_wrong_fails(base: str, change: dict[str, Any]) -> None:
    assert not validator().is_valid(parse_yaml(base, "r").value | change)


def test_the_header_names_draft_and_format() -> None:
    schema = recipe_json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"] == "urn:trainshed:recipe:1"


@pytest.mark.parametrize("kind", [Recipe, Cluster])
def test_every_key_has_a_description(kind: Any) -> None:
    assert [path for path, key in known_keys(kind).items() if not key.field.description] == []


def test_the_keys_are_pinned(golden: Callable[[str, str], None]) -> None:
    golden("recipe-keys.txt", "\n".join(key_list(Recipe)) + "\n")
    golden("cluster-keys.txt", "\n".join(key_list(Cluster)) + "\n")


@pytest.mark.parametrize(
    ("page", "render"), [("recipe-reference.md", recipe_reference), ("cluster-reference.md", cluster_reference)]
)
def test_the_reference_is_up_to_date(page: str, render: Callable[[], str], request: pytest.FixtureRequest) -> None:
    written = (request.config.rootpath / "docs" / page).read_text(encoding="utf-8")
    assert written == render(), "run: python docs/write_reference.py"


@pytest.mark.parametrize(("kind", "page"), [(Recipe, recipe_reference()), (Cluster, cluster_reference())])
def test_the_reference_lists_every_key(kind: Any, page: str) -> None:
    assert [key for key in key_list(kind) if f"| `{key.rpartition('.')[2]}` |" not in page and key[-1] != "*"] == []


def test_the_reference_has_the_keys_that_only_validation_has() -> None:
    section = recipe_reference().split("## `data.validation`", 1)[1].split("\n## ", 1)[0]
    for key in ("every", "batches", "prompts", "answer_tokens"):
        assert f"| `{key}` |" in section


def test_every_yaml_block_of_the_guide_is_a_recipe_that_loads(request: pytest.FixtureRequest) -> None:
    guide = (request.config.rootpath / "docs" / "recipe.md").read_text(encoding="utf-8")
    blocks = [block.split("```")[0] for block in guide.split("```yaml\n")[1:]]
    assert blocks
    for block in blocks:
        parse_recipe(block, source="docs/recipe.md")
