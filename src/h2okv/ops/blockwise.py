"""Attention with score sums in O(T) memory: blocks of queries, on any device.

Two ways, with the same result:

- `fused_attention_with_scores`: the fused kernel gives the output and each row's log-sum-exp; a
  second pass over blocks of queries recomputes ``exp(q k * scale - lse)`` and sums its columns.
- `blockwise_attention_with_scores`: softmax by blocks of queries. It takes what fused kernels do
  not: kept entries before the block, padding, soft-capped logits, sliding windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

SCRATCH_ELEMENTS = 1 << 19
"""fp32 elements that one block of logits may take: 2 MiB, which stays in a core's cache."""
_MIN_ROWS, _MAX_ROWS = 16, 128


def can_fuse(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Tells whether the fused kernel with log-sum-exp takes these tensors.

    Args:
        query: ``[B, HQ, T, D]``.
        key: ``[B, H, T, D]``.
        value: ``[B, H, T, Dv]``.

    Returns:
        True on the CPU with one head size in a dtype that the kernel knows.
    """
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and not (torch.is_grad_enabled() and query.requires_grad)
    )


def fused_attention_with_scores(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of a block over itself: fused forward, then the second pass.

    Args:
        query: ``[B, HQ, T, D]``.
        key: ``[B, H, T, D]``.
        value: ``[B, H, T, D]``.
        scale: factor on the logits.

    Returns:
        ``(output, sums)`` as in `reference.attention_with_scores`.
    """
    # The public scaled_dot_product_attention runs this kernel too but drops the log-sum-exp.
    output, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, True, scale=scale
    )
    return output, causal_score_sums(query, key, log_sum_exp, scale)


def causal_score_sums(
    query: torch.Tensor, key: torch.Tensor, log_sum_exp: torch.Tensor, scale: float
) -> torch.Tensor:
    """Sums the columns of the causal probability matrix without holding it.

    Args:
        query: ``[B, HQ, T, D]``.
        key: ``[B, H, T, D]``.
        log_sum_exp: fp32 ``[B, HQ, T]``, of the scaled logits of each row.
        scale: factor on the logits.

    Returns:
        fp32 ``[B, H, T]``.
    """
    batch, num_heads, length, size = query.shape
    num_kv_heads = key.shape[1]
    groups = num_heads // num_kv_heads
    rows = batch * num_kv_heads
    queries = query.reshape(rows, groups, length, size)
    keys = key.reshape(rows, length, size)
    shift = log_sum_exp.reshape(rows, groups, length, 1)
    sums = torch.zeros(rows, length, dtype=torch.float32, device=query.device)
    for heads, blocks in _plan(rows, groups, length, length):
        # Upcast a few heads at a time: a copy of all of them would double the block's memory.
        some_keys = keys[heads].to(torch.float32).transpose(1, 2)
        some_queries = queries[heads].to(torch.float32) * scale
        for block in blocks:
            logits = torch.baddbmm(
                -shift[heads, :, block].flatten(1, 2),
                some_queries[:, :, block].flatten(1, 2),
                some_keys[:, :, : block.stop],
            )
            weights = logits.exp_().unflatten(1, (groups, -1))
            weights[..., block.start :].tril_()
            sums[heads, : block.stop] += weights.sum(dim=(1, 2))
    return sums.view(batch, num_kv_heads, length)


@dataclass(frozen=True)
class Visibility:
    """Which keys a block's queries see, in O(T) numbers.

    Attributes:
        past: number of leading keys that are kept entries; every query sees them.
        entries: bool, broadcastable to ``[B, H, N]``: keys that are entries (not empty slots, not
            padding); ``None`` if all are.
        queries: bool ``[B, T]``: queries that are real tokens; ``None`` if all are.
        window: if given, a query sees only this many newest keys up to itself (sliding window).
    """

    past: int = 0
    entries: torch.Tensor | None = None
    queries: torch.Tensor | None = None
    window: int | None = None

    @property
    def is_plain_causal(self) -> bool:
        """True if the block sees itself up to each query, and nothing is hidden."""
        return self.past == 0 and self.entries is self.queries is self.window is None


def blockwise_attention_with_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visibility: Visibility,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends over kept entries and the block itself, by blocks of queries.

    Args:
        query: ``[B, HQ, T, D]``.
        key: ``[B, H, N, D]`` with N = past + T.
        value: ``[B, H, N, Dv]``.
        visibility: who sees what; query i sees the past and the block's keys up to i.
        scale: factor on the logits.
        softcap: as in `reference.attention_with_scores`.

    Returns:
        ``(output, sums)`` as in `reference.attention_with_scores`.
    """
    batch, num_heads, length, size = query.shape
    num_kv_heads, num_keys = key.shape[1], key.shape[2]
    groups = num_heads // num_kv_heads
    rows = batch * num_kv_heads
    queries = query.reshape(rows, groups, length, size)
    keys, values = key.reshape(rows, num_keys, size), value.reshape(rows, num_keys, -1)
    hidden, silent = _per_row(visibility, batch, num_kv_heads, num_keys)
    output = torch.empty(
        rows, groups, length, values.shape[-1], dtype=query.dtype, device=query.device
    )
    sums = torch.zeros(rows, num_keys, dtype=torch.float32, device=query.device)
    for heads, blocks in _plan(rows, groups, length, num_keys):
        some_keys = keys[heads].to(torch.float32).transpose(1, 2)
        some_values = values[heads].to(torch.float32)
        some_queries = queries[heads].to(torch.float32) * scale
        for block in blocks:
            seen = _seen_keys(block, visibility)
            logits = some_queries[:, :, block].flatten(1, 2) @ some_keys[:, :, seen]
            if softcap is not None:
                logits = torch.tanh(logits.div_(softcap)).mul_(softcap)
            logits = logits.unflatten(1, (groups, -1))
            _hide_future(logits, block, seen, visibility)
            if hidden is not None:
                logits.masked_fill_(hidden[heads, None, None, seen], -torch.inf)
            weights = torch.softmax(logits, dim=-1)
            if hidden is not None:
                # A row that sees nothing (padding) is NaN after the softmax.
                weights.masked_fill_((logits == -torch.inf).all(dim=-1, keepdim=True), 0.0)
            if silent is not None:
                weights.masked_fill_(silent[heads, None, block, None], 0.0)
            sums[heads, seen] += weights.sum(dim=(1, 2))
            output[heads, :, block] = (
                (weights.flatten(1, 2) @ some_values[:, seen]).unflatten(1, (groups, -1)).to(query.dtype)
            )
    return output.view(batch, num_heads, length, -1), sums.view(batch, num_kv_heads, num_keys)


def _per_row(
    visibility: Visibility, batch: int, num_kv_heads: int, num_keys: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Flattens the masks to rows (b, h): hidden keys ``[B * H, N]``, silent queries ``[B * H, T]``."""
    hidden = silent = None
    if visibility.entries is not None:
        hidden = ~visibility.entries.expand(batch, num_kv_heads, num_keys).reshape(-1, num_keys)
    if visibility.queries is not None:
        silent = (~visibility.queries).repeat_interleave(num_kv_heads, dim=0)
    return hidden, silent


def _seen_keys(block: slice, visibility: Visibility) -> slice:
    """The keys that some query of the block sees."""
    start = 0
    if visibility.window is not None:
        start = max(0, visibility.past + block.start - visibility.window + 1)
    return slice(start, visibility.past + block.stop)


def _hide_future(
    logits: torch.Tensor, block: slice, seen: slice, visibility: Visibility
) -> None:
    """Writes -inf over the keys after each query, and before its window; mutates ``logits``."""
    device = logits.device
    own = visibility.past + torch.arange(block.start, block.stop, device=device).unsqueeze(1)
    if visibility.window is None:
        # Only the last columns, the block's own keys, can be in the future.
        width = block.stop - block.start
        columns = torch.arange(seen.stop - width, seen.stop, device=device)
        logits[..., -width:].masked_fill_(columns > own, -torch.inf)
        return
    columns = torch.arange(seen.start, seen.stop, device=device)
    logits.masked_fill_((columns > own) | (columns <= own - visibility.window), -torch.inf)


def _plan(
    rows: int, groups: int, length: int, num_keys: int
) -> Iterator[tuple[slice, list[slice]]]:
    """Cuts the work into (heads, blocks of queries) whose logits fit the scratch limit."""
    size = max(_MIN_ROWS, min(_MAX_ROWS, SCRATCH_ELEMENTS // (num_keys * groups)))
    heads = max(1, SCRATCH_ELEMENTS // (size * num_keys * groups))
    blocks = [slice(at, min(at + size, length)) for at in range(0, length, size)]
    for at in range(0, rows, heads):
        yield slice(at, min(at + heads, rows)), blocks
