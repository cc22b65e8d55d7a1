"""An answer as server-sent events, which ends when the client does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trainshed.serve.http.answers import Asked, Desk
from trainshed.serve.http.refusal import Refusal

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends each object of `chunks` as an event, then `[DONE]`; a refusal under way becomes an event of its own.

    Starlette's own streaming response would cancel the coroutine when the client leaves; here the questions are
    cancelled, and everything ends by itself.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], asked: Asked, desk: Desk) -> None:
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
                    await send(_body(b"data: " + orjson.dumps(chunk) + b"\n\n"))
            except Refusal as refusal:
                await send(_body(b"data: " + orjson.dumps(refusal.body()) + b"\n\n"))
            await send(_body(DONE))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}
