"""What must hold before a speed means anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

import h2okv
from h2okv.benchmarking.settings import CacheChoice
from h2okv.cache.scored import ScoredLayer
from h2okv.integration.hf import ATTENTION_NAME

_BATCH, _PROMPT, _STEPS = 2, 96, 8
_BUDGET = 0.2
_LARGEST_ERROR = {torch.float32: 1e-3}
_LARGEST_ERROR_IN_HALF = 5e-2
# Entries of nearly equal score may change places by rounding alone.
_LARGEST_DIFFERENCE = {torch.float32: 0.002}
_LARGEST_DIFFERENCE_IN_HALF = 0.02


class CheckFailedError(Exception):
    """H2O does not compute what it must, so that its speed means nothing."""


@dataclass(frozen=True)
class Check:
    """How far right results were apart.

    Attributes:
        full_error: Largest difference of logits between a cache with K >= length and full
            attention, relative to the largest logit; of packed entries, which round, and a full
            cache that rounds them alike.
        drop_error: The same between dropping and masking a full cache; ``None`` in half
            precision, where two right results part by rounding.
        kept_difference: Share of the entries kept by dropping that masking does not keep.
    """

    full_error: float
    drop_error: float | None
    kept_difference: float


def check_h2o(model: PreTrainedModel, choice: CacheChoice) -> Check:
    """Holds H2O to full attention and to its masking simulation, on a small prompt.

    In half precision rounding may swap entries further up; there only what the first layer keeps
    is compared, whose input is the same. The model's attention implementation is mutated.

    Args:
        model: The model.
        choice: Where the entries sit, and in how many bits.

    Returns:
        The differences, all small enough.

    Raises:
        CheckFailedError: If one is too large.
    """
    dtype = model.dtype
    is_exact = dtype == torch.float32
    ids = _ids(model)
    everything: dict[str, Any] = {"heavy": _PROMPT, "recent": _PROMPT}
    if choice.kv_bits is None:
        full = _logits(model, ids, DynamicCache(config=model.config), "sdpa")
    else:
        rounding = _cache(model, choice, **everything, simulate=True)
        full = _logits(model, ids, rounding, ATTENTION_NAME)
    whole = _cache(model, choice, **everything)
    largest = full.abs().max()
    error = float((_logits(model, ids, whole, ATTENTION_NAME) - full).abs().max() / largest)
    _hold("with K >= length it differs from full attention", error, _limit(dtype, "error"), dtype)
    dropping = _cache(model, choice, heavy=_BUDGET / 2, recent=_BUDGET / 2)
    masking = _cache(model, choice, heavy=_BUDGET / 2, recent=_BUDGET / 2, simulate=True)
    dropped = _logits(model, ids, dropping, ATTENTION_NAME)
    masked = _logits(model, ids, masking, ATTENTION_NAME)
    drop_error = float((dropped - masked).abs().max() / largest)
    difference = _kept_difference(dropping, masking, first_layer_only=not is_exact)
    _hold("it keeps other entries than its simulation", difference, _limit(dtype, "kept"), dtype)
    if is_exact:
        _hold("it differs from its simulation", drop_error, _limit(dtype, "error"), dtype)
    return Check(error, drop_error if is_exact else None, difference)


def _limit(dtype: torch.dtype, kind: str) -> float:
    if kind == "error":
        return _LARGEST_ERROR.get(dtype, _LARGEST_ERROR_IN_HALF)
    return _LARGEST_DIFFERENCE.get(dtype, _LARGEST_DIFFERENCE_IN_HALF)


def _hold(what: str, error: float, limit: float, dtype: torch.dtype) -> None:
    # Not "error > limit", which NaN would pass.
    if not error <= limit:
        raise CheckFailedError(
            f"the check of H2O in {str(dtype).removeprefix('torch.')} failed: {what} by {error:.2g}"
            f" (at most {limit:g} is rounding), so no speed is reported"
        )


def _ids(model: PreTrainedModel) -> torch.Tensor:
    vocab = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab, (_BATCH, _PROMPT + _STEPS), generator=generator).to(model.device)


def _cache(model: PreTrainedModel, choice: CacheChoice, **options: Any) -> h2okv.H2OCache:
    return h2okv.H2OCache(
        model.config, positions=choice.positions, kv_bits=choice.kv_bits, **options
    )


def _logits(
    model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache | h2okv.H2OCache, attention: str
) -> torch.Tensor:
    """Logits after the prompt and after each step, fp32 ``[B, 1 + steps, V]``."""
    model.set_attn_implementation(attention)
    outputs = []
    with torch.inference_mode():
        for part in (ids[:, :_PROMPT], *ids[:, _PROMPT:].split(1, dim=1)):
            outputs.append(model(part, past_key_values=cache, logits_to_keep=1).logits.float())
    return torch.cat(outputs, dim=1)


def _kept_difference(
    dropping: h2okv.H2OCache, masking: h2okv.H2OCache, first_layer_only: bool
) -> float:
    """Share of what one cache keeps that the other one does not."""
    kept = differing = 0
    for layer_idx in _evicting_layers(dropping)[: 1 if first_layer_only else None]:
        real, expected = (cache.kept_positions(layer_idx) for cache in (dropping, masking))
        for row, expected_row in zip(real.flatten(0, 1), expected.flatten(0, 1), strict=True):
            held, wanted = (set(r[r >= 0].tolist()) for r in (row, expected_row))
            kept += len(wanted)
            differing += max(len(held - wanted), len(wanted - held))
    return differing / kept


def _evicting_layers(cache: h2okv.H2OCache) -> list[int]:
    return [n for n, layer in enumerate(cache.layers) if isinstance(layer, ScoredLayer)]
