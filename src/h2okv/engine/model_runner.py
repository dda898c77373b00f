"""Runs the model on what the scheduler planned."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from h2okv.cache import H2OCache
from h2okv.cache.slot_pool import (
    SlotPool,
    can_split_blocks,
    expect_partial_block,
    num_cached_by_sequence,
)
from h2okv.config import Budget
from h2okv.engine.request import LogitsMode, PrefillChunk, PromptStart, ScheduledStep

MakeCache = Callable[[Budget | None], H2OCache]
"""Makes an empty cache, with the engine's budget or another one."""

_NO_LIMIT = 1 << 60


@dataclass
class StepOutput:
    """What came of a step.

    Attributes:
        decode_logits: Of the sequences that decoded, ``[B, V]``.
        prefill_logits: Of the chunk, ``[1, V]`` or ``[T, V]``, as asked for; of several prompts
            the last of each, ``[prompts, V]``.
        error: Why the prompts could not be prefilled; they have been dropped.
        evictions: Entries that were evicted, of all layers and KV heads.
        decode_seconds: What the decode step took.
        prefill_seconds: What the prefill took.
    """

    decode_logits: torch.Tensor | None = None
    prefill_logits: torch.Tensor | None = None
    error: str | None = None
    evictions: int = 0
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0


class ModelRunner:
    """Runs steps on one process's model, or its part of a model.

    Attributes:
        pool: The slots of all running sequences.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        make_cache: MakeCache,
        max_num_seqs: int,
        budget: int,
        tensor_parallel: bool = False,
    ) -> None:
        self._model: Any = model
        self._tensor_parallel = tensor_parallel
        self._make_cache = make_cache
        self._prefixes: list[H2OCache] = []
        self._prefilled: H2OCache | None = None
        self._size = (max_num_seqs, budget)
        self.pool = self._make_pool()

    def _make_pool(self) -> SlotPool:
        probe = self._make_cache(Budget(heavy=1, recent=1))
        start = self._model.generation_config.bos_token_id or 0
        self._forward([[start if isinstance(start, int) else start[0]]], [[0]], None, probe, 1)
        return SlotPool(probe, *self._size)

    def save_prefix(self, tokens: Sequence[int], max_prefill_tokens: int) -> None:
        """Prefills a text that later prompts begin with, and keeps its compressed cache."""
        size = self.chunk_tokens(max_prefill_tokens)
        for at in range(0, len(tokens), size):
            chunk = tuple(tokens[at : at + size])
            start = PromptStart(len(tokens)) if at == 0 else None
            self._prefill((PrefillChunk(chunk, at, at + size >= len(tokens), start),))
        assert self._prefilled is not None
        self._prefixes.append(self._prefilled)
        self._prefilled = None

    def chunk_tokens(self, most: int) -> int:
        """Says how many tokens of a prompt a forward may bring without changing the result."""
        cache = self._make_cache(None)
        if cache.prefill_chunk is not None:
            return max(most // cache.prefill_chunk, 1) * cache.prefill_chunk
        return most if can_split_blocks(cache) else _NO_LIMIT

    def execute(self, step: ScheduledStep) -> StepOutput:
        """Does what was scheduled; mutates the slots and the prompts that are prefilled."""
        output = StepOutput()
        for number in step.release:
            self.pool.release(number)
        for prompt in step.admit:
            assert self._prefilled is not None
            self.pool.admit(self._prefilled, prompt)
        if step.drop:
            self._prefilled = None
        begun = self._now()
        if step.decode:
            tokens, positions = ([[own] for own in part] for part in (step.decode, step.positions))
            output.decode_logits = self._forward(tokens, positions, None, self.pool.cache, 1)[:, -1]
            output.evictions = self.pool.count_step()
        decoded = self._now()
        output.decode_seconds = decoded - begun
        if step.prefill:
            try:
                output.prefill_logits, evicted = self._prefill(step.prefill)
                output.evictions += evicted
            except Exception as error:  # such as no memory for a long prompt; the slots are whole
                if self._tensor_parallel and not isinstance(error, ValueError):
                    raise  # the other ranks know nothing of it
                self._prefilled = None
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                output.error = f"{kind}{error}"
            output.prefill_seconds = self._now() - decoded
        return output

    def _now(self) -> float:
        if self._model.device.type == "cuda":  # which would still be at work
            torch.cuda.synchronize(self._model.device)
        return time.perf_counter()

    def reset(self) -> None:
        """Drops all sequences and prompts, after an error in a step."""
        self._prefilled = None
        self.pool = self._make_pool()

    def _prefill(self, chunks: tuple[PrefillChunk, ...]) -> tuple[torch.Tensor | None, int]:
        """Logits as asked for, and how many entries were evicted."""
        chunk = chunks[0]
        tokens = [list(own.tokens) for own in chunks]
        before = 0
        if chunk.start is not None:
            self._prefilled = self._begin(chunk.start, len(chunks))
        cache = self._prefilled
        assert cache is not None
        if len(chunks) > 1:
            logits = self._forward(*_padded(tokens), cache, 1)[:, -1]
        else:
            before = cache.num_cached_tokens
            if cache.prefill_chunk is None and can_split_blocks(cache):
                expect_partial_block(cache, not chunk.is_last)
            positions = [list(range(chunk.position, chunk.position + len(chunk.tokens)))]
            keep = 0 if chunk.logits is LogitsMode.ALL else 1
            logits = self._forward(tokens, positions, None, cache, keep)[0]
        evicted = before + sum(map(len, tokens)) - sum(num_cached_by_sequence(cache))
        needed = None if chunk.logits is LogitsMode.NONE else logits
        return needed, evicted * self.pool.num_heads

    def _begin(self, start: PromptStart, num_prompts: int) -> H2OCache:
        if start.prefix is not None:
            return self._prefixes[start.prefix].fork(1)
        cache = self._make_cache(start.budget)
        if num_prompts == 1:
            cache.expect(start.length)
        return cache

    @torch.no_grad()
    def _forward(
        self,
        tokens: list[list[int]],
        positions: list[list[int]],
        mask: list[list[int]] | None,
        cache: H2OCache,
        keep: int,
    ) -> torch.Tensor:
        """Logits ``[B, T or 1, V]``."""
        device = self._model.device
        logits: torch.Tensor = self._model(
            input_ids=torch.tensor(tokens, device=device),
            position_ids=torch.tensor(positions, device=device),
            attention_mask=None if mask is None else torch.tensor(mask, device=device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits
        return logits


def _padded(
    prompts: list[list[int]],
) -> tuple[list[list[int]], list[list[int]], list[list[int]] | None]:
    """Prompts padded on the left, with positions and mask."""
    width = max(map(len, prompts))
    left = [width - len(own) for own in prompts]
    # Any token will do for padding, the mask says where it is.
    tokens = [[own[0]] * pad + own for pad, own in zip(left, prompts, strict=True)]
    positions = [[0] * pad + list(range(width - pad)) for pad in left]
    if not any(left):
        return tokens, positions, None
    return tokens, positions, [[0] * pad + [1] * (width - pad) for pad in left]
