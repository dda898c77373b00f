"""The engine's two front ends: `LLM` and `AsyncLLM`."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from h2okv.budget import Budget
from h2okv.cache.support import unwrap
from h2okv.console import Progress
from h2okv.engine.agreement import AgreementReport
from h2okv.engine.cache_engine import answer_again
from h2okv.engine.config import EngineConfig
from h2okv.engine.engine import Engine
from h2okv.engine.memory import release_workers
from h2okv.engine.outputs import EngineStats, EngineStoppedError, OutputDelta, RequestOutput
from h2okv.engine.request import Event, Request
from h2okv.engine.sampler import model_sampling
from h2okv.engine.sampling_params import SamplingParams
from h2okv.engine.verify import MOST_WAITING
from h2okv.prompts.chat_template import Pins, message_spans
from h2okv.prompts.images import EncodedPrompt
from h2okv.prompts.messages import read_conversation
from h2okv.records import check_arguments, short_repr

_Events = asyncio.Queue[Event]
_SAMPLING = tuple(entry.name for entry in fields(SamplingParams))


class _Front:
    """Common part of both front ends: they create an engine and describe it."""

    def __init__(
        self,
        model: str | Path | PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        config: EngineConfig | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        engine_config = EngineConfig.from_options(config, **options)
        if isinstance(model, Path):
            model = str(model)
        elif model is None:
            raise ValueError(
                f"{type(self).__name__} needs a model; give a name, a folder or a loaded model, as"
                f" in {type(self).__name__}('smollm2')."
            )
        elif not isinstance(model, str):
            unwrap(model)  # raises for anything else
        self.engine = engine = Engine(model, tokenizer, engine_config, dtype=dtype, device=device)
        engine.verifier.again = partial(answer_again, engine)
        self.name, self.tokenizer = engine.name, engine.tokenizer
        self.image_encoder = engine.image_encoder
        self.max_budget, self.limits = engine.max_budget, engine.limits
        self.model_sampling = model_sampling(engine.model.generation_config)
        self._default_params = SamplingParams(**({"temperature": 0.0} | self.model_sampling))
        self._start()

    def _start(self) -> None:
        """Prepare for the first request, once the engine is loaded."""

    def _params(self, function: str, params: Any, options: Mapping[str, Any]) -> SamplingParams:
        """Return parameters with fields replaced; the default is the model's, else greedy."""
        if not isinstance(params, SamplingParams | None):
            raise ValueError(
                f"params must be SamplingParams, got {short_repr(params)}; give"
                " h2okv.SamplingParams(max_tokens=64), or max_tokens=64 itself."
            )
        check_arguments(f"{type(self).__name__}.{function}", options, _SAMPLING)
        params = params or self._default_params
        return replace(params, **options) if options else params

    def describe(self) -> str:
        """Describe the model, its slots and its memory, in lines for people."""
        return self.engine.describe()

    def stats(self) -> EngineStats:
        """Return counters and the present memory of the cache."""
        return self.engine.stats()

    def agreement(self) -> AgreementReport:
        """Return how often the next token was the full cache's, of the answers read again."""
        return self.engine.verifier.report()


class LLM(_Front):
    """A model that generates for many prompts at a time, each in a fixed number of cache slots.

    Every output equals that of the prompt's own ``generate`` with an `H2OCache` of the same
    config, independent of the other sequences of the batch. For example:

        with h2okv.LLM("smollm2", cache="best:20%") as llm:
            for output in llm.generate(prompts, max_tokens=64):
                print(output.text)

    Args:
        model: A folder, a GGUF file, a Hub id, ``"smollm2"``, ``"bundled"``, or a loaded model,
            which has H2O attention until `close`.
        tokenizer: The tokenizer of a loaded model, or its processor, which also reads images;
            ``None`` to load it from the model's source.
        config: An `EngineConfig`; ``None`` for the defaults.
        dtype: For a model that is loaded here; ``None`` for the checkpoint's own.
        device: Likewise; ``None`` for the first GPU, or the CPU.
        **options: ``cache``, a text such as ``"best:20%"``, ``budget`` of each sequence (0.2 or
            ``"20%"`` of its prompt, or tokens), and other fields of `EngineConfig` and of its
            `CacheConfig`, instead of the config's.

    Raises:
        ValueError: If the model is not supported, or not even one sequence fits.
    """

    _is_closed = False

    def _start(self) -> None:
        self._turn = threading.Lock()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the model its own attention back; nothing can be generated then."""
        self.engine.close()
        self._is_closed = True

    def chat(
        self,
        messages: str | Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        budget: Budget | int | float | str | None = None,
        pin: Sequence[str] = (),
        verify: bool | str = False,
        show_progress: bool = True,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Generate the next message of each conversation, by the model's chat template.

        An assistant message at the end is continued: the output is what follows it.

        Args:
            messages: A user's text, or one conversation: messages with ``"role"`` and
                ``"content"``, as clients of OpenAI's API write them; or a list of several. Of
                images they take data URLs (``image_url``), or ``{"type": "image", "image": an
                image of Pillow}``.
            params: See `generate`.
            budget: See `generate`.
            pin: Messages that are never evicted: ``"system"``, ``"user"``, ``"last_user"``; by
                default those of the config's `pin`.
            verify: See `generate`.
            show_progress: See `generate`.
            add_generation_prompt: ``True`` for a new message even after an assistant's; ``False``
                for no header of one.
            continue_final_message: Whether the final message is continued, of any role.
            chat_template_kwargs: Further variables of the chat template.
            **sampling: See `generate`.

        Returns:
            One output for each conversation, in their order; none on ranks but the first.

        Raises:
            ValueError: If a message cannot be read, or the template does not take them, or as
                `generate` does.
        """
        if not isinstance(messages, str | Mapping | Sequence):
            raise ValueError(
                f"messages must be a text or a list of messages, got {short_repr(messages)}; give"
                " [{'role': 'user', 'content': 'Hello'}]."
            )
        listed: list[Any] = [messages] if isinstance(messages, str | Mapping) else list(messages)
        is_single = any(isinstance(message, Mapping) for message in listed)
        talks = [listed] if is_single else listed
        switches = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        chats = [
            read_conversation(
                {"messages": talk, **switches}, ("messages",) if is_single else ("messages", at)
            )
            for at, talk in enumerate(talks)
        ]
        prompts = [self.engine.encode(chat) for chat in chats]
        pins = [message_spans(self.tokenizer, chat, pin) for chat in chats]
        params = self._listed_params("chat", params, len(prompts), sampling)
        return self.generate(
            prompts, params, budget=budget, pins=pins, verify=verify, kind="chat",
            show_progress=show_progress,
        )  # fmt: skip

    def _listed_params(
        self, function: str, params: Any, count: int, options: Mapping[str, Any]
    ) -> list[SamplingParams]:
        """Return the parameters of each of `count` prompts."""
        if not isinstance(params, list | tuple):
            return [self._params(function, params, options)] * count
        if len(params) != count:
            raise ValueError(
                f"params must be one SamplingParams or {count}, one for each prompt, got"
                f" {len(params)}."
            )
        return [self._params(function, each, options) for each in params]

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int] | Mapping[str, Any] | EncodedPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        budget: Budget | int | float | str | None = None,
        pins: Sequence[Pins] | None = None,
        verify: bool | str = False,
        kind: str = "text",
        show_progress: bool = True,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Generate text for all prompts.

        Args:
            prompts: A text, or any number of texts, token lists, or texts with images of Pillow,
                ``{"prompt": text, "images": [image]}``: the text has a placeholder for each.
            params: For all of them, or one for each; by default what the model's authors chose
                (``generation_config``), else greedy decoding.
            budget: Budget of their caches (0.2, ``"20%"``, 512 or a `Budget`); ``None`` for the
                engine's, which is also the maximum.
            pins: For each, spans ``(start, stop)`` of its tokens that are never evicted.
            verify: Whether to read all answers again with the full cache, for
                `RequestOutput.verified`; otherwise those that the config's `verify` samples.
                ``"repair"``: and to let the full cache write an answer again if one of its first 32
                tokens differs and may be wrong: in numbers, or where the full cache is sure;
                ``"repair_all"``: whatever differs.
            kind: Kind of the requests, by which `agreement` reports.
            show_progress: Whether to draw a bar, on a terminal.
            **sampling: Fields of `SamplingParams` that replace those of `params`, such as
                ``max_tokens=64``.

        Returns:
            One output for each prompt, in their order; none on ranks but the first.

        Raises:
            ValueError: If a prompt is refused; nothing is generated then.
            RequestFailedError: If one fails; raised after the others have finished, with their
                outputs (`RequestFailedError.outputs`).
            EngineStoppedError: If it is closed.
        """
        if self._is_closed:
            raise EngineStoppedError("this LLM is closed; make another, or generate before that.")
        group = self.engine.group
        if group is not None and group.rank:
            self.engine.runner.follow()
            return []
        is_single = isinstance(prompts, str | Mapping | EncodedPrompt)
        if not is_single and not hasattr(prompts, "__len__"):
            raise ValueError(
                f"prompts must be a text or a list of texts, got {short_repr(prompts)}; give"
                " ['Once upon a time']."
            )
        texts: Sequence[Any] = [prompts] if is_single else prompts
        params = self._listed_params("generate", params, len(texts), sampling)
        if pins is None:
            pins = [()] * len(texts)
        if not isinstance(pins, Sequence) or len(pins) != len(texts):
            raise ValueError(
                f"pins must be a list of spans for each of {len(texts)} prompts, got {pins!r}; give"
                " [[(0, 4)]] to pin four tokens of a single one, and [] for a prompt without."
            )
        options: dict[str, Any] = {"budget": budget, "verify": verify, "kind": kind}
        requests = [
            self.engine.request(text, request_params, lambda event: None, pins=spans, **options)
            for text, request_params, spans in zip(texts, params, pins, strict=True)
        ]
        with self._turn:  # threads take turns
            self._run(requests, show_progress)
        outputs = [request.output() for request in requests]
        for error in (request.error for request in requests if request.error is not None):
            error.outputs = outputs
            raise error
        return [output for output in outputs if output is not None]

    def _run(self, requests: Sequence[Request], shown: bool) -> None:
        """Step until all requests are over; an error or Ctrl-C leaves none in the engine."""
        scheduler = self.engine.scheduler
        # All at once: the limit of the queue is for requests that come one by one.
        scheduler.waiting.extend(requests)
        try:
            with Progress("generating", len(requests), "prompts", shown=shown) as progress:
                while scheduler.has_work:
                    self.engine.step()
                    progress.update(sum(request.is_over for request in requests))
                    while self.engine.verifier.num_waiting >= MOST_WAITING // 2:
                        self.engine.verifier.step()
                while self.engine.step():  # what it does without requests
                    pass
        finally:
            for request in requests:  # those that an error or Ctrl-C has left
                self.engine.abort(request)
            self.engine.step()  # releases their slots
            if self.engine.group is not None:
                self.engine.group.broadcast(None)


class AsyncLLM(_Front):
    """Serves requests from any number of tasks; the model runs in one thread.

    Args:
        model: As for `LLM`; a loaded model has H2O attention until `aclose`.
        tokenizer: As for `LLM`.
        config: As for `LLM`. With ``tensor_parallel`` only the first rank has an `AsyncLLM`; the
            others follow (`ModelRunner.follow`).
        dtype: As for `LLM`.
        device: As for `LLM`.
        **options: As for `LLM`.

    Attributes:
        name: The model's name.
        tokenizer: The model's tokenizer.
        image_encoder: What encodes prompts with images.
        limits: Limits of a prompt: ``max_prompt_tokens``; ``max_context`` of a prompt and its
            output together, ``None`` for no limit; ``vocab_size``.
        model_sampling: Sampling settings of the model's ``generation_config``, by fields of
            `SamplingParams`.
        max_budget: Maximum number of entries of a sequence, per layer and KV head.

    Raises:
        ValueError: If the model is not supported, or not even one sequence fits.
    """

    def _start(self) -> None:
        self.engine.reads_ahead = True
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stops = self._drains = False
        self._error: BaseException | None = None
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[_Events, Event]]] = {}
        # Loading the model was this thread's last work with tensors.
        release_workers()
        self._thread = threading.Thread(target=self._loop, name="h2okv-engine", daemon=True)
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive() and self._error is None

    async def generate(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any] | EncodedPrompt,
        params: SamplingParams | None = None,
        *,
        budget: Budget | int | float | str | None = None,
        kept_every: int | None = None,
        verify: bool | str = False,
        kind: str = "text",
        **sampling: Any,
    ) -> AsyncGenerator[OutputDelta, None]:
        """Generate text for one prompt.

        Closing the iterator, or cancelling the task that it runs in, ends the request; its slots
        are free with the engine's next step.

        Args:
            prompt: As for `LLM.generate`.
            params: As for `LLM.generate`.
            budget: As for `LLM.generate`.
            kept_every: New tokens between two reports of which tokens the cache still holds
                (`OutputDelta.kept`), with one more report at the end; ``None`` for no reports.
            verify: Whether to read the answer again with the full cache once there is nothing else
                to do; the iterator ends after that, with `OutputDelta.verified`. With ``"repair"``
                the whole answer comes then, as one part.
            kind: Kind of the request, by which agreement is reported.
            **sampling: As for `LLM.generate`.

        Yields:
            The part that each step adds to one of the outputs.

        Raises:
            ValueError: If the request is refused (`PromptTooLongError` for its length).
            QueueFullError: If the queue of waiting requests is full.
            EngineStoppedError: If the engine is shutting down, or has stopped.
            RequestFailedError: If something goes wrong with this request.
        """
        params = self._params("generate", params, sampling)
        loop = asyncio.get_running_loop()
        events: _Events = asyncio.Queue()

        def notify(event: Event) -> None:
            self._outbox.setdefault(loop, []).append((events, event))

        # Tokenizing a long text would block the event loop.
        create = self.engine.request
        request = await asyncio.to_thread(
            create, prompt, params, notify, budget, kept_every, (), verify, kind
        )
        if self._drains or not self.is_healthy:
            raise self._stopped()
        self._commands.put(lambda: self._submit(request))
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            if not request.is_over or request.verify:
                self._commands.put(lambda: self.engine.abort(request))

    async def aclose(self, drain: float = 30.0) -> None:
        """Refuse new requests, finish running ones, stop the engine and release other ranks.

        Args:
            drain: Seconds after which requests that still run are aborted.
        """
        self._drains = True
        self._commands.put(lambda: None)  # wakes the thread
        await asyncio.to_thread(self._thread.join, drain)
        self._stops = True
        await asyncio.to_thread(self._thread.join)
        if self.engine.group is not None and self._error is None:
            self.engine.group.broadcast(None)
        self.engine.close()

    def _stopped(self) -> EngineStoppedError:
        reason = self._error and f"has stopped: {type(self._error).__name__}: {self._error}"
        return EngineStoppedError(f"the engine {reason or 'is shutting down.'}")

    def _submit(self, request: Request) -> None:
        try:
            if self._drains:
                raise self._stopped()
            self.engine.scheduler.submit(request)
        except Exception as error:  # the client gets any error
            request.is_over = True
            request.notify(error)

    def _loop(self) -> None:
        """Run commands and steps in the engine's thread until it is stopped."""
        try:
            while not self._stops:
                self._run_commands()
                busy = self.engine.step()
                self._send_events()
                if self._drains and not (busy and self.engine.has_clients):
                    break
                if not busy:
                    self._run_commands(wait=True)
        except BaseException as error:
            self._error = error
        self._drains = True
        self._run_commands()
        scheduler = self.engine.scheduler
        for request in [*scheduler.clear(), *scheduler.waiting]:
            if not request.is_over:
                self.engine.abort(request)
                request.notify(self._stopped())
        for request in self.engine.verifier.clear():  # their answers are complete
            request.finish()
        self._send_events()

    def _send_events(self) -> None:
        """Deliver events to the waiting tasks, one call per loop: waking a thread is slow."""
        outbox, self._outbox = self._outbox, {}
        for loop, events in outbox.items():
            # No task waits in a loop that is closed.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_put_all, events)

    def _run_commands(self, wait: bool = False) -> None:
        """Run the commands of other threads; with ``wait``, block until the first one."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get(block=wait)()
                wait = False


def _put_all(events: list[tuple[_Events, Event]]) -> None:
    for events_queue, event in events:
        events_queue.put_nowait(event)
