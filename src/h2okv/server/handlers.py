"""Answers requests for text: checked, generated, sent whole or as events, and counted."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from h2okv.engine.outputs import OutputDelta
from h2okv.engine.sampling_params import SamplingParams
from h2okv.server.config import ServerSettings
from h2okv.server.errors import ApiError, BodyTooLargeError, as_api_error, invalid, timed_out
from h2okv.server.metrics import Metrics, RequestMetrics
from h2okv.server.protocol import (
    DetokenizeRequest,
    SampledRequest,
    TokenizeRequest,
    read_body,
)
from h2okv.server.responses import ResponseBuilder, TokenText
from h2okv.server.tokenization import ANY_LENGTH, Prompt, PromptReader, off_the_loop

if TYPE_CHECKING:
    from h2okv.engine.llm import AsyncLLM

Result = TypeVar("Result")
Deltas = AsyncGenerator[OutputDelta, None]

_LAST_WORD = 5.0
"""Seconds in which a client must take the event that tells it of an error."""


class Handlers:
    """Handles requests for chats and completions."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings) -> None:
        self.engine, self.settings = engine, settings
        self.metrics = Metrics(engine)
        self._reader = PromptReader(engine.tokenizer, engine.max_prompt_tokens)
        self._any_length = PromptReader(engine.tokenizer, ANY_LENGTH)
        self._tokens = TokenText(engine.tokenizer)

    def stats(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "model": self.settings.model_name,
            "tokens_per_second": self.metrics.tokens_per_second(),
            "max_budget": engine.max_budget,
            "max_context": engine.max_context,
            "max_prompt_tokens": engine.max_prompt_tokens,
            "max_new_tokens": self.settings.max_new_tokens,
            "sampling": engine.model_sampling,
            **dataclasses.asdict(engine.stats()),
        }

    def check_model(self, name: str | None) -> None:
        """Refuses a model that is not here."""
        if name is not None and name != self.settings.model_name:
            raise ApiError(
                404,
                f"model={name!r} is not served here; give {self.settings.model_name!r}.",
                param="model",
                code="model_not_found",
            )

    async def tokenize(self, request: Request) -> Response:
        """Tells the tokens of a text or a chat, of any length."""
        body = await read_body(request, TokenizeRequest)
        self.check_model(body.model)
        reader, special = self._any_length, body.add_special_tokens
        size = len(await request.body())
        if body.messages:
            turns = [one.turn for one in body.messages]
            found = await off_the_loop(size, lambda: reader.read_chat(turns).token_ids)
        else:
            text = body.prompt or ""
            found = await off_the_loop(size, lambda: reader.encode(text, special=special))
        strings = [self._tokens.text(token) for token in found] if body.return_token_strs else None
        told = {"count": len(found), "max_model_len": self.engine.max_context, "tokens": found}
        return JSONResponse({**told, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        """Tells the text of tokens."""
        body = await read_body(request, DetokenizeRequest)
        self.check_model(body.model)
        tokens, reader = body.tokens, self._any_length
        found = await off_the_loop(len(tokens), lambda: reader.read(tokens).text if tokens else "")
        return JSONResponse({"prompt": found})

    async def answer(
        self, request: Request, kind: type[SampledRequest], make: type[ResponseBuilder]
    ) -> Response:
        """Answers a request; whatever is wrong with it becomes an answer too."""
        metrics, timeout = RequestMetrics(self.metrics, request.url.path), self.settings.timeout
        request.state.metrics = metrics  # for the log
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                builder, deltas = await self._prepare(request, kind, make, metrics)
                if builder.body.stream:
                    events = _events(builder, deltas)
                    first = await while_connected(request.receive, anext(events))
                    last = b"data: [DONE]\n\n" if make.says_done else b""
                    return EventStream(first, events, last, metrics, deadline, timeout)
                whole = await while_connected(request.receive, _whole(builder, deltas))
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

    async def _prepare(
        self,
        request: Request,
        kind: type[SampledRequest],
        make: type[ResponseBuilder],
        metrics: RequestMetrics,
    ) -> tuple[ResponseBuilder, Deltas]:
        """Checks a request and reads its prompts; nothing is generated yet."""
        body: Any = await read_body(request, kind)
        self.check_model(body.model)
        read: Callable[[Any], Prompt] = self._reader.read
        texts, stops = body.prompts, tuple[str, ...]()
        if body.is_chat:
            read, stops = self._reader.read_chat, self._reader.chat_stops
        num_outputs, most = len(texts) * max(body.n or 1, 1), self.settings.max_choices
        if num_outputs > most:
            raise invalid(
                f"prompts times n = {len(texts)} x {body.n or 1} = {num_outputs} outputs, but one"
                f" request may have {most}; send several requests.",
                "n" if len(texts) == 1 else "prompt",
            )
        params = body.params(self.settings.max_new_tokens, self.engine.model_sampling)
        params = dataclasses.replace(params, stop=(*params.stop, *stops))
        size = len(await request.body())
        prompts = await off_the_loop(size, lambda: [read(text) for text in texts])
        if body.kept_every is not None:  # the answer will tell their texts
            tokens = {token for prompt in prompts for token in prompt.token_ids}
            await off_the_loop(size, lambda: [self._tokens.data(token) for token in tokens])
        # The plain form has a space between "Assistant:" and the answer, which is not its own.
        builder = make(body, prompts, self._tokens, strips_start=bool(stops))
        return builder, self._generate(body, prompts, params, metrics)

    def _generate(
        self,
        body: SampledRequest,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        metrics: RequestMetrics,
    ) -> Deltas:
        """Runs all prompts side by side; outputs are counted through all of them."""
        budget = None if body.h2o is None else body.h2o.budget(self.settings.budget)
        if budget is not None:
            needed = max(budget.resolve(len(prompt.token_ids)).total for prompt in prompts)
            if needed > self.engine.max_budget:
                raise invalid(
                    f"h2o: sink + heavy + recent = {needed} tokens for this prompt, but this server"
                    f" keeps {self.engine.max_budget} at most; give less.",
                    "h2o",
                )
        fitted = [self._fitted(body, prompt, params) for prompt in prompts]

        async def one(number: int) -> Deltas:
            tokens, own = prompts[number].token_ids, fitted[number]
            generate = self.engine.generate(tokens, own, budget=budget, kept_every=body.kept_every)
            async with aclosing(generate) as stream:
                async for delta in stream:
                    delta = dataclasses.replace(delta, index=number * own.n + delta.index)
                    metrics.take(delta, number)
                    yield delta

        streams = [one(number) for number in range(len(prompts))]
        return streams[0] if len(streams) == 1 else _merged(streams)

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


async def while_connected(receive: Receive, work: Awaitable[Result]) -> Result:
    """Does some work, and drops it at once with `ClientDisconnect` if the client goes away."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _merged(streams: Sequence[Deltas]) -> Deltas:
    """Hands on what any of several streams yields, until all have ended."""
    # None says that a stream has ended.
    arrived: asyncio.Queue[OutputDelta | Exception | None] = asyncio.Queue()

    async def pump(stream: Deltas) -> None:
        ending: Exception | None = None
        try:
            async with aclosing(stream):
                async for delta in stream:
                    arrived.put_nowait(delta)
        except Exception as error:
            ending = error
        arrived.put_nowait(ending)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, which end at once when the client goes away."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        last: bytes,
        metrics: RequestMetrics,
        deadline: float,
        timeout: float,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # The length of a stream is not known in advance.
        del self.headers["content-length"]
        self._first, self._events, self._last, self._metrics = first, events, last, metrics
        self._deadline, self._timeout = deadline, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
                last = b"" if told is None else _event(told.body())
                await _send_body(send, last, more_body=False)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await _send_body(send, self._first)
        async for event in self._events:
            await _send_body(send, event)
        await _send_body(send, self._last)


async def _send_body(send: Send, body: bytes, more_body: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more_body})


async def _whole(builder: ResponseBuilder, deltas: Deltas) -> dict[str, Any]:
    async with aclosing(deltas):
        async for delta in deltas:
            builder.take(delta)
    return builder.whole()


async def _events(builder: ResponseBuilder, deltas: Deltas) -> AsyncGenerator[bytes, None]:
    """The events of a stream; those of one delta together."""
    opening = [*builder.opening()]
    async with aclosing(deltas):
        async for delta in deltas:
            builder.take(delta)
            if chunks := [*opening, *builder.chunks(delta)]:
                yield b"".join(map(_event, chunks))
            opening = []
    yield b"".join(map(_event, (*opening, *builder.closing())))


def _event(value: dict[str, Any]) -> bytes:
    name = f"event: {value['type']}\n".encode() if "type" in value else b""
    return name + b"data: " + _json(value) + b"\n\n"


def _json(value: Any) -> bytes:
    return to_json(value, inf_nan_mode="null")
