"""The routes, and the guard before them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from h2okv.console import write_remark
from h2okv.server.config import ServerSettings
from h2okv.server.errors import ApiError, BodyTooLargeError
from h2okv.server.handlers import Handlers
from h2okv.server.protocol import (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    SampledRequest,
)
from h2okv.server.responses import (
    ChatResponseBuilder,
    CompletionResponseBuilder,
    ResponseBuilder,
)
from h2okv.server.responses_api import ResponsesBuilder

if TYPE_CHECKING:
    from h2okv.engine.llm import AsyncLLM

_PAGE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_POLICY = (
    "default-src 'none'; script-src {inline}; style-src {inline}; {more}; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
_OPEN_PATHS = frozenset({"/health", "/", "/view"})
"""What needs no key: whether the server lives, and pages, which browsers ask for without one."""
_TEXT_PATHS: Mapping[str, tuple[type[SampledRequest], type[ResponseBuilder]]] = {
    "completions": (CompletionRequest, CompletionResponseBuilder),
    "chat/completions": (ChatRequest, ChatResponseBuilder),
    "responses": (ResponsesRequest, ResponsesBuilder),
}
_LINGER = 2.0
"""Seconds in which the rest of a body that is too large is thrown away."""


def make_app(engine: AsyncLLM, settings: ServerSettings, *, is_guarded: bool = True) -> FastAPI:
    """Makes the application; without its guard where another process has checked who asks."""
    # No pages of FastAPI's own: they load scripts from elsewhere.
    app = FastAPI(
        title="h2okv",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        middleware=_layers(settings) if is_guarded else [],
    )
    app.state.handlers = handlers = Handlers(engine, settings)
    for path, (kind, make) in _TEXT_PATHS.items():
        answer = partial(handlers.answer, kind=kind, make=make)
        app.add_route(f"/v1/{path}", answer, methods=["POST"])
    app.add_route("/tokenize", handlers.tokenize, methods=["POST"])
    app.add_route("/detokenize", handlers.detokenize, methods=["POST"])
    _add_status(app, handlers)
    _add_pages(app, settings.view_page)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    return app


def guarded(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """Puts before an application what is before every server: log, CORS and guard."""
    for layer in reversed(_layers(settings)):
        app = layer.cls(app, *layer.args, **layer.kwargs)
    return app


def _layers(settings: ServerSettings) -> list[Middleware]:
    """What a request passes before it is read, outermost first."""
    layers = [Middleware(RequestGuard, settings=settings)]
    if settings.cors_origins:
        # Before the guard, for a browser asks without a key whether it may ask.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
        layers.insert(0, cors)
    return [Middleware(RequestLog), *layers] if settings.log_requests else layers


def _add_status(app: FastAPI, handlers: Handlers) -> None:
    described = {
        "id": handlers.settings.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "h2okv",
        # Not OpenAI's, but what clients of other servers look for.
        "max_model_len": handlers.engine.max_context,
    }

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [described]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        handlers.check_model(name)
        return JSONResponse(described)

    @app.get("/health")
    async def health() -> Response:
        if handlers.engine.is_healthy:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "stopped"}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(handlers.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/stats")
    async def stats() -> Response:
        return JSONResponse(handlers.stats(), headers={"Cache-Control": "no-store"})


def _add_pages(app: FastAPI, view_page: str | None) -> None:
    folder = files("h2okv.server") / "page"
    page = (folder / "index.html").read_text(encoding="utf-8")
    for name in ("style.css", "markdown.js", "kept.js", "chat.js"):
        page = page.replace(f"@{name}@", (folder / name).read_text(encoding="utf-8"))
    if view_page is None:
        page = page.replace('id="view"', 'id="view" hidden')

    @app.get("/")
    async def index() -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = _POLICY.format(inline=f"'nonce-{nonce}'", more="connect-src 'self'; img-src data:")
        headers = {**_PAGE_HEADERS, "Content-Security-Policy": policy}
        return HTMLResponse(page.replace("@NONCE@", nonce), headers=headers)

    if view_page is not None:
        # A recorded page is one file with its scripts inside, and asks for nothing.
        policy = _POLICY.format(inline="'unsafe-inline'", more="img-src data:")

        @app.get("/view")
        async def view() -> Response:
            headers = {**_PAGE_HEADERS, "Content-Security-Policy": policy}
            return HTMLResponse(view_page, headers=headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _no_route(request: Request, error: Exception) -> Response:
    """A path or a method that there is not."""
    assert isinstance(error, HTTPException)
    told = ApiError(
        error.status_code,
        f"{request.method} {request.url.path}: {error.detail}; there are /v1/chat/completions,"
        " /v1/completions, /v1/responses, /v1/models, /tokenize, /detokenize, /health, /stats,"
        " /metrics and /.",
        code="not_found" if error.status_code == 404 else None,
    )
    return told.response(**(error.headers or {}))


class RequestLog:
    """Writes a line to stderr for each request, without any of its text; pure ASGI."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands a request on, and tells what became of it."""
        status, begin = 0, time.monotonic()

        async def send_noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        state = scope.setdefault("state", {})
        try:
            await self.app(scope, receive, send_noted)
        finally:
            path = scope.get("raw_path", b"").decode("latin-1")  # not decoded, so one line
            who, seconds = (scope.get("client") or ("-",))[0], time.monotonic() - begin
            told = f"{who} {scope['method']} {path} {status or 'gone'} {seconds:.2f} s"
            metrics = state.get("metrics")
            write_remark(f"{time.strftime('%F %T')} {told}{metrics.note if metrics else ''}")


class RequestGuard:
    """Refuses requests by their head, and bodies by their size; pure ASGI.

    Starlette's own check of the host answers in plain text, and would not count bytes.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app, self.settings = app, settings
        self._bearer = HTTPBearer(auto_error=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a refused request itself, and hands on the others."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = await self._refusal(Request(scope))
        if refusal is not None:
            await _refuse(refusal, scope, receive, send)
            return
        left, started = self.settings.max_body, False

        async def receive_limited() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise BodyTooLargeError
            return message

        async def send_noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive_limited, send_noted)
        except BodyTooLargeError:
            if not started:
                await _refuse(self._too_large(), scope, receive, send)

    async def _refusal(self, request: Request) -> ApiError | None:
        """The error in a request's head, if there is one."""
        host, allowed = request.headers.get("host", ""), self.settings.allowed_hosts
        if allowed is not None and _host_name(host) not in allowed:
            return ApiError(
                403,
                f"Host {host!r} is not this server's; use its own address, or start it with an API"
                " key (H2OKV_API_KEY), which takes requests under any name.",
                code="wrong_host",
            )
        if request.url.path not in _OPEN_PATHS and not await self._has_key(request):
            return ApiError(
                401,
                "the API key is missing or wrong; send the header 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
            )
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.settings.max_body:
            return self._too_large()
        return None

    async def _has_key(self, request: Request) -> bool:
        if self.settings.api_key is None:
            return True
        given = await self._bearer(request)
        if given is None:
            return False
        # As bytes: headers are read as Latin-1, whatever the client meant. In constant time, so
        # that the time tells nothing of how much of a guess is right.
        sent = given.credentials.strip().encode("latin-1")
        return secrets.compare_digest(sent, self.settings.api_key.strip().encode())

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body has more than {self.settings.max_body} bytes; send less, or start the server"
            " with a larger --max-body.",
            code="body_too_large",
        )


async def _refuse(refusal: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers, then lets the client finish sending for a while, or it would not see the answer."""

    async def sending(message: Message) -> None:
        # The answer stays open while the rest of the body comes.
        await send({**message, "more_body": True} if "body" in message else message)

    await refusal.response(connection="close")(scope, receive, sending)
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _host_name(host: str) -> str:
    """The name in a ``Host`` header, without the port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower()
