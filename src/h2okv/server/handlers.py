"""Answers requests for text: checked, generated, sent whole or as events, and counted."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from fastapi import Request
from openai import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from h2okv.engine.outputs import OutputDelta
from h2okv.engine.sampling_params import SamplingParams
from h2okv.server.config import ServerSettings
from h2okv.server.errors import ApiError, as_api_error, invalid, timed_out
from h2okv.server.generation import PreparedRequest, generate, while_connected
from h2okv.server.metrics import Metrics, RequestMetrics
from h2okv.server.middleware import BodyTooLargeError
from h2okv.server.protocol import ChatRequest, CompletionRequest, SampledRequest, read_body
from h2okv.server.responses import (
    ChatResponseBuilder,
    CompletionResponseBuilder,
    ResponseBuilder,
    TokenText,
)
from h2okv.server.tokenization import Prompt, PromptReader, off_the_loop

if TYPE_CHECKING:
    from h2okv.engine.llm import AsyncLLM

_LAST_WORD = 5.0
"""Seconds in which a client must take the event that tells it of an error."""


class Handlers:
    """Handles requests for chats and completions.

    Attributes:
        metrics: Counted here.
    """

    def __init__(self, engine: AsyncLLM, settings: ServerSettings) -> None:
        self.engine, self.settings = engine, settings
        self.metrics = Metrics(engine)
        self._reader = PromptReader(engine.tokenizer, engine.max_prompt_tokens)
        self._tokens = TokenText(engine.tokenizer)

    async def completion(self, request: Request) -> Response:
        """Answers a request for completions."""
        return await self._answer(request, self._prepare_completion)

    async def chat(self, request: Request) -> Response:
        """Answers a request for a chat's next message."""
        return await self._answer(request, self._prepare_chat)

    def stats(self) -> dict[str, Any]:
        """The engine's numbers and limits."""
        engine = self.engine
        return {
            "model": self.settings.model_name,
            "tokens_per_second": self.metrics.speed.per_second(),
            "max_budget": engine.max_budget,
            "max_context": engine.max_context,
            "max_prompt_tokens": engine.max_prompt_tokens,
            **dataclasses.asdict(engine.stats()),
        }

    def check_model(self, name: str) -> None:
        """Refuses a model that is not here."""
        if name != self.settings.model_name:
            raise ApiError(
                404,
                f"model={name!r} is not served here; give {self.settings.model_name!r}.",
                param="model",
                code="model_not_found",
            )

    async def _answer(
        self, request: Request, prepare: Callable[[Request], Awaitable[ResponseBuilder]]
    ) -> Response:
        """Answers a request; whatever is wrong with it becomes an answer too."""
        metrics, timeout = RequestMetrics(self.metrics, request.url.path), self.settings.timeout
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                builder = await prepare(request)
                pieces = generate(self.engine, builder.request, metrics)
                if builder.request.streams:
                    events = _events(builder, pieces)
                    first = await while_connected(request.receive, anext(events))
                    return EventStream(first, events, metrics, deadline, timeout)
                whole = await while_connected(request.receive, _whole(builder, pieces))
        except ClientDisconnect:
            metrics.close("gone")
            return Response(status_code=499)
        except BodyTooLargeError:
            metrics.close("refused")
            raise
        except Exception as error:
            is_late = isinstance(error, TimeoutError)
            told = timed_out(timeout) if is_late else as_api_error(error)
            metrics.close(told.outcome)
            return told.response()
        metrics.close("ok")
        return Response(_json(whole), media_type="application/json")

    async def _prepare_completion(self, request: Request) -> ResponseBuilder:
        body = await read_body(request, CompletionRequest)
        self._check(body, len(body.prompt))
        params = body.params(self.settings)
        prompts = await off_the_loop(
            sum(map(len, body.prompt)), lambda: [self._reader.read(one) for one in body.prompt]
        )
        return CompletionResponseBuilder(
            self._prepared(body, prompts, params), body, self._tokens, echo=bool(body.echo)
        )

    async def _prepare_chat(self, request: Request) -> ResponseBuilder:
        body = await read_body(request, ChatRequest)
        self._check(body, 1)
        stops, turns = self._reader.chat_stops, body.turns
        params = body.params(self.settings, stops)
        prompt = await off_the_loop(
            sum(len(turn["content"]) for turn in turns), lambda: self._reader.read_chat(turns)
        )
        # The plain form has a space between "Assistant:" and the answer, which is not its own.
        return ChatResponseBuilder(
            self._prepared(body, [prompt], params), body, self._tokens, strips_start=bool(stops)
        )

    def _check(self, body: SampledRequest, prompts: int) -> None:
        """Refuses another model, and more outputs than a request may have."""
        self.check_model(body.model)
        wanted, most = prompts * max(body.n or 1, 1), self.settings.max_choices
        if wanted > most:
            raise invalid(
                f"prompts times n = {prompts} x {body.n or 1} = {wanted} outputs, but one request"
                f" may have {most}; send several requests.",
                "n" if prompts == 1 else "prompt",
            )

    def _prepared(
        self, body: SampledRequest, prompts: Sequence[Prompt], params: SamplingParams
    ) -> PreparedRequest:
        fitted = [self._fitted(body, prompt, params) for prompt in prompts]
        budget = None if body.h2o is None else body.h2o.budget(self.settings.budget)
        if budget is not None:
            most = self.engine.max_budget
            needed = max(budget.resolve(len(prompt.token_ids)).total for prompt in prompts)
            if needed > most:
                raise invalid(
                    f"h2o: sink + heavy + recent = {needed} tokens for this prompt, but this server"
                    f" keeps {most} at most; give less.",
                    "h2o",
                )
        return PreparedRequest(prompts, fitted, budget, bool(body.stream))

    def _fitted(
        self, body: SampledRequest, prompt: Prompt, params: SamplingParams
    ) -> SamplingParams:
        """The parameters with a number of new tokens that the context has room for."""
        context, length = self.engine.max_context, len(prompt.token_ids)
        most, wanted = self.settings.max_new_tokens, params.max_tokens
        room = most if context is None else context - length
        if room < (1 if wanted is None else wanted):
            raise invalid(
                f"a prompt of {length} tokens and max_tokens="
                f"{'at least 1' if wanted is None else wanted} are more than the model's context"
                f" of {context} tokens; shorten the prompt or ask for less.",
                "max_tokens" if length < (context or 0) else None,
                code="context_length_exceeded",
            )
        if wanted is not None:
            return params
        standard = body.default_max_tokens or most
        return dataclasses.replace(params, max_tokens=min(standard, room, most))


class EventStream(Response):
    """Server-sent events, which end at once when the client goes away."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: str,
        events: AsyncGenerator[str, None],
        metrics: RequestMetrics,
        deadline: float,
        timeout: float,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # The length of a stream is not known in advance.
        del self.headers["content-length"]
        self._first, self._events, self._metrics = first, events, metrics
        self._deadline, self._timeout = deadline, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        told: ApiError | None = None
        outcome = "ok"
        try:
            async with asyncio.timeout_at(self._deadline), aclosing(self._events):
                await while_connected(receive, self._send_all(send))
        except ClientDisconnect:
            outcome = "gone"
        except TimeoutError:
            told = timed_out(self._timeout)
        except asyncio.CancelledError:
            self._metrics.close("stopped")
            raise
        except Exception as error:
            told = as_api_error(error)
        self._metrics.close(outcome if told is None else told.outcome)
        # Its slots are free by now; a client that takes nothing more holds up nobody.
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD):
                last = "" if told is None else _event(json.dumps(told.body()))
                await _send_text(send, last, more_body=False)

    async def _send_all(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        await _send_text(send, self._first)
        async for event in self._events:
            await _send_text(send, event)
        await _send_text(send, _event("[DONE]"))


async def _send_text(send: Send, text: str, more_body: bool = True) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more_body})


async def _whole(builder: ResponseBuilder, pieces: AsyncGenerator[OutputDelta, None]) -> BaseModel:
    async with aclosing(pieces):
        async for piece in pieces:
            builder.take(piece)
    return builder.whole()


async def _events(
    builder: ResponseBuilder, pieces: AsyncGenerator[OutputDelta, None]
) -> AsyncGenerator[str, None]:
    """The events of a stream, as text; those of one piece together."""
    opening = [*builder.opening()]
    async with aclosing(pieces):
        async for piece in pieces:
            builder.take(piece)
            if chunks := [*opening, *builder.chunks(piece)]:
                yield "".join(_event(_json(chunk)) for chunk in chunks)
            opening = []
    yield "".join(_event(_json(chunk)) for chunk in (*opening, *builder.closing()))


def _event(data: str) -> str:
    return f"data: {data}\n\n"


def _json(model: BaseModel) -> str:
    # What OpenAI's own servers leave out is left out; null where they send null. They send null
    # in lists too, where the types do not have it, hence no warnings.
    return model.model_dump_json(exclude_unset=True, warnings=False)
