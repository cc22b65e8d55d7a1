"""`layout: auto` on this machine: the planner's best on its GPUs, a plain rule where it has none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

from trainshed.catalog.gpus import HOW_TO_DESCRIBE_GPU, gpu_by_device_name
from trainshed.errors import InputError
from trainshed.plan.layout import RankLayout, resolve_layout
from trainshed.plan.legality.torch_rules import divisors
from trainshed.plan.model_shape import ModelShape, model_shape
from trainshed.plan.planner import PlannedModel, build_request, calibration_note, make_plan
from trainshed.plan.training_shape import Hardware, hardware_of_gpu
from trainshed.recipe import Cluster, Layout, Recipe

_GIB = 2**30
_CPU_SHARE = 0.5
"""Of a machine's memory, what training on its CPU may take: a laptop has other things to do."""
_PLANNED_AS = {"fp64": "fp32"}
"""Dtypes that are for proofs are planned as the nearest one that is for training."""


@dataclass(frozen=True)
class AutoLayout:
    """A layout, and why the planner chose it, in sentences; none where a person did."""

    layout: RankLayout
    reasons: tuple[str, ...] = ()
    calibration: Mapping[str, Any] | None = None
    """The file that the plan was calibrated by, its hash and the entry used; None where none was named."""


def local_hardware(device_name: str, gpus: int) -> Hardware:
    """Describe the GPUs of one kind that this machine has, from the catalog; one that is not there is an error."""
    found = gpu_by_device_name(device_name)
    if found is None:
        raise InputError(
            f"`layout: auto` needs the figures of this machine's GPU, and `{device_name}` is not in the catalog",
            where="layout",
            hint=f"write a layout, for example {{dp: {gpus}}}; or {HOW_TO_DESCRIBE_GPU}",
        )
    hardware = hardware_of_gpu(found.name)
    return replace(hardware, gpus_per_node=gpus, link_domain=min(gpus, hardware.link_domain))


def auto_layout_for_gpus(
    model: PlannedModel, hardware: Hardware, gpus: int, cluster: Cluster, recipe: Recipe | None = None
) -> AutoLayout:
    """Search the layout of all GPUs, as `trainshed plan` does."""
    precision = _PLANNED_AS.get(model.precision, model.precision)
    wanted = replace(model, precision=precision, layout=None)
    asked = build_request(wanted, hardware, (gpus,), cluster, recipe=recipe)
    found = make_plan(asked, top=2)
    chosen = found.chosen
    reasons = [
        f"layout: auto chose {chosen.layout}, micro_batch {chosen.layout.micro_batch}, recompute "
        f"{chosen.layout.recompute} for {gpus} {hardware.gpu_name}: of {found.considered:,} layouts the fastest that "
        f"fits, {chosen.step_seconds:.3g} s a step and {chosen.memory.total:.1f} of {hardware.memory_gib:.1f} GiB "
        "predicted"
    ]
    if found.runners_up:
        second = found.runners_up[0]
        slower = second.step_seconds / chosen.step_seconds - 1
        reasons.append(
            f"the next is {second.layout}, micro_batch {second.layout.micro_batch}, recompute "
            f"{second.layout.recompute}: {abs(slower):.1%} {'slower' if slower >= 0 else 'faster'}"
        )
    if (used := calibration_note(asked)) is not None:
        reasons.append(used)
    if precision != model.precision:
        reasons.append(f"{model.precision} was planned as {precision}")
    return AutoLayout(chosen.layout, tuple(reasons), found.calibration)


def auto_layout_for_cpu(run: PlannedModel, ranks: int, memory_gib: float) -> AutoLayout:
    """Data parallel over `ranks` processes here, and the largest micro-batch whose activations fit half the memory."""
    memory, model = memory_gib, model_shape(run.config)
    each = _cpu_activations_gib(model, run)
    room = _CPU_SHARE * memory / ranks - _states_gib(model)
    share = gcd(*run.batch_sizes) // ranks or 1
    fitting = [size for size in divisors(share) if size * each <= room]
    micro_batch = max(fitting, default=1)
    layout = resolve_layout(Layout(dp=ranks, micro_batch=micro_batch), run.config)
    processes = "one process" if ranks == 1 else f"{ranks} processes"
    reason = f"layout: auto found no GPU here and chose {processes} with micro_batch {micro_batch}: "
    if not fitting:
        least = each + _states_gib(model)
        reason += f"even one sequence is some {least:.1f} GiB, more than half of the {memory:.1f} GiB here"
    elif micro_batch == share:
        reason += f"all that a rank has of a batch, some {micro_batch * each:.1f} GiB"
    else:
        reason += (
            f"some {micro_batch * each:.1f} GiB; a larger one would take more than half of the {memory:.1f} GiB here"
        )
    return AutoLayout(layout, (reason,))


def auto_layout_for_cpu_nodes(run: PlannedModel, nodes: int) -> AutoLayout:
    """Data parallel, one process on each node of a cluster without GPUs.

    What memory such a node has is not known here, and this machine's says nothing of it: one sequence at a time.
    """
    layout = resolve_layout(Layout(dp=nodes, micro_batch=1), run.config)
    each = _cpu_activations_gib(model_shape(run.config), run)
    needed = _states_gib(model_shape(run.config)) + each
    reason = (
        f"layout: auto chose one process on each of {nodes} nodes without GPUs with micro_batch 1, some {needed:.1f} "
        f"GiB a node: what memory they have is not known here; a larger layout.micro_batch takes {each:.1f} GiB more "
        "for each sequence"
    )
    return AutoLayout(layout, (reason,))


def uncalibrated_notes(cluster: Cluster) -> tuple[str, ...]:
    """Say that a calibration is not used where ranks run on CPUs, if the cluster names one."""
    if cluster.calibration is None:
        return ()
    return (f"calibration: {cluster.calibration} is not used: nothing is predicted for ranks on CPUs",)


def machine_memory_gib() -> float:
    """Return the memory of this machine, or of the container that this process is in."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    written = limit.read_text().strip() if limit.is_file() else "max"
    return (min(whole, int(written)) if written.isdigit() else whole) / _GIB


def _cpu_activations_gib(model: ModelShape, run: PlannedModel) -> float:
    """Activations of one sequence, roughly: every product's input and output in fp32, and the logits three times."""
    products = (*model.attention_products, *model.feed_forward(model.ffn))
    per_layer = sum(product.inputs + product.outputs for product in products) + 4 * model.hidden
    if model.experts is not None:
        routed = sum(product.inputs + product.outputs for product in model.expert_products)
        per_layer += model.experts.top_k * routed
    elements = model.layers * per_layer + 3 * model.vocab_size
    return 4 * elements * run.sequence_length / _GIB


def _states_gib(model: ModelShape) -> float:
    """Weights, gradients and moments in fp32."""
    return 16 * model.weights / _GIB
