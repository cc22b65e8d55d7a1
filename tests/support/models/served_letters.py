"""The model of letters behind the real server on a real port, and the clients that ask it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
    condition: ServerState
    generator: ScriptedGenerator
    words: Letters
    http: httpx2.Client
    openai: openai.OpenAI

    def begin_anew(self) -> None:
        """Serve a model that was never asked, as a server does that just came up."""
        self.generator.close()
        self.generator, self.words = ScriptedGenerator(), Letters()
        self.condition.draining = self.condition.closed = False
        self.condition.metrics = ServerMetrics()
        self.condition.loaded(ServedModel("letters", self.generator, self.words))


@contextmanager
def serve_letters(*, loaded: bool = True, api_key: str | None = None, max_questions: int = 8) -> Iterator[Served]:
    """Serve the model of letters until this is left."""
    generator, words = ScriptedGenerator(), Letters()
    condition = ServerState(max_questions=max_questions)
    if loaded:
        condition.loaded(ServedModel("letters", generator, words))
    with bind_socket("127.0.0.1", 0) as listener, run_in_thread(build_app(condition, api_key=api_key), listener):
        url = listener_url(listener)
        with (
            httpx2.Client(base_url=url, timeout=120) as http,
            openai.OpenAI(base_url=f"{url}/v1", api_key=api_key or "none", max_retries=0, timeout=120) as client,
        ):
            served = Served(url, condition, generator, words, http, client)
            yield served
            served.generator.close()


def wait_until(happened: Callable[[], bool]) -> None:
    """Wait for something that must happen; a test's own time limit ends it if it does not."""
    while not happened():
        time.sleep(0.005)
