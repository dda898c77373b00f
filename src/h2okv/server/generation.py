"""Asks the engine for a request's outputs."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from starlette.types import Receive

from h2okv.config import Budget
from h2okv.engine.outputs import Completion, Piece, PromptRead
from h2okv.engine.sampling_params import SamplingParams
from h2okv.server.config import ServedEngine
from h2okv.server.metrics import Metrics, Stopwatch
from h2okv.server.tokenization import Prompt

Result = TypeVar("Result")
Item = TypeVar("Item")


class ClientGoneError(Exception):
    """The client closed its connection, so nobody waits for the answer."""


async def while_present(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Does some work, and drops it at once if the client goes away."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_departure(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def closed_after(stream: AsyncIterator[Item]) -> AsyncIterator[AsyncIterator[Item]]:
    """Closes an asynchronous generator when the block is left, whichever way."""
    try:
        yield stream
    finally:
        if hasattr(stream, "aclose"):
            await cast("AsyncGenerator[Item, None]", stream).aclose()


@dataclass(frozen=True)
class Job:
    """One or several prompts, each with its own number of outputs.

    Attributes:
        prompts: What is read.
        params: One for each prompt.
        budget: For all; ``None`` for the engine's.
    """

    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]
    budget: Budget | None

    @property
    def choices_per_prompt(self) -> int:
        """Outputs of each prompt, ``n``."""
        return self.params[0].n

    @property
    def num_choices(self) -> int:
        """Outputs of all prompts."""
        return self.choices_per_prompt * len(self.prompts)


@dataclass
class Progress:
    """What a job has got so far; mutated by `add`.

    Attributes:
        job: What was asked for.
        read: What is known of each prompt that was read.
        completions: One for each choice, prompt by prompt.
    """

    job: Job
    read: dict[int, PromptRead] = field(default_factory=dict)
    completions: list[Completion] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Makes room for all choices."""
        self.completions = [Completion(index) for index in range(self.job.num_choices)]

    def add(self, piece: Piece) -> None:
        """Takes a piece whose index is that of the choice in the whole job."""
        if piece.prompt is not None:
            self.read[piece.index // self.job.choices_per_prompt] = piece.prompt
        self.completions[piece.index].add(piece)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt.token_ids) for prompt in self.job.prompts)

    @property
    def reused_tokens(self) -> int:
        """Of these, the ones that came from a saved prefix."""
        return sum(read.num_reused for read in self.read.values())

    @property
    def new_tokens(self) -> int:
        """Tokens of all outputs, those that end them included."""
        return sum(len(completion.token_ids) for completion in self.completions)


async def pieces(engine: ServedEngine, job: Job, metrics: Metrics) -> AsyncIterator[Piece]:
    """Runs a job; all of its prompts wait and run side by side."""
    streams = [_one_prompt(engine, job, number, metrics) for number in range(len(job.prompts))]
    merged = streams[0] if len(streams) == 1 else _merged(streams)
    async with closed_after(merged):
        async for piece in merged:
            yield piece


async def _one_prompt(
    engine: ServedEngine, job: Job, number: int, metrics: Metrics
) -> AsyncIterator[Piece]:
    """Generates for one prompt."""
    first_choice = number * job.choices_per_prompt
    watch = Stopwatch(metrics)
    prompt, params = job.prompts[number], job.params[number]
    stream = engine.generate(prompt.token_ids, params, budget=job.budget)
    async with closed_after(stream):
        async for piece in stream:
            watch.note(piece)
            yield dataclasses.replace(piece, index=first_choice + piece.index)


async def _merged(streams: Sequence[AsyncIterator[Piece]]) -> AsyncIterator[Piece]:
    """Hands on what any of several streams yields, until all have ended."""
    # None says that a stream has ended.
    arrived: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()

    async def pump(stream: AsyncIterator[Piece]) -> None:
        try:
            async with closed_after(stream):
                async for piece in stream:
                    arrived.put_nowait(piece)
        except Exception as error:
            arrived.put_nowait(error)
        else:
            arrived.put_nowait(None)

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
