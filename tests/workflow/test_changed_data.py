"""A run goes on with the text and the tokens it began with, or stops and says what has changed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from support.recipes.text_recipes import SCRIPT, write_recipe, write_script, write_small_recipe
from trainshed.cli import run_cli
from trainshed.cli.console import PlainReporter
from trainshed.data.tokens.indexed_dataset import write_index
from trainshed.data.tokens.token_source import WHOLE_BYTES
from trainshed.errors import CorruptData, InputError
from trainshed.recipe import load_recipe
from trainshed.storage import LocalStore
from trainshed.storage.attempts import take_attempt
from trainshed.workflow import PreparedRun, open_run, open_run_folder, prepare_run

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def write_corpus(path: Path, documents: int = 300, first: int = 0) -> None:
    lines = (" ".join(WORDS[(i * k) % 10] for k in range(1, 40)) for i in range(first, first + documents))
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a corpus and a recipe for it; the store is made there."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus.jsonl")
    recipe = write_small_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("{script: numbers.py}", "{path: corpus.jsonl}"))
    return tmp_path


def begun(source: str | None = None, **more: str) -> PreparedRun:
    """A run that has had an attempt, as far as its folder tells."""
    if source is not None:
        write_recipe(Path.cwd(), source, **more)
    run = prepare_run(load_recipe("recipe.yaml"))
    take_attempt(LocalStore(run.folder), "")
    return run


def overwrite(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\x01\x01\x02\x02")


def test_overwritten_tokens_and_a_replaced_corpus_stop_every_door_until_they_are_put_back(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun()
    (tokens,) = folder.glob("store/artefacts/tokens/*/tokens.bin")
    (run,) = folder.glob("store/runs/small/*")
    shutil.copy2(tokens, folder / "good.bin")
    overwrite(tokens, 5000)
    for door in (["run", "recipe.yaml"], ["train", "recipe.yaml"], ["worker", "train", "--run", str(run)]):
        capsys.readouterr()
        assert run_cli([*door, "--attempt", "1"] if door[0] == "worker" else door) == 1
        said = capsys.readouterr().err
        assert "tokens.bin: this token file is not the one that was proven: its bytes have changed" in said
        assert "put the old file back, or have it made again: remove " in said
    explained = json.loads((run / "health" / "attempt-0001" / "error-00000.json").read_bytes())
    assert "not the one that was proven" in explained["what"]
    assert run_cli(["data", "verify", str(tokens.with_suffix(""))]) == 1
    shutil.copy2(folder / "good.bin", tokens)

    write_corpus(folder / "corpus.jsonl", first=1)
    made = set(folder.glob("store/artefacts/*/*"))
    for door in ("run", "train"):
        capsys.readouterr()
        assert run_cli([door, "recipe.yaml"]) == 2
        said = capsys.readouterr().err
        assert f"the text of source 'source-0' has changed since the run small/{run.name} began: corpus.jsonl " in said
        assert "recipe.yaml:9 (data.train.0.path)" in said
        assert "start another run on the new one with --id NAME" in said
    assert set(folder.glob("store/artefacts/*/*")) == made, "nothing is tokenised for a run that cannot go on"

    write_corpus(folder / "corpus.jsonl")
    again = prepare_run(load_recipe("recipe.yaml"))
    assert again.sources[0].tokens == 16_890, "the same text written again is the same text"


def test_a_changed_corpus_is_another_artefact_for_another_run(folder: Path) -> None:
    first = begun()
    write_corpus(folder / "corpus.jsonl", 310)
    other = prepare_run(load_recipe("recipe.yaml"), id="other")
    assert other.sources[0].documents == 310
    assert other.sources[0].prefixes != first.sources[0].prefixes
    with pytest.raises(InputError, match=r"corpus\.jsonl has [\d,]+ bytes, and had [\d,]+"):
        prepare_run(load_recipe("recipe.yaml"))


def test_a_run_that_was_only_prepared_takes_the_text_as_it_is_now(folder: Path) -> None:
    prepare_run(load_recipe("recipe.yaml"))
    write_corpus(folder / "corpus.jsonl", 310)
    assert prepare_run(load_recipe("recipe.yaml")).sources[0].documents == 310


def test_a_file_more_or_less_in_a_corpus_is_named(folder: Path) -> None:
    (folder / "texts").mkdir()
    write_corpus(folder / "texts" / "a.jsonl")
    begun("{path: texts/*.jsonl}")
    write_corpus(folder / "texts" / "b.jsonl", 10)
    with pytest.raises(InputError, match=r"texts/b\.jsonl is new"):
        prepare_run(load_recipe("recipe.yaml"))
    (folder / "texts" / "a.jsonl").unlink()
    with pytest.raises(InputError, match=r"texts/a\.jsonl is no longer part of it"):
        prepare_run(load_recipe("recipe.yaml"))


def test_a_script_that_writes_other_text_stops_the_run_that_began_with_the_old(folder: Path) -> None:
    script = write_script(folder)
    begun("{script: numbers.py}")
    script.write_text(SCRIPT.replace("range(300)", "range(310)"))
    with pytest.raises(InputError, match="the text of source 'source-0' has changed") as error:
        prepare_run(load_recipe("recipe.yaml"))
    assert "data.train.0.script" in (error.value.where or "")


def test_another_tokenizer_under_the_same_name_stops_the_run(folder: Path) -> None:
    learned = prepare_run(load_recipe("recipe.yaml")).tokenizer
    assert learned is not None
    shutil.copytree(learned.address, folder / "words")
    begun("{path: corpus.jsonl}", tokenizer="./words")
    config = folder / "words" / "tokenizer_config.json"
    config.write_text(config.read_text().replace("<|endoftext|>", "A"))
    with pytest.raises(InputError, match=r"are not those that the run small/.* began with: 16,890 tokens"):
        prepare_run(load_recipe("recipe.yaml"))


def test_tokens_that_are_removed_are_made_again_and_are_the_same(folder: Path) -> None:
    run = begun()
    shutil.rmtree(Path(run.sources[0].prefixes[0]).parent)
    again = prepare_run(load_recipe("recipe.yaml"))
    assert not again.sources[0].reused
    assert [file.checksum for file in again.sources[0].files] == [file.checksum for file in run.sources[0].files]


def test_tokens_proven_by_an_earlier_version_are_read_whole_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begun()
    path = Path(f"{run.sources[0].prefixes[0]}.verdict.json")
    verdict = json.loads(path.read_bytes())
    del verdict["files"]
    path.write_text(json.dumps(verdict))
    for said in ("was proven by a version that kept no fingerprint: it is read whole", ""):
        capsys.readouterr()
        prepare_run(load_recipe("recipe.yaml"), reporter=PlainReporter())
        heard = capsys.readouterr().err
        assert said in heard if said else "read whole" not in heard
    overwrite(Path(f"{run.sources[0].prefixes[0]}.bin"), 100)
    path.write_text(json.dumps(verdict))
    with pytest.raises(CorruptData, match="these tokens are not what their manifest says"):
        prepare_run(load_recipe("recipe.yaml"))


def test_a_run_kept_by_an_earlier_version_is_opened(folder: Path) -> None:
    run = begun()
    kept = json.loads((run.folder / "prepared.json").read_bytes())
    for source in kept["data"]["sources"]:
        del source["files"]
    (run.folder / "prepared.json").write_text(json.dumps(kept | {"schema": "trainshed.prepared/1"}))
    assert open_run_folder(run.folder).sources[0].prefixes == run.sources[0].prefixes
    assert prepare_run(load_recipe("recipe.yaml")).sources[0].files


def write_tokens(prefix: Path, tokens: int) -> None:
    (np.arange(tokens) % 200).astype("<u2").tofile(prefix.with_suffix(".bin"))
    lengths = np.full(tokens // 100, 100, "<i4")
    write_index(prefix.with_suffix(".idx"), np.dtype("<u2"), lambda: [lengths])


def test_given_tokens_that_were_overwritten_stop_the_run_and_others_may_be_copied(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokens(folder / "theirs", 600_000)
    run = begun("{tokens: theirs}", tokenizer="null")
    os.utime("theirs.bin", (1e9, 1e9))
    prepare_run(load_recipe("recipe.yaml"), reporter=PlainReporter())
    assert "warning: theirs.bin was written again since the run began" in capsys.readouterr().err
    overwrite(folder / "theirs.bin", 0)
    for door in (prepare_run, open_run):
        with pytest.raises(CorruptData, match="not the one that was proven: its bytes have changed") as error:
            door(load_recipe("recipe.yaml"))
        assert error.value.where == "theirs.bin"
    with pytest.raises(CorruptData, match="its bytes have changed"):
        open_run_folder(run.folder).data.check_files()


def test_given_tokens_with_a_manifest_are_read_whole_where_their_time_is_new(folder: Path) -> None:
    write_corpus(folder / "large.jsonl", 12_000)
    made = prepare_run(load_recipe(str(write_recipe(folder, "{path: large.jsonl}"))))
    for path in Path(made.sources[0].prefixes[0]).parent.glob("tokens.*"):
        shutil.copy2(path, folder / path.name.replace("tokens", "given"))
    manifest = folder / "given.manifest.json"
    manifest.write_text(manifest.read_text().replace('"tokens.bin"', '"given.bin"').replace("tokens.idx", "given.idx"))
    assert (folder / "given.bin").stat().st_size > WHOLE_BYTES
    begun("{tokens: given}", tokenizer="null")
    os.utime("given.bin", (1e9, 1e9))
    prepare_run(load_recipe("recipe.yaml"))
    overwrite(folder / "given.bin", 10_000)
    os.utime("given.bin", (2e9, 2e9))
    with pytest.raises(CorruptData, match="written again since it was proven"):
        open_run(load_recipe("recipe.yaml"))
    with pytest.raises(CorruptData, match="these tokens are not what their manifest says"):
        prepare_run(load_recipe("recipe.yaml"))


def test_given_tokens_of_another_size_than_their_manifest_says_are_refused(folder: Path) -> None:
    made = prepare_run(load_recipe("recipe.yaml"))
    prefix = made.sources[0].prefixes[0]
    os.truncate(f"{prefix}.bin", 100)
    write_recipe(folder, f"{{tokens: {prefix}}}", tokenizer="null")
    with pytest.raises(CorruptData, match="it has 100 bytes, its manifest says 33,780"):
        prepare_run(load_recipe("recipe.yaml"))
