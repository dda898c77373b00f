"""The attention and mask functions registered with transformers under the name "h2o"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils import logging

from h2okv.cache.layer import LAYER_ATTRIBUTE, CacheLayer
from h2okv.cache.rope import find_rotation
from h2okv.cache.validation import check_follows, check_placed
from h2okv.ops.attention import Visibility, blockwise_attention_with_scores, windowed_attention
from h2okv.ops.reference import attention_with_scores

ATTENTION_NAME = "h2o"
logger = logging.get_logger(__name__)

# Arguments that change the probabilities and that SDPA passes over in silence: learned sinks, and
# the keys that an indexer chose.
_IGNORED_BY_SDPA = ("s_aux", "sinks", "indices", "block_indices")

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
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
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
        given = {"mask_function": mask_function, "attention_mask": attention_mask, **options}
        return sdpa_mask(q_length=q_length, kv_length=kv_length, **given)
    if window >= kv_length == q_length:
        return _padding_mask(attention_mask, q_length)
    return _window_mask(window, attention_mask, kv_length, options)


def _padding_mask(attention_mask: Tensor | None, length: int) -> Tensor | None:
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
    window: int, attention_mask: Tensor | None, kv_length: int, options: dict[str, Any]
) -> Tensor:
    """`WINDOW_DTYPE` ``[B, 1, 1, N]``: the window, or 0 where a key is padding."""
    shape = (options["batch_size"], 1, 1, kv_length)
    mask = torch.full(shape, window, dtype=WINDOW_DTYPE, device=options.get("device"))
    if attention_mask is not None:
        start = options.get("kv_offset", 0)
        real = attention_mask[:, start : start + kv_length].to(torch.bool)
        mask = mask * real[:, None, None, :]
    return mask


def plain_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    options: dict[str, Any],
) -> tuple[Tensor, None]:
    """SDPA, or what SDPA has not: a window without a T x T mask, and soft-capped logits.

    Shapes as in `h2o_attention`, with ``[B, H, N, ...]`` for key and value; ``options`` is what
    else the model gives its attention.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    has_window = mask is not None and mask.dtype == WINDOW_DTYPE
    if softcap is None and not has_window:
        if mask is not None and mask.shape[-2] == 1 < query.shape[2]:
            mask = mask & _causal(query, key)
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **options
        )
    if torch.is_autocast_enabled(query.device.type):  # as SDPA does
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (states.to(dtype) for states in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        if softcap is not None:
            output = _capped(query, key, value, mask, scale, softcap)
        else:
            window, real = _read_window(mask)
            output = windowed_attention(query, key, value, real, window, scale, dropout)
    return output.transpose(1, 2).contiguous(), None


def _capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Soft-capped attention, ``[B, HQ, T, Dv]``: by blocks, unless a gradient must pass."""
    if mask is not None and mask.shape[-2] != 1:
        return attention_with_scores(query, key, value, mask, scale, softcap)[0]
    if mask is None and query.shape[2] > 1:
        # As SDPA is causal: a prompt on a static cache, whose other slots are empty.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    past = key.shape[2] - query.shape[2]
    window, real = (None, None) if mask is None else _read_window(mask)
    if not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)):
        entries = None if real is None else real[:, None, :]
        visibility = Visibility(past=past, entries=entries, window=window)
        return blockwise_attention_with_scores(query, key, value, visibility, scale, softcap)[0]
    visible = _causal(query, key)
    if window is not None:
        visible = visible & ~visible.tril(past - window)
    if real is not None:
        visible = visible & real[:, None, None, :]
    return attention_with_scores(query, key, value, visible, scale, softcap)[0]


def _read_window(mask: Any) -> tuple[Any, Tensor]:
    """Takes a compact mask apart: the window or ``None``, and the real keys, bool ``[B, N]``."""
    window = int(mask.max()) if mask.dtype == WINDOW_DTYPE else None
    return window, mask[:, 0, 0, :] > 0


def _causal(query: Tensor, key: Tensor) -> Tensor:
    """Mask, bool ``[1, 1, T, N]``: each query sees the keys up to itself, one of the last T."""
    length, total = query.shape[2], key.shape[2]
    mask = torch.ones(1, 1, length, total, dtype=torch.bool, device=query.device)
    return mask.tril(total - length)


def h2o_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attends through the H2O cache; registered as ``"h2o"`` in ``AttentionInterface``.

    Without an `H2OCache` (another cache, none, or a sliding-window layer) it is plain SDPA.

    Args:
        module: the model's attention module.
        query: ``[B, HQ, T, D]``.
        key: ``[B, H, T, D]``; an H2O layer's `update` has marked it.
        value: ``[B, H, T, Dv]``.
        attention_mask: what `h2o_mask` made.
        dropout: only without an `H2OCache`.
        scaling: factor on the logits; ``D ** -0.5`` if ``None``.
        softcap: soft cap of the logits (Gemma 2).
        **options: what else the model gives its attention.
    """
    layer: CacheLayer | None = getattr(key, LAYER_ATTRIBUTE, None)
    if layer is None:
        _check_modelled(module, options, _IGNORED_BY_SDPA)
        return plain_attention(
            module, query, key, value, attention_mask, scaling, dropout, softcap, options
        )
    if not layer.awaits_attention:
        raise ValueError(
            f"{type(module).__name__} attends twice to the same keys, which would count their "
            "scores twice; use transformers' own cache for this model."
        )
    layer.awaits_attention = False
    if options.get("output_attentions"):
        logger.warning_once(
            "H2O attention makes no matrix, so output_attentions=True gives none; run the model "
            "with attn_implementation='eager' and transformers' own cache for it."
        )
    if module.training and query.requires_grad and torch.is_grad_enabled():
        logger.warning_once(
            "Nothing is learned through an H2OCache: queries, keys and values get no gradient; "
            "train without past_key_values (use_cache=False), which is plain SDPA."
        )
    _check_modelled(module, options, (*_IGNORED_BY_SDPA, "position_bias"))
    _check_causal(layer, module, query.shape[2], attention_mask, options)
    real = None if attention_mask is None else attention_mask[:, 0, 0, :]
    if not torch.compiler.is_compiling():
        layer.claim(module)
        if layer.rule.rewrites:
            check_placed(layer)
        else:
            check_follows(layer, options.get("position_ids"), real, query.shape[2])
    if not layer.knows_rotation:
        found = find_rotation(module, layer.layer_idx, key, layer.known_rotations)
        layer.learn_rotation(found)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = layer.attend(query, key, value, real, scale, softcap, options.get("position_ids"))
    return output.transpose(1, 2).contiguous(), None


def _check_modelled(
    module: torch.nn.Module, options: dict[str, Any], unmodelled: tuple[str, ...]
) -> None:
    """Raises if the model asks for attention that would be ignored."""
    for name in unmodelled:
        if options.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} asks for attention with {name}, which H2O does not "
                "model; use transformers' own cache and attention for this model."
            )


def _check_causal(
    layer: CacheLayer, module: Any, length: int, mask: Tensor | None, options: dict[str, Any]
) -> None:
    """Raises if a block with H2O entries is not plain causal attention over what is held."""
    if mask is not None and (mask.dtype != torch.bool or mask.shape[-2:] != (1, length)):
        raise ValueError(
            f"H2OCache got an attention mask of shape {list(mask.shape)} and {mask.dtype}; it "
            "needs causal attention and takes a 2D mask [batch, tokens seen + new tokens] with 0 "
            "for padding."
        )
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if length > 1 and not is_causal:
        raise ValueError(
            f"{type(module).__name__} asks for attention that is not causal, which H2O is not "
            "defined for; use transformers' own cache for this model."
        )
    if options.get("sliding_window") not in (None, layer.window):
        raise ValueError(
            f"{type(module).__name__} asks for a sliding window in a layer that its config calls "
            "full attention; set the config's layer_types right, or use transformers' own cache."
        )


def register() -> None:
    """Makes ``attn_implementation="h2o"`` known to transformers; done by importing this package."""
    AttentionInterface.register(ATTENTION_NAME, h2o_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, h2o_mask)
