"""A real trained Llama tells its published story through the H2O cache."""

import pytest
import torch
from oracle import cache_of
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def storyteller(shared):
    path = shared / "data" / "models" / "stories260K-hf"
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="h2o")
    text = (path / "golden_greedy_256.txt").read_text(encoding="utf-8")
    return model, AutoTokenizer.from_pretrained(path), text


def tell(model, tokenizer, **budget):
    cache = cache_of(model.config, **budget)
    start = torch.tensor([[tokenizer.bos_token_id]])
    output = model.generate(
        start,
        attention_mask=torch.ones_like(start),
        past_key_values=cache,
        max_new_tokens=256,
        do_sample=False,
    )
    cache.check_integrity()
    return tokenizer.decode(output[0], skip_special_tokens=True), cache


@pytest.mark.parametrize("masks", [False, True])
def test_tells_the_published_story_with_the_whole_cache(storyteller, masks):
    model, tokenizer, story = storyteller
    text, cache = tell(model, tokenizer, heavy=128, recent=128, masks=masks)
    assert text.strip() == story.strip()
    assert cache.num_cached_tokens == cache.num_seen_tokens


def test_tells_a_story_with_a_small_cache(storyteller):
    model, tokenizer, story = storyteller
    text, cache = tell(model, tokenizer, heavy=16, recent=16)
    assert cache.num_cached_tokens == 32
    assert text[:80].strip() == story[:80].strip()  # up to 32 tokens nothing is evicted
