"""Tasks for engines that are not ours: a recipe on a layout, at a place that is not a machine's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import yaml

from support import TESTS
from trainshed.catalog import architecture
from trainshed.engines.importing import ImportedConfig, recipe_text
from trainshed.engines.launch import EngineLaunch, EngineSite, EngineTask
from trainshed.plan import resolve_layout
from trainshed.recipe import Layout, ModelConfig, Recipe, parse_recipe

FILES = TESTS / "engines" / "files"
PLACE = EngineSite(
    run_folder="/store/runs/r/1",
    job_folder="/store/runs/r/1/job",
    nodes=16,
    gpus_per_node=8,
    image="registry/img@sha256:0",
)


def task_of(
    recipe: Recipe, *, nodes: int, steps: int | None = 50, config: ModelConfig | None = None, **place: Any
) -> EngineTask:
    """Return the task of a recipe whose layout is written out."""
    config = config or architecture(recipe)
    assert config is not None
    layout = recipe.layout if isinstance(recipe.layout, Layout) else Layout.model_validate({})
    where = replace(PLACE, nodes=nodes, **place)
    return EngineTask(
        recipe=recipe,
        config=config,
        layout=resolve_layout(layout, config, world_size=nodes * where.gpus_per_node),
        length=steps,
        site=where,
    )


def written(text: str, overrides: Iterable[str] = ()) -> Recipe:
    """Return the recipe of a text with some keys changed."""
    return parse_recipe(text, overrides)


def loaded(imported: ImportedConfig, overrides: Iterable[str] = ()) -> Recipe:
    """Return the recipe that an imported file became, as its text is read."""
    return parse_recipe(recipe_text(imported, "imported.yaml"), overrides)


def shown(launch: EngineLaunch) -> str:
    """Return all of a launch as text, for golden files."""
    plain = {
        "program": launch.program,
        "arguments": list(launch.arguments),
        "late_arguments": dict(launch.late_arguments),
        **({"node_arguments": list(launch.node_arguments)} if launch.node_arguments else {}),
        "environment": dict(launch.environment),
        "wanted": list(launch.inputs),
        "notes": list(launch.notes),
    }
    parts = [yaml.safe_dump(plain, sort_keys=False, width=1000)]
    parts += [f"=== {name}\n{text}" for name, text in launch.files.items()]
    return "\n".join(parts)
