"""Whoever goes away is not answered any longer, and nobody waits for anybody else."""

from __future__ import annotations

import socket
from typing import Any

import orjson
import pytest

from support.models.served_letters import Served, wait_until


def post(served: Served, path: str, body: dict[str, Any], method: str = "POST") -> socket.socket:
    """Send a request over a bare socket, so that it can be closed at any moment."""
    host, port = served.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=120)
    data = orjson.dumps(body)
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


@pytest.mark.parametrize(
    ("method", "path", "body", "questions"),
    [
        ("POST", "/v1/completions", {"model": "letters", "prompt": "say", "n": 2}, 2),
        ("POST", "/v1/completions", {"model": "letters", "prompt": "say", "n": 2, "stream": True}, 2),
        ("POST", "/v1/chat/completions", {"model": "letters", "messages": [{"role": "user", "content": "a"}]}, 1),
        ("PUT", "/api", {"prompts": ["a", "b", "c"]}, 3),
        ("POST", "/completions", {"prompt": "a", "max_tokens": 3}, 1),
    ],
)
def test_a_client_that_goes_away_cancels_its_questions(
    served: Served, method: str, path: str, body: dict[str, Any], questions: int
) -> None:
    served.generator.hold.clear()
    connection = post(served, path, body, method)
    wait_until(lambda: served.generator.running == questions)
    assert not any(asked.cancelled.is_set() for asked in served.generator.said)
    connection.close()
    wait_until(lambda: all(asked.cancelled.is_set() for asked in served.generator.said))
    wait_until(lambda: served.generator.running == 0 and not served.state.busy)


def test_a_client_that_leaves_a_stream_half_way_frees_its_room(served: Served) -> None:
    served.generator.hold.clear()
    for _ in range(3):  # more than there is room for at once
        stream = served.openai.completions.create(model="letters", prompt="say", n=8, stream=True)
        stream.close()
        wait_until(lambda: served.generator.running == 0 and not served.state.busy)
    served.generator.hold.set()
    assert served.openai.completions.create(model="letters", prompt="say").choices[0].text == "hello world"


def test_a_stream_that_nobody_reads_keeps_nobody_waiting(served: Served) -> None:
    served.generator.script = "x" * 200
    body = {"model": "letters", "prompt": "say", "stream": True, "logprobs": 20, "max_tokens": 200}
    with post(served, "/v1/completions", body):  # never read
        answer = served.openai.completions.create(model="letters", prompt="say", max_tokens=3)
    assert answer.choices[0].text == "xxx"


def test_tokens_reach_the_client_as_they_come(served: Served) -> None:
    served.generator.script = "ab"
    served.generator.hold.clear()
    messages: Any = [{"role": "user", "content": "a"}]
    stream = served.openai.chat.completions.create(model="letters", messages=messages, stream=True)
    first = next(iter(stream))  # while the model has said nothing yet
    assert first.choices[0].delta.role == "assistant"
    assert served.generator.generated == 0
    served.generator.hold.set()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "ab"
