"""One generation with one cache, measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedModel
from transformers.cache_utils import Cache

import h2okv
from h2okv.cli.options import Sampling
from h2okv.cli.prefill_progress import PrefillProgress
from h2okv.cli.text_stream import TextStream
from h2okv.evaluation.numbers_only import NumbersOnly
from h2okv.integration.loading import Described

_WARM_UP_PROMPT = 2048
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Job:
    """What is to be generated, whatever cache it is done with.

    Attributes:
        model: From `load_weights`.
        described: From `describe`.
        input_ids: The prompt, int [1, T].
        sampling: How to choose the tokens, and how many.
        compiled: Whether an H2O cache's steps go through torch.compile.
    """

    model: PreTrainedModel
    described: Described
    input_ids: torch.Tensor
    sampling: Sampling
    compiled: bool = False

    @property
    def room(self) -> int:
        """How many tokens can be generated before the model's context is full."""
        if self.described.context is None:
            return self.sampling.max_new_tokens
        left = self.described.context - self.input_ids.shape[1]
        return min(self.sampling.max_new_tokens, left)


@dataclass(frozen=True)
class Generation:
    """What one run gave, and what it cost.

    Attributes:
        text: The new text.
        token_ids: The new tokens.
        finish_reason: `length`, `context` (the model's context is full), `eos` or `interrupted`.
        time_to_first_token: Seconds; None if no token came.
        tokens_per_second: While decoding, the first token not counted; None below two tokens.
        kv_bytes: Bytes that the cache held at the end, the scores and positions included.
        kv_bytes_full: Key and value bytes that a full cache would have held.
        num_seen_tokens: Tokens that went through the cache.
        num_cached_tokens: Tokens of which it still held the key and value, for each head.
    """

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


def generate_once(
    job: Job,
    cache: Cache,
    write: Callable[[str], None],
    show_progress: bool = False,
    processors: Sequence[LogitsProcessor] = (),
) -> Generation:
    """Generates from a prompt and measures it; Ctrl-C ends it with what there is.

    Args:
        job: What to generate.
        cache: An `H2OCache`, or a cache of transformers for the model's own attention.
        write: Takes the text while it is made.
        show_progress: Whether to draw a progress bar for the prompt.
        processors: What else looks at the logits before a token is chosen.

    Returns:
        The text and its measurements.
    """
    model = job.model
    attention: AbstractContextManager[Any] = nullcontext()
    if isinstance(cache, h2okv.H2OCache):
        attention = h2okv.enable(model, compile=job.compiled)
    interrupted = False
    chunk = _chunk(cache)
    length = job.input_ids.shape[1]
    with attention, PrefillProgress(model, length, show_progress, chunk) as progress:
        stream = TextStream(job.described.tokenizer, job.input_ids, write, progress.close)
        torch.manual_seed(job.sampling.seed)
        start = time.perf_counter()
        try:
            _generate(job, cache, stream, processors)
        except KeyboardInterrupt:
            interrupted = True
            progress.close()
            stream.end()
    reason = "interrupted" if interrupted else _finish_reason(job, stream)
    return _measured(stream, start, cache, reason)


def warm_up(job: Job, make_caches: Sequence[Callable[[], Cache]]) -> None:
    """Runs a few tokens with each cache, so that none of them pays for what happens only once.

    Args:
        job: What will be generated.
        make_caches: Each gives a new cache.

    Raises:
        KeyboardInterrupt: If Ctrl-C came meanwhile.
    """
    short = replace(
        job,
        input_ids=job.input_ids[:, :_WARM_UP_PROMPT],
        sampling=Sampling(max_new_tokens=_WARM_UP_TOKENS),
    )
    for make_cache in make_caches:
        if generate_once(short, make_cache(), lambda _: None).interrupted:
            raise KeyboardInterrupt


def sampling_options(sampling: Sampling) -> dict[str, Any]:
    """Says in the words of `generate` how the tokens are chosen.

    Args:
        sampling: What the user asked for.

    Returns:
        Arguments for `generate`.
    """
    if sampling.temperature == 0:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0,
    }


def _generate(
    job: Job, cache: Cache, stream: TextStream, processors: Sequence[LogitsProcessor]
) -> None:
    input_ids = job.input_ids.to(job.model.device)
    options = sampling_options(job.sampling)
    if isinstance(cache, h2okv.H2OCache) and cache.prefill_chunk is not None:
        # Blocks of the cache, and no more than one of them in the model at a time.
        cache.expect(input_ids.shape[1])
        options["prefill_chunk_size"] = cache.prefill_chunk
    generate: Any = job.model.generate  # its type gets lost on the way through torch's Module
    generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        past_key_values=cache,
        max_new_tokens=job.room,
        use_cache=True,
        num_beams=1,
        logits_processor=[NumbersOnly(), *processors],
        streamer=stream,
        **options,
    )


def _chunk(cache: Cache) -> int | None:
    """The most tokens that are read at once."""
    return cache.prefill_chunk if isinstance(cache, h2okv.H2OCache) else None


def _finish_reason(job: Job, stream: TextStream) -> str:
    if len(stream.token_ids) < job.room:
        return "eos"
    return "length" if job.room == job.sampling.max_new_tokens else "context"


def _measured(stream: TextStream, start: float, cache: Cache, finish_reason: str) -> Generation:
    times = stream.arrival_times
    speed = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None
    if isinstance(cache, h2okv.H2OCache):
        held, full = cache.nbytes, cache.full_nbytes
        seen, cached = cache.num_seen_tokens, cache.num_cached_tokens
    else:
        held = full = _nbytes(cache)
        seen = cached = int(cache.get_seq_length())
    return Generation(
        text=stream.text,
        token_ids=stream.token_ids,
        finish_reason=finish_reason,
        time_to_first_token=times[0] - start if times else None,
        tokens_per_second=speed,
        kv_bytes=int(held),
        kv_bytes_full=int(full),
        num_seen_tokens=int(seen),
        num_cached_tokens=int(cached),
    )


def _nbytes(cache: Cache) -> int:
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
