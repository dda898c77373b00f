"""Budgets that are fractions of all tokens seen (``of=seen``): what a cache holds of long texts."""

import pytest
import torch

import h2okv
from h2okv.policy import get_rule


@torch.no_grad()
def read(model, cache, ids, sizes):
    for columns in ids.split(sizes, dim=1):
        model(columns, past_key_values=cache)


@pytest.mark.parametrize("every", [None, 1, 8])
def test_the_cache_holds_its_fraction_at_each_cut(make_llama, every):
    model, ids = make_llama(), torch.randint(2, 97, (1, 200))
    cache = h2okv.H2OCache(model, "h2o:10%+10%,of=seen,min=0", evict_every=every)
    read(model, cache, ids[:, :40], [40])
    counts = []
    for column in range(40, 200, 8):
        read(model, cache, ids[:, column : column + 8], [1] * 8)
        counts.append(cache.num_cached_tokens)
    seen = range(48, 201, 8)
    assert all(2 * (n // 10) - 1 <= k <= 2 * (n // 10) for n, k in zip(seen, counts, strict=True))
    assert counts[-1] >= 39
    # A sixteenth is there to grow into.
    assert cache.nbytes < 0.35 * cache.full_nbytes * 1.5


def test_with_all_tokens_nothing_is_lost(make_llama):
    """Plain attention, which shares no code with the cache."""
    model, plain = make_llama(), make_llama(attention="sdpa")
    ids = torch.randint(2, 97, (2, 30), generator=torch.Generator().manual_seed(1))
    for every in (None, 4):
        cache = h2okv.H2OCache(model, 1.0, 1, 0, grows=True, evict_every=every)
        options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
        tokens = model.generate(ids, past_key_values=cache, **options)
        assert torch.equal(tokens, plain.generate(ids, **options))


@pytest.mark.parametrize("every", [None, "prompt+4"])
def test_rejected_drafts_change_nothing(make_llama, kept_sets, every):
    model = make_llama()
    ids = torch.randint(2, 9, (1, 30), generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    tokens, caches = [], []
    for drafts in ({}, {"prompt_lookup_num_tokens": 5}):
        caches.append(h2okv.H2OCache(model, "h2o:40%,of=seen,min=0", evict_every=every))
        tokens.append(model.generate(ids, past_key_values=caches[-1], **options, **drafts))
        caches[-1].check_integrity()
    assert torch.equal(*tokens)
    assert kept_sets(caches[0]) == kept_sets(caches[1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h2o:512,of=seen", "heavy=256 and recent=256 are tokens; give a fraction"),
        ("h2o:20%,of=seen,max=4096", "max_tokens=4096 would stop the text"),
        ("h2o:20%,of=seen,sink=50%", "sink=0.5 is a part of the prompt; give tokens or 100%"),
        ("h2o:20%,of=all", "of must be prompt or seen, got 'all'"),
        ("h2o:20%,of=seen,of=prompt", "of is given twice"),
        ("h2o:20%,of=seen,positions=rolling", "positions='rolling' excludes of=seen"),
        ("snapkv:20%,of=seen", "policy='snapkv' excludes of=seen"),
    ],
)
def test_bad_input_is_named(make_llama, text, words):
    with pytest.raises(ValueError, match="seen|of must be") as error:
        h2okv.H2OCache(make_llama().config, text)
    assert words in str(error.value)


def test_other_bad_input(make_llama):
    with pytest.raises(ValueError, match="got grows='yes'; give True or False"):
        h2okv.H2OCache(make_llama().config, 0.2, grows="yes")
    with pytest.raises(ValueError, match="of=seen .* a fixed number; leave it out"):
        h2okv.EngineConfig(cache="best:20%,of=seen")
    model, ids = make_llama(), torch.ones(1, 30, dtype=torch.long)
    cache = h2okv.H2OCache(model, "h2o:20%,of=seen,every=8")
    cache.pin([(3, 5)])
    with pytest.raises(ValueError, match="give every=prompt\\+32"):
        read(model, cache, ids, [30])


def test_a_rule_of_two_caches_grows_in_one_alone(make_llama):
    rule, config = get_rule("h2o"), make_llama().config
    growing = h2okv.H2OCache(config, rule, heavy=0.1, recent=0.1, grows=True)
    fixed = h2okv.H2OCache(config, rule, heavy=0.1, recent=0.1)
    assert growing.rule.grows and not (rule.grows or fixed.rule.grows)
