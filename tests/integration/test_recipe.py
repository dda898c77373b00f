import pytest
import torch
from oracle import cache_of

import h2okv


@pytest.fixture
def model(make_llama):
    return make_llama(attention="sdpa")


def generate(model, **options):
    input_ids = torch.arange(2, 42)[None]
    return model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=12,
        do_sample=False,
        **options,
    )


def by_recipe(model, **options):
    return generate(
        model, custom_generate=str(h2okv.recipe_path()), trust_remote_code=True, **options
    )


def test_recipe_generates_with_an_h2o_cache(model):
    cache = cache_of(model.config, heavy=0.1, recent=0.1, min_tokens=0)
    with h2okv.enable(model):
        expected = generate(model, past_key_values=cache)
    assert torch.equal(by_recipe(model, min_tokens=0), expected)
    assert not torch.equal(expected, generate(model))  # the budget is small enough to matter
    assert model.config._attn_implementation == "sdpa"


def test_recipe_takes_a_budget(model):
    full = by_recipe(model, heavy=40, recent=40)
    assert torch.equal(full, generate(model))
    assert not torch.equal(by_recipe(model, heavy=2, recent=2), full)


@pytest.mark.parametrize(
    "options",
    [
        {"scoring": "decay", "decay": 0.5},
        {"scoring": "mean"},
        {"kv_bits": 4},
        {"policy": "random", "seed": 3},
    ],
)
def test_recipe_takes_what_the_cache_takes(model, options):
    options = {"heavy": 3, "recent": 2} | options
    cache = cache_of(model, **options)
    with h2okv.enable(model):
        expected = generate(model, past_key_values=cache, output_logits=True,
                            return_dict_in_generate=True)  # fmt: skip
    passed, plain = (
        by_recipe(model, **options_of_cache, output_logits=True, return_dict_in_generate=True)
        for options_of_cache in (options, {"heavy": 3, "recent": 2})
    )
    logits, others = torch.stack(passed.logits), torch.stack(plain.logits)
    assert torch.equal(logits, torch.stack(expected.logits))
    assert not torch.equal(logits, others)  # the option changes something here


def test_recipe_refuses_what_the_cache_refuses(model):
    with pytest.raises(ValueError, match="is above max_tokens=9"):
        by_recipe(model, heavy=0.5, max_tokens=9)
    with pytest.raises(ValueError, match="kv_bits must be 8, 6 or 4, got 3"):
        by_recipe(model, kv_bits=3)


def test_recipe_refuses_options_beside_a_cache(model):
    with pytest.raises(ValueError, match="heavy would have no effect on the cache"):
        by_recipe(model, heavy=100, past_key_values=cache_of(model))


def test_recipe_goes_on_with_a_cache(model):
    cache = cache_of(model.config, heavy=6, recent=6)
    by_recipe(model, past_key_values=cache)
    assert cache.num_seen_tokens == 51
    cache.check_integrity()


def test_recipe_refuses_another_cache(model):
    from transformers import DynamicCache

    with pytest.raises(ValueError, match="(past_key_values|cache) is a DynamicCache"):
        by_recipe(model, past_key_values=DynamicCache())


@pytest.mark.parametrize("heavy", [4, 0.1])
def test_a_padded_batch_in_blocks_is_each_row_alone(model, heavy):
    ids = torch.arange(2, 42).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    options = {"custom_generate": str(h2okv.recipe_path()), "trust_remote_code": True}
    options |= {"heavy": heavy, "recent": heavy, "evict_every": 8, "positions": "rolling"}
    options |= {"max_new_tokens": 12, "do_sample": False}
    together = model.generate(ids, attention_mask=mask, **options)
    alone = model.generate(ids[:1, 13:], attention_mask=mask[:1, 13:], **options)
    assert torch.equal(together[0, 40:], alone[0, 27:])
