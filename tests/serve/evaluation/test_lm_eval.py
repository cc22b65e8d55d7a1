"""Tasks of lm-eval by our own generator: the scores and the log-likelihoods of lm-eval's own `hf` model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.models.tiny_chat_model import save_tiny_chat_model
from support.models.tiny_tasks import NAMES, write_tasks
from trainshed.errors import InputError, TrainshedError
from trainshed.serve.evaluation.likelihood import LikelihoodScorer
from trainshed.serve.evaluation.lm_eval import LoadedTask, ServedLM, TaskOptions, load_tasks, quiet, run_task
from trainshed.serve.loading import load_model

CLOSE = 1e-5
"""Relative, in fp32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedTask]:
    folder = write_tasks(tmp_path_factory.mktemp("tasks"))
    return {task.name: task for task in load_tasks(NAMES, str(folder))}


@pytest.fixture(scope="module")
def ours(model: Path) -> Iterator[ServedLM]:
    loaded = load_model(str(model))
    assert loaded.tokenizer is not None
    generator = loaded.generator()
    yield ServedLM(generator, LikelihoodScorer(loaded.decoder, max_length=64), loaded.tokenizer)
    generator.close()


@pytest.fixture(scope="module")
def theirs(model: Path) -> Any:
    with quiet():
        from lm_eval.models.huggingface import HFLM

        return HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=4)


class Recorded:
    """A model that keeps what it is asked and what it answers."""

    def __init__(self, model: Any, patch: pytest.MonkeyPatch) -> None:
        self.answers: list[tuple[Any, Any]] = []
        for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            patch.setattr(model, name, self._kept(getattr(model, name)), raising=False)

    def _kept(self, method: Any) -> Any:
        def call(requests: list[Any], **options: Any) -> Any:
            answers = method(requests, **options)
            self.answers += [(request.args, answer) for request, answer in zip(requests, answers, strict=True)]
            return answers

        return call


@pytest.mark.parametrize("name", NAMES)
def test_a_task_has_the_scores_and_the_answers_of_transformers(
    name: str, tasks: dict[str, LoadedTask], ours: ServedLM, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = Recorded(ours, monkeypatch), Recorded(theirs, monkeypatch)
    scores = run_task(ours, tasks[name], TaskOptions()).scores
    expected = run_task(theirs, tasks[name], TaskOptions()).scores
    assert list(scores) == list(expected)
    assert scores == pytest.approx(expected, rel=CLOSE)
    assert [asked for asked, _ in own.answers] == [asked for asked, _ in other.answers]
    for (_, one), (_, another) in zip(own.answers, other.answers, strict=True):
        if name == "choose":
            assert one[0] == pytest.approx(another[0], rel=CLOSE)
            assert one[1] == another[1]
        elif name == "roll":
            assert one == pytest.approx(another, rel=CLOSE)
        else:
            assert one == another


def test_examples_and_a_limit_are_those_of_transformers(
    tasks: dict[str, LoadedTask], ours: ServedLM, theirs: Any
) -> None:
    asked = TaskOptions(limit=3)
    result = run_task(ours, tasks["choose"], asked)
    assert result.scores == pytest.approx(run_task(theirs, tasks["choose"], asked).scores)
    assert result.details["samples"] == {"choose": 3}


def test_a_task_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = write_tasks(tmp_path / "tasks")
    with pytest.raises(InputError, match="no such folder of tasks"):
        load_tasks(["choose"], str(tmp_path / "none"))
    (folder / "lines.jsonl").unlink()
    with pytest.raises(TrainshedError, match="the task `choose` cannot be read: FileNotFoundError"):
        load_tasks(["choose"], str(folder))


def test_a_task_changes_its_hash_with_its_documents(tmp_path: Path) -> None:
    few, many = (load_tasks(["choose"], str(write_tasks(tmp_path / str(count), count)))[0] for count in (3, 4))
    again = load_tasks(["choose"], str(write_tasks(tmp_path / "again", 3)))[0]
    assert few.sha256 != many.sha256
    assert few.sha256 == again.sha256, "wherever its folder is"


def test_what_the_generator_does_not_have_is_refused_by_name(ours: ServedLM) -> None:
    for arguments, what in (({"num_beams": 4}, "generation_kwargs.num_beams"), ({"max_gen_toks": 64}, "64 positions")):
        with pytest.raises(InputError, match=what):
            ours._generation("text", arguments, "</s>")
