"""What a run's folder says about the training besides its events: model, batch, length, precision, GPUs.

The recipe says what was trained. Where it ran is in the `start` event of our own engine; for another engine, the stage
that prepared the run has left it in `engine/run.json` (`EngineRun`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import orjson

from trainshed.catalog import architecture
from trainshed.catalog.gpus import gpu, gpu_by_device_name, gpu_names
from trainshed.errors import NotFound, TrainshedError
from trainshed.observe.engine_logs.program_reader import LogFacts
from trainshed.observe.metrics import TrainingFacts
from trainshed.plugins import plugins_not_run
from trainshed.recipe import ModelConfig, Recipe, parse_recipe
from trainshed.run_folder import ENGINE_RUN_FILE, RECIPE_FILE
from trainshed.storage import Store, join, parse


@dataclass(frozen=True)
class EngineRun:
    """Where a foreign engine runs, and which of its ranks prints the losses."""

    engine: str
    layout: str
    nodes: int
    ranks_per_node: int
    losses_rank: int
    gpu: str | None
    """In the catalog; None where the cluster file names no machine that it has."""
    config: Mapping[str, Any] | None = None
    """The architecture, as a recipe writes it."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def architecture(self) -> ModelConfig | None:
        """The model's; None where it is not known, or only to a newer version."""
        try:
            return None if self.config is None else ModelConfig.model_validate(self.config)
        except ValueError:
            return None

    def to_bytes(self) -> bytes:
        """Return its JSON."""
        return orjson.dumps({"schema": ENGINE_RUN_SCHEMA, **asdict(self)}, option=orjson.OPT_INDENT_2) + b"\n"

    @classmethod
    def read(cls, store: Store, folder: str) -> EngineRun | None:
        """Read it from a run's folder; None where no foreign engine runs there."""
        try:
            body = orjson.loads(store.read(_path(folder, ENGINE_RUN_FILE)))
        except (NotFound, orjson.JSONDecodeError):
            return None
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in body.items() if key in known})


ENGINE_RUN_SCHEMA = "trainshed.engine_run/1"


def read_run_recipe(store: Store, folder: str) -> Recipe | None:
    """Return the recipe of a run as it was resolved; None where it has none, or one that cannot be read here."""
    place = parse(join(store.url, folder))
    beside = Path(str(place)) if place.scheme == "file" else None
    try:
        with plugins_not_run():
            text = store.read(_path(folder, RECIPE_FILE))
            return parse_recipe(text, source=join(str(place), RECIPE_FILE), folder=beside)
    except TrainshedError:
        return None


def run_facts(store: Store, folder: str, events: Iterable[Mapping[str, Any]] = ()) -> TrainingFacts:
    """Return what a run's folder says; `events` are those of the run. Of a run in phases they are those of its last."""
    recipe, events = read_run_recipe(store, folder), list(events)
    facts = TrainingFacts() if recipe is None else recipe_facts(recipe)
    if phases := [event for event in events if event["kind"] == "train_phase"]:
        shape = {key: phases[-1][key] for key in ("sequence_length", "global_batch")}
        facts = replace(facts, **shape)
    starts = [event for event in events if event["kind"] == "start"]
    if starts and starts[-1].get("engine") is None:
        device = starts[-1]["device"]
        return replace(facts, gpus=starts[-1]["world_size"], device=device, gpu=gpu_by_device_name(device))
    placed = EngineRun.read(store, folder)
    return facts if placed is None else engine_facts(facts, placed)


def engine_facts(facts: TrainingFacts, placed: EngineRun) -> TrainingFacts:
    """Return the facts, with where a foreign engine runs."""
    known = gpu(placed.gpu) if placed.gpu in gpu_names() else None
    config = facts.config or placed.architecture
    length = facts.sequence_length or (config.max_positions if config is not None else None)
    return replace(facts, gpus=placed.world_size, gpu=known, device=placed.gpu, config=config, sequence_length=length)


def recipe_facts(recipe: Recipe) -> TrainingFacts:
    """Return what a resolved recipe says."""
    config, train, layout = _config(recipe), recipe.train, recipe.layout
    return TrainingFacts(
        model=recipe.model.preset or recipe.name,
        config=config,
        sequence_length=recipe.data.sequence_length or (config.max_positions if config is not None else None),
        global_batch=train.global_batch,
        precision=train.precision,
        lora=train.lora,
        groups=train.optimizer.groups or (),
        reference=train.mode == "dpo",
        recompute=None if isinstance(layout, str) else layout.recompute,
        engine=recipe.engine.name,
        documents_apart=bool(recipe.document_mask),
    )


def _config(recipe: Recipe) -> ModelConfig | None:
    """The architecture; a resolved recipe has it in full, unless only the weights say it."""
    try:
        config = architecture(recipe)
    except TrainshedError:
        return None
    return None if config is None else recipe.trained_architecture(config)


def with_log_facts(facts: TrainingFacts, log: LogFacts) -> TrainingFacts:
    """Return the facts, with what a log says where nothing else does."""
    return replace(
        facts,
        global_batch=facts.global_batch or log.global_batch,
        sequence_length=facts.sequence_length or log.sequence_length,
        gpus=facts.gpus or log.world_size,
        precision=facts.precision or log.precision,
    )


def _path(folder: str, name: str) -> str:
    return f"{folder.strip('/')}/{name}" if folder.strip("/") else name
