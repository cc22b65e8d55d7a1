"""The last stage of a line: what serves the exported weights, and whether the cluster could run it at all."""

from __future__ import annotations

import posixpath
import shlex
from math import ceil

from trainshed.catalog.gpus import find_gpu
from trainshed.catalog.machines import Machine, find_machine
from trainshed.errors import RecipeError
from trainshed.launch.job import DEFAULT_PORT, ServingSpec, Stage
from trainshed.launch.megatron_api import MODEL_VARIABLE
from trainshed.launch.serving_engine import serving_engine
from trainshed.plan.budget.storage import PlannedStorage, cluster_storage
from trainshed.plan.model_shape import model_shape
from trainshed.plan.planner import PlannedModel
from trainshed.plugins import PLUGINS_VARIABLE
from trainshed.recipe import Cluster, Recipe, Serve
from trainshed.recipe.registered import registered_class
from trainshed.recipe.section import Problem
from trainshed.recipe.validation import recipe_error
from trainshed.run_folder import EXPORT

SERVE_SCRIPT = "serve.sh"
"""The file that starts a server which is not ours."""
DRAIN_SECONDS = 120
"""An answer of some thousand tokens takes minutes at most; a pod's own default would cut it off after 30 s."""
LEAST_STARTUP_SECONDS = 120
# Python, torch and CUDA are loaded from the same slow disks as the weights; an estimate on the safe side.
_IMPORT_SECONDS = 60
_UNKNOWN_READ_GB_PER_S = 0.2
"""Where no storage is named: a network disk that is busy."""
_WEIGHT_BYTES = {"bf16": 2, "fp32": 4, "fp16": 2, "fp8": 1, "q8_0": 2}
# What weights may take of a GPU's memory; the rest is for keys and values, activations and the runtime.
_MOST_OF_MEMORY = 0.9


def export_address(recipe: Recipe, run: str) -> str:
    """Return where a run's export is written."""
    to = recipe.export.to if recipe.export is not None else None
    # A repository of the Hub is given the export of the run's folder, and so is a bucket where a server reads it there.
    if to is None or recipe.publishes or export_copy_address(recipe, run) is not None:
        return f"{run}/{EXPORT}"
    return _export_of_run(to, recipe, run)


def export_copy_address(recipe: Recipe, run: str) -> str | None:
    """Return where a bucket gets a copy of a run's export, if a server reads the export from a disk; None: no copy."""
    to = recipe.export.to if recipe.export is not None else None
    if to is None or recipe.publishes or recipe.serve is None or "://" not in to:
        return None
    return _export_of_run(to, recipe, run)


def _export_of_run(to: str, recipe: Recipe, run: str) -> str:
    return f"{to.rstrip('/')}/{recipe.name}/{run.rsplit('/', 1)[-1]}"


def serve_stage(recipe: Recipe, cluster: Cluster, model: PlannedModel, machine: Machine | None, run: str) -> Stage:
    """Return the stage that serves; raises `RecipeError` for whatever would not serve there."""
    serve = recipe.serve
    assert serve is not None
    _check_target(recipe, cluster, serve)
    _check_size(recipe, cluster, serve, model, machine)
    limits = cluster.limits
    on_cpu = serve.gpus == 0
    ours = serve.engine == "torch"
    bytes_to_read = export_bytes(recipe, model)
    return Stage(
        "serve",
        gpus_per_node=serve.gpus,
        script=None if ours else SERVE_SCRIPT,
        image=serve.image,
        environment={PLUGINS_VARIABLE: ",".join(recipe.plugins)} if ours and recipe.plugins else {},
        restarts=limits.restarts,
        cpus=serve.cpus or (limits.cpu_stage_cpus if on_cpu else None),
        memory=serve.memory or (limits.cpu_stage_memory if on_cpu else None),
        serving=ServingSpec(
            words=torch_serve_arguments(recipe, export_address(recipe, run)) if ours else (),
            port=serve.port,
            replicas=serve.replicas,
            # vLLM answers anything only when it has loaded.
            ready="/ready" if ours else serving_engine(serve.engine).ready,
            startup_seconds=startup_seconds(serve, bytes_to_read, cluster_storage(cluster), machine),
            drain_seconds=DRAIN_SECONDS,
        ),
    )


def torch_serve_arguments(recipe: Recipe, folder: str) -> tuple[str, ...]:
    """Return what follows `trainshed` for our own server, without its port."""
    words = ["serve", folder, "--host", "0.0.0.0", *_serve_options(recipe), "--grace", str(DRAIN_SECONDS)]
    return tuple(words)


def serve_script(recipe: Recipe, run: str) -> str:
    """Return the script of a server that is not ours; the target says the port."""
    serve = recipe.serve
    assert serve is not None
    engine, key = serving_engine(serve.engine), serve.api_key
    words = engine.command(recipe, export_address(recipe, run), drain_seconds=DRAIN_SECONDS)
    command = shlex.join([*words, *engine.job_arguments()])
    lines = ["#!/usr/bin/env bash", "set -euo pipefail"]
    if names := engine.job_files():
        folders = sorted({posixpath.join("$folder", posixpath.dirname(name)).rstrip("/") for name in names})
        lines += [
            'folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
            f'export PYTHONPATH="{":".join(folders)}${{PYTHONPATH:+:$PYTHONPATH}}"',
            f"export {MODEL_VARIABLE}={shlex.quote(recipe.name)}",
        ]
    if key is not None:
        lines.append(f'export {engine.key_variable}="${{{key}:?}}"')
    lines.append(f'exec {command} --port "${{TRAINSHED_PORT:-{DEFAULT_PORT}}}"')
    return "\n".join(lines) + "\n"


def serve_files(recipe: Recipe, run: str) -> dict[str, str]:
    """Return the files of a server that is not ours: its script, and what that needs."""
    assert recipe.serve is not None
    return {SERVE_SCRIPT: serve_script(recipe, run), **serving_engine(recipe.serve.engine).job_files()}


def local_serve_command(recipe: Recipe, folder: str) -> str:
    """Return the command by which a person serves an export on this machine."""
    serve = recipe.serve or Serve()
    engine = None if serve.engine == "torch" else serving_engine(serve.engine)
    if engine is not None:
        words = engine.command(recipe, folder, drain_seconds=DRAIN_SECONDS)
    else:
        words = ["trainshed", "serve", folder, *_serve_options(recipe)]
    command = shlex.join(words + (["--port", str(serve.port)] if serve.port is not None else []))
    wants_key = engine is not None and serve.api_key is not None
    return f'{engine.key_variable}="${serve.api_key}" {command}' if engine is not None and wants_key else command


def _serve_options(recipe: Recipe) -> list[str]:
    serve = recipe.serve or Serve()
    words = ["--name", recipe.name]
    for name, address in (serve.adapters or {}).items():
        words += ["--adapter", f"{name}={address}"]
    if serve.max_length is not None:
        words += ["--max-length", str(serve.max_length)]
    if serve.max_sequences is not None:
        words += ["--max-sequences", str(serve.max_sequences)]
    if serve.api_key is not None:
        words += ["--api-key-env", serve.api_key]
    return words


def export_bytes(recipe: Recipe, model: PlannedModel) -> int:
    """Return the size of the exported weights."""
    dtype = recipe.export.dtype if recipe.export is not None else "bf16"
    return model_shape(model.config, model.preset).weights * _WEIGHT_BYTES[dtype]


def startup_seconds(
    serve: Serve, bytes_to_read: int, storage: PlannedStorage | None, machine: Machine | None = None
) -> int:
    """Return how long a server may take to start: twice the time to read the weights, and what else it does."""
    seconds = 2 * bytes_to_read / (_read_gb_per_s(serve, storage, machine) * 1e9) + _IMPORT_SECONDS
    if serve.engine != "torch":
        seconds += serving_engine(serve.engine).startup_seconds
    return max(LEAST_STARTUP_SECONDS, ceil(seconds))


def serve_notes(recipe: Recipe, cluster: Cluster, model: PlannedModel, stage: Stage) -> tuple[str, ...]:
    """Say what was decided about a server, and why."""
    serve, serving = recipe.serve, stage.serving
    assert serve is not None
    assert serving is not None
    size, storage = export_bytes(recipe, model), cluster_storage(cluster)
    rate = _read_gb_per_s(serve, storage, find_machine(cluster.gpu_machine) if cluster.gpu_machine else None)
    source = str(storage) if storage is not None else "assumed, as the cluster file names no `storage`"
    notes = [
        f"serve: {size / 2**30:.3g} GiB of weights are read in {size / rate / 1e9:.0f} s at {rate:.3g} GB/s "
        f"({source}); a server that is not up after {serving.startup_seconds} s is started again"
    ]
    if serve.image is not None and "@sha256:" not in serve.image and not serve.image.startswith(("/", ".")):
        notes.append(f"serve.image is a tag, which may be another image tomorrow: write {serve.image}@sha256:…")
    return tuple(notes)


def _read_gb_per_s(serve: Serve, storage: PlannedStorage | None, machine: Machine | None) -> float:
    """What one replica reads when all of them do at once."""
    if storage is None:
        return _UNKNOWN_READ_GB_PER_S
    return storage.read_gb_per_s(serve.replicas, machine) / serve.replicas


def _check_target(recipe: Recipe, cluster: Cluster, serve: Serve) -> None:
    if cluster.target == "ray":
        raise RecipeError(
            "a running Ray cluster takes jobs that end, and a server does not",
            where=recipe.where("serve"),
            hint="delete `serve` and serve the export elsewhere, or use a Kubernetes or Slurm cluster",
        )
    if (target := registered_class("target", cluster.target)) is not None and not target.serves:
        raise RecipeError(
            f"the target {cluster.target} runs stages that end, and a server does not",
            where=recipe.where("serve"),
            hint="delete `serve` and serve the export elsewhere",
        )
    if serve.image is not None and "image" in cluster.locked:
        raise RecipeError(
            "`image` is locked by whoever runs this cluster", where=recipe.where("serve.image"), hint="delete it"
        )
    if serve.engine != "torch" and serve.image is None and _in_images(cluster):
        ours = serve.engine == "vllm"
        raise RecipeError(
            f"in which image is {'vLLM' if ours else serve.engine}?",
            where=recipe.where("serve"),
            hint=f"write `image: {'vllm/vllm-openai' if ours else 'registry/name'}@sha256:…` below `serve`",
        )
    if registered_class("serving engine", serve.engine) is not None:
        _check_registered(recipe, serve)
    if cluster.target == "slurm" and serve.image is not None and not _in_images(cluster):
        raise RecipeError(
            f"serve asks for the image {serve.image}, and this cluster has no containers",
            where=recipe.where("serve.image"),
            hint=f"write `container: pyxis` ({cluster.where('slurm.container')}), or delete it: `slurm.venv` serves",
        )
    if cluster.target == "slurm" and serve.replicas > 1:
        raise RecipeError(
            "Slurm has nothing that shares requests among replicas",
            where=recipe.where("serve.replicas"),
            hint="write `replicas: 1`",
        )
    if serve.api_key is not None and serve.api_key not in cluster.secrets:
        raise RecipeError(
            f"the cluster {cluster.name} has no secret `{serve.api_key}`",
            where=recipe.where("serve.api_key"),
            hint=f"write `{serve.api_key}: {{env: {serve.api_key}}}` below `secrets` in the cluster file",
        )


def _check_registered(recipe: Recipe, serve: Serve) -> None:
    """Refuse what the server of a plugin cannot do."""
    engine = serving_engine(serve.engine)
    problems = list(engine.problems(recipe))
    if serve.api_key is not None and engine.key_variable is None:
        problems.append(Problem(("serve", "api_key"), f"{serve.engine} knows no keys", "delete it"))
    if serve.adapters is not None and not engine.serves_adapters:
        problems.append(Problem(("serve", "adapters"), f"{serve.engine} serves no adapters", "delete it"))
    if problems:
        raise recipe_error(problems, recipe.places)


def _in_images(cluster: Cluster) -> bool:
    return cluster.target == "kubernetes" or cluster.on_slurm.container == "pyxis"


def _check_size(recipe: Recipe, cluster: Cluster, serve: Serve, model: PlannedModel, machine: Machine | None) -> None:
    config = model.config
    if serve.max_length is not None and serve.max_length > config.max_positions:
        raise RecipeError(
            f"{serve.max_length} tokens are more than the {config.max_positions} positions of the model",
            where=recipe.where("serve.max_length"),
            hint=f"write {config.max_positions} or less",
        )
    if serve.gpus == 0:
        return
    where = recipe.where("serve.gpus")
    if machine is None:
        raise RecipeError(
            f"the nodes of {cluster.name} have no GPUs (machine: cpu)",
            where=where,
            hint="write `gpus: 0` to serve on processors, or name their machine in the cluster file",
        )
    if serve.gpus > machine.gpus:
        raise RecipeError(
            f"a replica stands on one node, and {machine.name} has {machine.gpus} GPUs",
            where=where,
            hint=f"write `gpus: {machine.gpus}` or less",
        )
    if config.heads % serve.gpus:
        raise RecipeError(
            f"the {config.heads} heads of the model cannot be shared by {serve.gpus} GPUs",
            where=where,
            hint=f"write a number that divides {config.heads}",
        )
    _check_memory(recipe, serve, model, machine)


def _check_memory(recipe: Recipe, serve: Serve, model: PlannedModel, machine: Machine) -> None:
    gpu = find_gpu(machine.gpu)
    share_gib = export_bytes(recipe, model) / serve.gpus / 2**30
    if share_gib <= gpu.memory_gib * _MOST_OF_MEMORY:
        return
    fitting = [
        count
        for count in range(serve.gpus + 1, machine.gpus + 1)
        if model.config.heads % count == 0 and share_gib * serve.gpus / count <= gpu.memory_gib * _MOST_OF_MEMORY
    ]
    more = "engine: vllm, " if serve.engine == "torch" else ""
    hint = f"write `serve: {{{more}gpus: {fitting[0]}, …}}`" if fitting else "serve it on machines with more memory"
    raise RecipeError(
        f"the exported weights take {share_gib:.0f} GiB of each GPU, and {machine.gpu} has {gpu.memory_gib:.0f}",
        where=recipe.where("serve.gpus"),
        hint=hint,
    )
