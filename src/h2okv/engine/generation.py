"""A generation on a cache: streamed, measured, stopped, and compared with the full cache's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from h2okv.cache import H2OCache
from h2okv.cache.layer import CacheLayer
from h2okv.cache.linear_states import held_bytes
from h2okv.cache.slot_layer import SlotLayer
from h2okv.config import CacheConfig
from h2okv.console import Progress, format_bytes, write_text
from h2okv.engine.cache_engine import CacheEngine
from h2okv.engine.outputs import Completion, OutputDelta, VerifiedAnswer
from h2okv.engine.request import Event, PromptStart, Request
from h2okv.engine.sampling_params import SamplingParams
from h2okv.integration.enable import enable
from h2okv.models.loading import Described

LONG_PROMPT = 512  # tokens from which reading a prompt shows a progress bar
FULL = "full cache"
_WARM_UP_PROMPT = 2048
_WARM_UP_TOKENS = 4
_discard: Callable[[str], None] = lambda text: None  # noqa: E731


@dataclass(frozen=True)
class Generation:
    """Text and cost of one run."""

    text: str  # up to a stop string, without special tokens
    token_ids: list[int]  # the cache has not read the last one
    finish_reason: str  # eos, stop (a stop string), length, context (it is full) or interrupted
    time_to_first_token: float | None  # in seconds
    tokens_per_second: float | None  # of decoding, without the first token
    kv_bytes: int  # at the end, with scores and positions
    kv_bytes_full: int  # keys and values of a full cache
    num_seen_tokens: int
    num_cached_tokens: int  # maximum over the heads
    mean_cached_tokens: float  # mean over the heads
    smaller_from: int | None  # tokens from which on the cache is smaller than a full one
    verified: VerifiedAnswer | None = None  # if it was read again with the full cache

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it."""
        return self.finish_reason == "interrupted"

    @property
    def kept_text(self) -> str:
        """Number of tokens that the cache keeps, as text."""
        seen, mean, largest = self.num_seen_tokens, self.mean_cached_tokens, self.num_cached_tokens
        if mean >= seen:
            return f"{seen:,} tokens seen, all kept"
        heads = (
            "" if round(mean) == largest else f" by a head on average, {largest:,} by the largest"
        )
        return f"{seen:,} tokens seen, {mean:,.0f} kept{heads}"

    @property
    def memory_text(self) -> str:
        """Bytes of the cache, with those of a full one where that is larger."""
        size, full = format_bytes(self.kv_bytes), format_bytes(self.kv_bytes_full)
        if self.kv_bytes < self.kv_bytes_full:
            return f"KV cache {size}, a full one {full} ({self.share_text})"
        if self.smaller_from is None:
            return f"KV cache {size}"
        nothing = "nothing evicted yet; " if self.mean_cached_tokens >= self.num_seen_tokens else ""
        return f"KV cache {size} ({nothing}saves memory from {self.smaller_from:,} tokens on)"

    @property
    def share_text(self) -> str:
        """Size relative to a full cache, as text."""
        if not self.kv_bytes_full:
            return "-"
        percent = 100 * self.kv_bytes / self.kv_bytes_full
        return f"{percent:.1f} %" if percent < 10 else f"{percent:.0f} %"


class GenerationRun:
    """One generation, whose result is available even if it is interrupted."""

    def __init__(
        self,
        engine: CacheEngine,
        prompt: Sequence[int],  # of which the cache has seen the first tokens, but not all
        params: SamplingParams,
        room: int,  # maximum number of tokens; below that of `params` if the context ends earlier
        write: Callable[[str], None],
        strips_start: bool = False,  # whether to strip leading white space of the text
        **options: Any,  # further fields of the `Request`
    ) -> None:
        seen = engine.cache.num_seen_tokens if isinstance(engine.cache, H2OCache) else 0
        start = PromptStart(len(prompt), num_reused=seen)
        self._request = Request(tuple(prompt), params, room, start, self._take, **options)
        self._engine, self._write, self._strips_start, self._text = engine, write, strips_start, ""
        self._times = [time.perf_counter()]  # of the start and of each token

    def run(
        self, show_progress: bool = False, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Read what is new of the prompt and generate; see `result`."""
        engine, request = self._engine, self._request
        new, chunk = len(request.prompt) - request.start.num_reused, engine.chunk
        chunk = None if request.inputs else chunk
        with prefill_progress(engine.model, new, show_progress, chunk) as self._bar:
            engine.run([request], should_stop)
        while engine.verifier.step():
            pass

    @property
    def has_begun(self) -> bool:
        """Whether the prompt is read and a token generated; before, the cache may be half full."""
        return len(self._times) > 1

    def _take(self, event: Event) -> None:
        if isinstance(event, OutputDelta) and event.verified is None:
            self._times.append(time.perf_counter())
            self._bar.close()
            self._show(event.text)

    def _show(self, piece: str) -> None:
        if self._strips_start and not self._text:
            piece = piece.lstrip()
        self._text += piece
        if piece:
            self._write(piece)

    def result(self) -> Generation:
        """Finish the text and return what was generated so far."""
        cache, completion = self._engine.cache, Completion(0)
        for output in self._request.outputs:
            completion = output.completion
            self._show(output.flush())
        start, *times = self._times
        if isinstance(cache, H2OCache):
            nbytes, full = cache.nbytes, cache.full_nbytes
            seen, cached = cache.num_seen_tokens, cache.num_cached_tokens
            mean, smaller_from = mean_cached_tokens(cache), break_even_tokens(cache)
        else:
            nbytes = full = sum(map(held_bytes, cache.layers))
            seen = cached = mean = int(cache.get_seq_length())
            smaller_from = None
        return Generation(
            text=self._text,
            token_ids=completion.token_ids,
            finish_reason=self._finish_reason(completion),
            time_to_first_token=times[0] - start if times else None,
            tokens_per_second=(len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None,
            kv_bytes=int(nbytes),
            kv_bytes_full=int(full),
            num_seen_tokens=int(seen),
            num_cached_tokens=int(cached),
            mean_cached_tokens=float(mean),
            smaller_from=smaller_from,
            verified=self._request.verified,
        )

    def _finish_reason(self, completion: Completion) -> str:
        request, reason = self._request, completion.finish_reason or "interrupted"
        if reason == "length" and request.max_new_tokens != request.params.max_tokens:
            return "context"
        return "eos" if reason == "stop" and completion.stop_reason is None else reason


def mean_cached_tokens(cache: H2OCache) -> float:
    """Return the mean number of entries of a cache's heads."""
    scored = [index for index, layer in enumerate(cache.layers) if isinstance(layer, CacheLayer)]
    counts = [(cache.kept_positions(index) >= 0).sum(dim=-1).flatten() for index in scored]
    return float(torch.cat(counts).double().mean())


def break_even_tokens(cache: H2OCache) -> int | None:
    """Return the tokens from which on a cache is smaller than a full one; ``None``: no limit."""
    layers = [layer for layer in cache.layers if isinstance(layer, SlotLayer)]
    if not layers or not all(layer.holds_entries and layer.slots.capacity for layer in layers):
        return None
    limit = 0.0
    for layer in layers:
        state, slots = layer.state, layer.state.num_slots
        # A span's queries take the same memory however many slots there are.
        tensors = state.tensors().items()
        queries = sum(t.nbytes for name, t in tensors if state.kind_of(name).per == "span")
        limit += queries + (state.nbytes - queries) / slots * (layer.slots.capacity or slots)
    each = sum(layer.full_nbytes for layer in layers) / cache.num_seen_tokens
    return math.floor(limit / each) + 1


def prefill_progress(
    model: PreTrainedModel, prompt_tokens: int, show: bool, chunk: int | None = None
) -> ExitStack:
    """Show how many layers have read the prompt, until the returned stack is closed."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (modules for modules in model.modules() if isinstance(modules, nn.ModuleList))
    layers = list(next((modules for modules in lists if len(modules) == count), ()))
    steps = len(layers) * math.ceil(prompt_tokens / (chunk or prompt_tokens))
    shown = show and prompt_tokens >= LONG_PROMPT and bool(layers)
    stack = ExitStack()
    bar = stack.enter_context(Progress(f"reading {prompt_tokens:,} tokens", steps, shown=shown))
    for layer in layers if bar.is_drawn else ():
        stack.callback(layer.register_forward_hook(lambda *_: bar.advance()).remove)
    return stack


@dataclass(frozen=True)
class Job:
    """A prompt to generate from, for any cache."""

    model: PreTrainedModel
    described: Described
    prompt_ids: Sequence[int]
    params: SamplingParams  # `seed` and `max_tokens` are set
    is_chat: bool = False  # whether the prompt was rendered with the chat template
    compiled: bool = False  # whether an H2O cache's steps run through torch.compile
    pins: Sequence[tuple[int, int]] = ()  # spans of the prompt that an H2O cache does not evict
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of images
    verify: bool | str = False  # whether the answer is read again, or how repaired

    def attend(self, cache: Cache) -> AbstractContextManager[Any]:
        """Give the model the attention of an empty cache, and the cache its pins."""
        if not isinstance(cache, H2OCache):
            return nullcontext()
        cache.pin(self.pins)
        return enable(self.model, compile=self.compiled)


def generate_once(
    job: Job, cache: Cache, write: Callable[[str], None], show_progress: bool = False
) -> Generation:
    """Generate from a prompt and measure it; Ctrl-C ends it with the text so far, if any."""
    ids, params = job.prompt_ids, job.params
    room = job.described.limits.room(len(ids), int(params.max_tokens or 0))
    with job.attend(cache):
        engine = CacheEngine(job.model, job.described.tokenizer, cache)
        options: dict[str, Any] = {"inputs": job.inputs, "verify": bool(job.verify)}
        options["repairs"] = job.verify if isinstance(job.verify, str) else None
        generation = GenerationRun(engine, ids, params, room, write, **options)
        try:
            generation.run(show_progress)
            return generation.result()
        except KeyboardInterrupt:
            if not generation.has_begun:
                raise
            return replace(generation.result(), finish_reason="interrupted")


def count_same_choices(job: Job, cache: Cache, token_ids: Sequence[int]) -> int | None:
    """Count the tokens of a text that a cache also ranks first, given the text before them.

    Two generations that differ in one token have little in common afterwards, however good both
    are. Here the text before each token is the same, so the count measures what the cache lost.
    """
    if not token_ids:
        return None
    params, count = replace(job.params, stop=()), len(token_ids)
    with job.attend(cache):
        engine = CacheEngine(job.model, job.described.tokenizer, cache, forced=token_ids)
        GenerationRun(engine, job.prompt_ids, params, count, _discard, inputs=job.inputs).run()
    return sum(a == b for a, b in zip(engine.choices, token_ids, strict=True))


@dataclass
class Comparison:
    """Generations by label, the chosen cache's first; and of each the `count_same_choices`."""

    runs: dict[str, Generation] = field(default_factory=dict)
    same_choices: dict[str, int | None] = field(default_factory=dict)  # None: not counted
    interrupted: bool = False


def generate_and_compare(
    job: Job, cache: CacheConfig, baselines: Sequence[CacheConfig] | None = None, quiet: bool = True
) -> Comparison:
    """Generate with a cache; with baselines also with the full cache and each of them."""
    comparison, write = Comparison(), _discard if quiet else write_text
    h2o_cache = partial(H2OCache.from_config, job.model.config)
    make: dict[str, Callable[[], Cache]] = {cache.label: partial(h2o_cache, cache)}
    if baselines is not None:
        make[FULL] = partial(DynamicCache, config=job.model.config)
        _warm_up(job, [new() for new in make.values()])
        make |= {baseline.label: partial(h2o_cache, baseline) for baseline in baselines}
    try:
        for label, new in make.items():
            write(f"--- {label} ---\n" if baselines is not None else "")
            run = comparison.runs[label] = generate_once(job, new(), write, not quiet)
            write("\n\n" if baselines is not None else "\n")
            if FULL in comparison.runs:
                compared = cache.label if label == FULL else label
                _count_same(job, comparison, compared, make[compared]())
            if run.interrupted:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        if not comparison.runs:
            raise
        comparison.interrupted = True
    return comparison


def _count_same(job: Job, comparison: Comparison, label: str, cache: Cache) -> None:
    full, counts = comparison.runs[FULL], comparison.same_choices
    counts[label] = None  # Ctrl-C may interrupt the count
    # With sampling the full cache itself does not rank all tokens of its text first.
    if job.params.is_greedy and not full.interrupted:
        counts[label] = count_same_choices(job, cache, full.token_ids)


def _warm_up(job: Job, caches: Iterable[Cache]) -> None:
    """Run a few tokens with each cache, to keep one-off costs out of the measurements."""
    params = SamplingParams(max_tokens=_WARM_UP_TOKENS, temperature=0.0)
    prompt_ids = job.prompt_ids if job.inputs else job.prompt_ids[:_WARM_UP_PROMPT]
    short = replace(job, prompt_ids=prompt_ids, params=params, pins=(), verify=False)
    for cache in caches:
        if generate_once(short, cache, lambda text: None).interrupted:
            raise KeyboardInterrupt
