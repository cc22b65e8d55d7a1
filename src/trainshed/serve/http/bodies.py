"""Reading what a client sends: bounded, JSON, strict. A key we do not know or cannot honour is refused by its name."""

from __future__ import annotations

import difflib
from typing import Any, ClassVar, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from trainshed.recipe.messages import shown
from trainshed.serve.http.refusal import Refusal, bad

MAX_BODY_BYTES = 16 * 2**20
"""A prompt of a million tokens has about 5 MB; anything much larger is a mistake or an attack."""


class RequestBody(BaseModel):
    """A body of OpenAI's API: what we honour are its fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    NOT_DONE: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Keys of OpenAI's that we cannot honour, with the values that ask for nothing."""
    LABELS: ClassVar[frozenset[str]] = frozenset()
    """Keys that change no answer at OpenAI either: they name whoever asks."""


Body = TypeVar("Body", bound=RequestBody)


async def read_json(request: Request) -> Any:
    """Read a request's body as JSON."""
    # A page of another site may send plain text to a server on this machine, but not JSON: that takes our consent.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal(415, "the body must be JSON, with the header `Content-Type: application/json`")
    received = bytearray()
    async for chunk in request.stream():
        received += chunk
        if len(received) > MAX_BODY_BYTES:
            raise Refusal(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    try:
        return orjson.loads(bytes(received))
    except orjson.JSONDecodeError as error:
        raise bad(f"the body is not JSON: {error}") from None


def parse(kind: type[Body], body: Any) -> Body:
    """Make a request of a body; OpenAI's clients may write null for what they leave out."""
    if not isinstance(body, dict):
        raise bad("the body must be a JSON object")
    for key, value in body.items():
        if key in kind.model_fields or key in kind.LABELS:
            continue
        if key not in kind.NOT_DONE:
            raise _unknown(kind, key)
        if value is not None and value not in kind.NOT_DONE[key]:
            raise bad(f"`{key}` is not supported by this server: leave it out", key, "unsupported_parameter")
    written = {key: value for key, value in body.items() if key in kind.model_fields and value is not None}
    try:
        return kind.model_validate(written)
    except ValidationError as error:
        raise _wrong_value(dict(error.errors()[0])) from None


def _unknown(kind: type[RequestBody], key: str) -> Refusal:
    near = difflib.get_close_matches(key, kind.model_fields, n=1, cutoff=0.6)
    known = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(kind.model_fields)}"
    return bad(f"unknown parameter `{key}`: {known}", key, "unknown_parameter")


def _wrong_value(found: dict[str, Any]) -> Refusal:
    # Of a value that takes several shapes pydantic names each shape that it tried: nobody wrote those.
    path = [step for step in found["loc"] if not (isinstance(step, str) and not step.isidentifier())]
    param = ".".join(str(step) for step in path) or None
    if found["type"] == "missing":
        return bad(f"`{param}` is missing", param, "missing_required_parameter")
    if found["type"] == "extra_forbidden":
        return bad(f"unknown parameter `{param}`", param, "unknown_parameter")
    if found["type"] == "value_error":
        return bad(str(found["ctx"]["error"]), param, "invalid_value")
    sentence = f"{found['msg'][0].lower()}{found['msg'][1:]}"
    named = f"`{param}`: " if param else ""
    return bad(f"{named}{sentence}, and is {shown(found['input'])}", param, "invalid_value")
