"""Attention with score sums, block by block: exact and linear in memory."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from h2okv.ops import flash
from h2okv.ops.reference import AttentionSpec, Visibility, compute_dtype
from h2okv.ops.rope import Layout, rotate
from h2okv.ops.threads import run_apart

# The CPU computes 2 ** x four times as fast as e ** x.
_LOG2_E = math.log2(math.e)
# Measured: a tile of fp32 logits takes about 1 MiB, or twelve on CPUs with AMX, where fewer
# operations gain more than tiles that stay in a core's own cache. All tiles of one block of queries
# take at most 32 or 64 MiB, if need be with fewer rows.
_TILE_ROWS, _TILE_KEYS, _SCRATCH_ELEMENTS = 288, 1024, 1 << 23
if torch.cpu._is_amx_tile_supported():
    _TILE_ROWS, _TILE_KEYS, _SCRATCH_ELEMENTS = 384, 8192, 1 << 24
# From this number of logits on (2,048 tokens of 9 heads) tiles run in separate threads, which do
# not wait for each other: beside other processes waiting takes most of the time.
_MANY_LOGITS = 1 << 25
# Up to this number of keys of all heads they are read at once: in fp32 while their tiles stay in a
# core's cache, while products of bf16 gain more from fewer operations.
_FEW_KEYS, _FEW_KEYS_BF16 = 1 << 12, 1 << 15
# Up to this number of logits of a sequence (120 tokens of 9 heads) MKL reads all heads at once on
# AMD's CPUs too.
_FEW_LOGITS = 1 << 17
# Replaces -inf as the maximum of a row that sees nothing: inf - inf would be NaN.
_LOWEST = -1e30
# Sums of powers of two that lose nothing to fp32, and those whose squares do not.
_MOST = 2.0**100
_MIN_TO_SQUARE, _MAX_TO_SQUARE = 2.0**-30, 2.0**60
# Whether the processor itself multiplies matrices of bf16, which is twice as fast.
_MULTIPLIES_BF16 = torch.cpu._is_avx512_bf16_supported()
# For each shape of a tile oneDNN makes a kernel. Where it keeps fewer (`engine/memory.py` asks for
# that), making them takes longer than they save.
_MIN_KERNELS = 128


def blockwise_attention_with_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    spec: AttentionSpec,
    weights: Tensor | None = None,
    needs_sums: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attends over kept entries and the block itself, by tiles.

    Args:
        query: ``[B, HQ, T, D]``.
        key: ``[B, H, N, D]`` with N = past + T. Keys that are no entries must be finite, unless
            ``visibility.queries`` leaves them out.
        value: ``[B, H, N, Dv]``, likewise: their probability is zero, but zero times NaN is NaN.
        visibility: who sees what; query i sees the past and the block's keys up to i.
        spec: how.
        weights: as in `reference.attention_with_scores`.
        needs_sums: whether to compute the sums; zero otherwise.

    Returns:
        ``(output, sums)`` as in `reference.attention_with_scores`, the sums in fp32. The output's
        memory is laid out as ``[B, T, HQ, Dv]``, which is what the model makes of it.
    """
    batch, num_heads, length, _ = query.shape
    num_kv_heads, num_keys = key.shape[1], key.shape[2]
    real, past = visibility.queries, visibility.past
    make = query.new_empty if real is None else query.new_zeros
    output = make(batch, length, num_heads, value.shape[-1]).transpose(1, 2)
    grouped_query = query.unflatten(1, (num_kv_heads, -1))
    grouped_output = output.unflatten(1, (num_kv_heads, -1))
    sums = torch.zeros(batch, num_kv_heads, num_keys, dtype=torch.float32, device=query.device)
    entries = visibility.entries
    if entries is not None:
        entries = entries.expand(batch, num_kv_heads, num_keys)
    if spec.sinks is not None:
        spec = spec._replace(sinks=spec.sinks.float().view(num_kv_heads, -1))
    for row in range(batch):
        columns: Any = slice(None)
        seen: Any = slice(None)
        if real is not None:
            # A row runs alone over its real tokens: its padding costs nothing and cannot leak.
            columns = real[row].nonzero().squeeze(1)
            if len(columns) == 0:
                continue
            seen = torch.cat([torch.arange(past, device=columns.device), past + columns])
        row_output, row_sums = grouped_output[row][:, :, columns], sums[row][:, seen]
        row_weights = None if weights is None else weights[row, columns]
        states = [key[row][:, seen], value[row][:, seen]]
        row_past, entry_columns, bias = past, None, None
        row_reach = None if spec.reach is None else spec.reach[row, columns]
        if row_reach is not None and real is not None:
            row_reach = (real[row].cumsum(dim=0) - 1)[row_reach]
        if entries is not None:
            is_entry = entries[row][:, seen]
            entry_columns = None if spec.window else _entry_columns(is_entry, past)
            if entry_columns is None:
                bias = torch.zeros_like(row_sums).masked_fill_(~is_entry, -torch.inf).unsqueeze(1)
            else:
                row_past = past - is_entry.shape[1] + entry_columns.shape[1]
                states = [tensor.gather(1, _wide(entry_columns, tensor)) for tensor in states]
        entry_sums = row_sums if entry_columns is None else row_sums.new_zeros(entry_columns.shape)
        _attend_row(
            _Row(
                row_past, row_weights, needs_sums, spec._replace(reach=row_reach),
                _onednn_is_faster(query[0], key),
            ),
            row_output, entry_sums, grouped_query[row][:, :, columns], states[0], states[1], bias,
        )  # fmt: skip
        if entry_columns is not None:
            row_sums.scatter_(1, entry_columns, entry_sums)
        if real is not None:  # those were copies
            grouped_output[row][:, :, columns], sums[row][:, seen] = row_output, row_sums
    return output, sums


def _entry_columns(is_entry: Tensor, past: int) -> Tensor | None:
    """Return the columns of each head's entries, int64 ``[H, n]``, or ``None``.

    ``None`` if heads of ``[H, N]`` have different numbers of entries, or not all of the block are
    entries; and on a device that would have to be waited for.
    """
    is_readable = is_entry.device.type == "cpu" and not torch.compiler.is_compiling()
    if not is_readable or not is_entry[:, past:].all():
        return None
    counts = is_entry.sum(dim=1)
    if not (counts == counts[0]).all():
        return None
    return is_entry.nonzero()[:, 1].view(len(counts), -1)


def _wide(columns: Tensor, states: Tensor) -> Tensor:
    """Expand indices ``[H, n]`` for states ``[H, N, D]``."""
    return columns.unsqueeze(-1).expand(-1, -1, states.shape[-1])


class _Row(NamedTuple):
    """What the heads of one sequence share; weights and reach are of its T real tokens."""

    past: int
    weights: Tensor | None
    needs_sums: bool
    spec: AttentionSpec  # sinks fp32 [H, G], reach [T]
    by_onednn: bool  # whether its products are faster; then of one head at a time


def _attend_row(
    row: _Row,
    output: Tensor,
    sums: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
) -> None:
    """Attend for one sequence and all H heads; shapes as in `_attend_heads`."""
    spec, (num_heads, groups, length, _) = row.spec, query.shape
    reach = min(key.shape[1], spec.window or key.shape[1])
    is_plain, softcap = _is_plain(query), spec.softcap
    sees_all = bias is None and softcap is None and reach == key.shape[1] and spec.reach is None
    if is_plain and sees_all and flash.sums_apply(query, key, value, row.needs_sums):
        options = row.past, spec, row.weights, row.needs_sums
        output[:], sums[:] = flash.attention_with_sums(query, key, value, *options)
        return
    is_kept = _MULTIPLIES_BF16 and value.is_cpu and value.dtype == torch.bfloat16
    if is_kept:
        kernels = os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "")
        is_kept = not kernels.isdecimal() or int(kernels) >= _MIN_KERNELS
    dtype = value.dtype if is_kept else compute_dtype(value.dtype)
    factor = spec.scale / softcap if softcap else spec.scale * _LOG2_E

    def attend(at: slice, share: slice, head_sums: Tensor, scratch_elements: int) -> None:
        head_bias = None if bias is None else bias[at]
        outputs, head_states = (
            (output[at], head_sums[at]),
            (query[at], key[at], value[at].to(dtype)),
        )
        sinks = None if spec.sinks is None else spec.sinks[at]
        shared = row._replace(spec=spec._replace(sinks=sinks))
        _attend_heads(shared, share, scratch_elements, factor, *outputs, *head_states, head_bias)

    threads = torch.get_num_threads() if query.device.type == "cpu" else num_heads
    many = length * reach * num_heads * groups >= _MANY_LOGITS
    if many and is_plain and threads > 1:
        _spread_heads(
            threads, sums, lambda head, share, head_sums: attend(
                slice(head, head + 1), share, head_sums, _SCRATCH_ELEMENTS // threads
            ),
        )  # fmt: skip
        return
    few = _FEW_KEYS_BF16 if is_kept else _FEW_KEYS
    step = num_heads if num_heads * key.shape[1] <= few else threads
    step = 1 if row.by_onednn else step
    for start in range(0, num_heads, step):
        attend(slice(start, start + step), slice(None), sums, _SCRATCH_ELEMENTS)


def _spread_heads(threads: int, sums: Tensor, attend: Callable[[int, slice, Tensor], None]) -> None:
    """Attend to one head a thread and add to the sums ``[H, N]``.

    Where heads do not divide among threads, each takes every n-th block of a head's queries. A call
    gets a head, a slice of its blocks and separate sums ``[H, N]``, to which it adds the head's.
    """
    num_shares = threads // math.gcd(len(sums), threads)
    share_sums = sums.new_zeros(num_shares, *sums.shape)
    run_apart([
        functools.partial(attend, head, slice(share, None, num_shares), share_sums[share])
        for head in range(len(sums)) for share in range(num_shares)
    ])  # fmt: skip
    sums += share_sums.sum(dim=0)


def _is_plain(query: Tensor) -> bool:
    """Tell whether threads and kernels that support no gradients and no tracing may be used."""
    is_tensor = type(query) is Tensor and query.device.type == "cpu"
    return is_tensor and not torch.compiler.is_compiling() and not torch.is_grad_enabled()


def _attend_heads(
    row: _Row,
    share: slice,
    scratch_elements: int,
    scale: float,
    output: Tensor,
    sums: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
) -> None:
    """Attend by tiles of h heads of one sequence; mutates the output and the zero sums.

    Shapes: output ``[h, G, T, Dv]``, sums ``[h, N]``, query ``[h, G, T, D]``, to be multiplied by
    ``scale``, key and value ``[h, N, ...]``, bias ``[h, 1, N]``, added to the logits. Of the blocks
    of queries it attends to those in ``share``, whose tiles take at most ``scratch_elements``
    numbers. Values of fewer bits are multiplied by probabilities of as many, as in the model's own
    attention; all else is computed in fp32 (fp64 for fp64), and the sums stay fp32.
    """
    past, weights, needs_sums, (_, softcap, sink_logits, window, reach), by_onednn = row
    heads, groups, length, _ = query.shape
    num_keys = key.shape[1]
    # Minus the logit of the query's own key is added by one more column of the product, not by a
    # pass over each tile.
    shifted = softcap is None
    wide = compute_dtype(query.dtype)
    keys = key.new_full((heads, num_keys, key.shape[2] + shifted), -1, dtype=wide)
    keys[..., : key.shape[2]] = key
    rows = _TILE_ROWS * 2 if by_onednn else _TILE_ROWS
    rows = max(1, min(rows, scratch_elements // (heads * num_keys)) // groups)
    if by_onednn:  # a kernel for each shape of a tile: so tiles have few widths
        rows -= rows % min(64, 1 << rows.bit_length() - 1)
    scratch = keys.new_empty(0 if by_onednn else min(rows, length) * groups * heads * num_keys)

    for top in range(0, length, rows)[share]:
        bottom = min(top + rows, length)
        # All queries at once would be new memory for each layer, page by page.
        scaled = query[:, :, top:bottom].to(wide) * scale
        query_keys = keys[:, None, past + top : past + bottom, : key.shape[2]]
        own_logits = (scaled * query_keys).sum(dim=-1, keepdim=True)
        if shifted:
            scaled = torch.cat([scaled, own_logits], dim=-1)
        sinks = None
        if sink_logits is not None:
            sinks = (sink_logits * _LOG2_E)[..., None, None].expand_as(own_logits)
            sinks = (sinks - own_logits if shifted else sinks).flatten(1, 2)
        first = 0 if window is None else max(0, past + top - window + 1)
        end = past + (bottom if reach is None else int(reach[top:bottom].max()) + 1)
        edges = range(first, end, _TILE_KEYS)
        slices = [slice(left, min(left + _TILE_KEYS, end)) for left in edges]
        scaled = scaled.flatten(1, 2)
        block = _Block(row, top, bottom, slices, scaled, keys, value, bias, sinks, scratch)
        # A running maximum would cost two more passes. Relative to the logit of the query's own
        # key the powers of two stay within fp32, but for rare logits; the sums tell, and those
        # rows are done again relative to their maximum.
        shift = None
        if softcap is not None:
            shift = own_logits.tanh_().mul_(softcap * _LOG2_E).flatten(1, 2)
        tiles, total, mixed = block.powers(shift)
        if not _in_range(total, 1 / _MOST, _MOST):
            tiles, total, mixed = block.powers(block.highest())
        # A row that sees nothing has a sum of zero: the limit makes its output zero, not NaN.
        factor = total.clamp_(min=torch.finfo(total.dtype).tiny).reciprocal_()
        output[:, :, top:bottom] = mixed.mul_(factor).unflatten(1, (groups, -1))
        if not needs_sums:
            continue
        if weights is not None:
            factor = factor * weights[top:bottom].repeat(groups).unsqueeze(1)
        for columns, tile in zip(slices, tiles, strict=True):
            sums[:, columns].add_(torch.bmm(factor.transpose(1, 2), tile).squeeze(1))


class _Block(NamedTuple):
    """The R queries of h heads from `top` to `bottom`; shapes as in `_attend_heads`."""

    row: _Row
    top: int
    bottom: int
    slices: list[slice]  # of the keys, one a tile
    queries: Tensor  # [h, G * R, D], and a column if the logits are shifted
    keys: Tensor  # [h, N, D], and a column of -1 then
    value: Tensor
    bias: Tensor | None
    sinks: Tensor | None  # [h, G * R, 1]
    scratch: Tensor  # of all tiles

    def logits(self, columns: slice) -> Tensor:
        """Compute a tile ``[h, G * R, width]`` in its part of the scratch memory."""
        past, (_, softcap, _, window, reach) = self.row.past, self.row.spec
        bias = None if self.bias is None else self.bias[:, :, columns].to(self.keys.dtype)
        tile = self._products(columns, bias if softcap is None else None)
        if softcap is not None:
            tile.tanh_().mul_(softcap * _LOG2_E)
            if bias is not None:
                tile += bias
        by_head = tile.unflatten(1, (-1, self.bottom - self.top))
        if reach is None:
            _hide(by_head, columns, past + self.top, past + self.bottom, window)
        elif columns.stop > past + self.top:
            block_columns = torch.arange(columns.start, columns.stop, device=tile.device) - past
            reached = reach[self.top : self.bottom, None]
            by_head.masked_fill_(block_columns > reached, -torch.inf)
        return tile

    def _products(self, columns: slice, bias: Tensor | None) -> Tensor:
        keys = self.keys[:, columns]
        if self.row.by_onednn:
            product = onednn_linear(self.queries[0], keys[0]).unsqueeze(0)
            return product if bias is None else product.add_(bias)
        (heads, height, _), width = self.queries.shape, columns.stop - columns.start
        offset = heads * height * (columns.start - self.slices[0].start)
        tile = self.scratch[offset : offset + heads * height * width].view(heads, height, width)
        if bias is None:
            return torch.bmm(self.queries, keys.transpose(1, 2), out=tile)
        return torch.baddbmm(bias, self.queries, keys.transpose(1, 2), out=tile)

    def powers(self, shift: Tensor | None) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return tiles of powers of two, relative to a shift, their sums, and the values' mix."""
        tiles, total, mixed = [], None, None
        for columns in self.slices:
            tile = self.logits(columns)
            if shift is not None:
                tile.sub_(shift)
            tile.exp2_()
            tiles.append(tile)
            tile_total, product = tile.sum(dim=-1, keepdim=True), self.value[:, columns]
            if self.row.by_onednn and product.dtype == tile.dtype:
                product = onednn_linear(tile[0], product[0].T.contiguous()).unsqueeze(0)
            else:
                product = torch.bmm(tile.to(product.dtype), product).to(tile.dtype)
            total = tile_total if total is None else total.add_(tile_total)
            mixed = product if mixed is None else mixed.add_(product)
        assert total is not None and mixed is not None
        if self.sinks is not None:
            total.add_((self.sinks if shift is None else self.sinks - shift).exp2())
        return tiles, total, mixed

    def highest(self) -> Tensor:
        """Return the largest logit of each query."""
        maxima = [self.logits(columns).amax(-1, keepdim=True) for columns in self.slices]
        if self.sinks is not None:
            maxima.append(self.sinks)
        return torch.cat(maxima, -1).amax(-1, True).clamp_(min=_LOWEST)


def _in_range(total: Tensor, lowest: float, highest: float) -> bool:
    """Tell whether sums of powers of two are exact in fp32; False while compiling."""
    if torch.compiler.is_compiling():
        return False
    minimum, maximum = total.aminmax()
    return minimum.item() > lowest and maximum.item() < highest


def _hide(tile: Tensor, columns: slice, first: int, last: int, window: int | None) -> None:
    """Add -inf where a query must not look: the future, and positions before its window.

    Mutates logits ``[h, G, rows, width]`` of the keys in ``columns``; the queries' own keys are
    those from ``first`` up to ``last``.
    """
    spans: list[tuple[int, int, int | None]] = [(max(columns.start, first + 1), columns.stop, None)]
    if window is not None:
        spans.append((columns.start, min(columns.stop, last - window), window))
    # No memory of a recorded, traced or compiled graph may be kept for others.
    is_plain = type(tile) is Tensor and tile.device.type == "cpu"
    unseen = _kept_unseen if is_plain and not torch.compiler.is_compiling() else _unseen
    for start, stop, reach in spans:
        # Most columns are seen by all rows; only the others are touched.
        if start < stop:
            added = unseen(last - first, start - first, stop - first, reach, tile.device)
            tile[..., start - columns.start : stop - columns.start].add_(added)


def _unseen(rows: int, start: int, stop: int, window: int | None, device: torch.device) -> Tensor:
    """-inf for keys after each query, or behind its window; keys are counted from the first query.

    Fp32 ``[rows, stop - start]``, which are at most `_TILE_ROWS` each.
    """
    queries = torch.arange(rows, device=device).unsqueeze(1)
    keys = torch.arange(start, stop, device=device)
    hidden = keys > queries if window is None else keys <= queries - window
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)


_kept_unseen = functools.lru_cache(maxsize=8)(_unseen)  # most tiles on the diagonal are alike


# Query heads of a KV head that are stored as one until a cut; docs/results/quality.md has what
# others cost.
_HEADS_OF_MEAN = 4


def num_means(groups: int) -> int:
    """Return the means that G query heads of a KV head have, each of at most four."""
    return -(-groups // _HEADS_OF_MEAN)


def mean_queries(states: Tensor, num_kv_heads: int, out: Tensor | None = None) -> Tensor:
    """Average the query heads of each KV head, a few at a time.

    Args:
        states: queries ``[B, HQ, T, D]``, or anything else of each query head, ``[B, HQ, ...]``.
        num_kv_heads: number H of KV heads.
        out: where to put the means, if one operation does that; else it stays as it is.

    Returns:
        ``[B, H * num_means(HQ / H), ...]`` in the same dtype; computed in fp32 or wider.
    """
    groups = states.shape[1] // num_kv_heads
    if groups == 1:
        return states
    count = num_means(groups)
    wide = torch.promote_types(states.dtype, torch.float32)
    if groups % count == 0 and states.is_cuda:  # where it adds in fp32 by itself
        return torch.mean(states.unflatten(1, (-1, groups // count)), dim=2, out=out)
    if groups % count == 0 and states.shape[2:-1] == (1,):  # a single token: one operation
        means = states.unflatten(1, (-1, groups // count)).mean(dim=2, dtype=wide)
        return means.to(states.dtype)
    sets = states.unflatten(1, (num_kv_heads, groups)).tensor_split(count, dim=2)
    means = states.new_empty(*sets[0].shape[:2], count, *states.shape[2:], dtype=wide)
    for number, heads in enumerate(sets):
        mean = means[:, :, number].copy_(heads[:, :, 0])
        for head in heads.unbind(dim=2)[1:]:  # three times as fast as `Tensor.mean`
            mean += head
        mean /= heads.shape[2]
    return means.flatten(1, 2).to(states.dtype)


# Numbers of a tile of expected attention: on a CPU 2 MiB in fp32, which its cache holds.
_TILE_ELEMENTS, _TILE_ELEMENTS_GPU = 1 << 19, 1 << 26


def expected_attention(
    query: Tensor,
    key: Tensor,
    entries: Tensor | None,
    queries: Tensor | None,
    spec: AttentionSpec,
    rotation: tuple[Tensor, Layout] | None = None,
) -> Tensor:
    """Lets every query attend to all entries, whichever came first.

    Args:
        query: ``[B, HQ, T, D]``, where the next queries will be: behind all keys.
        key: ``[B, H, N, D]``; anything finite where there is no entry.
        entries: bool ``[B, H, N]``, keys that are entries; ``None`` if all are.
        queries: bool ``[B, T]``, queries that are real tokens; ``None`` if all are.
        spec: how, but for window and reach.
        rotation: what brings queries there, as `h2okv.ops.rope.rotate` takes it; ``None`` for
            those that are there.

    Returns:
        fp32 ``[B, H, N]``: for each key the L2 norm of its probabilities, over the queries and the
        heads of the KV head's group. A key that one query needs weighs more than one to which many
        give a little.
    """
    if rotation is not None:
        query = rotate(query, *rotation)
    batch, heads, count, _ = key.shape
    sums = torch.zeros(batch, heads, count, dtype=torch.float32, device=key.device)
    if spec.sinks is not None:
        spec = spec._replace(sinks=spec.sinks.float().view(heads, -1))
    for row in range(batch):
        columns: Any = slice(None) if queries is None else queries[row]
        queries_of_row, keys_of_row = query[row].unflatten(0, (heads, -1))[:, :, columns], key[row]
        entry_columns, bias = None, None
        if entries is not None:
            entry_columns = _entry_columns(entries[row], count)
            if entry_columns is None:
                floor = torch.finfo(torch.float32).min
                bias = torch.zeros_like(sums[row]).masked_fill_(~entries[row], floor).unsqueeze(1)
            else:
                keys_of_row = keys_of_row.gather(1, _wide(entry_columns, keys_of_row))
        squares = _expected_squares(queries_of_row, keys_of_row, bias, spec)
        if entry_columns is None:
            sums[row] = squares
        else:
            sums[row].scatter_(1, entry_columns, squares.to(sums.dtype))
    return sums.sqrt_() if entries is None else sums.sqrt_().masked_fill_(~entries, 0.0)


def _onednn_is_faster(query: Tensor, key: Tensor) -> bool:
    """Tell whether products in fp32 are oneDNN's; MKL's take twice the time on AMD's CPUs.

    But for queries ``[..., T, D]`` and keys ``[..., N, D]`` of so few logits that fewer operations
    gain more.
    """
    is_wide = compute_dtype(key.dtype) == torch.float32 and torch.backends.mkldnn.is_available()
    is_large = query.shape[:-1].numel() * key.shape[-2] > _FEW_LOGITS
    return flash.IS_AMD and is_wide and is_large and _is_plain(query)


def onednn_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by a packed or dense weight; gaps between its rows take a thousand times as long."""
    product: Any = torch.ops.mkldnn._linear_pointwise.default
    return product(input, weight, bias, "none", [], "")


def _expected_squares(
    query: Tensor, key: Tensor, bias: Tensor | None, spec: AttentionSpec
) -> Tensor:
    """Sum squares for one sequence, ``[H, G, T, D]`` and ``[H, N, D]``.

    The bias ``[H, 1, N]`` hides keys; sinks are ``[H, G]``.
    """
    scale, softcap, sink_logits, *_ = spec
    if bias is None and softcap is None and _is_plain(query):
        rounded = query.to(key.dtype)
        if flash.sums_apply(rounded, key, key):
            return flash.expected_squares(rounded, key, spec)
    heads, count, _ = key.shape
    wide = compute_dtype(key.dtype)
    sums = torch.zeros(heads, count, dtype=wide, device=key.device)
    rows = max(1, (_TILE_ELEMENTS_GPU if key.is_cuda else _TILE_ELEMENTS) // count)
    factor = scale / softcap if softcap else scale * _LOG2_E
    queries, keys = query.to(wide).flatten(1, 2) * factor, key.to(wide).contiguous()
    if queries.shape[1] == 0:  # a sequence that is all padding in this block
        return sums
    sinks = None
    if sink_logits is not None:
        sinks = (sink_logits * _LOG2_E).repeat_interleave(query.shape[2], dim=1)
    multiply = onednn_linear if _onednn_is_faster(query, key) else linear

    def square_head(head: int, share: slice, head_sums: Tensor) -> None:
        def powers(start: int, shifts: bool) -> tuple[Tensor, Tensor]:
            tile = multiply(queries[head, start : start + rows], keys[head])
            if softcap is not None:
                tile.tanh_().mul_(softcap * _LOG2_E)
            if bias is not None:
                tile += bias[head]
            row_sinks = None if sinks is None else sinks[head, start : start + rows]
            if shifts:
                highest = tile.amax(dim=-1).clamp_(min=_LOWEST)
                if row_sinks is not None:
                    highest = torch.maximum(highest, row_sinks)
                    row_sinks = row_sinks - highest
                tile.sub_(highest.unsqueeze(-1))
            total = tile.exp2_().sum(dim=-1)
            return tile, total if row_sinks is None else total.add_(row_sinks.exp2())

        for start in range(0, queries.shape[1], rows)[share]:
            # As in tiles: a maximum only where squares would leave fp32. A GPU need not wait then.
            tile, total = powers(start, key.is_cuda)
            if not key.is_cuda and not _in_range(total, _MIN_TO_SQUARE, _MAX_TO_SQUARE):
                tile, total = powers(start, True)
            head_sums[head].addmv_(tile.square_().T, total.square_().reciprocal_())

    threads = torch.get_num_threads()
    if threads > 1 and _is_plain(query) and queries.shape[:2].numel() * count >= _MANY_LOGITS:
        _spread_heads(threads, sums, square_head)
    else:
        for head in range(heads):
            square_head(head, slice(None), sums)
    return sums


_MIN_BLOCK, _MAX_BLOCK = 64, 512


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    real: Tensor | None,
    spec: AttentionSpec,
    dropout: float = 0.0,
) -> Tensor:
    """Attends by blocks of queries, each over just the keys that its windows reach.

    Args:
        query: ``[B, HQ, T, D]``, the last T tokens.
        key: ``[B, H, N, D]`` with N at least T.
        value: ``[B, H, N, Dv]``.
        real: bool ``[B, N]``, False for padding; ``None`` if there is none.
        spec: scale and window.
        dropout: fraction of the probabilities that is dropped.

    Returns:
        ``[B, HQ, T, Dv]``; gradients pass.
    """
    length, past, window = query.shape[2], key.shape[2] - query.shape[2], spec.window
    assert window is not None
    # A block as large as the window computes at most twice the products needed.
    size = max(_MIN_BLOCK, min(_MAX_BLOCK, window))
    outputs = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        reach = slice(max(0, past + start - window + 1), past + stop)
        queries = torch.arange(past + start, past + stop, device=query.device).unsqueeze(1)
        columns = torch.arange(reach.start, reach.stop, device=query.device)
        visible = (columns <= queries) & (columns > queries - window)
        if real is not None:
            visible = visible & real[:, None, None, reach]
        states = query[:, :, start:stop], key[:, :, reach], value[:, :, reach]
        options: Any = {"dropout_p": dropout, "scale": spec.scale}
        options["enable_gqa"] = query.shape[1] != key.shape[1]
        outputs.append(scaled_dot_product_attention(*states, attn_mask=visible, **options))
    return torch.cat(outputs, dim=2)
