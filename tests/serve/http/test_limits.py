"""What one request may ask for: a small body that asks for more than any machine holds is refused, with the limit."""

from __future__ import annotations

from typing import Any

import pytest

from support.models.served_letters import Served, serve_letters
from trainshed.serve.http import dispatcher

ASK = {"model": "letters", "prompt": "say"}
CHAT = {"model": "letters", "messages": [{"role": "user", "content": "say"}]}


def sentence_of(response: Any) -> str:
    body = response.json()
    return body if isinstance(body, str) else body["error"]["message"]


@pytest.mark.parametrize("prompts", [["a"] * 500_000, [[97]] * 500_000], ids=["texts", "tokens"])
@pytest.mark.parametrize("stream", [False, True])
def test_very_many_prompts_times_n_are_refused_before_anything_is_made_for_each(
    served: Served, prompts: list[Any], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.tokenizer, "encode", lambda text: pytest.fail("a prompt was encoded"))
    response = served.http.post("/v1/completions", json=ASK | {"prompt": prompts, "n": 128, "stream": stream})
    assert response.status_code == 400
    assert "this asks for 64000000 answers at once; this server takes 8" in sentence_of(response)
    assert served.generator.said == []


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", CHAT | {"n": 9}),
        ("PUT", "/api", {"prompts": ["a"] * 9}),
        ("POST", "/completions", {"prompt": ["a"] * 9, "max_tokens": 1}),
    ],
)
def test_every_route_bounds_the_answers_of_a_request(
    served: Served, method: str, path: str, body: dict[str, Any]
) -> None:
    response = served.http.request(method, path, json=body)
    assert response.status_code == 400
    assert "9 answers at once; this server takes 8" in sentence_of(response)


@pytest.mark.parametrize(
    ("method", "path", "body", "sentence"),
    [
        ("POST", "/v1/completions", ASK | {"n": 8, "max_tokens": 200}, "1624 tokens of prompts and answers"),
        ("POST", "/v1/chat/completions", CHAT | {"n": 8}, "2048 tokens of prompts and answers"),
        ("PUT", "/api", {"prompts": ["a"] * 8, "tokens_to_generate": 200}, "1608 tokens"),
        ("POST", "/completions", {"prompt": ["a"] * 8, "max_tokens": 200}, "1608 tokens"),
    ],
)
def test_the_tokens_of_a_request_are_bounded(
    served: Served,
    method: str,
    path: str,
    body: dict[str, Any],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "MAX_REQUEST_TOKENS", 1000)
    response = served.http.request(method, path, json=body)
    assert response.status_code == 400
    assert sentence in sentence_of(response)
    assert "one request may ask for 1000" in sentence_of(response)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", ASK | {"max_tokens": 50, "logprobs": 20}),
        ("POST", "/v1/completions", ASK | {"prompt": "a" * 100, "max_tokens": 0, "echo": True, "logprobs": 20}),
        ("POST", "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 20}),
        ("PUT", "/api", {"prompts": ["a" * 200] * 8, "tokens_to_generate": 1, "logprobs": True}),
        ("POST", "/completions", {"prompt": "a" * 100, "max_tokens": 0, "echo": True, "logprobs": 10}),
    ],
)
def test_the_log_probabilities_of_a_request_are_bounded(
    served: Served, method: str, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "MAX_REQUEST_LOGPROBS", 1000)
    response = served.http.request(method, path, json=body)
    assert response.status_code == 400
    assert "log-probabilities; one request may ask for 1000" in sentence_of(response)


def test_one_answer_of_the_models_whole_length_is_never_too_much(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "MAX_REQUEST_TOKENS", 10)
    assert served.http.post("/v1/completions", json=ASK | {"max_tokens": 200}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", ASK),
        ("POST", "/v1/chat/completions", CHAT),
        ("POST", "/completions", {"prompt": "a", "max_tokens": 1}),
    ],
)
def test_stop_texts_are_few_and_short(served: Served, method: str, path: str, body: dict[str, Any]) -> None:
    many = served.http.request(method, path, json=body | {"stop": ["x"] * 17})
    assert (many.status_code, "at most 16 texts" in sentence_of(many)) == (400, True)
    long = served.http.request(method, path, json=body | {"stop": ["x" * 1001]})
    assert (long.status_code, "at most 1000 characters" in sentence_of(long)) == (400, True)
    assert served.http.request(method, path, json=body | {"stop": ["x" * 1000] * 16}).status_code == 200


def test_after_refusals_the_server_answers_as_before() -> None:
    with serve_letters(max_requests=4) as served:
        for _ in range(3):
            assert served.http.post("/v1/completions", json=ASK | {"prompt": ["a"] * 5}).status_code == 400
        assert served.http.post("/v1/completions", json=ASK | {"prompt": ["a"] * 4}).status_code == 200
