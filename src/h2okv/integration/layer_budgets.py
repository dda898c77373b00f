"""Look up how to divide a budget among a model's layers and heads, or measure it once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from h2okv.assets import calibration_texts
from h2okv.cache import H2OCache
from h2okv.cache.support import unwrap
from h2okv.config import (
    BEST_HEAVY_FRACTION,
    BEST_VERSION,
    MEASURED,
    CacheConfig,
    LayerBudgets,
    checked_factors,
)
from h2okv.console import Progress, write_remark
from h2okv.integration.chat_template import encode
from h2okv.integration.factors import WINDOW, measure_layer_budgets
from h2okv.integration.loading import describe
from h2okv.integration.names import cache_folder
from h2okv.policy import get_rule
from h2okv.provenance import digest, fingerprint, weights_state
from h2okv.records import first_line, parse_json, write_json

# Assumed for a budget in tokens, because prompts may have any length.
_USUAL_FRACTION = 0.2 * BEST_HEAVY_FRACTION


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
    calibration texts the first time that a model is used with a budget; a file in the user's cache
    folder stores them. Where they cannot be measured, the budgets are even, and a line on stderr
    says so.

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
    even = config.before_measuring
    H2OCache.from_config(model.config, even)  # raise for mistakes before measuring
    if config.is_full or not get_rule(config.policy).uses_scores:
        return even
    with lock_of(model):
        return _measured(config, model, source, tokenizer)


def _measured(
    config: CacheConfig,
    model: PreTrainedModel,
    source: str,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
) -> CacheConfig:
    by_head = config.positions != "rolling"
    fraction = config.heavy if isinstance(config.heavy, float) else _USUAL_FRACTION
    weights = _fingerprint(model)
    setting = f"{weights} {fraction:.4f} {by_head} {BEST_VERSION}"
    if setting in _REFUSED:
        return config.before_measuring

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
        ids = calibration_ids(tokenizer(), vocab_size)
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


def calibration_ids(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int | None = None
) -> torch.Tensor:
    """Return a window of each calibration text, int64 ``[1, T]``, for `measure_layer_budgets`.

    Heads keep different things in different kinds of text.
    """
    windows = [encode(tokenizer, text, vocab_size)[:WINDOW] for text in calibration_texts()]
    return torch.tensor([[token for window in windows for token in window]])


def lock_of(model: torch.nn.Module) -> threading.Lock:
    """Return the lock of a model's measurements, which change its attention for a while."""
    return _LOCKS.setdefault(model, threading.Lock())


_LOCKS: WeakKeyDictionary[torch.nn.Module, threading.Lock] = WeakKeyDictionary()
_UNSAVED: dict[str, LayerBudgets] = {}  # factors that no folder could keep, by setting
_REFUSED: set[str] = set()  # settings that could not be measured, as a line said
_FINGERPRINTS: WeakKeyDictionary[torch.nn.Module, tuple[Any, str | None]] = WeakKeyDictionary()


def _fingerprint(model: PreTrainedModel) -> str | None:
    """Return the model's fingerprint, computed again only after its weights have changed."""
    state = weights_state(model)
    entry = _FINGERPRINTS.get(model)
    if entry is None or entry[0] != state:
        entry = _FINGERPRINTS[model] = state, fingerprint(model)
    return entry[1]
