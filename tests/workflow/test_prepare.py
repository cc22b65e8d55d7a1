"""The line: a recipe carried to proven, indexed data; run again, nothing is made twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.recipes.text_recipes import SCRIPT, write_recipe, write_script
from trainshed.cli import run_cli
from trainshed.cli.console import PlainReporter
from trainshed.data.tokens.indexed_dataset import write_index
from trainshed.errors import CorruptData, InputError, NotFound, TrainshedError
from trainshed.recipe import load_recipe, run_id
from trainshed.workflow import open_run, prepare_run

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of the test's own: the store is made there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All files of the artefacts, with when they were written."""
    paths = [path for path in (folder / "store" / "artefacts").rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(paths)}


def test_the_quickstart_runs_and_a_second_run_makes_nothing(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "trainshed",
        "run",
        str(RECIPES / "quickstart.yaml"),
        "train.steps=3",
        "train.schedule.warmup=1",
    ]
    # The first on the layout that the planner chooses here, the second on the recipe's own.
    first = subprocess.run([*command, "layout=auto"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert first.stdout.startswith("run quickstart/")
    (plan,) = (json.loads(path.read_bytes()) for path in tmp_path.glob("store/runs/*/*/plans/attempt-0001.json"))
    (why,) = plan["reasons"]
    assert why.startswith("layout: auto found no GPU here and chose one process with micro_batch 8: ")
    assert why in first.stderr
    assert plan["layout"]["micro_batch"] == 8
    assert "proven; " in first.stdout
    made = everything(tmp_path)
    assert any(path.endswith("tokens.verdict.json") for path in made)
    assert any("/index/" in path for path in made)
    again = subprocess.run([*command, "-o", "json"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert everything(tmp_path) == made
    report = json.loads(again.stdout)
    assert list(report) == [
        "schema",
        "name",
        "id",
        "folder",
        "steps",
        "tokenizer",
        "sources",
        "epochs",
        "training",
        "next",
    ]
    trained = report["training"]
    assert (trained["step"], trained["attempt"], trained["layout"]) == (3, 2, "one process")
    assert f"loss {trained['loss']:.4f}, validation loss {trained['validation_loss']:.4f}" in first.stdout
    assert Path(trained["checkpoint"]).name == "step-00000003"
    (source,) = report["sources"]
    assert list(source) == ["name", "prefixes", "documents", "tokens", "reused"]
    assert source["reused"]
    assert report["id"] in first.stdout
    assert f"{source['documents']:,} documents, {source['tokens']:,} tokens" in first.stdout
    verdicts = subprocess.run(
        [*command[:3], "data", "verify", source["prefixes"][0]],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert verdicts.stdout.startswith("proven")


def test_two_fresh_runs_give_the_same_tokens(tmp_path: Path) -> None:
    write_script(tmp_path)
    recipe = load_recipe(str(write_recipe(tmp_path, "{script: numbers.py}")))
    one = prepare_run(recipe)
    tokens = Path(f"{one.sources[0].prefixes[0]}.bin").read_bytes()
    (tmp_path / "store").rename(tmp_path / "old")
    other = prepare_run(recipe)
    assert Path(f"{other.sources[0].prefixes[0]}.bin").read_bytes() == tokens
    assert not other.sources[0].reused


def test_the_resolved_recipe_is_saved_and_is_the_same_run_when_loaded(tmp_path: Path) -> None:
    text = "'some text that is long enough for two' 'more of it than fits one sample'"
    script = f'#!/bin/sh\nprintf \'{{"text": "%s"}}\\n\' {text} >$2/a.jsonl\n'
    write_script(tmp_path, script, "data.sh").chmod(0o755)
    prepared = prepare_run(
        load_recipe(str(write_recipe(tmp_path, "{script: data.sh}", tokenizer="{train: {vocab_size: 257}}")))
    )
    saved = load_recipe(str(prepared.folder / "recipe.yaml"))
    assert run_id(saved) == prepared.id
    assert saved.model.config is not None
    assert saved.model.preset is None
    assert os.access(saved.folder / "data.sh", os.X_OK)
    again = prepare_run(saved)
    assert (again.id, again.folder) == (prepared.id, prepared.folder)
    assert again.sources[0].reused


def test_a_changed_script_is_run_again_and_an_unchanged_one_is_not(tmp_path: Path) -> None:
    script = write_script(tmp_path)
    recipe = load_recipe(str(write_recipe(tmp_path, "{script: numbers.py}")))
    first = prepare_run(recipe)
    script.write_text(SCRIPT.replace("range(300)", "range(310)"))
    second = prepare_run(recipe)
    assert (first.sources[0].documents, second.sources[0].documents) == (300, 310)
    assert second.id == first.id
    arguments = load_recipe(str(write_recipe(tmp_path, "{script: numbers.py, args: [--fast]}")))
    assert prepare_run(arguments).sources[0].prefixes != second.sources[0].prefixes
    script.write_text(SCRIPT)
    assert prepare_run(recipe).sources[0].prefixes == first.sources[0].prefixes


def test_a_script_that_fails_shows_its_last_words_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = "import sys\nfor i in range(50): print('line', i)\nsys.exit('no such table')\n"
    script = write_script(tmp_path, failing)
    recipe = write_recipe(tmp_path, "{script: numbers.py, args: [--table, words]}")
    assert run_cli(["run", str(recipe)]) == 1
    said = capsys.readouterr().err
    assert "numbers.py: the script ended with exit code 1" in said
    assert "  | no such table" in said
    assert "  | line 49" in said
    assert "  | line 5\n" not in said
    assert "--target-dir DIR --table words" in said
    script.write_text(SCRIPT)
    prepare_run(load_recipe(str(recipe)))
    assert len(list((tmp_path / "store" / "artefacts" / "text").glob("*/manifest.json"))) == 1


def test_a_script_that_writes_nothing_is_told_what_it_should_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_script(tmp_path, "print('done')\n")
    assert run_cli(["run", str(write_recipe(tmp_path, "{script: numbers.py}"))]) == 2
    assert "the script has written nothing" in (said := capsys.readouterr().err)
    assert "it is run with --target-dir DIR and must leave .jsonl files there" in said


def test_a_script_that_is_not_there_or_cannot_be_run(tmp_path: Path) -> None:
    recipe = load_recipe(str(write_recipe(tmp_path, "{script: missing.py}")))
    with pytest.raises(InputError, match="there is no such script"):
        prepare_run(recipe)
    write_script(tmp_path, "not executable", "tool")
    recipe = load_recipe(str(write_recipe(tmp_path, "{script: tool}")))
    with pytest.raises(InputError, match="cannot be run: Permission denied"):
        prepare_run(recipe)


def test_synthetic_data_needs_no_files_and_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "trainshed: 1\nname: bench\nmodel: {preset: tiny, init: random}\ndata: synthetic\n"
        "train: {steps: 5, global_batch: 2, optimizer: {lr: 1.0e-3}}\n"
    )
    one, other = prepare_run(load_recipe("recipe.yaml")), open_run(load_recipe("recipe.yaml"))
    assert (one.steps, one.sources, one.tokenizer) == (5, (), None)
    batch = one.order.batch(3).tokens
    assert np.array_equal(batch, other.order.batch(3).tokens)
    assert batch.shape[0] == 2
    assert not (tmp_path / "store" / "artefacts").exists()


def test_prepared_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    write_script(tmp_path)
    first = prepare_run(load_recipe(str(write_recipe(tmp_path, "{script: numbers.py}"))))
    prefix, learned = first.sources[0].prefixes[0], first.tokenizer.address if first.tokenizer else ""
    good = load_recipe(str(write_recipe(tmp_path, f"{{tokens: {prefix}}}", tokenizer=learned)))
    assert prepare_run(good).sources[0].tokens == first.sources[0].tokens
    (tmp_path / "other").mkdir()
    for path in Path(learned).iterdir():
        (tmp_path / "other" / path.name).write_bytes(path.read_bytes() + b"\n")
    bad = load_recipe(str(write_recipe(tmp_path, f"{{tokens: {prefix}}}", tokenizer="./other")))
    with pytest.raises(InputError, match="these tokens were made with another tokenizer") as error:
        prepare_run(bad)
    assert error.value.where == prefix


def test_tokens_of_others_are_taken_as_they_are_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.arange(2000, dtype="<u2").tofile(tmp_path / "theirs.bin")
    lengths = np.full(20, 100, "<i4")
    write_index(tmp_path / "theirs.idx", np.dtype("<u2"), lambda: [lengths])
    recipe = write_recipe(tmp_path, "{tokens: theirs}", tokenizer="null")
    prepare_run(load_recipe(str(recipe)), reporter=PlainReporter())
    assert "theirs: no manifest (not made by Trainshed); taken as it is" in capsys.readouterr().err


def test_nothing_is_opened_that_was_not_made_and_nothing_is_made_by_opening(tmp_path: Path) -> None:
    write_script(tmp_path)
    recipe = load_recipe(str(write_recipe(tmp_path, "{script: numbers.py}")))
    with pytest.raises(NotFound, match="is not made yet") as error:
        open_run(recipe)
    assert error.value.hint == "run `trainshed run RECIPE` first"
    assert not (tmp_path / "store").exists()
    made = prepare_run(recipe)
    before = everything(tmp_path)
    opened = open_run(recipe)
    assert everything(tmp_path) == before
    assert np.array_equal(opened.order.batch(2).tokens, made.order.batch(2).tokens)


def test_tokens_that_do_not_read_back_are_not_proven(tmp_path: Path) -> None:
    write_script(tmp_path)
    recipe = load_recipe(str(write_recipe(tmp_path, "{script: numbers.py}")))
    prefix = prepare_run(recipe).sources[0].prefixes[0]
    Path(f"{prefix}.verdict.json").unlink()
    tokens = bytearray(Path(f"{prefix}.bin").read_bytes())
    tokens[100] ^= 1
    Path(f"{prefix}.bin").write_bytes(tokens)
    with pytest.raises(CorruptData, match=r"these tokens are not what their manifest says: .*its bytes have changed"):
        prepare_run(recipe)


@pytest.mark.parametrize("key", ["store", "cluster.store"])
def test_a_store_that_is_no_folder_is_refused(tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_script(tmp_path)
    words = [str(write_recipe(tmp_path, "{script: numbers.py}")), f"{key}=s3://bucket/store"]
    refusals = set()
    for command in (["run"], ["recipes", "check"]):
        assert run_cli([*command, *words]) == 2
        refusals.add(capsys.readouterr().err)
    (refusal,) = refusals
    assert "s3://bucket/store: a run keeps its store on a local or mounted disk" in refusal.replace("\n", " ")


def test_training_here_for_a_cluster_elsewhere_is_refused_and_says_how_to_send_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["train", str(write_recipe(tmp_path, "{script: numbers.py}")), "--on", "gke-a3-mega"]) == 2
    said = capsys.readouterr().err
    assert "gke-a3-mega is a kubernetes cluster: its jobs do not run on this machine" in said
    assert "trainshed submit RECIPE --on gke-a3-mega" in said
    assert not (tmp_path / "store").exists()


def test_a_tokenizer_larger_than_the_text_can_give_says_how_large_it_may_be(tmp_path: Path) -> None:
    write_script(tmp_path)
    recipe = load_recipe(str(write_recipe(tmp_path, "{script: numbers.py}", tokenizer="{train: {vocab_size: 5000}}")))
    with pytest.raises(TrainshedError, match=r"gives a vocabulary of \d+ tokens, 5,000 are asked for") as error:
        prepare_run(recipe)
    assert "or less, or give it more text" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["engine=megatron"], "the engine megatron is not ours, and runs in its own image on a cluster"),
        (["layout.tp=4"], "tp: 4"),
        (["train.precision=fp8"], "fp8 products need a GPU"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], said: str
) -> None:
    write_script(tmp_path)
    assert run_cli(["run", str(write_recipe(tmp_path, "{script: numbers.py}")), *overrides]) == 2
    assert said in capsys.readouterr().err
