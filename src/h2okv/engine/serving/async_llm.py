"""The engine in a thread of its own, for servers."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from h2okv.config import Budget
from h2okv.engine.openmp import release_workers
from h2okv.engine.serving.engine import Engine, EngineSettings
from h2okv.engine.serving.errors import EngineStoppedError
from h2okv.engine.serving.outputs import Piece
from h2okv.engine.serving.request import Request
from h2okv.engine.serving.sampling_params import SamplingParams
from h2okv.engine.serving.stats import EngineStats

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
        **settings: See `h2okv.engine.serving.engine.EngineSettings`; ``cache`` takes further
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
