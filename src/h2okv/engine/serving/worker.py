"""A model and its rows: does what plans say."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from h2okv.budget import Budget
from h2okv.cache import H2OCache
from h2okv.cache.pieces import can_take_pieces, expect_piece
from h2okv.cache.row_block import RowBlock
from h2okv.engine.serving.plan import Plan, PromptPiece, PromptStart, Wanted

MakeCache = Callable[[Budget | None], H2OCache]
"""Makes an empty cache, with the engine's budget or another one."""


@dataclass
class Done:
    """What came of a plan.

    Attributes:
        decoded: Logits of the rows that took a step, ``[rows, V]``.
        read: Logits of the piece, ``[1, V]`` or ``[T, V]``, as asked for.
        trouble: Why the prompt could not be read; it has been dropped.
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

    Args:
        model: With H2O attention, inside `h2okv.enable`.
        make_cache: For prompts.
        num_rows: Rows of the block.
        row_budget: Entries of a row.

    Attributes:
        block: The rows.
    """

    def __init__(
        self, model: PreTrainedModel, make_cache: MakeCache, num_rows: int, row_budget: int
    ) -> None:
        self._model: Any = model
        self._make_cache = make_cache
        self._prefixes: list[H2OCache] = []
        self._reading: H2OCache | None = None
        self._size = (num_rows, row_budget)
        self.block = self._make_block()

    def _make_block(self) -> RowBlock:
        probe = self._make_cache(Budget(heavy=1, recent=1))
        start = self._model.generation_config.bos_token_id or 0
        self._forward([[start if isinstance(start, int) else start[0]]], [[0]], probe, 1)
        return RowBlock(probe, *self._size)

    def save_prefix(self, tokens: Sequence[int], piece: int) -> None:
        """Reads a text that later prompts begin with, and keeps its compressed cache.

        Args:
            tokens: One or more.
            piece: The most tokens of a forward.

        Raises:
            ValueError: If its attention is not finite.
        """
        at = 0
        while at < len(tokens):
            end = min(at + self.piece_tokens(piece), len(tokens))
            start = PromptStart(len(tokens)) if at == 0 else None
            self._read(PromptPiece(tuple(tokens[at:end]), at, end < len(tokens), start))
            at = end
        assert self._reading is not None
        self._prefixes.append(self._reading)
        self._reading = None

    def piece_tokens(self, wished: int) -> int:
        """Says how many tokens of a prompt a forward may bring without changing the result.

        Args:
            wished: About how many would be good.

        Returns:
            A number; very large if a prompt must come whole.
        """
        cache = self._make_cache(None)
        if cache.prefill_chunk is not None:
            return max(wished // cache.prefill_chunk, 1) * cache.prefill_chunk
        return wished if can_take_pieces(cache) else 1 << 60

    def execute(self, plan: Plan) -> Done:
        """Does what a plan says; mutates rows and the prompt under way.

        Args:
            plan: What to do.

        Returns:
            What came of it. Trouble with the prompt does not stop the rows.
        """
        done = Done()
        for row in plan.leave:
            self.block.give_back(row)
        for _ in range(plan.join):
            assert self._reading is not None
            self.block.add(self._reading)
        if plan.forget:
            self._reading = None
        begun = time.perf_counter()
        if plan.decode:
            tokens, positions = ([[own] for own in part] for part in (plan.decode, plan.positions))
            done.decoded = self._forward(tokens, positions, self.block.cache, 1)[:, -1]
            done.evictions = self.block.count_step()
        if plan.piece is not None:
            between = self._now()
            done.step_seconds = between - begun
            before = 0 if plan.piece.start is not None else _held(self._reading)
            try:
                done.read = self._read(plan.piece)
                done.evictions += self._evicted(plan.piece, before)
            except ValueError as error:
                self._reading = None
                done.trouble = str(error)
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

    def _read(self, piece: PromptPiece) -> torch.Tensor | None:
        if piece.start is not None:
            self._reading = self._begin(piece.start)
        cache = self._reading
        assert cache is not None
        if cache.prefill_chunk is None and can_take_pieces(cache):
            expect_piece(cache, piece.goes_on)
        positions = list(range(piece.position, piece.position + len(piece.tokens)))
        keep = 0 if piece.wanted is Wanted.ALL else 1
        logits = self._forward([list(piece.tokens)], [positions], cache, keep)[0]
        return None if piece.wanted is Wanted.NONE else logits

    def _evicted(self, piece: PromptPiece, before: int) -> int:
        """Entries that a piece, now read, has cost, of all layers and KV heads."""
        if piece.start is not None and piece.start.prefix is not None:
            before = _held(self._prefixes[piece.start.prefix])
        return (before + len(piece.tokens) - _held(self._reading)) * self.block.num_heads

    def _begin(self, start: PromptStart) -> H2OCache:
        if start.prefix is not None:
            return self._prefixes[start.prefix].fork(1)
        budget = None
        if start.budget is not None:
            heavy, recent, sink = start.budget
            budget = Budget(heavy=heavy, recent=recent, sink=sink)
        cache = self._make_cache(budget)
        cache.expect(start.length)
        return cache

    @torch.no_grad()
    def _forward(
        self, tokens: list[list[int]], positions: list[list[int]], cache: H2OCache, keep: int
    ) -> torch.Tensor:
        """Logits ``[B, T or 1, V]``."""
        device = self._model.device
        logits: torch.Tensor = self._model(
            input_ids=torch.tensor(tokens, device=device),
            position_ids=torch.tensor(positions, device=device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits
        return logits


def _held(cache: H2OCache | None) -> int:
    """Entries of a sequence, of one KV head."""
    assert cache is not None
    return cache.num_cached_tokens
