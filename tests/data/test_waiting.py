"""Two that want the same artefact: the second waits, says for whom, and goes on when the first is done or dead."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.recipes.text_recipes import write_recipe, write_script
from support.runs.preparing import MadeTokenizer, Notes, contents, documents, jsonl, left_behind, prepare_text
from trainshed.data.tokens.shard_writer import LocalShardWriter
from trainshed.errors import Conflict
from trainshed.recipe import load_recipe
from trainshed.storage.locks import artefact_lock
from trainshed.workflow import prepare_run

ME = f"is being made by process {os.getpid()} on {socket.gethostname()}, at work for "
HOLDER = """
import sys, time
from contextlib import ExitStack
from pathlib import Path
from trainshed.data.tokens.shard_writer import LocalShardWriter
from trainshed.storage.locks import artefact_lock
with ExitStack() as stack:
    if sys.argv[1] == "shard":
        LocalShardWriter(sys.argv[2], "key", ["piece"], stack)
    else:
        stack.enter_context(artefact_lock(Path(sys.argv[2])))
    print("held", flush=True)
    time.sleep(600)
"""


def holder(kind: str, path: Path) -> subprocess.Popen[str]:
    """A process that holds a shard, or any other artefact, until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, kind, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


class Waiter:
    """Work in a thread, and what it reports."""

    def __init__(self, work: Callable[[Notes], object]) -> None:
        self.notes, self.result, self.error = Notes(), None, None
        self._thread = threading.Thread(target=self._run, args=(work,))
        self._thread.start()

    def _run(self, work: Callable[[Notes], object]) -> None:
        try:
            self.result = work(self.notes)
        except BaseException as error:
            self.error = error

    def until(self, text: str) -> str:
        """The note that holds a text, once it is there."""
        for _ in range(600):
            found = next((note for note in self.notes.notes if text in note), None)
            if found is not None:
                return found
            assert self._thread.is_alive(), (self.notes.notes, self.error)
            time.sleep(0.05)
        raise AssertionError(f"{text!r} was never said: {self.notes.notes}")

    def end(self) -> object:
        """What the work gave."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(jsonl(documents(200)))
    return path


def test_a_shard_that_another_makes_is_waited_for_and_found(
    tmp_path: Path, corpus: Path, made_tokenizer: MadeTokenizer
) -> None:
    tokenizer = made_tokenizer("llama3")
    prepare_text(corpus, tokenizer, tmp_path / "expected")
    output = str(tmp_path / "out")
    with ExitStack() as stack:
        writer = LocalShardWriter(output, "key", ["piece"], stack)
        waiting = Waiter(lambda notes: prepare_text(corpus, tokenizer, output, wait=True, reporter=notes))
        assert ME in waiting.until("waiting: ")
        # The other one is done: its files have their names, its manifest comes last.
        for ending in ("bin", "idx", "manifest.json"):
            shutil.copy(tmp_path / f"expected.{ending}", f"{output}.{ending}")
        manifest = Path(f"{output}.manifest.json")
        manifest.write_text(manifest.read_text().replace('"expected.', '"out.'))
        writer._journal_path.unlink()
    prepared = waiting.end()
    assert (prepared.made, prepared.reused) == (0, 1)
    assert waiting.until("going on: ").startswith("going on: waited ")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_holder_that_is_killed_frees_its_shard_at_once(
    tmp_path: Path, corpus: Path, made_tokenizer: MadeTokenizer, workers: int
) -> None:
    tokenizer = made_tokenizer("llama3")
    prepare_text(corpus, tokenizer, tmp_path / "expected")
    output = tmp_path / "out"
    other = holder("shard", output)
    waiting = Waiter(lambda notes: prepare_text(corpus, tokenizer, output, workers=workers, wait=True, reporter=notes))
    assert f"by process {other.pid} on " in waiting.until("waiting: ")
    other.send_signal(signal.SIGKILL)
    assert waiting.end().made == 1
    other.communicate()
    assert contents(output) == contents(tmp_path / "expected")
    assert left_behind(tmp_path) == []


def test_who_does_not_wait_is_told_whom_to_wait_for(
    tmp_path: Path, corpus: Path, made_tokenizer: MadeTokenizer
) -> None:
    with ExitStack() as stack:
        LocalShardWriter(str(tmp_path / "out"), "key", ["piece"], stack)
        with pytest.raises(Conflict, match="another process is preparing this shard") as error:
            prepare_text(corpus, made_tokenizer("llama3"), tmp_path / "out")
    assert f"wait for it (process {os.getpid()} on {socket.gethostname()}, at work for " in (error.value.hint or "")


def test_any_other_artefact_is_waited_for_as_well(tmp_path: Path) -> None:
    other = holder("artefact", tmp_path / "tokenizer")

    def made(notes: Notes) -> str:
        with artefact_lock(tmp_path / "tokenizer", notes):
            return "made"

    waiting = Waiter(made)
    assert f"tokenizer is being made by process {other.pid} on {socket.gethostname()}, at work for " in waiting.until(
        "waiting: "
    )
    other.send_signal(signal.SIGKILL)
    other.communicate()
    assert waiting.end() == "made"


def test_a_silent_holder_is_said_to_be_perhaps_gone(
    tmp_path: Path, corpus: Path, made_tokenizer: MadeTokenizer
) -> None:
    with ExitStack() as stack:
        writer = LocalShardWriter(str(tmp_path / "out"), "key", ["piece"], stack)
        os.utime(writer._journal_path, (1e9, 1e9))
        tokenizer = made_tokenizer("llama3")
        waiting = Waiter(lambda notes: prepare_text(corpus, tokenizer, tmp_path / "out", wait=True, reporter=notes))
        said = waiting.until("waiting: ")
        assert f"if that machine is gone, remove {writer._journal_path}" in said
        writer._journal_path.unlink()
        assert waiting.end().made == 1


def test_two_recipes_on_one_corpus_share_its_tokens_whoever_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path)
    recipe = load_recipe(str(write_recipe(tmp_path, "{script: numbers.py}")))
    made = prepare_run(recipe)
    prefix = made.sources[0].prefixes[0]
    shutil.rmtree(Path(prefix).parent)
    with ExitStack() as stack:
        LocalShardWriter(prefix, "key", ["piece"], stack)
        second = Waiter(lambda notes: prepare_run(load_recipe("recipe.yaml", ["name=second"]), reporter=notes))
        assert second.until("waiting: ").startswith(f"waiting: {prefix} {ME}")
    assert second.end().sources[0].prefixes == made.sources[0].prefixes


def test_two_runs_that_need_the_same_index_make_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path)
    recipe = load_recipe(str(write_recipe(tmp_path, "{script: numbers.py}")))
    made = prepare_run(recipe)
    index = made.order.sources[0].index.folder
    shutil.rmtree(index)
    with artefact_lock(index):
        second = Waiter(lambda notes: prepare_run(recipe, reporter=notes))
        assert second.until("waiting: ").startswith(f"waiting: {index} {ME}")
    assert second.end().steps == 3
