"""Rotary positions of cached keys."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from h2okv.ops.reference import compute_dtype

Layout = Literal["half", "interleaved"]
"""Which two numbers of a head are rotated together: d and d + R / 2, or 2 d and 2 d + 1."""


def interleave_pairs(states: Tensor, width: int, layout: Layout) -> Tensor:
    """Brings the two numbers of each pair next to each other, in states ``[..., D]``.

    Done to queries and keys alike it changes no attention. The first ``width`` numbers of a head
    are rotated (partial rotary), R <= D.
    """
    if layout == "interleaved":
        return states
    paired = states[..., :width].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return paired if width == states.shape[-1] else torch.cat([paired, states[..., width:]], -1)


def rotate(states: Tensor, factors: Tensor, layout: Layout = "interleaved") -> Tensor:
    """Rotates the first R numbers of each head, in pairs; the others pass. ``[..., T, D]``.

    Args:
        states: ``[..., T, D]``.
        factors: fp32, broadcastable to ``[..., T, R / 2, 2]``.
        layout: where the numbers of a pair are; they stay there.

    Returns:
        The same shape in fp32, or in fp64 for fp64.
    """
    states = states.to(compute_dtype(states.dtype))
    width = 2 * factors.shape[-2]
    if layout == "half":  # twice as fast as pairs put next to each other and rotated as complex
        cosines, sines = (numbers.contiguous() for numbers in factors.unbind(-1))
        a, b, unrotated = states.tensor_split((width // 2, width), dim=-1)
        first = (a * cosines).addcmul_(b, sines, value=-1)
        return torch.cat([first, (b * cosines).addcmul_(a, sines), unrotated], dim=-1)
    pairs = states[..., :width].unflatten(-1, (-1, 2))
    rotated = multiply(pairs, factors).flatten(-2)
    unrotated = states[..., width:]
    return rotated if unrotated.shape[-1] == 0 else torch.cat([rotated, unrotated], dim=-1)


def inverse(factors: Tensor) -> Tensor:
    """Factors ``[..., 2]``, in the model's dtype, that undo a rotation, scale and rounding too."""
    real, imaginary = factors.float().unbind(-1)
    size = real.square() + imaginary.square()
    return torch.stack([real / size, -imaginary / size], dim=-1)


def relative(factors: Tensor) -> Tensor:
    """Return the rotations to n ranks relative to the last one, fp32 ``[n, R / 2, 2]``."""
    last = factors[-1] * factors.new_tensor([1.0, -1.0])
    return multiply(factors, last)


def multiply(pairs: Tensor, factors: Tensor) -> Tensor:
    """Complex products ``[..., 2]``."""
    if not torch.compiler.is_compiling():
        first, second = (torch.view_as_complex(t.contiguous()) for t in (pairs, factors))
        return torch.view_as_real(first * second)
    # The compiler fuses this and does not know complex numbers.
    (a, b), (c, d) = pairs.unbind(-1), factors.unbind(-1)
    return torch.stack([a * c - b * d, b * c + a * d], dim=-1)
