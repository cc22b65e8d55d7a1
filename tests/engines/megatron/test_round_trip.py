"""A recipe that Megatron can take, rendered and imported again, is the same recipe, in every version."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from support.recipes.megatron_tasks import task_of
from support.recipes.round_trips import (
    PRETRAINING_ALIKE,
    Alike,
    forgotten_keys,
    read_back,
    recipe_of,
    said_keys,
    schedules,
)
from trainshed.catalog import architecture, model_preset, preset_names
from trainshed.checkpoints.megatron.args import architecture_args
from trainshed.engines.launch import EngineTask
from trainshed.engines.megatron import megatron_launch, read_megatron
from trainshed.engines.megatron.arguments import KNOWN_VERSIONS, known_arguments
from trainshed.engines.megatron.keys import MEGATRON_TABLE
from trainshed.engines.megatron.model_args import ARCHITECTURE
from trainshed.errors import InputError
from trainshed.recipe import Recipe, to_plain

NODES = 2
SAMPLED_VERSIONS = [
    version if version in ("878d65f", "0.16.1") else pytest.param(version, marks=pytest.mark.full)
    for version in KNOWN_VERSIONS
]
RATE = st.floats(1e-7, 1e-3)
RAMP = {"start": 64, "increment": 64, "samples": 1000}
DATA = [
    {"data.synthetic": True},
    {"data.train": [{"tokens": "a"}]},
    {"data.train": [{"tokens": "a"}], "tokenizer": None},
    {"data.train": [{"tokens": "a"}], "data.split": {"train": 0.98, "test": 0.02}},
    {
        "data.train": [{"tokens": "a"}],
        "data.split": {"train": 0.969, "validation": 0.03, "test": 0.001},
        "data.validation": {"every": 20, "batches": 3},
    },
    {"data.train": [{"tokens": "a"}], "data.validation": {"tokens": "b", "every": 7, "batches": 2}},
]
SCHEDULES = schedules(largest_min_lr=1e-7)
TRAINING = st.fixed_dictionaries(
    {"train.optimizer.lr": RATE, "train.schedule": SCHEDULES},
    optional={
        "train.optimizer.betas": st.tuples(st.floats(0.1, 0.99), st.floats(0.1, 0.9999)).map(list),
        "train.optimizer.eps": RATE,
        "train.optimizer.weight_decay": st.floats(0, 0.5),
        "train.optimizer.clip": st.one_of(st.none(), st.floats(0.1, 5)),
        "train.optimizer.states": st.just("bf16"),
        "train.precision": st.sampled_from(["bf16", "fp8", "fp16", "fp32"]),
        "train.dropout": st.floats(0, 0.5),
        "train.batch_ramp": st.just(RAMP),
        "train.deterministic": st.booleans(),
        "checkpoint.every": st.one_of(st.none(), st.integers(1, 900)),
        "checkpoint.async": st.booleans(),
        "checkpoint.resume": st.sampled_from(["auto", "must", "fresh"]),
        "observe.tensorboard": st.booleans(),
        "observe.profile": st.fixed_dictionaries(
            {"start": st.integers(1, 30), "steps": st.integers(1, 9), "ranks": st.just([0, 3])},
            optional={"shapes": st.just(True)},
        ),
        "engine.args": st.sampled_from(
            [
                {"num-workers": 8, "no-masked-softmax-fusion": True},
                {"attention-backend": "flash", "distributed-timeout-minutes": 60},
            ]
        ),
    },
)
LAYOUT = st.fixed_dictionaries(
    {"tp": st.sampled_from([1, 2, 4]), "pp": st.sampled_from([1, 2])},
    optional={
        "vp": st.just(2),
        "cp": st.just(2),
        "micro_batch": st.sampled_from([1, 2]),
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "shard": st.sampled_from(["none", "zero1", "zero2", "full"]),
        "replicate": st.just(2),
    },
)
ARCHITECTURES = st.fixed_dictionaries(
    {},
    optional={
        "tied_embeddings": st.booleans(),
        "activation": st.sampled_from(["gelu", "gelu_tanh", "silu"]),
        "norm_eps": st.floats(1e-7, 1e-4),
        "init_std": st.floats(0.001, 0.1),
        "head_dim": st.sampled_from([64, 256]),
        "sliding_window": st.sampled_from([None, 512]),
        "rope": st.sampled_from([{"base": 10000.0}, {"base": 500000.0, "scaling": {"kind": "linear", "factor": 4.0}}]),
    },
)
EXPERTS = st.fixed_dictionaries(
    {"layout.ep": st.sampled_from([1, 2, 4]), "layout.etp": st.sampled_from([1, 2])},
    optional={
        "train.moe": st.fixed_dictionaries(
            {"balance_loss": st.sampled_from([0.0, 0.001, 0.02]), "z_loss": st.sampled_from([0.0, 0.01])}
        )
    },
)


def uneven(stages: Any) -> Any:
    return stages if stages is not None and len(set(stages)) > 1 else None


ALIKE: Alike = PRETRAINING_ALIKE | {
    "train.moe.bias_update": (
        "null is what the schema defaults it to, for a router with a bias",
        lambda flat: flat.get("train.moe.bias_update", 0.001) if flat.get("model.config.moe.score_bias") else None,
    ),
    "observe.tensorboard": (
        "true and null are both on, and a profile is written there too",
        lambda flat: flat.get("observe.tensorboard", True) or "observe.profile.start" in flat,
    ),
    "checkpoint.every": (
        "null is the last step, where there are checkpoints",
        lambda flat: flat["checkpoint.save"] and (flat.get("checkpoint.every") or flat["train.steps"]),
    ),
    "checkpoint.resume": (
        "fresh is checked before Megatron starts, in build_index.py",
        lambda flat: flat["checkpoint.resume"].replace("fresh", "auto"),
    ),
    "layout.stages": ("even stages need not be written", lambda flat: uneven(flat.get("layout.stages"))),
    "model.config.family": (
        "Llama and Mistral differ in the window alone",
        lambda flat: (
            flat["model.config.family"]
            if flat["model.config.family"] not in ("llama", "mistral")
            else "mistral"
            if flat.get("model.config.sliding_window")
            else "llama"
        ),
    ),
}


def drawn_task(
    version: str, preset: str, changes: dict[str, Any], keys: dict[str, Any], sharp: bool = False
) -> EngineTask:
    """A task of drawn keys; one that Megatron cannot take is not looked at."""
    try:
        recipe = recipe_of(
            {
                "name": "demo",
                "model": {"config": to_plain(model_preset(preset)) | changes, "init": "random"},
                "tokenizer": "hf://org/name",
                "data.sequence_length": 1024,
                "train.global_batch": 256,
                "engine": {"name": "megatron", "version": version},
                **keys,
            }
        )
        return task_of(recipe, known(recipe), nodes=NODES, sharp=sharp)
    except InputError:
        assume(False)
        raise


def known(recipe: Recipe) -> Any:
    config = architecture(recipe)
    assert config is not None
    return config


@pytest.mark.parametrize("version", SAMPLED_VERSIONS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(
    preset=st.sampled_from(["llama3-8b", "llama3.1-8b", "qwen2.5-7b", "qwen3-8b", "gpt2-xl", "mistral-7b-v0.1"]),
    steps=st.integers(50, 900),
    data=st.sampled_from(DATA),
    training=TRAINING,
    layout=LAYOUT,
    changes=ARCHITECTURES,
    seed=st.integers(0, 9999),
    sharp=st.booleans(),
    saves=st.sampled_from([True, True, False]),
)
def test_import_of_what_is_rendered_is_the_recipe(
    version: str,
    preset: str,
    steps: int,
    data: dict[str, Any],
    training: dict[str, Any],
    layout: dict[str, Any],
    changes: dict[str, Any],
    seed: int,
    sharp: bool,
    saves: bool,
) -> None:
    if version != "head" and (data.get("data.synthetic") or "tokenizer" in data):
        # Their NullTokenizer counts a token on top, which only a known model tells.
        changes = {}
    keys = {f"layout.{key}": value for key, value in layout.items()} | data | training
    if not saves:
        keys = {key: value for key, value in keys.items() if not key.startswith("checkpoint.")} | {"checkpoint": "off"}
    task = drawn_task(version, preset, changes, keys | {"train.steps": steps, "seed": seed, "data.seed": seed}, sharp)
    check_round_trip(task)


@pytest.mark.parametrize("version", SAMPLED_VERSIONS)
@settings(max_examples=30, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(
    preset=st.sampled_from(["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "moonlight-16b-a3b"]),
    training=TRAINING,
    experts=EXPERTS,
    layout=LAYOUT,
    rate=st.sampled_from([None, 0.0, 0.001, 0.02]),
)
def test_import_of_a_mixture_of_experts_is_the_recipe(
    version: str,
    preset: str,
    training: dict[str, Any],
    experts: dict[str, Any],
    layout: dict[str, Any],
    rate: float | None,
) -> None:
    if rate is not None and "train.moe" in experts and model_preset(preset).mla is not None:
        experts = experts | {"train.moe": experts["train.moe"] | {"bias_update": rate}}
    keys = {f"layout.{key}": value for key, value in layout.items()} | DATA[1] | training | experts
    check_round_trip(drawn_task(version, preset, {}, keys | {"train.steps": 300}))


def check_round_trip(task: EngineTask) -> None:
    try:
        launch = megatron_launch(task)
    except InputError:
        assume(False)
        raise
    imported = read_megatron(shlex.join(launch.arguments), "again.txt")
    again = read_back(imported)
    assert said_keys(again, MEGATRON_TABLE.unsaid, ALIKE) == said_keys(task.recipe, MEGATRON_TABLE.unsaid, ALIKE)
    assert imported.cluster.get("sharp", False) == task.site.sharp


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_uneven_stages_read_back(version: str) -> None:
    keys = {"train.steps": 100, "train.optimizer.lr": 1e-4, **DATA[1]}
    layout = {"layout.pp": 2, "layout.vp": 2, "layout.stages": [7, 9, 9, 7]}
    task = drawn_task(version, "llama3-8b", {}, keys | layout)
    if version == "0.12.3":
        with pytest.raises(InputError, match=r"Megatron-LM 0\.12\.3 has no argument for it"):
            megatron_launch(task)
        return
    check_round_trip(task)


def test_the_final_decay_of_a_run_with_a_ramp_reads_back() -> None:
    """It is counted in samples of the full batch; an import counted them from the ramp's first step."""
    schedule = {"name": "wsd", "warmup": 5, "decay": 20, "min_lr": 0.0}
    keys = {"train.steps": 100, "train.optimizer.lr": 1e-4, "train.schedule": schedule, "train.batch_ramp": RAMP}
    launch = megatron_launch(drawn_task("head", "llama3-8b", {}, keys | DATA[1]))
    assert read_megatron(shlex.join(launch.arguments), "x.txt").recipe["train"]["schedule"] == schedule


def test_every_key_of_a_recipe_is_in_the_table_or_listed_as_unsaid() -> None:
    assert forgotten_keys(MEGATRON_TABLE) == []


@pytest.mark.parametrize("version", ["0.16.1", "0.19.0", "head"])
def test_every_row_has_arguments_that_the_version_knows(version: str) -> None:
    """Older ones lack some, which are done another way or refused; `test_real_parsers.py` holds them to their lists."""
    rows = [row for row in MEGATRON_TABLE.rows if row.render is not None and version in (row.versions or (version,))]
    keys = [key for row in rows for key in row.keys]
    arguments = known_arguments(version)
    # `add_position_embedding` is read from older lists only.
    assert [key for key in keys if not arguments.has(key)] == []
    # Chosen for Megatron's FSDP, and for AMD's GPUs elsewhere; from `budgets`, and by us where they do not say.
    assert {key for key in keys if keys.count(key) > 1} <= {
        "gradient_accumulation_fusion",
        "distributed_timeout_minutes",
    }


@pytest.mark.parametrize("preset", preset_names())
def test_every_argument_of_an_architecture_is_in_the_table(preset: str) -> None:
    try:
        arguments = architecture_args(model_preset(preset))
    except InputError:
        return
    assert set(arguments) <= set(ARCHITECTURE)
