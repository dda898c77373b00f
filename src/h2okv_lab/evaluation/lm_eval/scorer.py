"""Texts scored on caches that evict, for the harness's model type and HELM's client."""

from __future__ import annotations

import importlib.metadata
import platform
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedModel

from h2okv.cache import CACHE, CacheLayer, H2OCache
from h2okv.cache.rope import PositionRule
from h2okv.cache.support import check_model
from h2okv.cache_spec import parse
from h2okv.config import CacheConfig
from h2okv.engine.model_runner import left_padded
from h2okv.integration.attention import ATTENTION_NAME
from h2okv.integration.enable import enable, input_device
from h2okv.models.loading import drop_stored_modes
from h2okv.policy import get_rule
from h2okv.provenance import fingerprint
from h2okv_lab import tables
from h2okv_lab.evaluation.lm_eval import SETTINGS
from h2okv_lab.evaluation.model import make_cache
from h2okv_lab.masking import PER_QUERY
from h2okv_lab.shared import read_together

Protocol = Literal["prompt", "whole"]
# Continuations are scored on the prompt, evicted before them, or on the whole text, evicted block
# by block.


def provenance(
    model: PreTrainedModel, name: str, config: CacheConfig, protocol: Protocol
) -> dict[str, Any]:
    """Describe model, cache and software of a run."""
    versions = {"python": platform.python_version()} | tables.versions()
    commit = versions.pop("commit")
    for package in ("tokenizers", "lm_eval", "crfm-helm"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "model": name,
        "revision": getattr(model.config, "_commit_hash", None) or "",
        "weights": fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "cache": {"protocol": protocol} | config.to_dict(),
        "versions": versions,
        "commit": commit,
    }


def split_settings(options: dict[str, Any]) -> tuple[CacheConfig, Protocol]:
    """Pop cache and protocol, the fields of `SETTINGS`, from a model's arguments."""
    settings = {name: options.pop(name) for name in SETTINGS if name in options}
    protocol = settings.pop("protocol", None)
    if "cache" in settings:  # a text; the others are named beside it
        settings = parse(settings.pop("cache")) | settings
    config = CacheConfig.from_dict(settings)
    # Refuse what the cache would refuse before a model's weights are loaded.
    if config.policy not in PER_QUERY:
        get_rule(config.policy, config.seed, config.scoring, config.decay)
    rule: Any = PositionRule
    rule(config.positions, config.chunk)
    if protocol is None:  # blocks of one token are the paper's
        protocol = "whole" if config.evict_every == 1 else "prompt"
    if protocol not in ("prompt", "whole"):
        raise ValueError(f"protocol={protocol!r} is unknown; choose one of prompt, whole.")
    if protocol == "whole" and config.chunk is None and not config.is_full:
        raise ValueError(
            "protocol='whole' without evict_every reads a text as one block and evicts only "
            "after it, so no score would change; give evict_every=1 (as in the paper) or a "
            "larger block."
        )
    return config, protocol


class TokenScores(NamedTuple):
    """The model's predictions of given tokens."""

    log_probs: list[float]  # of each token
    greedy: list[bool]  # whether it is the likeliest one

    @property
    def total(self) -> float:
        return sum(self.log_probs)


Pair = tuple[Sequence[int], Sequence[int]]  # the tokens of a context and of its continuation
Request = tuple[Any, list[int], list[int]]  # the same with their texts, or None
Scored = Iterator[tuple[int, TokenScores]]  # (index of a pair, scores of its continuation)
_Key = tuple[tuple[int, ...], tuple[int, ...]]


class Scorer:
    """Scores of tokens on a cache that evicts; each text of a batch as if it were alone."""

    def __init__(
        self, model: PreTrainedModel, config: CacheConfig, dtype: torch.dtype | None = torch.float32
    ) -> None:
        self.model, self.config, self.dtype = model, config, dtype
        # Scorers that read contexts together: a pair given to one of them is scored by all, and the
        # others' scores wait in `_scores` until they get the same pair.
        self.group = [self]
        self._scores: dict[_Key, TokenScores] = {}
        # Recurrent and sliding layers are those of transformers; not all of them respect padding.
        layers = self.new_cache().layers
        self.takes_padding = all(isinstance(layer, CacheLayer) for layer in layers)

    def after_prompts(self, pairs: Sequence[Pair], size: int = 64) -> Scored:
        """Score continuations on compressed contexts, each of which is read once.

        A context's last token is read with the continuation, in blocks of at most ``evict_every``
        tokens: then the first token of the continuation too is predicted from the evicted cache.
        """
        numbers: dict[_Key, list[int]] = {}
        users: dict[tuple[int, ...], dict[_Key, None]] = {}
        for number, (context, continuation) in enumerate(pairs):
            key = tuple(context), tuple(continuation)
            numbers.setdefault(key, []).append(number)
            if key in self._scores:
                yield number, self._scores[key]
            else:
                users.setdefault(key[0], {})[key] = None
        size = size if self.takes_padding else 1
        # A context of one token leaves nothing to evict before its continuation.
        for has_more in (True, False):
            alike = [context for context in users if (len(context) > 1) == has_more]
            for members in batches([len(context) for context in alike], size):
                contexts = [alike[index] for index in members]
                slots = enumerate(contexts)
                jobs = [(slot, key) for slot, context in slots for key in users[context]]
                self._read([context[:-1] for context in contexts], jobs, size)
                for _, key in jobs:
                    yield from ((number, self._scores[key]) for number in numbers[key])
                if len(self.group) == 1:
                    self._scores.clear()

    def _read(
        self, contexts: Sequence[Sequence[int]], jobs: Sequence[tuple[int, _Key]], size: int
    ) -> None:
        """Read contexts onto empty caches of the group; each scorer scores the continuations."""
        caches = [scorer.new_cache() for scorer in self.group]
        ids, mask = left_padded(contexts, input_device(self.model))
        if ids.shape[1]:
            read_together(caches, lambda cache: self._forward(ids, mask, cache, keep=1))
        for scorer, cache in zip(self.group, caches, strict=True):
            scorer._continue(cache, mask, jobs, size)

    def _continue(
        self, cache: H2OCache, seen: torch.Tensor, jobs: Sequence[tuple[int, _Key]], size: int
    ) -> None:
        """Score continuations of the contexts in a cache, ``size`` at a time."""
        for start in range(0, len(jobs), size):
            slots, keys = zip(*jobs[start : start + size], strict=True)
            branch = cache if start + size >= len(jobs) else cache.fork(1)
            if seen.shape[1] and slots != tuple(range(len(seen))):
                branch.batch_select_indices(torch.tensor(slots, device=seen.device))
            after = [(context[-1:], continuation) for context, continuation in keys]
            scores = self._score(after, branch, seen[list(slots)])
            self._scores.update(zip(keys, scores, strict=True))

    def whole_texts(self, pairs: Sequence[Pair], size: int = 64) -> Scored:
        """Score continuations in texts that layers evict from every ``evict_every`` tokens.

        The budget is of the tokens read: all but the text's last one.
        """
        lengths = [len(context) + len(continuation) for context, continuation in pairs]
        for members in batches(lengths, size if self.takes_padding else 1):
            scores = self._score([pairs[number] for number in members], self.new_cache())
            yield from zip(members, scores, strict=True)

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits ``[B, T, V]`` of texts ``[B, T]`` without padding, on an empty cache."""
        ids = input_ids.to(input_device(self.model))
        return self._forward(ids, torch.ones_like(ids), self.new_cache())

    def new_cache(self) -> H2OCache:
        return make_cache(self.config, self.model, self.config.seed)

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, cache: H2OCache, keep: int = 0
    ) -> torch.Tensor:
        """Read ``ids [B, T]``, the last columns of ``mask [B, N]``, onto a cache."""
        options = {"attention_mask": mask, CACHE: cache, "logits_to_keep": keep}
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with enable(self.model), torch.no_grad():
            logits: torch.Tensor = self.model(ids, position_ids=positions, **options).logits
        return logits

    def _score(
        self, pairs: Sequence[Pair], cache: H2OCache, seen: torch.Tensor | None = None
    ) -> list[TokenScores]:
        """Run texts without their last tokens and return the scores of the continuations."""
        texts = [[*context, *continuation] for context, continuation in pairs]
        counts = [len(continuation) for _, continuation in pairs]
        input_ids, mask = left_padded([text[:-1] for text in texts], input_device(self.model))
        if seen is not None:
            mask = torch.cat([seen, mask], dim=1)
        with warnings.catch_warnings():
            # A continuation does not count for a budget that is a fraction of the prompt.
            warnings.filterwarnings("ignore", ".*fractions were taken of the first forward")
            logits = self._forward(input_ids, mask, cache, max(counts))
        scores = []
        for row, text, count in zip(logits, texts, counts, strict=True):
            predicted = row[-count:].log_softmax(dim=-1, dtype=self.dtype)
            targets = torch.tensor(text[-count:], device=predicted.device)
            log_probs = predicted.gather(1, targets.unsqueeze(1)).squeeze(1)
            # Lists, because small tensors that live for a whole task fragment the memory.
            is_greedy = (predicted.argmax(-1) == targets).tolist()
            scores.append(TokenScores(log_probs.tolist(), is_greedy))
        return scores


def prepare_model(model: PreTrainedModel) -> None:
    """Give a supported model H2O attention, and drop its checkpoint's cache implementation."""
    check_model(model)
    model.set_attn_implementation(ATTENTION_NAME)
    drop_stored_modes(model)


def batches(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Group texts of similar length, the longest first: a lack of memory shows early."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    for start in range(0, len(order), size):
        yield order[start : start + size]
