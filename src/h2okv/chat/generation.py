"""One generation on a cache: streamed, measured, stopped, and compared with the full cache's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import (
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
)
from transformers.cache_utils import Cache

from h2okv.cache import H2OCache
from h2okv.console import Progress, discard
from h2okv.engine.detokenizer import StopText, TextStream
from h2okv.engine.sampler import RefuseNaN, eos_token_ids, generation_kwargs
from h2okv.engine.sampling_params import SamplingParams
from h2okv.integration import enable, read_blocks
from h2okv.integration.loading import Described

LONG_PROMPT = 512
"""A prompt of so many tokens gets a progress bar while it is read."""
_WARM_UP_PROMPT = 2048
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Generation:
    """What one run gave, and what it cost.

    Attributes:
        shown: The text that the user saw: without a stop string and what follows it.
        text: The text of all tokens, special tokens left out.
        token_ids: The new tokens; the last one has not been through the cache.
        finish_reason: `eos`, `stop` (a stop string), `length`, `context` (the context window is
            full) or `interrupted`.
        time_to_first_token: Seconds; None if no token came.
        tokens_per_second: While decoding, the first token not counted; None below two tokens.
        kv_bytes: Bytes that the cache held at the end, scores and positions included.
        kv_bytes_full: Key and value bytes that a full cache would have held.
        num_seen_tokens: Tokens that went through the cache.
        num_cached_tokens: Tokens of which it still held the key and value, for each head.
    """

    shown: str
    text: str
    token_ids: list[int]
    finish_reason: str
    time_to_first_token: float | None
    tokens_per_second: float | None
    kv_bytes: int
    kv_bytes_full: int
    num_seen_tokens: int
    num_cached_tokens: int

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it."""
        return self.finish_reason == "interrupted"


class Generating(StoppingCriteria):
    """Makes one generation, and keeps what there is of it if it is cut short.

    It takes the tokens as a stopping criterion and not as a streamer, for only a criterion hears
    of a token before it is decided whether another one follows, in every version of transformers.

    Args:
        tokenizer: The model's.
        token_ids: What the cache has not seen; at least one.
        params: How tokens are chosen, how many, and what stops them.
        write: Takes the text as it comes.
        ends: Tokens that end the text.
        should_stop: Asked after every forward.
        strips_start: Whether the text shown begins without white space.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        token_ids: Sequence[int],
        params: SamplingParams,
        write: Callable[[str], None],
        ends: Sequence[int],
        should_stop: Callable[[], bool] = lambda: False,
        strips_start: bool = False,
    ) -> None:
        self._ids = torch.tensor([list(token_ids)])
        self._params = params
        self._ends = list(ends)
        self._should_stop = should_stop
        self._shown = StopText(params.stop, write, strips_start)
        self._close_bar: Callable[[], None] = lambda: None
        self._stream = TextStream(tokenizer, self._ids, self._shown.add, self._first_token)
        self._stream.put(self._ids)
        self._start = time.perf_counter()

    def _first_token(self) -> None:
        self._close_bar()

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **options: Any
    ) -> torch.BoolTensor:
        """Takes the newest token, int `[1, T]`; tells whether the text ends with it."""
        self._stream.put(input_ids[0, -1:].cpu())
        done = self._shown.stopped is not None or self._should_stop()
        return torch.full((1,), done, dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]

    def run(
        self,
        model: PreTrainedModel,
        cache: Cache,
        show_progress: bool = False,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        """Reads and generates; `result` tells how far it came, also after an error.

        The tokens are read in blocks of `cache.prefill_chunk`, the last of which is the first
        forward of `generate`; so they are read exactly as `h2okv.prefill` would.
        """
        chunk = cache.prefill_chunk if isinstance(cache, H2OCache) else None
        length = self._ids.shape[1]
        with prefill_progress(model, length, show_progress, chunk) as self._close_bar:
            before = 0 if chunk is None else (length - 1) // chunk * chunk
            if not isinstance(cache, H2OCache):
                self._generate(model, cache, self._ids, processors)
                return
            cache.expect(length)  # a fraction is of all of it, however it is read
            try:
                if not before or self._read(model, cache, before):
                    self._generate(model, cache, self._ids[:, before:], processors)
            finally:
                cache.expect(None)

    def _read(self, model: PreTrainedModel, cache: H2OCache, count: int) -> bool:
        """Reads all blocks but the last; returns whether nobody wants it to stop."""
        blocks = read_blocks(model, self._ids[:, :count], cache)
        return all(not self._should_stop() for _ in blocks)

    def _generate(
        self,
        model: PreTrainedModel,
        cache: Cache,
        rest: torch.Tensor,
        processors: Sequence[LogitsProcessor],
    ) -> None:
        rest = rest.to(model.device)
        seen = cache.num_seen_tokens if isinstance(cache, H2OCache) else cache.get_seq_length()
        generate: Any = model.generate  # its type gets lost on the way through torch's Module
        generate(
            input_ids=rest,
            attention_mask=torch.ones(
                1, int(seen) + rest.shape[1], dtype=torch.long, device=model.device
            ),
            past_key_values=cache,
            max_new_tokens=self._params.max_tokens,
            use_cache=True,
            num_beams=1,
            eos_token_id=self._ends or None,
            logits_processor=[RefuseNaN(), *processors],
            stopping_criteria=[self],
            **generation_kwargs(self._params),
        )

    def result(self, cache: Cache) -> Generation:
        """Finishes the text and measures, as far as it came."""
        self._close_bar()
        self._stream.end()
        self._shown.end()
        times = self._stream.arrival_times
        if isinstance(cache, H2OCache):
            held, full = cache.nbytes, cache.full_nbytes
            seen, cached = cache.num_seen_tokens, cache.num_cached_tokens
        else:
            held = full = _nbytes(cache)
            seen = cached = int(cache.get_seq_length())
        return Generation(
            shown=self._shown.text,
            text=self._stream.text,
            token_ids=self._stream.token_ids,
            finish_reason=self._finish_reason(),
            time_to_first_token=times[0] - self._start if times else None,
            tokens_per_second=(len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None,
            kv_bytes=int(held),
            kv_bytes_full=int(full),
            num_seen_tokens=int(seen),
            num_cached_tokens=int(cached),
        )

    def _finish_reason(self) -> str:
        tokens = self._stream.token_ids
        if tokens and tokens[-1] in self._ends:
            return "eos"
        if self._shown.stopped is not None:
            return "stop"
        return "length" if len(tokens) == self._params.max_tokens else "interrupted"


def _nbytes(cache: Cache) -> int:
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@contextmanager
def prefill_progress(
    model: PreTrainedModel, prompt_tokens: int, wanted: bool, chunk: int | None = None
) -> Iterator[Callable[[], None]]:
    """Shows how many layers have read the prompt; gives the function that ends it early."""
    layers = decoder_layers(model)
    steps = len(layers) * math.ceil(prompt_tokens / (chunk or prompt_tokens))
    shown = wanted and prompt_tokens >= LONG_PROMPT and bool(layers)
    with ExitStack() as stack:
        bar = stack.enter_context(Progress(f"reading {prompt_tokens:,} tokens", steps, shown=shown))
        for layer in layers if bar.is_drawn else ():
            stack.callback(layer.register_forward_hook(lambda *_: bar.advance()).remove)
        yield stack.close


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Finds a model's decoder layers."""
    num_layers = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    return []


def end_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> list[int]:
    """Lists the tokens that end a text: the model's own, and for an answer the tokenizer's."""
    ends = {*eos_token_ids(model), None if tokenizer is None else tokenizer.eos_token_id}
    return sorted(token for token in ends if token is not None)


def check_vocabulary(described: Described, largest: int) -> None:
    """Refuses a token that the model has no embedding for."""
    vocab_size = described.config.get_text_config().vocab_size
    if largest >= vocab_size:
        raise ValueError(
            f"the tokenizer of --model {described.name!r} gives token {largest}, but the model"
            f" knows only {vocab_size}; get the model again, with its own tokenizer"
        )


@dataclass(frozen=True)
class Job:
    """What is to be generated, whatever cache it is done with.

    Attributes:
        model: From `load_weights`.
        described: From `describe`.
        input_ids: The prompt, int [1, T].
        params: How to choose the tokens, and how many; `seed` and `max_tokens` are set.
        ends: Tokens that end the text.
        compiled: Whether an H2O cache's steps go through torch.compile.
    """

    model: PreTrainedModel
    described: Described
    input_ids: torch.Tensor
    params: SamplingParams
    ends: tuple[int, ...] = ()
    compiled: bool = False

    @property
    def room(self) -> int:
        """How many tokens can be generated before the context window is full."""
        wanted = int(self.params.max_tokens or 0)
        if self.described.context is None:
            return wanted
        return min(wanted, self.described.context - self.input_ids.shape[1])


def generate_once(
    job: Job,
    cache: Cache,
    write: Callable[[str], None],
    show_progress: bool = False,
    processors: Sequence[LogitsProcessor] = (),
) -> Generation:
    """Generates from a prompt and measures it; Ctrl-C ends it with what there is."""
    attention: AbstractContextManager[Any] = nullcontext()
    if isinstance(cache, H2OCache):
        attention = enable(job.model, compile=job.compiled)
    params = replace(job.params, max_tokens=job.room)
    torch.manual_seed(int(job.params.seed or 0))
    with attention:
        ids = job.input_ids[0].tolist()
        running = Generating(job.described.tokenizer, ids, params, write, job.ends)
        try:
            running.run(job.model, cache, show_progress, processors)
            made = running.result(cache)
        except KeyboardInterrupt:
            made = replace(running.result(cache), finish_reason="interrupted")
    if made.finish_reason == "length" and job.room < int(job.params.max_tokens or 0):
        return replace(made, finish_reason="context")
    return made


def warm_up(job: Job, make_caches: Sequence[Callable[[], Cache]]) -> None:
    """Runs a few tokens with each cache, so that none of them pays for what happens only once."""
    short = replace(
        job,
        input_ids=job.input_ids[:, :_WARM_UP_PROMPT],
        params=SamplingParams(max_tokens=_WARM_UP_TOKENS, temperature=0.0),
    )
    for make_cache in make_caches:
        if generate_once(short, make_cache(), lambda _: None).interrupted:
            raise KeyboardInterrupt


@dataclass(frozen=True)
class Agreement:
    """Two runs of tokens, compared place by place.

    Attributes:
        compared: Places, as many as the longer run has.
        equal: Places where both have the same token.
        first_difference: The first place where they differ, from 0; None if they never do.
        same_next_token: Places of the full cache's text where the other cache, after that same
            text, would choose the same token; None if it was not asked.
    """

    compared: int
    equal: int
    first_difference: int | None
    same_next_token: int | None = None

    @classmethod
    def of(
        cls, tokens: Sequence[int], full: Sequence[int], same_next_token: int | None = None
    ) -> Agreement:
        """Compares two runs; a place that only one of them has counts as a difference."""
        compared = max(len(tokens), len(full))
        same = [a == b for a, b in zip(tokens, full, strict=False)]
        same += [False] * (compared - len(same))
        first = same.index(False) if False in same else None
        return cls(compared, sum(same), first, same_next_token)


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
