"""A recipe on a cluster as a job: everything is decided here, before any target renders a line.

The planner checks the layout, the memory and the batch; what it predicts travels with the job (`plan.json`) and
sets how long a stopped run may take to save. What a person should know before nodes are paid for is in
`Job.notes`. `doctor_job` is the job of `trainshed doctor --nodes`: it tests nodes and trains nothing.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from typing import Any

import orjson

import trainshed
from trainshed.catalog.gpus import find_gpu
from trainshed.engines.launch import (
    NETWORK_FILE,
    EngineLaunch,
    EngineSite,
    EngineTask,
    build_launch,
    launcher_script,
    losses_rank,
)
from trainshed.engines.megatron.versions import recipe_version
from trainshed.errors import InputError, RecipeError
from trainshed.launch.attempt import PLAN_SCHEMA
from trainshed.launch.fabric import FabricSetup, fabric_setup, lint_environment
from trainshed.launch.image_proof import IMAGE_STAGE, image_files
from trainshed.launch.job import JOB_FILE, MOUNTED_JOB, CodeArchive, Job, JobFile, Stage, job_folder
from trainshed.launch.packaging import job_code, provenance
from trainshed.launch.preflight import preflight_stage
from trainshed.plan.layout import RankLayout
from trainshed.plan.planner import PlannedModel
from trainshed.recipe import Cluster, Recipe, to_yaml
from trainshed.recipe.load import chosen_run_id
from trainshed.recipe.registered import registered_class
from trainshed.recipe.yaml_io import dotted_key
from trainshed.run_folder import CLUSTER_FILE, RECIPE_FILE, run_address
from trainshed.workflow.layout import PlannedRun, check_node_count, plan_on_cluster, planned_model
from trainshed.workflow.prepare import check_fit_before_submit, store_options
from trainshed.workflow.resolve import resolve
from trainshed.workflow.runnable import (
    check_layout,
    check_model,
    check_publishing,
    check_runnable,
    shared_store,
)
from trainshed.workflow.serve import SERVE_SCRIPT, serve_files, serve_notes, serve_stage

UNKNOWN_SAVE_SECONDS = 270
"""Where no storage is named, how long a save is taken to last: twice this and a minute make ten minutes of grace."""


def build_job(
    recipe: Recipe,
    cluster: Cluster,
    *,
    id: str | None = None,
    nodes: int | None = None,
    gpus: int | None = None,
    despite_memory: bool = False,
    offline: bool = False,
    code: CodeArchive | None = None,
) -> Job:
    """Decide everything about a recipe's job on a cluster; raises `InputError` for whatever would fail there.

    `nodes` or `gpus` win over the recipe's `resources`, and these over the cluster's default. With `offline` addresses
    on the Hub are pinned by the first node that fetches them, not here.
    """
    check_runnable(recipe, cluster)
    store = shared_store(cluster, recipe)
    if gpus is not None and cluster.gpu_machine is None:
        raise InputError(
            f"{gpus} GPUs, and the nodes of {cluster.name} have none ({cluster.where('machine')}: cpu)",
            where="--gpus",
            hint="write --nodes, or name their machine in the cluster file",
        )
    resolved = resolve(recipe, store_options(cluster), pin=not offline)
    model = planned_model(resolved, cluster)
    check_fit_before_submit(resolved, model.config, store_options(cluster), offline=offline)
    planned = plan_on_cluster(resolved, cluster, model, nodes, gpus, despite_memory)
    _check_elastic(resolved, cluster, planned.placement.nodes)
    check_model(resolved, model.config)
    check_layout(resolved, model.config, planned.layout)
    check_publishing(resolved, cluster)
    setup = fabric_setup(cluster, nodes=planned.placement.nodes)
    warnings = lint_environment(setup, cluster.environment, cluster.where)
    name = chosen_run_id(resolved, id)
    run = run_address(store, resolved.name, name)
    job_name = f"{resolved.name}-{name}"
    engine = _foreign_launch(resolved, cluster, model, planned, run)
    resolved = _with_engine_version(resolved, cluster)
    stages = _stages(resolved, cluster, planned, engine)
    serving: tuple[str, ...] = ()
    if resolved.serve is not None:
        serve = serve_stage(resolved, cluster, model, planned.placement.machine, run)
        stages += (with_own_limits(serve, cluster),)
        serving = serve_notes(resolved, cluster, model, stages[-1])
    grace = _grace_seconds(resolved, cluster, planned)
    job_file = JobFile(
        name=job_name,
        run=run,
        stages=stages,
        grace_seconds=grace,
        precision=resolved.train.precision,
        version=trainshed.__version__,
        wanted=engine.inputs if engine else (),
        min_nodes=resolved.elastic.min_nodes if resolved.elastic else None,
        plugins={plugin.name: plugin.sha256 for plugin in recipe.plugin_sources},
    )
    return Job(
        name=job_name,
        run=run,
        cluster=cluster,
        stages=stages,
        files=_job_files(resolved, cluster, planned, engine, setup, job_file),
        code=code or job_code(cluster, (*recipe.plugin_sources, *cluster.plugin_sources)),
        steps=model.steps,
        grace_seconds=grace,
        losses_rank=losses_rank(resolved, cluster.image, job_file.stage("train").world_size),
        notes=(
            *planned.notes,
            *warnings,
            *(engine.notes if engine else ()),
            *_upload_notes(recipe, cluster),
            *serving,
            *_plugin_notes(recipe),
            *_observe_notes(recipe, cluster),
        ),
        cost=planned.cost,
    )


def _job_files(
    recipe: Recipe,
    cluster: Cluster,
    planned: PlannedRun,
    engine: EngineLaunch | None,
    setup: FabricSetup,
    job_file: JobFile,
) -> dict[str, str]:
    """Return the text files that travel with a job, by their name in its folder."""
    files = {
        RECIPE_FILE: to_yaml(recipe),
        CLUSTER_FILE: to_yaml(cluster),
        "plan.json": _plan_text(planned),
        "provenance.json": _json(provenance(recipe.folder)),
        JOB_FILE: job_file.to_text(),
        **_scripts(recipe),
    }
    if any(stage.script == SERVE_SCRIPT for stage in job_file.stages):
        files |= serve_files(recipe, job_file.run)
    site = _engine_site(recipe, cluster, planned, job_file.run)
    files |= image_files(recipe.engine.name, engine, site, cluster, setup)
    if engine is not None:
        files |= dict(engine.files) | {"train.sh": launcher_script(engine, site)}
        if cluster.preflight and (expected := setup.expected_network).selected:
            files[NETWORK_FILE] = _json(expected._asdict())
        files |= {f"{stage.name}.sh": _command_script(stage.argv) for stage in engine.cpu_stages}
    return files


def _check_elastic(recipe: Recipe, cluster: Cluster, nodes: int) -> None:
    """Refuse a run that waits for more nodes than it has, or holds more than the cluster gives."""
    if recipe.elastic is None:
        return
    if recipe.elastic.min_nodes > nodes:
        raise RecipeError(
            f"the run has {nodes} {'node' if nodes == 1 else 'nodes'}, and would not train with fewer than "
            f"{recipe.elastic.min_nodes}",
            where=recipe.where("elastic.min_nodes"),
            hint=f"write {nodes} or less: `spares` only stand in for nodes that are lost",
        )
    if recipe.elastic.spares:
        check_node_count(cluster, nodes + recipe.elastic.spares, recipe.where("elastic.spares"))


_LONGEST_WARNING_SECONDS = 65535
"""How long before its time limit Slurm warns a job at most: https://slurm.schedmd.com/sbatch.html#OPT_signal."""


def _grace_seconds(recipe: Recipe, cluster: Cluster, planned: PlannedRun) -> int:
    """Return how long a stopped run may take to save: as the cluster file says, or by the planned time of a save."""
    save_seconds = (planned.save_seconds or UNKNOWN_SAVE_SECONDS) if recipe.checkpoint.save else 0
    grace = cluster.limits.grace_seconds or ceil(2 * save_seconds + 60)
    _check_grace(cluster, grace)
    return grace


def _check_grace(cluster: Cluster, grace: int) -> None:
    """Refuse a time to save that Slurm does not give, or that leaves none to train."""
    hours = cluster.limits.hours
    if cluster.target != "slurm":
        return
    if grace > _LONGEST_WARNING_SECONDS:
        raise RecipeError(
            f"Slurm warns a job at most {_LONGEST_WARNING_SECONDS:,} seconds before its end, and {grace:,} are wanted "
            "to save",
            where=cluster.where("limits.grace_seconds"),
            hint=f"write `grace_seconds: {_LONGEST_WARNING_SECONDS}` or less",
        )
    if hours is not None and grace >= hours * 3600:
        raise RecipeError(
            f"a job of {hours:g} hours would be asked to save {grace:,} seconds before its end: it would never train",
            where=cluster.where("limits.hours"),
            hint="write more hours, or fewer `limits.grace_seconds`",
        )


def _observe_notes(recipe: Recipe, cluster: Cluster) -> Iterator[str]:
    """Yield notes on figures that the cluster cannot read and on messages that are not sent."""
    prometheus = recipe.observe.prometheus
    if prometheus is not None and not prometheus.is_reachable:
        yield (
            f"observe.prometheus listens on {prometheus.host}, which only the node of rank 0 itself can read; "
            "`host: 0.0.0.0` opens it to the cluster's network"
        )
    if cluster.notify and recipe.engine.name != "torch":
        yield (
            f"notify of {cluster.name}: {recipe.engine.name} runs without our agent, so that only stages before "
            "training and preflight are told of"
        )


def _plugin_notes(recipe: Recipe) -> tuple[str, ...]:
    return tuple(f"{plugin.text()}, travels with the code" for plugin in recipe.plugin_sources)


def _plan_text(planned: PlannedRun) -> str:
    body: dict[str, Any] = {
        "schema": PLAN_SCHEMA,
        "layout": asdict(planned.layout),
        "reasons": list(planned.reasons),
        "predicted": planned.predicted,
    }
    if planned.phase_layouts:
        body["phase_layouts"] = [asdict(layout) for layout in planned.phase_layouts]
    return _json(body)


def _json(body: Any) -> str:
    return orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS).decode() + "\n"


def _scripts(recipe: Recipe) -> dict[str, str]:
    """Scripts, chat template and questions that a recipe names: they travel with it, to lie beside it on the nodes."""
    named = [(dotted_key((*path, "script")), source.script) for path, source in recipe.sources()]
    files = {}
    questions = recipe.eval.questions if recipe.eval is not None else None
    for key, name in (*named, ("data.template", recipe.data.template_file), ("eval.questions", questions)):
        if name is None:
            continue
        path = Path(name)
        if path.is_absolute() or ".." in path.parts:
            raise RecipeError(
                f"`{path}` does not lie beside the recipe, so that it cannot travel with it",
                where=recipe.where(key),
                hint="put the file into the recipe's folder and write its path from there",
            )
        try:
            files[path.as_posix()] = (recipe.folder / path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"cannot be read: {error}", where=str(recipe.folder / path)) from None
    return files


def _foreign_launch(
    recipe: Recipe, cluster: Cluster, model: PlannedModel, planned: PlannedRun, run: str
) -> EngineLaunch | None:
    """Return how another engine is started; None for our own."""
    if recipe.engine.name == "torch":
        return None
    if model.steps is None and recipe.engine.name != "torchtune":
        raise RecipeError(
            f"the engine {recipe.engine.name} must be told how many steps, and `epochs` has a length only once the "
            "data is prepared",
            where=recipe.where("train.epochs"),
            hint="write `steps` or `tokens`",
        )
    if recipe.engine.image is None and cluster.image is None and cluster.target == "kubernetes":
        raise RecipeError(
            f"in which image is {recipe.engine.name}?",
            where=recipe.where("engine"),
            hint=f"write `engine: {{name: {recipe.engine.name}, image: …@sha256:…}}`",
        )
    if registered_class("model family", model.config.family) is not None:
        raise RecipeError(
            f"`{model.config.family}` is the model family of a plugin, which {recipe.engine.name} does not know",
            where=recipe.where("model"),
            hint="engine: torch",
        )
    machine = planned.placement.machine
    gpu = find_gpu(machine.gpu) if machine is not None else None
    site = _engine_site(recipe, cluster, planned, run)
    return build_launch(EngineTask(recipe, model.config, planned.layout, model.steps, site), gpu=gpu)


def _with_engine_version(recipe: Recipe, cluster: Cluster) -> Recipe:
    """Write out the version of Megatron-LM whose arguments the job has, where the recipe does not say it."""
    if recipe.engine.name != "megatron":
        return recipe
    engine = recipe.engine.model_copy(update={"version": recipe_version(recipe, cluster.image)})
    return recipe.model_copy(update={"engine": engine})


def _engine_site(recipe: Recipe, cluster: Cluster, planned: PlannedRun, run: str) -> EngineSite:
    machine = planned.placement.machine
    return EngineSite(
        run_folder=run,
        job_folder=MOUNTED_JOB if cluster.target == "kubernetes" else job_folder(run),
        nodes=planned.placement.nodes,
        gpus_per_node=planned.placement.ranks_per_node,
        image=recipe.engine.image or cluster.image,
        sharp=cluster.sharp,
        vendor=find_gpu(machine.gpu).vendor if machine is not None else "nvidia",
        node_disk=cluster.node_disk,
    )


def _stages(recipe: Recipe, cluster: Cluster, planned: PlannedRun, engine: EngineLaunch | None) -> tuple[Stage, ...]:
    limits, placement = cluster.limits, planned.placement
    on_cpus = {"cpus": limits.cpu_stage_cpus, "memory": limits.cpu_stage_memory}
    stages: list[Stage] = []
    if engine is not None:
        stages.append(Stage(IMAGE_STAGE, script=f"{IMAGE_STAGE}.sh", image=recipe.engine.image, **on_cpus))
    if recipe.model.from_:
        stages.append(Stage("fetch", **on_cpus))
    if engine is not None and {"base-megatron", "base-hf"} & set(engine.inputs):
        stages.append(Stage("convert", **on_cpus))
    if limits.prepare_parts > 1 and not recipe.data.synthetic:
        stages.append(Stage("tokenise", parts=limits.prepare_parts, **on_cpus))
    stages.append(Stage("prepare", **on_cpus))
    image, prometheus = recipe.engine.image, recipe.observe.prometheus
    stages += [
        Stage(stage.name, script=f"{stage.name}.sh", image=image, **on_cpus)
        for stage in (engine.cpu_stages if engine else ())
    ]
    stages.append(
        Stage(
            "train",
            nodes=placement.nodes,
            gpus_per_node=placement.gpus_per_node,
            ranks_per_node=placement.ranks_per_node,
            script="train.sh" if engine else None,
            image=image,
            environment=dict(engine.environment) if engine else {},
            restarts=limits.restarts,
            spares=recipe.elastic.spares if recipe.elastic else 0,
            preflight=cluster.preflight,
            uploads=engine is not None and recipe.checkpoint.to is not None and copies_while_training(cluster),
            metrics_port=prometheus.port if prometheus is not None and prometheus.is_reachable else None,
        )
    )
    if engine is not None and recipe.checkpoint.to is not None:
        stages.append(Stage("upload", **on_cpus))
    if recipe.export is not None:
        stages.append(Stage("export", **on_cpus))
    if recipe.eval is not None:
        stages.append(Stage("eval", gpus_per_node=recipe.eval.gpus, **on_cpus))
    return tuple(with_own_limits(stage, cluster) for stage in stages)


def copies_while_training(cluster: Cluster) -> bool:
    """Whether a foreign engine's checkpoints get to a bucket while it trains, and not only after it.

    The pods of a TrainJob are made by its runtime, and a job of Slurm has the engine's container only.
    """
    if cluster.target == "kubernetes":
        return cluster.on_kubernetes.kind != "trainjob"
    return cluster.target == "ray"


def _upload_notes(recipe: Recipe, cluster: Cluster) -> Iterator[str]:
    to = recipe.checkpoint.to
    if recipe.engine.name == "torch" or to is None:
        return
    if copies_while_training(cluster):
        yield f"what {recipe.engine.name} has committed is copied to {to} while it trains, and once more after it"
    else:
        yield f"what {recipe.engine.name} has committed is copied to {to} after training, by the stage upload"


def with_own_limits(stage: Stage, cluster: Cluster) -> Stage:
    """Return a stage with the CPUs and the memory that `limits.stages` of the cluster file gives it."""
    own = next((own for name, own in cluster.limits.stages.items() if name == stage.name), None)
    if own is None:
        return stage
    return replace(stage, cpus=own.cpus or stage.cpus, memory=own.memory or stage.memory)


def _command_script(argv: tuple[str, ...]) -> str:
    return f"#!/usr/bin/env bash\nset -euo pipefail\nexec {shlex.join(argv)}\n"


DOCTOR_RUN = "doctor"
_PREFLIGHT_GRACE_SECONDS = 60


def doctor_job(cluster: Cluster, nodes: int, *, full: bool = False, code: CodeArchive | None = None) -> Job:
    """Return the job; the same nodes of the same cluster are proven in the same run, one attempt after the other."""
    check_node_count(cluster, nodes, "--nodes")
    text = to_yaml(cluster)
    id = hashlib.sha256(f"{nodes}\n{full}\n{text}".encode()).hexdigest()[:8]
    run = run_address(shared_store(cluster), DOCTOR_RUN, id)
    stage = replace(preflight_stage(cluster, nodes=nodes), only_preflight=True, full_preflight=full)
    job_file = JobFile(
        name=f"{DOCTOR_RUN}-{id}",
        run=run,
        stages=(stage,),
        grace_seconds=_PREFLIGHT_GRACE_SECONDS,
        precision="fp32",
        version=trainshed.__version__,
    )
    # Nothing is trained with it, but every attempt has a layout.
    layout = RankLayout(
        tp=1,
        pp=1,
        vp=1,
        cp=1,
        ep=1,
        etp=1,
        dp=stage.world_size,
        replicate=1,
        shard="none",
        micro_batch=1,
        recompute="none",
        schedule=None,
        stages=(1,),
    )
    plan = {"schema": PLAN_SCHEMA, "layout": asdict(layout), "reasons": ["only preflight"]}
    files = {
        CLUSTER_FILE: text,
        "plan.json": orjson.dumps(plan, option=orjson.OPT_INDENT_2).decode() + "\n",
        JOB_FILE: job_file.to_text(),
    }
    return Job(
        name=job_file.name,
        run=run,
        cluster=cluster,
        stages=(stage,),
        files=files,
        code=code or job_code(cluster),
        grace_seconds=_PREFLIGHT_GRACE_SECONDS,
    )
