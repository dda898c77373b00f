"""How many rows fit, by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from h2okv.cache import H2OCache
from h2okv.engine.demand import Demand, demand_of

_SLOT_BYTES = 4 + 4
"""Score and position of a slot."""
_HEAD_BYTES = 8
"""The number of a head's free slot."""
_ROW_BYTES = 4 * 8
"""Tokens seen, and the parts of the budget."""


@dataclass(frozen=True)
class RowSizes:
    """What a server's memory goes to, beside the weights.

    Attributes:
        row: Bytes of a row: keys, values, scores, positions and marks of its slots, all layers.
        step: Temporaries of a decode step, for each row.
        prompt: The prompt under way: its entries and the temporaries of one piece.
        fixed: Scratch memory of the libraries.
    """

    row: int
    step: int
    prompt: int
    fixed: int

    def rows_in(self, free: int) -> int:
        """Says how many rows fit.

        Args:
            free: Bytes that the weights leave.

        Returns:
            A number; 0 if not even one.
        """
        return max(0, (free - self.prompt - self.fixed) // (self.row + self.step))

    @property
    def least(self) -> int:
        """Bytes with which one row fits."""
        return self.prompt + self.fixed + self.row + self.step


def row_sizes(
    config: PreTrainedConfig,
    cache: H2OCache,
    dtype: torch.dtype,
    *,
    row_budget: int,
    max_prompt: int,
    piece: int,
    ranks: int = 1,
) -> RowSizes:
    """Counts bytes.

    Args:
        config: The model's.
        cache: An empty cache for it, with the engine's settings.
        dtype: Of weights and cache.
        row_budget: Entries of a row.
        max_prompt: The most tokens of a prompt.
        piece: The most tokens of it in one forward.
        ranks: Processes that share the KV heads.

    Returns:
        The sizes, for each of the ranks.
    """
    demand = demand_of(config, cache, dtype)
    piece = min(piece, max_prompt)
    chunk = cache.prefill_chunk
    held = max_prompt if chunk is None else row_budget + min(chunk, max_prompt)
    # The next piece is put behind what is held, and one layer is there twice meanwhile.
    prompt = -(-(demand.sequence_bytes(held, 0) + 3 * demand.layer_bytes(held)) // ranks)
    # Temporaries are counted whole: what is not split among ranks (states, logits) is most of them.
    prompt += demand.prompt_bytes(piece) + piece * demand.vocabulary * 4
    return RowSizes(
        row=-(-_row_bytes(demand, cache, row_budget + 1) // ranks),
        step=demand.decode_bytes(1, row_budget + 1),
        prompt=prompt,
        fixed=demand.fixed_bytes,
    )


def _row_bytes(demand: Demand, cache: H2OCache, slots: int) -> int:
    """Bytes of a row, as `RowBlock` allocates it."""
    layer: Any = next(own for own in cache.layers if hasattr(own, "marks_pattern"))
    notes = _SLOT_BYTES + 4 * cache.rule.rolls + 4 * layer.scoring.uses_values
    numbers = _ROW_BYTES + 8 * layer.marks_pattern
    heads = demand.num_kv_heads
    one = slots * (demand.entry_bytes + heads * notes) + heads * _HEAD_BYTES + numbers
    # All layers share the marks of the slots within a row's budget.
    total = demand.num_slot_layers * one + heads * slots
    for window in demand.windows:
        entry = demand.token_bytes + heads * _SLOT_BYTES
        total += window * entry + heads * _HEAD_BYTES + _ROW_BYTES
    return int(total)
