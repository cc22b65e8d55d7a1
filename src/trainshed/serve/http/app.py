"""The routes of the server, and what all of them share: keys, errors, counting."""

from __future__ import annotations

import hmac
import traceback
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from trainshed.reporting import SILENT, Reporter
from trainshed.serve.http import metrics
from trainshed.serve.http.errors import ApiError
from trainshed.serve.http.megatron import MegatronError, MegatronRoutes, megatron_error_response
from trainshed.serve.http.openai_routes import OpenAIRoutes, json_response
from trainshed.serve.http.server_state import ServerState

Handler = Callable[[Request], Awaitable[Response]]
ApiDialect = Literal["openai", "megatron"]

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
# The page has no external parts and sends requests to this server only.
_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


def build_app(state: ServerState, *, api_key: str | None = None, reporter: Reporter = SILENT) -> Starlette:
    """Build the server; with an `api_key`, all routes that use the model need it as a bearer token."""
    openai, megatron = OpenAIRoutes(state), MegatronRoutes(state)
    shared = _RouteBuilder(state, api_key, reporter)
    probes = _Probes(state)
    return Starlette(
        routes=[
            shared.open("GET", "/", probes.page),
            shared.open("GET", "/health", probes.health),
            shared.open("GET", "/ready", probes.ready),
            shared.open("GET", "/metrics", probes.metrics),
            shared.guarded("GET", "/v1/models", openai.models, "openai"),
            shared.guarded("GET", "/v1/models/{name:path}", openai.model, "openai"),
            shared.guarded("POST", "/v1/completions", openai.completions, "openai"),
            shared.guarded("POST", "/v1/chat/completions", openai.chat, "openai"),
            shared.guarded("PUT", "/api", megatron.generate, "megatron"),
            shared.guarded("POST", "/completions", megatron.completions, "megatron"),
        ],
        exception_handlers={HTTPException: shared.no_such_route},
    )


class _Probes:
    """The routes about the server itself."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._page = files("trainshed.serve.http").joinpath("page.html").read_text(encoding="utf-8")

    async def page(self, request: Request) -> Response:
        headers = {"content-security-policy": _PAGE_POLICY, "cache-control": "no-cache"}
        return HTMLResponse(self._page, headers=headers)

    async def health(self, request: Request) -> Response:
        status, report = self._state.health()
        return json_response(report, status)

    async def ready(self, request: Request) -> Response:
        status, report = self._state.readiness()
        return json_response(report, status)

    async def metrics(self, request: Request) -> Response:
        model = self._state.model
        load = model.generator.load() if model else None
        text = self._state.metrics.text(ready=self._state.is_ready, load=load)
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE})


class _RouteBuilder:
    """Makes routes whose handlers share error handling, request counting and the API key."""

    def __init__(self, state: ServerState, api_key: str | None, reporter: Reporter) -> None:
        self._state, self._reporter = state, reporter
        self._api_key = api_key.encode() if api_key else None

    def open(self, method: str, path: str, handler: Handler) -> Route:
        """Return a route without a key."""
        return self._route(method, path, handler, "openai")

    def guarded(self, method: str, path: str, handler: Handler, dialect: ApiDialect) -> Route:
        """Return a route that needs the key; its errors are in its dialect."""

        async def with_key(request: Request) -> Response:
            self._check_key(request)
            return await handler(request)

        return self._route(method, path, with_key, dialect)

    async def no_such_route(self, request: Request, error: Exception) -> Response:
        """Answer a request that no route matches; all count under one name, so that clients cannot add new ones."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        if status == 405:
            sentence = f"{request.url.path} is not for {request.method}"
        else:
            sentence = f"there is nothing at {request.method} {request.url.path}"
        method = request.method if request.method in _METHODS else "(other)"
        self._state.metrics.count_request(method, "(none)", status)
        response = ApiError(status, sentence).response()
        if isinstance(error, HTTPException) and error.headers:
            response.headers.update(error.headers)
        return response

    def _route(self, method: str, path: str, handler: Handler, dialect: ApiDialect) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                response = await handler(request)
            except (ApiError, MegatronError) as error:
                response = _error_response(error, dialect)
            except Exception as error:
                self._reporter.warn(f"{method} {path} failed:\n{traceback.format_exc().rstrip()}")
                response = _error_response(ApiError(500, f"a fault of Trainshed: {type(error).__name__}"), dialect)
            self._state.metrics.count_request(request.method, path, response.status_code)
            if self._state.draining:
                response.headers["connection"] = "close"  # the next request finds a server that stays
            return response

        return Route(path, endpoint, methods=[method])

    def _check_key(self, request: Request) -> None:
        if self._api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._api_key):
            sentence = "this server wants its API key: send the header `Authorization: Bearer KEY`"
            raise ApiError(401, sentence, code="invalid_api_key")


def _error_response(error: ApiError | MegatronError, dialect: ApiDialect) -> Response:
    if dialect == "megatron" or isinstance(error, MegatronError):
        return megatron_error_response(error)
    return error.response()
