"""The arguments of `H2OCache`: what people write, what it prints, and what it warns of."""

import warnings

import pytest
import torch

import h2okv
from h2okv import CacheConfig, H2OCache

EVEN = {"layer_budgets": "even"}


@pytest.fixture(scope="module")
def config(make_llama):
    return make_llama().config


@pytest.mark.parametrize(
    ("amounts", "options", "expected"),
    [
        ((), {}, CacheConfig("h2o", 0.1, 0.1)),
        (("best",), {"budget": 0.2, **EVEN}, CacheConfig("best", 0.17, 0.2 - 0.17, **EVEN)),
        (("best", "20%"), EVEN, CacheConfig("best", 0.17, 0.2 - 0.17, **EVEN)),
        (("best",), EVEN, CacheConfig("best", 0.17, 0.2 - 0.17, **EVEN)),
        ((), {"policy": "best", "budget": 200, **EVEN}, CacheConfig("best", 170, 30, **EVEN)),
        ((0.2,), {}, CacheConfig("h2o", 0.1, 0.1)),
        (("20%",), {}, CacheConfig("h2o", 0.1, 0.1)),
        ((512,), {}, CacheConfig("h2o", 256, 256)),
        (("full",), {}, CacheConfig("full")),
        ((), {"budget": "full"}, CacheConfig("full")),
        ((60, 30), {}, CacheConfig("h2o", 60, 30)),
        ((60, 30, 4), {"policy": "recent"}, CacheConfig("recent", 60, 30, 4)),
        ((h2okv.policy.H2O(), 64), {}, CacheConfig("h2o", 32, 32)),
    ],
)
def test_what_people_write(config, amounts, options, expected):
    assert H2OCache(config, *amounts, **options).cache_config == expected


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("sinks", "sink"), ("num_sinks", "sink"), ("num_sink_tokens", "sink"),
        ("max_size", "budget"), ("cache_size", "budget"), ("max_cache_len", "budget"),
        ("window", "recent"), ("window_size", "recent"), ("recent_ratio", "recent"),
        ("heavy_ratio", "heavy"), ("hh_size", "heavy"), ("polcy", "policy"), ("bits", "kv_bits"),
        ("prefill_chunk", "evict_every"), ("chunk_size", "evict_every"), ("config", "model"),
    ],
)  # fmt: skip
def test_an_unknown_argument_names_the_one_that_is_meant(config, name, meant):
    message = f"H2OCache: argument '{name}' is unknown; did you mean {meant}"
    with pytest.raises(ValueError, match=message):
        H2OCache(config, **{name: 4})


@pytest.mark.parametrize(
    ("policy", "meant"),
    [
        ("H2O", "h2o"), ("h2O ", "h2o"), ("Best", "best"), ("streaming_llm", "sink_recent"),
        ("StreamingLLM", "sink_recent"), ("streaming-llm", "sink_recent"), ("SnapKV", "snapkv"),
        ("sink-recent", "sink_recent"), ("None", "full"),
    ],
)  # fmt: skip
def test_a_policy_as_papers_write_it_gets_a_hint(config, policy, meant):
    for arguments in ((policy,), ()):
        options = {} if arguments else {"policy": policy}
        with pytest.raises(ValueError, match=rf"is unknown; did you mean {meant}\?"):
            H2OCache(config, *arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), r"H2OCache needs a model; give H2OCache\(model, budget=0.2\)"),
        (("smollm2",), r"needs a loaded model, got 'smollm2'; .* h2okv.load\('smollm2'\)"),
        ((0.2,), "needs a loaded model, got 0.2"),
        (("CONFIG", "h2o", 5, 6), "6 must be given by name"),
        (("CONFIG", 5, 6, 7, 8), "8 must be given by name"),
    ],
)
def test_what_is_no_model_and_too_much_is_refused(config, arguments, message):
    with pytest.raises(ValueError, match=message):
        H2OCache(*(config if argument == "CONFIG" else argument for argument in arguments))


@pytest.mark.parametrize("wrapper", ["model.forward", "model.compile", "torch.compile(model)"])
def test_a_forward_compiled_as_for_a_static_cache_is_warned_of(make_llama, wrapper):
    """Its prompts would be traced layer by layer; `generate` bypasses what wraps the model."""
    model = make_llama()
    if wrapper == "model.forward":
        model.forward = torch.compile(model.forward)
    elif wrapper == "model.compile":
        model.compile()
    else:
        model = torch.compile(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        H2OCache(model, 64)
    texts = [str(warning.message) for warning in caught]
    assert [("enable(model, compile=True)" in text) for text in texts] == [True] * (
        wrapper[0] == "m"
    )


def test_arguments_of_generate_are_told_apart(config):
    for name in ("max_new_tokens", "temperature", "do_sample"):
        with pytest.raises(ValueError, match=f"H2OCache: {name} is an argument of generate"):
            H2OCache(config, **{name: 1})
    with pytest.raises(ValueError, match="budget is given twice"):
        H2OCache(config, 64, budget=32)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"budget": 0.2}, "H2OCache('h2o:20%', layers=2)"),
        ({"policy": "best", **EVEN}, "H2OCache('best:20%,layers=even', layers=2)"),
        ({"policy": "best", "budget": 200, "layer_budgets": ((0.5, 1.5),) * 2, "kv_bits": 8},
         "H2OCache('best:200,bits=8,layers=by-head-e125245f', layers=2)"),
        ({"budget": 12345, "layer_budgets": (0.5, 1.5)},
         "H2OCache('h2o:12345,layers=by-layer-91689573', layers=2)"),
        ({"policy": "best", "sink": 8, "scoring": "mean", **EVEN},
         "H2OCache('h2o:17%+3%,sink=8,scoring=mean', layers=2)"),
        ({"heavy": 64, "recent": 32, "evict_every": 64},
         "H2OCache('h2o:64+32,every=64', layers=2)"),
        ({"budget": "full"}, "H2OCache('full', layers=2)"),
    ],
)  # fmt: skip
def test_it_prints_the_text_that_commands_read(config, options, text):
    assert repr(H2OCache(config, **options)) == text


def test_a_config_object_prints_best_too(config):
    best = CacheConfig("best", budget=0.2, **EVEN)
    assert repr(H2OCache.from_config(config, best)).startswith("H2OCache('best:20%")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heavy": 64, "recent": 0}, "keeps no recent tokens, and text decays"),
        ({"heavy": 0.2, "recent": 0}, "keeps no recent tokens, and text decays"),
        ({"heavy": 0.2, "recent": 0.0}, "keeps no recent tokens, and text decays"),
        ({"budget": 11}, "keeps 11 entries, too few for good text; give more"),
        ({"budget": 6, "policy": "recent"}, "keeps 6 entries, too few for good text"),
    ],
)
def test_a_budget_that_ruins_texts_warns(config, options, message):
    with pytest.warns(UserWarning, match=message) as seen:
        H2OCache(config, **options)
    assert [warning.filename for warning in seen] == [__file__]


@pytest.mark.parametrize(
    "options",
    [
        {}, {"budget": 12}, {"heavy": 8, "recent": 4}, {"budget": 0.01}, {"budget": "full"},
        *({"policy": name, "heavy": 64, "recent": 0} for name in ("heavy", "recent", "keydiff")),
        {"policy": "sink_recent", "budget": 64},
    ],
)  # fmt: skip
def test_other_budgets_do_not_warn(config, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        H2OCache(config, **options)
        H2OCache.from_config(config, CacheConfig(budget=6))  # how the package makes its caches
