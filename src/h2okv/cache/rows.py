"""A layer's state as rows of a batch: taken from one another, moved, saved and restored."""

from __future__ import annotations

import torch
from transformers.cache_utils import CacheLayerMixin

from h2okv.config import TokenBudget

_EMPTY: dict[str, int] = {"positions": -1, "enabled": False}


def empty_value(name: str, num_slots: int) -> int:
    """Says what stands in a slot that holds nothing.

    Args:
        name: Of the layer's tensor.
        num_slots: S.

    Returns:
        The number.
    """
    # The rank of an empty slot is the last one.
    return num_slots - 1 if name == "ranks" else _EMPTY.get(name, 0)


class RowLayer(CacheLayerMixin):
    """What a layer holds for each sequence, whatever is done with it.

    Subclasses name the tensors in `row_tensors`; an attribute that is ``None`` or missing is not
    there yet.
    """

    row_budgets: list[TokenBudget]
    batch_size: int

    def row_tensors(self) -> tuple[str, ...]:
        """Names the attributes whose first dimension is the batch."""
        return (
            "keys", "values", "scores", "positions", "num_real_tokens", "sink", "recent", "total",
        )  # fmt: skip

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Takes each row from another one, scores included (beam search).

        Args:
            beam_idx: int64 ``[B]``, source row of each row.
        """
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row.

        Args:
            repeats: copies of each row, next to each other.
        """
        rows = torch.arange(self.batch_size, device=self.device)
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the named rows, in this order.

        Args:
            indices: int64 ``[B']``, rows to keep; may repeat. Or bool ``[B]``, True to keep.
        """
        if not self.is_initialized:
            return
        indices = indices.to(self.device)
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        for name in self.row_tensors():
            held = getattr(self, name, None)
            if held is not None:
                with torch.inference_mode(False):
                    chosen = held.new_empty((len(indices), *held.shape[1:]))
                torch.index_select(held, 0, indices, out=chosen)
                setattr(self, name, chosen)
        if self.row_budgets:
            self.row_budgets = [self.row_budgets[row] for row in indices.tolist()]
        self.batch_size = len(indices)

    def move(self, device: torch.device) -> None:
        """Brings all entries to another device; mutates the layer."""
        for name in (*self.row_tensors(), "cumulative_length"):
            held = getattr(self, name, None)
            if held is not None:
                setattr(self, name, held.to(device))
        self.device = device
