"""The mask of a block, in O(T) numbers where the pattern allows it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

WINDOW_DTYPE = torch.int32
"""A mask of this dtype holds for each key the window in which it is seen; 0 for padding.

The window travels in the numbers because nothing else survives on all ways: not every model gives
its attention a ``sliding_window``, and an attribute is lost when a mask is moved to another device.
"""


def h2o_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """Makes the mask of a block; registered as ``"h2o"`` in ``AttentionMaskInterface``.

    A causal block over itself (every block of an `H2OCache`, and the first one of any cache) needs
    no T x T mask, only to know which tokens are padding; a sliding window adds one number.
    Everything else gets SDPA's mask.

    Args:
        q_length: T.
        kv_length: N, keys that the cache's layer will return; T for an H2O layer.
        mask_function: transformers' description of the mask.
        attention_mask: bool ``[B, tokens seen + T]`` or ``None``.
        **options: what else transformers gives a mask function.

    Returns:
        bool ``[B, 1, 1, T]`` (False for padding); ``None`` if there is no padding; for a sliding
        window `WINDOW_DTYPE` ``[B, 1, 1, N]``; or SDPA's mask, bool ``[B, 1, T, N]``.
    """
    is_causal = mask_function is causal_mask_function
    window = None if is_causal else _sliding_window(mask_function, q_length, kv_length, options)
    if is_causal and q_length == kv_length:
        return _padding_mask(attention_mask, q_length)
    if window is None:
        return sdpa_mask(
            q_length=q_length,
            kv_length=kv_length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **options,
        )
    if window >= kv_length == q_length:
        return _padding_mask(attention_mask, q_length)
    return _window_mask(window, attention_mask, kv_length, options)


def _padding_mask(attention_mask: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """The block's part of the mask, bool ``[B, 1, 1, T]``; ``None`` if all tokens are real."""
    if attention_mask is None:
        return None
    real = attention_mask[:, -length:].to(torch.bool)
    # Reading the mask is free on the CPU and once per prompt elsewhere, but not in a decode step.
    readable = real.device.type == "cpu" or length > 1
    if readable and not torch.compiler.is_compiling() and bool(real.all()):
        return None
    return real[:, None, None, :]


def _sliding_window(
    mask_function: Any, q_length: int, kv_length: int, options: dict[str, Any]
) -> int | None:
    """The window, if the pattern is a causal sliding window and nothing else."""
    window = options.get("local_size")
    # transformers withdraws the skip when it lays another pattern over the window.
    if window is None or not options.get("allow_is_causal_skip", True):
        return None
    # A decode step's mask is small; a compiled one must not look at numbers.
    if q_length == 1 or torch.compiler.is_compiling():
        return None
    query_offset, key_offset = options.get("q_offset", 0), options.get("kv_offset", 0)
    if not isinstance(query_offset, int) or not isinstance(key_offset, int):
        return None
    if query_offset + q_length != key_offset + kv_length:
        return None
    # Chunked attention gives its chunk as local_size too: ask the pattern itself. A window moves
    # with the query; of two neighbours one lies in another chunk than the key it reaches back to.
    queries = torch.tensor([window, window + 1, window, window])
    keys = torch.tensor([1, 2, 0, window + 1])
    seen = mask_function(0, 0, queries, keys)
    return window if seen.tolist() == [True, True, False, False] else None


def _window_mask(
    window: int, attention_mask: torch.Tensor | None, kv_length: int, options: dict[str, Any]
) -> torch.Tensor:
    """`WINDOW_DTYPE` ``[B, 1, 1, N]``: the window, or 0 where a key is padding."""
    shape = (options["batch_size"], 1, 1, kv_length)
    mask = torch.full(shape, window, dtype=WINDOW_DTYPE, device=options.get("device"))
    if attention_mask is not None:
        start = options.get("kv_offset", 0)
        real = attention_mask[:, start : start + kv_length].to(torch.bool)
        mask = mask * real[:, None, None, :]
    return mask
