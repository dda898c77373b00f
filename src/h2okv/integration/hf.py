"""The two registrations by which transformers models reach the H2O cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from h2okv.cache.scored import LAYER_ATTRIBUTE, ScoredLayer
from h2okv.ops.reference import attention_with_scores

ATTENTION_NAME = "h2o"

# Arguments that some models give their attention and that change the probabilities.
_UNMODELLED = ("position_bias", "s_aux")


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
    no T x T mask, only to know which tokens are padding. Everything else gets SDPA's mask.

    Args:
        q_length: T.
        kv_length: keys that the cache's layer will return; T for an H2O layer.
        mask_function: transformers' description of the mask.
        attention_mask: bool ``[B, tokens seen + T]`` or ``None``.
        **options: what else transformers gives a mask function.

    Returns:
        bool ``[B, 1, 1, T]`` (False for padding), ``None`` if there is no padding, or SDPA's mask.
    """
    if mask_function is not causal_mask_function or q_length != kv_length:
        return sdpa_mask(
            q_length=q_length,
            kv_length=kv_length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **options,
        )
    if attention_mask is None:
        return None
    real = attention_mask[:, -q_length:].to(torch.bool)
    # Reading the mask is free on the CPU and once per prompt elsewhere, but not in a decode step.
    readable = real.device.type == "cpu" or q_length > 1
    if readable and not torch.compiler.is_compiling() and bool(real.all()):
        return None
    return real[:, None, None, :]


def h2o_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attends through the H2O cache; registered as ``"h2o"`` in ``AttentionInterface``.

    Without an `H2OCache` (another cache, none, or a sliding-window layer) it is plain SDPA.

    Args:
        module: the model's attention module.
        query: ``[B, HQ, T, D]``.
        key: ``[B, H, T, D]``; an H2O layer's `update` has marked it.
        value: ``[B, H, T, Dv]``.
        attention_mask: what `h2o_mask` made.
        scaling: factor on the logits; ``D ** -0.5`` if ``None``.
        dropout: only without an `H2OCache`.
        softcap: soft cap of the logits (Gemma 2).
        **options: what else the model gives its attention.

    Returns:
        ``(output [B, T, HQ, Dv], None)``.

    Raises:
        ValueError: if the model asks for attention that H2O does not model.
    """
    layer: ScoredLayer | None = getattr(key, LAYER_ATTRIBUTE, None)
    if layer is None:
        return _plain_attention(
            module, query, key, value, attention_mask, scaling, dropout, softcap, options
        )
    layer.awaits_attention = False
    for name in _UNMODELLED:
        if options.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} asks for attention with {name}, which H2O does not "
                "model; use transformers' own cache for this model."
            )
    if attention_mask is not None and attention_mask.shape[-2:] != (1, query.shape[2]):
        raise ValueError(
            f"H2OCache got an attention mask of shape {list(attention_mask.shape)}; it needs "
            "causal attention and takes a 2D mask [batch, tokens seen + new tokens] with 0 for "
            "padding."
        )
    if not torch.compiler.is_compiling():
        layer.claim(module)
    real = None if attention_mask is None else attention_mask[:, 0, 0, :].to(torch.bool)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = layer.attend(query, key, value, real, scale, softcap)
    return output.transpose(1, 2).contiguous(), None


def _plain_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """SDPA with the mask that `h2o_mask` made."""
    length = query.shape[2]
    if attention_mask is not None and attention_mask.shape[-2] == 1 < length:
        causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        attention_mask = attention_mask & causal
    if softcap is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    # SDPA has no soft cap.
    if attention_mask is None:
        past = key.shape[2] - length
        attention_mask = torch.ones(
            length, key.shape[2], dtype=torch.bool, device=query.device
        ).tril(past)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output, _ = attention_with_scores(query, key, value, attention_mask, scale, softcap)
    return output.transpose(1, 2).contiguous(), None


def register() -> None:
    """Makes ``attn_implementation="h2o"`` known to transformers; done by ``import h2okv``."""
    AttentionInterface.register(ATTENTION_NAME, h2o_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, h2o_mask)
