"""Megatron's routes, for clients that were written for its text generation server: `PUT /api`, `POST /completions`.

Bodies are checked in Megatron's order and refused with its sentences. Taken from megatron-core 0.16.1,
`inference/text_generation_server/`. There, most errors have status 200, and many options are checked and then ignored.
Here every error has status 400, and unsupported options are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from trainshed.serve.http.dispatcher import CompletionOutput, GenerationRequest, RequestBatch
from trainshed.serve.http.errors import ApiError
from trainshed.serve.http.openai_requests import Prompt, choice_seed, parse_prompts, parse_stops, read_json
from trainshed.serve.http.openai_routes import (
    CompletionLogprobs,
    encode_prompts,
    find_model,
    finite_logprob,
    json_response,
)
from trainshed.serve.http.server_state import ServedModel, ServerState
from trainshed.serve.request import FinishReason, OutputToken, SamplingParams

MAX_PROMPTS = 128
_GENERATE_KEYS = frozenset(
    {
        *("prompts", "tokens_to_generate", "logprobs", "temperature", "top_k", "top_p", "top_p_decay", "top_p_bound"),
        *("add_BOS", "stop_on_double_eol", "stop_on_eol", "prevent_newline_after_colon", "random_seed", "stop_token"),
        *("length_penalty", "no_log"),
    }
)
_COMPLETION_KEYS = frozenset(
    {
        *("prompt", "max_tokens", "temperature", "top_k", "top_p", "logprobs", "echo", "seed", "n", "best_of", "stop"),
        "model",
    }
)


class MegatronError(Exception):
    """An error whose response is a bare sentence."""

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.sentence, self.status = sentence, status


@dataclass(frozen=True)
class MegatronGenerateRequest:
    """The body of `PUT /api`."""

    prompts: tuple[str, ...]
    max_tokens: int
    logprobs: bool
    temperature: float
    top_k: int
    top_p: float
    add_bos: bool
    stop_on_double_eol: bool
    stop_on_eol: bool
    random_seed: int | None
    stop_token: int | None

    def sampling(self, number: int) -> SamplingParams:
        """Return a prompt's sampling parameters. Megatron has one seed for a batch, so each prompt gets another one."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p or 1.0,
            seed=choice_seed(self.random_seed, number),
            logprobs=0 if self.logprobs else None,
            prompt_logprobs=self.logprobs,
        )


@dataclass(frozen=True)
class MegatronCompletionRequest:
    """The body of `POST /completions` (without /v1)."""

    model: str | None
    prompts: tuple[Prompt, ...]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    top_logprobs: int
    echo: bool
    seed: int | None
    stop: tuple[str, ...]

    def sampling(self, number: int) -> SamplingParams:
        """Return the sampling parameters of a prompt."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p or 1.0,
            seed=choice_seed(self.seed, number),
            stop=self.stop,
            logprobs=self.top_logprobs,
            prompt_logprobs=self.echo,
        )


def parse_generate(body: Any) -> MegatronGenerateRequest:
    """Read the body of `PUT /api`."""
    take = _BodyReader(_mapping(body))
    prompts = _generate_prompts(take.body)
    take.refuse_unknown(_GENERATE_KEYS)
    max_tokens = take("tokens_to_generate", 64, _is_int, "tokens_to_generate must be an integer greater than 0")
    _require(max_tokens >= 0, "tokens_to_generate must be an integer greater than or equal to 0")
    logprobs = take.flag("logprobs")
    _require(max_tokens > 0 or logprobs, "tokens_to_generate=0 implies logprobs should be True")
    sentence = "temperature must be a positive number less than or equal to 100.0"
    temperature = take("temperature", 1.0, lambda value: _is_number(value) and 0 < value <= 100, sentence)
    sentence = "top_k must be an integer equal to or greater than 0 and less than or equal to 1000"
    top_k = take("top_k", 0, _is_int, sentence)
    _require(0 <= top_k <= 1000, "top_k must be equal to or greater than 0 and less than or equal to 1000")
    top_p = take("top_p", 0.0, _is_float, "top_p must be a positive float less than or equal to 1.0")
    _require(not (top_p > 0 and top_k > 0), "cannot set both top-k and top-p samplings.")
    _require(0 <= top_p <= 1, "top_p must be less than or equal to 1.0")
    take.refuse("top_p_decay", neutral=(0.0,))
    take.refuse("top_p_bound", neutral=())
    add_bos = take.flag("add_BOS")
    _require(all(prompts) or add_bos, "Empty prompts require add_BOS=true")
    stop_on_double_eol, stop_on_eol = take.flag("stop_on_double_eol"), take.flag("stop_on_eol")
    take.refuse("prevent_newline_after_colon", neutral=(False,))
    seed = take("random_seed", None, _is_int, "random_seed must be integer")
    _require(seed is None or seed >= 0, "random_seed must be a positive integer")
    take.flag("no_log")  # prompts are never logged here
    stop_token = take("stop_token", None, _is_int, "stop_token must be an integer")
    take.refuse("length_penalty", neutral=(1.0,))
    return MegatronGenerateRequest(
        prompts=prompts,
        max_tokens=max_tokens,
        logprobs=logprobs,
        temperature=float(temperature),
        top_k=top_k,
        top_p=top_p,
        add_bos=add_bos,
        stop_on_double_eol=stop_on_double_eol,
        stop_on_eol=stop_on_eol,
        random_seed=seed,
        stop_token=stop_token,
    )


def _generate_prompts(body: dict[str, Any]) -> tuple[str, ...]:
    _require("prompts" in body, "prompts argument required")
    _require("max_len" not in body, "max_len is no longer used.  Replace with tokens_to_generate")
    _require("sentences" not in body, "sentences is no longer used.  Replace with prompts")
    _require("beam_width" not in body, "Beam search is no longer supported.")
    prompts = body["prompts"]
    _require(isinstance(prompts, list), "prompts is not a list of strings")
    _require(len(prompts) > 0, "prompts is empty")
    _require(len(prompts) <= MAX_PROMPTS, f"Maximum number of prompts is {MAX_PROMPTS}")
    _require(all(isinstance(prompt, str) for prompt in prompts), "prompts is not a list of strings")
    return tuple(prompts)


def parse_completions(body: Any) -> MegatronCompletionRequest:
    """Read the body of `POST /completions`."""
    take = _BodyReader(_mapping(body))
    take.refuse_unknown(_COMPLETION_KEYS)
    _require("prompt" in take.body, "prompt argument required")
    try:
        prompts = parse_prompts(take.body["prompt"])
    except ValueError as error:
        raise MegatronError(str(error)) from None
    _require("max_tokens" in take.body, "max_tokens argument required")
    sentence = "max_tokens must be an integer greater than or equal to 0"
    max_tokens = take("max_tokens", 0, lambda value: _is_int(value) and value >= 0, sentence)
    sentence = "temperature must be a number from 0 to 100.0"
    temperature = take("temperature", 1.0, lambda value: _is_number(value) and 0 <= value <= 100, sentence)
    sentence = "top_k must be an integer equal to or greater than 0"
    top_k = take("top_k", 0, lambda value: _is_int(value) and value >= 0, sentence)
    sentence = "top_p must be a number from 0 to 1.0"
    top_p = take("top_p", 1.0, lambda value: _is_number(value) and 0 <= value <= 1, sentence)
    sentence = "logprobs must be an integer greater than or equal to 0"
    top_logprobs = take("logprobs", 0, lambda value: _is_int(value) and value >= 0, sentence)
    echo = take.flag("echo")
    seed = take("seed", -1, _is_int, "seed must be an integer")
    _require(echo or max_tokens > 0, "echo=False not supported when tokens_to_generate == 0")
    _require(take("best_of", 1, _is_int, "best_of must be an integer") <= 1, "best_of > 1 not supported")
    _require(take("n", 1, _is_int, "n must be an integer") <= 1, "num_completions > 1 not supported")
    _require(not (max_tokens and top_logprobs), "cannot return top-k unless tokens_to_generate=0 at this time")
    _require(top_logprobs <= 10, "return_topk_logprobs > 10 not supported")
    stop = take.body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    _require(
        isinstance(stops, list) and all(isinstance(text, str) for text in stops),
        "stop must be a string or a list of strings",
    )
    try:
        stops = parse_stops([text for text in stops if text])
    except ValueError as error:
        raise MegatronError(str(error)) from None
    return MegatronCompletionRequest(
        model=take("model", None, lambda value: isinstance(value, str), "model must be a string"),
        prompts=prompts,
        max_tokens=max_tokens,
        temperature=float(temperature),
        top_k=top_k,
        top_p=float(top_p),
        top_logprobs=top_logprobs,
        echo=echo,
        seed=None if seed < 0 else seed,
        stop=stops,
    )


class _BodyReader:
    """Reads keys of a body, with Megatron's sentence for a value of the wrong type."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body

    def __call__(self, key: str, default: Any, right: Callable[[Any], bool], sentence: str) -> Any:
        if key not in self.body:
            return default
        _require(right(self.body[key]), sentence)
        return self.body[key]

    def flag(self, key: str) -> bool:
        return self(key, False, lambda value: isinstance(value, bool), f"{key} must be a boolean value")

    def refuse(self, key: str, *, neutral: tuple[Any, ...]) -> None:
        """Refuse an option that Megatron takes and drops, unless its value asks for nothing."""
        _require(
            key not in self.body or self.body[key] in neutral, f"{key} is not supported by this server: leave it out"
        )

    def refuse_unknown(self, known: frozenset[str]) -> None:
        unknown = sorted(self.body.keys() - known)
        _require(not unknown, f"unknown argument: {', '.join(unknown)}")


def _mapping(body: Any) -> dict[str, Any]:
    _require(isinstance(body, dict), "the body must be a JSON object")
    return body


def _require(right: bool, sentence: str) -> None:
    if not right:
        raise MegatronError(sentence)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_float(value: Any) -> bool:
    return isinstance(value, float)


def _is_number(value: Any) -> bool:
    return _is_int(value) or _is_float(value)


class MegatronRoutes:
    """The handlers of Megatron's two routes."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def generate(self, request: Request) -> Response:
        """Answer `PUT /api`."""
        model, dispatcher = self._state.serving()
        body = parse_generate(await read_json(request))
        dispatcher.check_count(len(body.prompts))
        prompts = [_with_bos(prompt, body, model) for prompt in await encode_prompts(model, body.prompts)]
        _check_lengths(model, prompts, body.max_tokens)
        batch = dispatcher.submit(
            [GenerationRequest(prompt, body.sampling(number)) for number, prompt in enumerate(prompts)]
        )
        async with dispatcher.awaiting(batch, request.receive):
            outputs = await _until_stopped(batch, body)
        tokens = [
            [*prompt, *(token.token for token in output.tokens)]
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        report: dict[str, Any] = {
            "text": [prompt + output.text for prompt, output in zip(body.prompts, outputs, strict=True)],
            "segments": [[model.tokenizer.decode([token]) for token in sequence] for sequence in tokens],
            "tokens": tokens,
        }
        if body.logprobs:
            report["logprobs"] = [
                [finite_logprob(token.logprob or 0.0) for token in (*output.prompt_tokens, *output.tokens)]
                for output in outputs
            ]
        return json_response(report)

    async def completions(self, request: Request) -> Response:
        """Answer `POST /completions`."""
        served, dispatcher = self._state.serving()
        body = parse_completions(await read_json(request))
        model = served if body.model is None else find_model(body.model, served)
        dispatcher.check_count(len(body.prompts))
        prompts = await encode_prompts(model, body.prompts)
        _check_lengths(model, prompts, body.max_tokens)
        batch = dispatcher.submit(
            [GenerationRequest(prompt, body.sampling(number), model.adapter) for number, prompt in enumerate(prompts)]
        )
        async with dispatcher.awaiting(batch, request.receive):
            outputs = await batch.collect()
        choices = [
            _choice(number, body, model, prompt, output)
            for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]
        return json_response({"choices": choices})


def megatron_error_response(error: ApiError | MegatronError) -> Response:
    """Return an error as Megatron writes it: a bare sentence."""
    if isinstance(error, MegatronError):
        return json_response(error.sentence, error.status)
    response = json_response(error.message, error.status)
    response.headers.update(error.headers())
    return response


def _choice(
    number: int, body: MegatronCompletionRequest, model: ServedModel, prompt: Sequence[int], output: CompletionOutput
) -> dict[str, Any]:
    written = body.prompts[number]
    before = written if isinstance(written, str) else model.tokenizer.decode(list(written))
    columns = CompletionLogprobs(model.tokenizer)
    if body.echo:
        columns.add_prompt(prompt, output.prompt_tokens, before)
    columns.add(output.tokens, len(before))
    logprobs = columns.body()
    if not body.top_logprobs:
        logprobs["top_logprobs"] = None
    return {"index": number, "text": (before if body.echo else "") + output.text, "logprobs": logprobs}


def _with_bos(prompt: Sequence[int], body: MegatronGenerateRequest, model: ServedModel) -> Sequence[int]:
    if not body.add_bos:
        return prompt
    bos_token = model.tokenizer.bos_token
    if bos_token is None:
        raise MegatronError("add_BOS: this model's tokenizer has no token that begins a text")
    return prompt if prompt and prompt[0] == bos_token else [bos_token, *prompt]


def _check_lengths(model: ServedModel, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    if max(len(prompt) for prompt in prompts) + max_tokens > model.generator.max_length:
        raise MegatronError("Length of prompt + tokens_to_generate longer than allowed")


async def _until_stopped(batch: RequestBatch, body: MegatronGenerateRequest) -> list[CompletionOutput]:
    """Wait for all outputs, and end those that reach one of Megatron's stops; the stop is part of the output."""
    outputs = [CompletionOutput() for _ in batch.handles]
    async for number, event in batch:
        output = outputs[number]
        if output.finish_reason is not None:
            continue  # a token that was sampled before the cancellation
        output.add(event)
        if isinstance(event, OutputToken) and (reason := _stop_reason(output, event, body)) is not None:
            output.finish_reason = reason
            batch.handles[number].cancel()
    if any(output.finish_reason == "cancelled" for output in outputs):
        raise batch.cancelled_error()
    return outputs


def _stop_reason(output: CompletionOutput, token: OutputToken, body: MegatronGenerateRequest) -> FinishReason | None:
    at_token = token.token == body.stop_token
    at_line = body.stop_on_eol and "\n" in output.text
    at_double = body.stop_on_double_eol and "\n\n" in output.text
    return "stop" if at_token or at_line or at_double else None
