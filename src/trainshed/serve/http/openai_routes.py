"""OpenAI's routes: the models, completions and chats, whole or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from trainshed.errors import InputError
from trainshed.serve.asking import Ended, Failed, Piece
from trainshed.serve.http.answers import Asked, Desk
from trainshed.serve.http.bodies import parse, read_json
from trainshed.serve.http.condition import Condition
from trainshed.serve.http.event_stream import EventStream
from trainshed.serve.http.model import ServedModel
from trainshed.serve.http.openai_choices import ChatChoices, Choices, CompletionChoices
from trainshed.serve.http.openai_requests import ChatRequest, CompletionRequest, Prompt
from trainshed.serve.http.refusal import Refusal, bad


class OpenAi:
    """The handlers under `/v1`."""

    def __init__(self, condition: Condition) -> None:
        self._condition = condition
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        """List the one model that is served."""
        model, _ = self._condition.serving()
        return json_response({"object": "list", "data": [self._described(model)]})

    async def model(self, request: Request) -> Response:
        """Describe a model by its name."""
        model, _ = self._condition.serving()
        check_name(request.path_params["name"], model)
        return json_response(self._described(model))

    async def completions(self, request: Request) -> Response:
        """Go on from prompts."""
        model, desk = self._condition.serving()
        body = parse(CompletionRequest, await read_json(request))
        check_name(body.model, model)
        desk.check_count(len(body.prompt) * body.n)
        prompts = await encoded(model, body.prompt)
        for prompt in prompts:
            check_length(model, len(prompt), body.max_tokens, "prompt")
        choices = CompletionChoices(body, model.words, prompts)
        return await _answer(request, body, choices, model, desk)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        model, desk = self._condition.serving()
        body = parse(ChatRequest, await read_json(request))
        check_name(body.model, model)
        desk.check_count(body.n)
        if not model.words.can_chat:
            raise bad("this model's tokenizer has no chat template: ask /v1/completions", code="no_chat_template")
        try:
            prompt = await asyncio.to_thread(model.words.chat, [message.for_template() for message in body.messages])
        except InputError as error:
            raise bad(str(error), "messages", "invalid_value") from None
        check_length(model, len(prompt), body.bound or 1, "messages")
        return await _answer(request, body, ChatChoices(body, model.words, prompt), model, desk)

    def _described(self, model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "trainshed",
            "max_model_len": model.generator.max_length,
        }


def json_response(body: Any, status: int = 200) -> Response:
    """Return an answer as JSON."""
    return Response(orjson.dumps(body), status, media_type="application/json")


async def encoded(model: ServedModel, prompts: Sequence[Prompt]) -> list[Sequence[int]]:
    """Return the tokens of prompts; a long text is encoded beside the event loop, not on it."""
    return [await asyncio.to_thread(model.words.encode, each) if isinstance(each, str) else each for each in prompts]


def check_length(model: ServedModel, prompt_tokens: int, max_tokens: int, param: str) -> None:
    """Refuse what does not fit into the model, rather than to cut the answer short without a word."""
    if prompt_tokens + max_tokens > (longest := model.generator.max_length):
        raise bad(
            f"this model's maximum context length is {longest} tokens, and this asks for {prompt_tokens + max_tokens}: "
            f"{prompt_tokens} of the prompt and {max_tokens} of the answer",
            param,
            "context_length_exceeded",
        )


def check_name(name: str, model: ServedModel) -> None:
    """Refuse to answer in the name of another model."""
    if name != model.name:
        sentence = f"there is no model `{name}`: `{model.name}` is served"
        raise Refusal(404, sentence, param="model", code="model_not_found")


async def _answer(
    request: Request, body: CompletionRequest | ChatRequest, choices: Choices, model: ServedModel, desk: Desk
) -> Response:
    head = {
        "id": f"{choices.id_prefix}{uuid.uuid4().hex}",
        "object": choices.chunk_kind if body.stream else choices.kind,
        "created": int(time.time()),
        "model": model.name,
    }
    asked = desk.ask(choices.questions())
    if body.stream:
        return EventStream(_chunks(asked, choices, head, include_usage=body.include_usage), asked, desk)
    async with desk.attending(asked, request.receive):
        answers = await asked.whole()
    told = [choices.whole(number, answer) for number, answer in enumerate(answers)]
    usage = _usage(choices, sum(len(answer.pieces) for answer in answers))
    return json_response({**head, "choices": told, "usage": usage})


async def _chunks(
    asked: Asked, choices: Choices, head: dict[str, Any], *, include_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    if include_usage:
        head = {**head, "usage": None}
    for number in range(len(asked.tickets)):
        if (opening := choices.opening(number)) is not None:
            yield {**head, "choices": [opening]}
    generated_tokens = 0
    async for number, event in asked:
        if isinstance(event, Failed):
            raise Refusal(500, event.why, code="generation_failed")
        if isinstance(event, Ended) and event.reason == "cancelled":
            raise asked.cut_short()
        generated_tokens += isinstance(event, Piece)
        for chunk in choices.chunks(number, event):
            yield {**head, "choices": [chunk]}
    if include_usage:
        yield {**head, "choices": [], "usage": _usage(choices, generated_tokens)}


def _usage(choices: Choices, generated_tokens: int) -> dict[str, int]:
    prompt_tokens = sum(len(prompt) for prompt in choices.prompts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated_tokens,
        "total_tokens": prompt_tokens + generated_tokens,
    }
