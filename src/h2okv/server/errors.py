"""Errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from h2okv.engine import outputs
from h2okv.prompts.readers import FieldError

LOG = logging.getLogger("h2okv.server")

_KINDS = {
    429: ("rate_limit_error", "queue_full"),
    500: ("server_error", "failed"),
    503: ("server_error", "stopped"),
    504: ("timeout_error", "timeout"),
}
"""OpenAI's error type and the outcome in the metrics, by status; all others are refusals."""
_BEFORE_BODY = (401, 403, 408, 413)
_LINGER = 2.0
"""Seconds in which the rest of an unread body is discarded."""


@dataclass(eq=False)
class ApiError(Exception):
    """A refusal or failure that is sent to the client."""

    status: int
    message: str
    param: str | None = None  # names as in OpenAI's API
    code: str | None = None
    retry_after: float | None = None  # seconds before another attempt

    def __str__(self) -> str:
        return self.message

    def __post_init__(self) -> None:
        self.kind, self.outcome = _KINDS.get(self.status, ("invalid_request_error", "refused"))

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self, **headers: str) -> JSONResponse:
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status not in _BEFORE_BODY:
            return JSONResponse(self.body(), self.status, headers)
        return _LingeringResponse(self.body(), self.status, headers | {"Connection": "close"})


class _LingeringResponse(JSONResponse):
    """Lets the client finish sending for a while: it might not read the response before."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        # The response stays open while the rest of the body arrives.
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b""})


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error of a field with an invalid value."""
    return ApiError(400, message, param, code)


def timed_out(seconds: float) -> ApiError:
    """Return the error of a request that took too long."""
    remedy = "ask for fewer tokens, try again when fewer requests wait, or start the server with a"
    message = (
        f"the request took longer than {seconds:g} s and was stopped; {remedy} larger --timeout."
    )
    return ApiError(504, message, code="timeout")


def as_api_error(error: Exception) -> ApiError:
    """Translate an exception for the client."""
    message = str(error)
    match error:
        case ApiError():
            return error
        case outputs.QueueFullError():
            return ApiError(429, message, code="queue_full", retry_after=error.retry_after)
        case outputs.EngineStoppedError():
            return ApiError(503, message, code="engine_stopped", retry_after=5)
        case outputs.GrammarTooLargeError():
            return invalid(message)
        case outputs.RequestFailedError():
            return ApiError(500, message, code="request_failed")
        case FieldError():
            return invalid(message, error.name or None, error.code)
        case ValueError():
            return invalid(message)
    LOG.error("a request failed", exc_info=error)
    message = "the request failed with an internal error; the server's log has the details."
    return ApiError(500, message, code="internal_error")
