"""The model under test, its caches, and its answers to prompts and questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
)

import h2okv
from h2okv.cache import CACHE, H2OCache
from h2okv.cache.shared import SharedPrefill, shares_prompt
from h2okv.cache.support import config_of, context_window
from h2okv.calibration.layer_budgets import with_measured_budgets
from h2okv.config import MEASURED, CacheConfig
from h2okv.engine.detokenizer import SequenceText
from h2okv.engine.model_runner import left_padded
from h2okv.engine.sampler import RefuseNaN, SeededSampling, eos_token_ids
from h2okv.engine.sampling_params import SamplingParams
from h2okv.integration.enable import input_device
from h2okv.policy import Sees
from h2okv.prompts.chat_template import encode
from h2okv.provenance import fingerprint
from h2okv_lab.masking import PER_QUERY, MaskedCache

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
    first, results = _Answers(model, prompts), []
    with h2okv.enable(model.model):
        if sharing:  # the first token does not depend on the cache
            shared = SharedPrefill(sharing)
            _generate(model, shared, prompts, first, 1)
            shared.split()
        for cache in caches:
            answers = _Answers(model, prompts)
            if cache in sharing:
                answers.add([tokens[0] for tokens in first.tokens])
            _generate(model, cache, prompts, answers)
            results.append(answers.finish())
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
        if cache.rule.sees is not Sees.WINDOW:  # such a rule takes the first forward for the prompt
            cache.expect(last + 1)
    results = []
    with h2okv.enable(model.model):
        read_together(model.model, ids[:, :first], caches)
        for cache in caches:
            if last > first:
                mask = torch.ones_like(ids[:, :last])  # also of tokens that may be padding
                h2okv.prefill(model.model, ids[:, first:last], cache, mask)
            answers = _Answers(model, [prompt])
            _generate(model, cache, [prompt], answers)
            results += answers.finish()
    return results


class _Answers(StoppingCriteria):
    """The answers to a batch of prompts; as a criterion of ``generate`` it ends each of them."""

    def __init__(self, subject: ModelUnderTest, prompts: Sequence[Prompt]) -> None:
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.ended = [False] * len(prompts)
        self.limits = [prompt.params.max_tokens or 1 for prompt in prompts]
        self._end_ids = eos_token_ids(subject.model)
        tokenizer = subject.tokenizer
        self._texts = [SequenceText(tokenizer, (), prompt.params.stop) for prompt in prompts]

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        """Add the last of ``input_ids [B, T]``; return which answers have ended."""
        self.add(input_ids[:, -1].tolist())
        return torch.tensor(self.ended, device=input_ids.device)

    def add(self, tokens: Sequence[int]) -> None:
        """Add a token to each answer that has not ended."""
        for number, token in enumerate(tokens):
            if self.ended[number]:
                continue
            answer = self.tokens[number]
            answer.append(token)
            is_end = token in self._end_ids or self._texts[number].add(token)
            self.ended[number] = is_end or len(answer) >= self.limits[number]

    def finish(self) -> list[Answer]:
        """Return the texts, up to their first stop strings."""
        pairs = zip(self._texts, self.tokens, strict=True)
        return [Answer(text.end(), len(tokens)) for text, tokens in pairs]


def _generate(
    subject: ModelUnderTest,
    cache: H2OCache,
    prompts: Sequence[Prompt],
    answers: _Answers,
    limit: int | None = None,
) -> None:
    """Continue answers, by at most ``limit`` tokens; the cache may hold a prompt's beginning."""
    if all(answers.ended):
        return
    model, params = subject.model, prompts[0].params
    pairs = list(zip(prompts, answers.tokens, strict=True))
    ids, mask = left_padded([[*p.ids, *tokens] for p, tokens in pairs], input_device(model))
    chunk = cache.read_chunk if bool(mask.all()) and not cache.num_seen_tokens else None
    if chunk is not None:  # without padding the model reads the prompt in blocks too
        cache.expect(ids.shape[1])
    processors: list[LogitsProcessor] = [RefuseNaN()]
    if not params.is_greedy:
        processors.append(SeededSampling([prompt.params for prompt in prompts]))
    generate: Any = model.generate  # torch's Module loses its type
    generate(
        input_ids=ids,
        attention_mask=mask,
        **{CACHE: cache},
        max_new_tokens=limit or max(answers.limits) - len(answers.tokens[0]),
        do_sample=False,
        num_beams=1,
        repetition_penalty=params.repetition_penalty,
        logits_processor=processors,
        pad_token_id=subject.pad_token_id,
        stopping_criteria=[answers],
        prefill_chunk_size=chunk,
    )


def read_together(model: PreTrainedModel, input_ids: Tensor, caches: Sequence[H2OCache]) -> None:
    """Read a prompt ``[B, T]`` without padding onto empty caches, once for all that can share."""
    mask = torch.ones_like(input_ids)
    sharing = [cache for cache in caches if shares_prompt(cache.cache_config)]
    if len(sharing) > 1:
        shared = SharedPrefill(sharing)
        h2okv.prefill(model, input_ids, shared, mask)
        shared.split()
    for cache in caches:
        if not cache.num_seen_tokens:
            h2okv.prefill(model, input_ids, cache, mask)
