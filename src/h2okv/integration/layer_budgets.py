"""How a budget is best divided among a model's layers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel

from h2okv.cache import H2OCache
from h2okv.cache.layer import CacheLayer
from h2okv.config import LayerBudgets
from h2okv.integration.enable import prefill


@torch.no_grad()
def measure_layer_budgets(
    model: PreTrainedModel,
    input_ids: Tensor,
    fraction: float = 0.15,
    least: float = 0.3,
    *,
    by_head: bool = False,
) -> LayerBudgets:
    """Measures what each layer needs to hold, for ``H2OCache(layer_budgets=...)``.

    All layers compete for the same entries by what these do to the attention's output: the square
    of the attention they may expect (`scoring="expected"`) times the norm of their values. It is
    the model that decides more than the text, so that once for each model will do; of a thousand
    tokens for heads, better some thousands for layers.

    Args:
        model: a loaded model.
        input_ids: int ``[1, T]``, a text of the kind that will be read.
        fraction: heavy hitters to divide, as a fraction of the text.
        least: what every layer, or head, gets of its even share.
        by_head: have all KV heads of all layers compete, and not the layers alone.

    Returns:
        A factor for each layer with H2O entries, or a tuple of one for each of its KV heads; their
        mean is 1.

    Raises:
        ValueError: if the text is too short to divide anything, or the model is not supported.
    """
    length = input_ids.shape[1]
    even = int(fraction * length)
    floor = int(least * even)
    if not 0 < fraction < 1 or not 0 <= least <= 1 or even - floor < 1:
        raise ValueError(
            f"a text of {length} tokens, fraction={fraction:g} and least={least:g} leave nothing to"
            " divide among the layers; give a text of a thousand tokens."
        )
    cache = H2OCache(model.config, policy="full", scoring="expected")
    prefill(model, input_ids, cache)
    curves = []
    for layer in cache.layers:
        if not isinstance(layer, CacheLayer):
            continue
        held = layer.state
        assert held.norms is not None
        worth = torch.where(held.positions >= 0, held.scores.square() * held.norms, 0.0)[0]
        # What the recent window would hold anyway competes for nothing.
        worth = worth.masked_fill(held.positions[0] >= length - even // 3, 0.0)
        worth = worth.sort(dim=-1, descending=True).values[:, :length].cpu()
        curves.append(worth if by_head else worth.mean(dim=0, keepdim=True))
    rest = torch.cat(curves)[:, floor:]
    chosen = rest.flatten().topk((even - floor) * len(rest)).indices // rest.shape[1]
    counts = floor + torch.bincount(chosen, minlength=len(rest))
    factors = [round(float(count) / even, 4) for count in counts]
    if not by_head:
        return tuple(factors)
    sizes = [len(own) for own in curves]
    return tuple(tuple(own) for own in _split(factors, sizes))


def _split(factors: list[float], sizes: list[int]) -> Iterator[list[float]]:
    """The factors of each layer, which has so many heads."""
    rest = iter(factors)
    return (list(islice(rest, size)) for size in sizes)
