"""Attention statistics by layer and head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from h2okv.cache import H2OCache
from h2okv.cache.layer import CacheLayer
from h2okv.cache.validation import check_model
from h2okv.integration.attention import h2o_mask, plain_attention

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

        Each is ``(first, probabilities)``: the block's first query, and fp32 ``[H, G, R, first +
        R]``, 0 for a key after its query. ``hidden``, bool ``[H, T]``, marks keys that no query
        but their own sees.
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


def full_attention_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """Returns the indices of the layers whose entries H2O evicts."""
    layers = H2OCache(config).layers
    return tuple(i for i, layer in enumerate(layers) if isinstance(layer, CacheLayer))


def check_layer(config: PreTrainedConfig, layer_idx: int, head: int | None = None) -> None:
    """Refuses a layer or KV head that the model does not have."""
    layers = full_attention_layers(config)
    if layer_idx not in layers:
        raise ValueError(
            f"layer {layer_idx} is not a full-attention layer of this model; choose one of "
            f"{', '.join(map(str, layers))}."
        )
    heads = num_kv_heads(config)
    if head is not None and not 0 <= head < heads:
        raise ValueError(f"head {head} is out of range; the KV heads are 0 to {heads - 1}.")


def num_kv_heads(config: PreTrainedConfig) -> int:
    """Returns the number of KV heads of a layer."""
    config = config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 1 if getattr(config, "multi_query", False) else int(heads)


@contextmanager
def observed(
    model: PreTrainedModel, handler: Handler, layers: tuple[int, ...] | None = None
) -> Iterator[None]:
    """Shows every full-attention layer to a handler inside a ``with`` block."""
    check_model(model)
    for layer_idx in layers or ():
        check_layer(model.config, layer_idx)
    shown = frozenset(full_attention_layers(model.config) if layers is None else layers)
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
    """Lets a model read ``[1, T]`` tokens; every full-attention layer is shown to a handler."""
    reached = []

    def count(layer: LayerAttention) -> torch.Tensor | None:
        reached.append(layer.layer_idx)
        return handler(layer)

    with observed(model, count):
        output = model(input_ids=input_ids.to(model.device), use_cache=False)
    if not reached:
        raise ValueError(
            f"model type {model.config.model_type!r} gives no access to its attention; use a model "
            "of docs/support-table.md."
        )
    return output


Tick = Callable[[float], None]
"""Is told the share that is done, from 0 to 1."""


def no_tick(share: float) -> None:
    """Tells nobody."""


class RowWatcher(Protocol):
    """Adds up something over the rows of attention."""

    def see(self, layer_idx: int, first: int, probabilities: torch.Tensor) -> None:
        """Takes one block; see `LayerAttention.rows` for its shape."""


def watch_rows(
    model: PreTrainedModel, input_ids: torch.Tensor, watchers: list[Any], tick: Tick = no_tick
) -> None:
    """Lets a model read ``[1, T]`` tokens; `RowWatcher`s see every block of attention rows."""
    total = model.config.get_text_config(decoder=True).num_hidden_layers

    def handler(layer: LayerAttention) -> None:
        for first, probabilities in layer.rows():
            for watcher in watchers:
                watcher.see(layer.layer_idx, first, probabilities)
        tick((layer.layer_idx + 1) / total)

    read_observed(model, input_ids, handler)


class Sparsity:
    """Counts entries below 1 % of their row's maximum (arXiv 2306.14048, section 3.1)."""

    def __init__(self, threshold: float = 0.01) -> None:
        self.threshold = threshold
        self._small: dict[int, np.ndarray] = {}
        self._length = 0

    def see(self, layer_idx: int, first: int, probabilities: torch.Tensor) -> None:
        """See `RowWatcher`."""
        top = probabilities.amax(dim=-1, keepdim=True)
        # The keys after a query have probability 0 and count as small here; `rows` takes them out.
        small = (probabilities < self.threshold * top).sum(dim=-1).flatten(0, 1).cpu().numpy()
        last = probabilities.shape[-1]
        own = np.arange(first, last)
        small = small - (last - 1 - own)
        before = self._small.get(layer_idx, np.zeros((small.shape[0], 0), dtype=np.int64))
        self._small[layer_idx] = np.concatenate([before, small], axis=1)
        self._length = max(self._length, last)

    def rows(self) -> list[dict[str, float]]:
        """Returns for each layer and query head the share of small entries.

        ``share`` counts the keys that a query may see; ``share_late`` the same for the second half
        of the text, whose rows are long; ``share_square`` also counts the keys that causality
        hides, as a count over the whole square matrix would.
        """
        result = []
        visible = np.arange(1, self._length + 1)
        half = self._length // 2
        for layer_idx, small in sorted(self._small.items()):
            for head, counts in enumerate(small):
                hidden = self._length**2 - visible.sum()
                result.append(
                    {
                        "layer": layer_idx,
                        "head": head,
                        "share": counts.sum() / visible.sum(),
                        "share_late": counts[half:].sum() / visible[half:].sum(),
                        "share_square": (counts.sum() + hidden) / self._length**2,
                    }
                )
        return result


class Accumulation:
    """Adds up the attention that each key receives from all queries (the scores of H2O)."""

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}

    def see(self, layer_idx: int, first: int, probabilities: torch.Tensor) -> None:
        """See `RowWatcher`."""
        received = probabilities.sum(dim=2)
        last = received.shape[-1]
        total = torch.zeros(*received.shape[:2], last, device=received.device)
        before = self._sums.get(layer_idx)
        if before is not None:
            total[..., : before.shape[-1]] = before
        self._sums[layer_idx] = total + received

    def scores(self) -> np.ndarray:
        """Returns float32 ``[L, H, G, T]``, layers in order."""
        return torch.stack([self._sums[i].cpu() for i in sorted(self._sums)]).numpy()


class Sinks:
    """The share of attention that goes to the first positions, from queries far from them."""

    def __init__(self, counts: tuple[int, ...] = (1, 4, 16), away: int = 64) -> None:
        self.counts, self.away = counts, away
        self._mass: dict[int, np.ndarray] = {}
        self._queries: dict[int, int] = {}
        self._even: dict[int, float] = {}

    def see(self, layer_idx: int, first: int, probabilities: torch.Tensor) -> None:
        """See `RowWatcher`."""
        start = max(0, self.away - first)
        late = probabilities[:, :, start:].flatten(0, 1)
        if late.shape[1] == 0:
            return
        mass = torch.stack([late[..., :count].sum(dim=(1, 2)) for count in self.counts], dim=1)
        own = np.arange(first + start, probabilities.shape[-1]) + 1
        self._mass[layer_idx] = self._mass.get(layer_idx, 0) + mass.cpu().numpy()
        self._queries[layer_idx] = self._queries.get(layer_idx, 0) + late.shape[1]
        self._even[layer_idx] = self._even.get(layer_idx, 0.0) + float((1 / own).sum())

    def rows(self) -> list[dict[str, float]]:
        """Returns for each layer and query head the mean mass, and what even attention gives."""
        result = []
        for layer_idx, mass in sorted(self._mass.items()):
            queries = self._queries[layer_idx]
            for head, sums in enumerate(mass):
                row: dict[str, float] = {"layer": layer_idx, "head": head}
                for count, total in zip(self.counts, sums, strict=True):
                    row[f"first_{count}"] = total / queries
                row["even_first_1"] = self._even[layer_idx] / queries
                result.append(row)
        return result


class Retention:
    """The share of full attention's mass that falls on what a policy would still hold.

    Args:
        gone_at: for each name int ``[L, H, T]``, the first query that does not see a token.
        layers: the layers of these arrays, in order.
        first: the first query that counts.
    """

    def __init__(self, gone_at: dict[str, np.ndarray], layers: tuple[int, ...], first: int) -> None:
        self._gone = {name: torch.from_numpy(gone) for name, gone in gone_at.items()}
        self._index = {layer_idx: place for place, layer_idx in enumerate(layers)}
        self._first = first
        self._mass: dict[tuple[str, int], float] = {}
        self._rows: dict[int, int] = {}

    def see(self, layer_idx: int, first: int, probabilities: torch.Tensor) -> None:
        """See `RowWatcher`."""
        start = max(0, self._first - first)
        late = probabilities[:, :, start:].cpu()
        if late.shape[2] == 0:
            return
        last = late.shape[-1]
        queries = torch.arange(first + start, last).unsqueeze(1)
        self._rows[layer_idx] = self._rows.get(layer_idx, 0) + late.shape[2]
        summed = late.mean(dim=1)
        for name, gone in self._gone.items():
            held = gone[self._index[layer_idx], :, None, :last] > queries
            mass = float((summed * held).sum()) / late.shape[0]
            key = (name, layer_idx)
            self._mass[key] = self._mass.get(key, 0.0) + mass

    def shares(self) -> dict[tuple[str, int], float]:
        """Returns the mean share for each name and layer."""
        return {key: mass / self._rows[key[1]] for key, mass in self._mass.items()}
