"""A model too small for its tokenizer or its sequences, and too little text: said before any work, at every door."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.models.tiny_models import save_tiny_hf
from support.recipes.text_recipes import write_recipe, write_script
from support.runs.job_files import write_files
from trainshed.cli import run_cli
from trainshed.data.text.corpus import find_inputs
from trainshed.data.tokenize.tokenizer import train_tokenizer
from trainshed.errors import InputError, RecipeError
from trainshed.launch.job import CodeArchive
from trainshed.recipe import Recipe, load_cluster, load_recipe
from trainshed.workflow import prepare_run
from trainshed.workflow.stages import run_stage
from trainshed.workflow.submit import build_job

CODE = CodeArchive("trainshed-0-0.tar.xz", "0" * 64, b"")
SMALL = (
    "model.preset=null",
    "model.config={family: llama, layers: 2, hidden: 16, heads: 4, ffn: 24, vocab_size: 279, max_positions: 32, "
    "rope: {base: 1e4}}",
)
LARGER = "it has 280 tokens, more than the 279 rows of the model's embedding"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a corpus, a tokenizer of 280 tokens and a recipe for them."""
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path)
    prepare_run(load_recipe(str(write_recipe(tmp_path, "{script: numbers.py}"))))
    (text,) = tmp_path.glob("store/artefacts/text/*/files/numbers.jsonl")
    text.rename("corpus.jsonl")
    (words,) = tmp_path.glob("store/artefacts/tokenizer/*/files")
    words.rename("words")
    shutil.rmtree("store")
    write_recipe(tmp_path, f"{{path: {tmp_path}/corpus.jsonl}}", tokenizer=f"{tmp_path}/words")
    return tmp_path


def cluster_of(folder: Path) -> Path:
    text = f"name: c\ntarget: slurm\nmachine: cpu\nstore: {folder}/shared\nnodes: {{default: 1}}\n"
    (folder / "cluster.yaml").write_text(text)
    return folder / "cluster.yaml"


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_at_every_door_before_anything_is_made(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = cluster_of(folder)
    for door in (["run"], ["train"], ["render", "--on", str(cluster)], ["submit", "--on", str(cluster), "--dry-run"]):
        assert run_cli([door[0], "recipe.yaml", *SMALL, *door[1:]]) == 2
        said = capsys.readouterr().err
        assert f"recipe.yaml:5 (tokenizer): {LARGER}" in said
        assert "write a smaller tokenizer, or a model with `vocab_size: 280` or more" in said
    assert not (folder / "store").exists()
    assert not (folder / "shared").exists()


def test_a_tokenizer_that_only_nodes_reach_is_refused_by_their_first_stage(folder: Path) -> None:
    (folder / "words").rename(folder / "elsewhere")
    job = build_job(load_recipe("recipe.yaml", SMALL), load_cluster(cluster_of(folder)), code=CODE)
    write_files(folder / "job", job.files)
    (folder / "elsewhere").rename(folder / "words")
    for stage in ("tokenise", "prepare"):
        with pytest.raises(RecipeError, match=LARGER):
            run_stage(stage, folder / "job")
    assert not (folder / "shared" / "artefacts").exists()


def from_weights(folder: Path, **changes: int) -> Recipe:
    save_tiny_hf("llama", folder / "hf", **changes)
    return load_recipe("recipe.yaml", ["model.preset=null", "model.init=null", f"model.from={folder}/hf"])


def test_base_weights_are_held_against_the_tokenizer_and_the_sequences_before_they_are_hashed(folder: Path) -> None:
    recipe = from_weights(folder, vocab_size=279, max_positions=64)
    for door in (prepare_run, lambda each: build_job(each, load_cluster(cluster_of(folder)), code=CODE)):
        with pytest.raises(RecipeError, match=LARGER) as error:
            door(recipe)
        assert error.value.hint is not None
        assert error.value.hint.startswith(f"write `tokenizer: {folder}/hf`")
    assert not (folder / "store").exists()
    shutil.rmtree(folder / "hf")
    recipe = from_weights(folder, vocab_size=280, max_positions=16)
    for door in (prepare_run, lambda each: build_job(each, load_cluster(cluster_of(folder)), code=CODE)):
        with pytest.raises(RecipeError, match="32 is more than the 16 positions the model is made for") as error:
            door(recipe)
        assert error.value.hint == (
            "write 16 or less; to go beyond it on purpose, write `model.config` with more `max_positions`"
        )
    assert not (folder / "store").exists()


def test_prepared_tokens_of_a_larger_vocabulary_are_refused(folder: Path) -> None:
    prefix = prepare_run(load_recipe("recipe.yaml")).sources[0].prefixes[0]
    write_recipe(folder, f"{{tokens: {prefix}}}", tokenizer="null")
    with pytest.raises(InputError, match=r"of a vocabulary of 280 .*, more than the 279 rows of the model's embedding"):
        prepare_run(load_recipe("recipe.yaml", SMALL))


def test_a_smaller_tokenizer_is_fine(folder: Path) -> None:
    run = prepare_run(load_recipe("recipe.yaml"))
    assert run.tokenizer is not None
    assert run.tokenizer.vocab_size < run.config.vocab_size


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "recipe.yaml:8 (data.train): source 'source-0' holds no tokens, and a sample takes 33"),
        ('{"text": ""}\n' * 3, "recipe.yaml:8 (data.train): source 'source-0' holds no tokens, and a sample takes 33"),
        ('{"text": "one two three four"}\n', "source 'source-0' holds 10 tokens, and a sample takes 33"),
        (
            '{"text": "' + "one two " * 15 + '"}\n',
            "the sources hold 1 sample of 33 tokens, fewer than one batch of 2: every step would see the same text "
            "more than once",
        ),
    ],
)
def test_too_little_text_is_said_before_the_index_is_made(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    (folder / "corpus.jsonl").write_text(text)
    assert run_cli(["run", "recipe.yaml"]) == 2
    heard = capsys.readouterr().err
    assert said in heard
    assert "give it more text or a smaller `" in heard
    assert not list(folder.glob("store/artefacts/index/*/epoch-*"))
    assert not list(folder.glob("store/runs/*/*/attempts"))


def test_a_split_that_leaves_nothing_to_validate_on_is_said_before_training(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["run", "recipe.yaml", "data.split={train: 0.999, validation: 0.001}"]) == 2
    heard = capsys.readouterr().err
    assert "data.split=…: source" in heard
    assert "'source-0 (validation)' holds no tokens, and a sample takes 33" in heard
    assert "another `data.split`" in heard


def test_no_text_to_learn_a_tokenizer_from_and_a_wrong_key_are_told_apart(folder: Path) -> None:
    recipe = str(write_recipe(folder, "{path: corpus.jsonl, key: content}"))
    with pytest.raises(InputError, match="no key 'content'") as error:
        prepare_run(load_recipe(recipe))
    assert error.value.where == "corpus.jsonl:1"
    (folder / "corpus.jsonl").write_text("")
    with pytest.raises(InputError, match="hold no text to learn a tokenizer from"):
        train_tokenizer(find_inputs(["corpus.jsonl"]), vocab_size=300)


def test_a_warm_up_longer_than_the_epochs_is_said_once_their_length_is_known(folder: Path) -> None:
    overrides = ["train.steps=null", "train.epochs=1.0", "train.schedule={name: cosine, warmup: 5000}"]
    with pytest.raises(RecipeError, match="the warm-up of 5000 steps leaves nothing of a run of 264") as error:
        prepare_run(load_recipe("recipe.yaml", overrides))
    assert "train.schedule" in (error.value.where or "")
