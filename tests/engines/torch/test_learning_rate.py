"""The learning rate of a step: a function of the step and the recipe alone, pinned at its corners."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.recipes.small_recipes import small_recipe
from trainshed.engines.torch.learning_rate import check_decay, decay_span, learning_rate
from trainshed.errors import InputError
from trainshed.recipe.train import Schedule

PEAK, STEPS = 1.0, 100


def rates(**schedule: object) -> list[float]:
    made = Schedule.model_validate(schedule)
    return [learning_rate(step, STEPS, PEAK, made) for step in range(STEPS + 20)]


def test_a_constant_rate_stays_at_the_peak_from_the_first_step() -> None:
    assert rates(name="constant") == [PEAK] * (STEPS + 20)


@pytest.mark.parametrize("name", ["constant", "cosine", "linear", "wsd"])
def test_warm_up_rises_evenly_from_above_zero_to_the_peak(name: str) -> None:
    schedule = {"name": name, "warmup": 4} | ({"decay": 10} if name == "wsd" else {})
    assert rates(**schedule)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize("end", [None, 60])
def test_cosine_reaches_the_minimum_at_its_end_and_stays_there(end: int | None) -> None:
    found = rates(name="cosine", warmup=20, decay=end, min_lr=0.1)
    last = end or STEPS
    assert found[20] == PEAK
    assert found[(20 + last) // 2] == pytest.approx(0.55)
    assert found[20 + (last - 20) // 4] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert found[last:] == pytest.approx([0.1] * (STEPS + 20 - last))


def test_linear_falls_by_the_same_every_step() -> None:
    found = rates(name="linear", warmup=20, min_lr=0.2)
    falls = [before - after for before, after in pairwise(found[20:101])]
    assert falls == pytest.approx([0.01] * 80)
    assert found[100:] == pytest.approx([0.2] * 20)


def test_wsd_stays_at_the_peak_until_its_decay_before_the_end() -> None:
    found = rates(name="wsd", warmup=10, decay=20, min_lr=0.0)
    assert found[10:81] == [PEAK] * 71
    assert found[90] == pytest.approx(0.5)
    assert found[99] == pytest.approx(0.05)
    assert found[100:] == [0.0] * 20


def test_wsd_longer_than_the_run_decays_from_the_warm_up_on() -> None:
    found = rates(name="wsd", warmup=20, decay=500)
    assert found[20] == PEAK
    assert found[60] == pytest.approx(0.5)


@given(
    name=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    warmup=st.integers(0, 30),
    decay=st.integers(31, 200),
    minimum=st.floats(0, 0.5),
    step=st.integers(0, 300),
)
def test_a_rate_lies_between_nothing_and_the_peak_and_only_falls_after_the_warm_up(
    name: str, warmup: int, decay: int, minimum: float, step: int
) -> None:
    more = {} if name == "constant" else {"decay": decay, "min_lr": minimum}
    schedule = Schedule.model_validate({"name": name, "warmup": warmup} | more)
    now, then = (learning_rate(each, STEPS, PEAK, schedule) for each in (step, step + 1))
    assert 0 <= now <= PEAK
    assert now < then if step < warmup else now >= then


def longer(done: int, steps: int, **schedule: object) -> str | None:
    """What is said when a run of 100 steps, of which so many are done, goes on to another length."""
    before = decay_span(
        STEPS, Schedule.model_validate(schedule | {"decay": schedule.pop("was", schedule.get("decay"))})
    )
    written = [f"train.schedule.{key}={value}" for key, value in ({"decay": "null"} | schedule).items()]
    peak = f"train.optimizer.lr={PEAK}"
    return check_decay(small_recipe("dense", [f"train.steps={steps}", peak, *written]), steps, done, before)


COSINE = {"name": "cosine", "warmup": 10, "min_lr": 0.1}


def test_a_longer_run_asks_where_its_decay_ends() -> None:
    with pytest.raises(InputError) as refused:
        longer(STEPS, 200, **COSINE)
    assert refused.value.what == (
        "this run's learning rate decays until step 100; "
        "with 200 steps it would go from 0.1 in step 100 to 0.587 in step 101"
    )
    assert refused.value.where == "command line: train.steps=…"
    assert refused.value.hint == (
        "write train.schedule.decay=100 to keep the curve and stay at min_lr after it, "
        "or train.schedule.decay=200 to change it knowingly"
    )
    with pytest.raises(InputError, match=r"from 0\.62 in step 56 to 0\.101 in step 57"):
        longer(56, 57, **COSINE, was=110)


@pytest.mark.parametrize(
    ("done", "steps", "schedule"),
    [
        pytest.param(STEPS, 200, {"name": "constant", "min_lr": 0.0}, id="no decay"),
        pytest.param(STEPS, 200, COSINE | {"decay": 100}, id="the curve is kept"),
        pytest.param(50, STEPS, COSINE, id="the same length"),
        pytest.param(11, 200, COSINE, id="nothing has decayed yet"),
        pytest.param(STEPS, 50, COSINE, id="nothing is left to train"),
        pytest.param(81, 200, {"name": "wsd", "warmup": 10, "decay": 20}, id="the last decay has not begun"),
    ],
)
def test_a_run_whose_past_stays_the_same_goes_on_without_a_question(
    done: int, steps: int, schedule: dict[str, object]
) -> None:
    assert longer(done, steps, **schedule) is None


def test_a_decay_that_is_stretched_on_purpose_is_said() -> None:
    said = longer(STEPS, 200, **COSINE, decay=200, was=None)
    assert said is not None
    assert "goes from 0.1 in step 100 to 0.587 in step 101: it decays until step 200 now, not 100" in said
    said = longer(STEPS, STEPS, **COSINE, decay=50, was=None)
    assert said == "this run is trained, and its learning rate decayed until step 100, not 50; --id starts another"


def test_a_last_decay_that_has_begun_is_not_taken_back() -> None:
    with pytest.raises(InputError, match=r"decays until step 100; with 200 steps it would go from 0\.8") as refused:
        longer(85, 200, name="wsd", warmup=10, decay=20)
    assert "start another run with --id" in (refused.value.hint or "")
