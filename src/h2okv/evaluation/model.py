"""The model under test, its caches, and its answers to prompts and questions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StopStringCriteria,
)

import h2okv
from h2okv.cache import H2OCache
from h2okv.cache.argument import CACHE
from h2okv.cache.shared import SharedPrefill, shares_prompt
from h2okv.cache.support import context_window
from h2okv.config import CacheConfig
from h2okv.engine.model_runner import left_padded
from h2okv.engine.sampler import RefuseNaN, SeededSampling, eos_token_ids
from h2okv.engine.sampling_params import SamplingParams
from h2okv.integration.chat_template import encode
from h2okv.integration.enable import input_device
from h2okv.policy import Sees, get_rule
from h2okv.provenance import fingerprint

_ROLLING_BLOCK = 512


def resolve_config(config: CacheConfig, model_config: PreTrainedConfig) -> CacheConfig:
    """Return the config to build a cache from; rolling positions get a block size."""
    if config.is_full:
        return CacheConfig(**config.identity())
    if config.prefill_chunk is not None or config.positions != "rolling":
        return config
    window = context_window(model_config) or 4 * _ROLLING_BLOCK
    return replace(config, prefill_chunk=max(1, min(_ROLLING_BLOCK, window // 4)))


def make_cache(config: CacheConfig, model_config: PreTrainedConfig, seed: int = 0) -> H2OCache:
    """Make an empty cache; masked instead of evicting if each query chooses its own entries."""
    # An entry cannot be dropped while another query may still choose it.
    simulate = get_rule(config.policy).sees is Sees.EACH_QUERY
    resolved = resolve_config(config, model_config).seeded(seed)
    return H2OCache.from_config(model_config, resolved, simulate=simulate)


@dataclass(eq=False)
class ModelUnderTest:
    """A model with its tokenizer; its weights are loaded when they are first needed."""

    load: Callable[[], PreTrainedModel]  # loads the weights, ready to generate
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    name: str  # as the user gave it
    window: int | None  # max tokens at their original positions; None for no fixed limit

    @cached_property
    def model(self) -> PreTrainedModel:
        return self.load()

    @property
    def pad_token_id(self) -> int:
        """The token that pads a batch on its left; always masked, so any token will do."""
        token_id = self.tokenizer.pad_token_id
        return int((self.tokenizer.eos_token_id or 0) if token_id is None else token_id)

    def encode(self, prompt: str | Sequence[Mapping[str, str]], special: bool = True) -> list[int]:
        return encode(self.tokenizer, prompt, self.config.get_text_config().vocab_size, special)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def identity(self) -> dict[str, str]:
        revision = getattr(self.model.config, "_commit_hash", None)
        if revision is None:
            weights = fingerprint(self.model)
            revision = "" if weights is None else f"weights-{weights[:12]}"
        dtype = str(self.model.dtype).removeprefix("torch.")
        return {"model": self.name, "revision": revision, "dtype": dtype}

    def too_long(self, config: CacheConfig, tokens: int) -> str | None:
        """Return why a cache cannot take this number of tokens; ``None`` if it can."""
        trained = context_window(self.config)
        resolved = resolve_config(config, self.config)
        if resolved.positions == "rolling":
            if trained is None or tokens <= trained:
                return None
            return resolved.past_window(
                resolved.entries(tokens), resolved.prefill_chunk or tokens, trained
            )
        if self.window is None or tokens <= self.window or resolved.positions == "clamped":
            return None
        if resolved.prefill_chunk is not None and not has_learned_positions(self.config):
            return None  # requested: the text continues past the window, in blocks
        remedy = "use a cache of fixed size with --positions rolling"
        if not resolved.is_full:
            remedy = "add --positions rolling or --prefill-chunk 512"
        return f"that is more than the model's context window of {self.window}; {remedy}"


def has_learned_positions(config: PreTrainedConfig) -> bool:
    """Return whether positions end at the context window (learned ones do, rotary ones do not)."""
    is_rotary = bool(getattr(config.get_text_config(decoder=True), "rope_parameters", None))
    return not is_rotary and context_window(config) is not None


class Prompt(NamedTuple):
    """A tokenized prompt; in a batch, all have the same sampling options and stop strings."""

    ids: Sequence[int]
    params: SamplingParams


class Answer(NamedTuple):
    """A text up to its first stop string, and its length in tokens with that string."""

    text: str
    tokens: int


def answer_batch(
    model: ModelUnderTest,
    configs: Sequence[CacheConfig],
    prompts: Sequence[Prompt],
    seed: int = 0,
) -> list[list[Answer]]:
    """Answer prompts with several caches, in one left-padded batch each.

    Each answer equals that of its prompt alone with that cache. With greedy decoding the prompts
    are read once for all caches that can share them.
    """
    caches = [make_cache(config, model.config, seed) for config in configs]
    first: list[list[int]] = [[]] * len(prompts)
    sharing = [cache for cache in caches if shares_prompt(cache.cache_config)]
    if len(sharing) == 1 or not prompts[0].params.is_greedy:
        sharing = []
    with h2okv.enable(model.model):
        if sharing:  # the first token does not depend on the cache
            shared = SharedPrefill(sharing)
            first = _write(model, shared, prompts, 1)
            shared.split()
        return [
            _generate(model, cache, prompts, first if cache in sharing else None)
            for cache in caches
        ]


def answer_question(
    model: ModelUnderTest,
    configs: Sequence[CacheConfig],
    context: Sequence[int],
    question: Prompt,
    query_aware: bool,
    seed: int = 0,
) -> list[Answer]:
    """Answer a question about a context with several caches, each compressing it."""
    prompt = question._replace(ids=[*context, *question.ids])
    # The last token is read alone: then every token of the answer comes from the compressed cache.
    ids, last = torch.tensor([prompt.ids]), len(prompt.ids) - 1
    first = last if query_aware else len(context)
    caches = [make_cache(config, model.config, seed) for config in configs]
    for cache in caches:
        if cache.rule.sees is not Sees.WINDOW:  # such a rule takes the first forward for the prompt
            cache.expect(last + 1)
    answers = []
    with h2okv.enable(model.model):
        read_together(model.model, ids[:, :first], caches)
        for cache in caches:
            if last > first:
                h2okv.prefill(model.model, ids[:, first:last], cache)
            answers += _generate(model, cache, [prompt])
    return answers


def _generate(
    subject: ModelUnderTest,
    cache: H2OCache,
    prompts: Sequence[Prompt],
    first_tokens: Sequence[list[int]] | None = None,
) -> list[Answer]:
    """Generate from prompts whose beginning the cache may already contain.

    With ``first_tokens`` (of each answer) the cache contains the whole prompts.
    """
    limit = max(prompt.params.max_tokens or 1 for prompt in prompts)
    if first_tokens is None:
        written = _write(subject, cache, prompts, limit)
    else:
        extended = [
            prompt._replace(ids=[*prompt.ids, *ids])
            for prompt, ids in zip(prompts, first_tokens, strict=True)
        ]
        more = _write(subject, cache, extended, limit - 1) if limit > 1 else [[]] * len(prompts)
        written = [
            ids if _has_ended(subject, prompt) else [*ids, *continuation]
            for ids, continuation, prompt in zip(first_tokens, more, extended, strict=True)
        ]
    pairs = zip(written, prompts, strict=True)
    return [_answer(subject, tokens, prompt.params) for tokens, prompt in pairs]


def _write(
    subject: ModelUnderTest, cache: H2OCache, prompts: Sequence[Prompt], limit: int
) -> list[list[int]]:
    """Return up to ``limit`` new tokens of each prompt; shorter answers are padded."""
    model, params = subject.model, prompts[0].params
    ids, mask = left_padded([prompt.ids for prompt in prompts], input_device(model))
    chunk = cache.prefill_chunk if bool(mask.all()) and not cache.num_seen_tokens else None
    if chunk is not None:  # without padding the model reads the prompt in blocks too
        cache.expect(ids.shape[1])
    processors: list[LogitsProcessor] = [RefuseNaN()]
    if not params.is_greedy:
        processors.append(SeededSampling([prompt.params for prompt in prompts]))
    generate: Any = model.generate  # torch's Module loses its type
    written = generate(
        input_ids=ids,
        attention_mask=mask,
        **{CACHE: cache},
        max_new_tokens=limit,
        do_sample=False,
        num_beams=1,
        repetition_penalty=params.repetition_penalty,
        logits_processor=processors,
        pad_token_id=subject.pad_token_id,
        stop_strings=list(params.stop) or None,
        tokenizer=subject.tokenizer,
        prefill_chunk_size=chunk,
    )
    new: list[list[int]] = written[:, ids.shape[1] :].tolist()
    return new


def _has_ended(subject: ModelUnderTest, text: Prompt) -> bool:
    """Return whether `generate` would add nothing to a prompt and the start of its answer."""
    if text.ids[-1] in eos_token_ids(subject.model):
        return True
    if not text.params.stop:
        return False
    stops = StopStringCriteria(subject.tokenizer, list(text.params.stop))
    return bool(stops(torch.tensor([text.ids]), None))


def _answer(subject: ModelUnderTest, ids: list[int], params: SamplingParams) -> Answer:
    ids = ids[: params.max_tokens]
    ends = eos_token_ids(subject.model)
    end = next((index for index, token in enumerate(ids) if token in ends), None)
    if end is not None:
        ids = ids[: end + 1]
    text = subject.decode(ids)
    offsets = [offset for stop in params.stop if (offset := text.find(stop)) >= 0]
    if not offsets:
        return Answer(text, len(ids))

    def has_stop(count: int) -> bool:
        return any(stop in subject.decode(ids[:count]) for stop in params.stop)

    # A stop string is followed by padding until the last sequence has ended.
    return Answer(text[: min(offsets)], bisect_left(range(len(ids)), True, key=has_stop))


def read_together(model: PreTrainedModel, input_ids: Tensor, caches: Sequence[H2OCache]) -> None:
    """Read a prompt ``[B, T]`` without padding onto empty caches, once for all that can share."""
    sharing = [cache for cache in caches if shares_prompt(cache.cache_config)]
    if len(sharing) > 1:
        shared = SharedPrefill(sharing)
        h2okv.prefill(model, input_ids, shared)
        shared.split()
    for cache in caches:
        if not cache.num_seen_tokens:
            h2okv.prefill(model, input_ids, cache)
