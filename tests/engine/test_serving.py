"""What `h2okv serve` makes of its options: states that later prompts continue from."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from h2okv import LLM, SamplingParams
from h2okv.config import CacheConfig
from h2okv.engine.config import EngineConfig
from h2okv.engine.serving import in_tokens, plan_serving, with_states

GIB = 1 << 30


@pytest.mark.parametrize(
    ("options", "every", "expected"),
    [
        ({}, None, 256), ({}, 64, 64), ({"prefix_cache": GIB}, None, 256),
        # Without states the cache is as before, unless the user says where it evicts.
        ({}, 0, None), ({"prefix_cache": 0}, None, None), ({"prefix_cache": 0}, 64, 64),
        ({"policy": "snapkv"}, None, None), ({"scoring": "expected", "sink": 4}, None, 256),
        ({"scoring": "expected", "prefix_cache": 0}, None, "prompt+32"),
        ({"scoring": "expected"}, "prompt+16", "prompt+16"),
    ],
)  # fmt: skip
def test_evictions_are_at_fixed_places_where_states_are_shared(options, every, expected):
    config = EngineConfig.from_options(**options)
    changed, note = with_states(config, every)
    assert changed == replace(config, cache=config.cache.cut_every(expected))
    shares = isinstance(expected, int) and config.prefix_cache != 0
    assert (note is None) == shares
    if not shares:
        assert note.startswith("prefix cache: off with --")


@pytest.mark.parametrize(
    ("options", "every", "words"),
    [
        ({"policy": "snapkv"}, None, "no effect with --policy snapkv, which depends on where"),
        ({}, 0, "no effect with --cache every=0; leave one of them out"),
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


@pytest.mark.parametrize(
    "options",
    [
        {}, {"scoring": "expected"}, {"kv_bits": 8}, {"positions": "rolling"}, {"prefix_cache": 0},
        {"max_num_seqs": 3, "prefix_cache": 32 << 20},
    ],
    ids=str,
)  # fmt: skip
def test_a_plan_is_what_an_engine_then_does(options, monkeypatch):
    before = 300 << 20  # a process that runs other tests has leftovers of theirs
    monkeypatch.setattr("h2okv.engine.serving.data_bytes", lambda: before)
    memory = before + (400 << 20)
    config, _ = with_states(EngineConfig.from_options(memory=memory, **options), None)
    config, _ = in_tokens(config, "bundled")
    plan = plan_serving(config, "bundled", None, torch.device("cpu"))
    monkeypatch.setattr("h2okv.engine.serving.data_bytes", lambda: plan.share.used)
    with closing(LLM("bundled", config=config, device="cpu")) as llm:
        engine = llm.engine
        stats = engine.stats()
        assert plan.weights == pytest.approx(
            sum(p.nbytes for p in engine.model.parameters()), rel=0.01
        )
        assert plan.share.num_seqs == stats.max_num_seqs
        assert plan.memory.sequence == pytest.approx(
            stats.reserved_bytes / stats.max_num_seqs, rel=0.01
        )
        assert plan.full_sequence == engine.runner.pool.full_bytes_of(plan.longest)
        if engine.prefix_cache is None:
            assert plan.share.states == 0
            return
        assert plan.share.states == engine.prefix_cache.max_bytes
        llm.generate([[5] * 1300], SamplingParams(max_tokens=1))
        (size,) = set(engine.prefix_cache._sizes.values())
        assert plan.memory.state == pytest.approx(size, rel=0.01)
