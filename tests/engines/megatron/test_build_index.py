"""The CPU stage before training: with megatron-core 0.16.1 itself, training finds every index it would build."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from support.clusters.no_driver import packages_that_need_a_driver
from support.recipes.megatron_tasks import megatron_task
from support.runs.job_files import write_files
from trainshed.data.tokens.indexed_dataset import write_index
from trainshed.engines import prove_image
from trainshed.engines.launch import PROGRAMS, EngineLaunch
from trainshed.engines.megatron import megatron_launch

DRIVER = Path(__file__).with_name("mcore_datasets.py")
LENGTH = 16
VALIDATION = "data.validation={tokens: b, every: 5, batches: 2}"
SPLIT = ("data.split={train: 0.9, validation: 0.1}", "data.validation={every: 5, batches: 2}")


def tokens(prefix: Path, documents: int, seed: int) -> str:
    """Random documents as .bin/.idx, written by ourselves."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(5, 90, documents, dtype=np.int32)
    prefix.with_suffix(".bin").write_bytes(generator.integers(0, 60, lengths.sum(), dtype=np.uint16).tobytes())
    write_index(prefix.with_suffix(".idx"), np.dtype("<u2"), lambda: iter([lengths]))
    return str(prefix)


def a_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True)
    words = {f"w{number}": number for number in range(60)} | {"<|endoftext|>": 60}
    Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>")).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def prepared(folder: Path, *overrides: str, program: bool = True) -> EngineLaunch:
    """A run's folder as the stages before leave it, and the launch into it."""
    run = folder / "run"
    a_tokenizer(run / "engine" / "tokenizer")
    train = [0.3, tokens(folder / "a", 200, 1), 0.7, tokens(folder / "b", 300, 2)]
    valid = [1.0, tokens(folder / "v", 50, 3)] if VALIDATION in overrides else None
    (run / "engine" / "data.json").write_text(json.dumps({"train": train, "valid": valid, "test": None}))
    if program:
        (folder / "pretrain_gpt.py").write_text("")
    task = megatron_task(
        "llama3-8b",
        f"data.sequence_length={LENGTH}",
        "train.steps=20",
        "train.global_batch=64",
        "train.schedule={name: constant}",
        "engine.version=0.16.1",
        *overrides,
    )
    (folder / "job").mkdir()
    task = replace(task, site=replace(task.site, run_folder=str(run), job_folder=str(folder / "job")))
    engine = task.recipe.engine.model_copy(update={"program": str(folder / "pretrain_gpt.py")})
    launch = megatron_launch(replace(task, recipe=task.recipe.model_copy(update={"engine": engine})))
    write_files(folder / "job", launch.files)
    shutil.copy(prove_image.__file__, folder / "job" / PROGRAMS)  # of the stage before, in every job
    return launch


def with_megatron(folder: Path, launch: EngineLaunch, **variables: str) -> dict[str, Any]:
    (folder / "words.json").write_text(json.dumps(launch.arguments))
    command = [sys.executable, str(DRIVER), *launch.cpu_stages[0].argv[1:], str(folder / "words.json")]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((VALIDATION,), id="a validation set of its own"),
        pytest.param(SPLIT, id="one corpus for both"),
        pytest.param((), id="nothing to measure", marks=pytest.mark.full),
    ],
)
def test_training_builds_no_index_after_the_cpu_stage(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    launch = prepared(tmp_path, *overrides)
    # The stage is on a node without a GPU, in an image whose kernels cannot be imported there.
    seen = with_megatron(tmp_path, launch, PYTHONPATH=str(packages_that_need_a_driver(tmp_path)))
    assert seen["training"] == seen["stage"]
    built = {Path(file).name.split("-")[2] for file in seen["stage"] if "GPTDataset" in file}
    assert built == ({"train", "valid"} if overrides else {"train"})
    assert seen["lengths"][0] == 20 * 64
    assert len(seen["first"]) == LENGTH


def stage(launch: EngineLaunch) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *launch.cpu_stages[0].argv[1:]], capture_output=True, text=True)


def test_a_missing_program_is_found_before_gpus_are_asked_for(tmp_path: Path) -> None:
    done = stage(prepared(tmp_path, program=False))
    assert done.returncode != 0
    assert "pretrain_gpt.py in this image" in done.stderr


def test_a_run_that_must_go_on_needs_a_checkpoint(tmp_path: Path) -> None:
    """Megatron 0.16 itself ends with exit code 0 there."""
    done = stage(prepared(tmp_path, "checkpoint.resume=must"))
    assert done.returncode != 0
    assert "no checkpoint" in done.stderr


def test_a_run_that_begins_afresh_finds_none(tmp_path: Path) -> None:
    launch = prepared(tmp_path, "checkpoint.resume=fresh")
    checkpoints = tmp_path / "run" / "checkpoints-megatron"
    checkpoints.mkdir()
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("20")
    done = stage(launch)
    assert done.returncode != 0
    assert "there is a checkpoint" in done.stderr


def test_synthetic_data_needs_no_index(tmp_path: Path) -> None:
    launch = prepared(tmp_path, f"data={{synthetic: true, sequence_length: {LENGTH}}}")
    assert stage(launch).returncode == 0
    assert not (tmp_path / "run" / "engine" / "index").exists()
