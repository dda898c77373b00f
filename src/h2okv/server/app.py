"""The routes."""

from __future__ import annotations

import dataclasses
import secrets
from importlib.resources import files

from fastapi import APIRouter, FastAPI, Request
from openai.types import Model
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response

from h2okv.server.config import ServedEngine, ServerSettings
from h2okv.server.errors import ApiError
from h2okv.server.handlers import Order, Service, answer
from h2okv.server.middleware import Guard
from h2okv.server.protocol import ChatRequest, CompletionRequest, read_body
from h2okv.server.responses import ChatReply, CompletionReply
from h2okv.server.tokenization import off_the_loop


def openai_routes(service: Service) -> APIRouter:
    """Makes the routes."""
    router = APIRouter(prefix="/v1")

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        return await answer(service, request, lambda: _completion(service, request))

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(service, request, lambda: _chat(service, request))

    @router.get("/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @router.get("/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(_model(service))

    return router


async def _completion(service: Service, request: Request) -> Order:
    """Reads a request for completions."""
    body = await read_body(request, CompletionRequest)
    service.check_model(body.model)
    service.check_choices(body, len(body.prompts))
    params = body.params(service.settings)
    prompts = await off_the_loop(
        sum(map(len, body.prompts)), lambda: [service.prompts.read(one) for one in body.prompts]
    )
    reply = CompletionReply(
        body.model,
        service.tokens,
        body.wants_usage,
        echo=bool(body.echo),
        logprobs=body.logprobs is not None,
    )
    return Order(service.job(body, prompts, params), reply, bool(body.stream))


async def _chat(service: Service, request: Request) -> Order:
    """Reads a request for a chat's next message."""
    body = await read_body(request, ChatRequest)
    service.check_model(body.model)
    service.check_choices(body, 1)
    params = body.params(service.settings, service.prompts.chat_stops)
    turns = body.turns
    prompt = await off_the_loop(
        sum(len(turn["content"]) for turn in turns), lambda: service.prompts.read_chat(turns)
    )
    reply = ChatReply(
        body.model,
        service.tokens,
        body.wants_usage,
        logprobs=bool(body.logprobs),
        # The plain form has a space between "Assistant:" and the answer, which is not its own.
        strips_start=bool(service.prompts.chat_stops),
    )
    return Order(service.job(body, [prompt], params), reply, bool(body.stream))


def _model(service: Service) -> dict[str, object]:
    model = Model(
        id=service.settings.model_name, created=service.created, object="model", owned_by="h2okv"
    )
    # Not OpenAI's, but what clients of other servers look for.
    return {**model.model_dump(exclude_unset=True), "max_model_len": service.engine.max_context}


_PAGE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
# A recorded page is one file with its scripts inside, and asks for nothing.
_VIEW_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def status_routes(service: Service) -> APIRouter:
    """Makes the routes."""
    router = APIRouter()
    page = (files("h2okv.server") / "page" / "index.html").read_text(encoding="utf-8")

    @router.get("/health")
    async def health() -> Response:
        is_healthy = service.engine.is_healthy
        state = {"status": "ok" if is_healthy else "stopped"}
        return JSONResponse(state, 200 if is_healthy else 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/stats")
    async def stats() -> Response:
        engine = service.engine
        numbers = dataclasses.asdict(engine.stats())
        more = {
            "model": service.settings.model_name,
            "tokens_per_second": service.metrics.speed.per_second(),
            "row_budget": engine.row_budget,
            "max_context": engine.max_context,
            "max_prompt_tokens": engine.max_prompt_tokens,
        }
        return JSONResponse({**more, **numbers}, headers={"Cache-Control": "no-store"})

    @router.get("/")
    async def index() -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}';"
            " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = {**_PAGE_HEADERS, "Content-Security-Policy": policy}
        text = page.replace("@NONCE@", nonce)
        if service.settings.view_page is None:
            text = text.replace('id="view"', 'id="view" hidden')
        return HTMLResponse(text, headers=headers)

    if service.settings.view_page is not None:

        @router.get("/view")
        async def view() -> Response:
            headers = {**_PAGE_HEADERS, "Content-Security-Policy": _VIEW_POLICY}
            return HTMLResponse(service.settings.view_page, headers=headers)

    return router


def make_app(engine: ServedEngine, settings: ServerSettings) -> FastAPI:
    """Makes the application."""
    service = Service(engine, settings)
    # No pages of FastAPI's own: they load scripts from elsewhere.
    app = FastAPI(title="h2okv", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(openai_routes(service))
    app.include_router(status_routes(service))
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_middleware(Guard, settings=settings)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _no_route(request: Request, error: Exception) -> Response:
    """A path or a method that there is not."""
    assert isinstance(error, HTTPException)
    told = ApiError(
        error.status_code,
        f"{request.method} {request.url.path}: {error.detail}; there are /v1/chat/completions,"
        " /v1/completions, /v1/models, /health, /stats, /metrics and /.",
        code="not_found" if error.status_code == 404 else None,
    )
    response = told.response()
    response.headers.update(error.headers or {})
    return response
