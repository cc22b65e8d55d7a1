"""Megatron's clients on a server that only has OpenAI's routes: the middleware before our own, asked both ways."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.models.served_letters import Served, serve_letters
from trainshed.launch.megatron_api import MODEL_VARIABLE, MegatronApi

SEED_QUESTIONS = (
    {"prompts": ["What is the capital of France?"], "tokens_to_generate": 32},
    {"prompts": ["2 + 2 = ?"], "tokens_to_generate": 8},
    {"prompts": ["Write a short greeting."], "tokens_to_generate": 16},
)


class OnlyOpenAi:
    """A server without Megatron's route, as vLLM is one."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope.get("path") != "/api"
        await self._app(scope, receive, send)


@pytest.fixture(scope="module")
def behind_middleware() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODEL_VARIABLE, "letters")
        with serve_letters(api_key="key", around=lambda app: MegatronApi(OnlyOpenAi(app))) as found:
            yield found


@pytest.fixture(scope="module")
def own_server() -> Iterator[Served]:
    with serve_letters() as found:
        yield found


def put(served: Served, body: Any, key: str | None = "key", **options: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = served.http.put("/api", headers=headers, **({"json": body} | options))
    return response.status_code, response.json()


def sampled(served: Served) -> list[tuple[Any, ...]]:
    return [
        (asked.sampling.max_tokens, asked.sampling.temperature, asked.sampling.top_k, asked.sampling.top_p)
        for asked in served.generator.said
    ]


@pytest.mark.parametrize(
    "body",
    [
        *SEED_QUESTIONS,
        {"prompts": ["ab", "c"], "tokens_to_generate": 2, "logprobs": True},
        {"prompts": ["abc"], "tokens_to_generate": 0, "logprobs": True},
        {"prompts": ["a"], "top_k": 7, "random_seed": 3, "no_log": True},
        {"prompts": ["a"], "top_p": 0.5, "temperature": 2},
    ],
    ids=lambda body: body["prompts"][0][:12],
)
def test_the_questions_of_the_seed_and_every_option_get_the_answer_of_our_own_server(
    behind_middleware: Served, own_server: Served, body: dict[str, Any]
) -> None:
    for served in (behind_middleware, own_server):
        served.begin_anew()
    status, ours = put(own_server, body, key=None)
    assert status == 200
    assert put(behind_middleware, body) == (200, ours)
    assert sampled(behind_middleware) == sampled(own_server)
    assert ours["text"][0].startswith(body["prompts"][0])


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "prompts is not a list of strings"),
        ({"prompts": ["a"], "beam_width": 2}, "beam_width is not supported here"),
        ({"prompts": ["a"], "max_len": 3}, "max_len is not a key of a request"),
        ({"prompts": ["a"], "top_k": 2, "top_p": 0.5}, "cannot set both top-k and top-p samplings."),
        ({"prompts": ["a"], "tokens_to_generate": 0}, "tokens_to_generate=0 implies logprobs should be True"),
        ({"prompts": ["a"], "temperature": 0}, "temperature must be a positive number less than or equal to 100.0"),
        ({"prompts": [""]}, "Empty prompts require add_BOS=true"),
    ],
)
def test_what_is_wrong_is_refused_with_a_bare_sentence(behind_middleware: Served, body: Any, sentence: str) -> None:
    assert put(behind_middleware, body) == (400, sentence)


def test_errors_of_the_server_come_through_and_other_routes_are_its_own(behind_middleware: Served) -> None:
    behind_middleware.begin_anew()
    assert put(behind_middleware, None, content=b"{", json=None) == (400, "the body is not JSON")
    status, sentence = put(behind_middleware, {"prompts": ["a"]}, key="another")
    assert status == 401
    assert isinstance(sentence, str)
    assert behind_middleware.openai.with_options(api_key="key").models.list().data[0].id == "letters"
