"""A guard against numbers that have overflowed."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor


class NumbersOnly(LogitsProcessor):
    """Ends a generation whose numbers have overflowed, for it would go on with any text at all."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Returns the scores as they are."""
        if bool(torch.isnan(scores).any()):
            raise ValueError(
                f"the model's output is not a number (NaN) after {input_ids.shape[1]} tokens;"
                " its data type may be too narrow, try --dtype float32"
            )
        return scores
