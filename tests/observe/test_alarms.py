"""Alarms from events: spikes, divergence and slow ranks, each named once."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from trainshed.observe.alarms import Alarm, AlarmWatcher, slow_ranks
from trainshed.observe.event_text import EventFormatter


def alarms(losses: Iterable[float | None]) -> list[Alarm]:
    watcher = AlarmWatcher()
    events = ({"kind": "step", "step": step, "loss": loss} for step, loss in enumerate(losses))
    return [alarm for event in events for alarm in watcher.alarms(event)]


def usual_losses(steps: int, seed: int = 0) -> list[float]:
    """A loss that falls from 10 to 2 with some noise."""
    noise = random.Random(seed)
    return [2 + 8 * 0.99**step + noise.gauss(0, 0.05) for step in range(steps)]


def test_a_loss_that_falls_as_usual_is_no_alarm() -> None:
    for seed in range(20):
        assert alarms(usual_losses(800, seed)) == []
    assert alarms([None] * 200) == []
    assert alarms([2.0] * 300) == []


def test_a_spike_is_named_with_how_far_it_is_off() -> None:
    losses = usual_losses(500)
    losses[400] = 5.0
    (alarm,) = alarms(losses)
    assert (alarm.name, alarm.step) == ("loss_spike", 400)
    assert alarm.what.startswith("the loss jumped to 5.0000: ")
    assert alarm.what.endswith(" standard deviations, above the mean of the 100 steps before it")


def test_the_first_steps_and_small_jumps_are_no_spikes() -> None:
    assert alarms([*usual_losses(20), 20.0]) == []
    assert alarms([*[2.0] * 100, 2.05, *[2.0] * 100]) == []


def test_spikes_in_a_row_are_named_once_and_a_lasting_level_is_no_spike_for_ever() -> None:
    spikes = [alarm for alarm in alarms([*[2.0] * 100, *[3.0] * 90]) if alarm.name == "loss_spike"]
    assert [alarm.step for alarm in spikes] == [100]


def test_a_loss_that_rises_for_long_is_a_divergence_named_rarely() -> None:
    rising = [*usual_losses(500), *(2.1 + 0.002 * step for step in range(900))]
    found = [alarm for alarm in alarms(rising) if alarm.name == "divergence"]
    assert len(found) == 2
    assert 500 < (found[0].step or 0) < 800
    assert "%) above its best (" in found[0].what
    assert found[0].what.endswith(": the run diverges")


def test_a_loss_near_zero_and_that_of_small_batches_may_differ_by_much() -> None:
    for seed in range(5):
        noise = random.Random(seed)
        assert alarms([abs(noise.gauss(0, 0.02)) for _ in range(1000)]) == []
        assert alarms([1 + noise.uniform(-0.5, 0.5) for _ in range(1000)]) == []
    assert alarms([0.0] * 300) == []
    assert [alarm.name for alarm in alarms([*[0.0] * 300, *[0.5] * 120])] == ["loss_spike", "divergence"]


def ranks_event(compute: list[float | None], step: int = 20) -> dict[str, Any]:
    return {"kind": "ranks", "step": step, "steps": 20, "compute_seconds": compute}


def test_a_rank_is_compared_with_the_others_of_its_pipeline_stage() -> None:
    assert slow_ranks([0.3, 0.3, 0.6, 0.6], stage_ranks=2) == {}
    assert slow_ranks([0.3, 0.3, 0.6, 0.9], stage_ranks=2) == {3: 1.5}
    assert slow_ranks([0.3, 0.3, 0.3, 0.6], stage_ranks=4) == {3: 2.0}
    assert slow_ranks([0.3, 0.6], stage_ranks=1) == {}, "stages without peers are not compared"
    assert slow_ranks([None, 0.3, None, 0.6], stage_ranks=4) == {3: 2.0}
    assert slow_ranks([0.8, 0.1, 0.5, 0.3], stage_ranks=4) == {0: 0.8 / 0.3, 2: 0.5 / 0.3}


def test_two_bad_windows_in_a_row_name_node_and_gpu() -> None:
    watcher = AlarmWatcher(stage_ranks=4, ranks_per_node=2)
    start = {"kind": "start", "device": "NVIDIA H100 80GB HBM3", "hosts": ["one", "two"]}
    assert list(watcher.alarms(start)) == []
    slow: list[float | None] = [0.3, 0.3, 0.3, 0.54]
    assert list(watcher.alarms(ranks_event(slow))) == []
    (alarm,) = watcher.alarms(ranks_event(slow, 40))
    assert (alarm.name, alarm.step, alarm.ranks, alarm.hosts) == ("straggler", 40, [3], ["two"])
    assert alarm.what == (
        "rank 3 (two, GPU 1) computes 1.8 times as long as the others of the stage (0.54 s of a step, 0.3 s is usual), "
        "two windows in a row: all ranks wait for it"
    )
    assert list(watcher.alarms(ranks_event(slow))) == [], "it has been named"
    text = EventFormatter(100).format({"kind": "alarm", "step": alarm.step, "name": alarm.name, "what": alarm.what})
    assert text == f"step 41: {alarm.what}"


def test_one_bad_window_is_chance_and_a_rank_that_recovers_is_named_again() -> None:
    watcher = AlarmWatcher()
    even: list[float | None] = [0.3] * 4
    slow: list[float | None] = [0.9, 0.3, 0.3, 0.3]
    windows = [slow, even, slow, even, slow, slow, slow, even, slow, slow]
    named = [bool(list(watcher.alarms(ranks_event(window)))) for window in windows]
    assert named == [False, False, False, False, False, True, False, False, False, True]


def test_a_slow_node_is_one_alarm_with_its_host() -> None:
    watcher = AlarmWatcher(ranks_per_node=2)
    list(watcher.alarms({"kind": "start", "device": "cpu", "hosts": ["one", "two", "three"]}))
    slow: list[float | None] = [0.3, 0.3, 0.6, 0.9, 0.3, 0.3]
    list(watcher.alarms(ranks_event(slow)))
    (alarm,) = watcher.alarms(ranks_event(slow))
    assert (alarm.ranks, alarm.hosts) == ([2, 3], ["two"])
    assert alarm.what.startswith("ranks 2-3 (two) compute up to 3.0 times as long")
