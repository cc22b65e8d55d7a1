"""Everything a recipe's training needs, made or found: base weights, tokenizer, tokens (verified), index.

Each is skipped when its artefact is already proven; no GPU is held meanwhile.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from trainshed.checkpoints.base import BaseWeights, fetch_base, find_base
from trainshed.checkpoints.prove.verdict import read_verdict, refuse_failed_verdict
from trainshed.data.artefacts import DataArtefacts
from trainshed.data.chat.inspect import ChatInspection
from trainshed.data.order import DataOrder, PhaseOrders, run_orders, run_steps
from trainshed.data.prompts import ValidationPrompts, encode_prompts
from trainshed.data.sampling.packing import PackedDataset
from trainshed.data.sampling.sources import TokenDataset
from trainshed.data.staging import StagedRun, stage_run
from trainshed.data.tokenize.added_tokens import added_token_problems, with_added_tokens
from trainshed.data.tokenize.tokenizer import Tokenizer, load_tokenizer
from trainshed.data.tokens.token_source import (
    VALIDATION_SET,
    RunTokens,
    StartedRun,
    TokenSource,
    phase_prefix,
    refuse_changed_tokens,
)
from trainshed.errors import InputError, NotFound, RecipeError, TokenizerError, TrainshedError
from trainshed.models.families import read_hf_config
from trainshed.models.parameters import AddedRows
from trainshed.observe.stages import UNRECORDED, StageRecorder
from trainshed.recipe import Cluster, ModelConfig, Recipe, fit_problems, load_cluster, load_recipe, to_yaml
from trainshed.recipe.data import SourceKeys
from trainshed.recipe.load import chosen_run_id
from trainshed.recipe.section import Problem
from trainshed.recipe.validation import recipe_error
from trainshed.reporting import SILENT, Reporter
from trainshed.run_folder import (
    ANSWERS_TOKENIZER,
    PREPARED_FILE,
    RECIPE_FILE,
    artefacts_of,
    read_prepared,
    run_path,
    store_of,
)
from trainshed.storage import LocalStore, StoreOptions, join, open_store, parse
from trainshed.storage.attempts import newest_attempt
from trainshed.storage.manifest import MANIFEST
from trainshed.workflow.resolve import resolve
from trainshed.workflow.run_checkpoints import refuse_other_checkpoints
from trainshed.workflow.runnable import check_runnable, check_store

PREPARED_SCHEMA = "trainshed.prepared/2"
"""Since 2 the sources say what their token files were; older ones are read as well, and those without `steps`."""


@dataclass(frozen=True)
class PreparedRun:
    """A run whose data and base weights are ready: what training starts from."""

    recipe: Recipe
    id: str
    folder: Path
    data: RunTokens
    steps: int
    order: DataOrder
    validations: Mapping[str, DataOrder]
    tokenizer: Tokenizer | None
    base: BaseWeights | None
    prompts: ValidationPrompts | None = None
    added: AddedRows | None = None
    """The rows of the tokens of `model.added_tokens`."""
    phases: tuple[PhaseOrders, ...] = ()
    """The phases of `train.phases`; `order` and `validations` are those of the first."""

    def order_at(self, step: int) -> DataOrder:
        """Return the order that a step of the run (from 0) reads."""
        return next((phase.train for phase in self.phases if step < phase.span.end), self.order)

    @property
    def sources(self) -> tuple[TokenSource, ...]:
        """The sources of training."""
        return self.data.sources

    @property
    def config(self) -> ModelConfig:
        """The architecture; the recipe holds that of the base, which may have fewer rows, and no `train.mtp`."""
        assert self.recipe.model.config is not None, "preparing writes it out"
        config = self.recipe.trained_architecture(self.recipe.model.config)
        return config if self.added is None else self.added.grown(config)


def prepare_run(
    recipe: Recipe,
    cluster: Cluster | None = None,
    *,
    id: str | None = None,
    workers: int | None = None,
    reporter: Reporter = SILENT,
    stages: StageRecorder = UNRECORDED,
) -> PreparedRun:
    """Make everything a recipe's training needs and does not have yet; no GPU is held meanwhile.

    `stages` records how fetching, preparing and indexing went.
    """
    cluster = cluster or load_cluster()
    options = store_options(cluster)
    store = store_root(recipe, cluster)
    resolved = resolve(recipe, options)
    name = chosen_run_id(resolved, id)
    tokenizer = check_fit(resolved, options)
    folder = run_path(store, resolved.name, name)
    base = None
    if resolved.model.from_:
        if not (folder / RECIPE_FILE).is_file():  # so that the run is found while its weights are fetched
            save_recipe(resolved, folder)
        with stages.stage("fetch") as outcome:
            base = fetch_weights(resolved, store, options, reporter, tokenizer)
            assert base is not None
            outcome.skipped = base.reused
            outcome.what = f"{resolved.model.from_} {'was already there' if base.reused else 'fetched and proven'}"
            resolved = _with_architecture(resolved, base, tokenizer)
    refuse_other_checkpoints(resolved, folder, options)
    began = begun_run(folder)
    artefacts = DataArtefacts(
        resolved, store, tokenizer=tokenizer, workers=workers, options=options, started_run=began, reporter=reporter
    )
    save_recipe(resolved, folder)
    run = _prepared_run(resolved, name, folder, artefacts, base, began, build=True, reporter=reporter, stages=stages)
    run = replace(run, added=added_rows(resolved, tokenizer))
    _save_prepared(run)
    return run


def check_fit(recipe: Recipe, options: StoreOptions | None = None) -> Tokenizer | None:
    """Refuse, before anything is fetched or made, a model that is too small for the recipe; returns its tokenizer.

    The architecture may be that of base weights whose config.json can be read alone; other weights bring it later. The
    tokenizer is the one at the recipe's address, without `model.added_tokens`.
    """
    tokenizer = None
    if isinstance(recipe.tokenizer, str) and not recipe.data.synthetic:
        tokenizer = load_tokenizer(recipe.tokenizer, options)
    config = recipe.model.config or _announced_architecture(recipe, options)
    if config is not None:
        refuse_small_model(recipe, config, tokenizer)
    if tokenizer is not None:  # one that is learned here is byte-level
        refuse_tokenizer_of_export(recipe, tokenizer)
    # Raises where one is too long; a tokenizer that is learned comes later.
    encode_prompts(recipe, _with_added_tokens(recipe, tokenizer), options)
    return tokenizer


def refuse_tokenizer_of_export(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that a GGUF file cannot carry, before the model is trained."""
    if recipe.export is None or recipe.export.format != "gguf":
        return
    from trainshed.checkpoints.gguf.tokenizer_keys import gguf_vocabulary

    gguf_vocabulary({"tokenizer.json": tokenizer.json, "tokenizer_config.json": b"{}"}, tokenizer.vocab_size)


def _with_added_tokens(recipe: Recipe, tokenizer: Tokenizer | None) -> Tokenizer | None:
    """Return the tokenizer with the tokens that the recipe adds; raises where they are not further tokens of it."""
    texts = recipe.model.added_tokens
    if tokenizer is None or not texts:
        return tokenizer
    if problems := list(added_token_problems(tokenizer, texts)):
        raise recipe_error(problems, recipe.places)
    try:
        return with_added_tokens(tokenizer, texts)
    except TokenizerError as error:
        raise RecipeError(error.what, where=recipe.where("model.added_tokens"), hint=error.hint) from None


def added_rows(recipe: Recipe, tokenizer: Tokenizer | None) -> AddedRows | None:
    """Return the rows of the tokens that a recipe with an architecture adds to its `tokenizer`; None without any."""
    texts, config = recipe.model.added_tokens, recipe.model.config
    if not texts:
        return None
    assert tokenizer is not None, "the schema asks for a tokenizer"
    assert config is not None, "the base weights have brought it"
    return AddedRows(tokenizer.vocab_size, len(texts), config.vocab_size)


def refuse_small_model(recipe: Recipe, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """Raise where an architecture has too few rows or positions for what the recipe asks of it."""
    problems = list(fit_problems(recipe, config))
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        like = f"`tokenizer: {recipe.model.from_}`" if recipe.model.from_ else "a smaller tokenizer"
        problems.append(
            Problem(
                ("tokenizer",),
                f"it has {tokenizer.vocab_size:,} tokens, more than the {config.vocab_size:,} rows of the model's "
                "embedding",
                f"write {like}, or a model with `vocab_size: {tokenizer.vocab_size}` or more",
            )
        )
    if problems:
        raise recipe_error(problems, recipe.places)


def _announced_architecture(recipe: Recipe, options: StoreOptions | None) -> ModelConfig | None:
    if recipe.model.from_ is None:
        return None
    store, path = open_store(parse(recipe.model.from_), options)
    place = join(path, "config.json")
    if store.head(place) is None:
        return None
    try:
        body = orjson.loads(store.read(place))
    except orjson.JSONDecodeError:
        return None  # opening the weights says what is wrong with it
    return read_hf_config(body, join(store.url, place))


def check_fit_before_submit(recipe: Recipe, config: ModelConfig, options: StoreOptions, *, offline: bool) -> None:
    """As `check_fit`, for a job that runs elsewhere: a tokenizer that only nodes reach is left to their first stage."""
    tokenizer = None
    address = recipe.tokenizer
    if isinstance(address, str) and not recipe.data.synthetic and ("://" not in address or not offline):
        with suppress(TrainshedError):
            tokenizer = load_tokenizer(address, options)
    refuse_small_model(recipe, config, tokenizer)
    _with_added_tokens(recipe, tokenizer)


def fetch_weights(
    recipe: Recipe, store: Path, options: StoreOptions, reporter: Reporter, tokenizer: Tokenizer | None
) -> BaseWeights | None:
    """Fetch and prove the base weights of a resolved recipe, and measure their loss; None where it has none.

    The loss is that of the weights with the rows of added tokens, whose numbers follow those of the `tokenizer`.
    """
    if not recipe.model.from_:
        return None
    base = fetch_base(
        recipe.model.from_,
        artefacts_of(store),
        config=recipe.model.config,
        options=options,
        reporter=reporter,
        accept=partial(_check_verdict, recipe, reporter),
    )
    recipe = _with_architecture(recipe, base, tokenizer)
    _measure_base(base, recipe, added_rows(recipe, tokenizer), reporter)
    return base


def begun_run(folder: Path) -> StartedRun | None:
    """Return the data that the run of a folder began with; None where it has had no attempt yet."""
    if not (folder / PREPARED_FILE).is_file() or not newest_attempt(LocalStore(folder), ""):
        return None
    body = read_prepared((folder / PREPARED_FILE).read_bytes(), folder / PREPARED_FILE)
    return StartedRun(f"{folder.parent.name}/{folder.name}", RunTokens.from_plain(body["data"]))


def tokenise_part(
    recipe: Recipe, cluster: Cluster, run: Path, part: int, parts: int, reporter: Reporter = SILENT
) -> int:
    """Tokenise one part of the shards of a run, so that many machines share the work; returns how many it made."""
    store, options = store_root(recipe, cluster), store_options(cluster)
    resolved = resolve(recipe, options)
    tokenizer, began = check_fit(resolved, options), begun_run(run)
    artefacts = DataArtefacts(
        resolved, store, tokenizer=tokenizer, options=options, started_run=began, reporter=reporter
    )
    sources = _named_sources(resolved)
    artefacts.refuse_changed_text(sources)
    return sum(artefacts.make_shards(source, part, parts) for source in sources.values())


def inspect_recipe(
    recipe: Recipe, cluster: Cluster, *, rows: int, samples: int, reporter: Reporter = SILENT
) -> list[ChatInspection]:
    """Tokenize the first rows of each source of conversations and describe them; no artefact is made."""
    if recipe.sample_format == "text":
        raise InputError(
            "this recipe reads text, in which all tokens are learned",
            where=recipe.where("train.mode"),
            hint="`trainshed data inspect PREFIX` shows its tokens, `trainshed data batch RECIPE` what a step reads",
        )
    options = store_options(cluster)
    resolved, store = resolve(recipe, options), store_root(recipe, cluster)
    tokenizer = load_tokenizer(resolved.tokenizer, options) if isinstance(resolved.tokenizer, str) else None
    _with_added_tokens(resolved, tokenizer)  # raises where they are not further tokens of it
    artefacts = DataArtefacts(resolved, store, make=False, tokenizer=tokenizer, options=options, reporter=reporter)
    return [
        artefacts.inspect(source, label, rows=rows, samples=samples)
        for label, source in _named_sources(resolved).items()
    ]


def _named_sources(recipe: Recipe) -> dict[str, SourceKeys]:
    """Every source that has documents of its own by its name in the run: those of training first."""
    named: dict[str, SourceKeys] = {f"source-{number}": source for number, source in enumerate(recipe.data.train)}
    if recipe.data.validation is not None and recipe.data.validation.kind is not None:
        named["validation"] = recipe.data.validation
    for name, one_set in recipe.data.named_validations.items():
        if one_set.kind is not None:
            named[f"{VALIDATION_SET}{name}"] = one_set
    for number, phase in enumerate(recipe.train.phases or ()):
        for index, source in enumerate(phase.data.train if phase.data is not None else ()):
            named[f"{phase_prefix(number)}source-{index}"] = source
    return named


def _prepared_source(artefacts: DataArtefacts, source: SourceKeys, name: str) -> TokenSource:
    """Make or find the tokens of a source. What keys its shuffle is its place in its own section, not the phase."""
    prefix, _, label = name.rpartition("/")
    if f"{prefix}/" == VALIDATION_SET:
        return replace(artefacts.source(source, "validation"), name=source.name or label)
    return artefacts.source(source, label)


def _with_architecture(recipe: Recipe, base: BaseWeights, tokenizer: Tokenizer | None) -> Recipe:
    """Write out the architecture that base weights bring, where the recipe leaves it to them and it is large enough."""
    if recipe.model.config is not None:
        return recipe
    with base.open() as weights:
        config = weights.config.with_mtp_layers(0)  # the run has those of `train.mtp`
    refuse_small_model(recipe, config, tokenizer)
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"config": config})})


def _measure_base(base: BaseWeights, recipe: Recipe, added: AddedRows | None, reporter: Reporter) -> None:
    """Measure the loss of base weights on the probe batch; every run compares itself with it before step 0.

    A loss that a conversion measured is taken over, so that the run is compared with it.
    """
    from trainshed.checkpoints.prove.probe import read_probe, write_probe

    if read_probe(base.folder, added) is not None:
        return
    config = recipe.model.config
    assert config is not None
    verdict = read_verdict(base.files) if added is None else None
    probe = verdict.probe if verdict is not None else None
    if probe is None or not probe.is_current(config.vocab_size):
        from trainshed.checkpoints.prove.layerwise import measure_probe

        with base.open(config if added is None else added.grown(config), added) as weights:
            probe = measure_probe(weights, reporter)
    if probe is None:
        reporter.warn(f"the loss of the base weights was not measured: they know only {config.max_positions} positions")
        return
    write_probe(base.folder, probe, added)
    tokens = "" if added is None else f" with {added.count} added tokens"
    reporter.note(f"base weights{tokens}: loss {probe.loss:.4f} on the probe batch")


def _check_verdict(recipe: Recipe, reporter: Reporter, files: Path) -> None:
    """Refuse base weights whose conversion was not proven, unless the recipe says to go on."""
    try:
        refuse_failed_verdict(files, where=recipe.where("model.from"))
    except InputError as error:
        if recipe.model.verdict != "ignore":
            raise
        reporter.warn(f"{error.what}; the recipe says `model.verdict: ignore`")


def save_recipe(recipe: Recipe, folder: Path) -> None:
    """Save the resolved recipe with its run, and beside it its plugins and the files it names by relative paths."""
    store = LocalStore(folder)
    store.put(RECIPE_FILE, to_yaml(recipe).encode())
    scripts = (source.script for _, source in recipe.sources())
    questions = recipe.eval.questions if recipe.eval is not None else None
    for script in {name for name in (*scripts, recipe.data.template_file, questions) if name}:
        if not Path(script).is_absolute() and ".." not in Path(script).parts and (recipe.folder / script).is_file():
            store.put(script, (recipe.folder / script).read_bytes())
            shutil.copymode(recipe.folder / script, folder / script)
    for plugin in recipe.plugin_sources:
        for name, source in plugin.read().items():
            store.put(name, source)


def _save_prepared(run: PreparedRun) -> None:
    """Save where the run's artefacts are: a thousand ranks must not each look for them again."""
    body = {
        "schema": PREPARED_SCHEMA,
        "data": run.data.to_plain(),
        "steps": run.steps,
        "base": None if run.base is None else str(run.base.folder.absolute()),
        "prompts": None if run.prompts is None else run.prompts.to_plain(),
    }
    if run.added is not None:
        body["added"] = asdict(run.added)
    if run.prompts is not None and run.tokenizer is not None:
        LocalStore(run.folder).put(ANSWERS_TOKENIZER, run.tokenizer.json)
    LocalStore(run.folder).put(PREPARED_FILE, orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n")


def open_run(recipe: Recipe, cluster: Cluster | None = None, *, id: str | None = None) -> PreparedRun:
    """Open what `prepare_run` made; no artefact is made or changed."""
    cluster = cluster or load_cluster()
    options = store_options(cluster)
    store = store_root(recipe, cluster)
    resolved = resolve(recipe, options)
    name = chosen_run_id(resolved, id)
    tokenizer = check_fit(resolved, options)
    base = None
    if resolved.model.from_:
        base = find_base(resolved.model.from_, artefacts_of(store), options=options)
        _check_verdict(resolved, SILENT, base.files)
        resolved = _with_architecture(resolved, base, tokenizer)
    folder = run_path(store, resolved.name, name)
    began = begun_run(folder)
    artefacts = DataArtefacts(resolved, store, make=False, tokenizer=tokenizer, options=options, started_run=began)
    run = _prepared_run(resolved, name, folder, artefacts, base, began, build=False, reporter=SILENT)
    return replace(run, added=added_rows(resolved, tokenizer))


def open_run_folder(
    folder: Path, cluster: Cluster | None = None, *, attempt: int | None = None, reporter: Reporter = SILENT
) -> PreparedRun:
    """Open a run by its folder alone, as its ranks do: nothing is looked for, nothing made.

    With the cluster that it runs on, what could not train there is refused. With an attempt, tokens are copied to this
    node first where `data.stage` says so.
    """
    recipe, body = _read_prepared(folder)
    if cluster is not None:
        check_runnable(recipe, cluster)
    data = RunTokens.from_plain(body["data"])
    base = BaseWeights.from_folder(Path(body["base"])) if body["base"] else None
    options = store_options(cluster) if cluster is not None else None
    indexes = artefacts_of(store_of(folder)) / "index"
    read_data, read_indexes = data, indexes
    if recipe.data.stage != "direct" and cluster is not None and attempt is not None:
        staged = _stage_tokens(
            recipe, cluster, data, indexes, f"{_digest(str(folder.absolute()))}-{attempt:04d}", reporter
        )
        read_data, read_indexes = staged.data, staged.indexes
    orders = run_orders(recipe, read_data, read_indexes, build=False, options=options)
    prompts = ValidationPrompts.from_plain(body["prompts"]) if body.get("prompts") else None
    added = AddedRows(**body["added"]) if body.get("added") else None
    return PreparedRun(
        recipe,
        folder.name,
        folder,
        data,
        orders.steps,
        orders.train,
        orders.validations,
        None,
        base,
        prompts,
        added,
        orders.phases,
    )


def _stage_tokens(
    recipe: Recipe, cluster: Cluster, data: RunTokens, indexes: Path, run: str, reporter: Reporter
) -> StagedRun:
    options, in_memory = store_options(cluster), recipe.data.stage == "shm"
    disk = "/dev/shm" if in_memory else cluster.node_disk
    assert disk is not None, "check_runnable refuses a cluster without one"

    def index_folders() -> list[Path]:
        orders = run_orders(recipe, data, indexes, build=False, options=options)
        all_orders = [order for part in (orders, *orders.phases) for order in (part.train, *part.validations.values())]
        sources = [source for order in all_orders for source in order.sources]
        datasets = [source for source in sources if isinstance(source, TokenDataset | PackedDataset)]
        return list(dict.fromkeys(dataset.index.folder for dataset in datasets))

    return stage_run(data, index_folders, Path(disk), run, in_memory=in_memory, options=options, reporter=reporter)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def prepared_steps(folder: Path) -> int:
    """Return how many steps a prepared run has, by its own files; no token file is opened."""
    recipe, body = _read_prepared(folder)
    if "steps" in body:
        return body["steps"]
    return run_steps(recipe, RunTokens.from_plain(body["data"]), artefacts_of(store_of(folder)) / "index")


def _read_prepared(folder: Path) -> tuple[Recipe, dict[str, Any]]:
    path = folder / PREPARED_FILE
    if not path.is_file():
        raise NotFound("this run is not prepared", where=str(folder), hint="run `trainshed run RECIPE` first")
    return load_recipe(str(folder / RECIPE_FILE)), read_prepared(path.read_bytes(), path)


def save_run(run: PreparedRun) -> None:
    """Save a run's recipe and where its artefacts are, for its ranks; `train` may have changed its length."""
    save_recipe(run.recipe, run.folder)
    _save_prepared(run)


def store_options(cluster: Cluster) -> StoreOptions:
    """What a cluster file says about reaching stores, as the storage room wants it."""
    return StoreOptions.from_mapping({key: endpoint.model_dump() for key, endpoint in cluster.stores.items()})


def store_root(recipe: Recipe, cluster: Cluster) -> Path:
    """Return where a run keeps what it makes; every stage asks, so this is also where other targets are refused."""
    cluster.check_runs_here()
    check_store(recipe, cluster)
    return Path(str(parse(recipe.store or cluster.store_root)))


def _prepared_run(
    recipe: Recipe,
    name: str,
    folder: Path,
    artefacts: DataArtefacts,
    base: BaseWeights | None,
    began: StartedRun | None,
    *,
    build: bool,
    reporter: Reporter,
    stages: StageRecorder = UNRECORDED,
) -> PreparedRun:
    data = RunTokens(())
    if not recipe.data.synthetic:
        sources = _named_sources(recipe)
        with stages.stage("prepare") as outcome:
            artefacts.refuse_changed_text(sources)
            made = {name: _prepared_source(artefacts, source, name) for name, source in sources.items()}
            outcome.skipped = all(source.reused for source in made.values())
            outcome.what = _tokens_text(list(made.values()))
            data = RunTokens.of(made)
            if began is not None:
                refuse_changed_tokens(began, data)
    with stages.stage("index") as outcome:
        indexes = _index_versions(artefacts.indexes)
        orders = run_orders(recipe, data, artefacts.indexes, build=build, options=artefacts.options, reporter=reporter)
        outcome.skipped = _index_versions(artefacts.indexes) == indexes
        there = ", whose index was already there" if outcome.skipped and data.sources else ""
        outcome.what = f"order of {orders.steps:,} steps{there}"
    tokenizer = artefacts.tokenizer()
    prompts = encode_prompts(recipe, tokenizer, artefacts.options)
    return PreparedRun(
        recipe,
        name,
        folder,
        data,
        orders.steps,
        orders.train,
        orders.validations,
        tokenizer,
        base,
        prompts,
        phases=orders.phases,
    )


def _tokens_text(sources: Sequence[TokenSource]) -> str:
    """Say how many tokens there are, and how many of the sources were prepared before."""
    tokens = sum(source.tokens for source in sources)
    reused = sum(source.reused for source in sources)
    count = f"{len(sources)} source{'' if len(sources) == 1 else 's'}"
    there = "" if not reused else ", already there" if reused == len(sources) else f", {reused} already there"
    return f"{tokens:,} tokens of {count}{there}"


def _index_versions(indexes: Path) -> dict[str, int]:
    """The indexes that are there, each with when it was last added to."""
    return {manifest.parent.name: manifest.stat().st_mtime_ns for manifest in indexes.glob(f"*/{MANIFEST}")}
