"""The two registrations by which transformers models reach the H2O cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import logging

from h2okv.cache.refusals import check_follows, check_placed
from h2okv.cache.scored import LAYER_ATTRIBUTE, ScoredLayer
from h2okv.integration.masks import h2o_mask
from h2okv.integration.plain import plain_attention
from h2okv.integration.rotation import find_rotation

ATTENTION_NAME = "h2o"
logger = logging.get_logger(__name__)

# Arguments that change the probabilities and that SDPA passes over in silence: learned sinks, and
# the keys that an indexer chose.
_IGNORED_BY_SDPA = ("s_aux", "sinks", "indices", "block_indices")


def h2o_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
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
        dropout: only without an `H2OCache`.
        scaling: factor on the logits; ``D ** -0.5`` if ``None``.
        softcap: soft cap of the logits (Gemma 2).
        **options: what else the model gives its attention.

    Returns:
        ``(output [B, T, HQ, Dv], None)``.

    Raises:
        ValueError: if the model asks for attention that H2O does not model.
    """
    layer: ScoredLayer | None = getattr(key, LAYER_ATTRIBUTE, None)
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
    _check_modelled(module, options, (*_IGNORED_BY_SDPA, "position_bias"))
    _check_causal(module, query, attention_mask, options, layer.window)
    real = None if attention_mask is None else attention_mask[:, 0, 0, :]
    if not torch.compiler.is_compiling():
        layer.claim(module)
        if layer.rule.rewrites:
            check_placed(layer)
        else:
            check_follows(layer, options.get("position_ids"), real, query.shape[2])
    if not layer.knows_rotation:
        layer.rotation = find_rotation(module, layer.layer_idx, key.dtype, layer.known_rotations)
        layer.knows_rotation = True
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
    module: torch.nn.Module,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
    window: int | None,
) -> None:
    """Raises if a block with H2O entries is not plain causal attention over what is held."""
    length = query.shape[2]
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
    if options.get("sliding_window") not in (None, window):
        raise ValueError(
            f"{type(module).__name__} asks for a sliding window in a layer that its config calls "
            "full attention; set the config's layer_types right, or use transformers' own cache."
        )


def register() -> None:
    """Makes ``attn_implementation="h2o"`` known to transformers; done by ``import h2okv``."""
    AttentionInterface.register(ATTENTION_NAME, h2o_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, h2o_mask)
