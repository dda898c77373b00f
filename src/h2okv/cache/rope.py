"""Positions of cached entries: original, rolling, clamped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from h2okv.config import POSITIONS, Positions
from h2okv.ops.rope import Layout, inverse, rotate

_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of RoPE whose frequencies depend on the longest position."""


class Rotation:
    """How a model rotates the keys of a layer; shared by all layers that are rotated alike."""

    def __init__(
        self,
        rotary: torch.nn.Module,
        layer_type: str | None,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.key = (rotary, layer_type, layout, dtype, device)
        """Equal for layers of one model that are rotated alike."""
        self._rotary = rotary
        self._layer_type = layer_type
        self._dtype = dtype
        self._device = device
        kind: Any = rotary.rope_type
        self._kind: str = kind if layer_type is None else kind[layer_type]
        self._tables: dict[int, Tensor] = {}
        self._last: tuple[Tensor, Tensor] | None = None
        self.width = 2 * self._frequencies(rotary)[0].shape[0]
        """R, how many numbers of a head are rotated."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Rotation:
        """Copies of a cache share what was learned about its model."""
        return self

    def of_text(self, position_ids: Tensor) -> Tensor:
        """Factors that undo the model's rotation in this forward.

        Args:
            position_ids: int ``[B, T]`` or ``[1, T]``, as the model got them.

        Returns:
            fp32 ``[B or 1, 1, T, R / 2, 2]``, for `rotate`.
        """
        # All layers of a forward get the same object.
        last = self._last
        if last is None or last[0] is not position_ids:
            factors = self._factors(self._rotary, position_ids.to(self._device))
            last = self._last = position_ids, inverse(factors.to(self._dtype)).unsqueeze(1)
        return last[1]

    def begin_forward(self) -> None:
        """Forgets the last forward's positions, which a caller may have overwritten in place."""
        self._last = None

    def of_ranks(self, length: int) -> Tensor:
        """Factors of the rotations to the ranks of a cache.

        Returns:
            fp32 ``[length, R / 2, 2]``.
        """
        if length not in self._tables:
            if len(self._tables) >= 8:
                self._tables.clear()
            with torch.inference_mode(False):
                ranks = torch.arange(length, device=self._device).unsqueeze(0)
                fresh = like_new(self._rotary, self._device)
                if self._kind in _BY_LENGTH:
                    options = {"layer_type": self._layer_type} if self._layer_type else {}
                    fresh(torch.empty(0, device=self._device), ranks, **options)
                self._tables[length] = self._factors(fresh, ranks)[0]
        return self._tables[length]

    def _frequencies(self, rotary: Any) -> tuple[Tensor, float]:
        """Frequencies ``[R / 2]``, and the scale of the cosines (YaRN)."""
        prefix = f"{self._layer_type}_" if self._layer_type else ""
        scaling = getattr(rotary, f"{prefix}attention_scaling", None)
        if scaling is None:
            scaling = rotary.attention_scaling
        return getattr(rotary, f"{prefix}inv_freq"), scaling

    def _factors(self, rotary: Any, positions: Tensor) -> Tensor:
        frequencies, scaling = self._frequencies(rotary)
        # A model that was cast as a whole has rounded frequencies.
        frequencies = frequencies.to(self._frequencies(self._rotary)[0].dtype)
        # The same operation as in transformers, so that the same angle comes out, rounding and all.
        angles = positions[..., None].float() * frequencies.to(positions.device, torch.float32)
        return torch.stack([angles.cos() * scaling, angles.sin() * scaling], dim=-1)


def like_new(rotary: Any, device: torch.device) -> Any:
    """Makes a module of rotary embeddings as its config has it, with nothing met yet."""
    return type(rotary)(rotary.config).to(device)


def rotate_to_ranks(states: Tensor, ranks: Tensor, factors: Tensor) -> Tensor:
    """Rotates queries or keys to their ranks.

    Args:
        states: ``[B, H, N, D]``, un-rotated, pairs next to each other.
        ranks: int, broadcastable to ``[B, H, N]``; anything for what is no entry.
        factors: fp32 ``[n, R / 2, 2]``, from `Rotation.of_ranks`.

    Returns:
        fp32 ``[B, H, N, D]``.
    """
    return rotate(states, factors[ranks.clamp(min=0, max=len(factors) - 1).long()])


def ranks_of(positions: Tensor) -> Tensor:
    """Ranks of the entries by age.

    Args:
        positions: int ``[B, H, S]``; -1 for an empty slot.

    Returns:
        int32 ``[B, H, S]``; an empty slot has rank S - 1, behind all.
    """
    size = positions.shape[-1]
    order = torch.where(positions < 0, torch.iinfo(positions.dtype).max, positions).argsort(dim=-1)
    ranks = torch.empty_like(positions, dtype=torch.int32)
    places = torch.arange(size, dtype=torch.int32, device=positions.device)
    ranks.scatter_(-1, order, places.expand_as(ranks))
    return ranks.masked_fill_(positions < 0, size - 1)


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

    def place(self, position_ids: Tensor) -> Tensor:
        """Says where the model shall put tokens.

        Args:
            position_ids: int ``[B, T]`` or ``[1, T]``, places in the text.
        """
        if not self.rewrites or self.window is None:
            return position_ids
        return position_ids.clamp(max=self.window - 1)
