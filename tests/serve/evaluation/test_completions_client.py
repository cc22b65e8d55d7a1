"""A server that goes away or speaks something else is an error that says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trainshed.errors import TrainshedError
from trainshed.serve.evaluation.completions_client import CompletionsServer
from trainshed.serve.http.server import bind_socket, listener_url


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server that reads one request, writes these bytes and goes away."""
    with bind_socket("127.0.0.1", 0) as listener:
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener_url(listener)
        thread.join()


def ok(body: bytes, length: int | None = None) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body) if length is None else length, body)


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (b"", "the server does not answer: "),
        (b"nonsense\r\n\r\n", "the server does not answer: "),
        (ok(b'{"choices"', length=500), "the server does not answer: "),
        (ok(b"<html>"), "this server does not speak OpenAI's API"),
        (ok(b"[]"), "this server does not speak OpenAI's API"),
        (ok(b'{"choices": []}'), "this server does not speak OpenAI's API"),
        (ok(b'{"choices": [{"text": "x"}]}'), None),
    ],
)
def test_what_a_server_does_is_said(answer: bytes, what: str | None) -> None:
    with answering(answer) as url:
        server = CompletionsServer(url)
        if what is None:
            assert server.complete("a", model="m", max_tokens=1, chat=False) == "x"
        else:
            with pytest.raises(TrainshedError) as error:
                server.complete("a", model="m", max_tokens=1, chat=False)
            assert error.value.what.startswith(what)
