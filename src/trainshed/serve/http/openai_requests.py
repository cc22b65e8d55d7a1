"""What OpenAI's two routes are asked, as strict models, and how it is said to the generator.

References: https://platform.openai.com/docs/api-reference/completions and /chat; `top_k` and `ignore_eos` are vLLM's.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from trainshed.recipe.messages import shown
from trainshed.serve.asking import Sampling
from trainshed.serve.http.bodies import RequestBody

DEFAULT_MAX_TOKENS = 16
"""Of completions, as OpenAI's; a chat's answer has no bound but the model's length."""
MAX_ALTERNATIVES = 20
_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 1000
"""After each token the text is compared with every beginning of every stop text."""
_MAX_CHOICES = 128

_LABELS = frozenset({"user", "safety_identifier", "prompt_cache_key", "metadata"})
_NOT_DONE: dict[str, tuple[Any, ...]] = {"logit_bias": ({},)}


def read_stops(value: Any) -> tuple[str, ...]:
    """Read a stop text or a list of them."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("`stop` must be a text or a list of texts")
    if len(stops) > _MAX_STOPS or not all(stops):
        raise ValueError(f"`stop` must be at most {_MAX_STOPS} texts, none of them empty")
    if any(len(stop) > _MAX_STOP_CHARACTERS for stop in stops):
        raise ValueError(f"a text of `stop` may have at most {_MAX_STOP_CHARACTERS} characters")
    return tuple(stops)


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in value)


Prompt = str | tuple[int, ...]


def read_prompts(value: Any) -> tuple[Prompt, ...]:
    """Read a text, several, tokens, or several lists of them."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _is_tokens(value):
            return (tuple(value),)
        if all(isinstance(each, str) for each in value):
            return tuple(value)
        if all(_is_tokens(each) for each in value):
            return tuple(tuple(each) for each in value)
    raise ValueError("`prompt` must be a text, a list of texts, a list of tokens, or a list of lists of tokens")


class StreamOptions(BaseModel):
    """What a stream tells besides its text."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool = False


class _Request(RequestBody):
    LABELS: ClassVar[frozenset[str]] = _LABELS

    model: str
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    """vLLM writes -1 for no bound; 0 is the same."""
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] = 1
    stop: Annotated[tuple[str, ...], BeforeValidator(read_stops)] = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` needs `stream: true`")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with what it took."""
        return self.stream_options is not None and self.stream_options.include_usage

    def _sampling(self, max_tokens: int | None, choice: int, logprobs: int | None, *, of_prompt: bool) -> Sampling:
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            seed=seed_of(self.seed, choice),
            stop=self.stop,
            ignore_end=self.ignore_eos,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logprobs=logprobs,
            prompt_logprobs=of_prompt,
        )


class CompletionRequest(_Request):
    """The body of `POST /v1/completions`."""

    NOT_DONE: ClassVar[dict[str, tuple[Any, ...]]] = _NOT_DONE | {"best_of": (1,), "suffix": ("",)}

    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(read_prompts)]
    max_tokens: Annotated[int, Field(ge=0)] = DEFAULT_MAX_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("`max_tokens: 0` needs `echo: true`: there would be nothing to answer")
        return self

    def sampling(self, choice: int) -> Sampling:
        """Say it to the generator, for one of the `n` answers to a prompt."""
        of_prompt = self.echo and self.logprobs is not None
        return self._sampling(self.max_tokens, choice, self.logprobs, of_prompt=of_prompt)


def _read_message(value: Any) -> Any:
    """Clients send answers back as they got them, with empty fields."""
    return {key: each for key, each in value.items() if each not in (None, [])} if isinstance(value, dict) else value


def _read_content(value: Any) -> Any:
    """A message's content may come in parts; of these only text is understood."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"a message's content may have parts of the type `text` only, not {shown(kind)}")
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError('a part of a message is {"type": "text", "text": "…"}')
    return "".join(part["text"] for part in value)


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_read_content)]

    def for_template(self) -> dict[str, str]:
        """Return it as chat templates take it; `developer` is OpenAI's newer word for `system`."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(_Request):
    """The body of `POST /v1/chat/completions`."""

    NOT_DONE: ClassVar[dict[str, tuple[Any, ...]]] = _NOT_DONE | {
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "parallel_tool_calls": (),
        "prediction": (),
        "prompt_cache_retention": (),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none",),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: Annotated[list[Annotated[Message, BeforeValidator(_read_message)]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("`max_tokens` and `max_completion_tokens` say different things: leave `max_tokens` out")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs: true`")
        return self

    @property
    def bound(self) -> int | None:
        """How many tokens the answer may have; None: until the model's length is full."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def sampling(self, choice: int) -> Sampling:
        """Say it to the generator, for one of the `n` answers."""
        return self._sampling(self.bound, choice, (self.top_logprobs or 0) if self.logprobs else None, of_prompt=False)


def seed_of(seed: int | None, choice: int) -> int | None:
    """Return the seed of one of several answers: the first has the client's own, all differ, each is repeatable."""
    if seed is None or choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {choice}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
