"""One generation on a cache: streamed, measured, stopped, and compared with the full cache's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
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
from h2okv.cache.layer import CacheLayer, SlotLayer
from h2okv.config import CacheConfig
from h2okv.console import Progress, discard, format_bytes, write_text
from h2okv.engine.detokenizer import Detokenizer, StopText
from h2okv.engine.sampler import RefuseNaN, eos_token_ids, generation_kwargs
from h2okv.engine.sampling_params import SamplingParams
from h2okv.integration.enable import enable, input_device, read_blocks
from h2okv.integration.loading import Described

LONG_PROMPT = 512  # tokens, from which a bar is shown while they are read
FULL = "full cache"
_WARM_UP_PROMPT = 2048
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Generation:
    """What one run gave, and what it cost."""

    shown: str  # what the user saw: without a stop string and what follows it
    text: str  # of all tokens, special tokens left out
    token_ids: list[int]  # the last one has not been through the cache
    finish_reason: str  # eos, stop (a stop string), length, context (it is full) or interrupted
    time_to_first_token: float | None  # in seconds
    tokens_per_second: float | None  # of decoding, the first token not counted
    kv_bytes: int  # held at the end, scores and positions included
    kv_bytes_full: int  # keys and values of a full cache
    num_seen_tokens: int
    num_cached_tokens: int  # by the head that holds most
    mean_cached_tokens: float  # of all heads
    smaller_from: int | None  # tokens from which on the cache takes less than a full one

    @property
    def interrupted(self) -> bool:
        return self.finish_reason == "interrupted"

    @property
    def kept_text(self) -> str:
        """How many tokens the cache keeps, for people."""
        seen, mean, most = self.num_seen_tokens, self.mean_cached_tokens, self.num_cached_tokens
        if mean >= seen:
            return f"{seen:,} tokens seen, all kept"
        heads = "" if round(mean) == most else f" by a head on average, {most:,} by the largest"
        return f"{seen:,} tokens seen, {mean:,.0f} kept{heads}"

    @property
    def memory_text(self) -> str:
        """What the cache takes, and beside it a full one as soon as that would take more."""
        size, full = format_bytes(self.kv_bytes), format_bytes(self.kv_bytes_full)
        if self.kv_bytes < self.kv_bytes_full:
            return f"KV cache {size}, a full one {full} ({self.share_text})"
        if self.smaller_from is None:
            return f"KV cache {size}"
        nothing = "nothing evicted yet; " if self.mean_cached_tokens >= self.num_seen_tokens else ""
        return f"KV cache {size} ({nothing}saves memory from {self.smaller_from:,} tokens on)"

    @property
    def share_text(self) -> str:
        """The cache's part of a full one, for people."""
        if not self.kv_bytes_full:
            return "-"
        percent = 100 * self.kv_bytes / self.kv_bytes_full
        return f"{percent:.1f} %" if percent < 10 else f"{percent:.0f} %"


class Generating(StoppingCriteria):
    """Makes one generation, and keeps what there is of it if it is cut short.

    It takes the tokens as a stopping criterion and not as a streamer, for only a criterion hears
    of a token before it is decided whether another one follows, in every version of transformers.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        token_ids: Sequence[int],  # what the cache has not seen; at least one
        params: SamplingParams,
        room: int,  # the most tokens, fewer than `params` says where the context is full before
        write: Callable[[str], None],
        ends: Iterable[int],  # tokens that end the text
        should_stop: Callable[[], bool] = lambda: False,  # asked after every forward
        strips_start: bool = False,  # the text shown begins without white space
    ) -> None:
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
        """Takes the newest token, int `[1, T]`; tells whether the text ends with it."""
        self._times.append(time.perf_counter())
        self._bar.close()
        token = int(input_ids[0, -1])
        if token in self._ends:  # no part of the text, even where the tokenizer writes it out
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
        """Reads in blocks of `prefill_chunk`, and generates; `result` tells how far it came."""
        length = self._ids.shape[1]
        generate: Any = model.generate  # its type gets lost on the way through torch's Module
        with ExitStack() as stack:
            blocks: Iterable[Any] = ()
            chunk, before = None, 0
            if isinstance(cache, H2OCache):
                cache.expect(length)  # a fraction is of all of it, however it is read
                stack.callback(cache.expect, None)
                chunk = cache.prefill_chunk
                before = 0 if chunk is None else (length - 1) // chunk * chunk
                blocks = read_blocks(model, self._ids[:, :before], cache) if before else ()
            self._bar = stack.enter_context(prefill_progress(model, length, show_progress, chunk))
            if any(self._should_stop() for _ in blocks):
                return
            rest = self._ids[:, before:].to(input_device(model))
            read = int(cache.get_seq_length()) + rest.shape[1]
            # Stop texts are those of `params`, which may replace what the model's authors stored.
            config: Any = model.generation_config
            stack.callback(setattr, config, "stop_strings", config.stop_strings)
            config.stop_strings = None
            generate(
                input_ids=rest,
                attention_mask=rest.new_ones(1, read),
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
        """Finishes the text and measures, as far as it came."""
        self._bar.close()
        self._show(self._detokenizer.end())
        if rest := self._shown.end():
            self._write(rest)
        start, *times = self._times
        if isinstance(cache, H2OCache):
            held, full = cache.nbytes, cache.full_nbytes
            seen, cached = cache.num_seen_tokens, cache.num_cached_tokens
            mean, smaller_from = mean_cached_tokens(cache), saves_from(cache)
        else:
            held = full = _nbytes(cache)
            seen = cached = mean = int(cache.get_seq_length())
            smaller_from = None
        return Generation(
            shown=self._shown.text,
            text=self._text,
            token_ids=self._detokenizer.token_ids,
            finish_reason=self._finish_reason(),
            time_to_first_token=times[0] - start if times else None,
            tokens_per_second=(len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None,
            kv_bytes=int(held),
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
    """Count what a head of a cache holds on average."""
    scored = [index for index, layer in enumerate(cache.layers) if isinstance(layer, CacheLayer)]
    counts = [(cache.kept_positions(index) >= 0).sum(dim=-1) for index in scored]
    heads = torch.cat([count.flatten() for count in counts])
    return float(heads.double().mean())


def saves_from(cache: H2OCache) -> int | None:
    """Count the tokens from which on a cache takes less than a full one.

    Returns:
        The count, by the slots that its budget comes to; ``None`` where nothing bounds them.
    """
    layers = [layer for layer in cache.layers if isinstance(layer, SlotLayer)]
    if not layers or not all(layer.holds_entries and layer.slots.capacity for layer in layers):
        return None
    limit = 0.0
    for layer in layers:
        slots = layer.state.num_slots
        limit += layer.nbytes / slots * max(slots, layer.slots.capacity or 0)
    each = sum(layer.full_nbytes for layer in layers) / cache.num_seen_tokens
    return math.floor(limit / each) + 1


def _nbytes(cache: Cache) -> int:
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def prefill_progress(
    model: PreTrainedModel, prompt_tokens: int, wanted: bool, chunk: int | None = None
) -> ExitStack:
    """Shows how many layers have read the prompt, until it is closed."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (own for own in model.modules() if isinstance(own, nn.ModuleList))
    layers = list(next((own for own in lists if len(own) == count), ()))
    steps = len(layers) * math.ceil(prompt_tokens / (chunk or prompt_tokens))
    shown = wanted and prompt_tokens >= LONG_PROMPT and bool(layers)
    stack = ExitStack()
    bar = stack.enter_context(Progress(f"reading {prompt_tokens:,} tokens", steps, shown=shown))
    for layer in layers if bar.is_drawn else ():
        stack.callback(layer.register_forward_hook(lambda *_: bar.advance()).remove)
    return stack


@dataclass(frozen=True)
class Job:
    """What is to be generated, whatever cache it is done with."""

    model: PreTrainedModel
    described: Described
    prompt_ids: Sequence[int]
    params: SamplingParams  # `seed` and `max_tokens` are set
    is_chat: bool = False  # whether the prompt is in the chat template's form
    compiled: bool = False  # an H2O cache's steps go through torch.compile
    pins: Sequence[tuple[int, int]] = ()  # spans of the prompt that an H2O cache does not evict


def generate_once(
    job: Job,
    cache: Cache,
    write: Callable[[str], None],
    show_progress: bool = False,
    processors: Sequence[LogitsProcessor] = (),
) -> Generation:
    """Generates from a prompt and measures it; Ctrl-C ends it with what there is."""
    attention: Any = nullcontext()
    if isinstance(cache, H2OCache):
        attention = enable(job.model, compile=job.compiled)
        cache.pin(job.pins)
    tokenizer, ids = job.described.tokenizer, job.prompt_ids
    room = job.described.room(len(ids), int(job.params.max_tokens or 0))
    torch.manual_seed(int(job.params.seed or 0))
    with attention:
        running = Generating(tokenizer, ids, job.params, room, write, eos_token_ids(job.model))
        try:
            running.run(job.model, cache, show_progress, processors)
            return running.result(cache)
        except KeyboardInterrupt:
            return replace(running.result(cache), finish_reason="interrupted")


@dataclass(frozen=True)
class Agreement:
    """Two runs of tokens, compared place by place."""

    compared: int  # places, as many as the longer run has
    equal: int
    first_difference: int | None  # from 0
    same_next_token: int | None = None  # see `count_same_choices`; None if it was not asked

    @classmethod
    def of(cls, tokens: Sequence[int], full: Sequence[int]) -> Agreement:
        """Compares two runs; a place that only one of them has counts as a difference."""
        same = [a == b for a, b in zip_longest(tokens, full)]
        return cls(len(same), sum(same), same.index(False) if False in same else None)


class _Follow(LogitsProcessor):
    """Notes which token would be the next, and then takes the given one."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self.choices: list[int] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        given = self._token_ids[len(self.choices)]
        self.choices.append(int(scores.argmax()))
        scores.fill_(-torch.inf)
        scores[:, given] = 0.0
        return scores


def count_same_choices(job: Job, cache: Cache, token_ids: Sequence[int]) -> int | None:
    """Counts how often the likeliest next token is the given one, the text before it given too.

    Two texts that part at one token have little in common from there on, however good both are.
    This asks at every token anew, so it tells how much the cache lost.
    """
    if not token_ids:
        return None
    follow = _Follow(token_ids)
    # Penalties are given before the processors, so the choices are those of the same decoding.
    params = replace(job.params, max_tokens=len(token_ids), stop=())
    run = generate_once(replace(job, params=params), cache, discard, processors=[follow])
    if run.interrupted:
        raise KeyboardInterrupt
    return sum(a == b for a, b in zip(follow.choices, token_ids, strict=True))


@dataclass
class Comparison:
    """Generations by label, the chosen cache's first, and how far they agree with the full one."""

    runs: dict[str, Generation] = field(default_factory=dict)
    agreements: dict[str, Agreement] = field(default_factory=dict)
    interrupted: bool = False


def generate_and_compare(
    job: Job, cache: CacheConfig, baselines: Sequence[CacheConfig] | None = None, quiet: bool = True
) -> Comparison:
    """Generates with one cache; given baselines, with the full cache and with each of them too."""
    found, write = Comparison(), discard if quiet else write_text
    h2o_cache = partial(H2OCache.from_config, job.model.config)
    make: dict[str, Callable[[], Cache]] = {cache.label: partial(h2o_cache, cache)}
    if baselines is not None:
        make[FULL] = partial(DynamicCache, config=job.model.config)
        _warm_up(job, [new() for new in make.values()])
        make |= {one.label: partial(h2o_cache, one) for one in baselines}
    try:
        for label, new in make.items():
            write(f"--- {label} ---\n" if baselines is not None else "")
            run = found.runs[label] = generate_once(job, new(), write, not quiet)
            write("\n\n" if baselines is not None else "\n")
            if FULL in found.runs:
                own = cache.label if label == FULL else label
                _note_agreement(job, found, own, make[own]())
            if run.interrupted:
                break
    except KeyboardInterrupt:
        found.interrupted = True
    found.interrupted |= any(run.interrupted for run in found.runs.values())
    return found


def _note_agreement(job: Job, found: Comparison, label: str, cache: Cache) -> None:
    full = found.runs[FULL]
    agreement = Agreement.of(found.runs[label].token_ids, full.token_ids)
    found.agreements[label] = agreement  # which stays if Ctrl-C ends what follows
    # With sampling the full cache's text is not its likeliest one, so there is nothing to ask.
    if job.params.is_greedy and not full.interrupted:
        same = count_same_choices(job, cache, full.token_ids)
        found.agreements[label] = replace(agreement, same_next_token=same)


def _warm_up(job: Job, caches: Iterable[Cache]) -> None:
    """Runs a few tokens with each cache, so that none of them pays for what happens only once."""
    params = SamplingParams(max_tokens=_WARM_UP_TOKENS, temperature=0.0)
    short = replace(job, prompt_ids=job.prompt_ids[:_WARM_UP_PROMPT], params=params, pins=())
    for cache in caches:
        if generate_once(short, cache, lambda _: None).interrupted:
            raise KeyboardInterrupt
