"""What a plan is held against: its range, where its engine was never measured, what no measurement has ever shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainshed.catalog import model_preset
from trainshed.plan.layout import resolve_layout
from trainshed.plan.lora_shape import LoraShape
from trainshed.plan.model_shape import model_shape
from trainshed.plan.performance.engine_constants import engine_constants
from trainshed.plan.performance.evidence import adapter_errors, evidence_for, held_out_errors, measured_kinds
from trainshed.plan.performance.prediction import LayoutPrediction, predict
from trainshed.plan.published.rows import read_tables, shipped_tables
from trainshed.plan.published.validation import validate_rows
from trainshed.plan.training_shape import TrainingShape, hardware_of_gpu
from trainshed.recipe import Layout

OWN_ENGINE_TABLE = Path(__file__).parents[3] / "benchmarks" / "own_engine.csv"


def predicted(
    gpu: str, gpus: int, engine: str, *, model: str = "llama3-8b", **keys: object
) -> tuple[TrainingShape, LayoutPrediction]:
    config = model_preset(model)
    training = TrainingShape(
        model_shape(config, model), 4096, 128, "bf16", hardware_of_gpu(gpu), gpus, engine_constants(engine)
    )
    layout = resolve_layout(Layout.model_validate(keys), config, world_size=gpus)
    return training, predict(training, layout)


def test_the_range_is_that_of_left_out_rows_of_the_engine() -> None:
    training, chosen = predicted("h100", 8, "megatron", tp=2)
    found = evidence_for(training, "megatron", chosen)
    errors = held_out_errors("megatron", "dense")
    assert errors is not None
    assert errors.rows > 100
    assert found.seconds == (errors.low * chosen.step_seconds, errors.high * chosen.step_seconds)
    assert found.seconds[0] < chosen.step_seconds < found.seconds[1]
    assert "that no constant was fitted to" in found.notes[0]
    assert evidence_for(training, "nemo", chosen).held_out == errors


def test_an_engine_says_where_it_was_never_measured() -> None:
    training, chosen = predicted("a100-80gb", 8, "torch", shard="full")
    found = evidence_for(training, "torch", chosen)
    never = [note for note in found.notes if note.startswith("the engine torch was never measured")]
    assert never == [
        "the engine torch was never measured on a100-80gb (only on h200) nor on more than one GPU "
        "(what it says between them is planned as torchtitan's)"
    ]
    assert found.held_out == held_out_errors("torchtitan", "dense")
    assert not any(
        note.startswith("the engine torch was never")
        for note in evidence_for(training, "torch", chosen, calibrated=True).notes
    )
    one, alone = predicted("h200", 1, "torch", shard="full")
    assert not any("never measured" in note for note in evidence_for(one, "torch", alone).notes)


def test_where_no_model_was_ever_left_out_there_is_no_range() -> None:
    training, chosen = predicted("a100-80gb", 8, "torchtune", shard="full")
    found = evidence_for(training, "torchtune", chosen)
    assert (found.held_out, found.seconds) == (None, None)
    assert found.notes[0].startswith("how far off the step may be is not known: ")


def test_a_plan_with_adapters_is_held_against_rows_of_adapters() -> None:
    training, _ = predicted("h200", 1, "torch")
    adapters = replace(training, lora=LoraShape(16, ("q_proj", "v_proj")))
    chosen = predict(adapters, resolve_layout(Layout(), model_preset("llama3-8b"), world_size=1))
    evidence = evidence_for(adapters, "torch", chosen)
    errors = adapter_errors()
    assert errors.rows >= 40
    assert 0.85 < errors.low < 1 < errors.high < 1.15
    assert evidence.seconds == (errors.low * chosen.step_seconds, errors.high * chosen.step_seconds)
    assert "rows of LoRA on Megatron and AutoModel that no constant was fitted to" in evidence.notes[0]


def test_more_than_any_measurement_has_shown_is_said_with_both_figures() -> None:
    training, chosen = predicted("a100-80gb", 8, "torch", shard="full")
    best = max(each.best_mfu for each in measured_kinds() if (each.gpu, each.precision) == ("a100-80gb", "bf16"))
    (note,) = [
        each
        for each in evidence_for(training, "torch", replace(chosen, mfu=0.735)).notes
        if "is more than was ever" in each
    ]
    assert note.startswith("73.5% MFU is more than was ever measured on a100-80gb in bf16 with a dense model")
    assert f"rows is {best:.1%} (" in note
    assert not any(
        "more than was ever" in note for note in evidence_for(training, "torch", replace(chosen, mfu=best)).notes
    )


def test_a_gpu_that_nobody_measured_says_so() -> None:
    training, chosen = predicted("l40s", 8, "torch", shard="full")
    found = evidence_for(training, "torch", chosen)
    assert any(note.startswith("no measurement of l40s in bf16 with a dense model is known") for note in found.notes)
    assert found.seconds is None
    assert found.notes[0] == "how far off the step may be is not known: there are no rows on l40s to tell by"


def test_attention_is_never_planned_faster_than_a_kernel_was() -> None:
    """The A100's share was fitted with engines that have slow kernels: ours must not multiply it beyond any kernel."""
    training, _ = predicted("a100-80gb", 1, "torch")
    faster = replace(training, constants=replace(training.constants, attention=10 * training.constants.attention))
    layout = resolve_layout(Layout(), model_preset("llama3-8b"), world_size=1)
    assert predict(faster, layout).times.compute == pytest.approx(predict(training, layout).times.compute)


def test_what_is_kept_of_the_tables_is_what_they_say() -> None:
    """`python benchmarks/fit_planner.py --evidence` writes the file anew."""
    rows = [
        one
        for one in validate_rows(read_tables([*shipped_tables(), OWN_ENGINE_TABLE])).judged
        if one.step_seconds is not None
    ]
    assert sum(each.rows for each in measured_kinds()) == len(rows)
    for gpu in ("a100-80gb", "h100-sxm", "h200"):
        shown = [
            one.measured_tflops / one.prediction.peak_tflops
            for one in rows
            if one.case.training.hardware.gpu_name == gpu
        ]
        assert max(each.best_mfu for each in measured_kinds() if each.gpu == gpu) == pytest.approx(max(shown), abs=1e-3)
