"""What runs but is not what was meant: one warning each, at the user's line."""

import warnings

import pytest
import torch

import h2okv
from h2okv.cache.argument import CACHE

OPTIONS = {"max_new_tokens": 4, "do_sample": False}


@pytest.fixture
def model(make_llama):
    return make_llama()


def ids(length):
    return torch.randint(2, 97, (1, length), generator=torch.Generator().manual_seed(0))


def warned(call):
    """Return the messages of the package's warnings, each once, and check where they point to."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    ours = [warning for warning in seen if "H2OCache" in str(warning.message)]
    assert {warning.filename for warning in ours} <= {__file__}
    return [str(warning.message) for warning in ours]


def test_a_forgotten_cache_warns_once(model):
    (message,) = warned(lambda: model.generate(ids(9), **OPTIONS))
    assert f"give generate {CACHE}=h2okv.H2OCache(model, 'best', budget=0.2)" in message
    assert not warned(lambda: model.generate(ids(9), **OPTIONS))


def test_a_forgotten_cache_of_a_model_that_slides_warns_too():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=32, vocab_size=97, sliding_window=8,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    h2okv.enable(model)
    assert not warned(
        lambda: model.generate(ids(9), **OPTIONS, **{CACHE: h2okv.H2OCache(model, budget=0.2)})
    )
    assert len(warned(lambda: model.generate(ids(9), **OPTIONS))) == 1


def test_what_is_meant_does_not_warn(model, make_llama):
    plain = make_llama(attention="sdpa")
    for call in (
        lambda: model.generate(ids(9), **OPTIONS, **{CACHE: h2okv.H2OCache(model)}),
        lambda: model.generate(ids(9), **OPTIONS, **{CACHE: h2okv.H2OCache(model, budget="full")}),
        lambda: model.generate(ids(9), use_cache=False, **OPTIONS),
        lambda: model(ids(9)),
        lambda: plain.generate(ids(9), **OPTIONS),
    ):
        assert not warned(call)


def test_a_text_beyond_the_context_window_warns_once(model):
    window = model.config.max_position_embeddings
    cache = h2okv.H2OCache(model, budget=64)
    assert not warned(lambda: model(ids(window), **{CACHE: cache}))
    (message,) = warned(lambda: [model(ids(1), **{CACHE: cache}) for _ in range(3)])
    assert f"the text has {window + 1} tokens, more than the model's context window of" in message
    assert "positions='rolling'" in message
    cache.reset()
    assert not warned(lambda: model(ids(9), **{CACHE: cache}))


@pytest.mark.parametrize("policy", ["h2o", "full", "recent"])
def test_a_prompt_beyond_the_context_window_warns(model, policy):
    cache = h2okv.H2OCache(model, policy, budget=64)
    (message,) = warned(lambda: model(ids(600), **{CACHE: cache}))
    assert "the text has 600 tokens" in message


def test_positions_that_roll_and_padding_do_not_warn(model):
    rolling = h2okv.H2OCache(model, budget=64, positions="rolling", evict_every=64)
    assert not warned(lambda: model(ids(600), **{CACHE: rolling}))
    mask = torch.ones(1, 520, dtype=torch.long)
    mask[:, :20] = 0
    cache = h2okv.H2OCache(model, budget=64)

    def read():
        model(ids(520), attention_mask=mask, **{CACHE: cache})

    assert not warned(read)


def test_a_loaded_cache_knows_what_it_has_seen(model, tmp_path):
    cache = h2okv.H2OCache(model, budget=64)
    model(ids(500), **{CACHE: cache})
    cache.save(tmp_path / "cache")
    loaded = h2okv.H2OCache.load(tmp_path / "cache", model)
    assert len(warned(lambda: model(ids(20), **{CACHE: loaded}))) == 1


@pytest.mark.floor
def test_short_prompts_are_not_ruined(model):
    """Keep what fits into the floor: the text is the full cache's."""
    expected = model.generate(ids(40), **OPTIONS, **{CACHE: h2okv.H2OCache(model, budget="full")})
    for options in ({}, {"budget": 0.1}, {"heavy": 0.17, "recent": 0.03}):
        cache = h2okv.H2OCache(model, **options)
        assert torch.equal(model.generate(ids(40), **OPTIONS, **{CACHE: cache}), expected)
        assert cache.num_cached_tokens == 43
    exact = h2okv.H2OCache(model, min_tokens=0)
    model.generate(ids(40), **OPTIONS, **{CACHE: exact})
    assert exact.num_cached_tokens == 8
