"""Logs of other programs as events: what Megatron-LM and torchtune really printed, and documented shapes of others."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainshed.observe.engine_logs.reader import LogReader, read_lines
from trainshed.observe.events import encode_event

DATA = Path(__file__).parent / "data"


def read(name: str) -> tuple[list[dict[str, Any]], LogReader]:
    return read_lines((DATA / name).read_text().splitlines())


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == kind]


@pytest.mark.parametrize("version", ["0.14.0", "0.16.1", "0.19.0"])
def test_what_megatron_lm_really_prints_is_read(version: str) -> None:
    """Twelve iterations of two ranks on CPUs, with --log-interval 2; since 0.16 the first has a line of its own."""
    events, reader = read(f"megatron-{version}.log")
    assert reader.reader is not None
    assert reader.reader.name == "megatron"
    facts = reader.facts
    assert (facts.steps, facts.global_batch, facts.sequence_length, facts.world_size) == (12, 4, 32, 2)
    assert facts.precision == "bf16"
    steps = of_kind(events, "step")
    numbers = [1, 3, 5, 7, 9, 11]
    assert [step["step"] for step in steps] == (numbers if version == "0.14.0" else [0, *numbers])
    assert all(step["loss"] > 1 and step["grad_norm"] > 0 and step["lr"] == 1e-3 for step in steps)
    assert all(0 < step["step_seconds"] < 60 for step in steps)
    assert [step["tokens"] for step in steps] == [4 * 32 * (step["step"] + 1) for step in steps]
    assert [step["steps"] for step in steps[-5:]] == [2] * 5
    assert steps[-1]["time"] >= steps[0]["time"] > 1_700_000_000
    assert {event["step"] for event in of_kind(events, "validation")} == {6, 12}
    checkpoints = of_kind(events, "checkpoint")
    assert [(event["step"], event["phase"]) for event in checkpoints] == [(6, "committed"), (12, "committed")]
    assert checkpoints[0]["path"] == "/run/checkpoints-megatron"
    assert ("stall_seconds" in checkpoints[0]) == (version != "0.14.0"), "older versions do not say when"


def test_the_second_line_since_0_16_is_the_mean_of_the_first_step_too() -> None:
    events, _ = read("megatron-0.16.1.log")
    first, second, third = of_kind(events, "step")[:3]
    assert (first.get("steps"), second["steps"], third["steps"]) == (None, 2, 2)
    older, _ = read("megatron-0.14.0.log")
    assert of_kind(older, "step")[0]["steps"] == 2


def test_a_loss_that_megatron_does_not_print_is_null_and_its_step_is_skipped() -> None:
    line = (
        " [2025-01-02 03:04:05] iteration       10/     500 | consumed samples:        10240 | elapsed time per "
        "iteration (ms): 5012.3 | learning rate: 1.0E-04 | global batch size:  1024 | loss scale: 1.0 | number of "
        "skipped iterations:   1 | number of nan iterations:   0 |"
    )
    (event,), _ = read_lines([line])
    assert (event["loss"], event["skipped"], event["step_seconds"], event["step"]) == (None, True, 5.0123, 9)


def test_experts_have_losses_of_their_own_in_megatron() -> None:
    line = (
        "[rank7]: [2025-01-02 03:04:05] iteration        1/     500 | consumed samples: 8 | elapsed time per iteration "
        "(ms): 10.0 | load_balancing_loss: 1.25E+00 | z_loss: 1.0E-03 | lm loss: 7.5E+00 | loss scale: 1.0 |"
    )
    (event,), _ = read_lines([line])
    assert (event["loss"], event["moe_balance"], event["moe_z"]) == (7.5, 1.25, 0.001)


def test_megatron_bridge_is_known_by_the_line_of_its_first_rank() -> None:
    lines = [
        "Step Time : 4.97s GPU utilization: 612.4MODEL_TFLOP/s/GPU",
        " [2026-01-02 03:04:05] iteration        2/     100 | consumed samples:          256 | elapsed time per "
        "iteration (ms): 4970.1 | throughput per GPU (TFLOP/s/GPU): 612.4 | learning rate: 3.0E-06 | global batch size:"
        "   128 | lm loss: 1.2E+01 | loss scale: 1.0 | grad norm: 2.5 | number of skipped iterations:   0 |",
    ]
    events, reader = read_lines(lines)
    assert reader.reader is not None
    assert reader.reader.name == "megatron-bridge"
    assert events[0]["step_seconds"] == pytest.approx(4.9701)


def test_a_run_that_goes_on_counts_from_its_checkpoint() -> None:
    lines = [
        "  successfully loaded checkpoint from /run/ckpt [ t 1/1, p 1/1 ] at iteration 500",
        " [2025-01-02 03:04:05] iteration      510/    1000 | consumed samples: 522240 | elapsed time per iteration "
        "(ms): 10.0 | global batch size:  1024 | lm loss: 7.5E+00 |",
    ]
    (resume, step), _ = read_lines(lines)
    assert (resume["kind"], resume["step"], resume["checkpoint"]) == ("resume", 500, "/run/ckpt")
    assert (step["step"], step["steps"]) == (509, 10)


def test_what_torchtune_really_draws_is_read_through_its_bar() -> None:
    text = (DATA / "torchtune-0.6.1-bar.log").read_text()
    reader = LogReader()
    events = reader.feed(text.replace("\n", "\r")) + reader.finish()
    steps = of_kind(events, "step")
    assert [step["step"] for step in steps] == list(range(8)), "a bar that is drawn again is not a new step"
    assert (steps[0]["loss"], steps[7]["loss"]) == (7.360164642333984, 4.445037364959717)
    assert steps[0]["step_seconds"] == 2.38
    assert steps[1]["step_seconds"] == pytest.approx(1 / 11.41)
    assert reader.facts.steps == 8
    checkpoints = of_kind(events, "checkpoint")
    assert [event["step"] for event in checkpoints] == list(range(1, 9))
    assert (checkpoints[0]["path"], checkpoints[0]["stall_seconds"]) == ("/run/checkpoints/epoch_0", 0.02)


def test_the_file_of_torchtunes_metric_logger_is_read() -> None:
    events, reader = read("torchtune-0.6.1-metrics.txt")
    assert reader.reader is not None
    assert reader.reader.name == "torchtune"
    assert [(event["step"], event["lr"]) for event in events] == [(step, 0.001) for step in range(8)]
    assert events[1]["tokens_per_second_per_gpu"] == 1652.2979736328125
    more = "Step 9 | loss:4.1 lr:1e-05 peak_memory_active:31.5 peak_memory_alloc:30.2 grad_norm:1.5"
    (event,) = reader.read_line(more)
    assert (event["memory_gib"], event["grad_norm"]) == (30.2, 1.5)


NEMO_STEP = (
    'DLLL {"timestamp": "1728595441.952723", "datetime": "2024-10-10 21:24:01.952723", "elapsedtime": "2087.21432", '
    '"type": "LOG", "step": 36, "data": {"reduced_train_loss": 7.976484775543213, "lr": 0.000008490565960528329, '
    '"global_step": 36, "consumed_samples": 37888, "train_backward_timing in s": 0.00005416870044427924, '
    '"train_step_timing in s": 45.81364059448242, "epoch": 0}}'
)
NEMO_BAR = (
    "Epoch 0: :  74%|███████▍  | 37/50 [28:15<09:55, v_num=1, reduced_train_loss=7.980, global_step=36.00, "
    "consumed_samples=37888.0, train_step_timing in s=45.80]"
)


def test_nemos_dllogger_wins_over_its_bar_and_counts_from_0() -> None:
    events, reader = read_lines([NEMO_STEP, NEMO_BAR])
    (event,) = events
    assert (event["step"], event["step_seconds"], event["time"]) == (36, 45.81364059448242, 1728595441.952723)
    assert reader.reader is not None
    assert reader.reader.first_step == 0
    (event,), reader = read_lines([NEMO_BAR])
    assert (event["step"], event["step_seconds"], event["loss"], reader.facts.steps) == (36, 45.8, 7.98, 50)


def test_nemo_2_prints_lines_behind_a_prefix_and_its_validation_loss_beside_them() -> None:
    line = (
        "retraining/0 [default0]:Training epoch 0, iteration {n}/99 | lr: 9.804e-08 | global_batch_size: 4 | "
        "global_step: {n} | reduced_train_loss: 14.66 | train_step_timing in s: 5.276{more}"
    )
    events, reader = read_lines(
        [line.format(n=0, more=""), line.format(n=1, more=" | consumed_samples: 8 | val_loss: 12.5")] * 2
    )
    assert [event["step"] for event in of_kind(events, "step")] == [0, 1, 0, 1], "it was started again"
    (validation,) = of_kind(events, "validation")
    assert (validation["step"], validation["loss"]) == (2, 12.5)
    assert (reader.facts.steps, reader.facts.global_batch) == (100, 4)


def test_nemos_asynchronous_checkpoints_are_told_once() -> None:
    saved = "[NeMo I 2024-10-10 21:24:01 dist_ckpt_io:1] Async checkpoint save for step 25 (x) finalized successfully."
    events, _ = read_lines([NEMO_STEP, saved, saved])
    assert [(event["step"], event["phase"]) for event in of_kind(events, "checkpoint")] == [(25, "committed")]


def test_maxtext_says_how_many_devices_and_which_steps_its_profiler_slowed() -> None:
    step = "completed {what}step: {n}, {time}total_weights: 65536, loss: 6.543"
    rates = "seconds: 2.000, TFLOP/s/device: 185.400, Tokens/s/device: 4096.000, "
    lines = [
        step.format(what="", n=0, time=rates),
        step.format(what="profiler activation/deactivation ", n=1, time=""),
        "I0102 03:04:05 metric_logger.py:1] " + step.format(what="", n=2, time=rates),
        "eval metrics after step: 2, loss=6.321, total_weights=65536",
    ]
    events, reader = read_lines(lines)
    assert [event["step"] for event in of_kind(events, "step")] == [0, 1, 2]
    assert events[0]["tokens_per_second_per_gpu"] == 4096
    assert of_kind(events, "profile")[0]["step"] == 2
    assert of_kind(events, "validation")[0]["loss"] == 6.321
    assert reader.facts.world_size == 8


@pytest.mark.parametrize(
    "line",
    [
        'DLLL {"timestamp": "1", "step": 7, "data": {"reduced_train_loss": NaN, "train_step_timing in s": 0.5}}',
        'DLLL {"timestamp": "1", "step": 7, "data": {"reduced_train_loss": -Infinity}}',
        "Training epoch 0, iteration 7/9 | lr: 0.001 | global_step: 7 | reduced_train_loss: nan",
        "Step 8 | loss:nan lr:0.001 tokens_per_second_per_gpu:1842.1",
    ],
)
def test_a_step_whose_loss_is_not_finite_is_a_step_all_the_same(line: str) -> None:
    events, _ = read_lines([line])
    assert [(event["kind"], event["step"], event["loss"]) for event in events] == [("step", 7, None)]


@pytest.mark.parametrize(
    "line",
    [
        " iteration  8/ 9 | consumed samples: 8 | elapsed time per iteration (ms): 0.0 | lm loss: 7.9E+00 |",
        "completed step: 7, seconds: 0.000, TFLOP/s/device: 0.000, Tokens/s/device: 0.000, loss: 6.543",
    ],
)
def test_a_step_without_a_duration_has_no_time(line: str) -> None:
    (event,), _ = read_lines([line])
    assert (event["step"], event["step_seconds"]) == (7, None)


@pytest.mark.parametrize("name", sorted(file.name for file in DATA.iterdir() if file.suffix != ".gz"))
def test_every_event_that_is_read_is_in_the_schema(name: str) -> None:
    for event in read(name)[0]:
        values = {key: value for key, value in event.items() if key not in ("kind", "step", "time", "samples")}
        assert encode_event(event["kind"], event["step"], values, attempt=1, rank=None)


@pytest.mark.parametrize("name", ["megatron-0.16.1.log", "torchtune-0.6.1-bar.log"])
@given(cuts=st.lists(st.integers(0, 6000), max_size=20))
def test_a_log_that_grows_gives_the_same_events_wherever_it_is_cut(name: str, cuts: list[int]) -> None:
    text = (DATA / name).read_text()
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    reader = LogReader()
    events = [event for start, end in pairwise(places) for event in reader.feed(text[start:end])]
    assert events + reader.finish() == read(name)[0]


@given(st.text(max_size=200))
def test_any_text_is_read_without_an_error(text: str) -> None:
    reader = LogReader()
    reader.feed(text)
    reader.finish()
