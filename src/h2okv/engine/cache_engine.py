"""The engine on a cache that is given, of any kind, for one text or one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from h2okv.budget import Budget
from h2okv.cache import H2OCache
from h2okv.cache.linear_states import continues_prompts
from h2okv.cache.support import context_window
from h2okv.engine.config import EngineConfig
from h2okv.engine.engine import Engine
from h2okv.engine.model_runner import ModelRunner, StepOutput, left_padded
from h2okv.engine.outputs import EngineStats
from h2okv.engine.request import Output, PrefillChunk, PromptStart, Request, ScheduledStep
from h2okv.engine.sampler import Sampler, eos_token_ids
from h2okv.engine.scheduler import Scheduler
from h2okv.engine.verify import Repair, Verifier, with_budget
from h2okv.prompts.readers import UNLIMITED

_CHUNK = 512  # tokens of a full cache's prompt in one forward: short ones let Ctrl-C stop soon


class CacheEngine(Engine):
    """The engine's loop for one request, or one batch, on a cache that stays and is in no pool.

    Args:
        model: with the cache's attention (`enable`).
        tokenizer: the model's.
        cache: an `H2OCache`, or for one request a cache of transformers; mutated.
        size: requests of the batch.
        forced: tokens that become the text, whatever is chosen; `choices` has what was.
    """

    runner: _CacheRunner
    runs_ahead = False  # the cache stays behind the text's end, which is known by its tokens

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cache: Any,
        size: int = 1,
        forced: Sequence[int] = (),
    ) -> None:
        # Not that of `Engine`, which loads a model, divides memory and makes a pool.
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self._forced, self.choices = forced, list[int]()
        self.chunk: int | None = None  # tokens of a prompt in one forward; None for all
        if isinstance(cache, H2OCache) and size == 1:
            self.chunk = cache.read_chunk
            if type(cache) is H2OCache and cache.cache_config.is_full and continues_prompts(cache):
                self.chunk = _CHUNK
        self.runner = _CacheRunner(model, lambda budget: cache, size, ())
        self.scheduler = Scheduler(EngineConfig(), size, self.chunk or UNLIMITED)
        self.prefix_cache = self._folder = None
        self._execute, self._eos = self._run_step, eos_token_ids(model)
        self._counters, self.is_broken = EngineStats(), False  # by a forward that has not ended
        room = context_window(model.config) or UNLIMITED  # a full cache ends there
        self.verifier = Verifier(EngineConfig(), self.runner, _CHUNK, lambda: room, self._counters)
        self.verifier.again = self._again

    def run(
        self, requests: Sequence[Request], should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Generate for prompts; a single one begins with what the cache has seen. Mutates them."""
        if not self.scheduler.running:
            self.scheduler.waiting.extend(requests)
        while not all(request.is_over for request in requests) and not should_stop():
            self.step()
        for request in requests:
            if (error := request.error) is not None:
                raise error.__cause__ or ValueError(str(error))

    def resume(self, requests: Sequence[Request], tokens: Sequence[int]) -> None:
        """Let `run` go on after the first token of each request, as the cache has the prompts."""
        mask = left_padded([request.prompt for request in requests])[1]
        self.runner.num_rows, self.runner.mask = len(requests), None if mask.all() else mask
        for request, token in zip(requests, tokens, strict=True):
            sampler = Sampler(self.model, request.params, request.prompt)
            request.outputs.append(Output(request, 0, sampler, self.tokenizer))
            self._report(request.outputs[0], token, torch.empty(0), None)
            self.scheduler.running.append(request.outputs[0])

    def make_cache(self, budget: Budget | None) -> H2OCache:
        """Return an empty cache like this one's, with the budget of a request if that has one."""
        return H2OCache.from_config(self.model, with_budget(self.cache.cache_config, budget))

    def _again(self, request: Request, cache: DynamicCache) -> Repair:
        self.cache = cache
        return answer_again(self, request, cache)

    def _run_step(self, step: ScheduledStep, newest: Tensor | None = None) -> StepOutput:
        self.is_broken = True
        output = self.runner.execute(step, newest)
        if output.error is not None:  # not to read a batch's prompts one by one
            raise output.error
        self.is_broken = False
        return output

    def _report(self, output: Output, token: int, logits: torch.Tensor, row: int | None) -> None:
        if self._forced:
            self.choices.append(token)
            token = self._forced[len(output.tokens)]
        super()._report(output, token, logits, row)


def answer_again(engine: Engine, request: Request, cache: DynamicCache) -> Repair:
    """Prepare to write an answer again with the full cache that has read it; mutates the cache.

    It goes back to the end of the prompt, or to its start if it has windows or recurrent states.
    """
    length = len(request.prompt)
    start = length - 1  # the last token is read again, for what follows it
    if all(type(layer) is DynamicLayer for layer in cache.layers):
        cache.crop(start - cache.get_seq_length())
    else:
        cache.reset()
        start = 0
    again = replace(
        request, start=PromptStart(length, num_reused=start), notify=lambda event: None, saves={},
        outputs=[], logprobs=[], is_over=False, repairs=None, verify=False, is_sampled=False,
    )  # fmt: skip
    full = CacheEngine(engine.model, engine.tokenizer, cache)
    full.scheduler.submit(again)
    return full.step, again


class _CacheRunner(ModelRunner):
    """Runs steps on the cache that `make_cache` returns, whose rows are those of the batch."""

    num_rows = 1
    mask: Tensor | None = None  # of prompts with padding, [B, tokens seen]

    def _make_pool(self) -> Any:
        pool = {"num_heads": 0, "cache": self._make_cache(None), "count_step": lambda: 0}
        return SimpleNamespace(admit=lambda *_: None, release=lambda row: None, **pool)

    def _cache_for(self, chunks: tuple[PrefillChunk, ...]) -> H2OCache:
        self._prefilled, self.num_rows = self._make_cache(None), len(chunks)
        if isinstance(self._prefilled, H2OCache) and self.num_rows == 1 and chunks[0].start:
            self._prefilled.expect(chunks[0].start.length)  # of which fractions are
        return self._prefilled

    def _run(self, step: ScheduledStep, newest: Tensor | None = None) -> StepOutput:
        for row in step.release:  # the last one takes its place
            last = self.num_rows - 1
            self._select([last if number == row else number for number in range(last)])
        if step.admit is not None and len(step.admit) < self.num_rows:
            self._select(step.admit)
        return super()._run(step, newest)

    def _select(self, rows: Sequence[int]) -> None:
        """Keep these rows of the cache, in this order."""
        indices: Any = torch.tensor(rows, dtype=torch.int64)
        self.num_rows = len(rows)
        self.mask = None if self.mask is None else self.mask[indices]
        self._make_cache(None).reorder_cache(indices.to(self._device))

    def _forward(  # type: ignore[override]
        self, tokens: Tensor, positions: Tensor, cache: Any, mask: Any = None, **options: Any
    ) -> Tensor:
        if self.mask is not None:
            mask = torch.cat([self.mask, torch.ones_like(tokens)], dim=1)
        self.mask = mask
        return super()._forward(tokens, positions, cache, mask, **options)
