"""One request on a given cache of any kind equals transformers' ``generate`` with that cache."""

import pytest
import torch
from transformers import DynamicCache

import h2okv
from h2okv.cache import CACHE
from h2okv.engine.cache_engine import CacheEngine
from h2okv.engine.request import PromptStart, Request
from h2okv.engine.sampling_params import SamplingParams

BUDGET = {"heavy": 6, "recent": 4}
CACHES = [
    BUDGET,
    {"heavy": 0.2, "recent": 0.2, "min_tokens": 0},
    BUDGET | {"policy": "best", "layer_budgets": ((0.5, 1.5), (1.75, 0.25))},
    BUDGET | {"evict_every": 8},
    BUDGET | {"evict_every": "prompt+4", "kv_bits": 8},
    BUDGET | {"positions": "rolling", "evict_every": 8},
    {"policy": "snapkv", "heavy": 12, "recent": 4},
    {"policy": "full"},
    None,
]
SAMPLED = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01}


def make_cache(model, options):
    if options is None:
        return DynamicCache(config=model.config)
    return h2okv.H2OCache(model.config, **options)


def run(model, tokenizer, cache, prompt, seen=0, **options):
    request = Request(
        tuple(prompt), SamplingParams(**options), options["max_tokens"],
        PromptStart(len(prompt), num_reused=seen), lambda event: None,
    )  # fmt: skip
    with h2okv.enable(model):
        CacheEngine(model, tokenizer, cache).run([request])
    return request.outputs[0].tokens


def generate(model, cache, prompt, new, **options):
    ids = torch.tensor([prompt])
    torch.manual_seed(0)
    with h2okv.enable(model):
        options = {CACHE: cache, "max_new_tokens": new, "do_sample": False} | options
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()


@pytest.mark.parametrize("options", CACHES, ids=str)
def test_two_turns_on_one_cache(make_llama, tokenizer, make_prompts, options):
    model = make_llama()
    prompt, turn = make_prompts([40, 9])
    cache, other = make_cache(model, options), make_cache(model, options)
    for number in range(2):
        expected = generate(model, other, prompt, 12)
        seen = len(prompt) - len(turn) - 1 if number else 0
        tokens = run(model, tokenizer, cache, prompt, seen, max_tokens=12, temperature=0.0)
        assert [*prompt, *tokens] == expected
        prompt = expected + turn


@pytest.mark.parametrize("penalty", [1.0, 1.4])
@pytest.mark.parametrize("sampled", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_penalties_and_samples(make_llama, tokenizer, make_prompts, sampled, penalty):
    model, (prompt,) = make_llama(), make_prompts([40])
    shared = {"repetition_penalty": penalty, **sampled}
    expected = generate(
        model, make_cache(model, BUDGET), prompt, 20, do_sample=bool(sampled), **shared
    )
    shared = {"temperature": 0.0} | shared
    tokens = run(
        model, tokenizer, make_cache(model, BUDGET), prompt, max_tokens=20, seed=0, **shared
    )
    assert [*prompt, *tokens] == expected
