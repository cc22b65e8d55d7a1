"""The figures of a run by its events: which steps count, and what they come to."""

from __future__ import annotations

from typing import Any

import pytest

from trainshed.catalog import gpu, model_preset
from trainshed.errors import InputError, TrainshedError
from trainshed.observe.metrics import TrainingFacts, measure_events

LLAMA3_70B = TrainingFacts(
    model="llama3-70b",
    config=model_preset("llama3-70b"),
    sequence_length=8192,
    global_batch=1024,
    gpus=128,
    gpu=gpu("h100"),
    precision="fp8",
)


def step(number: int, seconds: float | None = 2.0, *, attempt: int = 1, **values: Any) -> dict[str, Any]:
    event = {
        "kind": "step",
        "attempt": attempt,
        "time": 1000.0 + 2 * number,
        "step": number,
        "loss": 5.0 - number / 100,
        "grad_norm": None,
        "lr": None,
        "tokens": 100 * (number + 1),
        "step_seconds": seconds,
        "tokens_per_second_per_gpu": None,
        "mfu": None,
        "mfu_full_attention": None,
        "skipped": False,
    }
    return event | values


def event(kind: str, number: int | None = None, attempt: int = 1, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "attempt": attempt, "time": 1000.0, "step": number, **values}


def test_the_gke_recipes_figure_counts_full_attention() -> None:
    """Its tool has 3.94e15 FLOPs a sequence, rounded, which is all keys for every token: 688 TFLOP/s, 34.8% of 1978."""
    steps = [step(number, 45.81364059448242, tokens=None) for number in range(50)]
    metrics = measure_events(steps, LLAMA3_70B, start=15, end=40)
    assert metrics.times is not None
    assert (metrics.first, metrics.last, metrics.times.steps) == (15, 40, 26)
    assert metrics.times.mean == pytest.approx(45.81, abs=0.005)
    mfu = metrics.mfu
    assert mfu is not None
    assert int(mfu.model_tflops_full_attention) == 688
    assert mfu.model_tflops_full_attention == pytest.approx(3.94e15 * 1024 / 45.81364 / 128 / 1e12, rel=2e-3)
    assert mfu.mfu_full_attention == pytest.approx(0.348, abs=0.0005)
    assert mfu.mfu is not None
    assert mfu.mfu < 0.33, "causal attention needs half of the products with keys"


def test_the_first_step_of_each_attempt_and_skipped_ones_do_not_count() -> None:
    events = [step(0, 60.0), *map(step, range(1, 6)), step(6, skipped=True)]
    events += [event("resume", 4, 2), step(4, 50.0, attempt=2), *(step(number, attempt=2) for number in range(5, 9))]
    metrics = measure_events(events, TrainingFacts())
    assert metrics.times is not None
    assert (metrics.times.maximum, metrics.times.steps) == (2.0, 7)
    assert metrics.left_out == {"first of an attempt": 2}, "what was done again is not there any more"
    skipped = measure_events([*map(step, range(5)), step(5, 9.0, skipped=True)], TrainingFacts())
    assert skipped.left_out == {"first of an attempt": 1, "skipped": 1}


def test_steps_beside_validations_checkpoints_and_profiles_do_not_count() -> None:
    events = [*map(step, range(5)), event("validation", 5, loss=4.0), *map(step, range(5, 10))]
    events += [event("checkpoint", 10, phase="committed"), *map(step, range(10, 16))]
    events += [event("profile", 15, steps=2, path="x", rank_profiled=0), *map(step, range(16, 20))]
    metrics = measure_events(events, TrainingFacts())
    assert metrics.left_out == {
        "first of an attempt": 1,
        "beside a validation": 2,
        "beside a checkpoint": 2,
        "profiled": 3,
    }
    assert metrics.times is not None
    assert metrics.times.steps == 12
    assert metrics.validation_loss == 4.0


def test_where_every_step_is_beside_a_validation_they_count_after_all() -> None:
    events = [one for number in range(6) for one in (step(number), event("validation", number + 1, loss=4.0))]
    metrics = measure_events(events, TrainingFacts())
    assert metrics.times is not None
    assert metrics.times.steps == 5
    assert metrics.left_out == {"first of an attempt": 1}


def test_a_batch_that_grew_does_not_count() -> None:
    tokens, events = 0, []
    for number in range(12):
        tokens += 50 if number < 6 else 100
        events.append(step(number, 1.0 if number < 6 else 2.0, tokens=tokens))
    metrics = measure_events(events, TrainingFacts(gpus=4))
    assert metrics.times is not None
    assert (metrics.times.minimum, metrics.tokens_per_second, metrics.tokens_per_second_per_gpu) == (2.0, 50.0, 12.5)
    assert metrics.left_out["with another batch"] == 5


def test_one_line_for_ten_steps_weighs_ten() -> None:
    events = [step(9, 9.0, steps=10), step(19, 1.0, steps=10), step(20, 3.0)]
    times = measure_events(events, TrainingFacts()).times
    assert times is not None
    assert (times.steps, times.mean, times.p95) == (11, pytest.approx(13 / 11), 3.0)


def test_an_unknown_gpu_has_no_mfu_and_says_why() -> None:
    facts = TrainingFacts(**{**vars(LLAMA3_70B), "gpu": None, "device": "Voodoo 2"})
    metrics = measure_events(list(map(step, range(9))), facts)
    assert metrics.mfu is not None
    assert metrics.mfu.mfu is None
    assert metrics.unknown == "the catalog knows no peak of Voodoo 2"
    nothing = measure_events(list(map(step, range(9))), TrainingFacts(gpus=2, precision="bf16"))
    assert nothing.mfu is None
    assert nothing.unknown == "not known: the model, the sequence length"


def test_an_mfu_above_1_is_an_error() -> None:
    with pytest.raises(TrainshedError, match=r"an MFU of \d+% is not possible"):
        measure_events([step(number, 1.0, tokens=None) for number in range(9)], LLAMA3_70B)


def test_steps_that_are_not_there_are_refused_with_those_that_are() -> None:
    with pytest.raises(InputError, match="of the steps 90 to 95 none can be measured") as raised:
        measure_events(list(map(step, range(9))), TrainingFacts(), start=90, end=95)
    assert "it has the steps 1 to 9" in (raised.value.hint or "")
    with pytest.raises(InputError, match="no step is done yet"):
        measure_events([event("start", device="cpu", world_size=1)], TrainingFacts())
    with pytest.raises(InputError, match="1 steps are too few"):
        measure_events([step(0)], TrainingFacts())


def test_a_log_with_rates_and_no_times_still_has_a_throughput() -> None:
    events = [step(number, None, tokens_per_second_per_gpu=100.0 + number) for number in range(5)]
    metrics = measure_events(events, TrainingFacts())
    assert (metrics.times, metrics.tokens_per_second_per_gpu) == (None, 102.5)


def test_documents_kept_apart_take_the_engines_own_mfu() -> None:
    facts = TrainingFacts(**{**vars(LLAMA3_70B), "documents_apart": True})
    own = {"mfu": 0.30, "mfu_full_attention": 0.4, "tokens": None}
    metrics = measure_events([step(number, 45.0, **own) for number in range(9)], facts)
    assert metrics.mfu is not None
    assert metrics.mfu.mfu == pytest.approx(0.30)
    assert metrics.mfu.model_tflops == pytest.approx(0.30 * 1978.9)
    assert "how long they are" in (measure_events([step(n, 45.0, tokens=None) for n in range(9)], facts).unknown or "")


def test_the_figures_are_plain_values() -> None:
    import orjson

    metrics = measure_events([step(number, 45.0, tokens=None) for number in range(9)], LLAMA3_70B)
    plain = orjson.loads(orjson.dumps(metrics.to_plain()))
    assert plain["step_seconds"]["mean"] == 45.0
    assert plain["goodput"]["goodput"] > 0
    assert plain["facts"]["gpu"] == "h100-sxm"
