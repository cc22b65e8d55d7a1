"""What a node does in each stage on CPUs: the same functions on every target, one after the other on this machine.

Each stage leaves its artefact behind and finds it there when it is run again.
"""

from __future__ import annotations

from pathlib import Path

import orjson

from trainshed.errors import InputError, TrainshedError
from trainshed.launch.job import JobFile
from trainshed.line.preparing import (
    PreparedRun,
    fetch_weights,
    resolve,
    run_line,
    store_options,
    store_root,
    tokenise_part,
)
from trainshed.recipe import Cluster, Export, Recipe, load_cluster, load_recipe
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import LocalStore

MEGATRON_CHECKPOINTS = "checkpoints-megatron"
"""Where Megatron's engine keeps its checkpoints in the run's folder."""


def run_stage(stage: str, job_folder: Path, *, part: int = 0, parts: int = 1, reporter: Reporter = SILENT) -> None:
    """Do one stage of a job, from the files that travelled with it."""
    job = JobFile.read(job_folder)
    recipe = load_recipe(str(job_folder / "recipe.yaml"))
    cluster = load_cluster(str(job_folder / "cluster.yaml")).inside()
    run = Path(job.run)
    if stage == "fetch":
        fetch_weights(
            resolve(recipe, store_options(cluster)), store_root(recipe, cluster), store_options(cluster), reporter
        )
    elif stage == "tokenise":
        made = tokenise_part(recipe, cluster, part, parts, reporter)
        reporter.note(f"part {part + 1} of {parts}: {made} shards tokenised")
    elif stage == "convert":
        convert_base(recipe, cluster, run, job.wanted, reporter)
    elif stage == "prepare":
        prepared = run_line(recipe, cluster, id=run.name, reporter=reporter)
        leave_for_engine(prepared, job.wanted)
    elif stage == "export":
        export_run(recipe, run, reporter)
    else:
        raise InputError(f"there is no stage `{stage}` on CPUs", hint="fetch, convert, tokenise, prepare or export")


def convert_base(recipe: Recipe, cluster: Cluster, run: Path, wanted: tuple[str, ...], reporter: Reporter) -> None:
    """Leave the base weights in the format that a foreign engine reads, with their verdict."""
    from trainshed.checkpoints.converting.convert import convert
    from trainshed.checkpoints.formats import Target

    options = store_options(cluster)
    base = fetch_weights(resolve(recipe, options), store_root(recipe, cluster), options, reporter)
    if base is None:
        raise InputError("there are no base weights to convert", where=recipe.where("model.from"))
    target = Target("megatron", "torch_dist") if "base-megatron" in wanted else Target("hf")
    made = convert(str(base.files), str(run / "engine" / "base"), target, options=options, reporter=reporter)
    _refuse_unproven(made.verdict.passed, made.target)


def leave_for_engine(run: PreparedRun, wanted: tuple[str, ...]) -> None:
    """Leave what a foreign engine asks for under fixed names in the run's folder (`engines/foreign.py: Wanted`)."""
    folder = run.folder / "engine"
    store = LocalStore(folder)
    if "data-args" in wanted or "data-prefix" in wanted:
        splits = _splits(run)
        store.put("data.json", orjson.dumps(splits, option=orjson.OPT_INDENT_2) + b"\n")
        store.put("data_prefix.txt", _hydra(splits).encode())
    if "tokenizer" in wanted and run.tokenizer is not None:
        # Without a class transformers would look for a model's config beside it.
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | run.tokenizer.config
        store.put("tokenizer/tokenizer.json", run.tokenizer.json)
        store.put("tokenizer/tokenizer_config.json", orjson.dumps(config, option=orjson.OPT_INDENT_2) + b"\n")


def _splits(run: PreparedRun) -> dict[str, list[str]]:
    """Token files by split, each with its weight before it, as Megatron takes them."""
    train: list[str] = []
    for source in run.sources:
        for prefix in source.prefixes:
            train += [str((source.weight or 1.0) / len(source.prefixes)), prefix]
    own = run.data.validation
    validation = [word for prefix in own.prefixes for word in ("1.0", prefix)] if own is not None else []
    return {"train": train, "valid": validation or train, "test": validation or train}


def _hydra(splits: dict[str, list[str]]) -> str:
    """One value of Hydra's grammar: every word quoted, so that no path can end it."""

    def quoted(word: str) -> str:
        escaped = word.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"

    names = {"train": "train", "valid": "validation", "test": "test"}
    return "{" + ",".join(f"{names[key]}:[{','.join(map(quoted, words))}]" for key, words in splits.items()) + "}"


def export_run(recipe: Recipe, run: Path, reporter: Reporter = SILENT) -> str:
    """Write the trained weights as the recipe's `export` says, prove them, and return where they are."""
    from trainshed.checkpoints.converting.convert import convert
    from trainshed.checkpoints.formats import Target

    wanted = recipe.export or Export()
    source = run / MEGATRON_CHECKPOINTS if recipe.engine.name in ("megatron", "nemo") else run
    target = f"{wanted.to.rstrip('/')}/{recipe.name}/{run.name}" if wanted.to else str(run / "export")
    made = convert(str(source), target, Target(wanted.format), dtype=wanted.dtype, reporter=reporter)
    _refuse_unproven(made.verdict.passed, target)
    return target


def _refuse_unproven(passed: bool, target: str) -> None:
    if not passed:
        raise TrainshedError(
            "the converted weights are not those they were made from",
            where=target,
            hint="verdict.json beside them says which tensors differ",
        )
