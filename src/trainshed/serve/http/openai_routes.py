"""OpenAI's routes: the models, completions and chats, whole or as a stream of server-sent events.

First log-probabilities in OpenAI's two shapes (the columns of a completion, the rows of a chat), then the
`choices` of a completion and of a chat, then the stream, and at the end the handlers.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trainshed.errors import InputError
from trainshed.serve.http.dispatcher import CompletionOutput, GenerationRequest, RequestBatch, RequestDispatcher
from trainshed.serve.http.errors import ApiError, bad_request
from trainshed.serve.http.openai_requests import ChatRequest, CompletionRequest, Prompt, parse_body, read_json
from trainshed.serve.http.server_state import ServedModel, ServerState, TokenizerLike
from trainshed.serve.request import (
    GenerationEvent,
    GenerationFailed,
    GenerationFinished,
    OutputToken,
    PrefillDone,
    TokenLogprob,
)


@dataclass
class CompletionLogprobs:
    """The log-probabilities of a completion, token after token; offsets are into its text."""

    tokenizer: TokenizerLike
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)

    def add_prompt(self, prompt: Sequence[int], tokens: Sequence[OutputToken], text: str) -> None:
        """Add the tokens of a prompt; the first has no log-probability."""
        offset = 0
        known = iter(tokens)
        for position, token in enumerate(prompt):
            self._add(token, next(known, None) if position else None, min(offset, len(text)))
            # A special token that the tokenizer added before the text is not part of it.
            if position or text.startswith(self.tokens[-1]):
                offset += len(self.tokens[-1])

    def add(self, tokens: Iterable[OutputToken], offset: int) -> None:
        """Add the tokens of an output whose text begins at `offset`."""
        for output in tokens:
            self._add(output.token, output, offset)
            offset += len(output.text)

    def _add(self, token: int, output: OutputToken | None, offset: int) -> None:
        self.tokens.append(self.tokenizer.decode([token]))
        self.text_offset.append(offset)
        if output is None or output.logprob is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        self.token_logprobs.append(finite_logprob(output.logprob))
        top: dict[str, float] = {}
        # The most likely first: if two tokens have the same text (halves of characters), the more likely one counts.
        candidates = (*output.top_logprobs, TokenLogprob(token, output.logprob))
        for candidate in sorted(candidates, key=lambda candidate: -candidate.logprob):
            top.setdefault(self.tokenizer.decode([candidate.token]), finite_logprob(candidate.logprob))
        self.top_logprobs.append(top)

    def body(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


def finite_logprob(logprob: float) -> float:
    """Return at least -9999: JSON has no infinity, and OpenAI writes this for impossible tokens."""
    return max(logprob, -9999.0)


def chat_logprobs(tokenizer: TokenizerLike, tokens: Iterable[OutputToken]) -> dict[str, Any]:
    """Return the log-probabilities of a chat's output."""
    content = [
        {
            **_chat_logprob(tokenizer, TokenLogprob(token.token, token.logprob or 0.0)),
            "top_logprobs": [_chat_logprob(tokenizer, candidate) for candidate in token.top_logprobs],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_logprob(tokenizer: TokenizerLike, token: TokenLogprob) -> dict[str, Any]:
    text = tokenizer.decode([token.token])
    # A token may be half a character; then its text does not show its bytes.
    utf8 = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": finite_logprob(token.logprob), "bytes": utf8}


class Choices(Protocol):
    """The differences of the two routes. Choice `number` is output `number % n` of prompt `number // n`."""

    id_prefix: str
    kind: str
    chunk_kind: str
    prompts: Sequence[Sequence[int]]

    def requests(self, adapter: str | None) -> list[GenerationRequest]:
        """Return one generation request for each choice."""
        ...

    def complete(self, number: int, output: CompletionOutput) -> dict[str, Any]:
        """Return a choice whose output is complete."""
        ...

    def first_chunk(self, number: int) -> dict[str, Any] | None:
        """Return the first chunk of a choice in a stream, before any event."""
        ...

    def chunks(self, number: int, event: GenerationEvent) -> Iterator[dict[str, Any]]:
        """Yield the chunks of an event in a stream."""
        ...


class CompletionChoices:
    """Choices of `/v1/completions`."""

    id_prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, request: CompletionRequest, tokenizer: TokenizerLike, prompts: Sequence[Sequence[int]]) -> None:
        self.prompts = prompts
        self._request, self._tokenizer = request, tokenizer
        # The length of each choice's text so far.
        self._offsets = [0] * (len(prompts) * request.n)

    def requests(self, adapter: str | None) -> list[GenerationRequest]:
        """Return n requests for each prompt."""
        sampling = [self._request.sampling(choice) for choice in range(self._request.n)]
        return [GenerationRequest(prompt, params, adapter) for prompt in self.prompts for params in sampling]

    def complete(self, number: int, output: CompletionOutput) -> dict[str, Any]:
        """Return a choice whose output is complete."""
        before = self._echoed(number)
        logprobs = self._columns()
        if logprobs is not None:
            if self._request.echo:
                logprobs.add_prompt(self._prompt(number), output.prompt_tokens, before)
            logprobs.add(output.tokens, len(before))
        choice = _completion_choice(number, before + output.text, logprobs, output.finish_reason)
        if self._request.return_token_ids:
            choice["prompt_token_ids"] = list(self._prompt(number))
            choice["token_ids"] = [token.token for token in output.tokens]
        return choice

    def first_chunk(self, number: int) -> None:
        """Return None: a completion's stream begins with its text."""

    def chunks(self, number: int, event: GenerationEvent) -> Iterator[dict[str, Any]]:
        """Yield the chunks of an event in a stream."""
        logprobs = self._columns()
        offset = self._offsets[number]
        match event:
            case PrefillDone() if self._request.echo:
                text = self._echoed(number)
                if logprobs is not None:
                    logprobs.add_prompt(self._prompt(number), event.logprobs, text)
                self._offsets[number] += len(text)
                yield _completion_choice(number, text, logprobs, None)
            case OutputToken() if event.text or logprobs is not None:
                if logprobs is not None:
                    logprobs.add([event], offset)
                self._offsets[number] += len(event.text)
                yield _completion_choice(number, event.text, logprobs, None)
            case GenerationFinished():
                yield _completion_choice(number, event.text, None, event.finish_reason)

    def _prompt(self, number: int) -> Sequence[int]:
        return self.prompts[number // self._request.n]

    def _echoed(self, number: int) -> str:
        if not self._request.echo:
            return ""
        written = self._request.prompt[number // self._request.n]
        return written if isinstance(written, str) else self._tokenizer.decode(list(written))

    def _columns(self) -> CompletionLogprobs | None:
        return None if self._request.logprobs is None else CompletionLogprobs(self._tokenizer)


def _completion_choice(
    number: int, text: str, logprobs: CompletionLogprobs | None, reason: str | None
) -> dict[str, Any]:
    columns = None if logprobs is None else logprobs.body()
    return {"index": number, "text": text, "logprobs": columns, "finish_reason": reason}


class ChatChoices:
    """Choices of `/v1/chat/completions`."""

    id_prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, request: ChatRequest, tokenizer: TokenizerLike, prompt: Sequence[int]) -> None:
        self.prompts: Sequence[Sequence[int]] = [prompt]
        self._request, self._tokenizer = request, tokenizer

    def requests(self, adapter: str | None) -> list[GenerationRequest]:
        """Return n requests for the conversation."""
        sampling = [self._request.sampling(choice) for choice in range(self._request.n)]
        return [GenerationRequest(self.prompts[0], params, adapter) for params in sampling]

    def complete(self, number: int, output: CompletionOutput) -> dict[str, Any]:
        """Return a choice whose output is complete."""
        return {
            "index": number,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": chat_logprobs(self._tokenizer, output.tokens) if self._request.logprobs else None,
            "finish_reason": output.finish_reason,
        }

    def first_chunk(self, number: int) -> dict[str, Any]:
        """Return the role, with which a chat's stream begins."""
        return self._delta(number, {"role": "assistant", "content": "", "refusal": None})

    def chunks(self, number: int, event: GenerationEvent) -> Iterator[dict[str, Any]]:
        """Yield the chunks of an event in a stream."""
        match event:
            case OutputToken() if event.text or self._request.logprobs:
                yield self._delta(number, {"content": event.text}, tokens=[event])
            case GenerationFinished():
                yield self._delta(number, {"content": event.text} if event.text else {}, reason=event.finish_reason)
            case PrefillDone() | GenerationFailed():
                pass

    def _delta(
        self, number: int, delta: dict[str, Any], *, tokens: Sequence[OutputToken] = (), reason: str | None = None
    ) -> dict[str, Any]:
        logprobs = chat_logprobs(self._tokenizer, tokens) if self._request.logprobs and tokens else None
        return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


DONE = b"data: [DONE]\n\n"


class EventStreamResponse(Response):
    """Sends each object of `chunks` as an event, then `[DONE]`; an error in between becomes an event of its own.

    Starlette's own streaming response would cancel the coroutine when the client disconnects. Here the requests are
    cancelled, and the coroutine ends by itself.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncIterator[dict[str, Any]], batch: RequestBatch, dispatcher: RequestDispatcher
    ) -> None:
        # A proxy that buffers events (nginx) would make a stream useless.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks, self._batches, self._dispatcher = chunks, batch, dispatcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, as an ASGI application does."""
        async with self._dispatcher.awaiting(self._batches, receive):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for chunk in self._chunks:
                    await send(_body_message(b"data: " + orjson.dumps(chunk) + b"\n\n"))
            except ApiError as error:
                await send(_body_message(b"data: " + orjson.dumps(error.body()) + b"\n\n"))
            await send(_body_message(DONE))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _body_message(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


class OpenAIRoutes:
    """The handlers under `/v1`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        """List what is served: the base, then the adapters over it."""
        model, _ = self._state.serving()
        return json_response(
            {"object": "list", "data": [self._described(find_model(name, model)) for name in model.all_names]}
        )

    async def model(self, request: Request) -> Response:
        """Describe a model by its name."""
        model, _ = self._state.serving()
        return json_response(self._described(find_model(request.path_params["name"], model)))

    async def completions(self, request: Request) -> Response:
        """Complete prompts."""
        served, dispatcher = self._state.serving()
        body = parse_body(CompletionRequest, await read_json(request))
        model = find_model(body.model, served)
        dispatcher.check_count(len(body.prompt) * body.n)
        prompts = await encode_prompts(model, body.prompt)
        for prompt in prompts:
            check_length(model, len(prompt), body.max_tokens, "prompt")
        choices = CompletionChoices(body, model.tokenizer, prompts)
        return await _respond(request, body, choices, model, dispatcher)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        served, dispatcher = self._state.serving()
        body = parse_body(ChatRequest, await read_json(request))
        model = find_model(body.model, served)
        dispatcher.check_count(body.n)
        if not model.tokenizer.can_chat:
            raise bad_request(
                "this model's tokenizer has no chat template: ask /v1/completions", code="no_chat_template"
            )
        try:
            prompt = await asyncio.to_thread(
                model.tokenizer.encode_chat, [message.for_template() for message in body.messages]
            )
        except InputError as error:
            raise bad_request(str(error), "messages", "invalid_value") from None
        check_length(model, len(prompt), body.max_new_tokens or 1, "messages")
        return await _respond(request, body, ChatChoices(body, model.tokenizer, prompt), model, dispatcher)

    def _described(self, model: ServedModel) -> dict[str, Any]:
        described = {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "trainshed",
            "max_model_len": model.generator.max_length,
        }
        # As vLLM describes an adapter.
        return described if model.base is None else described | {"parent": model.base}


def json_response(body: Any, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(orjson.dumps(body), status, media_type="application/json")


async def encode_prompts(model: ServedModel, prompts: Sequence[Prompt]) -> list[Sequence[int]]:
    """Return the tokens of prompts; texts are encoded in a thread, because a long one would block the event loop."""
    return [
        await asyncio.to_thread(model.tokenizer.encode, prompt) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]


def check_length(model: ServedModel, prompt_tokens: int, max_tokens: int, param: str) -> None:
    """Refuse a request that does not fit into the model; a shorter output would go unnoticed."""
    if prompt_tokens + max_tokens > (longest := model.generator.max_length):
        raise bad_request(
            f"this model's maximum context length is {longest} tokens, and this asks for {prompt_tokens + max_tokens}: "
            f"{prompt_tokens} of the prompt and {max_tokens} of the answer",
            param,
            "context_length_exceeded",
        )


def find_model(name: str, served: ServedModel) -> ServedModel:
    """Return the model that a request names, or refuse a request for another one."""
    if (model := served.find(name)) is not None:
        return model
    names = ", ".join(f"`{known}`" for known in served.all_names)
    sentence = f"there is no model `{name}`: {names} {'are' if served.adapters else 'is'} served"
    raise ApiError(404, sentence, param="model", code="model_not_found")


async def _respond(
    request: Request,
    body: CompletionRequest | ChatRequest,
    choices: Choices,
    model: ServedModel,
    dispatcher: RequestDispatcher,
) -> Response:
    head = {
        "id": f"{choices.id_prefix}{uuid.uuid4().hex}",
        "object": choices.chunk_kind if body.stream else choices.kind,
        "created": int(time.time()),
        "model": model.name,
    }
    batch = dispatcher.submit(choices.requests(model.adapter))
    if body.stream:
        return EventStreamResponse(
            _stream_chunks(batch, choices, head, include_usage=body.include_usage), batch, dispatcher
        )
    async with dispatcher.awaiting(batch, request.receive):
        outputs = await batch.collect()
    complete = [choices.complete(number, output) for number, output in enumerate(outputs)]
    usage = _usage(choices, sum(len(output.tokens) for output in outputs))
    return json_response({**head, "choices": complete, "usage": usage})


async def _stream_chunks(
    batch: RequestBatch, choices: Choices, head: dict[str, Any], *, include_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    if include_usage:
        head = {**head, "usage": None}
    for number in range(len(batch.handles)):
        if (first_chunk := choices.first_chunk(number)) is not None:
            yield {**head, "choices": [first_chunk]}
    generated_tokens = 0
    async for number, event in batch:
        if isinstance(event, GenerationFailed):
            raise ApiError(500, event.reason, code="generation_failed")
        if isinstance(event, GenerationFinished) and event.finish_reason == "cancelled":
            raise batch.cancelled_error()
        generated_tokens += isinstance(event, OutputToken)
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
