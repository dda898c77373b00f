"""The engine's loop: schedule, run, sample, report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from h2okv.cache import H2OCache
from h2okv.cache.slot_pool import check_poolable
from h2okv.cache.validation import window_by_length
from h2okv.config import Budget
from h2okv.engine.config import EngineConfig
from h2okv.engine.kept import kept_tokens
from h2okv.engine.memory import MemoryModel, available_bytes, data_bytes, give_memory_back
from h2okv.engine.model_runner import ModelRunner, StepOutput, TensorParallelGroup, check_divides
from h2okv.engine.outputs import EngineStats, OutputDelta, PromptTooLongError, RequestFailedError
from h2okv.engine.request import (
    Event,
    Output,
    Pins,
    PrefillChunk,
    PromptStart,
    Request,
    ScheduledStep,
)
from h2okv.engine.sampler import Sampler, eos_token_ids, sample, token_logprobs
from h2okv.engine.sampling_params import (
    UNLIMITED,
    SamplingParams,
    check_number,
    short_repr,
)
from h2okv.engine.scheduler import Scheduler
from h2okv.integration import enable
from h2okv.integration.loading import Described, context_of, describe, load_weights

_DEFAULT_PROMPT = 8192
_DEFAULT_SEQS = 64
_FREE_FRACTION = 0.8
_MIB = 1 << 20


class Engine:
    """A model, its slots and the loop's body; not safe to use from two threads.

    See `AsyncLLM` for its limits. ``group`` are the processes that hold the parts of a model.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: EngineConfig | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.config = config = config or EngineConfig()
        described = _describe(model, tokenizer, config.tensor_parallel)
        self.tokenizer, self.name = tokenizer or described.tokenizer, described.name
        # All that can be refused is, before the weights are loaded.
        self._model_config = described.config
        probe = self._make_cache(None)
        check_poolable(probe)
        self._set_limits(probe, described.context)
        if isinstance(model, str):
            where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
            model = load_weights(described, dtype, where, config.tensor_parallel)
        self.model = model.eval()
        self._model_config = self.model.config
        self.group = TensorParallelGroup() if config.tensor_parallel else None
        self._stack = ExitStack()
        self._stack.enter_context(enable(self.model))
        try:
            self.memory = MemoryModel.of(self.model.config, probe, self.model.dtype).serving(
                self.max_budget,
                self.max_prompt_tokens,
                config.max_prefill_tokens,
                1 if self.group is None else self.group.world_size,
            )
            self.max_num_seqs = self._count_seqs()
            self.runner = ModelRunner(
                self.model, self._make_cache, self.max_num_seqs, self.max_budget, self.group
            )
            self._prefixes = [self._save_prefix(text) for text in config.prefixes]
        except BaseException:
            self.close()
            raise
        chunk_tokens = self.runner.chunk_tokens(config.max_prefill_tokens)
        self.scheduler = Scheduler(config, self.max_num_seqs, chunk_tokens)
        self._execute = self.runner.execute
        self._eos = eos_token_ids(self.model)
        self._counters = EngineStats()

    def step(self) -> bool:
        """Schedules, runs, samples and reports what is next; returns whether there was anything."""
        step = self.scheduler.schedule()
        if step == ScheduledStep():
            return False
        try:
            output = self._execute(step)
            self._counters.evictions += output.evictions
            self.scheduler.record_time(output.prefill_seconds, output.decode_seconds)
            if output.decode_logits is not None:
                self._counters.steps += 1
                self._sample(list(self.scheduler.running), output.decode_logits, in_pool=True)
            if step.prefill:
                self._after_prefill(step.prefill, output)
        except Exception as error:  # whatever it is, others must be served
            for request in self.scheduler.clear():
                if not request.is_over:
                    self._fail(request, error)
            self.runner.reset()
        except BaseException:  # Ctrl-C in the middle of a forward, which leaves slots half written
            self.scheduler.clear()
            self.runner.reset()
            raise
        return True

    def _after_prefill(self, chunks: tuple[PrefillChunk, ...], output: StepOutput) -> None:
        requests = list(self.scheduler.prefilling)
        if output.error is None:
            for request, chunk, logits in zip(requests, chunks, output.prefill_logits, strict=True):
                try:
                    self._after_chunk(request, chunk, logits)
                except Exception as error:
                    self._fail(request, error)
        elif len(requests) == 1:
            self._fail(requests[0], RequestFailedError(output.error))
        else:  # one of them is at fault; the others shall not suffer for it
            self.scheduler.split_prefill_batch()

    def _after_chunk(self, request: Request, chunk: PrefillChunk, logits: Any) -> None:
        """Notes what a chunk's logits say, and begins the outputs after the last one."""
        self._counters.prompt_tokens += len(chunk.tokens)
        asked = request.params.prompt_logprobs
        if asked is not None:
            if not request.logprobs:
                request.logprobs.append(None)
            following = request.prompt[chunk.position + 1 : chunk.position + 1 + len(chunk.tokens)]
            request.logprobs.extend(token_logprobs(logits[: len(following)], following, asked))
        if not chunk.is_last:
            return
        self._counters.reused_tokens += request.num_reused
        if request.max_new_tokens == 0:
            request.notify(OutputDelta(0, "", finish_reason="length", prompt=request.prompt_read()))
            self._finish(request)
            return
        for index in range(request.params.n):
            sampler = Sampler(self.model, request.params, request.prompt, index)
            request.outputs.append(Output(request, index, sampler, self.tokenizer))
        logits = logits[-1:].expand(request.params.n, -1)
        self._sample(request.outputs, logits, in_pool=False)

    def _sample(self, outputs: list[Output], logits: torch.Tensor, in_pool: bool) -> None:
        """Chooses a token for each output and reports it."""
        tokens = sample([own.sampler for own in outputs], [own.tokens for own in outputs], logits)
        for at, (output, token) in enumerate(zip(outputs, tokens, strict=True)):
            if output.request.is_over:  # another output of it has just failed
                continue
            try:
                if isinstance(token, Exception):
                    raise token
                self._report(output, token, logits[at : at + 1], at if in_pool else None)
            except Exception as error:  # of this request alone, whatever it is
                self._fail(output.request, error)

    def _report(self, output: Output, token: int, logits: torch.Tensor, place: int | None) -> None:
        """Gives an output its next token, and the client what comes of it."""
        request = output.request
        asked = request.params.logprobs
        logprobs = () if asked is None else tuple(token_logprobs(logits, [token], asked))
        is_first = not any(own.tokens for own in request.outputs)
        delta = output.append(token, self._eos, logprobs)
        if is_first:
            delta = replace(delta, prompt=request.prompt_read())
        if request.kept_every is not None and place is not None:
            num_new = len(output.tokens) - 1  # the newest is not in the cache yet
            if delta.finish_reason or (num_new - 1) % request.kept_every == 0:
                kept = kept_tokens(self.runner.pool, place, len(request.prompt) + num_new)
                delta = replace(delta, kept=kept)
        self._counters.new_tokens += 1
        request.notify(delta)
        if all(own.is_finished for own in request.outputs):
            self._finish(request)

    def _finish(self, request: Request) -> None:
        self._counters.finished += 1
        self.scheduler.drop(request)
        request.notify(None)

    def _fail(self, request: Request, error: Exception) -> None:
        failed = error
        if not isinstance(failed, RequestFailedError):
            failed = RequestFailedError(f"{type(error).__name__}: {error}")
            failed.__cause__ = error
        self._counters.failed += 1
        request.error = failed
        self.scheduler.drop(request)
        request.notify(failed)

    def abort(self, request: Request) -> None:
        """Ends a request whose client went away; its slots are free with the next step."""
        if not request.is_over:
            self._counters.aborted += 1
            self.scheduler.drop(request)

    def close(self) -> None:
        """Gives the model its own attention back."""
        self._stack.close()

    def stats(self) -> EngineStats:
        """Counts what was done and what is held; may be called from any thread."""
        pool = self.runner.pool
        return replace(
            self._counters,
            max_num_seqs=self.max_num_seqs,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            cache_bytes=pool.held_bytes,
            full_bytes=pool.full_bytes,
            reserved_bytes=pool.nbytes,
        )

    def describe(self) -> str:
        """Says what is served with which memory, for people."""
        memory, pool = self.memory, self.runner.pool
        dtype = str(self.model.dtype).removeprefix("torch.")
        longest = self.max_context or self.max_prompt_tokens
        full = pool.full_bytes_of(longest)
        parts = "" if self.group is None else f" in {self.group.world_size} parts"
        lines = [
            f"{self.name} in {dtype} on {self.model.device}{parts}, {self._make_cache(None)!r}",
            f"{self.max_num_seqs} sequences of {self.max_budget} entries (prompts up to "
            f"{self.max_prompt_tokens:,} tokens): {pool.nbytes / self.max_num_seqs / _MIB:.2f} MiB "
            f"each, {pool.nbytes / _MIB:.1f} MiB together",
            f"beside weights and slots at most {(memory.prefill + memory.fixed) / _MIB:.0f} MiB "
            f"for prefill and {self.max_num_seqs * memory.step / _MIB:.0f} MiB for a decode step",
            f"a full cache of {longest:,} tokens would take {full / _MIB:.2f} MiB for each user, "
            f"{full * self.max_num_seqs / pool.nbytes:.1f} times as much",
        ]
        least = self.config.cache.min_tokens
        if least and self.config.cache.budget.is_relative:
            lines.append(f"of short prompts at least {least} heavy and {least} recent entries stay")
        if self._prefixes:
            lengths = ", ".join(f"{len(tokens):,}" for tokens in self._prefixes)
            lines.append(f"saved prefixes: {lengths} tokens")
        return "\n".join(lines)

    def request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        notify: Callable[[Event], None],
        budget: Budget | None = None,
        kept_every: int | None = None,
        pins: Pins = (),
    ) -> Request:
        """Makes a request, without submitting it; may be called from any thread."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={params!r} is of another type; give SamplingParams.")
        if kept_every is not None:
            check_number("kept_every", kept_every, int, 1, UNLIMITED)
        tokens = self._tokens(prompt)
        most = self.max_prompt_tokens
        if self.max_context is not None and params.max_tokens != 0:
            most = min(most, self.max_context - 1)
        if not tokens:
            raise ValueError("the prompt has no tokens; give at least one.")
        if len(tokens) > most:
            raise PromptTooLongError(
                f"the prompt has {len(tokens):,} tokens, and at most {most:,} can be read; shorten "
                "it."
            )
        self._check_tokens("logit_bias: the token", params.logit_bias)
        if params.n > self.max_num_seqs:
            raise ValueError(
                f"n={params.n} is more than max_num_seqs={self.max_num_seqs}; ask for less."
            )
        cache = self._make_cache(budget)
        cache.pin(pins, len(tokens))
        keeps = cache.entries_for(len(tokens))
        if keeps > self.max_budget:
            raise ValueError(
                f"the budget of {keeps} entries is larger than the {self.max_budget} that a "
                "sequence has slots for; lower heavy, recent or sink."
            )
        prefix = None
        if budget is None and params.prompt_logprobs is None and not pins:
            prefix = self._prefix_of(tokens)
        left = math.inf if self.max_context is None else self.max_context - len(tokens)
        wished = math.inf if params.max_tokens is None else params.max_tokens
        return Request(
            prompt=tokens,
            params=params,
            max_new_tokens=int(min(left, wished, 1 << 40)),
            start=PromptStart(len(tokens), budget, prefix, tuple(pins)),
            num_reused=0 if prefix is None else len(self._prefixes[prefix]),
            notify=notify,
            kept_every=kept_every,
        )

    def _tokens(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        try:
            if isinstance(prompt, str):
                prompt = self.tokenizer(prompt, verbose=False)["input_ids"]
            tokens: Any = tuple(prompt)
        except TypeError as error:  # half a character, or nothing that could be read
            raise ValueError(
                f"the prompt cannot be read ({error}); give a text, or tokens of this model."
            ) from error
        self._check_tokens("the prompt: token", tokens)
        return tuple(map(int, tokens))

    def _check_tokens(self, name: str, tokens: Iterable[Any]) -> None:
        """Refuses what is none of the model's tokens."""
        table: Any = self.model.get_input_embeddings().weight
        vocabulary = table.shape[0]
        for token in tokens:
            is_int = isinstance(token, Integral) and not isinstance(token, bool)
            if not is_int or not 0 <= token < vocabulary:
                raise ValueError(
                    f"{name} {short_repr(token)} is not one of the model's {vocabulary}; give "
                    "tokens of this model."
                )

    def _save_prefix(self, text: str | Sequence[int]) -> tuple[int, ...]:
        tokens = self._tokens(text)
        if not tokens or len(tokens) >= self.max_prompt_tokens:
            raise ValueError(
                f"a prefix of {len(tokens):,} tokens is none that prompts of up to "
                f"{self.max_prompt_tokens:,} tokens can begin with; give a shorter text."
            )
        self.runner.save_prefix(tokens, self.config.max_prefill_tokens)
        return tokens

    def _prefix_of(self, tokens: tuple[int, ...]) -> int | None:
        """The longest saved prefix that a prompt begins with and goes on from."""
        fitting = [
            (len(own), number)
            for number, own in enumerate(self._prefixes)
            if len(own) < len(tokens) and tokens[: len(own)] == own
        ]
        return max(fitting)[1] if fitting else None

    def _make_cache(self, budget: Budget | None) -> H2OCache:
        config = self.config.cache
        if budget is not None:
            config = replace(config, heavy=budget.heavy, recent=budget.recent, sink=budget.sink)
        cache = H2OCache.from_config(self._model_config, config)
        if self.config.tensor_parallel:
            cache.allow_non_finite()
        return cache

    def _set_limits(self, probe: H2OCache, context: int | None) -> None:
        """Decides how long prompts and texts may be, and how many entries a sequence may keep."""
        # Positions that are scaled by the length of the batch's longest text (dynamic scaling,
        # LongRoPE) are the same for all below that length.
        shared = window_by_length(self._model_config)
        if shared is not None:
            context = min(context or shared, shared)
        self.max_context = None if probe.rule.rolls else context
        wished = self.config.max_prompt_tokens
        if self.max_context is not None and wished is not None and wished > self.max_context:
            raise ValueError(
                f"max_prompt_tokens={wished} is more than the model's context of "
                f"{self.max_context}; lower it, or use positions='rolling'."
            )
        # A prompt that fills the context can still be read, for the log-probabilities of its own.
        self.max_prompt_tokens = wished or min(context or _DEFAULT_PROMPT, _DEFAULT_PROMPT)
        self.max_budget = probe.entries_for(self.max_prompt_tokens)

    def _count_seqs(self) -> int:
        """How many sequences the memory has room for."""
        if self.config.max_num_seqs is not None:
            return self.config.max_num_seqs
        device = self.model.device
        if device.type == "cpu":
            give_memory_back()
        taken, most = 0, _DEFAULT_SEQS
        promised = int(_FREE_FRACTION * (available_bytes(device) or 0))
        if self.config.memory is not None:
            promised, most = self.config.memory, 1 << 40
            on_gpu = device.type == "cuda"
            taken = torch.cuda.memory_allocated(device) if on_gpu else data_bytes() or 0
        seqs = min(self.memory.num_seqs(promised - taken), most)
        if seqs < 1:
            least = taken + self.memory.least
            raise ValueError(
                f"memory of {promised / _MIB:.0f} MiB has no room for a single sequence; give "
                f"{least / _MIB + 1:.0f} MiB, or lower the budget, max_prompt_tokens or "
                "max_prefill_tokens."
            )
        return seqs if self.group is None else self.group.smallest(seqs)


def _describe(
    model: str | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, tensor_parallel: bool
) -> Described:
    """What is known of a model without its weights."""
    if isinstance(model, str):
        described = describe(model)
        if tensor_parallel:
            check_divides(described.config)
        return described
    name = str(model.config._name_or_path or model.config.model_type)
    own = tokenizer or describe(name).tokenizer
    return Described(name, name, model.config, own, context_of(model.config))
