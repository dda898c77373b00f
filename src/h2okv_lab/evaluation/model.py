"""The model under test, its caches, and its answers to prompts and questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import h2okv
from h2okv.cache import H2OCache
from h2okv.cache.support import config_of, context_window
from h2okv.calibration.layer_budgets import with_measured_budgets
from h2okv.config import MEASURED, CacheConfig
from h2okv.engine.cache_engine import CacheEngine
from h2okv.engine.detokenizer import SequenceText
from h2okv.engine.request import PromptStart, Request
from h2okv.engine.sampler import eos_token_ids
from h2okv.engine.sampling_params import SamplingParams
from h2okv.policy import Inputs
from h2okv.prompts.chat_template import encode
from h2okv.provenance import fingerprint
from h2okv_lab.masking import PER_QUERY, MaskedCache
from h2okv_lab.shared import SharedPrefill, read_together, shares_prompt

_ROLLING_SPAN = 64


def resolve_config(config: CacheConfig, model_config: PreTrainedConfig) -> CacheConfig:
    """Return the config to build a cache from; rolling positions get cuts."""
    if config.is_full:
        return CacheConfig.from_dict(config.identity())
    if config.positions != "rolling":
        return config
    window = context_window(model_config) or 4 * _ROLLING_SPAN
    return config.with_cuts(max(1, min(_ROLLING_SPAN, window // 4)))


def make_cache(
    config: CacheConfig, model: PreTrainedModel | PreTrainedConfig, seed: int = 0
) -> H2OCache:
    """Make an empty cache; masked instead of evicting if each query chooses its own entries."""
    # An entry cannot be dropped while another query may still choose it.
    kind = MaskedCache if config.policy in PER_QUERY else H2OCache
    resolved = resolve_config(config, config_of(model)).seeded(seed)
    return kind.from_config(model, resolved)


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

    def measured(self, config: CacheConfig) -> CacheConfig:
        """Return a config with the model's layer budgets, if they are to be measured."""
        if config.layer_budgets != MEASURED:
            return config  # without loading the model
        return with_measured_budgets(config, self.model, self)

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
            return resolved.past_window(resolved.entries(tokens), resolved.chunk or tokens, trained)
        if self.window is None or tokens <= self.window or resolved.positions == "clamped":
            return None
        if resolved.chunk is not None and not has_learned_positions(self.config):
            return None  # requested: the text continues past the window, in blocks
        remedy = "use a cache of fixed size with --cache positions=rolling"
        if not resolved.is_full:
            remedy = "add --cache positions=rolling,every=64"
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
    model: ModelUnderTest, configs: Sequence[CacheConfig], prompts: Sequence[Prompt], seed: int = 0
) -> list[list[Answer]]:
    """Answer prompts with several caches, in one left-padded batch each.

    Each answer equals that of its prompt alone with that cache. With greedy decoding the prompts
    are read once for all caches that can share them.
    """
    caches = [make_cache(config, model.model, seed) for config in configs]
    sharing = [cache for cache in caches if shares_prompt(cache.cache_config)]
    if len(sharing) == 1 or not prompts[0].params.is_greedy:
        sharing = []
    begin, results = partial(CacheEngine, model.model, model.tokenizer, size=len(prompts)), []
    with h2okv.enable(model.model):
        if sharing:  # the first token does not depend on the cache
            shared = SharedPrefill(sharing)
            begin(shared).run(first := _requests(prompts, limit=1))
            shared.split()
        for cache in caches:
            engine, requests = begin(cache), _requests(prompts)
            if cache in sharing:
                engine.resume(requests, [request.outputs[0].tokens[0] for request in first])
            engine.run(requests)
            results.append(_answers(model, requests))
    return results


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
    caches = [make_cache(config, model.model, seed) for config in configs]
    for cache in caches:
        if cache.rule.inputs is not Inputs.WINDOW:  # which takes the first forward for the prompt
            cache.expect(last + 1)
    results = []
    with h2okv.enable(model.model):
        mask = torch.ones_like(ids[:, :last])  # also of tokens that may be padding
        prefill = partial(h2okv.prefill, model.model, ids[:, :first])
        read_together(caches, lambda cache: prefill(cache, mask[:, :first]))
        for cache in caches:
            if last > first:
                h2okv.prefill(model.model, ids[:, first:last], cache, mask)
            requests = _requests([prompt], seen=last)
            CacheEngine(model.model, model.tokenizer, cache).run(requests)
            results += _answers(model, requests)
    return results


def _requests(prompts: Sequence[Prompt], limit: int | None = None, seen: int = 0) -> list[Request]:
    """Make requests of at most `limit` tokens, of whose prompts a cache has seen some."""
    return [
        Request(
            tuple(ids),
            params,
            limit or params.max_tokens or 1,
            PromptStart(len(ids), num_reused=seen),
            lambda event: None,
        )
        for ids, params in prompts
    ]


def _answers(subject: ModelUnderTest, requests: Sequence[Request]) -> list[Answer]:
    """Return the texts of finished requests, decoded without their prompts."""
    answers, ends = [], eos_token_ids(subject.model)
    for request in requests:
        text = SequenceText(subject.tokenizer, (), request.params.stop)
        tokens = request.outputs[0].tokens
        for token in tokens:
            if token not in ends:
                text.add(token)
        answers.append(Answer(text.end(), len(tokens)))
    return answers
