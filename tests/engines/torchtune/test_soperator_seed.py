"""The shipped recipes of the Soperator seed, held key by key against the files that its job scripts start."""

from __future__ import annotations

import pytest
import yaml

from support.recipes.foreign_tasks import FILES
from trainshed.engines.keys import flatten
from trainshed.engines.torchtune.versions import DEFAULT_VERSION, VERSIONS, torchtune_version
from trainshed.launch.job import CodeArchive
from trainshed.recipe import load_cluster, load_recipe
from trainshed.workflow.submit import build_job

RECIPES = {"full": "soperator-llama3-3-70b", "lora": "soperator-llama3-3-70b-lora"}
DIFFERENT = {
    "checkpointer.checkpoint_dir": "the run's own folder",
    "checkpointer.output_dir": "the run's own folder",
    "dataset._component_": "alpaca_cleaned_dataset is alpaca_dataset with a source, which is said",
    "loss._component_": "0.6.1 of PyPI has no LinearCrossEntropyLoss",
    "metric_logger.log_dir": "the run's own folder",
    "output_dir": "the run's own folder",
    "seed": "a run can be repeated",
    "tokenizer.path": "the run's own folder",
}
"""Keys of a seed's file that ours has otherwise, and why."""
ONLY_LORA_DIFFERENT = {"tokenizer.max_seq_len": "no row of alpaca is longer; a recipe always has a length"}
ABSENT = {
    "batch_size_val": "the seed never validates",
    "checkpointer.checkpoint_files": "start_torchtune.py finds them",
    "checkpointer.recipe_checkpoint": "start_torchtune.py says from where",
    "data_parallel_replicate_dim": "its default",
    "data_parallel_shard_dim": "its default: all that is left",
    "dataset_val": "the seed never validates",
    "log_level": "nothing reads it but the variable LOGLEVEL, which is INFO",
    "profiler": "it is off: `observe.profile`",
    "resume_from_checkpoint": "start_torchtune.py says from where",
    "root_dir": "`store` of the cluster file",
    "run_val_every_n_steps": "null in the seed",
    "checkpoint_dir": "nothing reads it",
}
"""Keys, or the first words of keys, that ours lacks, and who has them."""


@pytest.mark.parametrize("kind", RECIPES)
def test_our_file_is_the_seeds_key_by_key_but_for_what_is_said(kind: str) -> None:
    code = CodeArchive("code.tar.xz", "0" * 64, b"code")
    job = build_job(load_recipe(RECIPES[kind]), load_cluster("soperator-h100"), offline=True, code=code)
    ours = flatten(yaml.safe_load(job.files["torchtune.yaml"]))
    seed = flatten(yaml.safe_load((FILES / f"torchtune-{kind}.yaml").read_text()))
    seed["optimizer.lr"] = float(seed["optimizer.lr"])  # YAML takes 2e-5 for a text
    absent = {key for key in seed if key not in ours}
    assert {key for key in absent if not any(f"{key}.".startswith(f"{start}.") for start in ABSENT)} == set()
    different = DIFFERENT | (ONLY_LORA_DIFFERENT if kind == "lora" else {})
    assert {key for key in seed if key in ours and ours[key] != seed[key]} == set(different)
    # What the seed leaves to torchtune's defaults is written out as they are.
    defaults = {
        "dataset.source": "yahma/alpaca-cleaned",
        "dataset.data_files": "alpaca_data_cleaned.json",
        "dataset.train_on_input": True,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.01,
    }
    assert {key: ours[key] for key in ours if key not in seed} == {
        key: value for key, value in defaults.items() if key not in seed
    }


@pytest.mark.parametrize("kind", RECIPES)
def test_nobody_is_advised_on_saves_by_steps_that_torchtune_does_not_make(kind: str) -> None:
    code = CodeArchive("code.tar.xz", "0" * 64, b"code")
    job = build_job(load_recipe(RECIPES[kind]), load_cluster("soperator-h100"), offline=True, code=code)
    assert not [note for note in job.notes if "between two saves" in note or "saving every" in note]


def test_recipes_know_which_versions_save_by_steps() -> None:
    for version in VERSIONS:
        recipe = load_recipe(RECIPES["full"], (f'engine={{name: torchtune, version: "{version}"}}',))
        assert recipe.saves_by_steps == torchtune_version(version).saves_by_steps
    assert load_recipe(RECIPES["full"]).saves_by_steps == torchtune_version(DEFAULT_VERSION).saves_by_steps
