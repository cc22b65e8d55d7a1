"""Megatron's `PUT /api` on a vLLM server, for clients of Megatron's own text generation server.

vLLM takes an ASGI middleware by its name (`--middleware megatron_api.MegatronApi`). This file is sent among the files
of the job and imported by vLLM, so it needs the standard library of Python 3.8 only. A request becomes one of
`POST /v1/completions`, answered by vLLM in the same process; every other request passes.

Answers are those of our own server (`serve/http/megatron.py`): prompt and generation as text, segments and tokens, with
log-probabilities from the second token on if they are asked for. Errors are bare sentences, as Megatron writes them.
What vLLM has no counterpart for is refused.
"""

from __future__ import annotations

import json
import os
from typing import Any

MODEL_VARIABLE = "TRAINSHED_SERVED_MODEL"
"""The name under which vLLM serves the model."""
MAX_PROMPTS = 128
_NEUTRAL = {
    "no_log": (True, False),
    "top_p_decay": (0.0,),
    "top_p_bound": (),
    "add_BOS": (False,),
    "prevent_newline_after_colon": (False,),
    "length_penalty": (1.0,),
    "beam_width": (),
}
"""Keys of Megatron's without a counterpart, and the values of them that change nothing."""
_READ = {"prompts", "tokens_to_generate", "logprobs", "temperature", "top_k", "top_p", "random_seed", "stop_token"}
_STOPS = {"stop_on_double_eol": "\n\n", "stop_on_eol": "\n"}


class WrongRequest(Exception):
    """A request that is refused, with the sentence that says why."""


def completion_body(body: Any) -> dict[str, Any]:
    """Return the body of `POST /v1/completions` that asks the same; raises `WrongRequest`."""
    if not isinstance(body, dict):
        raise WrongRequest("the body must be a JSON object")
    prompts = body.get("prompts")
    if not isinstance(prompts, list) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise WrongRequest("prompts is not a list of strings")
    if len(prompts) > MAX_PROMPTS:
        raise WrongRequest(f"Maximum number of prompts is {MAX_PROMPTS}")
    if not all(prompts):
        raise WrongRequest("Empty prompts require add_BOS=true")
    for key, value in body.items():
        if key in _NEUTRAL and value not in _NEUTRAL[key]:
            raise WrongRequest(f"{key} is not supported here")
        if key not in _NEUTRAL and key not in _READ and key not in _STOPS:
            raise WrongRequest(f"{key} is not a key of a request")
    tokens = _number(body, "tokens_to_generate", 64, int, 0, 2**31)
    wants_logprobs = body.get("logprobs", False)
    if not isinstance(wants_logprobs, bool):
        raise WrongRequest("logprobs must be a boolean value")
    if tokens == 0 and not wants_logprobs:
        raise WrongRequest("tokens_to_generate=0 implies logprobs should be True")
    top_k = _number(body, "top_k", 0, int, 0, 1000)
    top_p = _number(body, "top_p", 0.0, float, 0, 1)
    if top_k and top_p:
        raise WrongRequest("cannot set both top-k and top-p samplings.")
    temperature = _number(body, "temperature", 1.0, (int, float), 0, 100)
    if temperature == 0:
        raise WrongRequest("temperature must be a positive number less than or equal to 100.0")
    asked: dict[str, Any] = {
        "prompt": prompts,
        "max_tokens": tokens,
        # vLLM takes its own defaults from the model's generation_config.json: everything is said.
        "temperature": temperature,
        "top_k": top_k or -1,
        "top_p": top_p or 1.0,
        "echo": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    if MODEL_VARIABLE in os.environ:
        asked["model"] = os.environ[MODEL_VARIABLE]
    if body.get("random_seed") is not None:
        asked["seed"] = _number(body, "random_seed", 0, int, 0, 2**63 - 1)
    if body.get("stop_token") is not None:
        asked["stop_token_ids"] = [_number(body, "stop_token", 0, int, 0, 2**31)]
    stops = [text for key, text in _STOPS.items() if body.get(key)]
    if stops:
        asked["stop"] = stops
    return asked


def _number(body: dict[str, Any], key: str, default: Any, kind: Any, least: float, most: float) -> Any:
    value = body.get(key, default)
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
        raise WrongRequest(f"{key} must be a number from {least} to {most}")
    return value


def megatron_answer(completion: dict[str, Any], *, logprobs: bool) -> dict[str, Any]:
    """Return Megatron's answer from vLLM's."""
    choices = sorted(completion["choices"], key=lambda choice: choice["index"])
    answer: dict[str, Any] = {
        "text": [choice["text"] for choice in choices],
        "segments": [choice["logprobs"]["tokens"] for choice in choices],
        "tokens": [[*choice["prompt_token_ids"], *choice["token_ids"]] for choice in choices],
    }
    if logprobs:
        # Nothing precedes the first token, so it has none.
        answer["logprobs"] = [choice["logprobs"]["token_logprobs"][1:] for choice in choices]
    return answer


class MegatronApi:
    """The middleware."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer `PUT /api`; everything else is for the server itself."""
        if scope["type"] != "http" or scope["path"] != "/api" or scope["method"] != "PUT":
            await self.app(scope, receive, send)
            return
        try:
            body = json.loads(await _read(receive))
            asked = completion_body(body)
        except WrongRequest as error:
            await _answer(send, 400, str(error))
            return
        except ValueError:
            await _answer(send, 400, "the body is not JSON")
            return
        status, content = await self._complete(scope, json.dumps(asked).encode(), receive)
        try:
            answer = json.loads(content)
        except ValueError:
            answer = {}
        if status != 200:
            error = answer.get("error") if isinstance(answer, dict) else None
            message = error.get("message") if isinstance(error, dict) else None
            await _answer(send, status, message or content.decode(errors="replace"))
            return
        await _answer(send, 200, megatron_answer(answer, logprobs=bool(body.get("logprobs"))))

    async def _complete(self, scope: Any, content: bytes, receive: Any) -> tuple[int, bytes]:
        """Ask the server's own route, with the credentials of the request; its client may leave meanwhile."""
        kept = [pair for pair in scope["headers"] if pair[0].lower() == b"authorization"]
        headers = [*kept, (b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        path = "/v1/completions"
        inner = {**scope, "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers}
        sent = False
        status, parts = 500, []

        async def give() -> Any:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": content, "more_body": False}

        async def take(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await self.app(inner, give, take)
        return status, b"".join(parts)


async def _read(receive: Any) -> bytes:
    content = b""
    while True:
        message = await receive()
        content += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body"):
            return content


async def _answer(send: Any, status: int, body: Any) -> None:
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
