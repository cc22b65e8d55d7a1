"""Errors are OpenAI's: its object, its statuses, and a sentence that says what to write instead."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from support.models.served_letters import Served, serve_letters

ASK = {"model": "letters", "prompt": "say"}


@pytest.mark.parametrize(
    ("changes", "param", "code", "sentence"),
    [
        ({"tempreature": 1}, "tempreature", "unknown_parameter", "did you mean `temperature`?"),
        ({"banana": 1}, "banana", "unknown_parameter", "known are model, temperature"),
        ({"temperature": -1}, "temperature", "invalid_value", "greater than or equal to 0, and is -1"),
        ({"temperature": "hot"}, "temperature", "invalid_value", "should be a valid number, and is `hot`"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_value", "valid integer"),
        ({"stream": "yes"}, "stream", "invalid_value", "valid boolean"),
        ({"stream_options": {"include_usage": True}}, None, "invalid_value", "needs `stream: true`"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown_parameter", "unknown"),
        ({"prompt": {"a": 1}}, "prompt", "invalid_value", "must be a text, a list of texts"),
        ({"prompt": []}, "prompt", "invalid_value", "must be a text, a list of texts"),
        ({"prompt": [True]}, "prompt", "invalid_value", "must be a text, a list of texts"),
        ({"prompt": None}, "prompt", "missing_required_parameter", "`prompt` is missing"),
        ({"prompt": ""}, None, "invalid_prompt", "the prompt is empty"),
        ({"model": None}, "model", "missing_required_parameter", "`model` is missing"),
        ({"stop": [""]}, "stop", "invalid_value", "none of them empty"),
        ({"stop": 3}, "stop", "invalid_value", "a text or a list of texts"),
        ({"max_tokens": 0}, None, "invalid_value", "needs `echo: true`"),
        ({"max_tokens": 254}, "prompt", "context_length_exceeded", "256 tokens, and this asks for 257"),
        ({"best_of": 2}, "best_of", "unsupported_parameter", "leave it out"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter", "leave it out"),
        ({"logprobs": 21}, "logprobs", "invalid_value", "less than or equal to 20"),
        ({"n": 9}, None, None, "9 answers at once; this server takes 8"),
    ],
)
def test_a_wrong_request_is_refused_with_the_key_that_is_wrong(
    served: Served, changes: dict[str, Any], param: str | None, code: str | None, sentence: str
) -> None:
    response = served.http.post("/v1/completions", json=ASK | changes)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert sentence in error["message"]


def test_one_wrong_prompt_of_many_leaves_nothing_behind(served: Served) -> None:
    response = served.http.post("/v1/completions", json=ASK | {"prompt": ["a", ""]})
    assert response.status_code == 400
    assert served.generator.said[0].cancelled.is_set()
    assert served.http.post("/v1/completions", json=ASK).status_code == 200


def test_another_model_is_not_found(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        served.openai.completions.create(model="gpt-4", prompt="say")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v2", 404), ("GET", "/v1/completions", 405), ("POST", "/api", 405)]
)
def test_what_no_route_answers_is_an_error_object_too(served: Served, method: str, path: str, status: int) -> None:
    response = served.http.request(method, path)
    assert response.status_code == status
    assert path in response.json()["error"]["message"]


def test_a_body_must_be_json_and_say_so(served: Served) -> None:
    post = served.http.post
    # What a form of another site can send without asking us.
    assert post("/v1/completions", content='{"model": "letters"}').status_code == 415
    headers = {"content-type": "application/json; charset=utf-8"}
    broken = post("/v1/completions", content="{", headers=headers)
    assert broken.status_code == 400
    assert "not JSON" in broken.json()["error"]["message"]
    assert "must be a JSON object" in post("/v1/completions", json=[1]).json()["error"]["message"]
    assert served.generator.said == []


def test_a_body_without_end_is_not_read_to_its_end(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainshed.serve.http.openai_requests.MAX_BODY_BYTES", 1000)
    assert served.http.post("/v1/completions", json=ASK | {"prompt": "x" * 2000}).status_code == 413


def test_with_a_key_only_those_who_have_it_may_ask() -> None:
    with serve_letters(api_key="sesame") as served:
        assert served.openai.completions.create(model="letters", prompt="say").choices[0].text == "hello world"
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesame"}):
            response = served.http.post("/v1/completions", json=ASK, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert served.http.put("/api", json={"prompts": ["a"]}, headers=headers).status_code == 401
        for path in ("/health", "/ready", "/metrics", "/"):
            assert served.http.get(path).status_code == 200


def test_more_questions_than_there_is_room_for_are_told_to_come_again(served: Served) -> None:
    served.generator.hold.clear()
    client = served.openai.with_options(max_retries=0)
    streams = [client.completions.create(model="letters", prompt="say", n=4, stream=True) for _ in range(2)]
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="letters", prompt="say")
    assert caught.value.code == "queue_full"
    assert caught.value.response.headers["retry-after"] == "1"
    served.generator.hold.set()
    for stream in streams:
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices[0].index == 3) == "hello world"
    assert client.completions.create(model="letters", prompt="say").choices[0].text == "hello world"


def test_a_model_that_fails_under_way_says_so_whole_and_in_a_stream(served: Served) -> None:
    served.generator.hold.clear()
    stream = served.openai.completions.create(model="letters", prompt="say", stream=True)
    served.generator.broken = "out of memory"
    served.generator.hold.set()
    with pytest.raises(openai.APIError, match="out of memory"):
        list(stream)
    with pytest.raises(openai.InternalServerError, match="can answer nothing any more: out of memory") as caught:
        served.openai.completions.create(model="letters", prompt="say")
    assert caught.value.status_code == 503


def test_a_fault_of_ours_is_an_error_object_and_is_reported(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(text: str) -> list[int]:
        raise RuntimeError("a fault")

    monkeypatch.setattr(served.tokenizer, "encode", broken)
    response = served.http.post("/v1/completions", json=ASK)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "RuntimeError" in response.json()["error"]["message"]


def test_while_the_model_loads_questions_are_told_to_wait() -> None:
    with serve_letters(loaded=False) as served, pytest.raises(openai.InternalServerError) as caught:
        served.openai.completions.create(model="letters", prompt="say")
    assert (caught.value.status_code, caught.value.code) == (503, "model_loading")
    assert caught.value.response.headers["retry-after"] == "1"
