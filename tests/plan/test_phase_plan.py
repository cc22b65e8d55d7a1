"""A plan of a recipe in phases: memory for the longest sequences, time and cost of all phases together."""

from __future__ import annotations

import pytest

from trainshed.errors import InputError
from trainshed.plan.planner import Plan, build_request, make_plan
from trainshed.plan.training_shape import hardware_of_gpu
from trainshed.recipe import load_cluster, parse_recipe
from trainshed.workflow.layout import planned_model

RECIPE = """
name: phased
model: {preset: llama3-8b, init: random}
tokenizer: hf://org/tokenizer
data: {sequence_length: 2048, train: [{path: a.jsonl}]}
train:
  global_batch: 256
  optimizer: {lr: 3.0e-4}
  phases: [{name: main, steps: 900}, {name: long, steps: 100, sequence_length: 8192, global_batch: 64}]
layout: {tp: 2, shard: full}
"""


def plan_of(*overrides: str) -> Plan:
    recipe, cluster = parse_recipe(RECIPE, overrides), load_cluster()
    request = build_request(planned_model(recipe, cluster), hardware_of_gpu("h100"), (64,), cluster, recipe=recipe)
    return make_plan(request)


def test_the_longest_sequences_decide_the_memory_and_the_hours_are_summed() -> None:
    plan = plan_of()
    main, long = plan.phases
    assert plan.chosen.memory.total == long.prediction.memory.total > main.prediction.memory.total
    alone = [
        plan_of("train.phases=null", "train.steps=900"),
        plan_of("train.phases=null", "train.steps=100", "train.global_batch=64", "data.sequence_length=8192"),
    ]
    for phase, one in zip(plan.phases, alone, strict=True):
        assert phase.prediction.step_seconds == one.chosen.step_seconds
    assert plan.budget is not None
    assert plan.budget.run is not None
    hours = sum(one.budget.run.training_hours for one in alone if one.budget is not None and one.budget.run is not None)
    assert plan.budget.run.training_hours == pytest.approx(hours, rel=1e-12)
    assert plan.budget.run.steps == 1000
    assert [phase["name"] for phase in plan.to_plain()["phases"]] == ["main", "long"]
    assert any(note.startswith("phase long: 100 steps of 64 × 8,192 tokens on tp2") for note in plan.notes)


def test_a_phase_is_planned_on_the_layout_of_its_own() -> None:
    plan = plan_of("train.phases.1.layout={tp: 2, cp: 4, shard: full}")
    assert plan.chosen.layout.cp == 1
    assert [phase.prediction.layout.cp for phase in plan.phases] == [1, 4]
    assert plan.phases[1].prediction.layout.world_size == 64


def test_a_layout_that_cannot_train_a_phase_is_refused_with_its_name() -> None:
    with pytest.raises(InputError, match="phase main"):
        plan_of("train.phases.0.sequence_length=2047")
