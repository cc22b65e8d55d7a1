"""Step times out of runs and logs: the median behind the warm-up, of the batch the run ended with."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainshed.errors import InputError
from trainshed.observe.events import EventWriter
from trainshed.observe.measured_run import MeasuredRun, measure_log, measure_run
from trainshed.storage import LocalStore

_STEP = {"loss": 1.0, "grad_norm": 1.0, "lr": 1e-4, "mfu": None, "mfu_full_attention": None, "batch_hash": "00"}


def write_attempt(folder: Path, attempt: int, seconds: list[float], *, growing: int = 0, memory: float | None = None):
    """Events of an attempt; the batch grows over the first `growing` steps."""
    with EventWriter(LocalStore(folder), "", attempt=attempt, rank=0) as events:
        versions = {"trainshed": "1.2", "torch": "2.11"}
        events.emit(
            "start", run="a/b", layout="tp2", world_size=2, versions=versions, device="NVIDIA H200", parameters=10
        )
        tokens = 0
        for step, each in enumerate(seconds, start=1):
            tokens += 100 if step > growing else 50
            rates = {"step_seconds": each, "tokens_per_second_per_gpu": 1.0, "tokens": tokens, "skipped": False}
            events.emit("step", step=step, **_STEP, **rates, memory_gib=memory)


def test_the_first_steps_do_not_count(tmp_path: Path):
    write_attempt(tmp_path, 1, [90.0, 9.0, 3.0, 3.0, 3.0, 3.0, 2.0, 2.1, 2.2, 2.0, 8.0, 2.1], memory=61.5)
    measured = measure_run(LocalStore(tmp_path), "")
    assert (measured.step_seconds, measured.steps) == (2.1, 6)
    assert (measured.kind, measured.version, measured.device, measured.world_size) == ("torch", "1.2", "NVIDIA H200", 2)
    assert (measured.memory_gib, measured.attempt) == (61.5, 1)
    assert measured.time is not None


def test_steps_of_a_batch_that_still_grew_do_not_count(tmp_path: Path):
    write_attempt(tmp_path, 1, [1.0] * 20 + [2.0] * 12, growing=20)
    assert measure_run(LocalStore(tmp_path), "").step_seconds == 2.0


def test_the_last_attempt_with_steps_enough_counts(tmp_path: Path):
    write_attempt(tmp_path, 1, [1.0] * 12)
    write_attempt(tmp_path, 2, [2.0] * 12)
    write_attempt(tmp_path, 3, [9.0])
    measured = measure_run(LocalStore(tmp_path), "")
    assert (measured.attempt, measured.step_seconds) == (2, 2.0)


def test_a_run_that_hardly_began_is_refused(tmp_path: Path):
    write_attempt(tmp_path, 1, [1.0, 1.0])
    with pytest.raises(InputError, match="2 steps are too few to measure by"):
        measure_run(LocalStore(tmp_path), "")


def log(tmp_path: Path, text: str) -> MeasuredRun:
    file = tmp_path / "train.log"
    file.write_text(text)
    return measure_log(file)


def test_megatron_says_milliseconds_its_batch_and_its_memory(tmp_path: Path):
    line = (
        " [2026-02-03 04:05:06.789] iteration {n:8d}/     500 | consumed samples: {c:12d} | elapsed time per iteration "
        "(ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): 400.0 | learning rate: 1.0E-04 | global batch size: {b:5d} "
        "| lm loss: 1.0E+01 |\n"
    )
    small = "".join(line.format(n=n, c=n, ms=900.0, b=128) for n in range(1, 5))
    large = "".join(line.format(n=n, c=n, ms=5000.0 + n, b=256) for n in range(5, 25))
    memory = "[Rank 0] (after 2 iterations) memory (MB) | allocated: 100.0 | max allocated: 51200.0 | reserved: 1.0\n"
    measured = log(tmp_path, "noise\n" + small + memory + large)
    assert (measured.kind, measured.global_batch, measured.day) == ("megatron", 256, "2026-02-03")
    assert measured.step_seconds == pytest.approx(5.017)
    assert measured.memory_gib == 50.0


@pytest.mark.parametrize(
    "line",
    [
        "Training epoch 0, iteration {n}/49 | lr: 1.5e-05 | global_batch_size: 128 | global_step: {n} | "
        "reduced_train_loss: 11.03 | train_step_timing in s: {s} | consumed_samples: 1280\n",
        "Epoch 0: :   1%| | {n}/100, v_num=a, reduced_train_loss=7.9, train_step_timing in s={s}]\r",
    ],
    ids=["nemo2", "nemo1 progress bar"],
)
def test_nemo_says_seconds_on_lines_or_on_a_bar_that_is_drawn_over(tmp_path: Path, line: str):
    measured = log(tmp_path, "".join(line.format(n=n, s=60.0 if n < 3 else 45.8) for n in range(12)))
    assert (measured.kind, measured.step_seconds) == ("nemo", 45.8)


def test_dllogger_lines_are_read_past_the_configuration_and_a_line_cut_off(tmp_path: Path):
    head = 'DLLL {"timestamp": "1.0", "type": "LOG", "step": "PARAMETER", "data": {"cfg/name": "x"}}\n'
    line = (
        'DLLL {{"datetime": "2024-10-10 21:24:01.9", "type": "LOG", "step": {n}, "data": '
        '{{"train_step_timing in s": 45.81, "global_step": {n}}}}}\n'
    )
    measured = log(tmp_path, head + "".join(line.format(n=n) for n in range(30)) + 'DLLL {"timest')
    assert (measured.kind, measured.step_seconds, measured.day) == ("dllogger", 45.81, "2024-10-10")


def test_a_log_without_step_times_says_what_is_read(tmp_path: Path):
    with pytest.raises(InputError, match="no steps of a training") as raised:
        log(tmp_path, "hello\n")
    assert "elapsed time per iteration" in (raised.value.hint or "")
