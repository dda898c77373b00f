"""Look up how to divide a budget among a model's layers and heads, or measure it once."""

from __future__ import annotations

import json
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from h2okv.assets import calibration_texts
from h2okv.cache import H2OCache
from h2okv.cache.support import unwrap
from h2okv.calibration.factors import NUM_PASSES, WINDOW, Shares, expected_seconds, measure_shares
from h2okv.config import BEST, BEST_VERSION, FACTORS_VERSION, MEASURED, CacheConfig
from h2okv.console import Progress, format_duration, write_remark
from h2okv.models.loading import describe
from h2okv.models.names import cache_folder
from h2okv.policy import get_rule
from h2okv.prompts.chat_template import encode
from h2okv.provenance import WeightPrint, digest, prints_agree, weight_prints, weights_state
from h2okv.records import first_line, parse_json, write_json

# Assumed for a budget in tokens, because prompts may have any length.
_USUAL_FRACTION = float(CacheConfig(BEST).heavy)
PATIENCE = 300.0  # seconds; what takes longer is measured on request only
_LINE_SECONDS = 10.0
_SKIP = "--policy h2o or --cache layers=even (in Python layer_budgets='even') leaves it out"


class _Described(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...


@dataclass(frozen=True)
class Weights:
    """What tells one model's weights from another's, in memory or in files, in any dtype."""

    prints: Mapping[str, WeightPrint]  # by parameter
    is_complete: bool = True  # whether all parameters have one
    pass_seconds: float = 0.0  # that reading them takes in each pass, if they are not in memory

    @classmethod
    def of(cls, model: PreTrainedModel) -> Weights:
        prints = weight_prints(model)
        return cls(prints, len(prints) == sum(1 for _ in model.parameters()))

    def match(self, stored: Mapping[str, Sequence[Any]]) -> bool:
        """Return whether stored prints are of the same weights, as far as these are known."""
        if self.is_complete and self.prints.keys() != stored.keys():
            return False
        return 2 * len(self.prints) >= len(stored) and all(
            name in stored and prints_agree(entry, (stored[name][0], float(stored[name][1])))
            for name, entry in self.prints.items()
        )

    @property
    def digest(self) -> str:
        """A short name of these weights in this dtype."""
        return digest(json.dumps(dict(self.prints), sort_keys=True))


def with_measured_budgets(
    config: CacheConfig,
    model: PreTrainedModel,
    described: _Described,
    weights: Weights | None = None,
) -> CacheConfig:
    """Replace ``layer_budgets="auto"`` by factors measured for the model.

    By head, or by layer with rolling positions. `measure_shares` measures them on the calibration
    texts the first time that a model is used with a budget, for all budgets and dtypes; a file in
    the user's cache folder stores them. Where they cannot be measured, or not within `PATIENCE`,
    the budgets are even, and a line on stderr says so. `weights` are of a model that is streamed.
    """
    return _resolve(config, model, described.name, lambda: described.tokenizer, weights)


def budgets_of_model(model: Any, config: CacheConfig) -> CacheConfig:
    """Do the same for a model alone, whose tokenizer is that of its checkpoint."""
    model = unwrap(model)
    name = str(model.config._name_or_path or "")

    def tokenizer() -> PreTrainedTokenizerBase:
        if not name:  # anything else would be another model's
            raise ValueError("it has no name, and so no tokenizer for the texts that are read")
        return describe(name).tokenizer

    return _resolve(config, model, name or f"this {model.config.model_type} model", tokenizer)


def _short(name: str) -> str:
    """Return a model's name for messages, without the digest in a converted file's folder."""
    return re.sub("-[0-9a-f]{16}$", "", Path(name).name)


def stored_budgets(
    config: CacheConfig, model_config: PreTrainedConfig, weights: Weights
) -> CacheConfig | None:
    """Replace ``"auto"`` by the factors of an earlier measurement; ``None`` without one."""
    even = config.before_measuring
    H2OCache.from_config(model_config, even)  # raise for mistakes before measuring
    if config.is_full or config is even or not get_rule(config.policy).uses_scores:
        return even
    shares = _find(model_config, weights)
    return None if shares is None else with_shares(config, shares)


def measure_model(
    model: PreTrainedModel, described: _Described, weights: Weights | None = None
) -> Shares:
    """Measure a model, however long it takes, and store what the commands use; once."""
    with lock_of(model):
        weights = weights or _weights_of(model)
        shares = _find(model.config, weights)
        if shares is None:
            shares = _measure(model, described.name, lambda: described.tokenizer, weights)
        return shares


def even_budgets(config: CacheConfig, reason: str, remedy: str | None = None) -> CacheConfig:
    """Replace ``"auto"`` by even budgets where nothing can be measured, and say so on stderr."""
    if config.layer_budgets != MEASURED:
        return config
    if not config.is_full:
        remedy = remedy or (
            "for budgets by head give a file of h2okv eval layers --by-head (--cache layers=FILE,"
            " layer_budgets=...)"
        )
        write_remark(f"note: every head gets the same budget, as {reason}; {remedy}")
    return replace(config, layer_budgets=None)


def measuring_command(name: str) -> str:
    """Return the remedy for a model that was not measured."""
    return (
        "to measure it once, for all later uses, run:"
        f" h2okv eval layers --model {shlex.quote(name)}"
    )


def _resolve(
    config: CacheConfig,
    model: PreTrainedModel,
    name: str,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    weights: Weights | None = None,
) -> CacheConfig:
    if config.layer_budgets != MEASURED:
        return config
    with lock_of(model):
        weights = weights or _weights_of(model)
        stored = stored_budgets(config, model.config, weights)
        if stored is not None:
            return stored
        if weights.digest in _REFUSED:
            return config.before_measuring
        short = _short(name)
        try:
            seconds = _expected_seconds(model, weights)
            if seconds > PATIENCE:
                _REFUSED.add(weights.digest)
                return even_budgets(
                    config,
                    f"measuring {short} would take about {format_duration(seconds)} here",
                    measuring_command(name),
                )
            return with_shares(config, _measure(model, name, tokenizer, weights, _SKIP))
        except ValueError as error:
            _REFUSED.add(weights.digest)
            return even_budgets(config, f"{short} could not be measured ({first_line(error)})")


def with_shares(config: CacheConfig, shares: Shares) -> CacheConfig:
    """Replace ``"auto"`` by the factors for a config's heavy hitters and positions."""
    fraction = config.heavy if isinstance(config.heavy, float) else _USUAL_FRACTION
    factors = shares.factors(fraction, by_head=config.positions != "rolling")
    return replace(config, layer_budgets=factors, measured=BEST_VERSION)


def _expected_seconds(model: PreTrainedModel, weights: Weights) -> float:
    return expected_seconds(model) + weights.pass_seconds * NUM_PASSES


def _measure(
    model: PreTrainedModel,
    name: str,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    weights: Weights,
    remark: str = "",
) -> Shares:
    if not weights.is_complete:
        raise ValueError("some of its weights are not in memory")
    ids = calibration_ids(tokenizer(), model.config.get_text_config().vocab_size)
    short, begun = _short(name), time.perf_counter()
    duration = format_duration(_expected_seconds(model, weights))
    lines = iter([
        f"{BEST}: measuring how many entries each head of {short} needs, once for this model"
        f" (about {duration} here){'; ' * bool(remark)}{remark}"
    ])  # fmt: skip

    def report(done: float) -> None:
        for line in lines:  # with the first layer: some models are refused before
            write_remark(line)
        progress.update(done)

    try:
        with Progress(f"measuring {short}", 1.0, line_seconds=_LINE_SECONDS) as progress:
            shares = measure_shares(model, ids, report=report)
    except KeyboardInterrupt:
        write_remark(f"stopped measuring {short}, and stored nothing{'; ' * bool(remark)}{remark}")
        raise
    # Another process may have been faster; both use the same from now on.
    shares, result = _store(model.config, weights, shares)
    write_remark(
        f"{BEST} v{BEST_VERSION}: measured {short} in {time.perf_counter() - begun:.1f} s; {result}"
    )
    return shares


def _store(config: PreTrainedConfig, weights: Weights, shares: Shares) -> tuple[Shares, str]:
    """Return the shares that later uses will find, and a phrase that says where they are."""
    content = {"version": FACTORS_VERSION, "weights": dict(weights.prints), **asdict(shares)}
    content["digest"] = _digest(content)
    try:
        name = digest(f"{weights.digest} {FACTORS_VERSION}")
        path = cache_folder("layer-budgets") / f"{config.model_type}-{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        if (stored := _find(config, weights)) is not None:
            return stored, "another process has stored its result"
        write_json(path, content)
    except (OSError, ValueError) as error:
        _UNSAVED.append(content)
        return shares, f"not stored ({first_line(error)}), so the next run measures again"
    return shares, f"stored in '{path}'"


def _find(config: PreTrainedConfig, weights: Weights) -> Shares | None:
    """Return the shares of an earlier measurement of these weights."""
    for content in _contents(config.model_type):
        # Damaged, or written by another version.
        with suppress(ValueError, KeyError, TypeError, IndexError, AttributeError):
            is_whole = content["digest"] == _digest(content)
            is_current = content["version"] == FACTORS_VERSION and is_whole
            if is_current and weights.match(content["weights"]):
                return Shares.from_dict(content)
    return None


def _digest(content: Mapping[str, Any]) -> str:
    """Return a digest of what a file says besides it."""
    others = {name: value for name, value in content.items() if name != "digest"}
    return digest(json.dumps(others, sort_keys=True))


def _contents(model_type: str) -> Iterator[Any]:
    """Yield what earlier measurements of models of a type have stored."""
    with suppress(OSError, ValueError):
        for path in sorted(cache_folder("layer-budgets").glob(f"{model_type}-*.json")):
            with suppress(OSError, ValueError):
                yield parse_json(path.read_text(encoding="utf-8"))
    yield from _UNSAVED


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
_UNSAVED: list[dict[str, Any]] = []  # contents of files that no folder could keep
_REFUSED: set[str] = set()  # digests of weights that could not be measured, as a line said
_WEIGHTS: WeakKeyDictionary[torch.nn.Module, tuple[Any, Weights]] = WeakKeyDictionary()


def _weights_of(model: PreTrainedModel) -> Weights:
    """Return the model's weights, read again only after they have changed."""
    state = weights_state(model)
    entry = _WEIGHTS.get(model)
    if entry is None or entry[0] != state:
        entry = _WEIGHTS[model] = state, Weights.of(model)
    return entry[1]
