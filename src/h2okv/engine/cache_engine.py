"""The engine on a cache that is given, of any kind, for one text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from h2okv.cache import H2OCache
from h2okv.cache.linear_states import continues_prompts
from h2okv.engine.config import EngineConfig
from h2okv.engine.engine import Engine
from h2okv.engine.model_runner import ModelRunner, StepOutput
from h2okv.engine.outputs import EngineStats
from h2okv.engine.request import Output, PrefillChunk, Request, ScheduledStep
from h2okv.engine.sampler import eos_token_ids
from h2okv.engine.sampling_params import UNLIMITED
from h2okv.engine.scheduler import Scheduler
from h2okv.engine.verify import Verifier

_CHUNK = 512  # tokens of a full cache's prompt in one forward: short ones let Ctrl-C stop soon


class CacheEngine(Engine):
    """The engine's loop for one request, on a cache that stays and that no pool need hold.

    Args:
        model: with the cache's attention (`enable`).
        tokenizer: the model's.
        cache: an `H2OCache`, or a cache of transformers; mutated.
        forced: tokens that become the text, whatever is chosen; `choices` has what was.
        generator: draws instead of one with the request's seed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cache: Any,
        forced: Sequence[int] = (),
        generator: torch.Generator | None = None,
    ) -> None:
        # Not that of `Engine`, which loads a model, divides memory and makes a pool.
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.choices: list[int] = []
        self._forced, self._generator = forced, generator
        self.chunk: int | None = None  # tokens of a prompt in one forward; None for all
        if isinstance(cache, H2OCache):
            is_free = cache.cache_config.is_full and continues_prompts(cache)
            self.chunk = cache.read_chunk or (_CHUNK if is_free else None)
        self.runner = _CacheRunner(model, lambda budget: cache, 1, ())
        chunk = self.chunk or UNLIMITED
        self.scheduler = Scheduler(EngineConfig(), 1, chunk)
        self.prefix_cache = self._folder = None
        self.verifier = Verifier(EngineConfig(), self.runner, chunk, lambda: UNLIMITED)
        self._execute, self._eos = self._run_step, eos_token_ids(model)
        self._counters = EngineStats()
        self.is_broken = False  # whether a forward did not come to its end

    def run(self, request: Request, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Generate for a prompt that begins with what the cache has seen, unless that is nothing.

        Args:
            request: its ``start.num_reused`` are the tokens seen; mutated, as the cache is.
            should_stop: whether to end the text here; called before every forward.

        Raises:
            ValueError: if the cache refuses the prompt, or no token can be chosen.
        """
        self.scheduler.submit(request)
        while not request.is_over and not should_stop():
            self.step()
        if request.error is not None:
            raise request.error.__cause__ or ValueError(str(request.error))

    def _run_step(self, step: ScheduledStep) -> StepOutput:
        self.is_broken = True
        output = self.runner.execute(step)
        self.is_broken = output.error is not None
        return output

    def _sample(
        self, outputs: list[Output], logits: torch.Tensor, rows: Sequence[int] = ()
    ) -> None:
        for output in outputs:
            output.sampler.generator = self._generator or output.sampler.generator
        super()._sample(outputs, logits, rows)

    def _report(self, output: Output, token: int, logits: torch.Tensor, row: int | None) -> None:
        if self._forced:
            self.choices.append(token)
            token = self._forced[len(output.tokens)]
        super()._report(output, token, logits, row)


class _CacheRunner(ModelRunner):
    """Runs steps on the cache that `make_cache` returns."""

    def _make_pool(self) -> Any:
        cache = self._make_cache(None)
        return SimpleNamespace(
            cache=cache, num_heads=0, admit=lambda *_: None, count_step=lambda: 0
        )

    def _cache_for(self, chunks: tuple[PrefillChunk, ...]) -> H2OCache:
        self._prefilled = cache = self._make_cache(None)
        if isinstance(cache, H2OCache) and chunks[0].start is not None:
            cache.expect(chunks[0].start.length)  # fractions refer to the whole prompt
        return cache
