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
from h2okv.engine.request import Plan, PromptPiece, PromptStart, Wanted

MakeCache = Callable[[Budget | None], H2OCache]
"""Makes an empty cache, with the engine's budget or another one."""


@dataclass
class Done:
    """What came of a plan.

    Attributes:
        decoded: Logits of the rows that took a step, ``[rows, V]``.
        read: Logits of the piece, ``[1, V]`` or ``[T, V]``, as asked for; of several prompts the
            last of each, ``[prompts, V]``.
        trouble: Why the prompts could not be read; they have been dropped.
        evictions: Entries that were evicted, of all layers and KV heads.
        step_seconds: What the step took.
        piece_seconds: What the piece took.
    """

    decoded: torch.Tensor | None = None
    read: torch.Tensor | None = None
    trouble: str | None = None
    evictions: int = 0
    step_seconds: float = 0.0
    piece_seconds: float = 0.0


class Worker:
    """Runs plans on one process's model, or its part of a model.

    Attributes:
        block: The rows.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        make_cache: MakeCache,
        num_rows: int,
        row_budget: int,
        in_parts: bool = False,
    ) -> None:
        self._model: Any = model
        self._in_parts = in_parts
        self._make_cache = make_cache
        self._prefixes: list[H2OCache] = []
        self._reading: H2OCache | None = None
        self._size = (num_rows, row_budget)
        self.block = self._make_block()

    def _make_block(self) -> SlotPool:
        probe = self._make_cache(Budget(heavy=1, recent=1))
        start = self._model.generation_config.bos_token_id or 0
        self._forward([[start if isinstance(start, int) else start[0]]], [[0]], None, probe, 1)
        return SlotPool(probe, *self._size)

    def save_prefix(self, tokens: Sequence[int], piece: int) -> None:
        """Reads a text that later prompts begin with, and keeps its compressed cache."""
        at = 0
        while at < len(tokens):
            end = min(at + self.piece_tokens(piece), len(tokens))
            start = PromptStart(len(tokens)) if at == 0 else None
            self._read((PromptPiece(tuple(tokens[at:end]), at, end < len(tokens), start),))
            at = end
        assert self._reading is not None
        self._prefixes.append(self._reading)
        self._reading = None

    def piece_tokens(self, wished: int) -> int:
        """Says how many tokens of a prompt a forward may bring without changing the result."""
        cache = self._make_cache(None)
        if cache.prefill_chunk is not None:
            return max(wished // cache.prefill_chunk, 1) * cache.prefill_chunk
        return wished if can_split_blocks(cache) else 1 << 60

    def execute(self, plan: Plan) -> Done:
        """Does what a plan says; mutates rows and the prompt under way."""
        done = Done()
        for row in plan.leave:
            self.block.release(row)
        for prompt in plan.join:
            assert self._reading is not None
            self.block.admit(self._reading, prompt)
        if plan.forget:
            self._reading = None
        begun = time.perf_counter()
        if plan.decode:
            tokens, positions = ([[own] for own in part] for part in (plan.decode, plan.positions))
            done.decoded = self._forward(tokens, positions, None, self.block.cache, 1)[:, -1]
            done.evictions = self.block.count_step()
        if plan.pieces:
            between = self._now()
            done.step_seconds = between - begun
            try:
                done.read, lost = self._read(plan.pieces)
                done.evictions += lost
            except Exception as error:  # such as no memory for a long prompt; the rows are whole
                if self._in_parts and not isinstance(error, ValueError):
                    raise  # the other parts know nothing of it
                self._reading = None
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                done.trouble = f"{kind}{error}"
            done.piece_seconds = self._now() - between
        else:
            done.step_seconds = self._now() - begun
        return done

    def _now(self) -> float:
        if self._model.device.type == "cuda":  # which would still be at work
            torch.cuda.synchronize(self._model.device)
        return time.perf_counter()

    def reset(self) -> None:
        """Drops all rows and the prompt under way, after an error in a step."""
        self._reading = None
        self.block = self._make_block()

    def _read(self, pieces: tuple[PromptPiece, ...]) -> tuple[torch.Tensor | None, int]:
        """Logits as asked for, and how many entries were evicted."""
        piece = pieces[0]
        tokens = [list(own.tokens) for own in pieces]
        if len(pieces) > 1:
            together = self._reading = self._make_cache(_budget_of(piece.start))
            logits = self._forward(*_padded(tokens), together, 1)[:, -1]
            return logits, self._lost(tokens, together, 0)
        if piece.start is not None:
            self._reading = self._begin(piece.start)
        cache = self._reading
        assert cache is not None
        before = cache.num_cached_tokens
        if cache.prefill_chunk is None and can_split_blocks(cache):
            expect_partial_block(cache, piece.goes_on)
        positions = [list(range(piece.position, piece.position + len(piece.tokens)))]
        keep = 0 if piece.wanted is Wanted.ALL else 1
        logits = self._forward(tokens, positions, None, cache, keep)[0]
        wanted = None if piece.wanted is Wanted.NONE else logits
        return wanted, self._lost(tokens, cache, before)

    def _lost(self, tokens: list[list[int]], cache: H2OCache, before: int) -> int:
        """Entries that reading has cost, of all layers and KV heads that evict by H2O."""
        held = sum(num_cached_by_sequence(cache))
        return (before + sum(map(len, tokens)) - held) * self.block.num_heads

    def _begin(self, start: PromptStart) -> H2OCache:
        if start.prefix is not None:
            return self._prefixes[start.prefix].fork(1)
        cache = self._make_cache(_budget_of(start))
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


def _budget_of(start: PromptStart | None) -> Budget | None:
    """The budget that a prompt has of its own."""
    if start is None or start.budget is None:
        return None
    heavy, recent, sink = start.budget
    return Budget(heavy=heavy, recent=recent, sink=sink)


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
