"""How a budget is best divided among a model's layers, and their heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from h2okv.assets import sample_prompt
from h2okv.cache import H2OCache
from h2okv.cache.layer import CacheLayer
from h2okv.config import MEASURED, CacheConfig, LayerBudgets, checked_factors
from h2okv.console import Progress
from h2okv.integration.chat_template import encode
from h2okv.integration.enable import prefill
from h2okv.integration.loading import Described
from h2okv.integration.names import cache_folder
from h2okv.policy import get_rule
from h2okv.provenance import digest, fingerprint
from h2okv.records import parse_json, write_json

# A thousand tokens tell heads apart; layers, which differ less, need some more.
_TOKENS_BY_HEAD, _TOKENS_BY_LAYER = 1024, 4096
# What a budget in tokens is taken for, whose prompts may have any length.
_USUAL_FRACTION = 0.15
_VERSION = 1  # of what is measured; another one measures anew


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
        assert held.value_weights is not None
        worth = torch.where(held.positions >= 0, held.scores.square() * held.value_weights, 0.0)[0]
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


def with_own_budgets(
    config: CacheConfig, model: PreTrainedModel, described: Described
) -> CacheConfig:
    """Puts the model's own factors in the place of ``layer_budgets="auto"``.

    By head, or by layer where positions roll. They are measured by `measure_layer_budgets` on the
    sample story that comes with the package, the first time that a model is used with a budget; a
    file in the user's cache folder keeps them.

    Args:
        config: which cache; returned as it is unless it says ``"auto"``.
        model: the loaded model.
        described: what is known of it besides.

    Returns:
        The config with factors; without any where scores decide nothing.

    Raises:
        ValueError: if the cache cannot be made for the model.
    """
    if config.layer_budgets != MEASURED:
        return config
    config = replace(config, layer_budgets=None)
    H2OCache.from_config(model.config, config)  # mistakes show before the work
    if config.is_full or not get_rule(config.policy).uses_scores:
        return config
    by_head = config.positions != "rolling"
    fraction = config.heavy if isinstance(config.heavy, float) else _USUAL_FRACTION
    most = min(_TOKENS_BY_HEAD if by_head else _TOKENS_BY_LAYER, described.context or 1 << 30)
    setting = f"{fingerprint(model)} {fraction:.4f} {by_head} {most} {_VERSION}"
    name = Path(described.name).name[:40]
    path = cache_folder("layer-budgets") / f"{name}-{digest(setting)}.json"
    with suppress(OSError, ValueError):  # not there, or damaged
        kept = checked_factors(parse_json(path.read_text(encoding="utf-8")))
        known = replace(config, layer_budgets=kept)
        H2OCache.from_config(model.config, known)  # of another model's shape they are measured anew
        if known.is_by_head == by_head:
            return known
    ids = torch.tensor([encode(described.tokenizer, sample_prompt(), described.vocab_size)[:most]])
    with Progress(f"measuring the {'heads' if by_head else 'layers'} of {name}, once"):
        found = measure_layer_budgets(model, ids, fraction, by_head=by_head)
    with suppress(OSError, ValueError):  # a folder that cannot be written to costs time alone
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found)
    return replace(config, layer_budgets=found)
