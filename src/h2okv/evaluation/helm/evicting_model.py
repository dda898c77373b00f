"""A model whose every call has an evicting cache of its own."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

from h2okv.cache.validation import check_model
from h2okv.evaluation.lm_eval.scoring import EvictionSettings, Scorer
from h2okv.integration.attention import ATTENTION_NAME
from h2okv.integration.enable import enable


class EvictingModel:
    """What HELM's server calls in the place of a model: ``generate``, and a forward for scores.

    Args:
        model: a loaded model; gets H2O attention.
        settings: the cache of ``generate``, with the budget of the prompt.

    Raises:
        ValueError: if the model is not supported, or the settings make no sense for it.
    """

    def __init__(self, model: PreTrainedModel, settings: EvictionSettings) -> None:
        check_model(model)
        model.set_attn_implementation(ATTENTION_NAME)
        if model.generation_config is not None:
            # A checkpoint may ask for a cache of its own.
            model.generation_config.cache_implementation = None
        self.model: Any = model
        self.settings = settings
        self._scorer: Scorer | None = None

    def generate(self, **inputs: Any) -> Any:
        """Generates on a new cache; see `transformers.GenerationMixin.generate`.

        Args:
            **inputs: what it takes, but no cache.

        Returns:
            What it returns.
        """
        cache = self.settings.make(self.model.config)
        with enable(self.model) if cache.needs_enabling else nullcontext():
            return self.model.generate(past_key_values=cache, **inputs)

    def __call__(self, input_ids: torch.Tensor) -> SimpleNamespace:
        """Reads whole texts, evicting as it goes, with the budget of the whole text.

        Args:
            input_ids: int ``[B, T]``, without padding.

        Returns:
            ``logits`` ``[B, T, V]``.

        Raises:
            ValueError: if the policy only serves prompts, as ``snapkv`` does.
        """
        if self._scorer is None:
            # A text in one block would not be evicted before its scores are made: it is read by
            # one token at a time, unless the user has larger blocks.
            chunk = self.settings.options["prefill_chunk"] or 1
            whole = self.settings.options | {"prefill_chunk": chunk}
            self._scorer = Scorer(self.model, EvictionSettings(protocol="whole", **whole))
        return SimpleNamespace(logits=self._scorer.logits(input_ids))
