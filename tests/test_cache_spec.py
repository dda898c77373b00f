"""The text that says which cache, and what reads and prints it."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2okv import CacheConfig, H2OCache
from h2okv.cache_spec import amount_text, parse_amount
from h2okv.config import POLICIES, POSITIONS, SCORINGS
from h2okv.engine.config import EngineConfig

TEXTS = {
    "best:20%": CacheConfig("best", budget=0.2),
    "best-v5:20%": CacheConfig("best", budget=0.2),
    "h2o:512": CacheConfig(budget=512),
    "h2o:512,bits=8,every=256": CacheConfig(budget=512, kv_bits=8, evict_every=256),
    "full": CacheConfig("full"),
    "full,bits=4": CacheConfig("full", kv_bits=4),
    "h2o:20%,sink=4,positions=rolling": CacheConfig(budget=0.2, sink=4, positions="rolling"),
    "sink_recent:256": CacheConfig("sink_recent", budget=256),
    "h2o:64+10%": CacheConfig(heavy=64, recent=0.1),
    "h2o,scoring=decay:0.99": CacheConfig(scoring="decay", decay=0.99),
    "20%": CacheConfig(budget=0.2),
    " 64+64 , min=0, max=200": CacheConfig(heavy=64, recent=64, min_tokens=0, max_tokens=200),
    "best:20%,sink=100%": CacheConfig("best", budget=0.2, sink=1.0),
    "random:64,sink=100%": CacheConfig("random", budget=64, sink=1.0),
    "random:7,seed=3": CacheConfig("random", budget=7, seed=3),
    "best:512,layers=even": CacheConfig("best", budget=512, layer_budgets="even"),
    "h2o,layers=[[0.5,1.5],[1,1]]": CacheConfig(layer_budgets=((0.5, 1.5), (1, 1))),
    "my.rules:Mine:10%": CacheConfig("my.rules:Mine", budget=0.1),
    "every=8": CacheConfig(evict_every=8),
    "every=prompt+8": CacheConfig(evict_every="prompt+8"),
    "best:20%,every=prompt+32": CacheConfig("best", budget=0.2),
    "best:20%,every=0": CacheConfig("best", budget=0.2, evict_every=None),
    "best:20%,positions=rolling": CacheConfig("best", 0.17, 0.03, positions="rolling"),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_a_cache(text):
    config = TEXTS[text]
    assert CacheConfig.from_spec(text) == config == CacheConfig.from_spec(config.spec)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "an empty text; give such as best:20%"),
        ("h2o:5l2", "got '5l2'"),
        (
            "best:20%,every=prompt",
            r"every must be tokens, such as 256, or prompt\+32 .*got 'prompt'",
        ),
        ("best20%", "such as h2o, 20%, h2o:512 or best:20%,bits=8; got 'best20%'"),
        ("h2o:512,bit=8", r"option 'bit' is unknown; did you mean bits\?"),
        ("h2o:512,kv_bits=8", r"did you mean bits\?"),
        ("h2o:512,evict_every=8", r"did you mean every\?"),
        ("h2o,heavy=3", r"heavy is not an option; give the budget as heavy\+recent"),
        ("h2o,scoring=decay,decay=0.9", "decay is not an option; .* scoring=decay:0.99"),
        ("h2o,policy=best", "the text begins with it"),
        ("h2o,bits=8,bits=4", "bits is given twice"),
        ("h2o,bits=x", "bits must be a whole number, got 'x'"),
        ("h2o,sink=120%", r"sink=1\.2 is not a fraction of the prompt"),
        ("h2o,sink=x", "sink must be tokens, or a fraction such as 100%, got 'x'"),
        ("h2o,scoring=decay:x", "scoring=decay:x must be such as decay:0.99"),
        ("best-v3:20%", "policy='best-v3' is of another version of h2okv"),
        ("h2o,layers=none.json", "layer_budgets must be .* got 'none.json' .*cannot be read"),
        ("best:20%,layers=by-head", "layer_budgets='by-head' says no factors"),
        ("best:20%,layers=by-layer-0a1b2c3d", "layer_budgets='by-layer-0a1b2c3d' says no factors"),
        ("h2o:200%", "budget 200% is out of range"),
        (3, "cache must be a text such as 'best:20%', got 3"),
    ],
)
def test_another_text_is_refused_with_its_remedy(text, words):
    with pytest.raises(ValueError, match=words):
        CacheConfig.from_spec(text)


amounts = st.integers(1, 5000) | st.floats(0.001, 0.5)


@st.composite
def configs(draw):
    policy = draw(st.sampled_from(POLICIES))
    factors = draw(st.sampled_from([None, "even", "auto", ((0.5, 1.5), (1.25, 0.75)), (0.5, 1.5)]))
    options = {
        "heavy": draw(amounts), "recent": draw(amounts),
        "sink": draw(st.sampled_from([None, 4, 1.0])),
        "scoring": draw(st.none() | st.sampled_from(SCORINGS)),
        "decay": draw(st.none() | st.floats(0.01, 1)),
        "positions": draw(st.sampled_from(POSITIONS)),
        "kv_bits": draw(st.sampled_from([None, 8, 6, 4])),
        "min_tokens": draw(st.sampled_from([None, 0, 7])),
        "max_tokens": draw(st.sampled_from([None, 20000])),
        "seed": draw(st.integers(0, 9)) if policy == "random" else 0,
        "evict_every": draw(st.none() | st.just(9)),
    }  # fmt: skip
    if factors is not None:
        options["layer_budgets"] = factors
    return CacheConfig(policy, **options)


@settings(max_examples=200)
@given(configs())
def test_the_text_of_a_config_is_that_config(config):
    written = CacheConfig.from_spec(config.spec)
    assert written.identity() == config.identity() if config.is_full else written == config
    if isinstance(config.layer_budgets, tuple):
        return  # a label does not print them
    labelled = CacheConfig.from_spec(config.label, min_tokens=0)
    assert labelled.identity() == replace(config, min_tokens=labelled.min_tokens).identity()


@given(amounts)
def test_an_amount_is_written_exactly(amount):
    assert parse_amount(amount_text(amount)) == amount


def test_the_cache_the_engine_and_a_request_read_the_same_text(make_llama, tmp_path):
    text, config = "h2o:12,sink=2,bits=8", make_llama().config
    expected = CacheConfig.from_spec(text)
    assert H2OCache(config, text).cache_config == expected
    assert H2OCache.from_spec(config, text).cache_config == expected
    assert H2OCache(config, "h2o,sink=2,bits=8", 12).cache_config == expected
    assert EngineConfig(cache=text).cache == expected
    assert EngineConfig.from_options(cache=text, budget="5+7").cache.heavy == 5
    with pytest.raises(ValueError, match="H2OCache: sink is given twice"):
        H2OCache(config, text, sink=3)
    with pytest.raises(ValueError, match="cache must be a CacheConfig or a text"):
        EngineConfig(cache=3)
    budget = expected.request_budget("6,sink=1")
    assert (budget.heavy, budget.recent, budget.sink) == (3, 3, 1)
    assert expected.request_budget(expected.label.partition(",")[0]) == expected.budget
    for other in ("bits=4", "best:6", "full"):
        with pytest.raises(ValueError, match="of a request"):
            expected.request_budget(other)
    file = tmp_path / "heads.json"
    file.write_text(json.dumps([[0.5, 1.5], [1, 1]]))
    assert CacheConfig.from_spec(f"h2o:8,layers={file}").is_by_head
