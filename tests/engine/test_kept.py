"""Reports of the tokens that a cache still holds (`kept_every`)."""

import asyncio

import pytest

import h2okv
from h2okv.engine.model_runner import count_kept

NEW = 12


def kept_alone(model, alone, prompt):
    cache = h2okv.H2OCache(model.config, heavy=0.2, recent=0.2, min_tokens=0)
    alone(model, prompt, NEW, cache)
    positions = [cache.kept_positions(layer)[0] for layer in range(len(cache.layers))]
    return count_kept(positions, cache.num_seen_tokens), cache


def test_kept_tokens_equal_those_of_a_single_cache(
    make_llama, tokenizer, make_prompts, alone, greedy
):
    model = make_llama()
    prompts = make_prompts([20, 44, 31, 9])
    llm = h2okv.AsyncLLM(model, tokenizer, heavy=0.2, recent=0.2, min_tokens=0, max_num_seqs=3)

    async def reports(prompt, every):
        pieces = llm.generate(prompt, greedy(NEW), kept_every=every)
        return [piece.kept async for piece in pieces]

    async def main():
        tasks = [
            reports(prompt, every) for prompt, every in zip(prompts, (1, 5, 99, None), strict=True)
        ]
        results = await asyncio.gather(*tasks)
        await llm.aclose()
        return results

    results = asyncio.run(main())
    reported = [
        [at for at, report in enumerate(result) if report is not None] for result in results
    ]
    # The first token comes from the prefill, before the sequence is in the pool.
    assert reported == [[*range(1, NEW)], [1, 6, 11], [1, 11], []]
    for prompt, result in zip(prompts[:3], results[:3], strict=True):
        expected, cache = kept_alone(model, alone, prompt)
        last = result[-1]
        assert list(last.counts) == expected and len(expected) == len(prompt) + NEW - 1
        assert last.num_heads == max(expected) and 0 in expected
        assert last.full_bytes == cache.full_nbytes > last.cache_bytes
        per_entry = last.cache_bytes / sum(last.counts)
        assert per_entry == cache.full_nbytes / (last.num_heads * len(expected)) + 8


def test_kept_every_zero_raises(make_llm, make_llama):
    with pytest.raises(ValueError, match="kept_every must be a whole number of 1 or more, got 0"):
        make_llm(make_llama()).engine.request([5], h2okv.SamplingParams(), print, kept_every=0)
