"""Errors in OpenAI's form."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from h2okv.engine.outputs import (
    EngineStoppedError,
    PromptTooLongError,
    QueueFullError,
    RequestFailedError,
)

LOG = logging.getLogger("h2okv.server")
_SERVER = "server_error"


@dataclass(eq=False)
class ApiError(Exception):
    """A refusal or a failure that goes to the client as it is."""

    status: int
    message: str
    kind: str = "invalid_request_error"  # OpenAI's type, as are the next two
    param: str | None = None
    code: str | None = None
    outcome: str = "refused"  # what the metrics count it as
    retry_after: float | None = None  # seconds after which a new try makes sense

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self, **headers: str) -> JSONResponse:
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """The error of a field whose value cannot be used."""
    return ApiError(400, message, param=param, code=code)


def timed_out(seconds: float) -> ApiError:
    """The error of a request that took too long."""
    return ApiError(
        504,
        f"the request took longer than {seconds:g} s and was stopped; ask for fewer tokens, try"
        " again when fewer requests wait, or start the server with a larger --timeout.",
        kind="timeout_error",
        code="timeout",
        outcome="timeout",
    )


def as_api_error(error: Exception) -> ApiError:
    """Translates an exception into what the client is told."""
    told = str(error)
    match error:
        case ApiError():
            return error
        case QueueFullError():
            code, wait = "queue_full", error.retry_after
            kind = "rate_limit_error"
            return ApiError(429, told, kind=kind, code=code, outcome=code, retry_after=wait)
        case EngineStoppedError():
            code = "engine_stopped"
            return ApiError(503, told, kind=_SERVER, code=code, outcome="stopped", retry_after=5)
        case RequestFailedError():
            return ApiError(500, told, kind=_SERVER, code="request_failed", outcome="failed")
        case PromptTooLongError():
            return invalid(told, code="context_length_exceeded")
        case ValueError():
            return invalid(told)
    LOG.error("a request failed", exc_info=error)
    told = "the server failed with this request, by an error of its own; its log has the details."
    return ApiError(500, told, kind=_SERVER, code="internal_error", outcome="failed")


class BodyTooLargeError(Exception):
    """A body came without its length, and went on and on."""
