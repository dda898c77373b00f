"""Rotary positions (RoPE, arXiv 2104.09864): turning queries and keys, and turning them back."""

from __future__ import annotations

from typing import Literal

import torch

Layout = Literal["half", "interleaved"]
"""Which two numbers of a head are turned together: d and d + R / 2, or 2 d and 2 d + 1."""


def rotate(
    states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: Layout
) -> torch.Tensor:
    """Turns the first R numbers of each head; the others pass (partial rotary).

    Args:
        states: ``[..., T, D]``.
        cos: broadcastable to ``[..., T, R / 2]`` with R <= D.
        sin: likewise. ``-sin`` turns back.
        layout: which numbers form a pair.

    Returns:
        ``[..., T, D]`` in the wider of the dtypes of ``states`` and ``cos``.
    """
    width = 2 * cos.shape[-1]
    turned, rest = states[..., :width], states[..., width:]
    pairs = (2, width // 2) if layout == "half" else (width // 2, 2)
    axis = -2 if layout == "half" else -1
    first, second = turned.unflatten(-1, pairs).unbind(axis)
    both = (first * cos - second * sin, second * cos + first * sin)
    result = torch.stack(both, dim=axis).flatten(-2)
    return result if rest.shape[-1] == 0 else torch.cat([result, rest.to(result.dtype)], dim=-1)


def inverse(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors that undo a turn, a scale in them (YaRN) and their own rounding included.

    Args:
        cos: cosines, times a scale, in the dtype in which the model used them.
        sin: sines, likewise.

    Returns:
        ``(cos, sin)`` in fp32: ``rotate`` with these gives back what ``rotate`` with the arguments
        was given.
    """
    cos, sin = cos.float(), sin.float()
    size = cos.square() + sin.square()
    return cos / size, -sin / size
