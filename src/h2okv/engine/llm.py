"""The engine's two fronts: `LLM` and `AsyncLLM`."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from h2okv.config import Budget
from h2okv.engine.engine import Engine, EngineSettings
from h2okv.engine.memory import release_workers
from h2okv.engine.outputs import (
    Completion,
    EngineStats,
    EngineStoppedError,
    Piece,
    PromptRead,
    RequestOutput,
)
from h2okv.engine.request import Request
from h2okv.engine.sampling_params import SamplingParams


class LLM:
    """A model that generates for many prompts at a time, each on a fixed row of cache.

    Every output equals that of the prompt's own ``generate`` with an `H2OCache` of the same
    settings, whatever is generated beside it. For example::

        with h2okv.LLM("bundled", heavy=0.1, recent=0.1) as llm:
            for output in llm.generate(prompts, h2okv.SamplingParams(max_tokens=64)):
                print(output.text)

    Args:
        model: A folder, a GGUF file, a Hub id, ``"smollm2"``, ``"bundled"``, or a loaded model,
            which has H2O attention until `close`.
        tokenizer: The loaded model's; ``None`` to load it from where the model came from.
        dtype: For a model that is loaded here; ``None`` for the checkpoint's own.
        device: Likewise; ``None`` for the first GPU, or the CPU.
        in_parts: Whether each process that ``torchrun`` has started holds a part of the model. All
            of them make the same calls, and only the first one gets outputs.
        **settings: See `h2okv.engine.engine.EngineSettings`; ``cache`` takes further
            options of `H2OCache`.

    Raises:
        ValueError: If the model is not supported, or not even one row fits.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        in_parts: bool = False,
        **settings: Any,
    ) -> None:
        self.engine = Engine(
            model,
            tokenizer,
            EngineSettings(**settings),
            dtype=dtype,
            device=device,
            in_parts=in_parts,
        )

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def describe(self) -> str:
        """Says what is served with which memory, for people."""
        return self.engine.describe()

    def stats(self) -> EngineStats:
        """Tells what was done so far, in numbers."""
        return self.engine.core.stats()

    def close(self) -> None:
        """Gives the model its own attention back."""
        self.engine.close()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        budget: Budget | None = None,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Generates for all prompts.

        Args:
            prompts: A text, or any number of texts or token lists.
            params: For all of them, or one for each; by default those of `SamplingParams`.
            budget: What their caches keep, up to a row; ``None`` for the engine's.
            show_progress: Whether to draw a bar, on a terminal.

        Returns:
            One output for each prompt, in their order; none on ranks but the first.

        Raises:
            ValueError: If a prompt is refused; nothing is generated then.
            RequestFailedError: If one fails on the way; the others of the call are given up.
        """
        ranks = self.engine.ranks
        if ranks is not None and not ranks.is_first:
            self.engine.follow()
            return []
        texts: Sequence[Any] = [prompts] if isinstance(prompts, str) else prompts
        wanted = _for_each(params, len(texts))
        collected = [_Collected(own) for own in wanted]
        requests = [
            self.engine.request(text, own, part.take, budget)
            for text, own, part in zip(texts, wanted, collected, strict=True)
        ]
        try:
            with _bar(len(requests), show_progress) as advance:
                self._run(requests, collected, advance)
        finally:
            for request in requests:  # those that an error or Ctrl-C has left
                self.engine.core.abort(request)
            self.engine.core.step()  # gives their rows back
            if ranks is not None:
                ranks.let_go()
        return [part.output() for part in collected]

    def _run(
        self,
        requests: Sequence[Request],
        collected: Sequence[_Collected],
        advance: Callable[[int], None],
    ) -> None:
        core = self.engine.core
        pending = list(requests)[::-1]
        while pending or core.scheduler.has_work:
            # No more in the queue than are about to be read: it has a limit, a call has none.
            while pending and not core.scheduler.waiting:
                core.scheduler.enqueue(pending.pop())
            core.step()
            for part in collected:
                if part.error is not None:
                    raise part.error
            advance(sum(part.is_over for part in collected))


class _Collected:
    """The pieces of one request, put together."""

    def __init__(self, params: SamplingParams) -> None:
        self.completions = [Completion(index) for index in range(params.n)]
        self.prompt: PromptRead | None = None
        self.error: Exception | None = None
        self.is_over = False

    def take(self, event: Piece | Exception | None) -> None:
        """See `Request.notify`."""
        if isinstance(event, Piece):
            self.prompt = event.prompt or self.prompt
            self.completions[event.index].add(event)
        elif event is None:
            self.is_over = True
        else:
            self.error = event

    def output(self) -> RequestOutput:
        """What came, once it is over."""
        assert self.prompt is not None
        return RequestOutput(self.prompt, self.completions)


def _for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not all(isinstance(own, SamplingParams) for own in params):
        raise ValueError("params has other things than SamplingParams in it; give one, or a list.")
    if len(params) != count:
        raise ValueError(
            f"{len(params)} SamplingParams were given for {count} prompts; give one, or as many."
        )
    return params


@contextmanager
def _bar(total: int, is_wanted: bool) -> Iterator[Callable[[int], None]]:
    """A function that shows how many are done."""
    with Progress(disable=not is_wanted, transient=True) as progress:
        task = progress.add_task("generating", total=total)
        yield lambda done: progress.update(task, completed=done)


_IDLE_SECONDS = 0.5

_Event = Piece | Exception | None
_Events = asyncio.Queue[_Event]


class AsyncLLM:
    """Serves requests from any number of tasks; the model runs in one thread of its own.

    Args:
        model: A folder, a GGUF file, a Hub id, ``"smollm2"``, ``"bundled"``, or a loaded model,
            which has H2O attention until `aclose`.
        tokenizer: The loaded model's; ``None`` to load it from where the model came from.
        dtype: For a model that is loaded here; ``None`` for the checkpoint's own.
        device: Likewise; ``None`` for the first GPU, or the CPU.
        in_parts: Whether each process that ``torchrun`` has started holds a part of the model. Only
            the first one has an `AsyncLLM`; the others follow (`Engine.follow`).
        **settings: See `h2okv.engine.engine.EngineSettings`; ``cache`` takes further
            options of `H2OCache`.

    Raises:
        ValueError: If the model is not supported, or not even one row fits.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        in_parts: bool = False,
        **settings: Any,
    ) -> None:
        self.engine = Engine(
            model,
            tokenizer,
            EngineSettings(**settings),
            dtype=dtype,
            device=device,
            in_parts=in_parts,
        )
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stops = False
        self._drains = False
        self._error: BaseException | None = None
        self._live: set[Request] = set()
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[_Events, _Event]]] = {}
        # Loading the model was this thread's last work with tensors.
        release_workers()
        self._thread = threading.Thread(target=self._loop, name="h2okv-engine", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """The model's name."""
        return self.engine.name

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self.engine.tokenizer

    @property
    def max_context(self) -> int | None:
        """The most tokens of a prompt and its output together; ``None`` for no limit."""
        return self.engine.max_context

    @property
    def max_prompt_tokens(self) -> int:
        """The most tokens of a prompt."""
        return self.engine.max_prompt_tokens

    @property
    def row_budget(self) -> int:
        """The most entries that a request may keep."""
        return self.engine.row_budget

    @property
    def is_healthy(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive() and self._error is None

    def describe(self) -> str:
        """Says what is served with which memory, for people."""
        return self.engine.describe()

    def stats(self) -> EngineStats:
        """Tells what is going on, in numbers."""
        return self.engine.core.stats()

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        budget: Budget | None = None,
    ) -> AsyncIterator[Piece]:
        """Generates for one prompt.

        Closing the iterator, or cancelling the task that it runs in, ends the request; its rows
        are free with the engine's next step.

        Args:
            prompt: A text, or tokens.
            params: What is asked for; by default `SamplingParams()`.
            budget: What its cache keeps, up to a row; ``None`` for the engine's.

        Yields:
            Pieces of all its outputs, as they come.

        Raises:
            ValueError: If the request is refused (`PromptTooLongError` for its length).
            QueueFullError: If as many wait as may.
            EngineStoppedError: If the engine is shutting down, or has stopped.
            RequestFailedError: If something goes wrong with this request.
        """
        params = params or SamplingParams()
        loop = asyncio.get_running_loop()
        events: _Events = asyncio.Queue()

        def notify(event: _Event) -> None:
            self._outbox.setdefault(loop, []).append((events, event))

        # Tokenising a long text takes longer than others should wait for.
        request = await asyncio.to_thread(self.engine.request, prompt, params, notify, budget)
        self._order(lambda: self._submit(request))
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            if not request.is_over:
                self._orders.put(lambda: self._abort(request))

    async def aclose(self, drain: float = 30.0) -> None:
        """Refuses new requests, finishes what runs, stops the engine, and lets other ranks go.

        Args:
            drain: Seconds after which what still runs is given up.
        """
        self._drains = True
        self._orders.put(None)
        await asyncio.to_thread(self._thread.join, drain)
        self._stops = True
        self._orders.put(None)
        await asyncio.to_thread(self._thread.join)
        if self.engine.ranks is not None and self._error is None:
            self.engine.ranks.let_go()
        self.engine.close()

    def _order(self, order: Callable[[], None]) -> None:
        if self._drains or not self.is_healthy:
            raise EngineStoppedError(self._why_stopped())
        self._orders.put(order)

    def _why_stopped(self) -> str:
        if self._error is not None:
            return f"the engine has stopped: {type(self._error).__name__}: {self._error}"
        return "the engine is shutting down."

    def _submit(self, request: Request) -> None:
        if self._drains:
            request.is_over = True
            request.notify(EngineStoppedError(self._why_stopped()))
            return
        try:
            self.engine.core.scheduler.submit(request)
        except Exception as error:  # the client gets it, whatever it is
            request.is_over = True
            request.notify(error)
            return
        self._live.add(request)

    def _abort(self, request: Request) -> None:
        self.engine.core.abort(request)

    def _loop(self) -> None:
        try:
            while not self._stops:
                self._follow_orders()
                busy = self.engine.core.step()
                self._hand_over()
                self._live = {own for own in self._live if not own.is_over}
                if not busy:
                    if self._drains:
                        break
                    self._wait()
        except BaseException as error:
            self._error = error
        for request in self._live:
            if not request.is_over:
                self.engine.core.abort(request)
                request.notify(EngineStoppedError(self._why_stopped()))
        self._drains = True
        self._follow_orders()
        self._hand_over()

    def _hand_over(self) -> None:
        """Brings events to the tasks that wait for them, those of a step together.

        Waking another thread takes longer than all that is done for a token otherwise.
        """
        outbox, self._outbox = self._outbox, {}
        for loop, events in outbox.items():
            # A loop that is closed has nobody who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_put_all, events)

    def _follow_orders(self) -> None:
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                return
            if order is not None:
                order()

    def _wait(self) -> None:
        """Sleeps until there is an order."""
        try:
            order = self._orders.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            return
        if order is not None:
            order()


def _put_all(events: list[tuple[_Events, _Event]]) -> None:
    for waiting, event in events:
        waiting.put_nowait(event)
