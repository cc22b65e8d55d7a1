"""`layout: auto`: the planner's best on the GPUs that are there, one process where there are none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.models.tiny_models import tiny_config
from trainshed.catalog import model_preset
from trainshed.errors import InputError
from trainshed.plan.auto_layout import (
    auto_layout_for_cpu,
    auto_layout_for_cpu_nodes,
    auto_layout_for_gpus,
    local_hardware,
    machine_memory_gib,
    uncalibrated_notes,
)
from trainshed.plan.legality import layout_problems
from trainshed.plan.planner import PlannedModel
from trainshed.recipe import load_cluster

TINY = PlannedModel(
    "tiny", tiny_config("llama", heads=4, kv_heads=2), "tiny", 64, (6, 12), "fp32", "torch", layout=None, steps=None
)
LARGE = replace(
    TINY,
    config=model_preset("llama3-8b"),
    preset="llama3-8b",
    sequence_length=8192,
    batch_sizes=(16,),
    precision="bf16",
)
LOCAL = load_cluster()


def is_legal(run: PlannedModel, layout: Any) -> bool:
    return not layout_problems(layout, run.config, sequence_length=run.sequence_length, batch_sizes=run.batch_sizes)


def test_gpus_get_the_fastest_layout_that_fits_and_it_is_said() -> None:
    hardware = local_hardware("NVIDIA H100 80GB HBM3", 4)
    assert (hardware.gpus_per_node, hardware.link_domain) == (4, 4)
    chosen = auto_layout_for_gpus(LARGE, hardware, 4, LOCAL)
    assert chosen.predicted is not None
    assert f"{chosen.predicted['step_seconds']:.3g} s a step" in chosen.reasons[0]
    assert 0 < chosen.predicted["mfu"] < 1
    assert chosen.layout.world_size == 4
    assert is_legal(LARGE, chosen.layout)
    assert chosen.reasons[0].startswith(f"layout: auto chose {chosen.layout}, micro_batch ")
    assert " for 4 h100-sxm: of " in chosen.reasons[0]
    assert chosen.reasons[1].startswith("the next is ")


def test_a_gpu_that_is_not_in_the_catalog_is_not_guessed() -> None:
    with pytest.raises(InputError, match="`Voodoo 2` is not in the catalog") as refused:
        local_hardware("Voodoo 2", 2)
    assert "write a layout, for example {dp: 2}" in (refused.value.hint or "")


def test_proofs_in_float64_are_planned_as_float32_and_that_is_said() -> None:
    chosen = auto_layout_for_gpus(replace(TINY, precision="fp64"), local_hardware("NVIDIA H100 80GB HBM3", 2), 2, LOCAL)
    assert is_legal(TINY, chosen.layout)
    assert chosen.reasons[-1] == "fp64 was planned as fp32"


@pytest.mark.parametrize(
    ("run", "ranks", "memory_gib", "micro_batch", "why"),
    [
        (TINY, 1, 16.0, 6, "chose one process with micro_batch 6: all that a rank has of a batch, some 0.0 GiB"),
        (TINY, 2, 16.0, 3, "chose 2 processes with micro_batch 3: all that a rank has of a batch"),
        (LARGE, 1, 800.0, 2, "micro_batch 2: some 191.5 GiB; a larger one would take more than half of the 800.0 GiB"),
        (LARGE, 1, 16.0, 1, "micro_batch 1: even one sequence is some "),
    ],
)
def test_a_cpu_gets_one_process_and_the_largest_micro_batch_that_half_its_memory_takes(
    run: PlannedModel, ranks: int, memory_gib: float, micro_batch: int, why: str
) -> None:
    chosen = auto_layout_for_cpu(run, ranks, memory_gib)
    assert (chosen.layout.world_size, chosen.layout.dp, chosen.layout.micro_batch) == (ranks, ranks, micro_batch)
    assert is_legal(run, chosen.layout)
    (reason,) = chosen.reasons
    assert reason.startswith("layout: auto found no GPU here and ")
    assert why in reason


def test_nodes_without_gpus_get_one_sequence_at_a_time_whatever_memory_this_machine_has() -> None:
    chosen = auto_layout_for_cpu_nodes(TINY, 2)
    assert (chosen.layout.world_size, chosen.layout.dp, chosen.layout.micro_batch) == (2, 2, 1)
    (reason,) = chosen.reasons
    assert "what memory they have is not known here" in reason
    assert f"{machine_memory_gib():.1f}" not in reason


def test_a_calibration_that_nothing_reads_is_said() -> None:
    assert uncalibrated_notes(LOCAL) == ()
    (note,) = uncalibrated_notes(load_cluster("local", ["calibration=mine.yaml"]))
    assert note == "calibration: mine.yaml is not used: nothing is predicted for ranks on CPUs"


def test_this_machine_has_memory() -> None:
    assert 0.1 < machine_memory_gib() < 1e6
