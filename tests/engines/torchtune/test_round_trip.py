"""A recipe that torchtune can take, rendered and imported again, is the same recipe."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from support.recipes.foreign_tasks import task_of
from support.recipes.round_trips import Alike, forgotten_keys, read_back, recipe_of, said_keys
from trainshed.engines.importing import import_text
from trainshed.engines.launch import EngineLaunch, build_launch
from trainshed.engines.torchtune.builders import known_presets
from trainshed.engines.torchtune.keys import TORCHTUNE_KEYS, TORCHTUNE_TABLE
from trainshed.errors import InputError

CHAT = {"dataset.conversation_style": "openai", "dataset.conversation_column": "messages"}
FORMS = [
    CHAT,
    CHAT | {"dataset.packed": True, "compile": False},
    {"dataset._component_": "torchtune.datasets.instruct_dataset", "dataset.column_map.input": "question"},
    {"dataset._component_": "torchtune.datasets.alpaca_dataset", "optimizer_in_bwd": True},
]
WHOLE = {"data.train": [{"path": "hf://datasets/org/talks@abc"}]}
DATA = [
    WHOLE,
    {"data.train": [{"path": "hf://datasets/org/talks"}], "data.validation.path": "hf://datasets/org/other@def"},
    {"data.train": [{"path": "hf://datasets/org/talks@abc/part/a.parquet"}]},
    {"data.train": [{"path": "/shared/a.jsonl"}], "data.validation": {"path": "/shared/b.jsonl", "every": 7}},
    {"data.train": [{"path": ["/shared/a.jsonl", "/shared/b.jsonl"]}]},
    WHOLE | {"data.split": {"train": 0.9, "validation": 0.07, "test": 0.03}, "data.validation.every": 20},
    WHOLE | {"data.split": {"train": 0.95, "validation": 0.05}},
    WHOLE | {"data.split": {"train": 0.95, "test": 0.05}},
]
RATE = st.floats(1e-7, 1e-2)
TRAINING = st.fixed_dictionaries(
    {
        "train.optimizer.lr": RATE,
        "train.schedule": st.one_of(
            st.just({}), st.fixed_dictionaries({"name": st.just("cosine"), "warmup": st.integers(0, 20)})
        ),
        "checkpoint.every": st.one_of(st.none(), st.integers(1, 900)),
        "checkpoint.keep": st.one_of(st.none(), st.integers(1, 9)),
    },
    optional={
        "train.optimizer.betas": st.tuples(st.floats(0.1, 0.99), st.floats(0.1, 0.9999)).map(list),
        "train.optimizer.eps": RATE,
        "train.optimizer.weight_decay": st.floats(0, 0.5),
        "train.optimizer.clip": st.one_of(st.none(), st.floats(0.1, 5)),
        "train.precision": st.sampled_from(["bf16", "fp32", "fp8"]),
        "train.lora": st.fixed_dictionaries(
            {"rank": st.integers(1, 64), "alpha": st.floats(0.5, 64)},
            optional={
                "dropout": st.floats(0, 0.5),
                "targets": st.sampled_from(
                    [["q_proj"], ["k_proj", "o_proj"], ["v_proj", "gate_proj", "up_proj", "down_proj"]]
                ),
            },
        ),
        "observe.tensorboard": st.booleans(),
        "observe.profile": st.fixed_dictionaries({"start": st.integers(1, 30), "steps": st.integers(1, 9)}),
    },
)
ALIKE: Alike = {
    "observe.tensorboard": (
        "false and null are both torchtune's own logger",
        lambda flat: bool(flat.get("observe.tensorboard")),
    ),
    "engine.args.compile": (
        "false is what LoRA is rendered with in any case",
        lambda flat: None if "train.lora.rank" in flat else flat.get("engine.args.compile"),
    ),
}


@settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(
    preset=st.sampled_from(known_presets()),
    length=st.one_of(st.integers(1, 900).map(lambda n: {"train.steps": n}), st.sampled_from([{"train.epochs": 3.0}])),
    data=st.sampled_from(DATA),
    form=st.sampled_from(FORMS),
    training=TRAINING,
    layout=st.fixed_dictionaries(
        {
            "tp": st.sampled_from([1, 1, 2, 8]),
            "micro_batch": st.sampled_from([1, 2, 4]),
            "recompute": st.sampled_from(["none", "full"]),
        }
    ),
    accumulation=st.integers(1, 4),
    nodes=st.integers(1, 3),
    seed=st.integers(0, 99999),
)
def test_import_of_what_is_rendered_is_the_recipe(
    preset: str,
    length: dict[str, Any],
    data: dict[str, Any],
    form: dict[str, Any],
    training: dict[str, Any],
    layout: dict[str, Any],
    accumulation: int,
    nodes: int,
    seed: int,
) -> None:
    dp = nodes * 8 // layout["tp"]
    try:
        recipe = recipe_of(
            {
                "name": "chat",
                "model": {"preset": preset, "from": "hf://org/base"},
                "tokenizer": "hf://org/base",
                "data.sequence_length": 512,
                "data.seed": seed,
                "train.mode": "finetune",
                "train.global_batch": dp * layout["micro_batch"] * accumulation,
                "layout": layout | {"shard": "full"},
                "engine.name": "torchtune",
                "engine.args": form,
                "seed": seed,
                **length,
                **data,
                **training,
            }
        )
        launch = build_launch(task_of(recipe, nodes=nodes, steps=recipe.train.steps or 50))
    except InputError:
        assume(False)
        raise
    imported = import_text(launch.files["torchtune.yaml"], "torchtune.yaml", gpus=nodes * 8)
    again = read_back(imported)
    assert said_keys(again, TORCHTUNE_TABLE.unsaid, ALIKE) == said_keys(recipe, TORCHTUNE_TABLE.unsaid, ALIKE)
    rendered_again = build_launch(task_of(again, nodes=nodes, steps=again.train.steps or 50))
    assert keys_below_the_heading(rendered_again) == keys_below_the_heading(launch)


def keys_below_the_heading(launch: EngineLaunch) -> str:
    """The file without its first line, which says the name of the recipe."""
    return launch.files["torchtune.yaml"].partition("\n")[2]


def test_every_key_of_a_recipe_is_in_the_table_or_listed_as_unsaid() -> None:
    assert forgotten_keys(TORCHTUNE_TABLE) == []


def test_every_row_has_a_key_that_torchtune_reads() -> None:
    keys = [key for row in TORCHTUNE_TABLE.rows if row.render is not None for key in row.keys]
    assert [key for key in keys if not TORCHTUNE_KEYS.knows(key)] == []
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("start", [1, 2, 10])
def test_a_profile_begins_at_the_step_that_the_recipe_names(start: int) -> None:
    """Imports began one step too early."""
    recipe = recipe_of(
        {
            "name": "chat",
            "model": {"preset": "llama3.1-8b", "from": "hf://org/base"},
            "tokenizer": "hf://org/base",
            "data": {"sequence_length": 512, "train": [{"path": "hf://datasets/org/talks@abc"}]},
            "train": {"mode": "finetune", "steps": 50, "global_batch": 8, "optimizer": {"lr": 1e-4}},
            "layout": {"shard": "full"},
            "engine": {"name": "torchtune", "args": CHAT},
            "observe": {"profile": {"start": start, "steps": 3}},
        }
    )
    text = build_launch(task_of(recipe, nodes=1)).files["torchtune.yaml"]
    assert import_text(text, "torchtune.yaml", gpus=8).recipe["observe"]["profile"] == {"start": start, "steps": 3}
