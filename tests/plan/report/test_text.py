"""The words: every comparison has its numbers, and they are those of the predictions compared."""

from __future__ import annotations

from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from support.recipes.small_plans import JOB, MEMORY, TIMES, layout, prediction
from trainshed.catalog import model_preset
from trainshed.plan.layout import RankLayout
from trainshed.plan.lora_shape import LoraShape
from trainshed.plan.model_shape import model_shape
from trainshed.plan.performance.engine_constants import engine_constants
from trainshed.plan.performance.memory import GpuMemory
from trainshed.plan.performance.prediction import LayoutPrediction, StepTimes, predict
from trainshed.plan.report.text import (
    MEMORY_PARTS,
    TIME_PARTS,
    LayoutVariant,
    compare_variant,
    describe_trained,
    explain_layout,
    format_percent,
    format_seconds,
    layout_variants,
    share_cells,
    time_differences,
)
from trainshed.plan.search.search import best_fitting_layout, search_layouts
from trainshed.plan.training_shape import TrainingShape, hardware_of_gpu

FAIR = TrainingShape(
    model_shape(model_preset("llama3-70b"), "llama3-70b"),
    8192,
    512,
    "bf16",
    hardware_of_gpu("h100"),
    128,
    engine_constants("torch"),
)
CHOSEN = prediction(layout(tp=4, pp=4, vp=5, cp=2))


def sentence(key: str, value: int, was: int, *, times: StepTimes = TIMES, memory: GpuMemory = MEMORY) -> str:
    other = layout(**{"tp": 4, "pp": 4, "vp": 5, "cp": 2, key: value})
    return compare_variant(LayoutVariant(key, value, was, other, prediction(other, times, memory)), CHOSEN)


def test_a_slower_neighbour_says_how_much_and_where() -> None:
    assert sentence("tp", 8, 4, times=replace(TIMES, tp=8.0)) == (
        "tp 8 instead of 4 would cost 9% more (46.7 s): tensor-parallel communication +3.90 s."
    )


def test_a_faster_neighbour_says_what_it_would_save() -> None:
    assert sentence("vp", 10, 5, times=replace(TIMES, pp_bubble=4.5)) == (
        "vp 10 instead of 5 would save 1.4% (42.2 s): the pipeline's bubble −600 ms."
    )


def test_a_neighbour_that_does_not_fit_says_where_and_by_how_much() -> None:
    assert sentence("pp", 2, 4, memory=replace(MEMORY, activations=48.6)) == (
        "pp 2 instead of 4 does not fit: 12.3 GiB too much on stage 0 (activations +18.6 GiB)."
    )


def test_a_neighbour_as_fast_is_called_so_and_says_what_memory_it_frees() -> None:
    assert sentence("cp", 4, 2, memory=replace(MEMORY, activations=20.0)) == (
        "cp 4 instead of 2 would take as long (42.8 s), and frees 8.8 GiB."
    )


def test_beside_a_layout_that_does_not_fit_a_neighbour_says_that_it_would() -> None:
    full = prediction(CHOSEN.layout, memory=replace(MEMORY, weights=30.0))
    leaner = prediction(layout(tp=8, pp=4, vp=5, cp=2), TIMES.scaled(1.1))
    assert compare_variant(LayoutVariant("tp", 8, 4, leaner.layout, leaner), full) == (
        "tp 8 instead of 4 would fit, with 73.3 GiB, in 47.1 s a step (10% slower)."
    )


def test_small_differences_are_left_out_of_a_reason() -> None:
    assert time_differences(TIMES, replace(TIMES, tp=5.1, cp=1.21)) == "tensor-parallel communication +1.00 s"
    assert time_differences(TIMES, TIMES) == ""


def test_neighbours_use_all_gpus_and_differ_in_what_they_say() -> None:
    for variant in layout_variants(JOB, CHOSEN.layout, lambda other: None):
        assert variant.layout.world_size == JOB.gpus
        assert sum(variant.layout.stages) == JOB.model.layers
        assert len(variant.layout.stages) == variant.layout.pp * variant.layout.vp
        assert getattr(variant.layout, variant.key) == variant.value != variant.was
        assert (variant.layout.schedule is None) == (variant.layout.pp == 1)


def test_an_illegal_neighbour_is_named_with_its_reason_and_not_predicted() -> None:
    def complaint(other: RankLayout) -> str | None:
        return "it has no FSDP" if other.shard == "full" else None

    said = explain_layout(JOB, predict(JOB, CHOSEN.layout), complaint)
    assert "shard full is not possible: it has no FSDP." in said
    assert not any(words.startswith("shard full instead") for words in said)


def test_an_explanation_begins_with_the_verdict() -> None:
    first, *rest = explain_layout(JOB, CHOSEN, lambda other: None)
    assert first == (
        "tp4 pp4 vp5 cp2 dp4 zero1 steps in 42.8 s at 34.8% MFU "
        "and leaves 6.3 of 79.6 GiB free on stage 0, the fullest."
    )
    assert (
        "What it loses: the pipeline's bubble 5.10 s (12%), tensor-parallel communication 4.10 s (10%) and " in rest[1]
    )
    full = prediction(CHOSEN.layout, memory=replace(MEMORY, weights=30.0))
    assert "but does not fit: 6.2 GiB too much on stage 0" in explain_layout(JOB, full, lambda other: "no")[0]


def test_seconds_have_three_figures() -> None:
    assert [format_seconds(each) for each in (236.4, 45.81, 3.904, 0.3124, 0.0043, 2e-5)] == [
        "236 s",
        "45.8 s",
        "3.90 s",
        "312 ms",
        "4.3 ms",
        "20 µs",
    ]


def test_a_neighbour_of_a_searched_layout_is_the_best_that_has_the_other_value() -> None:
    """`cp 4 costs 71% more` stood below a table in which a layout with cp 4 costs 0.6% more."""
    found = search_layouts(FAIR, engine="torch", top=12)

    def best_with(fixed: dict[str, int | str]) -> LayoutPrediction | None:
        return best_fitting_layout(FAIR, engine="torch", fixed=fixed)

    tried = layout_variants(FAIR, found.chosen.layout, lambda other: None, best_with)
    compared_with = 0
    for variant in tried:
        same = [each for each in found.runners_up if getattr(each.layout, variant.key) == variant.value]
        compared_with += len(same)
        for each in same:
            assert variant.prediction is not None
            # A layout within 1% of the fastest may be taken for its simplicity.
            assert variant.prediction.step_seconds <= 1.01 * each.step_seconds, (variant.key, variant.value)
    assert compared_with >= 3
    said = explain_layout(FAIR, found.chosen, lambda other: None, best_with)
    assert any(", at best with " in words for words in said)


def test_what_lora_saves_is_said_with_the_figures_of_training_all_weights() -> None:
    training = replace(FAIR, lora=LoraShape(16, ("q_proj", "v_proj")), document_length=1024.0)
    adapted = predict(training, layout(tp=8, shard="full"))
    full = predict(replace(training, lora=None), adapted.layout)
    sentences = explain_layout(training, adapted, lambda _: "of no interest here")
    (saves,) = [words for words in sentences if words.startswith("LoRA trains")]
    assert saves.startswith("LoRA trains 32.8M weights beside 70.6B frozen ones")
    slower = format_percent(full.step_seconds / adapted.step_seconds - 1)
    assert saves.endswith(f"{full.memory.total - adapted.memory.total:.1f} GiB more and take {slower} longer.")
    assert any(words.startswith("Attention stays within documents of some 1,024 tokens") for words in sentences)
    assert describe_trained(training, adapted.memory) == (
        f"adapters of 32.8M beside 70.6B frozen weights (0.05%): {adapted.memory.trained:.1f} GiB with gradients and "
        f"optimizer states, frozen {adapted.memory.frozen:.1f} GiB"
    )
    assert describe_trained(FAIR, adapted.memory) is None


def test_narrow_weights_and_a_reference_are_said_with_what_they_save_and_cost() -> None:
    training = replace(FAIR, lora=LoraShape(16, ("q_proj",), base_bytes=0.516), preference=True)
    chosen = predict(training, layout(tp=8, pp=4))
    sentences = " ".join(explain_layout(training, chosen, lambda _: "of no interest here"))
    plain = predict(replace(training, lora=LoraShape(16, ("q_proj",))), chosen.layout)
    assert f"in 0.52 bytes each save {plain.memory.total - chosen.memory.total:.1f} GiB" in sentences
    assert "it is the base without adapters." in sentences
    copied = replace(FAIR, preference=True)
    words = describe_trained(copied, predict(copied, chosen.layout).memory)
    assert words is not None
    assert words.startswith("all 70.6B weights, beside a frozen copy of ")


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=8), st.integers(8, 200))
def test_cells_add_up_and_nothing_vanishes(amounts: list[float], width: int) -> None:
    cells = share_cells(amounts, width)
    assert sum(cells) == (width if sum(amounts) > 0 else 0)
    assert all(
        (count > 0) == (amount / sum(amounts) > 0) for count, amount in zip(cells, amounts, strict=True) if sum(amounts)
    )


def test_every_field_has_a_part_and_parts_keep_apart() -> None:
    beside = ("capacity", "frozen")
    assert [part.key for part in MEMORY_PARTS] == [part.name for part in fields(GpuMemory) if part.name not in beside]
    assert [part.key for part in TIME_PARTS] == [part.name for part in fields(StepTimes)]
    for parts in (MEMORY_PARTS, TIME_PARTS):
        assert len({part.symbol for part in parts}) == len({part.colour for part in parts}) == len(parts)
