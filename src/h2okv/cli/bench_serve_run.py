"""The servers of `h2okv bench serve`, one after another, each under every load."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from h2okv.benchmarking.load.child_server import ChildServer, Command
from h2okv.benchmarking.load.measurement import Load, Measured, put_under, warm_up
from h2okv.benchmarking.load.openai_target import Endpoint, OpenAITarget
from h2okv.benchmarking.load.outcome import Outcome
from h2okv.benchmarking.load.summary import summarize
from h2okv.benchmarking.load.workload import Cut, Mix, Workload, by_ratio
from h2okv.cli.bench_progress import BenchProgress
from h2okv.cli.serve import KEY_VARIABLE
from h2okv.integration.loading import describe

# Common English in a common tokenizer, where a server does not count for us.
_USUAL_RATIO = 4.0
# Characters of the first request: enough to tell how many are a token, and no long prompt.
_PROBE = 600


@dataclass(frozen=True)
class Wanted:
    """All that was asked for, checked.

    Attributes:
        servers: Those to start, and those that run.
        model: What the user calls the model.
        tokenizer_of: The model whose tokenizer cuts prompts; ``None`` to go by the server's count.
        texts: The questions.
        mix: The lengths.
        loads: The loads of each server.
        is_chat: Whether to send chat messages.
        extra: Further fields of every request.
        warmup: Requests before the first load of a server.
        timeout: Seconds that a request may take.
    """

    servers: tuple[Command | Endpoint, ...]
    model: str
    tokenizer_of: str | None
    texts: Sequence[str]
    mix: Mix
    loads: tuple[Load, ...]
    is_chat: bool
    extra: Mapping[str, Any]
    warmup: int
    timeout: float


class ServeRun:
    """Measures; what was measured before Ctrl-C is not lost.

    Args:
        wanted: What to do.
        keep: Gets each row as soon as it is there.
        progress: Shows how far it is.
    """

    Keep: TypeAlias = Callable[[Measured], None]

    def __init__(self, wanted: Wanted, keep: Keep, progress: BenchProgress) -> None:
        self._wanted = wanted
        self._keep = keep
        self._progress = progress
        self._outcomes: list[Outcome] = []
        self._make_row: Callable[[], Measured] | None = None

    async def all(self) -> None:
        """Measures every server.

        Raises:
            ValueError: If one does not start, or refuses the first request.
        """
        for server in self._wanted.servers:
            await self._one(server)

    def keep_unfinished(self) -> bool:
        """Keeps what the load that was interrupted gave; whether it gave anything."""
        if self._make_row is None or not self._outcomes:
            return False
        self._keep(self._make_row())
        return True

    async def _one(self, server: Command | Endpoint) -> None:
        wanted = self._wanted
        async with AsyncExitStack() as stack:
            child = None
            name, settings = "", ""
            if isinstance(server, Command):
                name, settings = server.name, server.options
                self._progress.doing(f"{name}: starting the server")
                child = await stack.enter_async_context(ChildServer(server))
                server = Endpoint(child.url, server.model)
            endpoint = replace(
                server,
                is_chat=wanted.is_chat,
                key=os.environ.get(KEY_VARIABLE) or None,
                timeout=wanted.timeout,
                extra=wanted.extra,
            )
            target = await stack.enter_async_context(OpenAITarget(endpoint))
            self._progress.doing(f"{name or endpoint.url}: first requests")
            ratio = await target.connect(wanted.texts[0][:_PROBE])
            workload = Workload(wanted.texts, wanted.mix, self._cut(ratio))
            await warm_up(target, workload, wanted.warmup)
            for load in wanted.loads:
                await self._load(target, load, workload, name or endpoint.url, settings, child)

    async def _load(
        self,
        target: OpenAITarget,
        load: Load,
        workload: Workload,
        name: str,
        settings: str,
        child: ChildServer | None,
    ) -> None:
        outcomes: list[Outcome] = []
        kind = f"{load.clients} clients" if load.rate is None else f"{load.rate:g} requests/s"
        label = f"{name}: {kind}"

        def make_row() -> Measured:
            peak = None if child is None else child.peak_bytes
            summary = summarize(outcomes)
            return Measured(name, self._wanted.model, settings, load, summary, peak)

        self._outcomes, self._make_row = outcomes, make_row
        self._progress.doing(label)
        done = lambda: self._progress.done(label)  # noqa: E731
        await put_under(target, load, workload, outcomes, done, self._wanted.mix.seed)
        self._make_row = None
        self._keep(make_row())

    def _cut(self, ratio: float | None) -> Cut:
        """How prompts are cut to their number of tokens."""
        if self._wanted.tokenizer_of is None or self._wanted.mix.context is None:
            return by_ratio(ratio or _USUAL_RATIO)
        tokenizer = describe(self._wanted.tokenizer_of).tokenizer

        def cut(text: str, tokens: int) -> str:
            found = tokenizer(text, return_offsets_mapping=True, verbose=False)
            ends = [end for _, end in found["offset_mapping"]]
            return text[: ends[min(tokens, len(ends)) - 1]]

        return cut
