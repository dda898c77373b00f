"""Attention of a text, layer by layer: its statistics, losses without some of it, and neurons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from h2okv.cache import CacheLayer, H2OCache
from h2okv.cache.support import check_model
from h2okv.integration.attention import h2o_mask, plain_attention
from h2okv.integration.enable import input_device
from h2okv.ops.reference import softmax
from h2okv_lab.tables import Row

ATTENTION_NAME = "h2okv_observe"
_MOST_ELEMENTS = 1 << 20
"""A block of probabilities takes at most 4 MiB for any length: it fits in a CPU's cache."""
_MOST_ROWS = 256


@dataclass(frozen=True)
class LayerAttention:
    """One layer's attention for one text, positions applied.

    ``query`` is ``[HQ, T, D]``, ``key`` ``[H, T, D]`` and ``value`` ``[H, T, Dv]``; ``scale`` is
    the factor on the logits, and ``softcap`` their soft cap.
    """

    layer_idx: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    softcap: float | None
    sink_logits: torch.Tensor | None = None  # [HQ], as in `h2okv.ops.reference`

    def logits(self, first: int, last: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return logits ``[H, G, last - first, last]`` of some queries, without a causal mask."""
        scaled = self.query[:, first:last].to(dtype) * self.scale
        grouped = scaled.unflatten(0, (self.key.shape[0], -1))
        # One product for each KV head: a batched one would copy its keys for each query head.
        logits = grouped.flatten(1, 2) @ self.key[:, :last].to(dtype).mT
        logits = logits.unflatten(1, grouped.shape[1:3])
        cap = self.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def rows(self, hidden: torch.Tensor | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the attention probabilities by blocks of queries; memory grows with T only.

        Each is ``(first, probabilities)``: the block's first query, and fp32 ``[H, G, R, first +
        R]``, 0 for a key after its query. ``hidden``, bool ``[H, T]``, marks keys that only the
        query at the same position sees.
        """
        length = self.key.shape[1]
        size = max(1, min(_MOST_ROWS, _MOST_ELEMENTS // (self.query.shape[0] * length)))
        columns = torch.arange(length, device=self.key.device)
        for first in range(0, length, size):
            last = min(first + size, length)
            queries = columns[first:last, None]
            logits = self.logits(first, last)
            # Keys before the block are in every query's past.
            logits[..., first:].masked_fill_(columns[first:last] > queries, -torch.inf)
            if hidden is not None:
                unseen = hidden[:, None, :last] & (columns[:last] != queries)
                logits.masked_fill_(unseen.unsqueeze(1), -torch.inf)
            sinks = self.sink_logits
            sinks = None if sinks is None else sinks.view(*logits.shape[:2], 1, 1)
            yield first, softmax(logits, sinks)


Handler = Callable[[LayerAttention], torch.Tensor | None]
"""Receives a layer's attention; a returned tensor ``[HQ, T, Dv]`` replaces the layer's output."""

_handlers: ContextVar[dict[int, Handler]] = ContextVar("h2okv_handlers")
"""The handler of each layer of full attention, while a text is read."""


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
    """Compute plain attention, and pass full-attention layers to the current handler."""
    layer_idx: Any = getattr(module, "layer_idx", None)
    if handler := _handlers.get().get(layer_idx):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        states, sinks = (query[0], key[0], value[0]), options.get("s_aux")
        output = handler(LayerAttention(layer_idx, *states, scale, softcap, sinks))
        if output is not None:
            return output.transpose(0, 1).unsqueeze(0).to(query.dtype).contiguous(), None
    return plain_attention(
        module, query, key, value, attention_mask, scaling, dropout, softcap, options
    )


AttentionInterface.register(ATTENTION_NAME, _observed_attention)
AttentionMaskInterface.register(ATTENTION_NAME, h2o_mask)


def full_attention_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the indices of the layers whose entries H2O evicts."""
    layers = H2OCache(config).layers
    return tuple(i for i, layer in enumerate(layers) if isinstance(layer, CacheLayer))


@torch.inference_mode()
def read_observed(
    model: PreTrainedModel, input_ids: torch.Tensor, handler: Handler, **options: Any
) -> Any:
    """Run a model on ``[1, T]`` tokens and pass every full-attention layer to a handler."""
    check_model(model)
    reached = []

    def note(layer: LayerAttention) -> torch.Tensor | None:
        reached.append(layer.layer_idx)
        return handler(layer)

    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION_NAME)
    token = _handlers.set(dict.fromkeys(full_attention_layers(model.config), note))
    try:
        output = model(input_ids=input_ids.to(input_device(model)), use_cache=False, **options)
    finally:
        _handlers.reset(token)
        model.set_attn_implementation(before)
    if not reached:
        raise ValueError(
            f"model type {model.config.model_type!r} gives no access to its attention; use a model "
            "of docs/support-table.md."
        )
    return output


Tick = Callable[[float], None]
"""Receives the progress, a fraction from 0 to 1."""


def no_tick(fraction: float) -> None:
    """Ignore the progress."""


def of_layers(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    measure: Callable[[LayerAttention], Any],
    tick: Tick = no_tick,
) -> np.ndarray:
    """Run a model on ``[1, T]`` tokens; return ``measure`` of each full-attention layer."""
    results: dict[int, Any] = {}
    total = model.config.get_text_config(decoder=True).num_hidden_layers

    def handler(layer: LayerAttention) -> None:
        results[layer.layer_idx] = measure(layer)
        tick((layer.layer_idx + 1) / total)

    # All logits of a long text would take more memory than anything else, and are not used.
    read_observed(model, input_ids, handler, logits_to_keep=1)
    return np.stack([results[layer_idx] for layer_idx in sorted(results)])


def small_entries(layer: LayerAttention, threshold: float = 0.01) -> np.ndarray:
    """Count visible entries below 1 % of their row's maximum (paper, 3.1): int64 ``[HQ, T]``."""
    counts = []
    for first, probabilities in layer.rows():
        top = probabilities.amax(dim=-1, keepdim=True)
        small = (probabilities < threshold * top).sum(dim=-1).flatten(0, 1).cpu().numpy()
        # The keys after a query have probability 0 and were counted as small.
        last = probabilities.shape[-1]
        counts.append(small - (last - 1 - np.arange(first, last)))
    return np.concatenate(counts, axis=1)


def accumulated(layer: LayerAttention) -> np.ndarray:
    """Sum the attention that each key receives (H2O's scores): float32 ``[H, G, T]``."""
    groups = layer.query.shape[0] // layer.key.shape[0]
    total = torch.zeros(layer.key.shape[0], groups, layer.key.shape[1], device=layer.key.device)
    for _, probabilities in layer.rows():
        total[..., : probabilities.shape[-1]] += probabilities.sum(dim=2)
    return total.cpu().numpy()


def strongest_queries(layer: LayerAttention, count: int, minimum: float = 0.01) -> np.ndarray:
    """Return the later queries with most attention, above ``minimum``, to each key.

    The result is int64 ``[H, T, count]``, with -1 where there are fewer.
    """
    heads, length = layer.key.shape[:2]
    strongest = torch.full((heads, length, count), -1, device=layer.key.device)  # -1: none
    mass = torch.full(strongest.shape, minimum, device=layer.key.device)
    for first, probabilities in layer.rows():
        last = probabilities.shape[-1]
        received = probabilities.sum(dim=1)  # over a group, as H2O's scores are
        # The query at a key's position does not count, and earlier ones do not see the key.
        received[..., first:].diagonal(dim1=1, dim2=2).zero_()
        # Update only keys with a new query in their top ones: most have none in this block.
        head, key = (received.amax(dim=1) > mass[:, :last, -1]).nonzero(as_tuple=True)
        both = torch.cat([mass[head, key], received[head, :, key]], dim=-1)
        mass[head, key], index = both.topk(count)
        queries = torch.arange(first, last, device=received.device).expand(len(key), -1)
        strongest[head, key] = torch.cat([strongest[head, key], queries], dim=-1).gather(-1, index)
    return strongest.cpu().numpy()


def sink_mass(layer: LayerAttention, counts: Sequence[int], away: int) -> np.ndarray:
    """Return mean attention on the first positions, from ``away`` on: float ``[HQ, counts]``."""
    mass = torch.zeros(layer.query.shape[0], len(counts), device=layer.key.device)
    for first, probabilities in layer.rows():
        late = probabilities[:, :, max(0, away - first) :].flatten(0, 1)
        mass += torch.stack([late[..., :count].sum(dim=(1, 2)) for count in counts], dim=1)
    return (mass / (layer.key.shape[1] - away)).cpu().numpy()


def retained(layer: LayerAttention, gone_at: np.ndarray, first: int) -> np.ndarray:
    """Return the fractions of full attention's mass on the entries of policies: float ``[P]``.

    Only queries from ``first`` on count; ``gone_at``, int ``[P, H, T]``, is as in `Trace`.
    """
    gone = torch.from_numpy(gone_at)
    mass = torch.zeros(len(gone), dtype=torch.float64)
    for start, probabilities in layer.rows():
        late = probabilities[:, :, max(0, first - start) :].mean(dim=1).cpu()
        last = late.shape[-1]
        queries = torch.arange(last - late.shape[1], last).unsqueeze(1)
        for policy, policy_gone in enumerate(gone):
            mass[policy] += (late * (policy_gone[:, None, :last] > queries)).sum()
    heads, length, _ = layer.key.shape
    return (mass / heads / (length - first)).numpy()


_CHUNK = 256
_RESAMPLES = 2000
_BLOCK = 32  # tokens resampled together: the losses of neighbours depend on each other


def token_losses(logits: torch.Tensor, input_ids: torch.Tensor) -> np.ndarray:
    """Return losses of tokens ``[1, T]`` by logits ``[1, T, V]``: float64 ``[T]``, first NaN."""
    targets = input_ids[0, 1:].to(logits.device)
    chunks = zip(logits[0, :-1].split(_CHUNK), targets.split(_CHUNK), strict=True)
    losses = [F.cross_entropy(chunk.float(), true, reduction="none") for chunk, true in chunks]
    return np.concatenate([[np.nan], torch.cat(losses).cpu().numpy().astype(np.float64)])


@torch.inference_mode()
def dense_losses(model: PreTrainedModel, input_ids: torch.Tensor) -> np.ndarray:
    """Compute the losses with full attention; see `token_losses`."""
    logits = model(input_ids=input_ids.to(input_device(model)), use_cache=False).logits
    return token_losses(logits, input_ids)


def cost(losses: np.ndarray, baseline: np.ndarray, first: int = 1, seed: int = 0) -> Row:
    """Return the perplexity of losses ``[T]`` and its ratio to the baseline, with 95 % interval."""
    gaps = (losses - baseline)[first:]
    blocks = [gaps[i : i + _BLOCK] for i in range(0, len(gaps), _BLOCK)]
    sums = np.array([block.sum() for block in blocks])
    counts = np.array([len(block) for block in blocks])
    draws = np.random.default_rng(seed).integers(0, len(blocks), (_RESAMPLES, len(blocks)))
    means = sums[draws].sum(axis=1) / counts[draws].sum(axis=1)
    low, high = np.exp(np.quantile(means, (0.025, 0.975)))
    perplexity, ratio = np.exp([losses[first:].mean(), gaps.mean()])
    return {"perplexity": perplexity, "ratio": ratio, "low": low, "high": high}


def heaviest(scores: np.ndarray, count: int) -> np.ndarray:
    """Mark the ``count`` tokens with the highest of scores ``[L, H, T]``; bool ``[L, H, T]``."""
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    chosen = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(chosen, order, True, axis=-1)
    return chosen


def random_tokens(shape: tuple[int, ...], count: int, seed: int) -> np.ndarray:
    """Mark ``count`` random tokens in each layer and head; bool ``[L, H, T]``."""
    return heaviest(np.random.default_rng(seed).random(shape), count)


def losses_with_hidden(
    model: PreTrainedModel, input_ids: torch.Tensor, hidden: np.ndarray, layers: tuple[int, ...]
) -> np.ndarray:
    """Return losses ``[T]`` with tokens, bool ``[L, H, T]``, hidden from all later queries."""
    masks = dict(zip(layers, torch.from_numpy(hidden), strict=True))

    def handler(layer: LayerAttention) -> torch.Tensor:
        value = layer.value.float().unsqueeze(1)
        rows = layer.rows(masks[layer.layer_idx].to(value.device))
        outputs = [weights @ value[:, :, : weights.shape[-1]] for _, weights in rows]
        return torch.cat(outputs, dim=2).flatten(0, 1)

    return token_losses(read_observed(model, input_ids, handler).logits, input_ids)


_LAST_OF_MLP = ("down_proj", "fc2", "dense_4h_to_h", "c_proj")
# Threshold relative to a token's largest magnitude, for activations that are never exactly 0.
SHARE_OF_LARGEST = 0.1


def find_neurons(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Find each layer's linear map that reads the neurons."""
    modules = [
        module
        for name, module in model.named_modules()
        if name.endswith(".fc2")
        or (".mlp." in f".{name}" and name.rpartition(".")[2] in _LAST_OF_MLP)
    ]
    config = model.config.get_text_config(decoder=True)
    if len(modules) != config.num_hidden_layers:
        raise ValueError(
            f"the feed-forward layers of model type {config.model_type!r} are not recognised "
            f"({len(modules)} found for {config.num_hidden_layers} layers); leave out --neurons."
        )
    return modules


@torch.inference_mode()
def activation_frequency(model: PreTrainedModel, input_ids: torch.Tensor) -> np.ndarray:
    """Return the fraction of tokens at which each neuron is active: float64 ``[L, M]``."""
    config = model.config.get_text_config(decoder=True)
    name = getattr(config, "hidden_act", None) or getattr(config, "activation_function", "")
    counts: list[np.ndarray] = []  # the layers run in order

    def note(_: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        size = inputs[0].float().flatten(0, -2).abs()
        limit = 0.0 if name == "relu" else SHARE_OF_LARGEST * size.amax(dim=-1, keepdim=True)
        counts.append((size > limit).double().mean(dim=0).cpu().numpy())

    with ExitStack() as hooks:
        for module in find_neurons(model):
            hooks.callback(module.register_forward_pre_hook(note).remove)
        model(input_ids=input_ids.to(input_device(model)), use_cache=False, logits_to_keep=1)
    return np.stack(counts)
