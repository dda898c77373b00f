"""Answers to prompts and to questions about a context, with one cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor

import h2okv
from h2okv.config import CacheConfig
from h2okv.engine.sampler import PenaltyOfText, RefuseNaN, SeededSampling, eos_token_ids
from h2okv.engine.sampling_params import SamplingParams
from h2okv.evaluation.model import ModelUnderTest, make_cache
from h2okv.evaluation.shared_prefill import read_together


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt with the way it is answered.

    Attributes:
        ids: Its tokens.
        params: With ``max_tokens``, and a seed where tokens are drawn; in a batch, all have the
            same sampling options and stop strings.
    """

    ids: Sequence[int]
    params: SamplingParams

    @property
    def max_new_tokens(self) -> int:
        """The most tokens of the answer."""
        assert self.params.max_tokens is not None
        return self.params.max_tokens


@dataclass(frozen=True)
class Answer:
    """What a model wrote.

    Attributes:
        text: Up to the first stop string, special tokens left out.
        tokens: How many it took, those of the stop string included.
    """

    text: str
    tokens: int


def left_padded(
    texts: Sequence[Sequence[int]], padding: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts as one batch, padded on their left, and its mask; int64 ``[B, T]`` each."""
    rows = [torch.tensor(list(text), dtype=torch.int64) for text in texts]
    ids = pad_sequence(rows, batch_first=True, padding_value=padding, padding_side="left")
    ones = [torch.ones_like(row) for row in rows]
    return ids, pad_sequence(ones, batch_first=True, padding_side="left")


def answer_batch(
    model: ModelUnderTest, config: CacheConfig, prompts: Sequence[Prompt], seed: int = 0
) -> list[Answer]:
    """Answers prompts in one left-padded batch; each gets what it would get alone."""
    ids, mask = left_padded([prompt.ids for prompt in prompts], model.pad_token_id)
    cache = make_cache(config, model.config, seed)
    options: dict[str, Any] = {}
    if cache.prefill_chunk is not None and bool(mask.all()):
        # Without padding the model too reads no more than a block at a time.
        cache.expect(ids.shape[1])
        options["prefill_chunk_size"] = cache.prefill_chunk
    with h2okv.enable(model.model):
        return _generate(model, cache, ids, mask, prompts, options)


def answer_question(
    model: ModelUnderTest,
    configs: Sequence[CacheConfig],
    context: Sequence[int],
    question: Prompt,
    query_aware: bool,
    seed: int = 0,
) -> list[Answer]:
    """Answers a question about a context with several caches, each compressing it for itself.

    Query-aware: the question is read in one block with the context (but for its last token, so
    that the whole answer comes from the compressed cache). Query-agnostic: the context is read and
    evicted from first, as where one context serves many questions. With blocks of
    ``prefill_chunk`` tokens only the last block knows the question. A budget in fractions is of
    context and question, but of what is read first for a policy that evicts once, after the prompt.
    """
    ids = torch.tensor([[*context, *question.ids]])
    length = ids.shape[1]
    first = length - 1 if query_aware else len(context)
    caches = [make_cache(config, model.config, seed) for config in configs]
    for cache in caches:
        if not cache.policy.prompt_only:  # such a policy takes what it reads first for the whole
            cache.expect(length)
    with h2okv.enable(model.model):
        read_together(model.model, ids[:, :first], caches)
        answers = []
        for cache in caches:
            if length - 1 > first:
                h2okv.prefill(model.model, ids[:, first : length - 1], cache)
            answers += _generate(model, cache, ids, torch.ones_like(ids), [question], {})
    return answers


def _generate(
    subject: ModelUnderTest,
    cache: h2okv.H2OCache,
    ids: torch.Tensor,
    mask: torch.Tensor,
    prompts: Sequence[Prompt],
    options: dict[str, Any],
) -> list[Answer]:
    """Generates from ``ids [B, T]``, of which the cache may hold the beginning."""
    model, params = subject.model, prompts[0].params
    processors: list[LogitsProcessor] = [RefuseNaN()]
    if params.repetition_penalty != 1:
        processors.append(PenaltyOfText(params.repetition_penalty, mask))
    if not params.is_greedy:
        processors.append(SeededSampling([prompt.params for prompt in prompts]))
    if params.stop:
        options = {**options, "stop_strings": list(params.stop), "tokenizer": subject.tokenizer}
    generate: Any = model.generate  # its type gets lost on the way through torch's Module
    written = generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        past_key_values=cache,
        max_new_tokens=max(prompt.max_new_tokens for prompt in prompts),
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,  # of the model's own config
        logits_processor=processors,
        pad_token_id=subject.pad_token_id,
        **options,
    )
    new = written[:, ids.shape[1] :].tolist()
    return [_answer(subject, row, prompt) for row, prompt in zip(new, prompts, strict=True)]


def _answer(subject: ModelUnderTest, ids: list[int], prompt: Prompt) -> Answer:
    ids = ids[: prompt.max_new_tokens]
    ends = eos_token_ids(subject.model)
    end = next((place for place, token in enumerate(ids) if token in ends), None)
    if end is not None:
        ids = ids[: end + 1]
    else:
        # After a stop string a sequence is padded until the last one has ended.
        while ids and ids[-1] == subject.pad_token_id:
            ids.pop()
    return Answer(text_before(subject.decode(ids), prompt.params.stop), len(ids))


def text_before(text: str, stops: Sequence[str]) -> str:
    """Cuts a text where the first of some strings begins."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
