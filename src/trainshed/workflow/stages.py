"""What a node does in each stage on CPUs: the same functions on every target, one after the other on this machine.

Each stage leaves its artefact behind and finds it there when it is run again.
"""

from __future__ import annotations

import os
from pathlib import Path

from trainshed.checkpoints.base import BaseWeights
from trainshed.data.artefacts import DataArtefacts
from trainshed.data.encode.tokenizer import Tokenizer
from trainshed.engines.megatron.keeping import CHECKPOINTS
from trainshed.errors import InputError
from trainshed.launch.job import JobFile
from trainshed.recipe import Cluster, Export, Recipe, load_cluster, load_recipe
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import StoreOptions, parse
from trainshed.workflow.engine_files import leave_base, leave_data, leave_tokenizer, refuse_unproven
from trainshed.workflow.prepare import (
    check_fit,
    fetch_weights,
    keep_recipe,
    prepare_run,
    resolve,
    store_options,
    store_root,
    tokenise_part,
)
from trainshed.workflow.runnable import check_runnable
from trainshed.workflow.serve import export_place


def run_stage(stage: str, job_folder: Path, *, part: int = 0, parts: int = 1, reporter: Reporter = SILENT) -> None:
    """Do one stage of a job, from the files that travelled with it."""
    job = JobFile.read(job_folder)
    recipe = load_recipe(str(job_folder / "recipe.yaml"))
    written = load_cluster(str(job_folder / "cluster.yaml"))
    check_runnable(recipe, written)
    cluster = written.inside()
    run = Path(job.run)
    if stage == "fetch":
        _fetch(recipe, cluster, reporter)
    elif stage == "convert":
        base = _fetch(recipe, cluster, reporter)
        if base is None:
            raise InputError("there are no base weights to convert", where=recipe.where("model.from"))
        leave_base(base, run, job.wanted, reporter)
    elif stage == "tokenise":
        made = tokenise_part(recipe, cluster, run, part, parts, reporter)
        reporter.note(f"part {part + 1} of {parts}: {made} shards tokenised")
    elif stage == "prepare":
        _prepare(recipe, cluster, run, job.wanted, reporter)
    elif stage == "export":
        options = store_options(cluster)
        artefacts = DataArtefacts(resolve(recipe, options), store_root(recipe, cluster), make=False, options=options)
        export_run(recipe, run, reporter, tokenizer=artefacts.tokenizer(), options=options)
    else:
        raise InputError(f"there is no stage `{stage}` on CPUs", hint="fetch, convert, tokenise, prepare or export")


def _fetch(recipe: Recipe, cluster: Cluster, reporter: Reporter) -> BaseWeights | None:
    options = store_options(cluster)
    resolved = resolve(recipe, options)
    check_fit(resolved, options)
    return fetch_weights(resolved, store_root(recipe, cluster), options, reporter)


def _prepare(recipe: Recipe, cluster: Cluster, run: Path, wanted: tuple[str, ...], reporter: Reporter) -> None:
    """Prepare the data; for an engine that reads text itself (torchtune) only what it asks for."""
    options = store_options(cluster)
    if recipe.engine.name == "torch" or "data-args" in wanted or "data-prefix" in wanted:
        prepared = prepare_run(recipe, cluster, id=run.name, reporter=reporter)
        tokenizer = prepared.tokenizer
        if recipe.engine.name != "torch":
            leave_data(prepared, options, reporter)
    else:
        resolved = resolve(recipe, options)
        tokenizer = check_fit(resolved, options)
        keep_recipe(resolved, run)
        artefacts = DataArtefacts(
            resolved, store_root(recipe, cluster), tokenizer=tokenizer, options=options, reporter=reporter
        )
        tokenizer = artefacts.tokenizer()
    if "tokenizer" in wanted and tokenizer is not None:
        leave_tokenizer(tokenizer, run, options)


def tokenizer_folder(tokenizer: Tokenizer) -> str | None:
    """Return the folder that a tokenizer lies in; None where it is a single file of another name."""
    found = parse(tokenizer.address)
    address = os.path.abspath(str(found)) if found.scheme == "file" else tokenizer.address
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

    The run's tokenizer goes with them: whoever serves them (vLLM) looks for it there.
    """
    from trainshed.checkpoints.converting.convert import convert
    from trainshed.checkpoints.formats import Target

    wanted = recipe.export or Export()
    source = run / CHECKPOINTS if recipe.engine.name == "megatron" else run
    target = export_place(recipe, str(run))
    words = tokenizer_folder(tokenizer) if tokenizer is not None else None
    made = convert(
        str(source),
        target,
        Target(wanted.format),
        dtype=wanted.dtype,
        tokenizer=words,
        options=options,
        reporter=reporter,
    )
    refuse_unproven(made.verdict.passed, target)
    return target
