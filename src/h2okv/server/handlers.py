"""Handlers of the routes: check a request, generate, send one response or events, and count."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Iterable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi import Request
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from h2okv.budget import Budget
from h2okv.engine.detokenizer import TokenText
from h2okv.engine.llm import AsyncLLM
from h2okv.engine.sampling_params import SamplingParams
from h2okv.prompts.images import EncodedPrompt
from h2okv.prompts.readers import FieldError
from h2okv.server.config import ServerSettings
from h2okv.server.errors import ApiError, as_api_error, invalid, timed_out
from h2okv.server.metrics import Metrics, RequestMetrics
from h2okv.server.protocol import SampledRequest, read_body
from h2okv.server.responses import ResponseBuilder
from h2okv.server.structured import CallSyntax
from h2okv.server.tokenization import PromptReader, off_the_loop, work_size

Result = TypeVar("Result")
_Job = tuple[ResponseBuilder, list[SamplingParams], Budget | None]
"""A response builder, the parameters of each prompt, and the budget of all of them."""

_MAX_OUTPUTS = 128
_LAST_WORD = 5.0
"""Seconds in which a client must accept the event of an error."""


class Handlers:
    """State of all routes."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings) -> None:
        self.engine, self.settings = engine, settings
        self.metrics = Metrics(engine)
        encoder = engine.image_encoder
        longest, pin = engine.limits.max_prompt_tokens, settings.pin
        self.reader = PromptReader(engine.tokenizer, longest, encoder, pin=pin)
        self.tokens = TokenText(engine.tokenizer)
        self.call_syntax = CallSyntax.of(engine.tokenizer)

    @property
    def max_model_len(self) -> int:
        """Length of prompt that is never too long, for clients."""
        longest = self.engine.limits.max_prompt_tokens
        return min(longest, self.engine.limits.max_context or longest)

    def stats(self) -> dict[str, Any]:
        limits = self.engine.limits
        return {
            "model": self.settings.model_name,
            "tokens_per_second": self.metrics.tokens_per_second(),
            "max_budget": self.engine.max_budget,
            "max_context": limits.max_context,
            "max_prompt_tokens": limits.max_prompt_tokens,
            "max_new_tokens": self.settings.max_new_tokens,
            "sampling": self.engine.model_sampling,
            **dataclasses.asdict(self.engine.stats()),
            "agreement": self.engine.agreement().to_dict(),
        }

    def check_model(self, name: str | None) -> None:
        model_name = self.settings.model_name
        if name not in (None, model_name):
            message = f"model={name!r} is not served here; give {model_name!r}."
            raise ApiError(404, message, "model", "model_not_found")


class TextRoute:
    """A route that generates, as an ASGI application; errors become responses too."""

    def __init__(self, handlers: Handlers, kind: type[SampledRequest]) -> None:
        self.handlers, self.kind = handlers, kind
        self.engine, self.settings = handlers.engine, handlers.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, timeout = Request(scope, receive), self.settings.timeout
        metrics = RequestMetrics(self.handlers.metrics, scope["path"])
        request.state.metrics = metrics  # for the log
        stream, last_events = _EventStream(send), b""
        response = None
        try:
            async with asyncio.timeout(timeout):
                job = await self._prepare(request)
                response = await while_connected(receive, self._generate(job, stream, metrics))
            outcome = "ok"
        except ClientDisconnect:
            outcome, response = "gone", Response(status_code=499)
        except asyncio.CancelledError:
            metrics.close("stopped")
            raise
        except Exception as error:
            is_late = isinstance(error, TimeoutError)
            api_error = timed_out(timeout) if is_late else as_api_error(error)
            outcome, response = api_error.outcome, api_error.response()
            last_events = _events([api_error.body()])
        metrics.close(outcome)
        if response is not None and not stream.has_begun:
            await response(scope, receive, send)
            return
        # Its slots are free by now; a client that stops reading delays no one.
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD):
                await stream.write(last_events, more_body=False)

    async def _prepare(self, request: Request) -> _Job:
        """Check a request and tokenize its prompts; generates nothing yet."""
        body, size = await read_body(request, self.kind, self.settings.max_body)
        self.handlers.check_model(body.model)
        texts, params = body.prompts, body.params(self.engine.model_sampling)
        syntax = self.handlers.call_syntax
        try:
            grammar = await off_the_loop(size, lambda: body.grammar(syntax))
        except ValueError as error:
            raise body.refusal(error) from error
        params = dataclasses.replace(params, grammar=grammar)
        if body.may_call and syntax.has_special_markers:  # the text would be without them
            params = dataclasses.replace(params, skip_special_tokens=False)
        if (count := len(texts) * params.n) > _MAX_OUTPUTS:
            problem = f"must be at most {_MAX_OUTPUTS}, got {count}; send several requests."
            raise invalid(f"prompts times n {problem}", "n" if len(texts) == 1 else "prompt")
        read, tokens = self.handlers.reader.read, self.handlers.tokens
        size = work_size(size, texts)
        prompts = await off_the_loop(size, lambda: [read(text) for text in texts])
        if body.h2o.kept_every is not None:  # the response will contain their texts
            vocabulary = {token for prompt in prompts for token in prompt.token_ids}
            await off_the_loop(size, lambda: [tokens.data(token) for token in vocabulary])
        budget = body.h2o.budget(self.settings.cache)
        if budget is not None:
            needed = max(budget.resolve(len(prompt.token_ids)).total for prompt in prompts)
            if needed > (limit := self.engine.max_budget):
                problem = f"h2o: sink + heavy + recent = {needed} tokens for this prompt, but this"
                raise invalid(f"{problem} server keeps {limit} at most; give less.", "h2o")
        fitted = [self._fitted(body, prompt, params) for prompt in prompts]
        return body.builder(body, prompts, tokens), fitted, budget

    def _fitted(
        self, body: SampledRequest, prompt: EncodedPrompt, params: SamplingParams
    ) -> SamplingParams:
        """Return the parameters with the prompt's stops, and ``max_tokens`` within all limits."""
        limits, length = self.engine.limits, len(prompt.token_ids)
        limit, max_tokens = self.settings.max_new_tokens, params.max_tokens
        name, room = body.field_of("max_tokens"), limits.room(length, limit)
        if max_tokens is not None and max_tokens > limit:
            message = f"{name}={max_tokens} is more than this server writes; give {limit} at most."
            raise invalid(message, name)
        try:
            num_new = 1 if max_tokens is None else max_tokens
            remedy = f"shorten it or lower {name}"
            limits.check_length(length, num_new, "prompt", remedy)
        except FieldError as error:
            field = "prompt" if not length else name if room > 0 else None
            raise invalid(str(error), field, error.code) from error
        if max_tokens is None:
            max_tokens = min(body.default_max_tokens or limit, room)
        stops = (*params.stop, *prompt.stops)
        return dataclasses.replace(params, max_tokens=max_tokens, stop=stops)

    async def _generate(
        self, job: _Job, stream: _EventStream, metrics: RequestMetrics
    ) -> Response | None:
        """Write the events of a stream as they come, or return the complete response."""
        builder, params, budget = job
        body = builder.body
        pending = [*builder.opening()] if body.stream else []

        async def generate_one(number: int, prompt_params: SamplingParams) -> None:
            prompt, every = builder.prompts[number], body.h2o.kept_every
            generate = self.engine.generate(
                prompt, prompt_params, budget=budget, kept_every=every,
                verify=body.h2o.verify or False, kind="tools" if body.may_call else body.kind,
            )  # fmt: skip
            async with aclosing(generate) as deltas:
                async for delta in deltas:
                    # Outputs are numbered across all prompts.
                    delta = dataclasses.replace(delta, index=number * prompt_params.n + delta.index)
                    if delta.verified is not None:
                        builder.verified[number] = delta.verified
                        continue
                    metrics.take(delta)
                    delta = builder.take(delta)
                    # One write for all events of a delta.
                    if body.stream and (chunks := [*pending, *builder.chunks(delta)]):
                        pending.clear()
                        await stream.write(_events(chunks))

        try:
            async with asyncio.TaskGroup() as group:
                for number, prompt_params in enumerate(params):
                    group.create_task(generate_one(number, prompt_params))
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            raise body.refusal(first) if isinstance(first, ValueError) else first from None
        if not body.stream:
            return Response(_json(builder.response()), media_type="application/json")
        done = b"data: [DONE]\n\n" if builder.says_done else b""
        await stream.write(_events([*pending, *builder.closing()]) + done)
        return None


class _EventStream:
    """Server-sent events; the response starts with the first one."""

    _HEADERS = (
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    )

    def __init__(self, send: Send) -> None:
        self._send, self.has_begun, self._lock = send, False, asyncio.Lock()

    async def write(self, data: bytes, more_body: bool = True) -> None:
        async with self._lock:  # each prompt has its own task
            if not self.has_begun:
                self.has_begun = True
                start = {"type": "http.response.start", "status": 200}
                await self._send({**start, "headers": [*self._HEADERS]})
            body = {"type": "http.response.body", "body": data, "more_body": more_body}
            await self._send(body)


def _events(values: Iterable[dict[str, Any]]) -> bytes:
    events = b""
    for value in values:
        name = f"event: {value['type']}\n".encode() if "type" in value else b""
        events += name + b"data: " + _json(value) + b"\n\n"
    return events


def _json(value: Any) -> bytes:
    return to_json(value, inf_nan_mode="null")


async def while_connected(receive: Receive, work: Awaitable[Result]) -> Result:
    """Await ``work``; cancel it and raise `ClientDisconnect` if the client disconnects."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(leave())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
