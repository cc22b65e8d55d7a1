"""A recipe that NeMo can take, rendered and imported again, is the same recipe: 24.07's file and 26.06's script."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from support.recipes.foreign_tasks import task_of
from support.recipes.round_trips import (
    PRETRAINING_ALIKE,
    Alike,
    forgotten_keys,
    read_back,
    recipe_of,
    said_keys,
    schedules,
)
from trainshed.catalog import model_preset
from trainshed.engines.importing import ImportedConfig, import_text
from trainshed.engines.key_table import KeyTable
from trainshed.engines.keys import flatten, nest
from trainshed.engines.launch import NODE_NUMBER, EngineLaunch, build_launch
from trainshed.engines.nemo.bridge_keys import BRIDGE_KEYS, BRIDGE_TABLE
from trainshed.engines.nemo.hydra_keys import HYDRA_KEYS, HYDRA_PLACES, HYDRA_TABLE
from trainshed.errors import InputError
from trainshed.recipe import Recipe, to_plain

NODES = 4
ARCHITECTURE = st.fixed_dictionaries(
    {},
    optional={
        "tied_embeddings": st.booleans(),
        "activation": st.sampled_from(["gelu", "gelu_tanh", "silu"]),
        "norm_eps": st.floats(1e-7, 1e-4),
        "init_std": st.floats(0.001, 0.1),
        "head_dim": st.sampled_from([64, 256]),
        "rope": st.sampled_from([{"base": 10000.0}, {"base": 500000.0, "scaling": {"kind": "linear", "factor": 4.0}}]),
    },
)
STEPS = st.integers(50, 900)
RATE = st.floats(1e-6, 1e-3)
DATA = [
    {"data.synthetic": True},
    {"data.train": [{"tokens": "/tokens/a"}]},
    {"data.train": [{"tokens": "/tokens/a"}], "data.split": {"train": 0.98, "test": 0.02}},
    {
        "data.train": [{"tokens": "/tokens/a"}],
        "data.split": {"train": 0.969, "validation": 0.03, "test": 0.001},
        "data.validation": {"every": 20, "batches": 3},
    },
    {"data.train": [{"tokens": "/tokens/a"}], "data.validation": {"tokens": "/tokens/b", "every": 7, "batches": 2}},
]
SCHEDULES = schedules(largest_min_lr=1e-6)
TRAINING = st.fixed_dictionaries(
    {"train.optimizer.lr": RATE, "train.schedule": SCHEDULES},
    optional={
        "train.optimizer.betas": st.tuples(st.floats(0.1, 0.99), st.floats(0.1, 0.9999)).map(list),
        "train.optimizer.weight_decay": st.floats(0, 0.5),
        "train.optimizer.clip": st.one_of(st.none(), st.floats(0.1, 5)),
        "train.precision": st.sampled_from(["bf16", "fp8"]),
        "train.dropout": st.floats(0, 0.5),
        "train.batch_ramp": st.just({"start": 64, "increment": 64, "samples": 1000}),
        "checkpoint.every": st.one_of(st.none(), st.integers(1, 900)),
        "checkpoint.keep": st.one_of(st.none(), st.integers(1, 9)),
        "checkpoint.async": st.booleans(),
        "checkpoint.resume": st.sampled_from(["auto", "must", "fresh"]),
        "observe.tensorboard": st.booleans(),
        "observe.profile": st.fixed_dictionaries(
            {"start": st.integers(1, 30), "steps": st.integers(1, 9), "ranks": st.just([0, 3])},
            optional={"shapes": st.just(True)},
        ),
    },
)
ROUTER = st.one_of(
    st.just({}), st.fixed_dictionaries({"balance_loss": st.floats(0, 0.1), "z_loss": st.sampled_from([0.0, 0.01])})
)
LAYOUT = st.fixed_dictionaries(
    {"tp": st.sampled_from([1, 2, 4]), "pp": st.sampled_from([1, 2, 4])},
    optional={
        "vp": st.just(2),
        "cp": st.just(2),
        "micro_batch": st.sampled_from([1, 2]),
        "recompute": st.sampled_from(["none", "selective", "full"]),
    },
)
ALIKE: Alike = PRETRAINING_ALIKE | {
    "observe.tensorboard": ("true and null are both on", lambda flat: flat.get("observe.tensorboard", True)),
}
HYDRA_ALIKE: Alike = ALIKE | {
    "observe.dllogger": ("true and null are both on", lambda flat: flat.get("observe.dllogger", True)),
    "model.config.family": (
        "a Mistral without a window is a Llama",
        lambda flat: flat["model.config.family"].replace("mistral", "llama"),
    ),
    "checkpoint.resume": (
        "fresh is read as a mistake: a restart would begin again",
        lambda flat: flat["checkpoint.resume"].replace("fresh", "auto"),
    ),
}
BRIDGE_ALIKE: Alike = ALIKE | {
    "checkpoint.every": (
        "null is the last step",
        lambda flat: flat.get("checkpoint.every") or flat["train.steps"],
    ),
}


def drawn_recipe(version: str, preset: str, keys: dict[str, Any], changes: dict[str, Any] | None = None) -> Recipe:
    """A recipe of a preset's architecture with some of its keys changed."""
    config = to_plain(model_preset(preset)) | (changes or {})
    return recipe_of(
        {
            "name": "pretraining",
            "model": {"config": config, "init": "random"},
            "tokenizer": "hf://org/tokens@abc",
            "data.sequence_length": 1024,
            "train.global_batch": 256,
            "layout.shard": "zero1",
            "engine": {"name": "nemo", "version": version},
            "resources.nodes": NODES,
            **keys,
        }
    )


def launched(recipe: Recipe, **place: Any) -> EngineLaunch:
    """The launch of a recipe; one that NeMo cannot take is not looked at."""
    try:
        return build_launch(task_of(recipe, nodes=NODES, steps=recipe.train.steps or 0, **place))
    except InputError:
        assume(False)
        raise


def as_hydra_reads_it(recipe: Recipe, launch: EngineLaunch) -> str:
    """The file with the overrides of the command line, and with the prefixes that are read when the job starts."""
    flat = flatten(yaml.safe_load(launch.files["nemo.yaml"]))
    for argument in (*launch.arguments, *(word.replace(NODE_NUMBER, "0") for word in launch.node_arguments)):
        if argument.startswith("++"):
            key, _, value = argument.removeprefix("++").partition("=")
            flat[key] = yaml.safe_load(value)
    if not recipe.data.synthetic:
        own = recipe.data.validation is not None and recipe.data.validation.kind is not None
        train = [1.0, "/tokens/a"]
        flat["model.data.data_prefix"] = {"train": train, "validation": [1.0, "/tokens/b"]} if own else train
    return yaml.safe_dump(nest(flat), sort_keys=False)


def imported_hydra(recipe: Recipe, launch: EngineLaunch) -> ImportedConfig:
    return import_text(as_hydra_reads_it(recipe, launch), "nemo.yaml")


@settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(
    preset=st.sampled_from(["llama3-8b", "qwen2.5-7b", "gpt2", "mixtral-8x7b", "llama2-7b"]),
    steps=STEPS,
    data=st.sampled_from(DATA),
    training=TRAINING,
    router=ROUTER,
    layout=LAYOUT,
    changes=ARCHITECTURE,
    dllogger=st.sampled_from([None, True, False]),
    args=st.sampled_from([{}, {"model.gc_interval": 18, "model.ub_tp_comm_overlap": True}]),
    sharp=st.booleans(),
)
def test_import_of_a_hydra_file_is_the_recipe(
    preset: str,
    steps: int,
    data: dict[str, Any],
    training: dict[str, Any],
    router: dict[str, Any],
    layout: dict[str, Any],
    changes: dict[str, Any],
    dllogger: bool | None,
    args: dict[str, Any],
    sharp: bool,
) -> None:
    experts = {"train.moe": router, "layout.ep": 2, "layout.etp": layout["tp"]} if preset == "mixtral-8x7b" else {}
    keys = {f"layout.{key}": value for key, value in layout.items()} | data | training | experts
    try:
        recipe = drawn_recipe(
            "24.07", preset, keys | {"train.steps": steps, "observe.dllogger": dllogger, "engine.args": args}, changes
        )
    except InputError:
        assume(False)
        raise
    launch = launched(recipe, sharp=sharp)
    imported = imported_hydra(recipe, launch)
    again = read_back(imported)
    assert said_keys(again, HYDRA_TABLE.unsaid, HYDRA_ALIKE) == said_keys(recipe, HYDRA_TABLE.unsaid, HYDRA_ALIKE)
    assert imported.cluster.get("sharp", False) == sharp
    assert again.resources.nodes == NODES


@settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(
    preset=st.sampled_from(["llama3.1-8b", "qwen3-8b", "gpt2-xl", "mistral-7b-v0.1", "mixtral-8x7b", "qwen3-30b-a3b"]),
    steps=STEPS,
    data=st.sampled_from(DATA),
    training=TRAINING,
    router=ROUTER,
    layout=LAYOUT,
    changes=ARCHITECTURE,
    more=st.fixed_dictionaries(
        {},
        optional={
            "train.optimizer.eps": RATE,
            "train.deterministic": st.booleans(),
            "layout.replicate": st.just(2),
            "engine.args": st.just({"model.cross_entropy_fusion_impl": "te"}),
        },
    ),
    sharp=st.booleans(),
)
def test_import_of_a_bridge_script_is_the_recipe(
    preset: str,
    steps: int,
    data: dict[str, Any],
    training: dict[str, Any],
    router: dict[str, Any],
    layout: dict[str, Any],
    changes: dict[str, Any],
    more: dict[str, Any],
    sharp: bool,
) -> None:
    experts = {"train.moe": router, "layout.ep": 4, "layout.etp": 1} if "x" in preset or "a3b" in preset else {}
    experts = {} if preset == "gpt2-xl" else experts
    keys = {f"layout.{key}": value for key, value in layout.items()} | data | training | experts | more
    try:
        recipe = drawn_recipe("26.06", preset, keys | {"train.steps": steps}, changes)
    except InputError:
        assume(False)
        raise
    launch = launched(recipe, sharp=sharp)
    imported = import_text(launch.files["pretrain.py"], "pretrain.py")
    again = read_back(imported)
    assert said_keys(again, BRIDGE_TABLE.unsaid, BRIDGE_ALIKE) == said_keys(recipe, BRIDGE_TABLE.unsaid, BRIDGE_ALIKE)
    assert imported.cluster.get("sharp", False) == sharp


@pytest.mark.parametrize("table", [HYDRA_TABLE, BRIDGE_TABLE], ids=["hydra", "bridge"])
def test_every_key_of_a_recipe_is_in_the_table_or_listed_as_unsaid(table: KeyTable) -> None:
    assert forgotten_keys(table) == []


def test_every_row_has_keys_that_nemo_reads() -> None:
    for rows, known in (((*HYDRA_TABLE.rows, *HYDRA_PLACES.rows), HYDRA_KEYS), (BRIDGE_TABLE.rows, BRIDGE_KEYS)):
        keys = [key for row in rows if row.render is not None for key in row.keys]
        unknown = {key.replace("dataset.seq_length", "dataset.sequence_length") for key in keys if not known.knows(key)}
        # What the script calls a class and a function by; the length is megatron-core's `sequence_length`.
        assert {key for key in unknown if not known.knows(key)} <= {"dataset", "mixed_precision"}
        # The tokenizer is a name in the file or a folder on the command line.
        assert {key for key in keys if keys.count(key) > 1} <= {"model.tokenizer.type"}


def test_a_wsd_schedule_reads_back() -> None:
    """It was rendered as PolynomialHoldDecayAnnealing, which an import did not know."""
    schedule = {"name": "wsd", "warmup": 5, "min_lr": 1e-6, "decay": 20}
    recipe = drawn_recipe(
        "24.07",
        "llama3-8b",
        {"data.synthetic": True, "train.steps": 100, "train.optimizer.lr": 1e-4, "train.schedule": schedule},
    )
    imported = imported_hydra(recipe, launched(recipe))
    assert imported.recipe["train"]["schedule"] == schedule
    assert not any("schedule" in question for question in imported.open_questions)


def test_sharp_is_a_key_of_the_cluster_file() -> None:
    """It came back in `engine.args`."""
    recipe = drawn_recipe(
        "24.07", "llama3-8b", {"data.synthetic": True, "train.steps": 100, "train.optimizer.lr": 1e-4}
    )
    imported = imported_hydra(recipe, launched(recipe, sharp=True))
    assert imported.cluster["sharp"] is True
    assert "args" not in imported.recipe["engine"]
