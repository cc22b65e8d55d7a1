"""Request bodies: size limit, JSON, strict validation; and the bodies of OpenAI's two routes as pydantic models.

An unknown or unsupported key is refused by its name. References:
https://platform.openai.com/docs/api-reference/completions and /chat; `top_k` and `ignore_eos` are vLLM's.
"""

from __future__ import annotations

import difflib
import hashlib
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import Request

from trainshed.recipe.validation import shown_value
from trainshed.serve.http.errors import ApiError, bad_request
from trainshed.serve.request import SamplingParams

MAX_BODY_BYTES = 16 * 2**20
"""A prompt of a million tokens has about 5 MB; anything much larger is a mistake or an attack."""


class RequestBody(BaseModel):
    """A body of OpenAI's API; its fields are the supported keys."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """OpenAI's keys that are not supported, with the values that ask for nothing."""
    LABEL_KEYS: ClassVar[frozenset[str]] = frozenset()
    """Keys that never change the output: they identify the caller."""


Body = TypeVar("Body", bound=RequestBody)


async def read_json(request: Request) -> Any:
    """Read a request's body as JSON."""
    # A page of another site may send plain text to a server on this machine, but not JSON without our consent (CORS).
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON, with the header `Content-Type: application/json`")
    received = bytearray()
    async for chunk in request.stream():
        received += chunk
        if len(received) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    try:
        return orjson.loads(bytes(received))
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON: {error}") from None


def parse_body(kind: type[Body], body: Any) -> Body:
    """Validate a body; OpenAI's clients may write null for keys they leave out."""
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    for key, value in body.items():
        if key in kind.model_fields or key in kind.LABEL_KEYS:
            continue
        if key not in kind.UNSUPPORTED:
            raise _unknown_parameter(kind, key)
        if value is not None and value not in kind.UNSUPPORTED[key]:
            raise bad_request(f"`{key}` is not supported by this server: leave it out", key, "unsupported_parameter")
    written = {key: value for key, value in body.items() if key in kind.model_fields and value is not None}
    try:
        return kind.model_validate(written)
    except ValidationError as error:
        raise _wrong_value(dict(error.errors()[0])) from None


def _unknown_parameter(kind: type[RequestBody], key: str) -> ApiError:
    near = difflib.get_close_matches(key, kind.model_fields, n=1, cutoff=0.6)
    known = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(kind.model_fields)}"
    return bad_request(f"unknown parameter `{key}`: {known}", key, "unknown_parameter")


def _wrong_value(error: dict[str, Any]) -> ApiError:
    # For a union pydantic names each type that it tried; these are not in the body.
    path = [step for step in error["loc"] if not (isinstance(step, str) and not step.isidentifier())]
    param = ".".join(str(step) for step in path) or None
    if error["type"] == "missing":
        return bad_request(f"`{param}` is missing", param, "missing_required_parameter")
    if error["type"] == "extra_forbidden":
        return bad_request(f"unknown parameter `{param}`", param, "unknown_parameter")
    if error["type"] == "value_error":
        return bad_request(str(error["ctx"]["error"]), param, "invalid_value")
    sentence = f"{error['msg'][0].lower()}{error['msg'][1:]}"
    named = f"`{param}`: " if param else ""
    return bad_request(f"{named}{sentence}, and is {shown_value(error['input'])}", param, "invalid_value")


DEFAULT_MAX_TOKENS = 16
"""Of completions, as in OpenAI's API; a chat is limited by the model's length only."""
OPENAI_MAX_TOP_LOGPROBS = 20
_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 1000
"""After each token the text is compared with every prefix of every stop string."""
_MAX_CHOICES = 128

_LABEL_KEYS = frozenset({"user", "safety_identifier", "prompt_cache_key", "metadata"})
_UNSUPPORTED_KEYS: dict[str, tuple[Any, ...]] = {"logit_bias": ({},)}


def parse_stops(value: Any) -> tuple[str, ...]:
    """Read a stop string or a list of them."""
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


def parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """Read one prompt or several, each a text or a list of tokens."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _is_tokens(value):
            return (tuple(value),)
        if all(isinstance(prompt, str) for prompt in value):
            return tuple(value)
        if all(_is_tokens(prompt) for prompt in value):
            return tuple(tuple(prompt) for prompt in value)
    raise ValueError("`prompt` must be a text, a list of texts, a list of tokens, or a list of lists of tokens")


class StreamOptions(BaseModel):
    """What a stream contains besides its text."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool = False


class _GenerationBody(RequestBody):
    LABEL_KEYS: ClassVar[frozenset[str]] = _LABEL_KEYS

    model: str
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    """vLLM writes -1 for no limit; 0 is the same."""
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] = 1
    stop: Annotated[tuple[str, ...], BeforeValidator(parse_stops)] = ()
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
        """Whether a stream ends with its token usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def _sampling(
        self, max_tokens: int | None, choice: int, logprobs: int | None, *, of_prompt: bool
    ) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            seed=choice_seed(self.seed, choice),
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logprobs=logprobs,
            prompt_logprobs=of_prompt,
        )


class CompletionRequest(_GenerationBody):
    """The body of `POST /v1/completions`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = _UNSUPPORTED_KEYS | {"best_of": (1,), "suffix": ("",)}

    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(parse_prompts)]
    max_tokens: Annotated[int, Field(ge=0)] = DEFAULT_MAX_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=OPENAI_MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False
    return_token_ids: bool = False
    """vLLM's: with each choice the ids of its prompt and of what was generated."""

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.return_token_ids and self.stream:
            raise ValueError("`return_token_ids` is not for streams here")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("`max_tokens: 0` needs `echo: true`: there would be nothing to answer")
        return self

    def sampling(self, choice: int) -> SamplingParams:
        """Return the sampling parameters of one of the `n` choices of a prompt."""
        of_prompt = self.echo and self.logprobs is not None
        return self._sampling(self.max_tokens, choice, self.logprobs, of_prompt=of_prompt)


def _read_message(value: Any) -> Any:
    """Drop empty fields: clients send messages back as they got them."""
    return (
        {key: content for key, content in value.items() if content not in (None, [])}
        if isinstance(value, dict)
        else value
    )


def _read_content(value: Any) -> Any:
    """Join a message's content if it comes in parts; only text parts are supported."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"a message's content may have parts of the type `text` only, not {shown_value(kind)}")
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError('a part of a message is {"type": "text", "text": "…"}')
    return "".join(part["text"] for part in value)


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_read_content)]

    def for_template(self) -> dict[str, str]:
        """Return it as chat templates take it; `developer` is OpenAI's newer word for `system`."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(_GenerationBody):
    """The body of `POST /v1/chat/completions`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = _UNSUPPORTED_KEYS | {
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

    messages: Annotated[list[Annotated[ChatMessage, BeforeValidator(_read_message)]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=OPENAI_MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("`max_tokens` and `max_completion_tokens` say different things: leave `max_tokens` out")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs: true`")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """How many tokens the output may have; None: until the model's maximum length."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def sampling(self, choice: int) -> SamplingParams:
        """Return the sampling parameters of one of the `n` choices."""
        return self._sampling(
            self.max_new_tokens, choice, (self.top_logprobs or 0) if self.logprobs else None, of_prompt=False
        )


def choice_seed(seed: int | None, choice: int) -> int | None:
    """Return the seed of one of several choices: the first has the client's, the others are derived from it."""
    if seed is None or choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {choice}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
