"""Evictions at fixed places: at multiples of `evict_every` tokens of a sequence, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2okv.cache.block import Block
from h2okv.cache.slot_state import SlotState, ordinary_tensors


@dataclass(frozen=True)
class Spans:
    """What changes where a layer evicts every c real tokens of a sequence, counted from its first.

    A span is the c tokens between two evictions. Until it ends, all its tokens stay, so that what
    is kept depends on the text and not on how blocks and steps cut it.
    """

    length: int  # c, at least 2; a span of one token is an ordinary step

    def phases(self, state: SlotState) -> list[int]:
        """Return the tokens of its span that each sequence has read, 0 to c - 1; a host sync."""
        phases: list[int] = (state.num_real_tokens % self.length).tolist()
        return phases

    def is_over(self, state: SlotState) -> Tensor:
        """Mark the sequences whose span has just ended, bool ``[B, 1, 1]``."""
        return (state.num_real_tokens % self.length == 0).view(-1, 1, 1)

    def totals(self, state: SlotState, positions: Tensor) -> Tensor:
        """Return what each head keeps of entries at positions ``[B, H, N]``, int64 ``[B, H, 1]``."""
        counts = (positions >= 0).sum(dim=-1, keepdim=True)
        return torch.where(self.is_over(state), state.total, counts)

    # --- queries, for rules that score a span at its end ------------------------------------------

    def make_room(self, state: SlotState, block: Block) -> None:
        """Give a state room for the queries of a span; mutates the state."""
        batch, heads, _, size = block.query.shape
        with ordinary_tensors():
            state.queries = block.query.new_zeros(batch, heads, self.length, size)
            if block.position_ids is not None:
                state.query_positions = torch.zeros(
                    batch, self.length, dtype=torch.int64, device=block.query.device
                )

    def add_queries(self, state: SlotState, block: Block) -> None:
        """Note a block's queries, of at most one span, before its tokens are counted; mutates."""
        if state.queries is None:
            self.make_room(state, block)
        state.scaling = block.scale, block.softcap
        assert state.queries is not None
        batch, length = len(state.queries), block.length
        order = torch.arange(length, device=state.device).expand(batch, length)
        if block.real is not None:
            order = block.real.cumsum(dim=1) - 1
        columns = (state.num_real_tokens.unsqueeze(1) + order) % self.length
        position_ids = None
        if block.position_ids is not None:
            position_ids = block.position_ids[:, 0, :, 0].expand(batch, length)
        if block.real is None:
            sequences = torch.arange(batch, device=state.device).unsqueeze(1)
            index, query = (sequences, slice(None), columns), block.query.transpose(1, 2)
        else:
            sequences, tokens = block.real.nonzero(as_tuple=True)
            columns = columns[sequences, tokens]
            index, query = (sequences, slice(None), columns), block.query[sequences, :, tokens]
            position_ids = None if position_ids is None else position_ids[sequences, tokens]
        state.queries[index] = query
        if position_ids is not None:
            assert state.query_positions is not None
            state.query_positions[index[0], index[2]] = position_ids

    def queries_of(self, state: SlotState, sequences: Tensor) -> Block:
        """Return the spans of sequences, int64 ``[B']``, as a block that has only queries."""
        assert state.queries is not None
        position_ids = None
        if state.query_positions is not None:
            position_ids = state.query_positions[sequences][:, None, :, None]
        query = state.queries[sequences]
        assert state.scaling is not None
        return Block(query, query, query, None, None, position_ids, *state.scaling)
