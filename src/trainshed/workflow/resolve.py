"""A recipe as it is stored with its run: the architecture written out, and every address of the Hub with its commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from trainshed.catalog.models import architecture
from trainshed.recipe import Recipe
from trainshed.recipe.data import Source, SourceKeys, ValidationSource
from trainshed.recipe.phases import TrainPhase
from trainshed.storage import StoreOptions, join, open_store, parse

AnySource = TypeVar("AnySource", bound=SourceKeys)


def resolve(recipe: Recipe, options: StoreOptions | None = None, *, pin: bool = True) -> Recipe:
    """Write out what the recipe names: the preset's architecture, and the commit of every Hub address.

    With `pin=False` the Hub is not asked and its addresses stay as they are.
    """
    config = architecture(recipe)
    model = recipe.model
    if config is not None:
        model = model.model_copy(update={"config": config, "preset": None})
    if not pin:
        return recipe.model_copy(update={"model": model})
    if model.from_:
        model = model.model_copy(update={"from_": _pinned(model.from_, options)})
    tokenizer = _pinned(recipe.tokenizer, options) if isinstance(recipe.tokenizer, str) else recipe.tokenizer
    written = recipe.data
    validation: ValidationSource | dict[str, ValidationSource] | None = written.validation and _pinned_source(
        written.validation, options
    )
    if written.named_validations:
        validation = {name: _pinned_source(source, options) for name, source in written.named_validations.items()}
    data = written.model_copy(update={"train": _pinned_sources(written.train, options), "validation_": validation})
    sections: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "data": data}
    if recipe.train.phases is not None:
        phases = tuple(_pinned_phase(phase, options) for phase in recipe.train.phases)
        sections["train"] = recipe.train.model_copy(update={"phases": phases})
    return recipe.model_copy(update=sections)


def _pinned_phase(phase: TrainPhase, options: StoreOptions | None) -> TrainPhase:
    if phase.data is None:
        return phase
    data = phase.data.model_copy(update={"train": _pinned_sources(phase.data.train, options)})
    return phase.model_copy(update={"data": data})


def _pinned_sources(sources: Sequence[Source], options: StoreOptions | None) -> tuple[Source, ...]:
    return tuple(_pinned_source(source, options) for source in sources)


def _pinned_source(source: AnySource, options: StoreOptions | None) -> AnySource:
    if not source.path:
        return source
    return source.model_copy(update={"path": tuple(_pinned(path, options) for path in source.path)})


def _pinned(address: str, options: StoreOptions | None) -> str:
    """A Hub address with its commit; any other address as it is."""
    if not address.startswith("hf://"):
        return address
    store, path = open_store(parse(address), options)
    return join(store.url, path)
