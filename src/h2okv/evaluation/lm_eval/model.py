"""The model type h2okv of lm-evaluation-harness."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import platform
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm
from transformers import PreTrainedModel

import h2okv.provenance
from h2okv.config import CacheConfig
from h2okv.evaluation.lm_eval.launcher import check_arguments
from h2okv.evaluation.lm_eval.scoring import (
    SETTINGS,
    Protocol,
    Scorer,
    TokenScores,
    batches,
    prepare_model,
    split_settings,
)
from h2okv.evaluation.model import make_cache
from h2okv.integration.enable import enable
from h2okv.integration.models import default_dtype, resolve_model
from h2okv.provenance import fingerprint

_PACKAGES = ("tokenizers", "lm_eval", "crfm-helm")


def provenance(
    model: PreTrainedModel, name: str, config: CacheConfig, protocol: Protocol
) -> dict[str, Any]:
    """Describes model, cache and software of a run."""
    versions = {"python": platform.python_version()} | h2okv.provenance.versions()
    commit = versions.pop("commit")
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "model": name,
        "revision": getattr(model.config, "_commit_hash", None) or "",
        "weights": fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "cache": {"protocol": protocol} | config.to_dict(),
        "versions": versions,
        "commit": commit,
    }


Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""A text pair (``None`` inside a rolling score), the context's tokens, the continuation's."""

Pair = tuple[tuple[int, ...], tuple[int, ...]]
"""A context's and a continuation's tokens, as they fit in the window."""

Scored = Iterator[tuple[int, TokenScores]]
"""Numbers of requests, with what the model says of their continuations."""

_SETTINGS_KEY = "h2okv settings"
_ENDLESS = 1 << 30
"""The window of a cache whose positions roll; a number, because the harness calculates with it."""


@register_model("h2okv")
class H2OLM(HFLM):
    """The harness's ``hf`` model with an `H2OCache`; its other arguments work as they do there.

    ``loglikelihood`` is scored under eviction (see `split_settings`), ``generate_until``
    writes on the cache, with the budget of the prompt. ``loglikelihood_rolling`` has no prompt and
    so needs ``protocol="whole"``.
    """

    def __init__(self, pretrained: str | PreTrainedModel, **options: Any) -> None:
        _check_options(options)
        self.cache_config, self.protocol = split_settings(options)
        if isinstance(pretrained, str):
            self.name = pretrained
            if "gguf_file" not in options:
                pretrained = resolve_model(pretrained)
        else:
            self.name = str(pretrained.name_or_path)
        # The harness's own default fails where there is no GPU.
        options.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
        options.setdefault("dtype", default_dtype(self.name, options["device"]) or "auto")
        super().__init__(pretrained=pretrained, **options)
        prepare_model(self.model)
        dtype = self.softmax_dtype or torch.float32
        self.scorer = Scorer(self.model, self.cache_config, dtype)

    @property
    def _rolls(self) -> bool:
        return self.cache_config.positions == "rolling"

    def _describe(self) -> dict[str, Any]:
        return {"protocol": self.protocol} | self.cache_config.to_dict()

    @property
    def max_length(self) -> int:
        """The most tokens of a text; no limit where positions roll."""
        if self._rolls and self._max_length is None:
            return _ENDLESS
        return super().max_length

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuses answers that ``--use_cache`` stored under other settings.

        The harness looks answers up by the request alone, whatever the budget.
        """
        super().set_cache_hook(cache_hook)
        store = getattr(cache_hook, "dbdict", None)
        if store is None:
            return
        mine = json.dumps(
            {"model": self.name, "revision": self.revision} | self._describe(),
            sort_keys=True,
        )
        stored = store.get(_SETTINGS_KEY)
        if stored is None and len(store):
            raise ValueError(
                "--use_cache names a store whose answers were not made by this model type; give "
                "another path."
            )
        if stored not in (None, mine):
            raise ValueError(
                f"--use_cache names a store whose answers were made with {stored}; give another "
                "path for these settings."
            )
        store[_SETTINGS_KEY] = mine

    def get_model_info(self) -> dict[str, Any]:
        """Adds model, budget, policy, seed, versions and commit to the harness's own record."""
        record = provenance(self.model, self.name, self.cache_config, self.protocol)
        return super().get_model_info() | {"h2okv": record}

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Scores whole texts, as perplexity tasks do; see `HFLM.loglikelihood_rolling`."""
        if self.protocol == "prompt" and not self.cache_config.is_full:
            raise ValueError(
                "a task of rolling log-likelihoods has no prompt to evict, so protocol='prompt' "
                "would give the full cache's figures; give prefill_chunk=1, or a larger block "
                "with protocol=whole."
            )
        return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generates on the cache; see `HFLM.generate_until`."""
        if not self.truncation:
            for number, request in enumerate(requests):
                context, options = request.args[:2]
                options = normalize_gen_kwargs(options, self.max_gen_toks)
                room = self.max_length - options["max_gen_toks"]
                length = len(self.tok_encode(context))
                if length > room:
                    self._refuse(number, request.args, length, room)
        return super().generate_until(requests, disable_tqdm=disable_tqdm)

    def _model_call(
        self,
        inps: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits ``[B, T, V]`` of texts without padding, read on an empty cache."""
        return self.scorer.logits(inps)

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        """Generates with a new cache for the batch; the budget is of each row's prompt."""
        cache = make_cache(self.cache_config, self.model.config, self.cache_config.seed)
        with enable(self.model) if cache.needs_enabling else nullcontext():
            return super()._model_generate(
                context, max_length, stop, past_key_values=cache, **generation_kwargs
            )

    def _loglikelihood_tokens(
        self,
        requests: Sequence[Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Scores continuations of contexts under eviction, as `Scorer` does."""
        pairs = [self._fitting(number, request) for number, request in enumerate(requests)]
        size = override_bs or self._contexts_at_once(pairs)
        answers: list[tuple[float, bool] | None] = [None] * len(requests)
        hidden = disable_tqdm or self.rank != 0
        bar = tqdm(total=len(requests), disable=hidden, desc="Scoring under eviction")
        score = self._score_whole if self.protocol == "whole" else self._score_prompts
        for number, scores in score(pairs, size):
            answers[number] = (scores.total, scores.is_greedy)
            texts = requests[number][0]
            if texts is not None:  # rolling windows are stored by their text, not here
                self.cache_hook.add_partial("loglikelihood", texts, answers[number])
            bar.update()
        bar.close()
        return [answer for answer in answers if answer is not None]

    def _score_whole(self, pairs: list[Pair], size: int) -> Scored:
        """Yields each request's number and scores, every text scanned once."""
        for members in batches([len(context) + len(rest) for context, rest in pairs], size):
            texts = [pairs[number][0] + pairs[number][1] for number in members]
            counts = [len(pairs[number][1]) for number in members]
            yield from zip(members, self.scorer.whole(texts, counts), strict=True)

    def _score_prompts(self, pairs: list[Pair], size: int) -> Scored:
        """Yields each request's number and scores, every context read once."""
        users: dict[tuple[int, ...], list[int]] = {}
        for number, (context, _) in enumerate(pairs):
            users.setdefault(context, []).append(number)
        contexts = list(users)
        for members in batches([len(context) for context in contexts], size):
            chosen = [contexts[index] for index in members]
            continuations = [[pairs[number][1] for number in users[own]] for own in chosen]
            results = self.scorer.after_prompts(chosen, continuations, size)
            for own, scores in zip(chosen, results, strict=True):
                yield from zip(users[own], scores, strict=True)

    def _fitting(self, number: int, request: Request) -> Pair:
        """Context and continuation, the context cut from the left where the user allows it."""
        texts, context, continuation = request
        if not continuation:
            raise ValueError(
                f"request {number} ({_opening(texts)} ...) has a continuation without tokens; "
                "take it out of the task."
            )
        length, room = len(context) + len(continuation), self.max_length + 1
        if length > room:
            if not self.truncation or len(continuation) >= room:
                self._refuse(number, texts, length - 1, self.max_length)
            context = context[length - room :]
        return tuple(context), tuple(continuation)

    def _refuse(self, number: int, texts: Sequence[Any] | None, length: int, room: int) -> None:
        """Raises for a text that is too long, before anything is computed."""
        raise ValueError(
            f"request {number} ({_opening(texts)} ...) has {length} tokens and the model's "
            f"window leaves room for {room}; lower --num_fewshot, give positions=rolling and "
            "prefill_chunk, or truncation=True to cut such texts from the left."
        )

    def _contexts_at_once(self, pairs: list[Pair]) -> int:
        """The batch size asked for, or found out on the longest text."""
        if self.batch_size != "auto":
            return int(self.batch_size)
        longest = max(pairs, key=lambda pair: len(pair[0]) + len(pair[1]), default=None)
        if longest is None:
            return 1
        found = self._detect_batch_size([(None, list(longest[0]), list(longest[1]))])
        self.batch_sizes = {0: found}
        return int(found)


def _opening(texts: Sequence[Any] | None) -> str:
    """The first words of a request's text, quoted."""
    return repr(" ".join(str(texts[0]).split())[:40]) if texts else "part of a long text"


def _check_options(options: dict[str, Any]) -> None:
    """Refuses what the harness or transformers would fail on in words of their own."""
    known = inspect.signature(HFLM.__init__).parameters
    check_arguments([name for name in options if name not in known], SETTINGS)
    rolls = options.get("positions") == "rolling"
    if rolls and str(options.get("batch_size")).startswith("auto"):
        raise ValueError(
            "batch_size=auto tries the longest text, which positions='rolling' does not have; "
            "give a number."
        )
