"""H2O is checked before it is timed: a wrong cache has no speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

import h2okv
from h2okv.cache.layer import CacheLayer
from h2okv.integration.attention import ATTENTION_NAME

_BATCH, _PROMPT, _STEPS = 2, 96, 8
_BUDGET = 0.2
# In fp32, and in half precision. Entries of nearly equal score may change places by rounding alone.
_LARGEST_ERROR = (1e-3, 5e-2)
_LARGEST_DIFFERENCE = (0.002, 0.02)


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
        kept_difference: Fraction of the entries kept by dropping that masking does not keep.
    """

    full_error: float
    drop_error: float | None
    kept_difference: float


def check_h2o(model: PreTrainedModel, **options: Any) -> Check:
    """Holds H2O to full attention and to its masking simulation, on a small prompt.

    In half precision rounding may swap entries further up; there only what the first layer keeps
    is compared, whose input is the same. The model's attention implementation is mutated.

    Args:
        model: the model.
        **options: of `H2OCache`, such as ``positions`` and ``kv_bits``.
    """
    is_half = model.dtype != torch.float32
    ids = _ids(model)

    def logits(heavy: int | float, simulate: bool = False) -> tuple[torch.Tensor, h2okv.H2OCache]:
        cache = h2okv.H2OCache(model.config, heavy, heavy, simulate=simulate, **options)
        return _logits(model, ids, cache, ATTENTION_NAME), cache

    if options.get("kv_bits") is None:
        full = _logits(model, ids, DynamicCache(config=model.config), "sdpa")
    else:
        full, _ = logits(_PROMPT, simulate=True)
    largest = full.abs().max()
    whole, _ = logits(_PROMPT)
    error = float((whole - full).abs().max() / largest)
    dropped, dropping = logits(_BUDGET / 2)
    masked, masking = logits(_BUDGET / 2, simulate=True)
    drop_error = float((dropped - masked).abs().max() / largest)
    difference = _kept_difference(dropping, masking, first_layer_only=is_half)
    limit = _LARGEST_ERROR[is_half]
    for what, found, largest_right in (
        ("with K >= length it differs from full attention", error, limit),
        ("it keeps other entries than its simulation", difference, _LARGEST_DIFFERENCE[is_half]),
        ("it differs from its simulation", 0.0 if is_half else drop_error, limit),
    ):
        # Not "found > largest_right", which NaN would pass.
        if not found <= largest_right:
            raise CheckFailedError(
                f"the check of H2O in {str(model.dtype).removeprefix('torch.')} failed: {what} by"
                f" {found:.2g} (at most {largest_right:g} is rounding), so no speed is reported"
            )
    return Check(error, None if is_half else drop_error, difference)


def _ids(model: PreTrainedModel) -> torch.Tensor:
    vocab = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab, (_BATCH, _PROMPT + _STEPS), generator=generator).to(model.device)


def _logits(
    model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache | h2okv.H2OCache, attention: str
) -> torch.Tensor:
    """Logits after the prompt and after each step, fp32 ``[B, 1 + steps, V]``."""
    model.set_attn_implementation(attention)
    with torch.inference_mode():
        parts = (ids[:, :_PROMPT], *ids[:, _PROMPT:].split(1, dim=1))
        outputs = [model(part, past_key_values=cache, logits_to_keep=1).logits for part in parts]
    return torch.cat(outputs, dim=1).float()


def _kept_difference(
    dropping: h2okv.H2OCache, masking: h2okv.H2OCache, first_layer_only: bool
) -> float:
    """Fraction of what one cache keeps that the other one does not."""
    kept = differing = 0
    evicting = [n for n, layer in enumerate(dropping.layers) if isinstance(layer, CacheLayer)]
    for layer_idx in evicting[: 1 if first_layer_only else None]:
        real, expected = (cache.kept_positions(layer_idx) for cache in (dropping, masking))
        for own, other in zip(real.flatten(0, 1), expected.flatten(0, 1), strict=True):
            held, wanted = (set(row[row >= 0].tolist()) for row in (own, other))
            kept += len(wanted)
            differing += max(len(held - wanted), len(wanted - held))
    return differing / kept
