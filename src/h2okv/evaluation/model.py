"""The model under test, its caches, and its answers to prompts and questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import h2okv
from h2okv.cache import H2OCache
from h2okv.cache.validation import context_window
from h2okv.config import CacheConfig
from h2okv.engine.sampler import RefuseNaN, SeededSampling, eos_token_ids
from h2okv.engine.sampling_params import SamplingParams
from h2okv.evaluation.shared_prefill import read_together
from h2okv.integration.chat_template import encode
from h2okv.policy import get_policy
from h2okv.provenance import fingerprint

_ROLLING_BLOCK = 512


def settled(config: CacheConfig, model_config: PreTrainedConfig) -> CacheConfig:
    """What a cache is made with: a full one has few options, rolling positions need blocks."""
    if config.is_full:
        return CacheConfig(**config.identity())
    if config.prefill_chunk is not None or config.positions != "rolling":
        return config
    window = context_window(model_config) or 4 * _ROLLING_BLOCK
    return replace(config, prefill_chunk=max(1, min(_ROLLING_BLOCK, window // 4)))


def make_cache(config: CacheConfig, model_config: PreTrainedConfig, seed: int = 0) -> H2OCache:
    """Makes an empty cache; where each query chooses for itself, by masking."""
    # Nothing can be dropped that another query may choose.
    simulate = get_policy(config.policy).per_query
    own = settled(config, model_config).seeded(seed)
    return H2OCache.from_config(model_config, own, simulate=simulate)


@dataclass(eq=False)
class ModelUnderTest:
    """A model with its tokenizer; its weights are loaded when they are first needed."""

    load: Callable[[], PreTrainedModel]  # loads the weights, ready to generate
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    name: str  # what the user calls it
    window: int | None  # the most tokens at their original positions; None for no fixed limit

    @cached_property
    def model(self) -> PreTrainedModel:
        return self.load()

    @property
    def pad_token_id(self) -> int:
        """What fills the shorter sequences of a batch; masked, so that any token will do."""
        own = self.tokenizer.pad_token_id
        return int((self.tokenizer.eos_token_id or 0) if own is None else own)

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
        """Why the model cannot read and write so many tokens with a cache; ``None`` if it can."""
        trained = context_window(self.config)
        own = settled(config, self.config)
        if own.positions == "rolling":
            if trained is None or tokens <= trained:
                return None
            return own.past_window(own.entries(tokens), own.prefill_chunk or tokens, trained)
        if self.window is None or tokens <= self.window or own.positions == "clamped":
            return None
        if own.prefill_chunk is not None and not has_learned_positions(self.config):
            return None  # asked for: the text is read on past the window, in blocks
        remedy = "use a cache of fixed size with --positions rolling"
        if not own.is_full:
            remedy = "add --positions rolling or --prefill-chunk 512"
        return f"that is more than the model's context window of {self.window}; {remedy}"


def has_learned_positions(config: PreTrainedConfig) -> bool:
    """Whether there are no positions past the last one; rotary ones just go on."""
    is_rotary = bool(getattr(config.get_text_config(decoder=True), "rope_parameters", None))
    return not is_rotary and context_window(config) is not None


class Prompt(NamedTuple):
    """A tokenized prompt; in a batch, all have the same sampling options and stop strings."""

    ids: Sequence[int]
    params: SamplingParams


class Answer(NamedTuple):
    """A text up to its first stop string, and how many tokens it took, that string included."""

    text: str
    tokens: int


def left_padded(
    texts: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts as one batch, padded on their left, and its mask; int64 ``[B, T]`` each."""
    rows = [torch.tensor(list(text), dtype=torch.int64, device=device) for text in texts]
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    ones = [torch.ones_like(row) for row in rows]
    return ids, pad_sequence(ones, batch_first=True, padding_side="left")


def answer_batch(
    model: ModelUnderTest, config: CacheConfig, prompts: Sequence[Prompt], seed: int = 0
) -> list[Answer]:
    """Answers prompts in one left-padded batch; each gets what it would get alone."""
    with h2okv.enable(model.model):
        return _generate(model, make_cache(config, model.config, seed), prompts)


def answer_question(
    model: ModelUnderTest,
    configs: Sequence[CacheConfig],
    context: Sequence[int],
    question: Prompt,
    query_aware: bool,
    seed: int = 0,
) -> list[Answer]:
    """Answers a question about a context with several caches, each compressing it for itself."""
    whole = question._replace(ids=[*context, *question.ids])
    # The last token is read alone, so that the whole answer comes from the compressed cache.
    ids, last = torch.tensor([whole.ids]), len(whole.ids) - 1
    first = last if query_aware else len(context)
    caches = [make_cache(config, model.config, seed) for config in configs]
    for cache in caches:
        if not cache.policy.prompt_only:  # such a policy takes what it reads first for the whole
            cache.expect(last + 1)
    answers = []
    with h2okv.enable(model.model):
        read_together(model.model, ids[:, :first], caches)
        for cache in caches:
            if last > first:
                h2okv.prefill(model.model, ids[:, first:last], cache)
            answers += _generate(model, cache, [whole])
    return answers


def _generate(subject: ModelUnderTest, cache: H2OCache, prompts: Sequence[Prompt]) -> list[Answer]:
    """Generates from prompts, of which the cache may hold the beginning."""
    model, params = subject.model, prompts[0].params
    ids, mask = left_padded([prompt.ids for prompt in prompts], model.device)
    chunk = cache.prefill_chunk if bool(mask.all()) and not cache.num_seen_tokens else None
    if chunk is not None:  # without padding the model too reads no more than a block at a time
        cache.expect(ids.shape[1])
    # Padded with a token of the prompt's own, for a repetition penalty takes padding for text.
    ids = torch.where(mask.bool(), ids, ids[:, -1:])
    processors: list[LogitsProcessor] = [RefuseNaN()]
    if not params.is_greedy:
        processors.append(SeededSampling([prompt.params for prompt in prompts]))
    generate: Any = model.generate  # its type gets lost on the way through torch's Module
    written = generate(
        input_ids=ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=max(prompt.params.max_tokens or 1 for prompt in prompts),
        do_sample=False,
        num_beams=1,
        repetition_penalty=params.repetition_penalty,
        logits_processor=processors,
        pad_token_id=subject.pad_token_id,
        stop_strings=list(params.stop) or None,
        tokenizer=subject.tokenizer,
        prefill_chunk_size=chunk,
    )
    new = written[:, ids.shape[1] :].tolist()
    return [_answer(subject, tokens, own.params) for tokens, own in zip(new, prompts, strict=True)]


def _answer(subject: ModelUnderTest, ids: list[int], params: SamplingParams) -> Answer:
    ids = ids[: params.max_tokens]
    ends = eos_token_ids(subject.model)
    end = next((place for place, token in enumerate(ids) if token in ends), None)
    if end is not None:
        ids = ids[: end + 1]
    else:
        # After a stop string a sequence is padded until the last one has ended.
        while ids and ids[-1] == subject.pad_token_id:
            ids.pop()
    text = subject.decode(ids)
    first = min((at for stop in params.stop if (at := text.find(stop)) >= 0), default=len(text))
    return Answer(text[:first], len(ids))
