"""Answers to prompts with one cache setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor

import h2okv
from h2okv.engine.sampler import RefuseNaN, SeededSampling, eos_token_ids
from h2okv.engine.sampling_params import SamplingParams
from h2okv.evaluation.cache_setting import CacheSetting, Subject
from h2okv.evaluation.decoding import Decoding, text_before


@dataclass(frozen=True)
class Prompt:
    """What a model shall go on from.

    Attributes:
        ids: Its tokens.
        max_new_tokens: The most tokens of the answer.
        stops: Strings that end it and do not belong to it.
        seed: Where its random numbers start.
    """

    ids: Sequence[int]
    max_new_tokens: int
    stops: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """What a model wrote.

    Attributes:
        text: Up to the first stop string, special tokens left out.
        tokens: How many it took, those of the stop string included.
    """

    text: str
    tokens: int


def answer_batch(
    subject: Subject,
    setting: CacheSetting,
    prompts: Sequence[Prompt],
    decoding: Decoding,
    seed: int = 0,
) -> list[Answer]:
    """Answers prompts in one left-padded batch; each row gets what it would get alone."""
    longest = max(len(prompt.ids) for prompt in prompts)
    rows = [[subject.pad_token_id] * (longest - len(p.ids)) + list(p.ids) for p in prompts]
    mask = [[0] * (longest - len(p.ids)) + [1] * len(p.ids) for p in prompts]
    cache = setting.make(subject.config, seed)
    options: dict[str, Any] = {}
    if cache.prefill_chunk is not None and len({len(p.ids) for p in prompts}) == 1:
        # Without padding the model too reads no more than a block at a time.
        cache.expect(longest)
        options["prefill_chunk_size"] = cache.prefill_chunk
    with h2okv.enable(subject.model):
        return _generate(
            subject, cache, torch.tensor(rows), torch.tensor(mask), prompts, decoding, options
        )


def answer_question(
    subject: Subject,
    setting: CacheSetting,
    context: Sequence[int],
    prompt: Prompt,
    known: bool,
    seed: int = 0,
) -> Answer:
    """Answers a question about a context, known or not known while the cache is compressed.

    Known: the question is read in one block with the context (but for its last token, so that the
    whole answer comes from the compressed cache). Not known: the context is read and evicted from
    first, as where one context serves many questions. With blocks of ``prefill_chunk`` tokens the
    question is known to the last block only. A budget in fractions is of context and question, but
    of what is read first for a policy that evicts once, after the prompt.
    """
    ids = torch.tensor([[*context, *prompt.ids]])
    length = ids.shape[1]
    cache = setting.make(subject.config, seed)
    if not cache.policy.prompt_only:  # such a policy takes what it reads first for the whole
        cache.expect(length)
    first = length - 1 if known else len(context)
    with h2okv.enable(subject.model):
        for start, end in ((0, first), (first, length - 1)):
            if end > start:
                h2okv.prefill(subject.model, ids[:, start:end], cache)
        return _generate(subject, cache, ids, torch.ones_like(ids), [prompt], Decoding(), {})[0]


def _generate(
    subject: Subject,
    cache: h2okv.H2OCache,
    ids: torch.Tensor,
    mask: torch.Tensor,
    prompts: Sequence[Prompt],
    decoding: Decoding,
    options: dict[str, Any],
) -> list[Answer]:
    """Generates from ``ids [B, T]``, of which the cache may hold the beginning."""
    model = subject.model
    processors: list[LogitsProcessor] = [RefuseNaN()]
    if decoding.temperature > 0:
        processors.append(
            SeededSampling(
                [
                    SamplingParams(
                        temperature=decoding.temperature, top_p=decoding.top_p, seed=prompt.seed
                    )
                    for prompt in prompts
                ]
            )
        )
    stops = prompts[0].stops
    if stops:
        options = {**options, "stop_strings": list(stops), "tokenizer": subject.tokenizer}
    generate: Any = model.generate  # its type gets lost on the way through torch's Module
    written = generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        past_key_values=cache,
        max_new_tokens=max(prompt.max_new_tokens for prompt in prompts),
        do_sample=False,
        num_beams=1,
        logits_processor=processors,
        pad_token_id=subject.pad_token_id,
        **options,
    )
    new = written[:, ids.shape[1] :].tolist()
    return [_answer(subject, row, p) for row, p in zip(new, prompts, strict=True)]


def _answer(subject: Subject, ids: list[int], prompt: Prompt) -> Answer:
    ids = ids[: prompt.max_new_tokens]
    ends = eos_token_ids(subject.model)
    end = next((place for place, token in enumerate(ids) if token in ends), None)
    if end is not None:
        ids = ids[: end + 1]
    else:
        # After a stop string a row is padded until the last row has ended.
        while ids and ids[-1] == subject.pad_token_id:
            ids.pop()
    return Answer(text_before(subject.decode(ids), prompt.stops), len(ids))
