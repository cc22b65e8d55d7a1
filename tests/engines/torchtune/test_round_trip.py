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
from trainshed.engines.torchtune.dataset import split_text
from trainshed.engines.torchtune.keys import TORCHTUNE_TABLE
from trainshed.engines.torchtune.versions import DEFAULT_VERSION, SOURCE_VERSION, VERSIONS, torchtune_version
from trainshed.errors import InputError
from trainshed.recipe.data import SAMPLE_COLUMNS
from trainshed.recipe.train import LATENT_PROJECTIONS, lora_projections

SHAREGPT = {"messages": "conversations", "role": "from", "content": "value"}
FORMS: list[dict[str, Any]] = [
    {},
    {"columns": SHAREGPT, "data.packing": False, "data.system": "Be brief."},
    {"columns": {"messages": "turns"}, "data.train_on": "all"},
    {"columns": {"prompt": "question"}, "data.format": "instruct"},
    {"columns": {"prompt": "input", "answer": "output"}, "data.format": "instruct"},
    {"data.format": "alpaca", "engine.args": {"optimizer_in_bwd": True}},
    {"columns": {"output": "reply"}, "data.format": "alpaca", "engine.args": {"compile": False}},
]
TALKS = {"path": "hf://datasets/org/talks@abc"}
WHOLE = {"data.train": TALKS}
DATA: list[dict[str, Any]] = [
    WHOLE,
    {
        "data.train": {"path": "hf://datasets/org/talks"},
        "data.validation": {"path": "hf://datasets/org/other@def", "split": "test"},
    },
    {"data.train": {"path": "hf://datasets/org/talks@abc/part/a.parquet", "split": "train[10:900]"}},
    {"data.train": {"path": "/shared/a.jsonl"}, "data.validation": {"path": "/shared/b.jsonl", "every": 7}},
    {"data.train": {"path": ["/shared/a.jsonl", "/shared/b.jsonl"]}},
    WHOLE | {"data.split": {"train": 0.9, "validation": 0.07, "test": 0.03}, "data.validation": {"every": 20}},
    WHOLE | {"data.split": {"train": 0.95, "validation": 0.05}},
    WHOLE | {"data.split": {"train": 0.95, "test": 0.05}},
    {"data.train": TALKS | {"split": "train[:95%]"}, "data.validation": TALKS | {"split": "train[95%:97%]"}},
]
RATE = st.floats(1e-7, 1e-2)
TRAINING = st.fixed_dictionaries(
    {
        "train.optimizer.lr": RATE,
        "train.schedule": st.one_of(
            st.just({}), st.fixed_dictionaries({"name": st.just("cosine"), "warmup": st.integers(0, 20)})
        ),
        "checkpoint.every": st.one_of(st.none(), st.just(500), st.integers(1, 900)),
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
                    [["q_proj"], ["k_proj", "o_proj"], ["v_proj", "mlp"], ["attn"], ["all-linear"]]
                ),
                "dora": st.booleans(),
                "quantize": st.sampled_from([None, "nf4"]),
            },
        ),
        "observe.tensorboard": st.booleans(),
        "observe.profile": st.fixed_dictionaries(
            {"start": st.integers(5, 30), "steps": st.integers(1, 9)},
            optional={
                "warmup": st.sampled_from([2, 4]),
                "cycles": st.integers(2, 4),
                **dict.fromkeys(("memory", "stacks", "shapes"), st.just(True)),
            },
        ),
    },
)


def told_parts(flat: dict[str, Any]) -> Any:
    """What torchtune is told to read of its data, whether `data.split` or the sources say it."""
    recipe = recipe_of({key: value for key, value in flat.items() if key.startswith("data.")} | ANY)
    parts = [split_text(recipe.data, "train")]
    if recipe.data.validation is not None:
        parts.append(split_text(recipe.data, "validation"))
    sources = [recipe.data.train[0], *([recipe.data.validation] if recipe.data.validation else [])]
    named = [source if source.path else recipe.data.train[0] for source in sources]
    return parts, [(source.path, source.columns) for source in named]


def told_targets(flat: dict[str, Any]) -> Any:
    """The projections that get an adapter; groups name those of experts and latent attention too, absent here."""
    targets = flat.get("train.lora.targets")
    if targets is None:
        return None
    return sorted({name for target in targets for name in lora_projections(target)} - {"experts", *LATENT_PROJECTIONS})


def on_pypi(flat: dict[str, Any]) -> bool:
    """Whether it is for the version on PyPI."""
    return flat.get("engine.version") == DEFAULT_VERSION


ANY = {
    "name": "any",
    "model": {"preset": "llama3.1-8b", "from": "hf://org/base"},
    "tokenizer": "hf://org/base",
    "train": {"mode": "finetune", "steps": 1, "global_batch": 1, "optimizer": {"lr": 1.0}},
}
COLUMNS = {column for columns in SAMPLE_COLUMNS.values() for column in columns}
VALIDATION_KEYS = ("path", "split", "key", "documents", *(f"columns.{column}" for column in COLUMNS))
SPLIT_KEYS = ("data.split.train", "data.split.validation", "data.split.test")
ALIKE: Alike = {
    "data.train": ("a share of one dataset may be said by data.split or by the source", told_parts),
    **{key: ("with data.train", lambda flat: None) for key in SPLIT_KEYS},
    **{f"data.validation.{key}": ("with data.train", lambda flat: None) for key in VALIDATION_KEYS},
    "train.lora.targets": ("groups are read back as what they stand for", told_targets),
    "observe.tensorboard": (
        "false and null are both torchtune's own logger",
        lambda flat: bool(flat.get("observe.tensorboard")),
    ),
    "checkpoint.every": (
        "adapters are saved after every pass, and by 0.6.1 all",
        lambda flat: None if "train.lora.rank" in flat or on_pypi(flat) else flat.get("checkpoint.every"),
    ),
    "checkpoint.keep": ("0.6.1 keeps all", lambda flat: None if on_pypi(flat) else flat.get("checkpoint.keep")),
    "train.lora.quantize": ("null is not written", lambda flat: flat.get("train.lora.quantize")),
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
    version=st.sampled_from(VERSIONS),
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
    version: str,
) -> None:
    dp = nodes * 8 // layout["tp"]
    columns = {"columns": form["columns"]} if "columns" in form else {}
    data = {"engine.args": {}} | data | {key: value for key, value in form.items() if key != "columns"}
    data["data.train"] = [data["data.train"] | columns]
    if "path" in data.get("data.validation", {}):
        data["data.validation"] = data["data.validation"] | columns
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
                "engine.version": version,
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
    read_version = imported.recipe["engine"].get("version", DEFAULT_VERSION)
    assert read_version in (version, DEFAULT_VERSION), "more than the file asks for"
    # A file that both versions read alike is taken for the one on PyPI.
    imported.recipe["engine"]["version"] = version
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
    for version in VERSIONS:
        rows = [row for row in TORCHTUNE_TABLE.rows if row.render is not None and version in (row.versions or VERSIONS)]
        keys = [key for row in rows for key in row.keys]
        # What these belong to is refused before it is rendered for 0.6.1.
        refused = () if version == SOURCE_VERSION else ("dataset_val.", "batch_size_val", "enable_fp8", "fp8_")
        known = torchtune_version(version).keys
        assert [key for key in keys if not known.knows(key) and not key.startswith(refused)] == []
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
            "engine": "torchtune",
            "observe": {"profile": {"start": start, "steps": 3}},
        }
    )
    text = build_launch(task_of(recipe, nodes=1)).files["torchtune.yaml"]
    assert import_text(text, "torchtune.yaml", gpus=8).recipe["observe"]["profile"] == {"start": start, "steps": 3}
