"""Megatron's routes, for clients that were written for its text generation server: `PUT /api`, `POST /completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from trainshed.serve.asking import Piece, Reason
from trainshed.serve.http.answers import Answer, Asked, Question
from trainshed.serve.http.bodies import read_json
from trainshed.serve.http.condition import Condition
from trainshed.serve.http.logprobs import Columns, finite
from trainshed.serve.http.megatron_requests import (
    CompletionsRequest,
    GenerateRequest,
    MegatronRefusal,
    read_completions,
    read_generate,
)
from trainshed.serve.http.model import ServedModel
from trainshed.serve.http.openai_routes import check_name, encoded, json_response
from trainshed.serve.http.refusal import Refusal


class Megatron:
    """The handlers of Megatron's two routes."""

    def __init__(self, condition: Condition) -> None:
        self._condition = condition

    async def generate(self, request: Request) -> Response:
        """Answer `PUT /api`."""
        model, desk = self._condition.serving()
        body = read_generate(await read_json(request))
        desk.check_count(len(body.prompts))
        prompts = [_with_beginning(prompt, body, model) for prompt in await encoded(model, body.prompts)]
        _check_lengths(model, prompts, body.max_tokens)
        asked = desk.ask([Question(prompt, body.sampling(number)) for number, prompt in enumerate(prompts)])
        async with desk.attending(asked, request.receive):
            answers = await _until_stopped(asked, body)
        tokens = [
            [*prompt, *(piece.token for piece in answer.pieces)]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        report: dict[str, Any] = {
            "text": [prompt + answer.text for prompt, answer in zip(body.prompts, answers, strict=True)],
            "segments": [[model.words.decode([token]) for token in each] for each in tokens],
            "tokens": tokens,
        }
        if body.logprobs:
            report["logprobs"] = [
                [finite(piece.logprob or 0.0) for piece in (*answer.prompt_pieces, *answer.pieces)]
                for answer in answers
            ]
        return json_response(report)

    async def completions(self, request: Request) -> Response:
        """Answer `POST /completions`."""
        model, desk = self._condition.serving()
        body = read_completions(await read_json(request))
        if body.model is not None:
            check_name(body.model, model)
        desk.check_count(len(body.prompts))
        prompts = await encoded(model, body.prompts)
        _check_lengths(model, prompts, body.max_tokens)
        asked = desk.ask([Question(prompt, body.sampling(number)) for number, prompt in enumerate(prompts)])
        async with desk.attending(asked, request.receive):
            answers = await asked.whole()
        choices = [
            _choice(number, body, model, prompt, answer)
            for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        return json_response({"choices": choices})


def refusal_response(refusal: Refusal | MegatronRefusal) -> Response:
    """Return a refusal as Megatron writes it: a bare sentence."""
    if isinstance(refusal, MegatronRefusal):
        return json_response(refusal.sentence, refusal.status)
    response = json_response(refusal.message, refusal.status)
    response.headers.update(refusal.headers())
    return response


def _choice(
    number: int, body: CompletionsRequest, model: ServedModel, prompt: Sequence[int], answer: Answer
) -> dict[str, Any]:
    written = body.prompts[number]
    before = written if isinstance(written, str) else model.words.decode(list(written))
    columns = Columns(model.words)
    if body.echo:
        columns.add_prompt(prompt, answer.prompt_pieces, before)
    columns.add(answer.pieces, len(before))
    told = columns.body()
    if not body.alternatives:
        told["top_logprobs"] = None
    return {"index": number, "text": (before if body.echo else "") + answer.text, "logprobs": told}


def _with_beginning(prompt: Sequence[int], body: GenerateRequest, model: ServedModel) -> Sequence[int]:
    if not body.add_bos:
        return prompt
    beginning = model.words.beginning
    if beginning is None:
        raise MegatronRefusal("add_BOS: this model's tokenizer has no token that begins a text")
    return prompt if prompt and prompt[0] == beginning else [beginning, *prompt]


def _check_lengths(model: ServedModel, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    if max(len(prompt) for prompt in prompts) + max_tokens > model.generator.max_length:
        raise MegatronRefusal("Length of prompt + tokens_to_generate longer than allowed")


async def _until_stopped(asked: Asked, body: GenerateRequest) -> list[Answer]:
    """Wait for all answers, and end those that reach what Megatron stops at: that token is part of them."""
    answers = [Answer() for _ in asked.tickets]
    async for number, event in asked:
        answer = answers[number]
        if answer.reason is not None:
            continue  # a token that was under way when the answer was stopped
        answer.add(event)
        if isinstance(event, Piece) and (reason := _stop_reason(answer, event, body)) is not None:
            answer.reason = reason
            asked.tickets[number].cancel()
    if any(answer.reason == "cancelled" for answer in answers):
        raise asked.cut_short()
    return answers


def _stop_reason(answer: Answer, piece: Piece, body: GenerateRequest) -> Reason | None:
    at_token = piece.token == body.stop_token
    at_line = body.stop_on_eol and "\n" in answer.text
    at_double = body.stop_on_double_eol and "\n\n" in answer.text
    return "stop" if at_token or at_line or at_double else None
