"""Asks the engine for a request's outputs, for as long as the client is there."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from h2okv.config import Budget
from h2okv.engine.outputs import OutputDelta
from h2okv.engine.sampling_params import SamplingParams
from h2okv.server.metrics import RequestMetrics
from h2okv.server.tokenization import Prompt

if TYPE_CHECKING:
    from h2okv.engine.llm import AsyncLLM

Result = TypeVar("Result")


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


@dataclass(frozen=True)
class PreparedRequest:
    """A request that was checked, as the engine takes it.

    Attributes:
        prompts: One or several.
        params: One for each prompt.
        budget: Of all prompts; ``None`` for the engine's.
        streams: Whether the answer is sent as it comes.
    """

    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]
    budget: Budget | None
    streams: bool

    @property
    def choices_per_prompt(self) -> int:
        """Outputs of each prompt, ``n``."""
        return self.params[0].n

    @property
    def num_choices(self) -> int:
        """Outputs of all prompts."""
        return self.choices_per_prompt * len(self.prompts)


async def generate(
    engine: AsyncLLM, request: PreparedRequest, metrics: RequestMetrics
) -> AsyncGenerator[OutputDelta, None]:
    """Runs all prompts side by side; indexes count the choices of the whole request."""
    streams = [_one_prompt(engine, request, number) for number in range(len(request.prompts))]
    async with aclosing(streams[0] if len(streams) == 1 else _merged(streams)) as merged:
        async for piece in merged:
            metrics.take(piece, piece.index // request.choices_per_prompt)
            yield piece


async def _one_prompt(
    engine: AsyncLLM, request: PreparedRequest, number: int
) -> AsyncGenerator[OutputDelta, None]:
    first_choice = number * request.choices_per_prompt
    prompt, params = request.prompts[number], request.params[number]
    stream = engine.generate(prompt.token_ids, params, budget=request.budget)
    async with aclosing(cast("AsyncGenerator[OutputDelta, None]", stream)) as pieces:
        async for piece in pieces:
            yield dataclasses.replace(piece, index=first_choice + piece.index)


async def _merged(
    streams: Sequence[AsyncGenerator[OutputDelta, None]],
) -> AsyncGenerator[OutputDelta, None]:
    """Hands on what any of several streams yields, until all have ended."""
    # None says that a stream has ended.
    arrived: asyncio.Queue[OutputDelta | Exception | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[OutputDelta, None]) -> None:
        ending: Exception | None = None
        try:
            async with aclosing(stream):
                async for piece in stream:
                    arrived.put_nowait(piece)
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
