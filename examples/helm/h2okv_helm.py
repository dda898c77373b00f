"""HELM's Hugging Face client on a cache that evicts; ``model_deployments.yaml`` names it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from evicting import EvictingModel
from helm.clients.huggingface_client import (
    HuggingFaceClient,
    HuggingFaceServer,
    HuggingFaceServerFactory,
)
from helm.common.cache import CacheConfig as RequestCacheConfig
from helm.common.request import Request, RequestResult
from helm.tokenizers.tokenizer import Tokenizer
from transformers import set_seed

from h2okv.models.loading import resolve_model
from h2okv.provenance import digest
from h2okv.records import write_json
from h2okv_lab.evaluation.lm_eval import check_arguments
from h2okv_lab.evaluation.lm_eval.scorer import provenance, split_settings


class H2OClient(HuggingFaceClient):
    """A client for models of `transformers` with an `H2OCache`.

    Generation has the budget of the prompt. Log-probabilities of a prompt (``echo_prompt`` without
    new tokens) come from a scan of the text under eviction. The settings are part of the key of
    HELM's request cache and of its loaded models: two budgets never share an answer. Arguments are
    those of `H2OCache` and of HELM's `HuggingFaceClient`; see examples/helm/README.md.
    """

    def __init__(
        self,
        cache_config: RequestCacheConfig,
        tokenizer: Tokenizer,
        pretrained_model_name_or_path: str | None = None,
        record: str | None = None,  # JSON file for the run's settings and versions
        **options: Any,
    ) -> None:
        check_arguments(options)
        # Not `cache`: HELM's clients have an attribute of that name.
        self.config, self.protocol = split_settings(options)
        self._record = record
        path = pretrained_model_name_or_path
        super().__init__(
            cache_config=cache_config,
            tokenizer=tokenizer,
            pretrained_model_name_or_path=None if path is None else resolve_model(path),
            **options,
        )

    def make_request(self, request: Request) -> RequestResult:
        path = self._pretrained_model_name_or_path or request.model
        cache = {"protocol": self.protocol} | self.config.to_dict()
        identity = {"path": path, "cache": cache, "options": self._kwargs}
        # HELM keys loaded models and answers by this name alone.
        server_name = f"{request.model}@{digest(json.dumps(identity, sort_keys=True, default=str))}"
        self._load(server_name, path)
        return super().make_request(replace(request, model=server_name))

    def _load(self, server_name: str, path: str) -> None:
        """Load the model once, into HELM's table of loaded models; write the record."""
        factory = HuggingFaceServerFactory
        with factory._servers_lock:
            if server_name not in factory._servers:
                server = HuggingFaceServer(path, self._wrapped_tokenizer, **self._kwargs)
                loaded: Any = server.model
                set_seed(self.config.seed)
                server.model = EvictingModel(loaded, self.config)
                factory._servers[server_name] = server
            evicting: Any = factory._servers[server_name].model
        if self._record is not None:
            file = Path(self._record)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, provenance(evicting.model, path, self.config, self.protocol))
            self._record = None
