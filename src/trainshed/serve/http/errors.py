"""The errors of the API: OpenAI's error object, with its statuses."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(Exception):
    """An error response.

    `param` is the key of the body that is wrong, `code` a name of the error for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        kind = _ERROR_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the response in OpenAI's shape."""
        return JSONResponse(self.body(), self.status, headers=self.headers())

    def headers(self) -> dict[str, str]:
        """Return the headers that tell a client what to do next."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        return {"retry-after": "1"} if self.status in (429, 503) else {}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error of a wrong request."""
    return ApiError(400, message, param=param, code=code)
