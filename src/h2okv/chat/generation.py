"""A generation on a cache: streamed, measured, stopped, and compared with the full cache's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from transformers import (
    DynamicCache,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
)
from transformers.cache_utils import Cache

from h2okv.cache import H2OCache
from h2okv.cache.argument import CACHE
from h2okv.cache.layer import CacheLayer
from h2okv.cache.linear_states import continues_prompts
from h2okv.cache.slot_layer import SlotLayer
from h2okv.config import CacheConfig
from h2okv.console import Progress, discard, format_bytes, write_text
from h2okv.engine.detokenizer import Detokenizer, StopText
from h2okv.engine.sampler import RefuseNaN, eos_token_ids, generation_kwargs
from h2okv.engine.sampling_params import SamplingParams
from h2okv.integration.enable import enable, input_device, read_blocks
from h2okv.models.loading import Described
from h2okv.prompts.images import images_for

LONG_PROMPT = 512  # tokens from which reading a prompt shows a progress bar
FULL = "full cache"
_WARM_UP_PROMPT = 2048
_WARM_UP_TOKENS = 4


_CHUNK = 512  # tokens of a full cache's prompt in one forward


@dataclass(frozen=True)
class Generation:
    """Text and cost of one run."""

    shown: str  # the text that the user saw, up to a stop string
    text: str  # of all tokens, without special tokens
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

    @property
    def interrupted(self) -> bool:
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


class GenerationRun(StoppingCriteria):
    """One generation, whose result is available even if it is interrupted.

    It receives the tokens as a stopping criterion, not as a streamer: in every version of
    transformers only a criterion sees a token before the next forward begins.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        token_ids: Sequence[int],  # tokens that the cache has not seen; at least one
        params: SamplingParams,
        room: int,  # maximum number of tokens; below that of `params` if the context ends earlier
        write: Callable[[str], None],
        ends: Iterable[int],  # tokens that end the text
        should_stop: Callable[[], bool] = lambda: False,  # called after every forward
        strips_start: bool = False,  # whether to strip leading white space of the text shown
        inputs: Mapping[str, torch.Tensor] | None = None,  # of images, which are read in one block
    ) -> None:
        self._inputs = inputs or {}
        self._ids = torch.tensor([list(token_ids)])
        self._params, self._room = params, room
        self._ends = sorted(ends)
        self._should_stop = should_stop
        self._detokenizer = Detokenizer(tokenizer, token_ids)
        self._shown, self._write = StopText(params.stop, strips_start), write
        self._text = ""
        self._bar = ExitStack()
        self._times = [time.perf_counter()]  # of the start and of each token

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **options: Any
    ) -> torch.BoolTensor:
        """Process the last of `input_ids`, int `[1, T]`; return whether it ends the text."""
        self._times.append(time.perf_counter())
        self._bar.close()
        token = int(input_ids[0, -1])
        if token in self._ends:  # some tokenizers decode it to text, which is not shown
            self._detokenizer.token_ids.append(token)
        else:
            self._show(self._detokenizer.add([token]))
        done = self._shown.stopped is not None or self._should_stop()
        return torch.full((1,), done, dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]

    def _show(self, piece: str) -> None:
        self._text += piece
        if shown := self._shown.add(piece):
            self._write(shown)

    def run(
        self,
        model: PreTrainedModel,
        cache: Cache,
        show_progress: bool = False,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        """Read the tokens in blocks of `read_chunk` and generate; see `result`."""
        length = self._ids.shape[1]
        generate: Any = model.generate  # torch's Module hides its type
        with ExitStack() as stack:
            blocks: Iterable[Any] = ()
            chunk, before = None, 0
            if isinstance(cache, H2OCache):
                cache.expect(length)  # fractions refer to the whole prompt, not to its blocks
                stack.callback(cache.expect, None)
                # A full cache takes any blocks; short ones let Ctrl-C stop soon.
                usual = _CHUNK if cache.cache_config.is_full and continues_prompts(cache) else None
                chunk = None if self._inputs else cache.read_chunk or usual
                before = 0 if chunk is None else (length - 1) // chunk * chunk
                blocks = read_blocks(model, self._ids[:, :before], cache, chunk) if before else ()
            self._bar = stack.enter_context(prefill_progress(model, length, show_progress, chunk))
            if any(self._should_stop() for _ in blocks):
                return
            unread = self._ids[:, before:].to(input_device(model))
            read = int(cache.get_seq_length()) + unread.shape[1]
            inputs = images_for(model, self._inputs)
            # `params` has the stop strings; those of the model's authors must not apply as well.
            config: Any = model.generation_config
            stack.callback(setattr, config, "stop_strings", config.stop_strings)
            config.stop_strings = None
            generate(
                input_ids=unread,
                attention_mask=unread.new_ones(1, read),
                **inputs,
                **{CACHE: cache},
                max_new_tokens=self._room,
                use_cache=True,
                num_beams=1,
                eos_token_id=self._ends or None,
                logits_processor=[RefuseNaN(), *processors],
                stopping_criteria=[self],
                **generation_kwargs(self._params),
            )

    def result(self, cache: Cache) -> Generation:
        """Finish the text and return what was generated so far."""
        self._bar.close()
        self._show(self._detokenizer.end())
        if text := self._shown.end():
            self._write(text)
        start, *times = self._times
        if isinstance(cache, H2OCache):
            nbytes, full = cache.nbytes, cache.full_nbytes
            seen, cached = cache.num_seen_tokens, cache.num_cached_tokens
            mean, smaller_from = mean_cached_tokens(cache), break_even_tokens(cache)
        else:
            nbytes = full = _nbytes(cache)
            seen = cached = mean = int(cache.get_seq_length())
            smaller_from = None
        return Generation(
            shown=self._shown.text,
            text=self._text,
            token_ids=self._detokenizer.token_ids,
            finish_reason=self._finish_reason(),
            time_to_first_token=times[0] - start if times else None,
            tokens_per_second=(len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None,
            kv_bytes=int(nbytes),
            kv_bytes_full=int(full),
            num_seen_tokens=int(seen),
            num_cached_tokens=int(cached),
            mean_cached_tokens=float(mean),
            smaller_from=smaller_from,
        )

    def _finish_reason(self) -> str:
        tokens = self._detokenizer.token_ids
        if tokens and tokens[-1] in self._ends:
            return "eos"
        if self._shown.stopped is not None:
            return "stop"
        if len(tokens) < self._room:
            return "interrupted"
        return "length" if self._room == self._params.max_tokens else "context"


def mean_cached_tokens(cache: H2OCache) -> float:
    """Return the mean number of entries of a cache's heads."""
    scored = [index for index, layer in enumerate(cache.layers) if isinstance(layer, CacheLayer)]
    counts = [(cache.kept_positions(index) >= 0).sum(dim=-1).flatten() for index in scored]
    return float(torch.cat(counts).double().mean())


def break_even_tokens(cache: H2OCache) -> int | None:
    """Return the number of tokens from which on a cache is smaller than a full one.

    Returns:
        The number, from the slots of the full budget; ``None`` if they have no limit.
    """
    layers = [layer for layer in cache.layers if isinstance(layer, SlotLayer)]
    if not layers or not all(layer.holds_entries and layer.slots.capacity for layer in layers):
        return None
    limit = 0.0
    for layer in layers:
        state, slots = layer.state, layer.state.num_slots
        # A span's queries take the same memory however many slots there are.
        queries = state.span_nbytes
        limit += queries + (state.nbytes - queries) / slots * (layer.slots.capacity or slots)
    each = sum(layer.full_nbytes for layer in layers) / cache.num_seen_tokens
    return math.floor(limit / each) + 1


def _nbytes(cache: Cache) -> int:
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


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


def generate_once(
    job: Job,
    cache: Cache,
    write: Callable[[str], None],
    show_progress: bool = False,
    processors: Sequence[LogitsProcessor] = (),
) -> Generation:
    """Generate from a prompt and measure it; Ctrl-C ends it with the text so far."""
    attention: Any = nullcontext()
    if isinstance(cache, H2OCache):
        attention = enable(job.model, compile=job.compiled)
        cache.pin(job.pins)
    tokenizer, ids = job.described.tokenizer, job.prompt_ids
    room = job.described.limits.room(len(ids), int(job.params.max_tokens or 0))
    torch.manual_seed(int(job.params.seed or 0))
    with attention:
        generation = GenerationRun(
            tokenizer, ids, job.params, room, write, eos_token_ids(job.model), inputs=job.inputs
        )
        try:
            generation.run(job.model, cache, show_progress, processors)
            return generation.result(cache)
        except KeyboardInterrupt:
            return replace(generation.result(cache), finish_reason="interrupted")


@dataclass(frozen=True)
class Agreement:
    """Two token sequences, compared position by position."""

    compared: int  # positions: the length of the longer sequence
    equal: int
    first_difference: int | None  # from 0
    same_next_token: int | None = None  # see `count_same_choices`; None if not measured

    @classmethod
    def of(cls, tokens: Sequence[int], full: Sequence[int]) -> Agreement:
        """Compare two sequences; positions of only one of them count as differences."""
        same = [a == b for a, b in zip_longest(tokens, full)]
        return cls(len(same), sum(same), same.index(False) if False in same else None)


class _Follow(LogitsProcessor):
    """Records the most likely token of each step, and forces the one of a given text."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self.choices: list[int] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        token = self._token_ids[len(self.choices)]
        self.choices.append(int(scores.argmax()))
        scores.fill_(-torch.inf)
        scores[:, token] = 0.0
        return scores


def count_same_choices(job: Job, cache: Cache, token_ids: Sequence[int]) -> int | None:
    """Count the tokens of a text that a cache also ranks first, given the text before them.

    Two generations that differ in one token have little in common afterwards, however good both
    are. Here the text before each token is the same, so the count measures what the cache lost.
    """
    if not token_ids:
        return None
    follow = _Follow(token_ids)
    # Penalties apply before the processors, so the choices are those of the same decoding.
    params = replace(job.params, max_tokens=len(token_ids), stop=())
    run = generate_once(replace(job, params=params), cache, discard, processors=[follow])
    if run.interrupted:
        raise KeyboardInterrupt
    return sum(a == b for a, b in zip(follow.choices, token_ids, strict=True))


@dataclass
class Comparison:
    """Generations by label, the chosen cache's first, and their agreement with the full cache's."""

    runs: dict[str, Generation] = field(default_factory=dict)
    agreements: dict[str, Agreement] = field(default_factory=dict)
    interrupted: bool = False


def generate_and_compare(
    job: Job, cache: CacheConfig, baselines: Sequence[CacheConfig] | None = None, quiet: bool = True
) -> Comparison:
    """Generate with a cache; with baselines also with the full cache and each of them."""
    comparison, write = Comparison(), discard if quiet else write_text
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
                _record_agreement(job, comparison, compared, make[compared]())
            if run.interrupted:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        comparison.interrupted = True
    return comparison


def _record_agreement(job: Job, comparison: Comparison, label: str, cache: Cache) -> None:
    full = comparison.runs[FULL]
    agreement = Agreement.of(comparison.runs[label].token_ids, full.token_ids)
    comparison.agreements[label] = agreement  # kept if Ctrl-C interrupts the count below
    # With sampling the full cache itself does not rank all tokens of its text first.
    if job.params.is_greedy and not full.interrupted:
        same = count_same_choices(job, cache, full.token_ids)
        comparison.agreements[label] = replace(agreement, same_next_token=same)


def _warm_up(job: Job, caches: Iterable[Cache]) -> None:
    """Run a few tokens with each cache, to keep one-off costs out of the measurements."""
    params = SamplingParams(max_tokens=_WARM_UP_TOKENS, temperature=0.0)
    prompt_ids = job.prompt_ids if job.inputs else job.prompt_ids[:_WARM_UP_PROMPT]
    short = replace(job, prompt_ids=prompt_ids, params=params, pins=())
    for cache in caches:
        if generate_once(short, cache, lambda _: None).interrupted:
            raise KeyboardInterrupt
