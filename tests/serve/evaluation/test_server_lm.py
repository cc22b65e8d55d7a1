"""Tasks of lm-eval through our own server: the answers of `hf` on the same weights, and of `local-completions`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI

from support.models.tiny_chat_model import save_tiny_chat_model
from support.models.tiny_tasks import NAMES, write_tasks
from trainshed.cli import run_cli
from trainshed.serve.evaluation.completions_client import CompletionsServer
from trainshed.serve.evaluation.lm_eval import LoadedTask, ServerLM, TaskOptions, load_tasks, quiet, run_task
from trainshed.serve.http.app import build_app
from trainshed.serve.http.server import bind_socket, listener_url, run_in_thread
from trainshed.serve.http.server_state import ServedModel, ServerState
from trainshed.serve.loading import load_model

KEY = "the key of this server"
CLOSE = 1e-5
"""Relative, in fp32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes every text of the tasks whole: a server needs a position for its answer."""
    return save_tiny_chat_model(tmp_path_factory.mktemp("model"), max_positions=128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def tasks(folder: Path) -> dict[str, LoadedTask]:
    return {task.name: task for task in load_tasks(NAMES, str(folder))}


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    loaded = load_model(str(model))
    assert loaded.tokenizer is not None
    generator = loaded.generator()
    state = ServerState(max_requests=16)
    state.loaded(ServedModel("tiny", generator, loaded.tokenizer))
    with bind_socket("127.0.0.1", 0) as listener, run_in_thread(build_app(state, api_key=KEY), listener):
        yield listener_url(listener)
    generator.close()


@pytest.fixture
def server_lm(url: str, model: Path) -> ServerLM:
    server = CompletionsServer(url, KEY)
    with quiet():
        return ServerLM(server, model=server.model().name, tokenizer_folder=str(model), max_length=128)


@pytest.fixture(scope="module")
def transformers_lm(model: Path) -> Any:
    with quiet():
        from lm_eval.models.huggingface import HFLM

        return HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=4)


def recorded(model: Any, patch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Keep what a model is asked and what it answers."""
    kept: list[tuple[Any, Any]] = []

    def keeping(method: Any) -> Any:
        def call(requests: list[Any], **options: Any) -> Any:
            answers = method(requests, **options)
            kept.extend((request.args, answer) for request, answer in zip(requests, answers, strict=True))
            return answers

        return call

    for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        patch.setattr(model, name, keeping(getattr(model, name)))
    return kept


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_server_gives_the_scores_and_the_answers_of_transformers(
    name: str,
    chat: bool,
    tasks: dict[str, LoadedTask],
    server_lm: ServerLM,
    transformers_lm: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # lm-eval's report about the machine takes seconds, and says nothing about scores.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)
    own, other = recorded(server_lm, monkeypatch), recorded(transformers_lm, monkeypatch)
    scores = run_task(server_lm, tasks[name], TaskOptions(chat=chat)).scores
    with quiet():
        results = simple_evaluate(
            model=transformers_lm, tasks=list(tasks[name].loaded["tasks"].values()), apply_chat_template=chat
        )
    assert results is not None
    expected = {key.removesuffix(",none"): value for key, value in results["results"][name].items()}
    assert scores == pytest.approx({metric: expected[metric] for metric in scores}, rel=CLOSE)
    assert [asked for asked, _ in own] == [asked for asked, _ in other]
    for (_, one), (_, another) in zip(own, other, strict=True):
        if name == "choose":
            assert one[0] == pytest.approx(another[0], rel=CLOSE)
            assert one[1] == another[1]
        elif name == "roll":
            assert one == pytest.approx(another, rel=CLOSE)
        else:
            assert one == another


def test_scores_are_those_of_local_completions_with_the_first_token(
    tasks: dict[str, LoadedTask], server_lm: ServerLM, url: str, model: Path
) -> None:
    with quiet():
        theirs = LocalCompletionsAPI(
            base_url=f"{url}/v1/completions",
            model="tiny",
            tokenizer=str(model),
            tokenizer_backend="huggingface",
            max_length=128,
            add_bos_token=True,
            header={"Authorization": f"Bearer {KEY}"},
        )
    for task in tasks.values():
        scores = run_task(server_lm, task, TaskOptions()).scores
        assert scores == pytest.approx(run_task(theirs, task, TaskOptions()).scores, rel=CLOSE)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_an_address_may_end_in_v1(end: str, url: str) -> None:
    server = CompletionsServer(f"{url}{end}", KEY)
    assert (server.model().name, server.model().max_length) == ("tiny", 128)
    assert server.root == url


def test_eval_asks_a_server_with_a_key_and_knows_it_again_by_either_address(
    url: str,
    model: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", "of another server")
    words = ["eval", str(model), "--tasks", *NAMES, "--include-path", str(folder), "--to", str(tmp_path / "scores")]
    words += ["--api-key-env", "SERVER_KEY", "-o", "json"]
    assert run_cli([*words, "--url", url]) == 0, capfd.readouterr().err
    printed = capfd.readouterr()
    report = json.loads(printed.out)
    assert (report["computed"], [one["name"] for one in report["evaluations"]]) == (3, list(NAMES))
    assert "fatal:" not in printed.err, "git is not asked about this folder"
    assert "it/s" not in printed.err, "no bars of lm-eval beside ours"
    assert KEY not in printed.out + printed.err
    assert run_cli([*words, "--url", f"{url}/v1"]) == 0
    assert json.loads(capfd.readouterr().out)["computed"] == 0, "measured before"
