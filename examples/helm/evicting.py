"""HELM's model on a cache that evicts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

from h2okv.cache.argument import CACHE
from h2okv.config import CacheConfig
from h2okv.integration.enable import enable
from h2okv_lab.evaluation.lm_eval.scorer import Scorer, prepare_model
from h2okv_lab.evaluation.model import make_cache


class EvictingModel:
    """A model with ``generate``, and a forward for scores."""

    def __init__(self, model: PreTrainedModel, config: CacheConfig) -> None:
        prepare_model(model)
        self.model: Any = model
        self.config = config
        # In one block nothing would be evicted before a text is scored: read it token by token,
        # unless the user set larger blocks.
        self._scan_config = config.with_cuts(1)

    def generate(self, **inputs: Any) -> Any:
        cache = make_cache(self.config, self.model, self.config.seed)
        with enable(self.model):
            return self.model.generate(**{CACHE: cache}, **inputs)

    def __call__(self, input_ids: torch.Tensor) -> SimpleNamespace:
        """Return logits ``[B, T, V]`` of texts ``[B, T]`` without padding, under eviction."""
        return SimpleNamespace(logits=Scorer(self.model, self._scan_config).logits(input_ids))
