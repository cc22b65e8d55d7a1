"""Budgets of phases: from the recipe, by default, and from the run's own steps."""

from __future__ import annotations

import pytest

from support.recipes.small_recipes import small_recipe
from trainshed.observe.budgets import DEFAULT_BUDGET_SECONDS, PhaseBudgets
from trainshed.recipe.budgets import Budgets


def test_every_phase_has_a_key_and_a_default() -> None:
    assert list(Budgets.model_fields) == list(DEFAULT_BUDGET_SECONDS)
    budgets = PhaseBudgets.of(small_recipe("dense", ()))
    assert {phase: budgets.seconds(phase) for phase in DEFAULT_BUDGET_SECONDS} == DEFAULT_BUDGET_SECONDS


def test_what_the_recipe_says_counts() -> None:
    budgets = PhaseBudgets.of(small_recipe("dense", ["budgets={load: 2h, step: 90}"]))
    assert (budgets.seconds("load"), budgets.collective_seconds("load")) == (7200, 7200)
    assert (budgets.seconds("step"), budgets.collective_seconds("step")) == (90, 45)
    budgets.add_step(60.0)
    assert budgets.seconds("step") == 90
    assert budgets.seconds("checkpoint") == DEFAULT_BUDGET_SECONDS["checkpoint"]


def test_long_steps_have_a_longer_budget_and_short_ones_the_default() -> None:
    budgets = PhaseBudgets()
    for seconds in (900.0, 400.0, 410.0, 390.0):  # the first one compiles
        budgets.add_step(seconds)
    assert budgets.seconds("step") == 4050.0
    for _ in range(20):
        budgets.add_step(3.0)
    assert budgets.seconds("step") == 600


def test_the_advice_names_the_key_and_twice_the_time() -> None:
    assert PhaseBudgets().advice("step") == "where it was only slow, write `budgets: {step: 20m}`"
    assert "`budgets: {load: 3h}`" in PhaseBudgets({"load": 5400}).advice("load")
    assert "`budgets: {step: 1s}`" in PhaseBudgets({"step": 0.5}).advice("step")


def test_a_phase_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="there is no phase 'lunch'"):
        PhaseBudgets({"lunch": 60})
    with pytest.raises(ValueError, match="no budget for the phase 'lunch'"):
        PhaseBudgets().seconds("lunch")
