"""What the engine tells of the entries that a cache still holds."""

import asyncio

import pytest

import h2okv
from h2okv.engine.model_runner import count_kept

NEW = 12


def kept_alone(model, alone, prompt):
    cache = h2okv.H2OCache(model.config, heavy=0.2, recent=0.2)
    alone(model, prompt, NEW, cache)
    places = [cache.kept_positions(layer)[0] for layer in range(len(cache.layers))]
    return count_kept(places, cache.num_seen_tokens), cache


def test_each_sequence_tells_what_its_own_cache_would_hold(
    make_llama, tokenizer, make_prompts, alone, greedy
):
    model = make_llama()
    prompts = make_prompts([20, 44, 31, 9])
    llm = h2okv.AsyncLLM(model, tokenizer, heavy=0.2, recent=0.2, max_num_seqs=3)

    async def told(prompt, every):
        pieces = llm.generate(prompt, greedy(NEW), kept_every=every)
        return [piece.kept async for piece in pieces]

    async def main():
        asked = [
            told(prompt, every) for prompt, every in zip(prompts, (1, 5, 99, None), strict=True)
        ]
        made = await asyncio.gather(*asked)
        await llm.aclose()
        return made

    made = asyncio.run(main())
    reported = [[at for at, kept in enumerate(one) if kept is not None] for one in made]
    # The first token comes of the prompt, before there is a place in the pool.
    assert reported == [[*range(1, NEW)], [1, 6, 11], [1, 11], []]
    for prompt, one in zip(prompts[:3], made[:3], strict=True):
        expected, cache = kept_alone(model, alone, prompt)
        last = one[-1]
        assert list(last.counts) == expected and len(expected) == len(prompt) + NEW - 1
        assert last.num_heads == max(expected) and 0 in expected
        assert last.full_bytes == cache.full_nbytes > last.cache_bytes
        per_entry = last.cache_bytes / sum(last.counts)
        assert per_entry == cache.full_nbytes / (last.num_heads * len(expected)) + 8


def test_a_rhythm_that_is_none(make_llm, make_llama):
    with pytest.raises(ValueError, match="kept_every=0 is out of range"):
        make_llm(make_llama()).engine.request([5], h2okv.SamplingParams(), print, kept_every=0)
