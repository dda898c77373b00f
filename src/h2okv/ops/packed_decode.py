"""The two products of a decode step with packed slots, without a full-size copy of them.

Compiled, conversion, grid and product are one loop. (To take scale and low out of the sum over a
group's numbers saves a product for each of them, and breaks the loop up.) Eager, some rows at a
time are unpacked in memory that stays in a core's cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from h2okv.ops.packing import Packed, halves, scales_and_lows, unpack
from h2okv.ops.rotary import turn

_PIECE = {"cpu": 5 << 15}
"""Numbers unpacked at a time: on a CPU 640 KiB in fp32."""
_LARGE_PIECE = 1 << 24


def packed_logits(
    query: torch.Tensor,
    keys: Packed,
    factors: torch.Tensor | None = None,
    ranks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Products of queries and packed keys.

    Args:
        query: fp32 ``[rows, G, D]``, scaled.
        keys: ``[rows, S, D]``.
        factors: fp32 ``[n, R / 2, 2]``, turns to ranks that the keys still need; ``None`` if none.
        ranks: int ``[rows, S]``, below n; with `factors`.

    Returns:
        fp32 ``[rows, G, S]``.
    """
    if torch.compiler.is_compiling():
        if factors is None:
            return _fused_logits(query, keys)
        turned = turn(unpack(keys), factors[ranks])
        return (query.unsqueeze(2) * turned.unsqueeze(1)).sum(dim=-1)
    rows, num_slots, _ = keys.shape
    logits = query.new_empty(rows, query.shape[1], num_slots)
    for at, numbers in _pieces(keys):
        if factors is not None and ranks is not None:
            numbers = turn(numbers, factors[ranks[at]])
        torch.bmm(query[at], numbers.transpose(1, 2), out=logits[at])
    return logits


def packed_output(weights: torch.Tensor, values: Packed) -> torch.Tensor:
    """Sums of packed values by weight.

    Args:
        weights: fp32 ``[rows, G, S]``.
        values: ``[rows, S, Dv]``.

    Returns:
        fp32 ``[rows, G, Dv]``.
    """
    if torch.compiler.is_compiling():
        return _fused_output(weights, values)
    output = weights.new_empty(*weights.shape[:2], values.size)
    for at, numbers in _pieces(values):
        torch.bmm(weights[at], numbers, out=output[at])
    return output


def _pieces(packed: Packed) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows and their numbers, fp32 ``[some rows, S, D]``."""
    rows, num_slots, size = packed.shape
    most = _PIECE.get(packed.codes.device.type, _LARGE_PIECE)
    step = max(1, min(rows, most // (num_slots * size)))
    for start in range(0, rows, step):
        at = slice(start, start + step)
        yield at, unpack(packed.with_parts(packed.codes[at], packed.grid[at]))


def _numbers(packed: Packed) -> list[torch.Tensor]:
    """Numbers by halves, fp32 ``[rows, 1, S, groups, half]``; put together they would be copied."""
    scale, low = (part.unsqueeze(-1) for part in scales_and_lows(packed))
    return [(part.float() * scale + low).unsqueeze(1) for part in halves(packed)]


def _fused_logits(query: torch.Tensor, keys: Packed) -> torch.Tensor:
    grouped = query.unflatten(-1, (-1, keys.group)).unsqueeze(2)
    terms, start = [], 0
    for numbers in _numbers(keys):
        asked = grouped[..., start : start + numbers.shape[-1]]
        terms.append(numbers[..., : asked.shape[-1]] * asked)
        start += numbers.shape[-1]
    if terms[0].shape == terms[-1].shape:  # one loop over both
        return sum(terms[1:], start=terms[0]).sum(dim=(-2, -1))
    return terms[0].sum(dim=(-2, -1)) + terms[1].sum(dim=(-2, -1))


def _fused_output(weights: torch.Tensor, values: Packed) -> torch.Tensor:
    given = weights[..., None, None]
    sums = [(given * numbers).sum(dim=2) for numbers in _numbers(values)]
    return torch.cat(sums, dim=-1)[..., : values.group].flatten(-2)
