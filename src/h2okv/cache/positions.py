"""Where the entries of a cache sit, and how long a block may be."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from h2okv.config import POSITIONS, Positions


@dataclass(frozen=True)
class PositionRule:
    """What a user decides about positions.

    Attributes:
        positions: ``"original"``: every token keeps its place in the text. ``"rolling"``: every
            entry sits at its rank in the cache and the new tokens after them, so that no position
            is ever larger than what is held. ``"clamped"``: learned positions stop at the last
            one that the model has.
        prefill_chunk: the most tokens of a block; a longer input is read as several blocks.
            ``None`` for no limit.
        window: positions that the model was trained on; ``None`` if its config does not say.
    """

    positions: Positions = "original"
    prefill_chunk: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        """Refuses what makes no sense."""
        if self.positions not in POSITIONS:
            raise ValueError(
                f"positions={self.positions!r} is unknown; choose one of {', '.join(POSITIONS)}."
            )
        chunk = self.prefill_chunk
        if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int)):
            raise ValueError(f"prefill_chunk={chunk!r} is not a number of tokens; give an int.")
        if chunk is not None and chunk < 1:
            raise ValueError(f"prefill_chunk={chunk} reads nothing; give 1 or more, or None.")

    @property
    def rolls(self) -> bool:
        """Whether entries sit at their ranks."""
        return self.positions == "rolling"

    @property
    def rewrites(self) -> bool:
        """Whether the model must be given other positions than those in the text."""
        return self.positions == "clamped"

    def place(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Says where the model shall put tokens.

        Args:
            position_ids: int ``[B, T]`` or ``[1, T]``, places in the text.

        Returns:
            The same shape.
        """
        if not self.rewrites or self.window is None:
            return position_ids
        return position_ids.clamp(max=self.window - 1)
