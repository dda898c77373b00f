"""Log-likelihoods with an evicting cache."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from h2okv.cache import H2OCache
from h2okv.cache.layer import CacheLayer
from h2okv.cache.rope import PositionRule
from h2okv.cache.validation import check_model
from h2okv.config import CacheConfig
from h2okv.evaluation.generate import left_padded
from h2okv.evaluation.model import make_cache
from h2okv.evaluation.shared_prefill import SharedPrefill
from h2okv.integration.attention import ATTENTION_NAME
from h2okv.integration.enable import enable
from h2okv.policy import get_policy
from h2okv.policy.scoring import get_scoring

Protocol = Literal["prompt", "whole"]
PROTOCOLS: tuple[Protocol, ...] = ("prompt", "whole")


SETTINGS = ("protocol", *(field.name for field in fields(CacheConfig)))
"""The arguments of a harness's model that are not the harness's own."""


def split_settings(options: dict[str, Any]) -> tuple[CacheConfig, Protocol]:
    """Takes cache and protocol out of a model's arguments; refuses what looks like one of them.

    Args:
        options: Arguments by name; loses those of `SETTINGS`.

    Returns:
        The cache, and what a continuation is scored on: the ``prompt``, evicted before it, or the
        ``whole`` text, evicted block by block. Blocks of one token are the paper's protocol,
        ``whole``, unless said otherwise.

    Raises:
        ValueError: If they make no sense.
    """
    given = {name: options.pop(name) for name in SETTINGS if name in options}
    protocol = given.pop("protocol", None)
    config = CacheConfig.from_dict(given)
    # What the cache would refuse is refused before a model's weights are loaded.
    get_policy(config.policy, config.seed)
    get_scoring(config.scoring, config.decay)
    rule: Any = PositionRule
    rule(config.positions, config.prefill_chunk)
    if protocol is None:
        protocol = "whole" if config.prefill_chunk == 1 else "prompt"
    for name in PROTOCOLS:
        if name == protocol:
            check_protocol(config, name)
            return config, name
    raise ValueError(f"protocol={protocol!r} is unknown; choose one of {', '.join(PROTOCOLS)}.")


def check_protocol(config: CacheConfig, protocol: Protocol) -> None:
    """Refuses whole texts that no eviction would reach before they are scored."""
    if protocol == "whole" and config.prefill_chunk is None and not config.is_full:
        raise ValueError(
            "protocol='whole' without prefill_chunk reads a text as one block and evicts only "
            "after it, so that no score would change; give prefill_chunk=1 (the paper's way) "
            "or a larger block."
        )


@dataclass(frozen=True)
class TokenScores:
    """What the model says of given tokens.

    Attributes:
        log_probs: ``[n]``, of each token.
        greedy: bool ``[n]``, whether the token is the likeliest one.
    """

    log_probs: torch.Tensor
    greedy: torch.Tensor

    @property
    def total(self) -> float:
        """The log-probability of all tokens together."""
        return float(self.log_probs.sum())

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would write these tokens."""
        return bool(self.greedy.all())


_Key = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""A context and its continuations."""


class Scorer:
    """Scores tokens on a cache that evicts; every row of a batch as it would be alone.

    Attributes:
        group: Scorers that read contexts together: what one of them is asked for is scored by all,
            and kept until they are asked too.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: CacheConfig,
        dtype: torch.dtype | None = torch.float32,
    ) -> None:
        self.model = model
        self.config = config
        self.dtype = dtype
        self.group = [self]
        self._known: dict[_Key, list[TokenScores]] = {}
        layers = self._cache().layers
        # Recurrent and sliding layers are transformers' own, and not all of them see padding.
        self.takes_padding = all(isinstance(layer, CacheLayer) for layer in layers)

    def after_prompt(
        self, context: Sequence[int], continuations: Sequence[Sequence[int]], rows: int = 64
    ) -> list[TokenScores]:
        """Scores continuations of one context; see `after_prompts`."""
        return self.after_prompts([context], [continuations], rows)[0]

    def after_prompts(
        self,
        contexts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[Sequence[int]]],
        rows: int = 64,
    ) -> list[list[TokenScores]]:
        """Reads contexts, evicts, and scores each one's continuations on what is left of it.

        A context is read up to its last token, then evicted; the last token is read again with
        the continuation, so that the first token of a continuation is predicted from the evicted
        cache too. A continuation is one block (of at most ``prefill_chunk`` tokens).
        """
        if not self.takes_padding and len(contexts) > 1:
            pairs = zip(contexts, continuations, strict=True)
            return [self.after_prompt(context, own, rows) for context, own in pairs]
        keys = [
            (tuple(context), tuple(map(tuple, own)))
            for context, own in zip(contexts, continuations, strict=True)
        ]
        new = list({key: n for n, key in enumerate(keys) if key not in self._known}.values())
        long = [index for index in new if len(contexts[index]) > 1]
        short = [index for index in new if len(contexts[index]) == 1]
        # A context of one token leaves nothing to evict before its continuation.
        for members in (long, short):
            if not members:
                continue
            caches, seen = self._read([contexts[index][:-1] for index in members])
            for scorer, cache in zip(self.group, caches, strict=True):
                found = scorer._continue(cache, seen, [keys[index] for index in members], rows)
                scorer._known.update(found)
        results = [self._known[key] for key in keys]
        if len(self.group) == 1:
            self._known.clear()
        return results

    def _continue(
        self, cache: H2OCache, seen: torch.Tensor, keys: Sequence[_Key], rows: int
    ) -> dict[_Key, list[TokenScores]]:
        """Scores continuations of the contexts that a cache has read, so many at a time."""
        results: dict[_Key, list[TokenScores]] = {key: [] for key in keys}
        jobs = [(row, key, own) for row, key in enumerate(keys) for own in key[1]]
        step = rows if self.takes_padding else 1
        for start in range(0, len(jobs), step):
            part = jobs[start : start + step]
            is_last = start + step >= len(jobs)
            branch, mask = self._branch(cache, seen, [row for row, *_ in part], is_last)
            texts = [[key[0][-1], *own] for _, key, own in part]
            scores = self._score(texts, [len(text) - 1 for text in texts], branch, mask)
            for (_, key, _), score in zip(part, scores, strict=True):
                results[key].append(score)
        return results

    def whole(
        self, texts: Sequence[Sequence[int]], counts: Sequence[int] | None = None
    ) -> list[TokenScores]:
        """Scores the last tokens of texts that are evicted from their first block on.

        One forward each: the layers cut the text into blocks of ``prefill_chunk`` tokens
        themselves, attending and evicting as they go. The budget is of the tokens read, all but
        the text's last one, which nothing follows.
        """
        counts = [len(text) - 1 for text in texts] if counts is None else counts
        if not self.takes_padding and len(texts) > 1:
            pairs = zip(texts, counts, strict=True)
            return [self.whole([text], [count])[0] for text, count in pairs]
        return self._score(texts, counts, self._cache(), None)

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Reads texts without padding in one forward, on an empty cache.

        Args:
            input_ids: int ``[B, T]``.

        Returns:
            ``[B, T, V]`` in the model's dtype.
        """
        cache = self._cache()
        with _enabled(self.model, cache), torch.no_grad():
            return self.model(input_ids.to(self.model.device), past_key_values=cache).logits

    def _cache(self) -> H2OCache:
        return make_cache(self.config, self.model.config, self.config.seed)

    def _read(self, contexts: Sequence[Sequence[int]]) -> tuple[list[H2OCache], torch.Tensor]:
        """Reads contexts onto empty caches of the group; with them, the mask ``[B, tokens]``."""
        caches = [scorer._cache() for scorer in self.group]
        together = caches[0] if len(caches) == 1 else SharedPrefill(caches)
        input_ids, mask = self._padded(contexts)
        if input_ids.shape[1]:
            with _enabled(self.model, together), torch.no_grad():
                self.model(
                    input_ids,
                    attention_mask=mask,
                    position_ids=_positions(mask),
                    past_key_values=together,
                    logits_to_keep=1,
                )
            if isinstance(together, SharedPrefill):
                together.split()
        return caches, mask

    def _branch(
        self, cache: H2OCache, mask: torch.Tensor, rows: list[int], is_last: bool
    ) -> tuple[H2OCache, torch.Tensor]:
        """A cache whose rows go on from the named ones, and their mask."""
        branch = cache if is_last else cache.fork(1)
        if mask.shape[1] and rows != list(range(mask.shape[0])):
            branch.batch_select_indices(torch.tensor(rows, device=mask.device))
        return branch, mask[rows]

    def _score(
        self,
        texts: Sequence[Sequence[int]],
        counts: Sequence[int],
        cache: H2OCache,
        seen: torch.Tensor | None,
    ) -> list[TokenScores]:
        """One forward over texts without their last tokens, and what it says of the last ones."""
        input_ids, mask = self._padded([text[:-1] for text in texts])
        length = input_ids.shape[1]
        if seen is not None:
            mask = torch.cat([seen, mask], dim=1)
        with warnings.catch_warnings(), _enabled(self.model, cache), torch.no_grad():
            # What follows a context is not of the prompt that fractions are taken of.
            warnings.filterwarnings("ignore", ".*fractions were taken of the first forward")
            logits = self.model(
                input_ids,
                attention_mask=mask,
                position_ids=_positions(mask)[:, -length:],
                past_key_values=cache,
                logits_to_keep=max(counts),
            ).logits
        scores = []
        for row, text, count in zip(logits, texts, counts, strict=True):
            predicted = row[-count:].log_softmax(dim=-1, dtype=self.dtype)
            given = torch.tensor(text[-count:], device=predicted.device)
            log_probs = predicted.gather(1, given.unsqueeze(1)).squeeze(1)
            scores.append(TokenScores(log_probs.cpu(), (predicted.argmax(-1) == given).cpu()))
        return scores

    def _padded(self, texts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Texts with padding on their left, and the mask; int64 ``[B, T]`` each."""
        input_ids, mask = left_padded(texts)
        return input_ids.to(self.model.device), mask.to(self.model.device)


class EvictingModel:
    """What a harness calls in the place of a model: ``generate``, and a forward for scores.

    Args:
        model: A loaded model; gets H2O attention.
        config: The cache of ``generate``, with the budget of the prompt.

    Raises:
        ValueError: If the model is not supported, or the cache makes no sense for it.
    """

    def __init__(self, model: PreTrainedModel, config: CacheConfig) -> None:
        prepare_model(model)
        self.model: Any = model
        self.config = config
        self._scorer: Scorer | None = None

    def generate(self, **inputs: Any) -> Any:
        """Generates on a new cache; see `transformers.GenerationMixin.generate`."""
        cache = make_cache(self.config, self.model.config, self.config.seed)
        with enable(self.model) if cache.needs_enabling else nullcontext():
            return self.model.generate(past_key_values=cache, **inputs)

    def __call__(self, input_ids: torch.Tensor) -> SimpleNamespace:
        """Logits ``[B, T, V]`` of whole texts ``[B, T]`` without padding, evicting as it goes."""
        if self._scorer is None:
            # A text in one block would not be evicted before its scores are made: it is read by
            # one token at a time, unless the user has larger blocks.
            whole = replace(self.config, prefill_chunk=self.config.prefill_chunk or 1)
            self._scorer = Scorer(self.model, whole)
        return SimpleNamespace(logits=self._scorer.logits(input_ids))


def prepare_model(model: PreTrainedModel) -> None:
    """Gives a supported model H2O attention, and takes back a cache that its checkpoint wants."""
    check_model(model)
    model.set_attn_implementation(ATTENTION_NAME)
    if model.generation_config is not None:
        model.generation_config.cache_implementation = None


def batches(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Puts texts of like lengths together, the longest first, so that memory ends early."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """Places of the tokens in their own texts, int64 ``[B, T]``; 0 for padding."""
    return (mask.cumsum(dim=1) - 1).clamp(min=0)


def _enabled(
    model: PreTrainedModel, cache: H2OCache
) -> AbstractContextManager[PreTrainedModel | None]:
    """H2O attention for one forward, where the model does not have it already."""
    if model.config._attn_implementation == ATTENTION_NAME and not cache.needs_enabling:
        return nullcontext()
    return enable(model)
