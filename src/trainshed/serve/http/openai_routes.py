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

    words: TokenizerLike
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)

    def add_prompt(self, prompt: Sequence[int], pieces: Sequence[OutputToken], text: str) -> None:
        """Add the tokens of a prompt, of which the first has no probability."""
        offset = 0
        known = iter(pieces)
        for position, token in enumerate(prompt):
            self._add(token, next(known, None) if position else None, min(offset, len(text)))
            # What the tokenizer put before the text takes no place in it.
            if position or text.startswith(self.tokens[-1]):
                offset += len(self.tokens[-1])

    def add(self, pieces: Iterable[OutputToken], offset: int) -> None:
        """Add the tokens of an answer whose text begins at `offset`."""
        for piece in pieces:
            self._add(piece.token, piece, offset)
            offset += len(piece.text)

    def _add(self, token: int, piece: OutputToken | None, offset: int) -> None:
        self.tokens.append(self.words.decode([token]))
        self.text_offset.append(offset)
        if piece is None or piece.logprob is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        self.token_logprobs.append(finite_logprob(piece.logprob))
        top: dict[str, float] = {}
        # The likeliest first: where two tokens read alike (halves of characters), it is the one that is told.
        for each in sorted((*piece.alternatives, TokenLogprob(token, piece.logprob)), key=lambda each: -each.logprob):
            top.setdefault(self.words.decode([each.token]), finite_logprob(each.logprob))
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
    """JSON has no infinity: OpenAI writes -9999 for what cannot be."""
    return max(logprob, -9999.0)


def chat_logprobs(words: TokenizerLike, pieces: Iterable[OutputToken]) -> dict[str, Any]:
    """Return the log-probabilities of a chat's answer."""
    content = [
        {
            **_chat_logprob(words, TokenLogprob(piece.token, piece.logprob or 0.0)),
            "top_logprobs": [_chat_logprob(words, each) for each in piece.alternatives],
        }
        for piece in pieces
    ]
    return {"content": content, "refusal": None}


def _chat_logprob(words: TokenizerLike, of: TokenLogprob) -> dict[str, Any]:
    text = words.decode([of.token])
    # A token may be half a character: its bytes cannot be told from its text.
    known = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": finite_logprob(of.logprob), "bytes": known}


class Choices(Protocol):
    """What the two routes differ in. Choice `number` is answer `number % n` to prompt `number // n`."""

    id_prefix: str
    kind: str
    chunk_kind: str
    prompts: Sequence[Sequence[int]]

    def questions(self) -> list[GenerationRequest]:
        """Return what to ask the generator, one question for each choice."""
        ...

    def whole(self, number: int, answer: CompletionOutput) -> dict[str, Any]:
        """Return a choice whose answer is there."""
        ...

    def opening(self, number: int) -> dict[str, Any] | None:
        """Return what a stream says of a choice before anything has happened."""
        ...

    def chunks(self, number: int, event: GenerationEvent) -> Iterator[dict[str, Any]]:
        """Yield what a stream says of an event."""
        ...


class CompletionChoices:
    """Choices of `/v1/completions`."""

    id_prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, request: CompletionRequest, words: TokenizerLike, prompts: Sequence[Sequence[int]]) -> None:
        self.prompts = prompts
        self._request, self._words = request, words
        # Where the text of each choice's stream stands.
        self._offsets = [0] * (len(prompts) * request.n)

    def questions(self) -> list[GenerationRequest]:
        """Ask each prompt n times."""
        sampling = [self._request.sampling(choice) for choice in range(self._request.n)]
        return [GenerationRequest(prompt, each) for prompt in self.prompts for each in sampling]

    def whole(self, number: int, answer: CompletionOutput) -> dict[str, Any]:
        """Return a choice whose answer is there."""
        before = self._echoed(number)
        logprobs = self._columns()
        if logprobs is not None:
            if self._request.echo:
                logprobs.add_prompt(self._prompt(number), answer.prompt_pieces, before)
            logprobs.add(answer.pieces, len(before))
        return _completion_choice(number, before + answer.text, logprobs, answer.reason)

    def opening(self, number: int) -> None:
        """A completion's stream begins with its text."""

    def chunks(self, number: int, event: GenerationEvent) -> Iterator[dict[str, Any]]:
        """Yield what a stream says of an event."""
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
                yield _completion_choice(number, event.text, None, event.reason)

    def _prompt(self, number: int) -> Sequence[int]:
        return self.prompts[number // self._request.n]

    def _echoed(self, number: int) -> str:
        if not self._request.echo:
            return ""
        written = self._request.prompt[number // self._request.n]
        return written if isinstance(written, str) else self._words.decode(list(written))

    def _columns(self) -> CompletionLogprobs | None:
        return None if self._request.logprobs is None else CompletionLogprobs(self._words)


def _completion_choice(
    number: int, text: str, logprobs: CompletionLogprobs | None, reason: str | None
) -> dict[str, Any]:
    told = None if logprobs is None else logprobs.body()
    return {"index": number, "text": text, "logprobs": told, "finish_reason": reason}


class ChatChoices:
    """Choices of `/v1/chat/completions`."""

    id_prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, request: ChatRequest, words: TokenizerLike, prompt: Sequence[int]) -> None:
        self.prompts: Sequence[Sequence[int]] = [prompt]
        self._request, self._words = request, words

    def questions(self) -> list[GenerationRequest]:
        """Ask the conversation n times."""
        return [GenerationRequest(self.prompts[0], self._request.sampling(choice)) for choice in range(self._request.n)]

    def whole(self, number: int, answer: CompletionOutput) -> dict[str, Any]:
        """Return a choice whose answer is there."""
        return {
            "index": number,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": chat_logprobs(self._words, answer.pieces) if self._request.logprobs else None,
            "finish_reason": answer.reason,
        }

    def opening(self, number: int) -> dict[str, Any]:
        """A chat's stream begins with who speaks."""
        return self._delta(number, {"role": "assistant", "content": "", "refusal": None})

    def chunks(self, number: int, event: GenerationEvent) -> Iterator[dict[str, Any]]:
        """Yield what a stream says of an event."""
        match event:
            case OutputToken() if event.text or self._request.logprobs:
                yield self._delta(number, {"content": event.text}, pieces=[event])
            case GenerationFinished():
                yield self._delta(number, {"content": event.text} if event.text else {}, reason=event.reason)
            case PrefillDone() | GenerationFailed():
                pass

    def _delta(
        self, number: int, delta: dict[str, Any], *, pieces: Sequence[OutputToken] = (), reason: str | None = None
    ) -> dict[str, Any]:
        logprobs = chat_logprobs(self._words, pieces) if self._request.logprobs and pieces else None
        return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


DONE = b"data: [DONE]\n\n"


class EventStreamResponse(Response):
    """Sends each object of `chunks` as an event, then `[DONE]`; a refusal under way becomes an event of its own.

    Starlette's own streaming response would cancel the coroutine when the client leaves; here the questions are
    cancelled, and everything ends by itself.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], asked: RequestBatch, desk: RequestDispatcher) -> None:
        # A proxy that gathers events before it sends them (nginx) would make a stream useless.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks, self._asked, self._desk = chunks, asked, desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, as an ASGI application does."""
        async with self._desk.attending(self._asked, receive):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for chunk in self._chunks:
                    await send(_body_message(b"data: " + orjson.dumps(chunk) + b"\n\n"))
            except ApiError as refusal:
                await send(_body_message(b"data: " + orjson.dumps(refusal.body()) + b"\n\n"))
            await send(_body_message(DONE))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _body_message(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


class OpenAIRoutes:
    """The handlers under `/v1`."""

    def __init__(self, condition: ServerState) -> None:
        self._condition = condition
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        """List the one model that is served."""
        model, _ = self._condition.serving()
        return json_response({"object": "list", "data": [self._described(model)]})

    async def model(self, request: Request) -> Response:
        """Describe a model by its name."""
        model, _ = self._condition.serving()
        check_model_name(request.path_params["name"], model)
        return json_response(self._described(model))

    async def completions(self, request: Request) -> Response:
        """Go on from prompts."""
        model, desk = self._condition.serving()
        body = parse_body(CompletionRequest, await read_json(request))
        check_model_name(body.model, model)
        desk.check_count(len(body.prompt) * body.n)
        prompts = await encode_prompts(model, body.prompt)
        for prompt in prompts:
            check_length(model, len(prompt), body.max_tokens, "prompt")
        choices = CompletionChoices(body, model.words, prompts)
        return await _respond(request, body, choices, model, desk)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        model, desk = self._condition.serving()
        body = parse_body(ChatRequest, await read_json(request))
        check_model_name(body.model, model)
        desk.check_count(body.n)
        if not model.words.can_chat:
            raise bad_request(
                "this model's tokenizer has no chat template: ask /v1/completions", code="no_chat_template"
            )
        try:
            prompt = await asyncio.to_thread(model.words.chat, [message.for_template() for message in body.messages])
        except InputError as error:
            raise bad_request(str(error), "messages", "invalid_value") from None
        check_length(model, len(prompt), body.bound or 1, "messages")
        return await _respond(request, body, ChatChoices(body, model.words, prompt), model, desk)

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


async def encode_prompts(model: ServedModel, prompts: Sequence[Prompt]) -> list[Sequence[int]]:
    """Return the tokens of prompts; a long text is encoded beside the event loop, not on it."""
    return [await asyncio.to_thread(model.words.encode, each) if isinstance(each, str) else each for each in prompts]


def check_length(model: ServedModel, prompt_tokens: int, max_tokens: int, param: str) -> None:
    """Refuse what does not fit into the model, rather than to cut the answer short without a word."""
    if prompt_tokens + max_tokens > (longest := model.generator.max_length):
        raise bad_request(
            f"this model's maximum context length is {longest} tokens, and this asks for {prompt_tokens + max_tokens}: "
            f"{prompt_tokens} of the prompt and {max_tokens} of the answer",
            param,
            "context_length_exceeded",
        )


def check_model_name(name: str, model: ServedModel) -> None:
    """Refuse to answer in the name of another model."""
    if name != model.name:
        sentence = f"there is no model `{name}`: `{model.name}` is served"
        raise ApiError(404, sentence, param="model", code="model_not_found")


async def _respond(
    request: Request,
    body: CompletionRequest | ChatRequest,
    choices: Choices,
    model: ServedModel,
    desk: RequestDispatcher,
) -> Response:
    head = {
        "id": f"{choices.id_prefix}{uuid.uuid4().hex}",
        "object": choices.chunk_kind if body.stream else choices.kind,
        "created": int(time.time()),
        "model": model.name,
    }
    asked = desk.ask(choices.questions())
    if body.stream:
        return EventStreamResponse(_stream_chunks(asked, choices, head, include_usage=body.include_usage), asked, desk)
    async with desk.attending(asked, request.receive):
        answers = await asked.whole()
    told = [choices.whole(number, answer) for number, answer in enumerate(answers)]
    usage = _usage(choices, sum(len(answer.pieces) for answer in answers))
    return json_response({**head, "choices": told, "usage": usage})


async def _stream_chunks(
    asked: RequestBatch, choices: Choices, head: dict[str, Any], *, include_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    if include_usage:
        head = {**head, "usage": None}
    for number in range(len(asked.tickets)):
        if (opening := choices.opening(number)) is not None:
            yield {**head, "choices": [opening]}
    generated_tokens = 0
    async for number, event in asked:
        if isinstance(event, GenerationFailed):
            raise ApiError(500, event.why, code="generation_failed")
        if isinstance(event, GenerationFinished) and event.reason == "cancelled":
            raise asked.cut_short()
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
