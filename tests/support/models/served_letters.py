"""The model of letters behind the real server on a real port, and the clients that ask it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import openai

from support.models.scripted_model import Letters, ScriptedGenerator
from trainshed.serve.http.app import build_app
from trainshed.serve.http.metrics import ServerMetrics
from trainshed.serve.http.server import bind_socket, listener_url, run_in_thread
from trainshed.serve.http.server_state import ServedModel, ServerState


@dataclass
class Served:
    """Where it is, what it is made of, and two clients."""

    url: str
    state: ServerState
    generator: ScriptedGenerator
    tokenizer: Letters
    http: httpx2.Client
    openai: openai.OpenAI

    def begin_anew(self) -> None:
        """Serve a model that was never asked, as a server does that just came up."""
        self.generator.close()
        self.generator, self.tokenizer = ScriptedGenerator(), Letters()
        self.state.draining = self.state.closed = False
        self.state.metrics = ServerMetrics()
        self.state.loaded(ServedModel("letters", self.generator, self.tokenizer))


@contextmanager
def serve_letters(
    *,
    loaded: bool = True,
    api_key: str | None = None,
    max_requests: int = 8,
    around: Callable[[Any], Any] = lambda app: app,
) -> Iterator[Served]:
    """Serve the model of letters until this is left, with a middleware `around` it."""
    generator, tokenizer = ScriptedGenerator(), Letters()
    state = ServerState(max_requests=max_requests)
    if loaded:
        state.loaded(ServedModel("letters", generator, tokenizer))
    with bind_socket("127.0.0.1", 0) as listener, run_in_thread(around(build_app(state, api_key=api_key)), listener):
        url = listener_url(listener)
        with (
            httpx2.Client(base_url=url, timeout=120) as http,
            openai.OpenAI(base_url=f"{url}/v1", api_key=api_key or "none", max_retries=0, timeout=120) as client,
        ):
            served = Served(url, state, generator, tokenizer, http, client)
            yield served
            served.generator.close()


def wait_until(happened: Callable[[], bool]) -> None:
    """Wait for something that must happen; a test's own time limit ends it if it does not."""
    while not happened():
        time.sleep(0.005)
