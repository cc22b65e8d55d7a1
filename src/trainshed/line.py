"""The line: a recipe's stages in order, each skipped when its artefact is already proven.

So far: fetch (scripts), tokenizer, prepare (tokens, verified), index. Training and what follows join here.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from trainshed.catalog.models import architecture
from trainshed.data.artefacts import DataArtefacts, PreparedSource
from trainshed.data.encode.tokenizer import Tokenizer
from trainshed.data.order import DataOrder
from trainshed.data.sampling.build_order import TokenFiles, build_order, open_order
from trainshed.data.sampling.schedule import BatchSchedule, RampUp, SkipList
from trainshed.data.sampling.synthetic import SyntheticSource
from trainshed.errors import InputError
from trainshed.recipe import Cluster, Recipe, load_cluster, run_id, to_yaml
from trainshed.recipe.data import SourceKeys
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import LocalStore, StoreOptions, join, open_store, parse

AnySource = TypeVar("AnySource", bound=SourceKeys)


@dataclass(frozen=True)
class PreparedRun:
    """A run whose data stands ready: what `trainshed run` reports, and what training starts from."""

    recipe: Recipe
    id: str
    folder: Path
    sources: list[PreparedSource]
    steps: int
    order: DataOrder
    validation: DataOrder | None
    tokenizer: Tokenizer | None


def resolve(recipe: Recipe, options: StoreOptions | None = None) -> Recipe:
    """Write out what the recipe names: the preset's architecture, and the commit behind every Hub address."""
    config = architecture(recipe)
    model = recipe.model
    if config is not None:
        model = model.model_copy(update={"config": config, "preset": None})
    if model.from_:
        model = model.model_copy(update={"from_": _pinned(model.from_, options)})
    tokenizer = _pinned(recipe.tokenizer, options) if isinstance(recipe.tokenizer, str) else recipe.tokenizer
    train = tuple(_pinned_source(source, options) for source in recipe.data.train)
    validation = recipe.data.validation and _pinned_source(recipe.data.validation, options)
    data = recipe.data.model_copy(update={"train": train, "validation": validation})
    return recipe.model_copy(update={"model": model, "tokenizer": tokenizer, "data": data})


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


def run_line(
    recipe: Recipe,
    cluster: Cluster | None = None,
    *,
    id: str | None = None,
    workers: int | None = None,
    reporter: Reporter = SILENT,
) -> PreparedRun:
    """Carry a recipe as far as the line goes, making what is missing."""
    cluster = cluster or load_cluster()
    options = store_options(cluster)
    store = _store_root(recipe, cluster)
    resolved = resolve(recipe, options)
    name = id or run_id(resolved)
    artefacts = DataArtefacts(resolved, store, workers=workers, options=options, reporter=reporter)
    folder = store / "runs" / resolved.name / name
    _keep_recipe(resolved, folder)
    return _prepared(resolved, name, folder, artefacts, build=True, reporter=reporter)


def _keep_recipe(recipe: Recipe, folder: Path) -> None:
    """Save the resolved recipe with its run, and beside it the scripts it names by relative paths."""
    store = LocalStore(folder)
    store.put("recipe.yaml", to_yaml(recipe).encode())
    sources = [*recipe.data.train, *([recipe.data.validation] if recipe.data.validation else [])]
    for script in {source.script for source in sources if source.script}:
        if not Path(script).is_absolute() and ".." not in Path(script).parts and (recipe.folder / script).is_file():
            store.put(script, (recipe.folder / script).read_bytes())
            shutil.copymode(recipe.folder / script, folder / script)


def open_run(recipe: Recipe, cluster: Cluster | None = None) -> PreparedRun:
    """Open what `run_line` made; nothing is made or changed."""
    cluster = cluster or load_cluster()
    options = store_options(cluster)
    store = _store_root(recipe, cluster)
    resolved = resolve(recipe, options)
    name = run_id(resolved)
    artefacts = DataArtefacts(resolved, store, make=False, options=options)
    return _prepared(resolved, name, store / "runs" / resolved.name / name, artefacts, build=False, reporter=SILENT)


def store_options(cluster: Cluster) -> StoreOptions:
    """What a cluster file says about reaching stores, as the storage room wants it."""
    return StoreOptions.from_mapping({key: endpoint.model_dump() for key, endpoint in cluster.stores.items()})


def _store_root(recipe: Recipe, cluster: Cluster) -> Path:
    root = parse(recipe.store or cluster.store_root)
    if root.scheme != "file":
        raise InputError(
            "the line keeps its store on a local or mounted disk for now",
            where=str(root),
            hint="write a path; `trainshed data prepare --output s3://…` writes tokens to a bucket",
        )
    return Path(str(root))


def _prepared(
    recipe: Recipe, name: str, folder: Path, artefacts: DataArtefacts, *, build: bool, reporter: Reporter
) -> PreparedRun:
    data, train = recipe.data, recipe.train
    ramp = train.batch_ramp
    schedule = BatchSchedule(
        train.global_batch, RampUp(ramp.start, ramp.increment, ramp.samples) if ramp is not None else None
    )
    if data.synthetic:
        order = DataOrder([_synthetic(recipe)], schedule)
        steps = _steps(recipe, schedule, order.sequence_length, 0)
        return PreparedRun(recipe, name, folder, [], steps, order, None, artefacts.tokenizer())
    sources = [artefacts.source(source, f"source-{number}", source.weight) for number, source in enumerate(data.train)]
    length = data.sequence_length
    assert length is not None, "the schema asks for it wherever data is not synthetic"
    train_share = data.split.train if data.split else 1.0
    steps = _steps(recipe, schedule, length, int(sum(source.tokens for source in sources) * train_share))
    order = _order(
        sources, (0.0, train_share), artefacts, recipe, schedule, steps, SkipList(data.skip), build, reporter
    )
    validation = None
    if data.validation is not None:
        if data.validation.kind is not None:
            measured, share = [artefacts.source(data.validation, "validation")], (0.0, 1.0)
        else:
            assert data.split is not None, "the schema asks for a split or a source"
            measured, share = sources, (train_share, train_share + data.split.validation)
        plain = BatchSchedule(train.global_batch)
        batches = data.validation.batches
        measured = [replace(source, name=f"{source.name} (validation)") for source in measured]
        validation = _order(measured, share, artefacts, recipe, plain, batches, SkipList(), build, reporter)
    return PreparedRun(recipe, name, folder, sources, steps, order, validation, artefacts.tokenizer())


def _order(
    sources: list[PreparedSource],
    share: tuple[float, float],
    artefacts: DataArtefacts,
    recipe: Recipe,
    schedule: BatchSchedule,
    steps: int,
    skip: SkipList,
    build: bool,
    reporter: Reporter,
) -> DataOrder:
    files = [
        TokenFiles(
            source.label,
            source.prefixes,
            source.weight,
            (share[0], min(share[1], 1.0)),
            content=source.content,
            name=source.name,
        )
        for source in sources
    ]
    length = recipe.data.sequence_length or 0
    seed = recipe.data.seed
    if not build:
        return open_order(
            files, indexes=artefacts.indexes, seed=seed, sequence_length=length, schedule=schedule, skip=skip
        )
    return build_order(
        files,
        indexes=artefacts.indexes,
        seed=seed,
        sequence_length=length,
        schedule=schedule,
        steps=steps,
        skip=skip,
        reporter=reporter,
    )


def _synthetic(recipe: Recipe) -> SyntheticSource:
    config = recipe.model.config
    if config is None:
        raise InputError(
            "synthetic data needs the model's vocabulary",
            where=recipe.where("model"),
            hint="write `preset` or `config` under `model`",
        )
    length = recipe.data.sequence_length or config.max_positions
    return SyntheticSource(vocab_size=config.vocab_size, sequence_length=length, seed=recipe.data.seed)


def _steps(recipe: Recipe, schedule: BatchSchedule, sequence_length: int, epoch_tokens: int) -> int:
    """The length of the run in steps, whichever way the recipe says it."""
    train = recipe.train
    if train.steps is not None:
        return train.steps
    tokens = train.tokens if train.tokens is not None else int((train.epochs or 0) * epoch_tokens)
    return schedule.steps_for(-(-tokens // sequence_length))
