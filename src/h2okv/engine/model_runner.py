"""Runs the model on what the scheduler planned, on one process or on several ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel

from h2okv.cache import H2OCache
from h2okv.cache.slot_pool import (
    SlotPool,
    can_split_blocks,
    expect_partial_block,
    num_cached_by_sequence,
)
from h2okv.config import Budget
from h2okv.engine.outputs import EngineStoppedError
from h2okv.engine.request import PrefillChunk, PromptStart, ScheduledStep

_NO_LIMIT = 1 << 60
_PATIENCE = timedelta(days=3650)
"""How long a rank waits for a step: a server may have no request for any time."""


@dataclass
class StepOutput:
    """What came of a step."""

    decode_logits: torch.Tensor | None = None  # [B, V]
    prefill_logits: Sequence[torch.Tensor] = ()  # of each chunk, [1, V] or [T, V]
    error: str | None = None  # why the prompts could not be prefilled, and were dropped
    evictions: int = 0  # entries of all layers and KV heads
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0


class TensorParallelGroup:
    """The processes that hold the parts of a model; started by ``torchrun``."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        # A group of its own: that of the model's tensors gives up after some minutes.
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def smallest(self, number: int) -> int:
        """The smallest of the numbers that all ranks call this with."""
        numbers: list[Any] = [None] * self.world_size
        dist.all_gather_object(numbers, number, group=self._group)
        return int(min(numbers))

    def broadcast(self, step: ScheduledStep | None) -> ScheduledStep | None:
        """Sends the first rank's step to all, ``None`` to let them go; returns it."""
        steps = [step]
        dist.broadcast_object_list(steps, src=0, group=self._group)
        return steps[0]


class ModelRunner:
    """Runs steps on one process's model, or its part of a model, and holds the slots."""

    def __init__(
        self,
        model: PreTrainedModel,
        make_cache: Callable[[Budget | None], H2OCache],  # with the engine's budget or another one
        max_num_seqs: int,
        budget: int,
        group: TensorParallelGroup | None = None,
    ) -> None:
        self.group = group
        self._model: Any = model
        self._make_cache = make_cache
        self._prefixes: list[H2OCache] = []
        self._prefilled: H2OCache | None = None
        self._size = (max_num_seqs, budget)
        self.pool = self._make_pool()

    def _make_pool(self) -> SlotPool:
        probe = self._make_cache(Budget(heavy=1, recent=1))
        start = self._model.generation_config.bos_token_id or 0
        first = torch.tensor([[start if isinstance(start, int) else start[0]]])
        self._forward(first, torch.zeros_like(first), None, probe)
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
        """Does what was scheduled, on all ranks; mutates the slots and the prefilled prompts."""
        if self.group is not None:
            self.group.broadcast(step)
        return self._run(step)

    def follow(self) -> None:
        """Runs the first rank's steps until it lets go: closes, or has ended a call."""
        assert self.group is not None
        while (step := self.group.broadcast(None)) is not None:
            self._run(step)

    def reset(self) -> None:
        """Drops all sequences and prompts, after an error in a step."""
        if self.group is not None:  # the others are somewhere in their forward
            raise EngineStoppedError("a step has failed on one of several ranks; start them anew.")
        self._prefilled = None
        self.pool = self._make_pool()

    def _run(self, step: ScheduledStep) -> StepOutput:
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
            tokens, positions = torch.tensor([step.decode, step.positions]).unsqueeze(-1)
            output.decode_logits = self._forward(tokens, positions, None, self.pool.cache)[:, -1]
            output.evictions = self.pool.count_step()
        decoded = self._now()
        output.decode_seconds = decoded - begun
        if step.prefill:
            try:
                output.prefill_logits, evicted = self._prefill(step.prefill)
                output.evictions += evicted
            except Exception as error:  # such as no memory for a long prompt; the slots are whole
                is_refusal = isinstance(error, ValueError)
                if self.group is not None and not is_refusal:
                    raise  # the other ranks know nothing of it
                self._prefilled = None
                output.error = str(error) if is_refusal else f"{type(error).__name__}: {error}"
            output.prefill_seconds = self._now() - decoded
        return output

    def _now(self) -> float:
        if self._model.device.type == "cuda":  # which would still be at work
            torch.cuda.synchronize(self._model.device)
        return time.perf_counter()

    def _prefill(self, chunks: tuple[PrefillChunk, ...]) -> tuple[Sequence[torch.Tensor], int]:
        """Logits of each chunk, of its last or all tokens, and how many entries were evicted."""
        chunk = chunks[0]
        if chunk.start is not None:
            self._prefilled = self._begin(chunk.start, len(chunks))
        cache = self._prefilled
        assert cache is not None
        before = cache.num_cached_tokens
        if len(chunks) > 1:
            logits = self._forward(*_padded([list(own.tokens) for own in chunks]), cache)
        else:
            if cache.prefill_chunk is None and can_split_blocks(cache):
                expect_partial_block(cache, not chunk.is_last)
            tokens = torch.tensor([chunk.tokens])
            positions = chunk.position + torch.arange(tokens.shape[1]).unsqueeze(0)
            keep = 0 if chunk.wants_all_logits else 1
            logits = self._forward(tokens, positions, None, cache, keep)
        num_tokens = sum(len(own.tokens) for own in chunks)
        evicted = before + num_tokens - sum(num_cached_by_sequence(cache))
        return list(logits), evicted * self.pool.num_heads

    def _begin(self, start: PromptStart, num_prompts: int) -> H2OCache:
        if start.prefix is not None:
            return self._prefixes[start.prefix].fork(1)
        cache = self._make_cache(start.budget)
        cache.pin(start.pins)
        if num_prompts == 1:
            cache.expect(start.length)
        return cache

    @torch.no_grad()
    def _forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: H2OCache,
        keep: int = 1,
    ) -> torch.Tensor:
        """Logits of the last ``keep`` tokens or, for 0, of all: ``[B, keep or T, V]``."""
        device = self._model.device
        logits: torch.Tensor = self._model(
            input_ids=tokens.to(device),
            position_ids=positions.to(device),
            attention_mask=None if mask is None else mask.to(device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits
        return logits


def _padded(
    prompts: list[list[int]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Prompts padded on the left, with positions and mask."""
    width = max(map(len, prompts))
    # A token of the prompt's own: one whose embedding is no number reaches no other prompt.
    tokens = torch.tensor([[own[0]] * (width - len(own)) + own for own in prompts])
    mask = torch.tensor([[0] * (width - len(own)) + [1] * len(own) for own in prompts])
    return tokens, (mask.cumsum(1) - 1).clamp(min=0), None if mask.all() else mask


def check_divides(config: PreTrainedConfig) -> None:
    """Refuses a model that cannot be divided among the ranks, before its weights are loaded."""
    if "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "tensor parallelism needs one process for each part of the model; start them with "
            "torchrun --nproc-per-node N -m h2okv.cli serve --tensor-parallel ..."
        )
    count = int(os.environ["WORLD_SIZE"])
    text: Any = config.get_text_config(decoder=True)
    if not getattr(text, "base_model_tp_plan", None):
        raise ValueError(
            f"model type {config.model_type!r} has no plan for tensor parallelism in transformers; "
            "run one copy on each device instead (h2okv serve --ray --replicas)."
        )
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if kv_heads % count or heads % count:
        fitting = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and heads % n == 0]
        *others, last = (str(n) for n in fitting)
        start = f"{', '.join(others)} or {last} of them" if others else "a single one"
        raise ValueError(
            f"{count} ranks cannot share {kv_heads} KV heads (and {heads} query heads) evenly; "
            f"start {start}."
        )
