"""The model type h2okv of lm-evaluation-harness: log-likelihoods and texts under eviction."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm
from transformers import PreTrainedModel

from h2okv.cache import CACHE
from h2okv.calibration.layer_budgets import budgets_of_model
from h2okv.integration.enable import enable
from h2okv.models.loading import default_dtype, resolve_model
from h2okv_lab.evaluation.lm_eval import check_arguments
from h2okv_lab.evaluation.lm_eval.scorer import (
    Pair,
    Request,
    Scorer,
    prepare_model,
    provenance,
    split_settings,
)

_SETTINGS_KEY = "h2okv settings"
# The window of a cache with rolling positions: a number, because the harness calculates with it.
_ENDLESS = 1 << 30


@register_model("h2okv")
class H2OLM(HFLM):
    """The harness's ``hf`` model with an `H2OCache`; other arguments are those of ``hf``.

    Log-likelihoods are scored under eviction (see `split_settings`); rolling ones have no prompt
    and need ``protocol="whole"``. Generation uses the cache with the budget of the prompt.
    """

    def __init__(self, pretrained: str | PreTrainedModel, **options: Any) -> None:
        # Refuse misspelt settings here: the harness's own error would not name them.
        parameters = inspect.signature(HFLM.__init__).parameters
        check_arguments(name for name in options if name not in parameters)
        rolls = options.get("positions") == "rolling"
        if rolls and str(options.get("batch_size")).startswith("auto"):
            raise ValueError("batch_size=auto cannot go with positions=rolling; give a number")
        self.cache_config, self.protocol = split_settings(options)
        self.name = pretrained if isinstance(pretrained, str) else str(pretrained.name_or_path)
        if isinstance(pretrained, str) and "gguf_file" not in options:
            pretrained = resolve_model(pretrained)
        # The harness's default fails without a GPU.
        options.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
        options.setdefault("dtype", default_dtype(self.name, options["device"]) or "auto")
        super().__init__(pretrained=pretrained, **options)
        prepare_model(self.model)
        self.cache_config = budgets_of_model(self.model, self.cache_config)
        self.scorer = Scorer(self.model, self.cache_config, self.softmax_dtype or torch.float32)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a text; no limit if positions roll."""
        if self.cache_config.positions == "rolling" and self._max_length is None:
            return _ENDLESS
        return super().max_length

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse answers stored under other settings: the harness compares requests alone."""
        super().set_cache_hook(cache_hook)
        store = getattr(cache_hook, "dbdict", None)
        if store is None:
            return
        settings = {"protocol": self.protocol} | self.cache_config.to_dict()
        model = {"model": self.name, "revision": self.revision}
        identity = json.dumps(model | settings, sort_keys=True)
        stored = store.get(_SETTINGS_KEY)
        if stored is None and len(store):
            raise ValueError("--use_cache: the file is not of this model type; give another path")
        if stored not in (None, identity):
            raise ValueError(f"--use_cache: the file is of {stored}; give another path")
        store[_SETTINGS_KEY] = identity

    def get_model_info(self) -> dict[str, Any]:
        record = provenance(self.model, self.name, self.cache_config, self.protocol)
        return super().get_model_info() | {"h2okv": record}

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        if self.protocol == "prompt" and not self.cache_config.is_full:
            raise ValueError(
                "a task of rolling log-likelihoods has no prompt to evict from, so protocol="
                "'prompt' would score the full cache; give evict_every=1, or a larger block with "
                "protocol=whole."
            )
        return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        for number, request in enumerate(() if self.truncation else requests):
            context, options = request.args[:2]
            options = normalize_gen_kwargs(options, self.max_gen_toks)
            room = self.max_length - options["max_gen_toks"]
            length = len(self.tok_encode(context))
            if length > room:
                self._refuse(number, request.args, length, room)
        return super().generate_until(requests, disable_tqdm=disable_tqdm)

    def _model_call(self, inps: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self.scorer.logits(inps)

    def _model_generate(self, *args: Any, **options: Any) -> torch.Tensor:
        """Generate with a new cache for the batch; the budget is of each prompt."""
        with enable(self.model):
            return super()._model_generate(*args, **{CACHE: self.scorer.new_cache()}, **options)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        pairs = [self._fitting(number, request) for number, request in enumerate(requests)]
        size = override_bs or self._batch_size(pairs)
        score = self.scorer.whole_texts if self.protocol == "whole" else self.scorer.after_prompts
        answers: dict[int, tuple[float, bool]] = {}
        hidden, title = disable_tqdm or self.rank != 0, "Scoring under eviction"
        for number, scores in tqdm(score(pairs, size), title, len(requests), disable=hidden):
            answers[number] = (scores.total, all(scores.greedy))
            texts = requests[number][0]
            if texts is not None:  # rolling windows are stored by their text, not here
                self.cache_hook.add_partial("loglikelihood", texts, answers[number])
        return [answers[number] for number in range(len(requests))]

    def _fitting(self, number: int, request: Request) -> Pair:
        """Return context and continuation; the context is truncated if the user allows it."""
        texts, context, continuation = request
        if not continuation:
            raise ValueError(
                f"request {number} ({_opening(texts)} ...) has a continuation without tokens; "
                "remove it from the task."
            )
        length, room = len(context) + len(continuation), self.max_length + 1
        if length > room:
            if not self.truncation or len(continuation) >= room:
                self._refuse(number, texts, length - 1, self.max_length)
            context = context[length - room :]
        return context, continuation

    def _refuse(self, number: int, texts: Sequence[Any] | None, length: int, room: int) -> None:
        raise ValueError(
            f"request {number} ({_opening(texts)} ...) has {length} tokens and the model's "
            f"window has room for {room}; lower --num_fewshot, give positions=rolling and "
            "evict_every, or truncation=True to truncate such texts from the left."
        )

    def _batch_size(self, pairs: list[Pair]) -> int:
        """Return the batch size of the options, or detect one on the longest text."""
        if self.batch_size != "auto" or not pairs:
            return 1 if self.batch_size == "auto" else int(self.batch_size)
        longest = max(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))
        size = int(self._detect_batch_size([(None, *map(list, longest))]))
        self.batch_sizes = {0: size}
        return size


def _opening(texts: Sequence[Any] | None) -> str:
    return repr(" ".join(str(texts[0]).split())[:40]) if texts else "part of a long text"
