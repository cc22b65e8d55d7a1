"""`layout: auto` on this machine: the planner's best layout for its GPUs, a simple rule without GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

from trainshed.catalog.gpus import HOW_TO_DESCRIBE_GPU, gpu_by_device_name
from trainshed.errors import InputError
from trainshed.plan.layout import RankLayout, distinct_names, resolve_layout
from trainshed.plan.legality.rules import divisors
from trainshed.plan.model_shape import ModelShape, model_shape
from trainshed.plan.planner import PlannedModel, build_request, calibration_note, make_plan
from trainshed.plan.training_shape import Hardware, hardware_of_gpu
from trainshed.recipe import Cluster, Layout, Recipe
from trainshed.this_machine import memory_bytes

_GIB = 2**30
_CPU_SHARE = 0.5
"""Share of a machine's memory that training on its CPU may take: a laptop has other things to do."""
_PLANNED_AS = {"fp64": "fp32"}
"""fp64 is for proofs; it is planned as fp32."""


@dataclass(frozen=True)
class AutoLayout:
    """A layout, and sentences that say why it was chosen; none if a person wrote it."""

    layout: RankLayout
    reasons: tuple[str, ...] = ()
    calibration: Mapping[str, Any] | None = None
    """The calibration file, its hash and the entry that was used; None if no file was named."""
    predicted: Mapping[str, Any] | None = None
    """Step time, MFU and memory of the fullest GPU; None if nothing is predicted."""


def local_hardware(device_name: str, gpus: int) -> Hardware:
    """Describe the GPUs of one kind that this machine has, from the catalog; one that is not there is an error."""
    gpu = gpu_by_device_name(device_name)
    if gpu is None:
        raise InputError(
            f"`layout: auto` needs the figures of this machine's GPU, and `{device_name}` is not in the catalog",
            where="layout",
            hint=f"write a layout, for example {{dp: {gpus}}}; or {HOW_TO_DESCRIBE_GPU}",
        )
    hardware = hardware_of_gpu(gpu.name)
    return replace(hardware, gpus_per_node=gpus, link_domain=min(gpus, hardware.link_domain))


def auto_layout_for_gpus(
    model: PlannedModel, hardware: Hardware, gpus: int, cluster: Cluster, recipe: Recipe | None = None
) -> AutoLayout:
    """Search the layout of all GPUs, as `trainshed plan` does."""
    precision = _PLANNED_AS.get(model.precision, model.precision)
    wanted = replace(model, precision=precision, layout=None)
    request = build_request(wanted, hardware, (gpus,), cluster, recipe=recipe)
    plan = make_plan(request, top=2)
    chosen = plan.chosen
    layouts = [chosen.layout, *(prediction.layout for prediction in plan.runners_up[:1])]
    names = distinct_names(
        *layouts, describe=lambda layout: f"{layout}, micro_batch {layout.micro_batch}, recompute {layout.recompute}"
    )
    reasons = [
        f"layout: auto chose {names[0]} for {gpus} {hardware.gpu_name}: of {plan.considered:,} layouts the fastest "
        f"that fits, {chosen.step_seconds:.3g} s a step and {chosen.memory.total:.1f} of {hardware.memory_gib:.1f} GiB "
        "predicted"
    ]
    if plan.runners_up:
        slower = plan.runners_up[0].step_seconds / chosen.step_seconds - 1
        reasons.append(f"the next is {names[1]}: {abs(slower):.1%} {'slower' if slower >= 0 else 'faster'}")
    if (used := calibration_note(request)) is not None:
        reasons.append(used)
    if precision != model.precision:
        reasons.append(f"{model.precision} was planned as {precision}")
    return AutoLayout(chosen.layout, tuple(reasons), plan.calibration, plan.predicted_figures())


def auto_layout_for_cpu(run: PlannedModel, ranks: int, memory_gib: float) -> AutoLayout:
    """Data parallel over `ranks` processes here, and the largest micro-batch whose activations fit half the memory."""
    model = model_shape(run.config)
    sequence_gib = _cpu_activations_gib(model, run)
    room = _CPU_SHARE * memory_gib / ranks - _states_gib(model, run)
    share = gcd(*run.layout_batch_sizes) // ranks or 1
    fitting = [size for size in divisors(share) if size * sequence_gib <= room]
    micro_batch = max(fitting, default=1)
    layout = resolve_layout(Layout(dp=ranks, micro_batch=micro_batch), run.config)
    processes = "one process" if ranks == 1 else f"{ranks} processes"
    reason = f"layout: auto found no GPU here and chose {processes} with micro_batch {micro_batch}: "
    if not fitting:
        least = sequence_gib + _states_gib(model, run)
        reason += f"even one sequence is some {least:.1f} GiB, more than half of the {memory_gib:.1f} GiB here"
    elif micro_batch == share:
        reason += f"all that a rank has of a batch, some {micro_batch * sequence_gib:.1f} GiB"
    else:
        reason += (
            f"some {micro_batch * sequence_gib:.1f} GiB; a larger one would take more than half of the "
            f"{memory_gib:.1f} GiB here"
        )
    return AutoLayout(layout, (reason,))


def auto_layout_for_cpu_nodes(run: PlannedModel, nodes: int) -> AutoLayout:
    """Data parallel, one process on each node of a cluster without GPUs.

    The memory of such a node is not known here, so the micro-batch is one sequence.
    """
    layout = resolve_layout(Layout(dp=nodes, micro_batch=1), run.config)
    sequence_gib = _cpu_activations_gib(model_shape(run.config), run)
    needed = _states_gib(model_shape(run.config), run) + sequence_gib
    reason = (
        f"layout: auto chose one process on each of {nodes} nodes without GPUs with micro_batch 1, some {needed:.1f} "
        f"GiB a node: what memory they have is not known here; a larger layout.micro_batch takes {sequence_gib:.1f} "
        "GiB more for each sequence"
    )
    return AutoLayout(layout, (reason,))


def uncalibrated_notes(cluster: Cluster) -> tuple[str, ...]:
    """Say that a calibration is not used where ranks run on CPUs, if the cluster names one."""
    if cluster.calibration is None:
        return ()
    return (f"calibration: {cluster.calibration} is not used: nothing is predicted for ranks on CPUs",)


def machine_memory_gib() -> float:
    """Return the memory of this machine, or of the container that this process is in."""
    whole = memory_bytes()
    limit = Path("/sys/fs/cgroup/memory.max")
    written = limit.read_text().strip() if limit.is_file() else "max"
    return (min(whole, int(written)) if written.isdigit() else whole) / _GIB


def _cpu_activations_gib(model: ModelShape, run: PlannedModel) -> float:
    """Activations of one sequence, roughly: every matmul's input and output in fp32, and the logits three times."""
    matrices = (*model.attention_matrices, *model.mlp_matrices(model.ffn))
    per_layer = sum(matrix.inputs + matrix.outputs for matrix in matrices) + 4 * model.hidden
    if model.experts is not None:
        routed = sum(matrix.inputs + matrix.outputs for matrix in model.expert_matrices)
        per_layer += model.experts.top_k * routed
    elements = model.layers * per_layer + 3 * model.vocab_size
    return 4 * elements * run.sequence_length / _GIB


def _states_gib(model: ModelShape, run: PlannedModel) -> float:
    """Weights, gradients and moments in fp32; of adapters, and the frozen weights, or a copy for reference."""
    if run.lora is not None:
        return (4 * model.weights + 16 * run.lora.weights(model)) / _GIB
    return (20 if run.preference else 16) * model.weights / _GIB
