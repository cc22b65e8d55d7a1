"""Published measurements against predictions: every row is judged, or skipped with a reason."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import orjson
import pytest

from trainshed.plan.published.plot import accuracy_svg, short_source
from trainshed.plan.published.rows import PublishedRow, column_names, read_rows, shipped_tables
from trainshed.plan.published.validation import (
    ErrorScores,
    OutOfMemoryScores,
    RegretScores,
    error_scores,
    out_of_memory_scores,
    regret_scores,
    validate_rows,
)

_ROW = {
    "source": "someone/bench:README.md",
    "model": "Llama-8B",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "14336",
    "vocab": "128256",
    "seq_len": "8192",
    "gpu": "H100-SXM-80GB",
    "gpus_per_node": "8",
    "num_gpus": "16",
    "precision": "bf16",
    "engine": "megatron",
    "tp": "2",
    "pp": "1",
    "micro_batch": "1",
    "global_batch": "128",
    "dp_shard": "zero1",
    "recompute": "none",
    "step_time_s": "6.0",
}


def row(**changed: Any) -> PublishedRow:
    """A row that can be predicted, with some fields changed."""
    return PublishedRow({key: str(value) for key, value in (_ROW | changed).items()}, 2)


def predicted_seconds(**changed: Any) -> float:
    (judged,) = validate_rows([row(**changed)]).judged
    return judged.prediction.step_seconds


@pytest.fixture(scope="module")
def shipped_sample() -> list[PublishedRow]:
    """Some rows of every source that comes with Trainshed."""
    rows = [row for path in shipped_tables() for row in read_rows(path)]
    seen: dict[tuple[str, bool], int] = {}
    sample = []
    for each in rows:
        key = (each.source, each.out_of_memory)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= 4:
            sample.append(each)
    return sample


def test_the_report_has_the_promised_keys_overall_and_by_source(shipped_sample: list[PublishedRow]):
    validation = validate_rows(shipped_sample)
    report = orjson.loads(orjson.dumps(validation.to_plain()))
    step_time = {"mape", "median", "bias", "worst", "null_mape"}
    for scores in (report, *report["by_source"].values()):
        assert {"rows", "skipped", "step_time", "memory", "out_of_memory", "regret"} <= scores.keys()
        assert step_time <= scores["step_time"].keys()
        assert step_time <= scores["step_time"]["above_10_percent_mfu"].keys()
        assert {"mape", "median", "bias", "worst"} <= scores["memory"].keys()
        assert {"precision", "recall", "balanced_accuracy"} <= scores["out_of_memory"].keys()
        assert {"top1_mean", "top1_worst", "top3_mean", "top3_worst"} <= scores["regret"].keys()
    assert report["rows"] == len(shipped_sample) == sum(each["rows"] for each in report["by_source"].values())
    assert report["skipped"] == sum(report["skipped_reasons"].values()) < report["rows"] / 2


def test_step_time_errors_are_relative_to_what_was_measured():
    seconds = predicted_seconds()
    scores = validate_rows([row(step_time_s=seconds / 1.25), row(step_time_s=seconds / 0.75)]).scores()
    assert scores.step_time.mape == pytest.approx(0.25)
    assert scores.step_time.bias == pytest.approx(0.0)


def test_the_null_model_is_one_rate_for_all_rows_of_a_source_gpu_and_precision():
    # Three rates of 1, 1/2 and 1/4: the constant is the middle one, so it is off by 2, 0 and 1/2 of what was measured.
    rows = [row(step_time_s=seconds) for seconds in (4.0, 8.0, 16.0)]
    assert validate_rows(rows).scores().step_time.null_mape == pytest.approx((1.0 + 0.0 + 0.5) / 3)
    elsewhere = [row(step_time_s=40.0, source="other/bench"), row(step_time_s=80.0, precision="fp8")]
    assert validate_rows(rows + elsewhere).scores().step_time.null_mape == pytest.approx((1.0 + 0.0 + 0.5) / 5)


def test_rows_below_a_tenth_of_the_peak_are_left_out_of_the_cut_by_the_published_mfu_or_ours():
    rows = [row(mfu=0.35), row(mfu=0.04), row(step_time_s=500.0), row()]
    assert validate_rows(rows).scores().above_10_percent_mfu.count == 2


def test_memory_is_compared_with_the_figure_and_the_rank_the_source_means():
    changed = {"peak_mem_gib": 50, "pp": 2, "tp": 1}
    (judged,) = validate_rows([row(**changed)]).judged
    stages = [stage.memory for stage in judged.prediction.stages]

    def compared(**said: str) -> float:
        return validate_rows([row(**changed, **said)]).judged[0].predicted_gib

    assert compared(memory_metric="allocated") == max(stage.allocated for stage in stages)
    assert compared(memory_metric="nvidia-smi") == compared(notes="nvidia-smi") == max(stage.total for stage in stages)
    assert compared(memory_metric="allocated", memory_stage="last") == stages[-1].allocated
    assert compared(memory_metric="allocated", memory_stage="first") == stages[0].allocated


def test_rows_that_ran_out_of_memory_are_positives_and_rows_that_ran_are_negatives():
    large = {"layers": 400, "tp": 1}
    rows = [row(**large, step_time_s="", notes="OOM"), row(), row(step_time_s="", peak_mem_gib=40), row(**large)]
    scores = validate_rows(rows).scores().out_of_memory
    assert (scores.positives, scores.negatives) == (1, 3)
    assert scores.recall == 1.0
    assert scores.precision == pytest.approx(1 / 2)  # the large model "ran" too, which nobody would believe


def test_regret_needs_three_layouts_that_could_be_chosen_from_and_a_repeated_one_counts_once():
    layouts = ({"tp": 1}, {"tp": 2}, {"tp": 4})
    order = sorted(layouts, key=lambda keys: predicted_seconds(**keys))
    rows = [row(**keys, step_time_s=seconds) for keys, seconds in zip(order, (6.0, 5.0, 7.0), strict=True)]
    scores = validate_rows(rows).scores().regret
    assert (scores.groups, scores.top1_mean) == (1, pytest.approx(0.2))
    assert scores.top3_worst == 0.0
    assert validate_rows([rows[0], rows[0], rows[1], rows[1]]).scores().regret == RegretScores()
    elsewhere = row(tp=8, global_batch=64)
    assert validate_rows([*rows[:2], elsewhere]).scores().regret == RegretScores()


@pytest.mark.parametrize(
    "odd",
    [
        {"layers": ""},
        {"layers": "many"},
        {"num_gpus": "nan"},
        {"num_gpus": "inf"},
        {"num_gpus": "0"},
        {"seq_len": "0"},
        {"heads": "0"},
        {"tp": "-1"},
        {"gpu": "Abacus"},
        {"engine": "abacus"},
        {"precision": "int3"},
        {"global_batch": "3"},
        {"micro_batch": ""},
        {"step_time_s": "", "notes": ""},
        {"step_time_s": "0"},
        {"step_time_s": "fast"},
        {"num_experts": "8"},
    ],
    ids=str,
)
def test_an_odd_row_is_skipped_with_a_reason_and_the_others_are_still_judged(odd: dict[str, str]):
    validation = validate_rows([row(**odd), row()])
    assert len(validation.judged) == 1
    ((_, reason),) = validation.skipped
    assert len(reason) > 10
    assert validation.scores().step_time.count == 1


def test_floats_where_whole_numbers_belong_are_read(tmp_path: Path):
    plain, floats = validate_rows([row()]), validate_rows([row(num_gpus="16.0", tp="2.0", layers="32.0")])
    assert floats.judged[0].prediction == plain.judged[0].prediction


def test_a_table_of_one_kind_leaves_the_scores_of_the_other_kinds_open():
    failures = validate_rows([row(step_time_s="", notes="OOM")]).scores()
    assert (failures.step_time.mape, failures.step_time.null_mape, failures.memory) == (None, None, ErrorScores())
    assert failures.regret == RegretScores()
    empty = validate_rows([]).scores()
    assert (empty.rows, empty.step_time.mape, empty.out_of_memory) == (0, None, OutOfMemoryScores())


def test_every_shipped_memory_figure_says_what_it_counts_and_on_which_rank():
    for path in shipped_tables():
        with open(path, encoding="utf-8", newline="") as file:
            for fields in csv.DictReader(file):
                assert fields["source"]
                measured = bool(fields["peak_mem_gib"])
                metrics = ("allocated", "active", "reserved", "nvidia-smi", "unstated") if measured else ("",)
                assert fields["memory_metric"] in metrics
                assert fields["memory_stage"] in (("worst", "first", "last") if measured else ("",))
    assert {"source", "step_time_s", "peak_mem_gib", "memory_metric", "notes"} <= set(column_names())


def test_the_plot_has_a_panel_for_what_was_measured_and_names_its_sources():
    drawn = accuracy_svg(validate_rows([row(), row(source="a & b: <paper>", peak_mem_gib=40)]))
    assert drawn.count('class="frame"') == 2
    assert "bench (" in drawn
    assert "a &amp; b" in drawn
    assert accuracy_svg(validate_rows([row()])).count('class="frame"') == 1
    assert "<svg" in accuracy_svg(validate_rows([]))


@pytest.mark.parametrize(
    ("source", "short"),
    [
        ("NVIDIA-NeMo/Megatron-Bridge:docs/performance-summary.md", "Megatron-Bridge"),
        ("pytorch/torchtitan:docs/performance.md@395a52627", "torchtitan"),
        ("mlcommons/training_results_v5.1:NVIDIA/results/theia_ngpu8/llama2_70b_lora", "MLPerf Training"),
        ("paper:Narayanan2021 arXiv:2104.04473 Table 1", "Narayanan2021"),
        ("HF ultra-scale playbook benchmarks_interactive.html (copy: x)", "HF ultra-scale playbook"),
        ("", "(no source)"),
    ],
)
def test_sources_have_short_names(source: str, short: str):
    assert short_source(source) == short


def test_errors_count_both_directions_alike_and_the_bias_keeps_its_sign():
    scores = error_scores([(1.1, 1.0), (0.7, 1.0), (4.0, 4.0)])
    assert scores.count == 3
    assert scores.mape == pytest.approx(0.4 / 3)
    assert scores.median == pytest.approx(0.1)
    assert scores.bias == pytest.approx(-0.2 / 3)
    assert scores.worst == pytest.approx(0.3)


def test_balanced_accuracy_is_the_mean_of_both_sides_however_uneven_they_are():
    caught, missed, quiet, alarm = (True, True), (False, True), (False, False), (True, False)
    scores = out_of_memory_scores([caught] * 3 + [missed] + [quiet] * 95 + [alarm] * 5)
    assert (scores.positives, scores.negatives) == (4, 100)
    assert scores.precision == pytest.approx(3 / 8)
    assert scores.recall == pytest.approx(0.75)
    assert scores.balanced_accuracy == pytest.approx((0.75 + 0.95) / 2)


def test_regret_is_what_our_choice_costs_and_the_best_of_three_forgives_near_misses():
    # What we put first was measured 20% slower than the best, which we put third.
    close = [12.0, 13.0, 10.0, 90.0]
    right = [5.0, 6.0, 7.0]
    scores = regret_scores([close, right])
    assert scores.groups == 2
    assert scores.top1_mean == pytest.approx(0.1)
    assert scores.top1_worst == pytest.approx(0.2)
    assert scores.top3_mean == scores.top3_worst == 0.0


def test_nothing_to_judge_by_is_none_and_never_zero():
    assert error_scores([]) == ErrorScores()
    assert out_of_memory_scores([]) == OutOfMemoryScores()
    assert regret_scores([]) == RegretScores()
    only_failures = out_of_memory_scores([(True, True), (False, True)])
    assert (only_failures.recall, only_failures.precision, only_failures.balanced_accuracy) == (0.5, 1.0, None)
    only_runs = out_of_memory_scores([(False, False)])
    assert (only_runs.recall, only_runs.precision, only_runs.balanced_accuracy) == (None, None, None)
