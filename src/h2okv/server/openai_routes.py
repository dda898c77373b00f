"""The routes of OpenAI's API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from openai.types import Model
from starlette.responses import JSONResponse, Response

from h2okv.server.answering import Order, answer
from h2okv.server.chat_reply import ChatReply
from h2okv.server.chat_request import ChatRequest
from h2okv.server.completion_reply import CompletionReply
from h2okv.server.completion_request import CompletionRequest
from h2okv.server.prompt import off_the_loop
from h2okv.server.request_body import read_body
from h2okv.server.service import Service


def openai_routes(service: Service) -> APIRouter:
    """Makes the routes.

    Args:
        service: What they work with.

    Returns:
        The router.
    """
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
