"""What `h2okv serve` makes of its options: states that later prompts continue from."""

from dataclasses import replace

import pytest

from h2okv.config import CacheConfig
from h2okv.engine.config import EngineConfig
from h2okv.engine.serving import in_tokens, with_states

GIB = 1 << 30


@pytest.mark.parametrize(
    ("options", "every", "expected"),
    [
        ({}, None, 256), ({}, 64, 64), ({"prefix_cache": GIB}, None, 256),
        # Without states the cache is as before, unless the user says where it evicts.
        ({}, 0, None), ({"prefix_cache": 0}, None, None), ({"prefix_cache": 0}, 64, 64),
        ({"policy": "snapkv"}, None, None), ({"policy": "best"}, None, 256),
    ],
)  # fmt: skip
def test_evictions_are_at_fixed_places_where_states_are_shared(options, every, expected):
    config = EngineConfig.from_options(**options)
    changed, note = with_states(config, every)
    assert changed == replace(config, cache=replace(config.cache, evict_every=expected))
    shares = expected is not None and config.prefix_cache != 0
    assert (note is None) == shares
    if not shares:
        assert note.startswith("prefix cache: off with --")


@pytest.mark.parametrize(
    ("options", "every", "words"),
    [
        ({"policy": "snapkv"}, None, "no effect with --policy snapkv, which depends on where"),
        ({}, 0, "no effect with --evict-every 0; leave one of them out"),
    ],
)
def test_states_that_cannot_be_are_refused(options, every, words):
    with pytest.raises(ValueError, match=words):
        with_states(EngineConfig.from_options(prefix_cache=GIB, **options), every)


@pytest.mark.parametrize(("longest", "tokens"), [(None, 409), (1000, 200)])  # of 2,048 tokens
def test_a_fraction_becomes_tokens_of_the_longest_prompt(longest, tokens):
    config, _ = with_states(EngineConfig(max_prompt_tokens=longest), None)
    changed, note = in_tokens(config, "bundled")
    assert changed.caches_prefixes and not config.caches_prefixes
    cache, half = changed.cache, tokens // 2
    assert (cache.heavy, cache.recent, cache.evict_every) == (half, half, 256)
    assert f"{half} heavy and {half} recent (20% of {longest or 2048:,} tokens)" in note
    assert in_tokens(changed, "bundled") == (changed, None)


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(),
        EngineConfig(prefix_cache=0, cache=CacheConfig(evict_every=64)),
        EngineConfig(cache=CacheConfig(evict_every=64, heavy=8, recent=8)),
    ],
)
def test_other_budgets_stay_as_they_are(config):
    assert in_tokens(config, "no model") == (config, None)
