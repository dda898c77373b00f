"""Measure how to divide a budget among a model's layers and heads."""

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

# A thousand tokens are enough for heads; layers, which differ less, need more.
_TOKENS_BY_HEAD, _TOKENS_BY_LAYER = 1024, 4096
# Assumed for a budget in tokens, because prompts may have any length.
_USUAL_FRACTION = 0.15
_VERSION = 1  # of the measurement; a new version measures again


@torch.no_grad()
def measure_layer_budgets(
    model: PreTrainedModel,
    input_ids: Tensor,
    fraction: float = 0.15,
    least: float = 0.3,
    *,
    by_head: bool = False,
) -> LayerBudgets:
    """Measure the share of the budget that each layer needs, for ``H2OCache(layer_budgets=...)``.

    All layers compete for the same entries by their effect on the attention's output: the square
    of the attention that an entry may expect (`scoring="expected"`) times the norm of its value.
    The result depends on the model more than on the text, so one measurement for each model is
    enough: on a thousand tokens for heads, on several thousand for layers.

    Args:
        model: a loaded model.
        input_ids: int ``[1, T]``, a text of the kind that will be read.
        fraction: heavy hitters to divide, as a fraction of the text.
        least: guaranteed fraction of the equal share for every layer, or head.
        by_head: let all KV heads of all layers compete, not only the layers.

    Returns:
        A factor for each layer with H2O entries, or a tuple of one for each of its KV heads; their
        mean is 1.

    Raises:
        ValueError: if the text is too short to divide anything, or the model is not supported.
    """
    length = input_ids.shape[1]
    equal_share = int(fraction * length)
    floor = int(least * equal_share)
    if not 0 < fraction < 1 or not 0 <= least <= 1 or equal_share - floor < 1:
        raise ValueError(
            f"a text of {length} tokens, fraction={fraction:g} and least={least:g} leave nothing to"
            " divide among the layers; give a text of a thousand tokens."
        )
    cache = H2OCache(model.config, policy="full", scoring="expected")
    prefill(model, input_ids, cache, torch.ones_like(input_ids))
    curves = []
    for layer in cache.layers:
        if not isinstance(layer, CacheLayer):
            continue
        state = layer.state
        assert state.value_weights is not None
        weights = torch.where(
            state.positions >= 0, state.scores.square() * state.value_weights, 0.0
        )[0]
        # Entries that the recent window keeps anyway do not compete.
        weights = weights.masked_fill(state.positions[0] >= length - equal_share // 3, 0.0)
        weights = weights.sort(dim=-1, descending=True).values[:, :length].cpu()
        curves.append(weights if by_head else weights.mean(dim=0, keepdim=True))
    candidates = torch.cat(curves)[:, floor:]
    chosen = (
        candidates.flatten().topk((equal_share - floor) * len(candidates)).indices
        // candidates.shape[1]
    )
    counts = floor + torch.bincount(chosen, minlength=len(candidates))
    factors = [round(float(count) / equal_share, 4) for count in counts]
    if not by_head:
        return tuple(factors)
    sizes = [len(curve) for curve in curves]
    return tuple(tuple(group) for group in _split(factors, sizes))


def _split(factors: list[float], sizes: list[int]) -> Iterator[list[float]]:
    """Group the factors of all heads by layer; `sizes` are the layers' numbers of heads."""
    remaining = iter(factors)
    return (list(islice(remaining, size)) for size in sizes)


def with_measured_budgets(
    config: CacheConfig, model: PreTrainedModel, described: Described
) -> CacheConfig:
    """Replace ``layer_budgets="auto"`` by factors measured for the model.

    By head, or by layer with rolling positions. `measure_layer_budgets` measures them on the
    package's sample story the first time that a model is used with a budget; a file in the user's
    cache folder stores them.

    Args:
        config: the cache's config; returned unchanged unless it says ``"auto"``.
        model: the loaded model.
        described: the model's name, tokenizer and context window.

    Returns:
        The config with factors; without factors for a policy that uses no scores.

    Raises:
        ValueError: if the cache cannot be made for the model.
    """
    if config.layer_budgets != MEASURED:
        return config
    config = replace(config, layer_budgets=None)
    H2OCache.from_config(model.config, config)  # raise for mistakes before measuring
    if config.is_full or not get_rule(config.policy).uses_scores:
        return config
    by_head = config.positions != "rolling"
    fraction = config.heavy if isinstance(config.heavy, float) else _USUAL_FRACTION
    num_tokens = min(_TOKENS_BY_HEAD if by_head else _TOKENS_BY_LAYER, described.context or 1 << 30)
    setting = f"{fingerprint(model)} {fraction:.4f} {by_head} {num_tokens} {_VERSION}"
    name = Path(described.name).name[:40]
    path = cache_folder("layer-budgets") / f"{name}-{digest(setting)}.json"
    with suppress(OSError, ValueError):  # not there, or damaged
        factors = checked_factors(parse_json(path.read_text(encoding="utf-8")))
        measured = replace(config, layer_budgets=factors)
        H2OCache.from_config(model.config, measured)  # raises for factors of another model's shape
        if measured.is_by_head == by_head:
            return measured
    ids = torch.tensor(
        [encode(described.tokenizer, sample_prompt(), described.vocab_size)[:num_tokens]]
    )
    with Progress(f"measuring the {'heads' if by_head else 'layers'} of {name}, once"):
        budgets = measure_layer_budgets(model, ids, fraction, by_head=by_head)
    with suppress(OSError, ValueError):  # an unwritable folder only costs time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, budgets)
    return replace(config, layer_budgets=budgets)
