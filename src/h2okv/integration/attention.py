"""The attention and mask functions registered with transformers under the name "h2o"."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils import logging

from h2okv.cache.argument import CACHE
from h2okv.cache.base_layer import LAYER_ATTRIBUTE
from h2okv.cache.latent import Latents, absorb, check_expansion
from h2okv.cache.layer import CacheLayer
from h2okv.cache.rope import find_rotation, running_rotary
from h2okv.cache.slot_state import is_cast
from h2okv.cache.validation import check_follows, going_on
from h2okv.console import warn
from h2okv.ops.attention import blockwise_attention_with_scores, windowed_attention
from h2okv.ops.decode import decode_with_scores
from h2okv.ops.reference import AttentionSpec, Visibility, attention_with_scores, causal

ATTENTION_NAME = "h2o"
_FULL_ATTENTION = "full_attention"
logger = logging.get_logger(__name__)

# Arguments that change the probabilities and that SDPA silently ignores: sinks of another kind than
# `s_aux`, and the keys that an indexer selected.
_IGNORED_BY_SDPA = ("sinks", "indices", "block_indices")

# A mask of this dtype holds for each key the window in which it is visible; 0 for padding. The
# window is stored in the values because nothing else always survives: not every model passes a
# ``sliding_window`` to its attention, and an attribute is lost when a mask moves to another device.
WINDOW_DTYPE = torch.int32
# Likewise for each token the last one that it sees, itself or a later one of its image; -1 for
# padding.
REACH_DTYPE = torch.int64


def h2o_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """Make the mask of a block of T tokens; registered as ``"h2o"`` in ``AttentionMaskInterface``.

    A causal block over itself (every block of an `H2OCache`, and the first one of any cache) needs
    no T x T mask, only which tokens are padding: bool ``[B, 1, 1, T]``, or `None` without padding.
    A sliding window adds one number: `WINDOW_DTYPE` ``[B, 1, 1, N]``. Images whose tokens see each
    other make a prompt's mask `REACH_DTYPE` ``[B, 1, 1, T]``. Everything else gets SDPA's mask,
    bool ``[B, 1, T, N]``. The attention mask is bool ``[B, tokens seen + T or more]``; the
    block's columns follow those of the tokens seen, as in transformers.

    Raises:
        ValueError: if the attention mask ends before the block does.
    """
    # Only bidirectional patterns, whose keys may belong to another text, come with this option.
    if attention_mask is not None and "allow_is_bidirectional_skip" not in options:
        _check_columns(attention_mask, q_offset, q_length)
    offsets = {"q_offset": q_offset, "kv_offset": kv_offset}
    is_causal = mask_function is causal_mask_function
    window = None
    if not is_causal:
        window = _sliding_window(mask_function, q_length, kv_length, offsets | options)
    if q_length == kv_length and (is_causal or (window is not None and window >= kv_length)):
        # The offset of an H2O layer is a tensor; slicing by it would synchronize the device.
        start = q_offset if isinstance(q_offset, int) else kv_offset
        return padding_mask(attention_mask, start, q_length)
    if window is None:
        options |= {"mask_function": mask_function, "attention_mask": attention_mask, **offsets}
        mask = sdpa_mask(q_length=q_length, kv_length=kv_length, **options)
        if mask is None or is_causal or not 1 < q_length == kv_length:
            return mask
        is_readable = not torch.compiler.is_compiling() and not mask.is_meta
        return _with_images(mask) if is_readable else mask
    shape = (options["batch_size"], 1, 1, kv_length)
    mask = torch.full(shape, window, dtype=WINDOW_DTYPE, device=options.get("device"))
    if attention_mask is None:
        return mask
    keys = attention_mask[:, kv_offset : kv_offset + kv_length]
    return mask * keys.to(torch.bool)[:, None, None, :]


def _with_images(mask: Tensor) -> Tensor:
    """Return bool ``[B, 1, T, T]`` in T numbers, if its tokens see past themselves in groups."""
    seen = mask[:, 0]
    columns = torch.arange(seen.shape[-1], device=mask.device)
    real = seen.diagonal(dim1=1, dim2=2)  # a token of the text sees itself
    reach = columns[-1] - seen.flip(-1).to(torch.uint8).argmax(dim=-1)
    is_same = seen == (columns <= reach.unsqueeze(-1)) & real.unsqueeze(1)
    is_group = reach.gather(1, reach) == reach
    if not bool(((is_same.all(dim=-1) & is_group) | ~real).all()):
        return mask
    if bool((reach == columns)[real].all()):  # no image: causal
        return real[:, None, None, :]
    return reach.masked_fill(~real, -1)[:, None, None, :]


def _read_reach(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Split a mask into who is real, as `padding_mask` gives it, and the reach ``[B, T]``."""
    if mask is None or mask.dtype != REACH_DTYPE:
        return mask, None
    real = mask >= 0
    return None if bool(real.all()) else real, mask[:, 0, 0]


def padding_mask(attention_mask: Tensor | None, start: Any, length: int) -> Tensor | None:
    """Cut a block's T columns out of a mask; ``None`` if all tokens are real.

    Args:
        attention_mask: ``[B, tokens seen + T or more]``, 0 for padding.
        start: tokens seen, an int or an int64 tensor.
        length: T.

    Returns:
        bool ``[B, 1, 1, T]``, or ``None``.
    """
    if attention_mask is None:
        return None
    if isinstance(start, int):
        real = attention_mask[:, start : start + length]
    else:
        columns = start + torch.arange(length, device=attention_mask.device)
        real = attention_mask.index_select(1, columns)
    real = real.to(torch.bool)
    # Reading the mask is free on the CPU and once per prompt elsewhere, but not in a decode step.
    readable = real.device.type == "cpu" or (length > 1 and real.device.type != "meta")
    if readable and not torch.compiler.is_compiling() and bool(real.all()):
        return None
    return real[:, None, None, :]


def _check_columns(attention_mask: Tensor, seen: Any, length: int) -> None:
    """Refuse a mask without a column for each of the tokens seen and the T new ones."""
    # Reading the number of tokens seen from a device would synchronize every step.
    is_readable = isinstance(seen, int) or seen.device.type == "cpu"
    if torch.compiler.is_compiling() or not is_readable:
        return
    needed = int(seen) + length
    if attention_mask.dim() != 2 or attention_mask.shape[1] < needed:
        shape = list(attention_mask.shape)
        remedy = going_on(int(seen), length, is_from_start=shape[-1] == length)
        if remedy.startswith("leave out"):
            problem = f"H2OCache has seen {int(seen)} tokens and got {length} more"
            raise ValueError(f"{problem} with an attention_mask of shape {shape}; {remedy}.")
        raise ValueError(
            f"attention_mask of shape {shape} must have a column for each of the {int(seen)} tokens"
            f" seen and the {length} new ones, padding included: give [batch, {needed}], 0 for"
            f" padding and 1 for text, or no mask if nothing is padding; {remedy}."
        )


def _sliding_window(
    mask_function: Any, q_length: int, kv_length: int, options: dict[str, Any]
) -> int | None:
    """Return the window if the pattern is a causal sliding window and nothing else."""
    window: Any = options.get("local_size")
    offsets: Any = options["q_offset"], options["kv_offset"]
    # transformers disallows the skip when it combines the window with another pattern.
    is_sliding = window is not None and options.get("allow_is_causal_skip", True)
    # A decode step's mask is small; a compiled one must not read values.
    is_readable = q_length > 1 and not torch.compiler.is_compiling()
    if not is_sliding or not is_readable or not all(isinstance(offset, int) for offset in offsets):
        return None
    if offsets[0] + q_length != offsets[1] + kv_length:
        return None
    # Chunked attention passes its chunk as local_size too, so evaluate the pattern itself. A window
    # moves with the query; of two adjacent queries, one is in another chunk than its oldest key.
    queries = torch.tensor([window, window + 1, window, window])
    keys = torch.tensor([1, 2, 0, window + 1])
    seen = mask_function(0, 0, queries, keys)
    return window if seen.tolist() == [True, True, False, False] else None


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
    """Run SDPA, or what it lacks: a window without a T x T mask, soft caps, learned sinks."""
    sinks = options.get("s_aux")
    if query.is_meta:  # there are no values, so the window in a mask cannot be read
        batch, heads, length, _ = query.shape
        return query.new_empty(batch, length, heads, value.shape[-1]), None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if mask is not None:
        mask = mask[..., : key.shape[2]]  # without a cache it has all columns of the user's mask
        if mask.dtype == REACH_DTYPE:
            columns = torch.arange(mask.shape[-1], device=mask.device)
            mask = (columns <= mask.transpose(2, 3)) & (mask >= 0)
    has_window = mask is not None and mask.dtype == WINDOW_DTYPE
    if softcap is None and sinks is None and not has_window:
        if mask is not None and mask.shape[-2] == 1 < query.shape[2]:
            mask = mask & causal(query, key)
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **options
        )
    spec = AttentionSpec(scale, softcap, sinks)
    if is_cast(query.device):  # as SDPA does
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (states.to(dtype) for states in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        if softcap is not None or sinks is not None:
            output = _normalised(query, key, value, mask, spec)
        else:
            window, real = _read_window(mask)
            spec = spec._replace(window=window)
            output = windowed_attention(query, key, value, real, spec, dropout)
    return output.transpose(1, 2).contiguous(), None


def _normalised(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> Tensor:
    """Attend with soft caps or sinks, ``[B, HQ, T, Dv]``; blockwise unless gradients are needed."""
    states = [states for states in (query, key, value, spec.sinks) if states is not None]
    trains = torch.is_grad_enabled() and any(state.requires_grad for state in states)
    if query.shape[2] == 1 and not trains and (mask is None or mask.dtype == torch.bool):
        hidden = None if mask is None else ~mask[:, :, 0].expand(key.shape[:3]).contiguous()
        key, value = key.contiguous(), value.contiguous()
        return decode_with_scores(query, key, value, hidden, spec)[0]
    if mask is not None and mask.shape[-2] != 1:
        return attention_with_scores(query, key, value, mask, spec)[0]
    if mask is None and query.shape[2] > 1:
        # As SDPA's is_causal does: a prompt on a static cache, whose other slots are empty.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    past = key.shape[2] - query.shape[2]
    window, real = (None, None) if mask is None else _read_window(mask)
    if not trains:
        entries = None if real is None else real[:, None, :]
        block = query, key, value, Visibility(past, entries), spec._replace(window=window)
        return blockwise_attention_with_scores(*block, needs_sums=False)[0]
    visible = causal(query, key)
    if window is not None:
        visible = visible & ~visible.tril(past - window)
    if real is not None:
        visible = visible & real[:, None, None, :]
    return attention_with_scores(query, key, value, visible, spec)[0]


def _read_window(mask: Any) -> tuple[Any, Tensor]:
    """Split a compact mask into the window or ``None``, and the real keys, bool ``[B, N]``."""
    window = int(mask.max()) if mask.dtype == WINDOW_DTYPE else None
    return window, mask[:, 0, 0, :] > 0


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
    """Attend through the H2O cache; registered as ``"h2o"`` in ``AttentionInterface``.

    Without an `H2OCache` (another cache, none, or a sliding-window layer) it is plain SDPA. The
    `update` of an H2O layer has marked the keys; the mask comes from `h2o_mask`.
    """
    latents: Latents | None = options.pop(LAYER_ATTRIBUTE, None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: CacheLayer | None = getattr(key, LAYER_ATTRIBUTE, None)
    if latents is not None:
        query, expand = absorb(module, query)
        if query.shape[2] > 1:
            check_expansion(module, latents.value, value, expand)
        layer, key, value = latents
    if layer is None:
        more = () if getattr(module, "is_causal", True) else ("s_aux",)
        _check_modelled(module, options, (*_IGNORED_BY_SDPA, *more))
        is_step = query.shape[2] == 1 < key.shape[2] and not torch.compiler.is_compiling()
        if is_step and not KEEPS_ALL.get():
            _warn_of_another_cache(module)
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
            "H2O attention computes no attention matrix, so output_attentions=True returns None; "
            "run the model with attn_implementation='eager' and transformers' own cache for it."
        )
    if module.training and query.requires_grad and torch.is_grad_enabled():
        logger.warning_once(
            "An H2OCache does not backpropagate: queries, keys and values get no gradient; "
            "train without a cache (use_cache=False), which is plain SDPA."
        )
    _check_modelled(module, options, (*_IGNORED_BY_SDPA, "position_bias"))
    attention_mask, reach = _read_reach(attention_mask)
    _check_causal(layer, module, query, value.shape[2], attention_mask, options)
    real = None
    if attention_mask is not None:
        real = attention_mask[:, 0, 0, :].expand(query.shape[0], -1)
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling:
        layer.claim(module)
        if not layer.position_rule.rewrites:
            check_follows(layer, options.get("position_ids"), real, query.shape[2])
        elif not layer.is_placed:
            raise ValueError(
                f"positions={layer.position_rule.positions!r} changes the positions that this "
                "model gets; call h2okv.enable(model) before."
            )
        layer.is_placed = False
    if not layer.rotations.is_known:
        rotations, family = layer.rotations, type(module).__module__
        rotary = layer.forward.shared(("rotary", family), lambda: running_rotary(module))
        rotation = find_rotation(module, layer.layer_idx, rotations, layer.rule, key, rotary)
        layer.learn_rotation(rotation)
    if real is not None and layer.ends_forward and not is_compiling:
        _note_padding(layer, real)
    positions = options.get("position_ids")
    reach = None if reach is None else reach.expand(query.shape[0], -1)
    sinks = options.get("s_aux")
    # One object for all steps; a compiled step need not compare.
    spec = None if is_compiling else layer.attention_spec
    if (
        spec is None
        or (spec.scale, spec.softcap) != (scale, softcap)
        or spec.sinks is not sinks
        or spec.reach is not reach
    ):
        spec = AttentionSpec(scale, softcap, sinks, reach=reach)
    output = layer.attend(query, key, value, real, spec, positions)
    if latents is not None:
        output = expand(output)
    return output.transpose(1, 2).contiguous(), None


KEEPS_ALL: ContextVar[bool] = ContextVar("KEEPS_ALL", default=False)
"""Whether a step's cache is meant to be transformers' own."""
_WARNED: WeakSet[torch.nn.Module] = WeakSet()


def _warn_of_another_cache(module: Any) -> None:
    """Warn once of a model whose steps read a cache that evicts nothing."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or [_FULL_ATTENTION]
    first = kinds.index(_FULL_ATTENTION) if _FULL_ATTENTION in kinds else None
    # Layers of other kinds have transformers' own cache beside H2O's.
    if getattr(module, "layer_idx", None) != first or module in _WARNED:
        return
    _WARNED.add(module)
    warn(
        "the model has attention 'h2o', but its cache is transformers' own, which keeps every"
        f" token; give generate {CACHE}=h2okv.H2OCache(model, 'best', budget=0.2)."
    )


def _note_padding(layer: CacheLayer, real: Tensor) -> None:
    """Record padding behind text, which `next_turn` cannot infer from the number of tokens."""
    if layer.holds_budgets:
        # `padding_mask` dropped it already if it was read and had no padding.
        layer.has_inner_padding |= real.shape[1] > 1 or real.device.type == "cpu"
    else:
        layer.has_inner_padding |= bool((real[:, :-1] & ~real[:, 1:]).any())


def _check_modelled(
    module: torch.nn.Module, options: dict[str, Any], unmodelled: tuple[str, ...]
) -> None:
    """Raise if the model uses a form of attention that would be ignored."""
    for name in unmodelled:
        if options.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} asks for attention with {name}, which H2O does not "
                "model; use transformers' own cache and attention for this model."
            )


def _check_causal(
    layer: CacheLayer,
    module: Any,
    query: Tensor,
    num_tokens: int,
    mask: Tensor | None,
    options: dict[str, Any],
) -> None:
    """Raise if a block with H2O entries is not plain causal attention over the entries."""
    batch, length = query.shape[0], query.shape[2]
    if length != num_tokens:
        raise ValueError(
            f"{type(module).__name__} got positions of {length} tokens and {num_tokens} of text; "
            "give position_ids [batch, new tokens], those of the new tokens alone."
        )
    if mask is not None:
        fits = mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[-2:] == (1, length)
        if mask.dtype != torch.bool or not fits:
            raise ValueError(
                f"H2OCache got an attention mask of shape {list(mask.shape)} and {mask.dtype} for "
                f"{length} new tokens of each of {batch} sequences; it needs causal attention and "
                "takes a 2D mask [batch, tokens seen + new tokens] with 0 for padding."
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


# `import h2okv` registers functions that import this module; these replace them.
AttentionInterface.register(ATTENTION_NAME, h2o_attention)
AttentionMaskInterface.register(ATTENTION_NAME, h2o_mask)
