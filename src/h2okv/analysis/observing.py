"""Looking at a model's attention, layer by layer, while it reads a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from h2okv.cache import H2OCache
from h2okv.cache.scored import ScoredLayer
from h2okv.cache.support import check_model
from h2okv.integration.masks import h2o_mask
from h2okv.integration.plain import plain_attention

ATTENTION_NAME = "h2okv_observe"

_MOST_ELEMENTS = 1 << 22
"""A block of probabilities takes at most 16 MiB, whatever the text's length."""
_MOST_ROWS = 256


@dataclass(frozen=True)
class LayerAttention:
    """One layer's queries, keys and values for one text, positions applied.

    Attributes:
        layer_idx: the layer's index in the model.
        query: ``[HQ, T, D]``.
        key: ``[H, T, D]``.
        value: ``[H, T, Dv]``.
        scale: factor on the logits.
        softcap: soft cap of the logits or ``None``.
    """

    layer_idx: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    softcap: float | None

    def rows(self, hidden: torch.Tensor | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the attention probabilities by blocks of queries; memory grows with T only.

        Args:
            hidden: bool ``[H, T]``, keys that no query but their own sees; ``None`` for none.

        Yields:
            ``(first, probabilities)``: the block's first query, and fp32 ``[H, G, R, first + R]``.
            A key after its query has probability 0.
        """
        heads, length, _ = self.key.shape
        grouped = self.query.float().unflatten(0, (heads, -1))
        key = self.key.float().unsqueeze(1).transpose(-1, -2)
        size = max(1, min(_MOST_ROWS, _MOST_ELEMENTS // (self.query.shape[0] * length)))
        columns = torch.arange(length, device=key.device)
        for first in range(0, length, size):
            last = min(first + size, length)
            logits = grouped[:, :, first:last] @ key[..., :last] * self.scale
            if self.softcap is not None:
                logits = self.softcap * torch.tanh(logits / self.softcap)
            own = columns[first:last, None]
            unseen = columns[:last] > own
            if hidden is not None:
                unseen = unseen | (hidden[:, None, :last] & (columns[:last] != own))
                unseen = unseen.unsqueeze(1)
            yield first, logits.masked_fill_(unseen, -torch.inf).softmax(dim=-1)


Handler = Callable[[LayerAttention], torch.Tensor | None]
"""Looks at a layer; what it returns, ``[HQ, T, Dv]``, replaces the layer's own output."""

_handler: ContextVar[tuple[Handler, frozenset[int]]] = ContextVar("h2okv_handler")


def _observed_attention(
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
    """Plain attention that shows layers of full attention to the handler in force."""
    handler, layers = _handler.get()
    layer_idx = getattr(module, "layer_idx", None)
    if layer_idx in layers:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        seen = LayerAttention(layer_idx, query[0], key[0], value[0], scale, softcap)
        output = handler(seen)
        if output is not None:
            return output.transpose(0, 1).unsqueeze(0).to(query.dtype).contiguous(), None
    return plain_attention(
        module, query, key, value, attention_mask, scaling, dropout, softcap, options
    )


AttentionInterface.register(ATTENTION_NAME, _observed_attention)
AttentionMaskInterface.register(ATTENTION_NAME, h2o_mask)


def full_attention_layers(model: PreTrainedModel) -> tuple[int, ...]:
    """Returns the indices of the layers whose entries H2O evicts.

    Args:
        model: a loaded model.

    Raises:
        ValueError: if there is none, or the model is not supported.
    """
    layers = H2OCache(model.config).layers
    return tuple(i for i, layer in enumerate(layers) if isinstance(layer, ScoredLayer))


def check_layer(model: PreTrainedModel, layer_idx: int, head: int | None = None) -> None:
    """Refuses a layer or KV head that the model does not have.

    Args:
        model: a loaded model.
        layer_idx: the layer.
        head: the KV head, or ``None``.

    Raises:
        ValueError: with what there is to choose from.
    """
    layers = full_attention_layers(model)
    if layer_idx not in layers:
        raise ValueError(
            f"layer {layer_idx} is not a full-attention layer of this model; choose one of "
            f"{', '.join(map(str, layers))}."
        )
    heads = num_kv_heads(model)
    if head is not None and not 0 <= head < heads:
        raise ValueError(f"head {head} is out of range; the KV heads are 0 to {heads - 1}.")


def num_kv_heads(model: PreTrainedModel) -> int:
    """Returns the number of KV heads of a layer."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 1 if getattr(config, "multi_query", False) else int(heads)


@contextmanager
def observed(
    model: PreTrainedModel, handler: Handler, layers: tuple[int, ...] | None = None
) -> Iterator[None]:
    """Shows every full-attention layer to a handler inside a ``with`` block.

    Args:
        model: a loaded model; its attention implementation is changed and restored.
        handler: gets each layer's `LayerAttention` while the model reads one unpadded text
            without a cache.
        layers: the layers to show; all full-attention layers by default.

    Yields:
        Nothing.

    Raises:
        ValueError: if the model is not supported or lacks one of the layers.
    """
    check_model(model)
    for layer_idx in layers or ():
        check_layer(model, layer_idx)
    shown = frozenset(full_attention_layers(model) if layers is None else layers)
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION_NAME)
    token = _handler.set((handler, shown))
    try:
        yield
    finally:
        _handler.reset(token)
        model.set_attn_implementation(before)


@torch.inference_mode()
def read_observed(model: PreTrainedModel, input_ids: torch.Tensor, handler: Handler) -> Any:
    """Lets a model read a text at once, every full-attention layer shown to a handler.

    Args:
        model: a loaded model.
        input_ids: int64 ``[1, T]``.
        handler: as for `observed`.

    Returns:
        The model's output.

    Raises:
        ValueError: if no layer's attention could be seen.
    """
    reached = []

    def count(layer: LayerAttention) -> torch.Tensor | None:
        reached.append(layer.layer_idx)
        return handler(layer)

    with observed(model, count):
        output = model(input_ids=input_ids.to(model.device), use_cache=False)
    if not reached:
        raise ValueError(
            f"model type {model.config.model_type!r} gives no access to its attention; use a model "
            "of the README's support table."
        )
    return output
