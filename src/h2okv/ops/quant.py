"""Keys and values in 8 or 4 bits, and attention over them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from h2okv.ops.reference import compute_dtype
from h2okv.ops.rope import rotate

_LARGEST_GROUP = 64
# An fp32 number is a bf16 number followed by 16 more bits.
_ROUND_UP, _KEEP = 0xFFFF, ~0xFFFF


class Packed(NamedTuple):
    """Entries ``[..., N, D]`` in few bits.

    Of 4 bits each byte holds two codes: the low nibbles are a group's first half (the larger, if
    its size is odd), the high ones its second, so that both halves are read as contiguous numbers.
    The grid is bf16, which has fp32's range: no outlier overflows.
    """

    codes: Tensor  # uint8 [..., N, C], group after group
    grid: Tensor  # bf16 [..., N, 2 * groups], the groups' scales, then their lows
    bits: int  # 8 or 4
    size: int  # D

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], self.size))

    @property
    def group(self) -> int:
        return 2 * self.size // self.grid.shape[-1]


Entries = Tensor | Packed
"""Keys or values of slots, as they are or packed."""


class KeyTransform(NamedTuple):
    """Centers, scales and rotates keys before they are packed into 4 bits.

    Outlier channels are far from zero in every token, so a grid that covers them leaves few levels
    to the other channels. A key is packed as ``k' = H ((k - center) / scale)``, with H a Hadamard
    matrix, and ``q . k = (H (q * scale)) . k' + q . center``. The last term is equal for all keys
    and does not change the softmax. Related: scales as in SmoothQuant (arXiv 2211.10438), rotation
    as in QuaRot (arXiv 2404.00456), quantization by channel in KIVI (arXiv 2402.02750).
    """

    center: Tensor  # fp32 [B, H, 1, D]; of keys that are not rotated yet where positions roll
    scale: Tensor  # fp32 [B, H, 1, D], positive

    def apply(self, keys: Tensor) -> Tensor:
        """Transform keys ``[B, H, N, D]``, in fp32 or fp64."""
        transformed = (keys.to(compute_dtype(keys.dtype)) - self.center) / self.scale
        return transformed @ _spread(transformed)

    def undo(self, keys: Tensor) -> Tensor:
        """Return the keys of transformed ones ``[B, H, N, D]``, in their dtype: fp32 or fp64."""
        return (keys @ _spread(keys)) * self.scale + self.center

    def of_queries(self, query: Tensor) -> Tensor:
        """Transform queries ``[B, HQ, T, D]`` for products with transformed keys."""
        grouped = query.to(compute_dtype(query.dtype)).unflatten(1, (self.scale.shape[1], -1))
        return ((grouped * self.scale.unsqueeze(2)) @ _spread(grouped)).flatten(1, 2)

    def center_logits(self, query: Tensor) -> Tensor:
        """Return ``q . center``, the part that transformed keys lack, ``[B, HQ, T, 1]``."""
        grouped = query.to(compute_dtype(query.dtype)).unflatten(1, (self.center.shape[1], -1))
        return (grouped * self.center.unsqueeze(2)).sum(dim=-1, keepdim=True).flatten(1, 2)


def _spread(states: Tensor) -> Tensor:
    """Return H for states ``[..., D]``: symmetric and orthogonal, ``[D, D]``."""
    if torch.compiler.is_compiling():
        return _hadamard(states.shape[-1], states.device).to(states.dtype)
    return _kept_hadamard(states.shape[-1], states.device).to(states.dtype)


def _hadamard(size: int, device: torch.device) -> Tensor:
    """Return Hadamard matrices along the diagonal, of the largest power of two that divides D."""
    block = torch.ones(1, 1, device=device)
    while size % (2 * len(block)) == 0:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.block_diag(*[block * len(block) ** -0.5] * (size // len(block)))


@functools.lru_cache(maxsize=8)
def _kept_hadamard(size: int, device: torch.device) -> Tensor:
    """Return the same; an ordinary tensor, also under inference_mode."""
    with torch.inference_mode(False):
        return _hadamard(size, device)


def group_size(size: int) -> int:
    """Return how many numbers share a grid."""
    return next(group for group in range(_LARGEST_GROUP, 0, -1) if size % group == 0)


def packed_bytes(size: int, bits: int) -> int:
    """Bytes of one packed entry of one head."""
    group = group_size(size)
    return size // group * ((group * bits + 7) // 8 + 4)


def pack(entries: Tensor, bits: int) -> Packed:
    """Packs entries ``[..., N, D]``; each number moves by at most half of its group's scale.

    The scale is rounded up and the low down, so that the grid covers its group. A group that holds
    NaN, or a number beyond bf16's largest, is unpacked as numbers that are not finite.
    """
    size = entries.shape[-1]
    levels = 2**bits - 1
    numbers = entries.float().unflatten(-1, (-1, group_size(size)))
    lowest, highest = numbers.aminmax(dim=-1, keepdim=True)
    low = _rounded_down(lowest)
    # Not the difference first, which may be beyond fp32.
    scale = _rounded_up(highest / levels - low / levels)
    steps = (numbers - low) / torch.where(scale > 0, scale, 1.0)
    codes = steps.round().clamp(0, levels).to(torch.uint8)
    if bits == 4:
        half = (codes.shape[-1] + 1) // 2
        second = codes[..., half:]
        if second.shape[-1] < half:
            second = torch.nn.functional.pad(second, (0, 1))
        codes = codes[..., :half] | (second << 4)
    grid = torch.cat([scale, low], dim=-2).squeeze(-1).to(torch.bfloat16)
    return Packed(codes.flatten(-2), grid, bits, size)


def unpack(packed: Packed) -> Tensor:
    """Make numbers of packed entries, fp32 ``[..., N, D]``."""
    scale, low = scales_and_lows(packed)
    codes_by_half = halves(packed)
    codes = (
        codes_by_half[0]
        if len(codes_by_half) == 1
        else torch.cat(codes_by_half, dim=-1)[..., : packed.group]
    )
    numbers = codes.float()
    return torch.addcmul(low.unsqueeze(-1), numbers, scale.unsqueeze(-1)).flatten(-2)


def scales_and_lows(packed: Packed) -> tuple[Tensor, Tensor]:
    """Return the grids' scales and lows, fp32 ``[..., N, groups]``."""
    scale, low = packed.grid.float().chunk(2, dim=-1)
    return scale, low


def halves(packed: Packed) -> tuple[Tensor, ...]:
    """Return the codes in parts that follow one another in each group.

    Of 8 bits uint8 ``[..., N, groups, group]``; of 4 bits twice ``[..., N, groups, half]``, of
    which the second has a number too many, zero, if the group's size is odd.
    """
    codes = packed.codes.unflatten(-1, (packed.size // packed.group, -1))
    return (codes,) if packed.bits == 8 else (codes & 15, codes >> 4)


# With integers, not by a cast: a compiler may leave out a cast to bf16 and back.


def _rounded_up(numbers: Tensor) -> Tensor:
    """Round non-negative numbers up to bf16, as fp32."""
    return ((numbers.view(torch.int32) + _ROUND_UP) & _KEEP).view(torch.float32)


def _rounded_down(numbers: Tensor) -> Tensor:
    """Round down to bf16, as fp32."""
    more = torch.where(numbers < 0, _ROUND_UP, 0).to(torch.int32)
    return ((numbers.view(torch.int32) + more) & _KEEP).view(torch.float32)


# Numbers unpacked at a time: on a CPU 640 KiB in fp32.
_PIECE = {"cpu": 5 << 15}
_LARGE_PIECE = 1 << 24


def packed_logits(
    query: Tensor,
    keys: Packed,
    factors: Tensor | None = None,
    ranks: Tensor | None = None,
    transform: KeyTransform | None = None,
) -> Tensor:
    """Return logits ``[rows, G, S]`` of scaled queries ``[rows, G, D]`` and packed keys.

    Queries are fp32 or fp64, and so are the logits. Keys may still need rotations, fp32
    ``[n, R / 2, 2]``, to the ranks, int ``[rows, S]``, and before that their transform, of tensors
    ``[rows, 1, D]``, undone.
    """
    if torch.compiler.is_compiling():
        if factors is None:
            return _fused_logits(query, keys)
        numbers = unpack(keys) if transform is None else transform.undo(unpack(keys))
        rotated = rotate(numbers, factors[ranks])
        return (query.unsqueeze(2) * rotated.unsqueeze(1)).sum(dim=-1)
    rows, num_slots, _ = keys.shape
    logits = query.new_empty(rows, query.shape[1], num_slots)
    for at, numbers in _pieces(keys):
        numbers = numbers.to(query.dtype)
        if transform is not None:
            numbers = KeyTransform(*(tensor[at] for tensor in transform)).undo(numbers)
        if factors is not None and ranks is not None:
            numbers = rotate(numbers, factors[ranks[at]])
        torch.bmm(query[at], numbers.transpose(1, 2), out=logits[at])
    return logits


def packed_output(weights: Tensor, values: Packed) -> Tensor:
    """Sum ``[rows, G, Dv]`` of packed values, by weights ``[rows, G, S]``, fp32 or fp64."""
    if torch.compiler.is_compiling():
        return _fused_output(weights, values)
    output = weights.new_empty(*weights.shape[:2], values.size)
    for at, numbers in _pieces(values):
        torch.bmm(weights[at], numbers.to(weights.dtype), out=output[at])
    return output


def _pieces(packed: Packed) -> Iterator[tuple[slice, Tensor]]:
    """Rows and their numbers, fp32 ``[some rows, S, D]``."""
    rows, num_slots, size = packed.shape
    largest_piece = _PIECE.get(packed.codes.device.type, _LARGE_PIECE)
    step = max(1, min(rows, largest_piece // (num_slots * size)))
    for start in range(0, rows, step):
        at = slice(start, start + step)
        yield at, unpack(packed._replace(codes=packed.codes[at], grid=packed.grid[at]))


def _numbers(packed: Packed) -> list[Tensor]:
    """Numbers by halves, fp32 ``[rows, 1, S, groups, half]``; put together they would be copied."""
    scale, low = (tensor.unsqueeze(-1) for tensor in scales_and_lows(packed))
    return [(tensor.float() * scale + low).unsqueeze(1) for tensor in halves(packed)]


def _fused_logits(query: Tensor, keys: Packed) -> Tensor:
    grouped = query.unflatten(-1, (-1, keys.group)).unsqueeze(2)
    terms, start = [], 0
    for numbers in _numbers(keys):
        group_queries = grouped[..., start : start + numbers.shape[-1]]
        terms.append(numbers[..., : group_queries.shape[-1]] * group_queries)
        start += numbers.shape[-1]
    if terms[0].shape == terms[-1].shape:  # one loop over both
        return sum(terms[1:], start=terms[0]).sum(dim=(-2, -1))
    return terms[0].sum(dim=(-2, -1)) + terms[1].sum(dim=(-2, -1))


def _fused_output(weights: Tensor, values: Packed) -> Tensor:
    weight_column = weights[..., None, None]
    sums = [(weight_column * numbers).sum(dim=2) for numbers in _numbers(values)]
    return torch.cat(sums, dim=-1)[..., : values.group].flatten(-2)
