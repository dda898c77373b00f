"""One decode step of a layer's slots: write, attend, add to the scores, find the slot to free."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from h2okv.ops.decode import Ranks, decode_with_scores, write_slot
from h2okv.ops.packing import Entries
from h2okv.ops.rotary import turn
from h2okv.ops.selection import free_slot, protected_entries

Priority = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(scores, positions, newest)`` to fp32 ``[B, H, S]``; see `h2okv.policy.Policy.priority`."""


class Slots(NamedTuple):
    """What a layer holds; a step mutates every tensor but `enabled`.

    Attributes:
        keys: ``[B, H, S, D]``, contiguous or packed; not turned, pairs next to each other, if
            there are `ranks`.
        values: ``[B, H, S, Dv]``, contiguous or packed.
        scores: fp32 ``[B, H, S]``.
        positions: int32 ``[B, H, S]``; -1 for an empty slot.
        free: int64 ``[B, H, 1]``, the slot that the new token takes; empty.
        seen: int64 ``[B]``, real tokens that went through.
        enabled: bool ``[B, H, S]``, slots within each sequence's budget + 1; ``None`` if all are.
        ranks: int32 ``[B, H, S]``, places in the cache when positions roll; S - 1 for a free slot.
    """

    keys: Entries
    values: Entries
    scores: torch.Tensor
    positions: torch.Tensor
    free: torch.Tensor
    seen: torch.Tensor
    enabled: torch.Tensor | None = None
    ranks: torch.Tensor | None = None


class Turns(NamedTuple):
    """The turns of rolling positions, which all steps share.

    Attributes:
        to_rank: fp32 ``[S, R / 2, 2]``, the turn to each rank.
        relative: fp32 ``[S, R / 2, 2]``, the same as seen from the last rank.
    """

    to_rank: torch.Tensor
    relative: torch.Tensor


class StepRules(NamedTuple):
    """What stays the same from step to step.

    Attributes:
        scale: factor on the logits.
        recent: protected newest positions, int64 ``[B, 1, 1]``.
        sink: protected first positions, int64 ``[B, 1, 1]``; ``None`` if there are none.
        softcap: as in `reference.attention_with_scores`.
        turns: for rolling positions; ``None`` if keys come turned.
        priority: ranks what is not protected, the lowest goes first; ``None``: the scores do.
        full: True if no slot but the free one is empty, which saves looking for those.
    """

    scale: float
    recent: torch.Tensor
    sink: torch.Tensor | None = None
    softcap: float | None = None
    turns: Turns | None = None
    priority: Priority | None = None
    full: bool = False


def decode_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: Slots,
    rules: StepRules,
    real: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs one token of each sequence through the slots (arXiv 2306.14048, Algorithm 1).

    Static shapes and no host sync.

    Args:
        query: ``[B, HQ, 1, D]``; not turned if there are `Turns`.
        key: ``[B, H, 1, D]``, likewise.
        value: ``[B, H, 1, Dv]``.
        slots: what is held; mutated.
        rules: how.
        real: bool ``[B, 1]``, False where the token is padding; ``None`` if all are real.

    Returns:
        ``[B, HQ, 1, Dv]`` in the values' dtype; in the query's if they are packed.
    """
    full = rules.full and real is None
    ranks = None
    if rules.turns is not None and slots.ranks is not None:
        query, ranks = rank_new(
            query, slots.positions, slots.free, slots.ranks, rules.turns, full, real
        )
    write_slot(slots.keys, slots.free, key)
    write_slot(slots.values, slots.free, value)
    position = slots.seen.to(torch.int32).view(-1, 1, 1)
    if real is not None:
        position = torch.where(real.unsqueeze(1), position, -1)
    slots.positions.scatter_(-1, slots.free, position.expand_as(slots.free))
    slots.scores.scatter_(-1, slots.free, 0.0)
    hidden = None if full else slots.positions < 0
    output, sums = decode_with_scores(
        query, slots.keys, slots.values, hidden, rules.scale, rules.softcap, ranks
    )
    if real is None:
        slots.seen.add_(1)
    else:
        sums = sums * real.unsqueeze(1)
        slots.seen.add_(real[:, 0])
    slots.scores.add_(sums)
    find_free(slots, rules, full)
    return output


def rank_new(
    query: torch.Tensor,
    positions: torch.Tensor,
    free: torch.Tensor,
    ranks: torch.Tensor,
    turns: Turns,
    full: bool,
    real: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Ranks]:
    """Ranks the new token behind all; mutates the ranks.

    Args:
        query: ``[B, HQ, 1, D]``, not turned.
        positions: int32 ``[B, H, S]``, before the new entry.
        free: int64 ``[B, H, 1]``, the slot that it takes.
        ranks: int32 ``[B, H, S]``; mutated.
        turns: of all ranks.
        full: whether the entries with the new one take all ranks.
        real: bool ``[B, 1]``, False where the token is padding, which takes no rank.

    Returns:
        The query, turned to its rank, and where the keys belong.
    """
    if full:
        # The free slot has the last rank already, and the keys are turned as seen from there.
        return query, Ranks(turns.relative, ranks)
    rank = (positions >= 0).sum(dim=-1, keepdim=True)
    # All heads of a row hold the same number of entries.
    query = turn(query, turns.to_rank[rank[:, :1]])
    if real is not None:
        rank = torch.where(real.unsqueeze(1), rank, ranks.shape[-1] - 1)
    ranks.scatter_(-1, free, rank.to(torch.int32))
    return query, Ranks(turns.to_rank, ranks)


def find_free(slots: Slots, rules: StepRules, full: bool) -> None:
    """Finds the slot that the next token takes, and evicts what it holds.

    Args:
        slots: after the new entry's scores; mutated.
        rules: how.
        full: whether all slots are taken.
    """
    newest = slots.seen.view(-1, 1, 1) - 1
    priority = slots.scores
    if rules.priority is not None:
        priority = rules.priority(slots.scores, slots.positions, newest)
    protected = protected_entries(slots.positions, newest, rules.sink, rules.recent)
    chosen = free_slot(priority, slots.positions, protected, slots.enabled, full)
    # In place: a recorded CUDA graph reads and writes the same memory in every step.
    slots.free.copy_(chosen)
    slots.positions.scatter_(-1, slots.free, -1)
    if slots.ranks is not None:
        _close_gap(slots.ranks, slots.free)


def _close_gap(ranks: torch.Tensor, free: torch.Tensor) -> None:
    """Moves the entries behind the freed slot's one rank down; mutates the ranks."""
    # Slots that stay closed (`enabled`) move too, but never below a rank that is freed.
    behind = ranks > ranks.gather(-1, free)
    ranks.add_(behind, alpha=-1)
    ranks.scatter_(-1, free, ranks.shape[-1] - 1)
