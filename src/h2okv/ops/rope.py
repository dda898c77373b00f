"""Rotary positions of cached keys."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Layout = Literal["half", "interleaved"]
"""Which two numbers of a head are rotated together: d and d + R / 2, or 2 d and 2 d + 1."""


class Scratch(NamedTuple):
    """Memory for the rotated keys of some rows."""

    rotated: Tensor  # fp32 [rows * S, R / 2, 2]
    converted: Tensor | None  # fp32 [rows, S, R / 2, 2] for keys of another dtype

    @classmethod
    def for_keys(cls, keys: Tensor, factors: Tensor, rows: int) -> Scratch:
        """Room for so many rows of keys ``[B * H, S, D]`` at a time."""
        num_slots, pair = keys.shape[1], factors.shape[1:]
        rotated = factors.new_empty(rows * num_slots, *pair)
        fits = keys.dtype == factors.dtype
        return cls(rotated, None if fits else factors.new_empty(rows, num_slots, *pair))


def interleave_pairs(states: Tensor, width: int, layout: Layout) -> Tensor:
    """Brings the two numbers of each pair next to each other.

    Done to queries and keys alike it changes no attention.

    Args:
        states: ``[..., D]``.
        width: R <= D, numbers of a head that are rotated (partial rotary).
        layout: how the model lays out its pairs.

    Returns:
        ``[..., D]``.
    """
    if layout == "interleaved":
        return states
    paired = states[..., :width].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return paired if width == states.shape[-1] else torch.cat([paired, states[..., width:]], -1)


def rotate(states: Tensor, factors: Tensor) -> Tensor:
    """Rotates the first R numbers of each head, in pairs; the others pass.

    Args:
        states: ``[..., T, D]``, pairs next to each other.
        factors: fp32, broadcastable to ``[..., T, R / 2, 2]``.

    Returns:
        fp32 ``[..., T, D]``.
    """
    width = 2 * factors.shape[-2]
    pairs = states[..., :width].float().unflatten(-1, (-1, 2))
    rotated = multiply(pairs, factors).flatten(-2)
    rest = states[..., width:]
    return rotated if rest.shape[-1] == 0 else torch.cat([rotated, rest.float()], dim=-1)


def rotate_gathered(states: Tensor, factors: Tensor, ranks: Tensor, scratch: Scratch) -> Tensor:
    """Rotates each entry by its own rank, in memory that is used again; for eager code.

    Args:
        states: ``[rows, S, D]``, pairs next to each other.
        factors: fp32 ``[n, R / 2, 2]``, the rotation to each rank.
        ranks: int ``[rows, S]``.
        scratch: mutated.

    Returns:
        fp32 ``[rows, S, D]``, in the scratch's memory if all of a head is rotated.
    """
    width = 2 * factors.shape[-2]
    rows, num_slots = ranks.shape
    rotated = scratch.rotated[: rows * num_slots]
    torch.index_select(factors, 0, ranks.flatten(), out=rotated)
    rotated = rotated.view(rows, num_slots, width // 2, 2)
    pairs = states[..., :width].unflatten(-1, (-1, 2))
    if scratch.converted is not None:
        pairs = scratch.converted[:rows].copy_(pairs)
    # A product in place takes two thirds of the time of one into new memory.
    torch.view_as_complex(rotated).mul_(torch.view_as_complex(pairs))
    rotated, rest = rotated.flatten(-2), states[..., width:]
    return rotated if rest.shape[-1] == 0 else torch.cat([rotated, rest.float()], dim=-1)


def inverse(factors: Tensor) -> Tensor:
    """Factors ``[..., 2]`` that undo a rotation, its scale (YaRN) and its rounding included.

    They come in the dtype in which the model used them.
    """
    real, imaginary = factors.float().unbind(-1)
    size = real.square() + imaginary.square()
    return torch.stack([real / size, -imaginary / size], dim=-1)


def relative(factors: Tensor) -> Tensor:
    """The rotations to n ranks, fp32 ``[n, R / 2, 2]``, as seen from the last, which needs none."""
    last = factors[-1] * factors.new_tensor([1.0, -1.0])
    return multiply(factors, last)


def multiply(pairs: Tensor, factors: Tensor) -> Tensor:
    """Complex products ``[..., 2]``."""
    if not torch.compiler.is_compiling():
        product = torch.view_as_complex(pairs.contiguous()) * torch.view_as_complex(factors)
        return torch.view_as_real(product)
    # The compiler fuses this and does not know complex numbers.
    (a, b), (c, d) = pairs.unbind(-1), factors.unbind(-1)
    return torch.stack([a * c - b * d, b * c + a * d], dim=-1)
