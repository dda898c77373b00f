"""Measure how to divide a budget among a model's layers and heads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from h2okv.assets import sample_prompt
from h2okv.cache import H2OCache
from h2okv.cache.layer import CacheLayer
from h2okv.cache.support import unwrap
from h2okv.config import BEST_VERSION, MEASURED, CacheConfig, LayerBudgets, checked_factors
from h2okv.console import Progress, write_remark
from h2okv.integration.chat_template import encode
from h2okv.integration.enable import prefill
from h2okv.integration.loading import context_of, describe
from h2okv.integration.names import cache_folder
from h2okv.policy import get_rule
from h2okv.provenance import digest, fingerprint
from h2okv.records import first_line, parse_json, write_json

# A thousand tokens are enough for heads; layers, which differ less, need more. The time grows with
# the square: 15 s for 2,048 tokens and a model of 0.5 B on one core.
_TOKENS_BY_HEAD, _TOKENS_BY_LAYER = 1024, 2048
# Assumed for a budget in tokens, because prompts may have any length.
_USUAL_FRACTION = 0.15


@torch.no_grad()
def measure_layer_budgets(
    model: PreTrainedModel,
    input_ids: Tensor,
    fraction: float = 0.15,
    least: float = 0.1,
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
    for layer in cache.layers:
        if isinstance(layer, CacheLayer):
            # Factors by means are worse (docs/results/quality.md); this is done once for a model.
            layer.heads_of_mean = 1
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


class _Described(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...


def with_measured_budgets(
    config: CacheConfig, model: PreTrainedModel, described: _Described
) -> CacheConfig:
    """Replace ``layer_budgets="auto"`` by factors measured for the model.

    By head, or by layer with rolling positions. `measure_layer_budgets` measures them on the
    package's sample story the first time that a model is used with a budget; a file in the user's
    cache folder stores them. Where they cannot be measured, the budgets are even, and a line on
    stderr says so.

    Args:
        config: the cache's config; returned unchanged unless it says ``"auto"``.
        model: the loaded model.
        described: the model's name and tokenizer.

    Returns:
        The config with factors; without factors for a policy that uses no scores.

    Raises:
        ValueError: if the cache cannot be made for the model.
    """
    return _resolve(config, model, described.name, lambda: described.tokenizer)


def budgets_of_model(model: Any, config: CacheConfig) -> CacheConfig:
    """Do the same for a model without a name, whose tokenizer is that of its checkpoint."""
    model = unwrap(model)
    name = str(model.config._name_or_path or model.config.model_type)
    return _resolve(config, model, name, lambda: describe(name).tokenizer)


def even_budgets(config: CacheConfig, reason: str) -> CacheConfig:
    """Replace ``"auto"`` by even budgets where nothing can be measured, and say so on stderr."""
    if config.layer_budgets != MEASURED:
        return config
    if not config.is_full:
        write_remark(f"note: {_remedy(reason)}")
    return replace(config, layer_budgets=None)


def _remedy(reason: str) -> str:
    return (
        f"every head gets the same budget, as {reason}; for budgets by head give a file of h2okv"
        " eval layers --by-head (--layer-budgets FILE, layer_budgets=...)"
    )


def _resolve(
    config: CacheConfig,
    model: PreTrainedModel,
    source: str,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
) -> CacheConfig:
    if config.layer_budgets != MEASURED:
        return config
    even = replace(config, layer_budgets=None)
    H2OCache.from_config(model.config, even)  # raise for mistakes before measuring
    if config.is_full or not get_rule(config.policy).uses_scores:
        return even
    with _LOCKS.setdefault(model, threading.Lock()):
        return _measured(config, model, source, tokenizer)


def _measured(
    config: CacheConfig,
    model: PreTrainedModel,
    source: str,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
) -> CacheConfig:
    even = replace(config, layer_budgets=None)
    by_head = config.positions != "rolling"
    fraction = config.heavy if isinstance(config.heavy, float) else _USUAL_FRACTION
    context = context_of(model.config)
    num_tokens = min(_TOKENS_BY_HEAD if by_head else _TOKENS_BY_LAYER, context or 1 << 30)
    weights = _fingerprint(model)
    setting = f"{weights} {fraction:.4f} {by_head} {num_tokens} {BEST_VERSION}"
    if setting in _REFUSED:
        return even

    def with_factors(factors: LayerBudgets) -> CacheConfig:
        """Return the config with factors; raise ValueError for those of another model's shape."""
        measured = replace(config, layer_budgets=factors, measured=BEST_VERSION)
        H2OCache.from_config(model.config, measured)
        if measured.is_by_head != by_head:
            raise ValueError(f"layer_budgets must be by {'head' if by_head else 'layer'}.")
        return measured

    def file() -> Path:
        name = f"{model.config.model_type}-{digest(setting)}.json"
        return cache_folder("layer-budgets") / name

    with suppress(OSError, ValueError, KeyError, TypeError):  # not there, or damaged
        stored = parse_json(file().read_text(encoding="utf-8"))
        if stored["setting"] == setting:
            return with_factors(checked_factors(stored["factors"]))
    if setting in _UNSAVED:
        return with_factors(_UNSAVED[setting])
    name, kind = Path(source).name, "head" if by_head else "layer"
    begun = time.perf_counter()
    try:
        if weights is None:
            raise ValueError("some of its weights are not in memory")
        vocab_size = model.config.get_text_config().vocab_size
        ids = torch.tensor([encode(tokenizer(), sample_prompt(), vocab_size)[:num_tokens]])
        with Progress(f"measuring the {kind}s of {name}, once"):
            factors = measure_layer_budgets(model, ids, fraction, by_head=by_head)
        measured = with_factors(factors)
    except ValueError as error:
        _REFUSED.add(setting)
        return even_budgets(config, f"{name} could not be measured ({first_line(error)})")
    try:
        path = file()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"setting": setting, "factors": factors})
        result = f"stored in '{path}'"
    except (OSError, ValueError) as error:
        _UNSAVED[setting] = factors
        result = f"not stored ({first_line(error)}), so the next run measures again"
    write_remark(
        f"{measured.policy_name}: measured the budget of each {kind} of {name} in"
        f" {time.perf_counter() - begun:.1f} s; {result}"
    )
    return measured


# Measuring changes the model's attention for a while, so one thread does it at a time.
_LOCKS: WeakKeyDictionary[torch.nn.Module, threading.Lock] = WeakKeyDictionary()
_UNSAVED: dict[str, LayerBudgets] = {}  # factors that no folder could keep, by setting
_REFUSED: set[str] = set()  # settings that could not be measured, as a line said
_FINGERPRINTS: WeakKeyDictionary[torch.nn.Module, tuple[Any, str | None]] = WeakKeyDictionary()


def _fingerprint(model: PreTrainedModel) -> str | None:
    """Return the model's fingerprint, computed again only after its weights have changed."""
    state = [(id(p), 0 if p.is_inference() else p._version) for p in model.parameters()]
    entry = _FINGERPRINTS.get(model)
    if entry is None or entry[0] != state:
        entry = _FINGERPRINTS[model] = state, fingerprint(model)
    return entry[1]
