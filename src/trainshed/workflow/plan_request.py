"""What a person asks the planner (a recipe and a cluster, or flags) as a request that it can answer.

Flags win over the recipe, and the recipe wins over the cluster.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from trainshed.catalog.gpus import find_gpu
from trainshed.catalog.machines import Machine, find_machine, machine_of_gpu
from trainshed.catalog.models import model_preset
from trainshed.data.sampling.schedule import BatchSchedule
from trainshed.errors import InputError, RecipeError, TrainshedError
from trainshed.plan.layout import parse_layout
from trainshed.plan.planner import PlannedModel, PlanRequest, build_request
from trainshed.plan.search.scaling import doubling_counts
from trainshed.plan.training_shape import Hardware, hardware_of, hardware_of_gpu
from trainshed.recipe import Cluster, Layout, ModelConfig, Recipe, as_cluster, as_recipe, split_overrides
from trainshed.recipe.cluster import DEFAULT_CLUSTER
from trainshed.recipe.section import Count
from trainshed.recipe.validation import validate
from trainshed.recipe.yaml_io import SourceMap, YamlDocument
from trainshed.workflow.layout import address_architecture, planned_model
from trainshed.workflow.runnable import check_runnable

_RECIPE_KEYS = {
    "model": "model.preset",
    "seq": "data.sequence_length",
    "global_batch": "train.global_batch",
    "precision": "train.precision",
    "engine": "engine",
    "steps": "train.steps",
    "tokens": "train.tokens",
}
"""Flags that stand in for keys of a recipe: with a recipe there, its keys are changed instead."""
ENGINES = ("torch", "megatron", "nemo", "torchtune")
_RANGE = re.compile(r"^(\d+)\.\.(\d+)$")


@dataclass(frozen=True)
class PlanFlags:
    """What a person wrote; None where they wrote nothing."""

    recipe: Recipe | str | os.PathLike[str] | None = None
    overrides: tuple[str, ...] = ()
    on: Cluster | str | os.PathLike[str] | None = None
    model: str | None = None
    gpu: str | None = None
    machine: str | None = None
    gpus: str | None = None
    nodes: int | None = None
    seq: int | None = None
    global_batch: int | None = None
    precision: str | None = None
    layout: str | None = None
    engine: str | None = None
    steps: int | None = None
    tokens: str | None = None
    price: float | None = None
    calibration: str | None = None

    def check(self) -> None:
        """Refuse flags that contradict each other, and questions that name nothing to plan."""
        for one, other in (("gpus", "nodes"), ("steps", "tokens")):
            if self._given(one) and self._given(other):
                raise InputError(f"--{one} and --{other} say the same thing twice", hint="keep one of them")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not 0 < value < math.inf:
                raise InputError(f"{value:g} is not a number above 0", where=flag_text(field.name))
        if self.engine is not None and self.engine not in ENGINES:
            hint = f"write {', '.join(ENGINES[:-1])} or {ENGINES[-1]}"
            raise InputError(f"there is no engine `{self.engine}`", where="--engine", hint=hint)
        if self.recipe is None:
            self._check_without_recipe()
            return
        for name, key in _RECIPE_KEYS.items():
            if self._given(name):
                raise InputError(
                    f"RECIPE and {flag_text(name)} both say it: with a recipe, its key `{key}` decides",
                    where=flag_text(name),
                    hint=f"write {key}={getattr(self, name)}, or leave RECIPE out",
                )

    def _check_without_recipe(self) -> None:
        if self.model is None:
            raise InputError(
                "there is nothing to plan: no recipe, no model",
                hint="trainshed plan RECIPE --on CLUSTER, or trainshed plan --model llama3-70b --gpu h100 --gpus 128 "
                "--seq 8192 --global-batch 1024",
            )
        for name, example in (("seq", "8192"), ("global_batch", "1024")):
            if not self._given(name):
                raise InputError("is missing", where=flag_text(name), hint=f"write {flag_text(name)} {example}")

    def _given(self, name: str) -> bool:
        return getattr(self, name) is not None

    def gpu_counts(self) -> tuple[int, ...]:
        """Return the numbers of GPUs in `--gpus 128` or `--gpus 8..4096` (doubling); none where it is not given."""
        text = self.gpus
        if text is None:
            return ()
        if text.isdecimal() and int(text) > 0:
            return (int(text),)
        match = _RANGE.match(text)
        if match is None:
            raise InputError(
                f"`{text}` is neither a number of GPUs nor a range",
                where="--gpus",
                hint="write --gpus 128, or --gpus 8..4096 for a scaling curve",
            )
        return tuple(doubling_counts(int(match[1]), int(match[2])))


def check_top(top: int) -> None:
    """Refuse to show no layout at all."""
    if top < 1:
        raise InputError(f"{top} layouts cannot be shown", where="--top", hint="write 1 or more")


def split_values(written: Iterable[str]) -> tuple[str, ...]:
    """Return the values of a flag that may be given again, or with commas, each once: `h100,h200`."""
    values = [value.strip() for text in written for value in text.split(",")]
    return tuple(dict.fromkeys(filter(None, values)))


def flag_text(name: str) -> str:
    """Return a flag as it is written."""
    return f"--{name.replace('_', '-')}"


CatalogEntry = TypeVar("CatalogEntry")


def requested_machine(flags: PlanFlags, cluster: Cluster) -> tuple[Machine, Hardware]:
    """The machine of the flags, or of the cluster; for a GPU alone the one its entry names."""
    if flags.machine is not None:
        machine = find_in_catalog("--machine", find_machine, flags.machine)
        if flags.gpu is not None:
            wanted, has = find_in_catalog("--gpu", find_gpu, flags.gpu).name, find_gpu(machine.gpu).name
            if wanted != has:
                raise InputError(
                    f"--machine {flags.machine} has {has}, and --gpu says {wanted}",
                    where="--gpu",
                    hint="leave --gpu out: the machine says it",
                )
        return machine, hardware_of(machine)
    if flags.gpu is not None:
        machine = find_in_catalog("--gpu", machine_of_gpu, flags.gpu)
        return machine, hardware_of_gpu(flags.gpu)
    if cluster.machine is None:
        raise InputError(
            f"the cluster {cluster.name} does not say what machines it has",
            where="--on" if flags.on else None,
            hint="write --gpu h100, --machine a3-mega, or --on CLUSTER with a `machine:` in its file",
        )
    if cluster.gpu_machine is None:
        raise InputError(
            f"the cluster {cluster.name} has no GPUs, and nothing is predicted for CPUs",
            where=cluster.where("machine"),
            hint="write --gpu h100 or --machine a3-mega to plan for GPUs",
        )
    machine = find_in_catalog(cluster.where("machine"), find_machine, cluster.gpu_machine)
    return machine, hardware_of(machine)


def requested_gpu_counts(
    flags: PlanFlags, cluster: Cluster, recipe: Recipe | None, hardware: Hardware, layout: Layout | None
) -> tuple[int, ...]:
    """How many GPUs, smallest first: flags win over the recipe, the recipe over the cluster."""
    counts, where = flags.gpu_counts(), "--gpus"
    if not counts:
        nodes, where = _requested_nodes(flags, cluster, recipe)
        if nodes is not None:
            counts = (nodes * hardware.gpus_per_node,)
        elif layout is not None:
            counts, where = (layout.tp * layout.pp * layout.cp * (layout.dp or 1),), "layout"
        else:
            raise InputError("on how many GPUs?", hint="write --gpus 128, --nodes 16, or --gpus 8..4096 for a curve")
    per_node, most = hardware.gpus_per_node, cluster.nodes.max
    for count in counts:
        if count > per_node and count % per_node:
            machine = hardware.machine or hardware.gpu_name
            raise InputError(
                f"{count} GPUs are not a whole number of {machine} machines with {per_node} each",
                where=where,
                hint=f"write {count // per_node * per_node} or {-(-count // per_node) * per_node}",
            )
        if flags.on is not None and most is not None and count > most * per_node:
            raise InputError(
                f"{count} GPUs are {-(-count // per_node)} nodes, and the cluster {cluster.name} has {most} at most",
                where=where,
                hint=f"write {most * per_node} or less, or leave --on out",
            )
    return counts


def _requested_nodes(flags: PlanFlags, cluster: Cluster, recipe: Recipe | None) -> tuple[int | None, str]:
    if flags.nodes is not None:
        return flags.nodes, "--nodes"
    if recipe is not None and recipe.resources.nodes is not None:
        return recipe.resources.nodes, recipe.where("resources.nodes")
    # On this machine the world size is the product of the layout.
    return (None, "") if cluster.target == "local" else (cluster.nodes.default, "--on")


def find_in_catalog(where: str, find: Callable[[str], CatalogEntry], name: str) -> CatalogEntry:
    """Find something of the catalog; an error says who asked for it."""
    try:
        return find(name)
    except InputError as error:
        raise InputError(error.what, where=error.where or where, hint=error.hint) from None


DEFAULT_PRECISION = "bf16"
DEFAULT_ENGINE = "torch"


def request_from_flags(flags: PlanFlags) -> PlanRequest:
    """Put a question together; raises `InputError` where it contradicts itself or leaves something open."""
    flags.check()
    for_recipe, for_cluster = split_overrides(flags.overrides)
    cluster = as_cluster(DEFAULT_CLUSTER if flags.on is None else flags.on, for_cluster)
    recipe = None if flags.recipe is None else as_recipe(flags.recipe, for_recipe)
    if recipe is not None:
        model = planned_model(recipe, cluster)
        if flags.on is not None:
            model = replace(
                model, notes=(*model.notes, *_engine_notes(recipe, cluster), *_refusal_notes(recipe, cluster))
            )
    else:
        model = _model_from_flags(flags, cluster)
    model_layout = _requested_layout(flags, model.layout)
    machine, hardware = requested_machine(flags, cluster)
    return build_request(
        replace(model, layout=model_layout),
        hardware,
        requested_gpu_counts(flags, cluster, recipe, hardware, model_layout),
        cluster,
        machine=machine,
        recipe=recipe,
        layout_flag=flags.layout is not None,
        calibration=flags.calibration,
        price=flags.price,
    )


def _engine_notes(recipe: Recipe, cluster: Cluster) -> tuple[str, ...]:
    """Say for which version a foreign engine would be rendered, where the recipe does not."""
    if recipe.engine.name != "megatron":
        return ()
    from trainshed.engines.megatron.versions import version_note

    note = version_note(recipe, cluster.image)
    return () if note is None else (note,)


def _refusal_notes(recipe: Recipe, cluster: Cluster) -> tuple[str, ...]:
    """A plan may be made of what cannot be run there yet; then it says so."""
    try:
        check_runnable(recipe, cluster)
    except RecipeError as error:
        why = "; ".join(str(error).splitlines())
        return (f"planned, but the cluster `{cluster.name}` would refuse this recipe: {why}",)
    return ()


def _model_from_flags(flags: PlanFlags, cluster: Cluster) -> PlannedModel:
    assert flags.model is not None, "`Flags.check` asks for it"
    assert flags.seq is not None, "likewise"
    assert flags.global_batch is not None, "likewise"
    config = _architecture_of(flags.model, cluster)
    schedule = BatchSchedule(flags.global_batch)
    notes = []
    if config.positions == "learned" and flags.seq > config.max_positions:
        raise InputError(
            f"{flags.seq} is more than the {config.max_positions} positions {flags.model} learns",
            where="--seq",
            hint=f"write {config.max_positions} or less",
        )
    steps = flags.steps
    if flags.tokens is not None:
        steps = schedule.steps_for(-(-_token_count(flags.tokens) // flags.seq))
    if flags.precision is None:
        notes.append(f"products in {DEFAULT_PRECISION}: no --precision was given")
    if flags.engine is None:
        notes.append(f"planned for the engine {DEFAULT_ENGINE}: no --engine was given")
    return PlannedModel(
        name=flags.model,
        config=config,
        preset=flags.model,
        sequence_length=flags.seq,
        batch_sizes=tuple(schedule.sizes),
        precision=flags.precision or DEFAULT_PRECISION,
        engine=flags.engine or DEFAULT_ENGINE,
        layout=None,
        steps=steps,
        notes=tuple(notes),
    )


def _architecture_of(written: str, cluster: Cluster) -> ModelConfig:
    """A model by its name in the catalog, or by the folder that has its config.json: here, in a store, on the Hub."""
    if "/" not in written and not Path(written).is_dir():
        return find_in_catalog("--model", model_preset, written)
    try:
        return address_architecture(written, cluster)
    except TrainshedError as error:
        hint = error.hint
        if "://" not in written and not Path(written).exists():
            hint = f"write hf://{written} for the Hub, the path of a folder, or a model of the catalog"
        raise InputError(f"{written} cannot be read: {error.what}", where="--model", hint=hint) from None


def _token_count(text: str) -> int:
    try:
        return TypeAdapter(Count).validate_python(text)
    except ValidationError:
        raise InputError(
            f"`{text}` is not a number of tokens", where="--tokens", hint="write for example 15T"
        ) from None


def _requested_layout(flags: PlanFlags, written: Layout | None) -> Layout | None:
    """The layout to judge: the recipe's with `--layout` over it; None: search."""
    if flags.layout is None:
        return written
    plain = {} if written is None else written.model_dump(exclude_unset=True)
    return validate(Layout, YamlDocument(plain | parse_layout(flags.layout), SourceMap("--layout")))
