"""Routes of the server, and the middleware before them."""

from __future__ import annotations

import re
import secrets
import time
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from h2okv.console import write_remark
from h2okv.engine.llm import AsyncLLM
from h2okv.prompts.readers import FieldError
from h2okv.server.config import LOOPBACK, ServerSettings
from h2okv.server.errors import ApiError, as_api_error
from h2okv.server.handlers import Handlers, TextRoute
from h2okv.server.protocol import ChatRequest, CompletionRequest, ResponsesRequest

_PAGE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_POLICY = (
    "default-src 'none'; script-src 'nonce-NONCE'; style-src 'nonce-NONCE'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_READING = ["GET", "HEAD"]  # methods of read-only routes
_OPEN_PATHS = frozenset({"/health", "/"})
"""Paths without a key: the health check, and the page, which browsers request without one."""


def make_app(engine: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """Create the application, which checks no keys: see `guarded`."""
    # Without FastAPI's documentation pages, which load scripts from other sites.
    handling: Any = {ApiError: _refused, FieldError: _refused, HTTPException: _no_route}
    app = FastAPI(openapi_url=None, exception_handlers=handling)
    app.state.handlers = handlers = Handlers(engine, settings)
    for kind in (ChatRequest, CompletionRequest, ResponsesRequest):
        route: Any = TextRoute(handlers, kind)  # an ASGI application, not a function
        app.add_route(kind.path, route, methods=["POST"])
    _add_status(app, handlers)
    _add_page(app)
    return app


def guarded(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """Wrap an application in the middleware of every server: log, CORS, and checks of the head."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        refusal = await _refusal(Request(scope), settings) if is_http else None
        await (app if refusal is None else refusal.response())(scope, receive, send)

    answer: ASGIApp = guard
    if origins := settings.cors_origins:
        # Before the guard: browsers send preflight requests without a key.
        methods = ["GET", "POST"]
        answer = CORSMiddleware(guard, origins, allow_methods=methods, allow_headers=["*"])
    return _logged(answer) if settings.log_requests else answer


def _add_status(app: FastAPI, handlers: Handlers) -> None:
    model_info = {
        "id": handlers.settings.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "h2okv",
        # Not OpenAI's, but read by clients of vLLM's server.
        "max_model_len": handlers.max_model_len,
    }

    get = partial(app.api_route, methods=_READING)

    @get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_info]}

    @get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        handlers.check_model(name)
        return model_info

    @get("/health")
    async def health(response: Response) -> dict[str, str]:
        response.status_code = 200 if handlers.engine.is_healthy else 503
        return {"status": "ok" if handlers.engine.is_healthy else "stopped"}

    @get("/metrics")
    async def metrics() -> Response:
        return Response(handlers.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @get("/stats")
    async def stats() -> Response:
        return JSONResponse(handlers.stats(), headers={"Cache-Control": "no-store"})


def _add_page(app: FastAPI) -> None:
    folder = files("h2okv.server") / "page"
    page = (folder / "index.html").read_text(encoding="utf-8")
    for name in re.findall(r"^@(\w+\.\w+)@$", page, re.MULTILINE):
        page = page.replace(f"@{name}@", (folder / name).read_text(encoding="utf-8"))

    @app.api_route("/", methods=_READING)
    async def index() -> Response:
        nonce = secrets.token_urlsafe(16)
        headers = {**_PAGE_HEADERS, "Content-Security-Policy": _POLICY.replace("NONCE", nonce)}
        return HTMLResponse(page.replace("@NONCE@", nonce), headers=headers)


async def _refused(request: Request, error: Any) -> Response:
    return as_api_error(error).response()


async def _no_route(request: Request, error: Any) -> Response:
    """Return the error of an unknown path or method."""
    paths = ", ".join(route.path.replace("{name:path}", "NAME") for route in request.app.routes)
    message = f"{request.method} {request.url.path}: {error.detail}; there are {paths}."
    code = "not_found" if error.status_code == 404 else None
    return ApiError(error.status_code, message, code=code).response(**(error.headers or {}))


def _logged(app: ASGIApp) -> ASGIApp:
    """Log one line to stderr for each request, without its text."""

    async def log(scope: Scope, receive: Receive, send: Send) -> None:
        status, start_time, state = 0, time.monotonic(), scope.setdefault("state", {})

        async def send_and_record(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await app(scope, receive, send_and_record)
        finally:
            path = scope.get("raw_path", b"").decode("latin-1")  # still percent-encoded: one line
            client, seconds = (scope.get("client") or ("-",))[0], time.monotonic() - start_time
            summary = f"{client} {scope['method']} {path} {status or 'gone'} {seconds:.2f} s"
            note = state["metrics"].note if "metrics" in state else ""
            write_remark(f"{time.strftime('%F %T')} {summary}{note}")

    return log


_bearer = HTTPBearer(auto_error=False)


async def _refusal(request: Request, settings: ServerSettings) -> ApiError | None:
    """Return the error of a request's head, ``None`` if it is valid."""
    # Starlette's own check of the host answers in plain text.
    host, key = request.headers.get("host", ""), settings.api_key
    # Without the port; IPv6 addresses are in brackets.
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    # DNS rebinding: a foreign page whose host name resolves to this machine must not get in.
    if settings.is_local and key is None and name.lower() not in LOOPBACK:
        return ApiError(
            403,
            f"Host {host!r} is not this server's; use its own address, or start it with an API"
            " key (H2OKV_API_KEY), which takes requests under any name.",
            code="wrong_host",
        )
    # Not the path of `request.url`, which contains the client's Host header.
    if key is None or request.scope["path"] in _OPEN_PATHS:
        return None
    # As bytes: headers are read as Latin-1, whatever their encoding. In constant time, to leak
    # nothing about the length of a correct prefix.
    credentials = await _bearer(request)
    sent_key = b"" if credentials is None else credentials.credentials.strip().encode("latin-1")
    if secrets.compare_digest(sent_key, key.strip().encode()):
        return None
    message = "the API key is missing or wrong; send the header 'Authorization: Bearer KEY'."
    return ApiError(401, message, code="invalid_api_key")
