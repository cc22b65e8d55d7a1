"""What a node does in each stage on CPUs: the same functions on every target, one after the other on this machine.

Each stage leaves its artefact and finds it when it is run again. For an engine that is not ours the
stages write the files that it reads, under fixed names in the run's folder; `engines/launch.py` says which names
(`EngineInput`), and nothing here knows an engine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson

from trainshed.catalog import architecture, find_gpu
from trainshed.catalog.machines import find_machine
from trainshed.catalog.table import is_path
from trainshed.checkpoints.base import BaseWeights
from trainshed.checkpoints.foreign import find_damage, list_foreign, newest_torchtune
from trainshed.checkpoints.formats import TargetFormat, detect_format
from trainshed.checkpoints.megatron.retention import LATEST_ITERATION
from trainshed.checkpoints.mirror import FOLLOW_SECONDS, fetch_checkpoints, follow_checkpoints, upload_checkpoints
from trainshed.data.artefacts import DataArtefacts
from trainshed.data.prompts import chat_format
from trainshed.data.tokenize.tokenizer import TOKENIZER_FILES, Tokenizer
from trainshed.data.tokens.token_source import TokenSource
from trainshed.engines.launch import WATCH_FOLDER, losses_rank
from trainshed.errors import CorruptData, InputError, NotFound, TrainshedError
from trainshed.launch.attempt import read_job_plan
from trainshed.launch.image_proof import prove_own_image
from trainshed.launch.job import JobFile
from trainshed.observe.exporters import check_installed
from trainshed.observe.run_facts import EngineRun
from trainshed.observe.stages import StageOutcome, StageRecorder, recorded_stage
from trainshed.observe.watch_node import shipped_files
from trainshed.recipe import Cluster, Export, Recipe, load_cluster, load_recipe, to_plain
from trainshed.redaction import shown_address
from trainshed.reporting import SILENT, Reporter
from trainshed.run_folder import (
    CHECKPOINTS,
    CLUSTER_FILE,
    ENGINE,
    ENGINE_RUN_FILE,
    MEGATRON_CHECKPOINTS,
    RECIPE_FILE,
)
from trainshed.signals import StopSignals, exit_code_of
from trainshed.storage import LocalStore, StoreOptions, copy_tree, join, open_folder, parse
from trainshed.workflow.evaluation.evaluate import check_eval_inputs
from trainshed.workflow.layout import weights_architecture
from trainshed.workflow.prepare import (
    PreparedRun,
    check_fit,
    fetch_weights,
    prepare_run,
    resolve,
    save_recipe,
    store_options,
    store_root,
    tokenise_part,
)
from trainshed.workflow.run_checkpoints import checkpoint_home, refuse_other_checkpoints
from trainshed.workflow.runnable import check_export_installed, check_plugins, check_runnable
from trainshed.workflow.serve import export_address, export_copy_address

CPU_STAGES = ("fetch", "convert", "tokenise", "prepare", "upload", "export", "eval")


def run_stage(stage: str, job_folder: Path, *, part: int = 0, parts: int = 1, reporter: Reporter = SILENT) -> None:
    """Do one stage of a job, from the files that travelled with it."""
    if stage not in CPU_STAGES:
        raise InputError(f"there is no stage `{stage}` on CPUs", hint=f"there are {', '.join(CPU_STAGES)}")
    job = JobFile.read(job_folder)
    recipe = load_recipe(str(job_folder / RECIPE_FILE))
    written = load_cluster(str(job_folder / CLUSTER_FILE))
    check_runnable(recipe, written)
    check_plugins(recipe, job)
    cluster = written.inside()
    run = Path(job.run)
    refuse_other_checkpoints(recipe, run, store_options(cluster))
    if recipe.engine.name == "torch" and job.stages[0].name == stage:
        prove_own_image(job_folder, reporter)
    with StageRecorder(LocalStore(run)).stage(recorded_stage(stage, part, parts)) as outcome:
        _do_stage(stage, recipe, cluster, run, job, (part, parts), reporter, outcome)
        if stage == "prepare" and recipe.engine.name != "torch":
            write_engine_run(job, job_folder, recipe, written, run)


def _do_stage(
    stage: str,
    recipe: Recipe,
    cluster: Cluster,
    run: Path,
    job: JobFile,
    part_of: tuple[int, int],
    reporter: Reporter,
    outcome: StageOutcome,
) -> None:
    if stage == "fetch":
        base = _fetch_base(recipe, cluster, reporter)
        outcome.skipped = base is None or base.reused
        outcome.what = "there are no base weights" if base is None else _fetched_text(recipe, base)
    elif stage == "convert":
        base = _fetch_base(recipe, cluster, reporter)
        if base is None:
            raise InputError("there are no base weights to convert", where=recipe.where("model.from"))
        write_engine_base(base, run, job.wanted, reporter)
        outcome.what = f"base weights for {recipe.engine.name}, proven"
    elif stage == "tokenise":
        part, parts = part_of
        made = tokenise_part(recipe, cluster, run, part, parts, reporter)
        outcome.skipped = made == 0
        outcome.what = f"{made} shards tokenised" if made else "its shards were already there"
        reporter.note(f"part {part + 1} of {parts}: {made} shards tokenised")
    elif stage == "prepare":
        outcome.what = _prepare_data(recipe, cluster, run, job.wanted, reporter)
        outcome.what += _fetch_committed(recipe, run, store_options(cluster), reporter)
        check_resumable(recipe, run)
    elif stage == "upload":
        outcome.what = upload_committed(recipe, run, store_options(cluster), reporter)
    elif stage == "export":
        options = store_options(cluster)
        artefacts = DataArtefacts(resolve(recipe, options), store_root(recipe, cluster), make=False, options=options)
        exported = export_run(recipe, run, reporter, tokenizer=artefacts.tokenizer(), options=options)
        outcome.what = f"{exported}, proven"
    elif stage == "eval":
        from trainshed.workflow.evaluation.stage import evaluate_run

        outcome.what = evaluate_run(recipe, run, options=store_options(cluster), reporter=reporter).text()


def mirror_address(recipe: Recipe, run: Path) -> str | None:
    """Return where checkpoints of a foreign engine are copied to; None: nowhere."""
    if recipe.engine.name == "torch" or recipe.checkpoint.to is None:
        return None
    return join(recipe.checkpoint.to.rstrip("/"), f"{recipe.name}/{run.name}")


def upload_committed(recipe: Recipe, run: Path, options: StoreOptions, reporter: Reporter = SILENT) -> str:
    """Copy what a foreign engine has committed to `checkpoint.to`; returns a summary."""
    address = mirror_address(recipe, run)
    if address is None:
        raise InputError("there is no bucket to copy checkpoints to", where=recipe.where("checkpoint.to"))
    sent = upload_checkpoints(run, address, keep=recipe.checkpoint.keep, options=options, reporter=reporter)
    steps = ", ".join(map(str, sent))
    return f"checkpoints {steps} are in {address}" if sent else f"all checkpoints were in {address} already"


def follow_training(job_folder: Path, *, reporter: Reporter = SILENT) -> int:
    """Copy what a training commits to `checkpoint.to` until it is asked to stop; returns the exit code of that.

    Only one node copies: the others of a job whose pods are all alike have nothing to do.
    """
    job = JobFile.read(job_folder)
    recipe, cluster = load_recipe(str(job_folder / RECIPE_FILE)), load_cluster(str(job_folder / CLUSTER_FILE)).inside()
    run = Path(job.run)
    address = mirror_address(recipe, run)
    if address is None:
        raise InputError("there is no bucket to copy checkpoints to", where=recipe.where("checkpoint.to"))
    # GPUs are held as long as the pod lives: a copy that is cut off goes on in the stage after training.
    with StopSignals(on_signal=lambda number: os._exit(exit_code_of(number))) as stop:
        if int(os.environ.get("TRAINSHED_NODE_RANK") or 0):
            while stop.first is None:
                time.sleep(0.5)
        # In a thread: while this one waits for a bucket that does not answer, no signal would be handled.
        copying = ThreadPoolExecutor(1).submit(
            follow_checkpoints,
            run,
            address,
            lambda: stop.first is not None,
            keep=recipe.checkpoint.keep,
            every_seconds=float(os.environ.get("TRAINSHED_UPLOAD_SECONDS") or FOLLOW_SECONDS),
            options=store_options(cluster),
            reporter=reporter,
        )
        while not copying.done():
            time.sleep(0.2)
        copying.result()
        return stop.exit_code or 0


def _fetch_committed(recipe: Recipe, run: Path, options: StoreOptions, reporter: Reporter) -> str:
    """Fetch the checkpoint that a run goes on from, where its folder has none and a bucket has."""
    address = mirror_address(recipe, run)
    if address is None or recipe.checkpoint.resume == "fresh":
        return ""
    step = fetch_checkpoints(run, address, options=options, reporter=reporter)
    return "" if step is None else f"; checkpoint {step} fetched from {address}"


def check_resumable(recipe: Recipe, run: Path) -> None:
    """Raise if the checkpoint that a foreign engine would go on from is damaged: engines load it all the same.

    Every byte of it is read, on a node without GPUs.
    """
    listing = list_foreign(run)
    if listing is None or recipe.engine.name == "torch" or recipe.checkpoint.resume == "fresh":
        return
    whole = [checkpoint for checkpoint in listing.checkpoints if checkpoint.complete]
    for checkpoint in whole:
        if not checkpoint.latest or (damage := find_damage(checkpoint)) is None:
            continue
        earlier = [row.step for row in whole if row.step < checkpoint.step]
        hint = "delete it; without it the run goes on from the bucket, or from its beginning"
        if earlier and listing.engine == "megatron":
            hint = f"delete it, and write {max(earlier)} into {listing.folder / LATEST_ITERATION} to go on from there"
        raise CorruptData(
            f"the checkpoint of step {checkpoint.step} is damaged: {damage}", where=str(checkpoint.path), hint=hint
        )


def _fetch_base(recipe: Recipe, cluster: Cluster, reporter: Reporter) -> BaseWeights | None:
    options = store_options(cluster)
    resolved = resolve(recipe, options)
    tokenizer = check_fit(resolved, options)
    return fetch_weights(resolved, store_root(recipe, cluster), options, reporter, tokenizer)


def _fetched_text(recipe: Recipe, base: BaseWeights) -> str:
    return f"{recipe.model.from_} {'was already there' if base.reused else 'fetched and proven'}"


def _prepare_data(recipe: Recipe, cluster: Cluster, run: Path, wanted: tuple[str, ...], reporter: Reporter) -> str:
    """Prepare the data and return a summary; an engine that reads text itself (torchtune) gets only what it asks for.

    Packages and inputs that `observe`, `export` and `eval` need are checked here, before GPUs are requested.
    """
    check_installed(recipe.observe)
    check_export_installed(recipe)
    options = store_options(cluster)
    check_eval_inputs(recipe, options)
    if recipe.engine.name == "torch" or "data-args" in wanted or "data-prefix" in wanted:
        prepared = prepare_run(recipe, cluster, id=run.name, reporter=reporter)
        tokenizer = prepared.tokenizer
        tokens = sum(source.tokens for source in prepared.sources)
        what = f"{f'{tokens:,}' if prepared.sources else 'synthetic'} tokens, order of {prepared.steps:,} steps"
        if recipe.engine.name != "torch":
            write_engine_data(prepared, options, reporter)
    else:
        resolved = resolve(recipe, options)
        tokenizer = check_fit(resolved, options)
        save_recipe(resolved, run)
        artefacts = DataArtefacts(
            resolved, store_root(recipe, cluster), tokenizer=tokenizer, options=options, reporter=reporter
        )
        tokenizer = artefacts.tokenizer()
        what = f"{recipe.engine.name} reads the text itself"
    if "tokenizer" in wanted and tokenizer is not None:
        write_engine_tokenizer(tokenizer, run, options)
    if recipe.engine.name != "torch":
        write_engine_watch(run)
    return what


def write_engine_run(job: JobFile, job_folder: Path, recipe: Recipe, cluster: Cluster, run: Path) -> None:
    """Write where a foreign engine will run: its log does not say all that its figures are computed from."""
    train, (layout, *_) = job.stage("train"), read_job_plan(job_folder)
    config = architecture(recipe) or weights_architecture(recipe, cluster.inside())
    gpu = find_machine(cluster.gpu_machine).gpu if cluster.gpu_machine else None
    placed = EngineRun(
        engine=recipe.engine.name,
        layout=str(layout),
        nodes=train.nodes,
        ranks_per_node=train.ranks_per_node,
        losses_rank=losses_rank(recipe, cluster.image, train.world_size),
        gpu=find_gpu(gpu).name if gpu is not None and not is_path(gpu) else None,
        config=to_plain(config),
    )
    LocalStore(run).put(ENGINE_RUN_FILE, placed.to_bytes())


def tokenizer_folder(tokenizer: Tokenizer) -> str | None:
    """Return the folder that a tokenizer is in; None where it is a single file of another name."""
    parsed = parse(tokenizer.address)
    address = os.path.abspath(str(parsed)) if parsed.scheme == "file" else tokenizer.address
    if not address.endswith(".json"):
        return address
    folder, _, name = address.rpartition("/")
    return folder if name == "tokenizer.json" else None


def export_run(
    recipe: Recipe,
    run: Path,
    reporter: Reporter = SILENT,
    *,
    tokenizer: Tokenizer | None = None,
    options: StoreOptions | None = None,
) -> str:
    """Write the trained weights as the recipe's `export` says, prove them, and return where they are.

    They are those of the best checkpoint where the run keeps one, otherwise of the last. The run's tokenizer goes with
    them: a server such as vLLM looks for it there; so do the chat template of `data.template`, with which the
    conversations were written, and the token that ends its answers. The adapters of a LoRA run become a folder of
    PEFT's, unless they are to be merged: its weights are then those of the base with the adapters in them.
    """
    from trainshed.checkpoints.convert.convert import convert_weights
    from trainshed.checkpoints.formats import TargetFormat

    wanted = recipe.export or Export()
    source = trained_weights(recipe, run)
    if recipe.engine.name == "torch" and (apart := checkpoint_home(recipe, run.name, options)) is not None:
        source = join(apart[0].url, apart[1])
    target = export_address(recipe, str(run))
    words = tokenizer_folder(tokenizer) if tokenizer is not None else None
    chat_template, end_tokens = (None, ()) if tokenizer is None else chat_format(recipe, tokenizer, options)
    shared_options: dict[str, Any] = {
        "dtype": wanted.dtype,
        "tokenizer": words,
        "chat_template": chat_template,
        "end_tokens": end_tokens,
        "replace": True,  # the folder is the run's own, and the run may have trained longer since
        "options": options,
        "reporter": reporter,
    }
    if recipe.engine.name == "torch" and recipe.train.lora is not None and not wanted.merge:
        from trainshed.checkpoints.lora.export import export_adapter

        exported = export_adapter(str(source), target, **shared_options)
        check_proven(exported.verdict.passed, target)
        return publish_export(recipe, run, target, options, reporter)
    if recipe.engine.name == "torchtune" and recipe.train.lora is not None and not wanted.merge:
        from trainshed.checkpoints.formats import open_weights
        from trainshed.checkpoints.lora.export import export_peft_folder

        with open_weights(run / ENGINE / "base") as base:
            config = base.config
        exported = export_peft_folder(
            Path(source), target, recipe.train.lora, config, base=recipe.model.from_, **shared_options
        )
        check_proven(exported.verdict.passed, target)
        return publish_export(recipe, run, target, options, reporter)
    averaged = wanted.weights == "ema"
    made = convert_weights(source, target, TargetFormat(wanted.format), averaged=averaged, **shared_options)
    check_proven(made.verdict.passed, target)
    return publish_export(recipe, run, target, options, reporter)


def publish_export(recipe: Recipe, run: Path, target: str, options: StoreOptions | None, reporter: Reporter) -> str:
    """Publish a proven export on the Hub, or copy it to a bucket (`export.to`); returns where the weights are."""
    if (copy := export_copy_address(recipe, str(run))) is not None:
        copied = copy_tree(target, copy, options=options, reporter=reporter)
        reporter.note(f"{shown_address(copy)} has a copy of the export: {copied.files} files")
        return target
    to = recipe.export.to if recipe.export is not None else None
    if to is None or not recipe.publishes:
        return target
    from trainshed.storage.hub_upload import publish_folder
    from trainshed.workflow.model_card import model_card

    card = {"README.md": model_card(recipe, run, Path(target)).encode()}
    published = publish_folder(
        Path(target), to, extra=card, message=f"{recipe.name}/{run.name}", options=options, reporter=reporter
    )
    done = "published" if published.sent else "was published already"
    reporter.note(f"{published.address} {done}: {published.files} files, compared with the Hub's hashes")
    return published.address


def trained_weights(recipe: Recipe, run: Path) -> str:
    """Return where an engine has left its weights in a run's folder."""
    if recipe.engine.name != "torchtune":
        return str(run / MEGATRON_CHECKPOINTS if recipe.engine.name == "megatron" else run)
    weights = newest_torchtune(run)
    if weights is None:
        raise TrainshedError(
            "torchtune has saved no weights that are whole",
            where=str(run / CHECKPOINTS),
            hint=f"`trainshed checkpoints {run}` lists them",
        )
    return str(weights)


# What engines look for beside a tokenizer's own files: sentencepiece's, Meta's, chat templates.
_TOKENIZER_COMPANIONS = (*TOKENIZER_FILES, "tokenizer.model", "original/tokenizer.model", "chat_template.jinja")


def write_engine_base(base: BaseWeights, run: Path, wanted: Sequence[str], reporter: Reporter = SILENT) -> None:
    """Leave the base weights in the format that is wanted, proven; those that have it already are linked."""
    target = run / ENGINE / "base"
    if "base-hf" in wanted and detect_format(str(base.files)) == "hf":
        _replace_link(target, base.files)
        return
    from trainshed.checkpoints.convert.convert import convert_weights

    to = TargetFormat("megatron", "torch_dist") if "base-megatron" in wanted else TargetFormat("hf")
    made = convert_weights(str(base.files), str(target), to, reporter=reporter)
    check_proven(made.verdict.passed, made.target)


def write_engine_data(run: PreparedRun, options: StoreOptions | None = None, reporter: Reporter = SILENT) -> None:
    """Write where the tokens of each split are: for Megatron as JSON, for NeMo as one value of Hydra's."""
    folder = run.folder / ENGINE
    train = [word for source in run.sources for word in _weighted_prefixes(source, folder, options, reporter)]
    own = run.data.validation
    store = LocalStore(folder)
    if own is None:
        # One corpus that the engine itself shares out, or training alone.
        store.put("data.json", _json({"train": train, "valid": train, "test": train}))
        store.put("data_prefix.txt", f"[{_hydra_words(train)}]".encode())
        return
    validation = _weighted_prefixes(own, folder, options, reporter)
    store.put("data.json", _json({"train": train, "valid": validation, "test": validation}))
    named = {"train": train, "validation": validation, "test": validation}
    store.put(
        "data_prefix.txt",
        ("{" + ",".join(f"{key}:[{_hydra_words(words)}]" for key, words in named.items()) + "}").encode(),
    )


def write_engine_tokenizer(tokenizer: Tokenizer, run: Path, options: StoreOptions | None = None) -> None:
    """Copy the tokenizer's files, and those in its folder that other engines read."""
    store = LocalStore(run / ENGINE / "tokenizer")
    place = parse(tokenizer.address)
    if place.scheme not in ("http", "https") and not tokenizer.address.endswith(".json"):
        there = open_folder(tokenizer.address, options)
        for name in _TOKENIZER_COMPANIONS:
            try:
                store.put(name, there.read(name))
            except NotFound:
                continue
    # Without a class transformers would look for a model's config beside it.
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | tokenizer.config
    store.put("tokenizer.json", tokenizer.json)
    store.put("tokenizer_config.json", _json(config))


def write_engine_watch(run: Path) -> None:
    """Leave the script that watches the ranks of the engine, in whose image there is nothing of ours."""
    store = LocalStore(run / ENGINE / WATCH_FOLDER)
    for file in shipped_files():
        store.put(file.name, file.read_bytes())


def check_proven(passed: bool, target: str) -> None:
    """Raise where converted weights are not those they were made from."""
    if not passed:
        raise TrainshedError(
            "the converted weights are not those they were made from",
            where=target,
            hint="verdict.json beside them says which tensors differ",
        )


def _weighted_prefixes(
    source: TokenSource, folder: Path, options: StoreOptions | None, reporter: Reporter
) -> list[str]:
    """A source's token files, each with its share before it; files in a bucket are fetched: other engines map them."""
    share = (source.weight or 1.0) / len(source.prefixes)
    words = []
    for number, prefix in enumerate(source.prefixes):
        if parse(prefix).scheme != "file":
            prefix = _fetch_tokens(prefix, folder / "tokens" / f"{source.label}-{number:05d}", options, reporter)
        words += [repr(share), prefix]
    return words


def _fetch_tokens(prefix: str, target: Path, options: StoreOptions | None, reporter: Reporter) -> str:
    parent, _, name = prefix.rpartition("/")
    include = (f"{name}.bin", f"{name}.idx")
    copy_tree(parent, str(target), include=include, options=options, reporter=reporter)
    return str(target / name)


def _replace_link(link: Path, target: Path) -> None:
    """A link that is there or not, whenever somebody looks."""
    link.parent.mkdir(parents=True, exist_ok=True)
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target.absolute())
    new.replace(link)


def _json(body: object) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n"


def _hydra_words(words: Sequence[str]) -> str:
    """Items of a list in Hydra's grammar: quoted, so that no path can end it."""

    def quoted(word: str) -> str:
        escaped = word.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"

    return ",".join(map(quoted, words))
