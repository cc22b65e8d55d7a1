"""What Megatron's text generation server is asked, checked in its order and refused in its words.

Taken from megatron-core 0.16.1, `inference/text_generation_server/`. There, most refusals come with status 200 and many
options are checked and then dropped; here every refusal has status 400, and what cannot be honoured is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainshed.serve.asking import Sampling
from trainshed.serve.http.openai_requests import Prompt, read_prompts, read_stops, seed_of

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


class MegatronRefusal(Exception):
    """A request that is answered with a bare sentence."""

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.sentence, self.status = sentence, status


@dataclass(frozen=True)
class GenerateRequest:
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

    def sampling(self, number: int) -> Sampling:
        """Say it to the generator; Megatron draws a batch from one seed, so its prompts get different ones."""
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p or 1.0,
            seed=seed_of(self.random_seed, number),
            logprobs=0 if self.logprobs else None,
            prompt_logprobs=self.logprobs,
        )


@dataclass(frozen=True)
class CompletionsRequest:
    """The body of `POST /completions` (without /v1)."""

    model: str | None
    prompts: tuple[Prompt, ...]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    alternatives: int
    echo: bool
    seed: int | None
    stop: tuple[str, ...]

    def sampling(self, number: int) -> Sampling:
        """Say it to the generator."""
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p or 1.0,
            seed=seed_of(self.seed, number),
            stop=self.stop,
            logprobs=self.alternatives,
            prompt_logprobs=self.echo,
        )


def read_generate(body: Any) -> GenerateRequest:
    """Read the body of `PUT /api`."""
    take = _Taker(_mapping(body))
    prompts = _generate_prompts(take.body)
    take.refuse_unknown(_GENERATE_KEYS)
    max_tokens = take("tokens_to_generate", 64, _is_int, "tokens_to_generate must be an integer greater than 0")
    _must(max_tokens >= 0, "tokens_to_generate must be an integer greater than or equal to 0")
    logprobs = take.flag("logprobs")
    _must(max_tokens > 0 or logprobs, "tokens_to_generate=0 implies logprobs should be True")
    sentence = "temperature must be a positive number less than or equal to 100.0"
    temperature = take("temperature", 1.0, lambda value: _is_number(value) and 0 < value <= 100, sentence)
    sentence = "top_k must be an integer equal to or greater than 0 and less than or equal to 1000"
    top_k = take("top_k", 0, _is_int, sentence)
    _must(0 <= top_k <= 1000, "top_k must be equal to or greater than 0 and less than or equal to 1000")
    top_p = take("top_p", 0.0, _is_float, "top_p must be a positive float less than or equal to 1.0")
    _must(not (top_p > 0 and top_k > 0), "cannot set both top-k and top-p samplings.")
    _must(0 <= top_p <= 1, "top_p must be less than or equal to 1.0")
    take.refuse("top_p_decay", neutral=(0.0,))
    take.refuse("top_p_bound", neutral=())
    add_bos = take.flag("add_BOS")
    _must(all(prompts) or add_bos, "Empty prompts require add_BOS=true")
    stop_on_double_eol, stop_on_eol = take.flag("stop_on_double_eol"), take.flag("stop_on_eol")
    take.refuse("prevent_newline_after_colon", neutral=(False,))
    seed = take("random_seed", None, _is_int, "random_seed must be integer")
    _must(seed is None or seed >= 0, "random_seed must be a positive integer")
    take.flag("no_log")  # nothing that is asked is ever logged here
    stop_token = take("stop_token", None, _is_int, "stop_token must be an integer")
    take.refuse("length_penalty", neutral=(1.0,))
    return GenerateRequest(
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
    _must("prompts" in body, "prompts argument required")
    _must("max_len" not in body, "max_len is no longer used.  Replace with tokens_to_generate")
    _must("sentences" not in body, "sentences is no longer used.  Replace with prompts")
    _must("beam_width" not in body, "Beam search is no longer supported.")
    prompts = body["prompts"]
    _must(isinstance(prompts, list), "prompts is not a list of strings")
    _must(len(prompts) > 0, "prompts is empty")
    _must(len(prompts) <= MAX_PROMPTS, f"Maximum number of prompts is {MAX_PROMPTS}")
    _must(all(isinstance(prompt, str) for prompt in prompts), "prompts is not a list of strings")
    return tuple(prompts)


def read_completions(body: Any) -> CompletionsRequest:
    """Read the body of `POST /completions`."""
    take = _Taker(_mapping(body))
    take.refuse_unknown(_COMPLETION_KEYS)
    _must("prompt" in take.body, "prompt argument required")
    try:
        prompts = read_prompts(take.body["prompt"])
    except ValueError as error:
        raise MegatronRefusal(str(error)) from None
    _must("max_tokens" in take.body, "max_tokens argument required")
    sentence = "max_tokens must be an integer greater than or equal to 0"
    max_tokens = take("max_tokens", 0, lambda value: _is_int(value) and value >= 0, sentence)
    sentence = "temperature must be a number from 0 to 100.0"
    temperature = take("temperature", 1.0, lambda value: _is_number(value) and 0 <= value <= 100, sentence)
    sentence = "top_k must be an integer equal to or greater than 0"
    top_k = take("top_k", 0, lambda value: _is_int(value) and value >= 0, sentence)
    sentence = "top_p must be a number from 0 to 1.0"
    top_p = take("top_p", 1.0, lambda value: _is_number(value) and 0 <= value <= 1, sentence)
    sentence = "logprobs must be an integer greater than or equal to 0"
    alternatives = take("logprobs", 0, lambda value: _is_int(value) and value >= 0, sentence)
    echo = take.flag("echo")
    seed = take("seed", -1, _is_int, "seed must be an integer")
    _must(echo or max_tokens > 0, "echo=False not supported when tokens_to_generate == 0")
    _must(take("best_of", 1, _is_int, "best_of must be an integer") <= 1, "best_of > 1 not supported")
    _must(take("n", 1, _is_int, "n must be an integer") <= 1, "num_completions > 1 not supported")
    _must(not (max_tokens and alternatives), "cannot return top-k unless tokens_to_generate=0 at this time")
    _must(alternatives <= 10, "return_topk_logprobs > 10 not supported")
    stop = take.body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    _must(
        isinstance(stops, list) and all(isinstance(each, str) for each in stops),
        "stop must be a string or a list of strings",
    )
    try:
        stops = read_stops([each for each in stops if each])
    except ValueError as error:
        raise MegatronRefusal(str(error)) from None
    return CompletionsRequest(
        model=take("model", None, lambda value: isinstance(value, str), "model must be a string"),
        prompts=prompts,
        max_tokens=max_tokens,
        temperature=float(temperature),
        top_k=top_k,
        top_p=float(top_p),
        alternatives=alternatives,
        echo=echo,
        seed=None if seed < 0 else seed,
        stop=stops,
    )


class _Taker:
    """Takes keys out of a body, with Megatron's sentence for a value of the wrong kind."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body

    def __call__(self, key: str, default: Any, right: Callable[[Any], bool], sentence: str) -> Any:
        if key not in self.body:
            return default
        _must(right(self.body[key]), sentence)
        return self.body[key]

    def flag(self, key: str) -> bool:
        return self(key, False, lambda value: isinstance(value, bool), f"{key} must be a boolean value")

    def refuse(self, key: str, *, neutral: tuple[Any, ...]) -> None:
        """Refuse an option that Megatron takes and drops, unless its value asks for nothing."""
        _must(key not in self.body or self.body[key] in neutral, f"{key} is not supported by this server: leave it out")

    def refuse_unknown(self, known: frozenset[str]) -> None:
        unknown = sorted(self.body.keys() - known)
        _must(not unknown, f"unknown argument: {', '.join(unknown)}")


def _mapping(body: Any) -> dict[str, Any]:
    _must(isinstance(body, dict), "the body must be a JSON object")
    return body


def _must(right: bool, sentence: str) -> None:
    if not right:
        raise MegatronRefusal(sentence)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_float(value: Any) -> bool:
    return isinstance(value, float)


def _is_number(value: Any) -> bool:
    return _is_int(value) or _is_float(value)
