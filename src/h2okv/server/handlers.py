"""A request answered: whole or as events."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fastapi import Request
from openai import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from h2okv.engine.outputs import Piece
from h2okv.engine.sampling_params import SamplingParams
from h2okv.server.config import ServedEngine, ServerSettings
from h2okv.server.errors import ApiError, as_api_error, timed_out
from h2okv.server.generation import (
    ClientGoneError,
    Job,
    Progress,
    closed_after,
    pieces,
    while_present,
)
from h2okv.server.metrics import Metrics
from h2okv.server.middleware import BodyTooLargeError
from h2okv.server.protocol import SampledRequest
from h2okv.server.responses import Reply, TokenText
from h2okv.server.tokenization import Prompt, PromptReader


class Service:
    """An engine, what is counted of it, and the limits.

    Attributes:
        metrics: Counted here.
        prompts: Turns prompts into tokens.
        tokens: Turns tokens into text.
        created: When the service began, in seconds since 1970.
    """

    def __init__(self, engine: ServedEngine, settings: ServerSettings) -> None:
        self.engine, self.settings = engine, settings
        self.metrics = Metrics(engine)
        self.prompts = PromptReader(engine.tokenizer, engine.max_prompt_tokens)
        self.tokens = TokenText(engine.tokenizer)
        self.created = int(time.time())

    def check_model(self, name: str) -> None:
        """Refuses a model that is not here.

        Raises:
            ApiError: If it is not.
        """
        if name != self.settings.model_name:
            raise ApiError(
                404,
                f"model={name!r} is not served here; give {self.settings.model_name!r}.",
                param="model",
                code="model_not_found",
            )

    def check_choices(self, body: SampledRequest, prompts: int) -> None:
        """Refuses a request for more outputs than one may have."""
        wanted, most = prompts * max(body.n or 1, 1), self.settings.max_choices
        if wanted > most:
            raise ApiError(
                400,
                f"prompts times n = {prompts} x {body.n or 1} = {wanted} outputs, but one request"
                f" may have {most}; send several requests.",
                param="n" if prompts == 1 else "prompt",
                code="invalid_value",
            )

    def job(self, body: SampledRequest, prompts: Sequence[Prompt], params: SamplingParams) -> Job:
        """Puts together what the engine is asked for."""
        fitted = [self._fitted(body, prompt, params) for prompt in prompts]
        budget = None if body.h2o is None else body.h2o.budget(self.settings.budget)
        if budget is not None:
            row = self.engine.row_budget
            needed = max(budget.resolve(len(prompt.token_ids)).total for prompt in prompts)
            if needed > row:
                raise ApiError(
                    400,
                    f"h2o: sink + heavy + recent = {needed} tokens for this prompt, but a row of"
                    f" this server holds {row}; give less.",
                    param="h2o",
                    code="invalid_value",
                )
        return Job(prompts, fitted, budget)

    def _fitted(
        self, body: SampledRequest, prompt: Prompt, params: SamplingParams
    ) -> SamplingParams:
        """The parameters with a number of new tokens that the context has room for."""
        context, length = self.engine.max_context, len(prompt.token_ids)
        most = self.settings.max_new_tokens
        room = most if context is None else context - length
        wanted = params.max_tokens
        if room < (1 if wanted is None else wanted):
            raise ApiError(
                400,
                f"a prompt of {length} tokens and max_tokens="
                f"{'at least 1' if wanted is None else wanted} are more than the model's context"
                f" of {context} tokens; shorten the prompt or ask for less.",
                param="max_tokens" if length < (context or 0) else None,
                code="context_length_exceeded",
            )
        if wanted is None:
            standard = body.default_max_tokens or most
            return dataclasses.replace(params, max_tokens=min(standard, room, most))
        return params


_LAST_WORD = 5.0
"""Seconds in which a client must take the event that tells it of an error."""


@dataclass(frozen=True)
class Order:
    """A request that was checked.

    Attributes:
        job: What the engine is asked for.
        reply: How it is answered.
        streams: Whether as it comes.
    """

    job: Job
    reply: Reply
    streams: bool


class Account:
    """Counts one request, once."""

    def __init__(self, service: Service, endpoint: str) -> None:
        self._metrics, self._endpoint = service.metrics, endpoint
        self._begin = time.monotonic()

    def close(self, outcome: str) -> None:
        """Notes what became of it."""
        self._metrics.requests.labels(self._endpoint, outcome).inc()
        seconds = time.monotonic() - self._begin
        self._metrics.request_seconds.labels(self._endpoint).observe(seconds)


async def answer(
    service: Service, request: Request, prepare: Callable[[], Awaitable[Order]]
) -> Response:
    """Answers a request; whatever is wrong with it becomes an answer too."""
    account = Account(service, request.url.path)
    deadline = asyncio.get_running_loop().time() + service.settings.timeout
    try:
        async with asyncio.timeout_at(deadline):
            order = await prepare()
            running = _Run(service, order)
            if order.streams:
                events = _events(running)
                first = await while_present(request.receive, _first(events))
                return EventStream(first, events, account, deadline, service.settings.timeout)
            whole = await while_present(request.receive, running.whole())
    except (ClientGoneError, ClientDisconnect):
        account.close("gone")
        return Response(status_code=499)
    except BodyTooLargeError:
        account.close("refused")
        raise
    except Exception as error:
        is_late = isinstance(error, TimeoutError)
        told = timed_out(service.settings.timeout) if is_late else as_api_error(error)
        account.close(told.outcome)
        return told.response()
    account.close("ok")
    return Response(_json(whole), media_type="application/json")


class EventStream(Response):
    """Server-sent events, which end at once when the client goes away."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: str,
        events: AsyncIterator[str],
        account: Account,
        deadline: float,
        timeout: float,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # The length of a stream is not known in advance.
        del self.headers["content-length"]
        self._first, self._events, self._account = first, events, account
        self._deadline, self._timeout = deadline, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        told: ApiError | None = None
        outcome = "ok"
        try:
            async with asyncio.timeout_at(self._deadline), closed_after(self._events):
                await while_present(receive, self._send_all(send))
        except ClientGoneError:
            outcome = "gone"
        except TimeoutError:
            told = timed_out(self._timeout)
        except asyncio.CancelledError:
            self._account.close("stopped")
            raise
        except Exception as error:
            told = as_api_error(error)
        if told is not None:
            outcome = told.outcome
        self._account.close(outcome)
        # Its row is free by now; a client that takes nothing more holds up nobody.
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD):
                last = b"" if told is None else _event(json.dumps(told.body())).encode()
                await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_all(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        await self._send(send, self._first)
        async for event in self._events:
            await self._send(send, event)
        await self._send(send, _event("[DONE]"))

    async def _send(self, send: Send, text: str) -> None:
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


class _Run:
    """A job under way."""

    def __init__(self, service: Service, order: Order) -> None:
        self.service, self.reply = service, order.reply
        self.progress = Progress(order.job)

    async def pieces(self) -> AsyncIterator[Piece]:
        stream = pieces(self.service.engine, self.progress.job, self.service.metrics)
        async with closed_after(stream):
            async for piece in stream:
                self.progress.add(piece)
                yield piece

    async def whole(self) -> BaseModel:
        stream = self.pieces()
        async with closed_after(stream):
            async for _ in stream:
                pass
        return self.reply.whole(self.progress)


async def _events(run: _Run) -> AsyncIterator[str]:
    """The events of a stream, as text; those of one piece together."""
    reply, progress = run.reply, run.progress
    opening = [*reply.opening(progress)]
    stream = run.pieces()
    async with closed_after(stream):
        async for piece in stream:
            chunks = [*opening, *reply.chunks(piece, progress)]
            opening = []
            if chunks:
                yield "".join(_event(_json(chunk)) for chunk in chunks)
    yield "".join(_event(_json(chunk)) for chunk in (*opening, *reply.closing(progress)))


async def _first(events: AsyncIterator[str]) -> str:
    return await anext(events)


def _event(data: str) -> str:
    return f"data: {data}\n\n"


def _json(model: BaseModel) -> str:
    # What OpenAI's own servers leave out is left out; null where they send null. They send null
    # in lists too, where the types do not have it, hence no warnings.
    return model.model_dump_json(exclude_unset=True, warnings=False)
