"""Which layout a recipe runs on: what the planner is asked, and how nodes or this machine are shared out.

`planned_model` reads a recipe for the planner. `plan_on_cluster` places a run on the nodes of a cluster, and
`planned_layout` on this machine. Both choose the layout, or check the one that is written, before any work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from trainshed.catalog.machines import Machine, find_machine
from trainshed.catalog.models import architecture
from trainshed.data.sampling.schedule import BatchRampUp, BatchSchedule
from trainshed.engines.performance_args import apply_performance_args
from trainshed.errors import InputError, RecipeError, TrainshedError
from trainshed.models.families import read_hf_config
from trainshed.plan import layout_warnings
from trainshed.plan.auto_layout import (
    AutoLayout,
    auto_layout_for_cpu,
    auto_layout_for_cpu_nodes,
    auto_layout_for_gpus,
    local_hardware,
    machine_memory_gib,
    uncalibrated_notes,
)
from trainshed.plan.budget.budget import RunBudget, RunCost
from trainshed.plan.layout import RankLayout, resolve_layout
from trainshed.plan.legality import layout_problems
from trainshed.plan.lora_shape import DOUBLE_QUANTIZED_NF4_BYTES, LoraShape, lora_shape
from trainshed.plan.model_shape import model_shape
from trainshed.plan.performance.engine_constants import EngineOptions
from trainshed.plan.phase_plan import PlannedPhase
from trainshed.plan.planner import Plan, PlannedModel, build_request, make_plan
from trainshed.plan.training_shape import Hardware, hardware_of
from trainshed.recipe import Cluster, Layout, ModelConfig, Recipe, Source, load_cluster
from trainshed.recipe.optimizer import MuonOptions
from trainshed.recipe.phase_spans import PhaseSpan, phase_spans
from trainshed.recipe.registered import registered_class
from trainshed.recipe.validation import recipe_error, validate
from trainshed.recipe.yaml_io import SourceMap, YamlDocument
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import StoreOptions, join, open_store, parse
from trainshed.workflow.prepare import PreparedRun, store_options
from trainshed.workflow.runnable import check_layout, check_model


def planned_model(recipe: Recipe, cluster: Cluster) -> PlannedModel:
    """Return what the planner must know of a recipe; the architecture may be that of its base weights.

    Of a recipe in phases it is the phase with the longest sequences, among those that leave the layout to the recipe.
    """
    if spans := phase_spans(recipe):
        return _planned_phases(spans, cluster)
    config = recipe.trained_architecture(architecture(recipe) or weights_architecture(recipe, cluster))
    train, ramp = recipe.train, recipe.train.batch_ramp
    schedule = BatchSchedule(
        train.global_batch, BatchRampUp(ramp.start, ramp.increment, ramp.samples) if ramp is not None else None
    )
    length = recipe.data.sequence_length or config.max_positions
    notes = []
    steps = train.steps
    if train.tokens is not None:
        steps = schedule.steps_for(-(-train.tokens // length))
    if train.epochs is not None:
        notes.append("hours and cost are left out: `epochs` has a length only once the data is prepared")
    if ramp is not None:
        notes.append(f"planned for the full batch of {train.global_batch:,}: steps of the ramp are shorter")
    lora = planned_lora(recipe)
    if lora is not None:
        model = model_shape(config)
        adapters = lora.weights(model)
        share = adapters / (adapters + model.weights)
        notes.append(f"planned for adapters: {share:.2%} of the weights are trained and saved, the rest are read only")
    if added := recipe.model.added_tokens:
        notes.append(
            f"planned with the vocabulary of the base, {config.vocab_size:,}, without {len(added)} added tokens"
        )
    if train.mode == "dpo":
        notes.append("planned for DPO: a sequence holds both answers of its pairs, and the reference runs forward too")
    documents = PlannedDocuments.of(recipe, cluster, length)
    if documents.note is not None:
        notes.append(documents.note)
    options, option_notes = _planned_options(recipe)
    notes += option_notes
    notes += [
        f"planned as {usual}: what the {kind} `{name}` of a plugin takes is not known"
        for _, kind, name in recipe.registered_names()
        if (usual := {"optimizer": "AdamW", "loss": "cross entropy"}.get(kind)) is not None
        and registered_class(kind, name) is not None
    ]
    layout = None if isinstance(recipe.layout, str) else recipe.layout
    if layout is not None and layout.overlap == "tp":
        notes.append("planned as if nothing hid tp's communication: what layout.overlap hides was never measured")
    preset = recipe.model.preset or recipe.model.from_ or config.family
    return PlannedModel(
        recipe.name,
        config,
        preset,
        length,
        tuple(schedule.sizes),
        train.precision,
        recipe.engine.name,
        layout,
        steps,
        tuple(notes),
        options,
        lora=lora,
        document_length=documents.length,
        preference=train.mode == "dpo",
    )


def _planned_options(recipe: Recipe) -> tuple[EngineOptions, list[str]]:
    """Return what the optimizer and `engine.args` change for the planner, and notes about it."""
    optimizer, notes = recipe.train.optimizer, []
    muon = (optimizer.muon or MuonOptions()) if optimizer.name == "muon" else None
    usual = EngineOptions(
        bf16_states=optimizer.states == "bf16",
        muon_steps=0 if muon is None else muon.ns_steps,
        averaged=recipe.train.ema is not None,
    )
    if muon is not None:
        notes.append("Muon's update is predicted from its FLOPs and bytes: it was never measured")
    if any(group.freeze for group in optimizer.groups or ()):
        notes.append("frozen tensors are planned as trained ones: their gradients are computed, their states are not")
    options, counted = apply_performance_args(recipe.engine.args, usual)
    if counted:
        notes.append(f"counted of engine.args: {', '.join(counted)}")
    return options, notes


def _planned_phases(spans: tuple[PhaseSpan, ...], cluster: Cluster) -> PlannedModel:
    models = [planned_model(span.recipe, cluster) for span in spans]
    phases = tuple(
        PlannedPhase(
            span.name,
            span.steps,
            model.config,
            model.sequence_length,
            max(model.batch_sizes),
            model.layout if span.own_layout else None,
            model.document_length,
        )
        for span, model in zip(spans, models, strict=True)
    )
    shared = [model for span, model in zip(spans, models, strict=True) if not span.own_layout] or models[:1]
    longest = max(shared, key=lambda model: (model.sequence_length, max(model.batch_sizes)))
    note = f"planned for sequences of {longest.sequence_length:,} tokens, the longest; time and cost are of all phases"
    return replace(longest, steps=spans[-1].end, phases=phases, notes=(*longest.notes, note))


def phase_layouts(recipe: Recipe, layout: RankLayout) -> tuple[RankLayout, ...]:
    """Return the layout of each phase of a recipe: its own, on as many ranks, or that of the run."""
    layouts: list[RankLayout] = []
    for span in phase_spans(recipe):
        written, config = span.recipe.layout, span.recipe.model.config
        if not span.own_layout or isinstance(written, str):
            layouts.append(layout)
            continue
        assert config is not None, "preparing writes it out"
        layouts.append(_own_layout(recipe, span, written, config, layout.world_size))
    return tuple(layouts)


def _own_layout(recipe: Recipe, span: PhaseSpan, written: Layout, config: ModelConfig, ranks: int) -> RankLayout:
    where = recipe.where(f"train.phases.{span.number}.layout")
    try:
        return resolve_layout(written, config, world_size=ranks)
    except InputError as error:
        raise RecipeError(
            f"a phase has as many ranks as the run, {ranks}: {error.what}",
            where=where,
            hint="leave `dp` out: it takes the ranks that are left",
        ) from None


def check_phases(recipe: Recipe, model: PlannedModel, layout: RankLayout) -> tuple[RankLayout, ...]:
    """Return the layout of each phase; one that cannot train its phase is refused."""
    layouts: list[RankLayout] = []
    for number, phase in enumerate(model.phases):
        own = phase.layout
        used = layout
        if own is not None:
            used = _own_layout(recipe, phase_spans(recipe)[number], own, phase.config, layout.world_size)
        problems = layout_problems(
            used,
            phase.config,
            sequence_length=phase.sequence_length,
            batch_sizes=(phase.global_batch,),
            engine=model.engine,
            lora=model.lora is not None,
            quantized=model.quantized,
        )
        if problems:
            first = problems[0]
            raise RecipeError(
                f"{used} cannot train phase {phase.name}: {first.what}",
                where=recipe.where(f"train.phases.{number}" + ("" if own is None else ".layout")),
                hint=first.hint,
            )
        check_layout(recipe, phase.config, used)
        layouts.append(used)
    return tuple(layouts)


def planned_lora(recipe: Recipe) -> LoraShape | None:
    """Describe the adapters of a recipe to the planner; Megatron has one for matrices that it keeps as one."""
    lora, engine = recipe.train.lora, recipe.engine.name
    if lora is None:
        return None
    shape = replace(lora_shape(lora, len(recipe.model.added_tokens or ())), joint=engine in ("megatron", "nemo"))
    if engine == "torchtune" and lora.quantize == "nf4":
        return replace(shape, base_bytes=DOUBLE_QUANTIZED_NF4_BYTES)
    return shape


ASSUMED_DOCUMENT = 1024
"""Tokens of a conversation, where none is prepared yet: an assumption, which a plan states."""
_LENGTHS_READ = 1_000_000
"""Documents of a shard whose lengths are read: more say nothing more."""


@dataclass(frozen=True)
class PlannedDocuments:
    """How long the documents are that a run keeps apart, and what a plan says of it."""

    length: float | None = None
    """Of the document that an average token is in; None where documents are not kept apart."""
    note: str | None = None

    @classmethod
    def of(cls, recipe: Recipe, cluster: Cluster, sequence_length: int) -> PlannedDocuments:
        """Read the lengths of prepared tokens on this machine; what is not prepared has an assumed length."""
        if not recipe.document_mask:
            return cls()
        options, sources = store_options(cluster), recipe.data.train
        lengths = [_source_document_length(source, options, sequence_length) for source in sources]
        known = [length for length in lengths if length is not None]
        if known and len(known) == len(sources):
            shares = recipe.data.weights() or (1 / len(known),) * len(known)
            length = sum(share * length for share, length in zip(shares, known, strict=True))
            return cls(length, f"planned for documents of {length:,.0f} tokens, as the data has them, kept apart")
        length = min(ASSUMED_DOCUMENT, sequence_length)
        return cls(
            float(length),
            f"planned for documents of {length:,} tokens, kept apart: an assumption, as the data is not prepared here; "
            "shorter ones make attention cheaper",
        )


def _source_document_length(source: Source, options: StoreOptions, sequence_length: int) -> float | None:
    """The length of the document that an average token of prepared tokens is in; None where they are not here."""
    if source.tokens is None or any("://" in prefix for prefix in source.tokens):
        return None
    from trainshed.data.tokens.indexed_dataset import IndexedDataset
    from trainshed.data.tokens.token_files import shard_prefixes

    tokens = squares = 0.0
    try:
        for shard in (shard for prefix in source.tokens for shard in shard_prefixes(prefix, options)):
            with IndexedDataset(shard, options) as dataset:
                every = max(1, dataset.sequences // _LENGTHS_READ)
                # What is longer than a sequence is cut into sequences.
                lengths = dataset.lengths[::every].clip(max=sequence_length).astype("f8")
                tokens, squares = tokens + every * float(lengths.sum()), squares + every * float((lengths**2).sum())
    except TrainshedError:
        return None
    return squares / tokens if tokens else None


def weights_architecture(recipe: Recipe, cluster: Cluster) -> ModelConfig:
    """Return the architecture that base weights bring: their config.json is read, not they."""
    address = recipe.model.from_
    assert address is not None, "a model without an architecture has weights"
    try:
        return address_architecture(address, cluster)
    except TrainshedError as error:
        raise RecipeError(
            f"the architecture is that of {address}, which cannot be read: {error.what}",
            where=recipe.where("model.from"),
            hint="name it besides: model.preset=NAME",
        ) from None


def address_architecture(address: str, cluster: Cluster) -> ModelConfig:
    """Return the architecture in the config.json of a folder, here, in a store or on the Hub; no weights are needed."""
    store, path = open_store(parse(address), store_options(cluster))
    content = store.read(join(path, "config.json"))
    try:
        body = orjson.loads(content)
    except ValueError:
        raise InputError("its config.json is not JSON", where=f"{address}/config.json") from None
    return read_hf_config(body, f"{address}/config.json")


@dataclass(frozen=True)
class NodePlacement:
    """How many nodes, and how many ranks on each; no GPUs where the cluster names no machine."""

    nodes: int
    ranks_per_node: int
    machine: Machine | None

    @property
    def gpus_per_node(self) -> int:
        """GPUs taken of each node."""
        return self.ranks_per_node if self.machine is not None else 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class PlannedRun:
    """A recipe's layout on a cluster, and what the planner says of it."""

    layout: RankLayout
    placement: NodePlacement
    save_seconds: float | None
    """How long one checkpoint is written; None where no storage is named."""
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    predicted: Mapping[str, Any] | None = None
    phase_layouts: tuple[RankLayout, ...] = ()
    """The layout of each phase of `train.phases`."""
    cost: RunCost | None = None
    """Hours and dollars of the whole run; None where nothing is predicted."""


def plan_on_cluster(
    recipe: Recipe, cluster: Cluster, model: PlannedModel, nodes: int | None, gpus: int | None, despite_memory: bool
) -> PlannedRun:
    """Choose or check the layout of a recipe on a cluster; raises `InputError` where it could not train there."""
    machine = find_machine(cluster.gpu_machine) if cluster.gpu_machine else None
    if machine is None:
        return _plan_on_cpus(recipe, cluster, model, nodes)
    placement = _node_placement(recipe, cluster, machine, nodes, gpus)
    asked = build_request(model, hardware_of(machine), (placement.world_size,), cluster, machine=machine, recipe=recipe)
    plan = make_plan(asked)
    _check_memory(recipe, plan, despite_memory)
    assert plan.budget is not None, "`answer` always makes one"
    return PlannedRun(
        layout=plan.chosen.layout,
        placement=placement,
        save_seconds=plan.budget.checkpoint.write_seconds,
        reasons=tuple(_reasons(plan)),
        notes=(_headline(plan, plan.budget, saves=recipe.checkpoint.save), *plan.notes),
        predicted=_predicted(plan, plan.budget),
        phase_layouts=check_phases(recipe, model, plan.chosen.layout),
        cost=plan.budget.run,
    )


def _node_placement(
    recipe: Recipe, cluster: Cluster, machine: Machine, nodes: int | None, gpus: int | None
) -> NodePlacement:
    if nodes is not None and gpus is not None:
        raise InputError("--nodes and --gpus say the same thing twice", hint="keep one of them")
    where = "--gpus" if gpus is not None else "--nodes"
    if gpus is not None:
        if gpus > machine.gpus and gpus % machine.gpus:
            raise InputError(
                f"{gpus} GPUs are not a whole number of {machine.name} nodes with {machine.gpus} each",
                where=where,
                hint=f"write {gpus // machine.gpus * machine.gpus} or {-(-gpus // machine.gpus) * machine.gpus}",
            )
        nodes, per_node = -(-gpus // machine.gpus), min(gpus, machine.gpus)
    else:
        nodes, where = _node_count(recipe, cluster, nodes)
        per_node = machine.gpus
    check_node_count(cluster, nodes, where)
    return NodePlacement(nodes, per_node, machine)


def _node_count(recipe: Recipe, cluster: Cluster, nodes: int | None) -> tuple[int, str]:
    if nodes is not None:
        return nodes, "--nodes"
    if recipe.resources.nodes is not None:
        return recipe.resources.nodes, recipe.where("resources.nodes")
    return cluster.nodes.default, cluster.where("nodes.default")


def check_node_count(cluster: Cluster, nodes: int, where: str) -> None:
    """Raise where a cluster has fewer than `nodes` nodes; `where` says who asked."""
    if nodes < 1:
        raise InputError(f"{nodes} nodes", where=where, hint="write 1 or more")
    if cluster.nodes.max is not None and nodes > cluster.nodes.max:
        raise InputError(
            f"{nodes} nodes, and the cluster {cluster.name} has {cluster.nodes.max} at most",
            where=where,
            hint=f"write {cluster.nodes.max} or less; {cluster.where('nodes.max')} says so",
        )


def _check_memory(recipe: Recipe, plan: Plan, despite_memory: bool) -> None:
    capacity = plan.request.training.hardware.memory_gib
    for phase in plan.phases:
        if not phase.prediction.fits and not despite_memory:
            raise RecipeError(
                f"{phase.text()}: a GPU has {capacity:.0f}",
                where=recipe.where("train.phases"),
                hint="give the phase a layout of its own, or more nodes; --despite-memory submits it anyway",
            )
    chosen = plan.chosen
    if chosen.fits or despite_memory:
        return
    raise RecipeError(
        f"{chosen.layout} needs {chosen.memory.total:.0f} GiB on its fullest GPU, which has {capacity:.0f}",
        where=recipe.where("layout"),
        hint="write `layout: auto`, or more nodes; --despite-memory submits it anyway",
    )


def _plan_on_cpus(recipe: Recipe, cluster: Cluster, model: PlannedModel, nodes: int | None) -> PlannedRun:
    """A cluster without GPUs: the layout is written out, or data parallel with one rank a node."""
    count, where = _node_count(recipe, cluster, nodes)
    check_node_count(cluster, count, where)
    sizes = model.layout_batch_sizes
    reasons: tuple[str, ...] = ()
    if model.layout is None:
        chosen = auto_layout_for_cpu_nodes(model, count)
        layout, reasons = chosen.layout, chosen.reasons
    else:
        layout = resolve_layout(model.layout, model.config)
    if layout.world_size % count:
        raise InputError(
            f"the {layout.world_size} ranks of {layout} do not fill {count} nodes evenly",
            where=where,
            hint=f"write a number of nodes that divides {layout.world_size}",
        )
    problems = layout_problems(
        layout,
        model.config,
        sequence_length=model.sequence_length,
        batch_sizes=sizes,
        engine=model.engine,
        lora=model.lora is not None,
        quantized=model.quantized,
    )
    if problems:
        raise recipe_error(problems, recipe.places)
    own_layouts = check_phases(recipe, model, layout)
    notes = ("machine: cpu: nothing is predicted, and ranks run on processors", *uncalibrated_notes(cluster))
    placement = NodePlacement(count, layout.world_size // count, None)
    return PlannedRun(layout, placement, None, reasons, notes, phase_layouts=own_layouts)


def _headline(plan: Plan, budget: RunBudget, *, saves: bool) -> str:
    chosen, training = plan.chosen, plan.request.training
    saving = budget.checkpoint.write_seconds
    saved = f", a checkpoint in {saving:.0f} s" if saving is not None and saves else ""
    run = budget.run
    hours = f", {run.hours:.1f} hours" if run is not None else ""
    cost = f" and {run.cost:,.0f} dollars" if run is not None and run.cost is not None else ""
    return (
        f"planned: {chosen.layout} on {training.gpus} {training.hardware.gpu_name}, {chosen.step_seconds:.3g} s a "
        f"step, {chosen.mfu:.1%} MFU, {chosen.memory.total:.0f} of {training.hardware.memory_gib:.0f} GiB"
        f"{saved}{hours}{cost}"
    )


def _reasons(plan: Plan) -> list[str]:
    if not plan.searched:
        return []
    return [f"layout: auto chose {plan.chosen.layout} among {plan.considered:,} layouts"]


def _predicted(plan: Plan, budget: RunBudget) -> dict[str, Any]:
    return plan.predicted_figures() | {
        "checkpoint": budget.checkpoint.to_plain(),
        "calibration": plan.calibration,
    }


def _local_hardware() -> Hardware | None:
    """The GPUs that `layout: auto` would plan for, None without any; those that are not in the catalog are an error."""
    from trainshed.engines.torch.rank_env import gpu_count, gpu_device_name

    gpus = gpu_count()
    return local_hardware(gpu_device_name(), gpus) if gpus else None


def automatic_layout(recipe: Recipe, cluster: Cluster | None = None, *, world_size: int | None = None) -> AutoLayout:
    """Choose the layout of a run on this machine: on all its GPUs, or on one CPU process; or on `world_size` ranks."""
    cluster = cluster or load_cluster()
    model = planned_model(recipe, cluster)
    hardware = _local_hardware()
    if hardware is None:
        chosen = auto_layout_for_cpu(model, world_size or 1, machine_memory_gib())
        return replace(chosen, reasons=(*chosen.reasons, *uncalibrated_notes(cluster)))
    return auto_layout_for_gpus(model, hardware, world_size or hardware.gpus_per_node, cluster, recipe)


def run_layout(
    run: PreparedRun,
    cluster: Cluster | None = None,
    *,
    keys: dict[str, object] | None = None,
    world_size: int | None = None,
    reporter: Reporter = SILENT,
) -> RankLayout:
    """Return the layout a run trains on, filled in and checked: the recipe's with `keys` over it, or the planner's."""
    return planned_layout(run.recipe, cluster, keys=keys, world_size=world_size, reporter=reporter).layout


def planned_layout(
    recipe: Recipe,
    cluster: Cluster | None = None,
    *,
    keys: dict[str, object] | None = None,
    world_size: int | None = None,
    reporter: Reporter = SILENT,
) -> AutoLayout:
    """Return the layout a recipe trains on here, filled in and checked, with the planner's reasons where it chose.

    `cluster` is where the run is started, and may name a calibration; None: `local` as it is shipped.
    """
    cluster = cluster or load_cluster()
    model, written = planned_model(recipe, cluster), recipe.layout
    if isinstance(written, str) and not keys:
        chosen = automatic_layout(recipe, cluster, world_size=world_size)
    else:
        plain = {} if isinstance(written, str) else written.model_dump(exclude_unset=True)
        wanted = validate(Layout, YamlDocument(plain | (keys or {}), SourceMap("--layout")))
        chosen = AutoLayout(resolve_layout(wanted, model.config, world_size=world_size))
    for reason in chosen.reasons:
        reporter.note(reason)
    asked = {"sequence_length": model.sequence_length, "batch_sizes": model.layout_batch_sizes}
    problems = layout_problems(
        chosen.layout, model.config, **asked, lora=model.lora is not None, quantized=model.quantized
    )
    if problems:
        raise recipe_error(problems, recipe.places)
    check_model(recipe, model.config)
    check_layout(recipe, model.config, chosen.layout)
    check_phases(recipe, model, chosen.layout)
    for warning in layout_warnings(chosen.layout, model.config, **asked):
        reporter.warn(warning)
    return chosen
