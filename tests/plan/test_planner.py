"""The report for programs: stable keys, and the figures of the prediction it was made from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from support.recipes.golden_files import check_golden
from support.recipes.small_plans import CONFIG, GPUS, JOB, answer, layout, prediction
from trainshed.catalog.machines import machine
from trainshed.plan.budget.budget import RunTerms, run_budget
from trainshed.plan.budget.storage import planned_storage
from trainshed.plan.layout import describe_layout, format_layout, parse_layout, resolve_layout
from trainshed.plan.performance.evidence import evidence_for
from trainshed.plan.planner import Plan
from trainshed.plan.report.text import describe_run, format_hours
from trainshed.plan.search.scaling import ScalingCurve, ScalingPoint
from trainshed.recipe import Layout


def whole() -> Plan:
    """Return an answer with every part there is."""
    found = answer()
    terms = RunTerms(
        "megatron",
        machine("a3-mega"),
        planned_storage("amlfs-125", 16.0),
        steps=1000,
        checkpoint_every=100,
        price_per_gpu_hour=2.5,
    )
    return replace(
        found,
        budget=run_budget(JOB, found.chosen, terms),
        calibration={"file": "calibration.yaml", "sha256": "0" * 64, "entry": None},
        evidence=evidence_for(JOB, "megatron", found.chosen),
        scaling=ScalingCurve((ScalingPoint(128, found.chosen, 1.0),), None, None),
    )


def keys(value: Any, path: str = "") -> list[str]:
    """Every key of a report, with the keys of a list's first entry."""
    if isinstance(value, dict):
        return [found for key, each in value.items() for found in keys(each, f"{path}.{key}".lstrip("."))]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return keys(value[0], f"{path}[]")
    return [path]


def test_the_keys_of_a_report_are_stable() -> None:
    check_golden("plan/keys.txt", "\n".join(keys(whole().to_plain())) + "\n")


def test_a_report_has_the_same_keys_where_little_is_known() -> None:
    little = replace(answer(), runners_up=(), rejected=(), notes=(), explanation=()).to_plain()
    assert set(little) == set(whole().to_plain())
    assert (little["chosen"]["hours"], little["chosen"]["cost"], little["energy_kwh"]) == (None, None, None)
    assert orjson.loads(orjson.dumps(little)) == little


def test_figures_are_those_of_the_prediction() -> None:
    plain = whole().to_plain()
    chosen = plain["chosen"]
    assert chosen["step_seconds"] == pytest.approx(42.8)
    assert chosen["memory_gib"]["total"] == pytest.approx(73.3)
    assert chosen["layout"]["stages"] == [4] * 20
    assert [stage["layers"] for stage in chosen["stages"]] == [20] * 4
    assert plain["rejected"][0]["alike"] == 12
    assert (plain["run"]["steps"], plain["chosen"]["hours"]) == (1000, plain["run"]["hours"])


def test_what_the_run_takes_is_said_in_words() -> None:
    found = whole().budget
    assert found is not None
    said = dict(describe_run(found))
    assert list(said) == ["length", "cost", "energy", "checkpoint", "goodput", "host memory", "data"]
    assert "for 1,000 steps" in said["length"]
    assert said["cost"].endswith("at $2.50 per GPU and hour (as given)")
    assert "written in 8.2 minutes to amlfs-125, 16 TiB" in said["checkpoint"]
    assert said["goodput"].startswith("saved every 100 steps, ")
    assert [format_hours(each) for each in (0.5, 30.0, 480.0)] == ["30.0 minutes", "30.0 hours", "20.0 days"]


def test_a_layout_is_said_with_what_its_name_leaves_out() -> None:
    assert describe_layout(layout(tp=8)) == "tp8 dp16 zero1, micro_batch 1, recompute none"
    zero = prediction(layout(tp=8, pp=4, schedule="zero_bubble", recompute="full")).layout
    assert describe_layout(zero) == ("tp8 pp4 dp4 zero1, micro_batch 1, recompute full, schedule zero_bubble")


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"tp": 8, "shard": "full", "replicate": 2, "recompute": "selective"},
        {"tp": 4, "pp": 4, "vp": 5, "cp": 2, "micro_batch": 2},
        {"tp": 8, "pp": 4, "schedule": "zero_bubble", "shard": "none"},
        {"tp": 4, "pp": 4, "stages": [19, 21, 21, 19]},
    ],
    ids=str,
)
def test_the_flag_of_a_layout_gives_it_again(keys: dict[str, Any]) -> None:
    wanted = layout(**keys)
    again = Layout.model_validate(parse_layout(format_layout(wanted)))
    assert resolve_layout(again, CONFIG, world_size=GPUS) == wanted
