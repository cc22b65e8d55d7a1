"""Questions to a server that speaks OpenAI's API (ours, vLLM), with the standard library alone."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from trainshed.errors import InputError, TrainshedError
from trainshed.redaction import redacted, shown_address
from trainshed.reporting import waiting

_CONCURRENT = 8
_TIMEOUT_SECONDS = 600.0
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class ModelOnServer:
    """What a server says of its model; `max_length` is of prompt and answer together, None where it says nothing."""

    name: str
    max_length: int | None


@dataclass(frozen=True)
class CompletionsServer:
    """A server, and the key that its requests bring. The address may end in `/v1`."""

    url: str
    api_key: str | None = field(default=None, repr=False)

    @property
    def root(self) -> str:
        """The address without `/v1`, which other clients of this API want as a part of it."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    def address(self, path: str) -> str:
        """Return the address of a path of the API."""
        return f"{self.root}{path}"

    def headers(self) -> dict[str, str]:
        """Return what every request brings."""
        headers = {"Content-Type": "application/json"}
        return headers if self.api_key is None else headers | {"Authorization": f"Bearer {self.api_key}"}

    def model(self) -> ModelOnServer:
        """Return the model that it serves, the first of several."""
        models = self._ask("/v1/models", lambda answer: answer.get("data") or [])
        if not models:
            raise TrainshedError("the server names no model", where=self._shown("/v1/models"))
        return ModelOnServer(models[0]["id"], models[0].get("max_model_len"))

    def complete(self, text: str, *, model: str, max_tokens: int, chat: bool) -> str:
        """Return the likeliest answer to a text: in a chat, or as the continuation of the text."""
        common = {"model": model, "max_tokens": max_tokens, "temperature": 0}
        if chat:
            body = common | {"messages": [{"role": "user", "content": text}]}
            return self._ask(
                "/v1/chat/completions", lambda answer: answer["choices"][0]["message"]["content"] or "", body
            )
        body = common | {"prompt": text}
        return self._ask("/v1/completions", lambda answer: answer["choices"][0]["text"], body)

    def _ask(self, path: str, take: Callable[[Any], Any], body: dict[str, Any] | None = None) -> Any:
        """Send a request; returns what `take` finds in the answer."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.address(path), data=data, headers=self.headers())
            with waiting(self._shown(path)), urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
                return take(json.loads(answer.read()))
        except urllib.error.HTTPError as error:
            with error:
                reason = redacted(error.read().decode(errors="replace"))[:_SHOWN_CHARACTERS]
            raise TrainshedError(f"the server refuses: {error.code} {reason}", where=self._shown(path)) from None
        except (OSError, http.client.HTTPException) as error:  # also where it goes away in the middle of an answer
            raise TrainshedError(
                f"the server does not answer: {getattr(error, 'reason', None) or error or type(error).__name__}",
                where=self._shown(path),
                hint="`trainshed serve CHECKPOINT` starts one; write --url http://HOST:PORT",
            ) from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise InputError("this server does not speak OpenAI's API", where=self._shown(path)) from None

    def _shown(self, path: str) -> str:
        return f"{shown_address(self.root)}{path}"


def server_answers(
    server: CompletionsServer, *, max_tokens: int, chat: bool
) -> Callable[[Sequence[str], Callable[[int], None]], list[str]]:
    """Answer questions through a server, some at a time."""
    model = server.model().name

    def answer(texts: Sequence[str], on_answer: Callable[[int], None]) -> list[str]:
        def one(text: str) -> str:
            result = server.complete(text, model=model, max_tokens=max_tokens, chat=chat)
            on_answer(1)
            return result

        with ThreadPoolExecutor(_CONCURRENT) as pool:
            return list(pool.map(one, texts))

    return answer
