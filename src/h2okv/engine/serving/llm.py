"""Many prompts at once from Python, in the caller's own thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from h2okv.config import Budget
from h2okv.engine.serving.engine import Engine, EngineSettings
from h2okv.engine.serving.outputs import Completion, Piece, PromptRead, RequestOutput
from h2okv.engine.serving.request import Request
from h2okv.engine.serving.sampling_params import SamplingParams
from h2okv.engine.serving.stats import EngineStats


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
