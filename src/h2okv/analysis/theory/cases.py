"""Attention to try the theorem on: real rows of a model, and rows made to break it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from h2okv.analysis.observing import LayerAttention, read_observed

_MOST_LAYERS = 8


@dataclass(frozen=True)
class Case:
    """One small matrix of attention.

    Attributes:
        name: ``real``, or what is adversarial about it.
        layer: the layer, -1 for a made-up case.
        head: the KV head, -1 for a made-up case.
        excerpt: which excerpt of the text, -1 for a made-up case.
        logits: float64 ``[G, n, n]``.
    """

    name: str
    layer: int
    head: int
    excerpt: int
    logits: np.ndarray


def real_cases(
    model: PreTrainedModel, input_ids: torch.Tensor, size: int, excerpts: int
) -> list[Case]:
    """Reads short excerpts, so that each row of attention is there from its first token to its own.

    Args:
        model: a loaded model.
        input_ids: int64 ``[1, T]``, the text to take the excerpts from.
        size: tokens of an excerpt, n.
        excerpts: how many, evenly spread.

    Returns:
        One case for each layer (at most 8, evenly spread), KV head and excerpt.
    """
    found: list[Case] = []
    starts = np.linspace(0, input_ids.shape[1] - size, excerpts).astype(int)
    for number, start in enumerate(starts):

        def keep(layer: LayerAttention, number: int = number) -> None:
            heads = layer.key.shape[0]
            grouped = layer.query.double().unflatten(0, (heads, -1))
            logits = grouped @ layer.key.double().unsqueeze(1).transpose(-1, -2) * layer.scale
            if layer.softcap is not None:
                logits = layer.softcap * torch.tanh(logits / layer.softcap)
            for head, part in enumerate(logits.cpu().numpy()):
                found.append(Case("real", layer.layer_idx, head, number, part))

        read_observed(model, input_ids[:, start : start + size], keep)
    layers = sorted({case.layer for case in found})
    places = np.unique(np.linspace(0, len(layers) - 1, _MOST_LAYERS).round().astype(int))
    chosen = {layers[place] for place in places}
    return [case for case in found if case.layer in chosen]


def adversarial_cases(size: int, kept: int) -> list[Case]:
    """Makes attention on which eviction by what has been must fail, or is put to the test.

    - ``late star``: a token that nobody looks at on arrival, and everybody afterwards.
    - ``bait``: the first tokens draw all attention at first and none later, when every query looks
      at the two tokens before it.
    - ``twins``: the same few tokens share most of each row, the rest goes to one token that is
      another one each time: keeping all of the few covers no row better than keeping one.
    - ``even``: every token sees all tokens alike.

    Args:
        size: tokens, n.
        kept: entries that stay.

    Returns:
        The cases, each with one query head.
    """
    weights = {name: np.full((size, size), 1e-4) for name in ("late star", "bait", "twins")}
    for query in range(size):
        star, bait, twins = (weights[name][query] for name in ("late star", "bait", "twins"))
        star[: min(query + 1, kept)] = 0.05
        if query > kept:
            star[kept] = 1.0
        if query < size // 2:
            bait[: min(query + 1, kept)] = 1.0
        else:
            bait[max(0, query - 2) : query] = 1.0
        twins[: min(query + 1, kept)] = 0.5 / min(query + 1, kept)
        twins[max(kept, query - 1)] = 0.5
    weights["even"] = np.ones((size, size))
    return [Case(name, -1, -1, -1, np.log(rows)[None]) for name, rows in weights.items()]
