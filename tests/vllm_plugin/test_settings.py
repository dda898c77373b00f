"""Parsing, refusals and the changed configuration of an engine, without vLLM."""

import json
import random
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from transformers import LlamaConfig

from h2okv import vllm_plugin
from h2okv.config import CacheConfig
from h2okv.vllm_plugin import settings
from h2okv.vllm_plugin.settings import check_engine, parse, summary, tokens_to_run, with_cuts

SETTING = {"heavy": 32, "recent": 32}


def engine(**changes) -> SimpleNamespace:
    """Return the fields of vLLM 0.32's configuration that the plug-in reads."""
    text = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = SimpleNamespace(
        additional_config={"h2okv": SETTING},
        model_config=SimpleNamespace(
            architecture="LlamaForCausalLM",
            hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]), hf_text_config=text,
            max_model_len=1024, runner_type="generate", multimodal_config=None, model_impl="auto",
            model="folder", dtype="torch.bfloat16", using_transformers_backend=lambda: False,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", kv_offloading_size=None, sliding_window=None,
            enable_prefix_caching=True, mamba_cache_mode="align", mamba_block_size=None,
            block_size=128, user_specified_block_size=False, prefix_cache_retention_interval=0,
        ),
        compilation_config=SimpleNamespace(splitting_ops=None, _attention_ops=["vllm::other"]),
        parallel_config=SimpleNamespace(
            data_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=2048, max_num_seqs=64, scheduler_cls=None, async_scheduling=None,
            long_prefill_token_threshold=0,
        ),
        speculative_config=None, kv_transfer_config=None, use_v2_model_runner=False,
    )  # fmt: skip
    for path, value in changes.items():
        section, _, name = path.rpartition("__")
        setattr(getattr(config, section) if section else config, name, value)
    return config


@pytest.mark.parametrize("nothing", [None, {}, {"other": 1}, "text"])
def test_parse_without_the_setting_returns_none(nothing):
    assert parse(nothing) is None


def test_spans_after_a_prompt_are_refused_by_name_and_otherwise_left_out():
    assert not parse({"h2okv": "best:128"}).whole_prompts
    for setting in ("best:128,every=prompt+64", SETTING | {"evict_every": "prompt+16"}):
        with pytest.raises(ValueError, match=r"every=prompt\+\d+: inside vLLM.*give every="):
            parse({"h2okv": setting})


def test_the_setting_is_a_cache_config():
    options = SETTING | {"policy": "sink_recent", "sink": 2, "evict_every": 128}
    assert parse({"h2okv": options}) == CacheConfig(**options)
    best = parse({"h2okv": SETTING | {"policy": "best", "evict_every": 64}})
    assert best.layer_budgets == "auto" and best.evict_every == 64
    assert (
        parse({"h2okv": SETTING | {"policy": "best", "layer_budgets": "even"}}).layer_budgets
        is None
    )


def test_budgets_of_a_file(tmp_path):
    file = tmp_path / "layers.json"
    file.write_text(json.dumps([[1.5, 0.5], [1.0, 1.0]]))
    options = SETTING | {"layer_budgets": str(file)}
    assert parse({"h2okv": options}).layer_budgets == ((1.5, 0.5), (1.0, 1.0))
    check_engine(engine(), parse({"h2okv": options}))
    for content, words in (("[3, 4]", "mean 1"), ("{", "Expecting"), ("", "empty")):
        file.write_text(content)
        with pytest.raises(ValueError, match=f"layer_budgets.*{words}"):
            parse({"h2okv": options})
    with pytest.raises(ValueError, match=r"layer_budgets.*none.json"):
        parse({"h2okv": options | {"layer_budgets": str(tmp_path / "none.json")}})


@pytest.mark.parametrize(
    ("factors", "words"),
    [((1.0, 1.0, 1.0), "has 3 factors"), (((1.0,), (1.0,)), "lists of 1 factors")],
)
def test_budgets_of_another_model_are_refused(factors, words):
    with pytest.raises(ValueError, match=words):
        check_engine(engine(), CacheConfig(**SETTING, layer_budgets=factors))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (3, "is not a cache"),
        ({"heavy": 32}, "give a number of tokens"),
        ("best:20%", "a budget of 20% is a fraction of a text"),
        ("h2o:512,bit=8", "did you mean bits"),
        ({"heavy": 0.1, "recent": 0.1}, "fraction of a text"),
        ({"heavy": 0, "recent": 0}, "keep nothing"),
        ({"policy": "full"}, "leave the h2okv setting out for a full cache"),
        (SETTING | {"policy": "snapkv"}, "keeps more with every token"),
        (SETTING | {"policy": "keydiff"}, "ranks by keys"),
        (SETTING | {"policy": "topk"}, "policy 'topk' is unknown"),
        (SETTING | {"policy": "recent", "scoring": "mean"}, "has no effect"),
        (SETTING | {"positions": "rolling"}, "use positions='original'"),
        (SETTING | {"kv_bits": 8}, "kv_bits=8"),
    ],
)
def test_refused_settings(options, words):
    with pytest.raises(ValueError, match="h2okv|heavy|policy|scoring|chunk|evict") as refusal:
        parse({"h2okv": options})
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_config__architecture": "GptOssForCausalLM"}, "GptOssForCausalLM is not among"),
        ({"model_config__max_model_len": 63}, "64 entries are above max_model_len=63"),
        ({"speculative_config": object()}, "--speculative-config"),
        ({"kv_transfer_config": object()}, "--kv-transfer-config"),
        ({"parallel_config__data_parallel_size": 2}, "data_parallel_size=2"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"parallel_config__use_ubatching": True}, "--enable-dbo"),
        ({"cache_config__cache_dtype": "fp8"}, "kv_cache_dtype=fp8"),
        ({"cache_config__kv_offloading_size": 4.0}, "--kv-offloading-size"),
        ({"model_config__runner_type": "pooling"}, "runner='pooling'"),
        ({"model_config__multimodal_config": object()}, "more than text"),
        (
            {"model_config__hf_text_config": SimpleNamespace(layer_types=["sliding_attention"])},
            "not full attention (sliding_attention)",
        ),
        ({"cache_config__sliding_window": 4096}, "sliding window of 4096 tokens"),
        ({"scheduler_config__scheduler_cls": "mine"}, "--scheduler-cls"),
        ({"scheduler_config__long_prefill_token_threshold": 9}, "use evict_every"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
    ],
)
def test_refused_engines(changes, words):
    check_engine(engine(), CacheConfig(**SETTING))
    with pytest.raises(ValueError, match="^h2okv: ") as refusal:
        check_engine(engine(**changes), CacheConfig(**SETTING))
    assert words in str(refusal.value)


def test_a_chunk_that_no_step_has_room_for_is_refused():
    with pytest.raises(ValueError, match="evict_every=4096 is above max_num_batched_tokens=2048"):
        check_engine(engine(), CacheConfig(**SETTING, evict_every=4096))


def test_expected_scoring_is_refused_without_vllm_s_rotation():
    best = CacheConfig(**SETTING, policy="best", layer_budgets="even")
    check_engine(engine(), best)
    backend = engine(model_config__using_transformers_backend=lambda: True)
    check_engine(backend, CacheConfig(**SETTING))
    with pytest.raises(ValueError, match="scoring='expected'.* does not say; use another"):
        check_engine(backend, best)


def test_prompts_that_may_not_fit_into_a_step_get_a_chunk():
    config = CacheConfig(**SETTING)
    assert with_cuts(config, engine()).evict_every is None
    long = engine(model_config__max_model_len=8192)
    assert with_cuts(config, long).evict_every == 256
    small = engine(model_config__max_model_len=8192, scheduler_config__max_num_batched_tokens=128)
    assert with_cuts(config, small).evict_every == 64
    chunked = CacheConfig(**SETTING, evict_every=100)
    assert with_cuts(chunked, long).evict_every == 100


@pytest.mark.parametrize("prompt_length", [1, 6, 7, 20, 21])
def test_a_prompt_without_cuts_is_read_in_one_step(prompt_length):
    draw, cache = random.Random(3), CacheConfig(**SETTING)
    for _ in range(5):
        start, cuts = 0, []
        while start < prompt_length + 4:
            count = tokens_to_run(start, draw.randrange(1, 25), prompt_length, cache)
            start += count
            cuts += [start] * bool(count)
        after = [prompt_length + 1 + later for later in range(4)]
        assert cuts == [prompt_length, *after]


def test_with_evict_every_chunks_end_at_its_multiples():
    cache = CacheConfig(**SETTING, evict_every=8)
    assert [tokens_to_run(start, 30, 100, cache) for start in (0, 3, 8, 101)] == [8, 5, 8, 3]
    assert tokens_to_run(8, 2, 100, cache) == 2


@pytest.fixture
def other(monkeypatch):
    """Stand in for another version of vLLM."""
    other = ModuleType("vllm")
    other.__version__ = "0.32.9"
    monkeypatch.setitem(sys.modules, "vllm", other)
    monkeypatch.setattr(vllm_plugin, "missing_names", list)


def test_states_are_cached_with_evict_every_alone(other):
    for setting, caching, block in (({}, False, 1024), ({"evict_every": 64}, True, 64)):
        config = engine(additional_config={"h2okv": SETTING | setting})
        vllm_plugin.prepare(config, parse(config.additional_config))
        pages = config.cache_config
        assert (pages.enable_prefix_caching, pages.mamba_block_size) == (caching, block)
        assert pages.block_size == (64 if caching else 128)
        assert pages.prefix_cache_retention_interval == (None if caching else 0)
        assert pages.mamba_cache_mode == "none"  # of vLLM's runner; the layer's own says align


def test_the_configuration_of_an_engine_with_h2o(other, caplog):
    config = engine(model_config__max_model_len=4096)
    vllm_plugin.prepare(config, parse(config.additional_config))
    classes = ["H2OLlamaForCausalLM", "LlamaForCausalLM"]
    assert config.model_config.hf_config.architectures == classes
    assert config.model_config.architecture == "LlamaForCausalLM"
    assert config.scheduler_config.async_scheduling is None, "vLLM decides, after this"
    assert config.compilation_config.splitting_ops == ["vllm::other", "vllm::h2o_attention"]
    assert config.cache_config.enable_prefix_caching
    assert config.cache_config.mamba_block_size == 256
    assert config.scheduler_config.scheduler_cls.endswith("H2OScheduler")
    assert "tested with vLLM 0.32.0, and this is 0.32.9" in caplog.text
    # What the other processes read says the chunk too.
    assert parse(config.additional_config).evict_every == 256


def test_the_hook_without_the_setting_is_vllm_s(monkeypatch):
    called = []

    class Own:
        @staticmethod
        def verify_and_update_config(vllm_config):
            called.append(vllm_config)

        @staticmethod
        def verify_and_update_model_config(model_config):
            called.append(model_config)

    registered = {}
    registry = SimpleNamespace(
        get_supported_archs=lambda: {"OwnForCausalLM", "LlamaForCausalLM"},
        register_model=registered.__setitem__,
    )
    table = {"OwnForCausalLM": Own}
    models = ModuleType("vllm.model_executor.models")
    models.ModelRegistry = registry
    config = ModuleType("vllm.model_executor.models.config")
    config.MODELS_CONFIG_MAP, config.VerifyAndUpdateConfig = table, Own
    for name in ("vllm", "vllm.model_executor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, models.__name__, models)
    monkeypatch.setitem(sys.modules, config.__name__, config)
    vllm_plugin.register()
    hook = table["OwnForCausalLM"]
    vllm_plugin.register()
    assert table["OwnForCausalLM"] is hook
    assert set(registered) == {f"H2O{name}" for name in settings.FAMILIES}

    plain = engine(additional_config={})
    before = repr(plain)
    hook.verify_and_update_config(plain)
    hook.verify_and_update_model_config(plain.model_config)
    assert called == [plain, plain.model_config] and repr(plain) == before

    # With it, a vLLM that lacks what the plug-in stands on is refused, and says what.
    sys.modules["vllm"].__version__ = "9.9"
    with pytest.raises(ValueError, match="vLLM 9.9 has no .*MambaBase.bind_kv_cache"):
        hook.verify_and_update_config(engine())


def test_register_without_vllm_only_warns(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)
    vllm_plugin.register()
    assert "not active" in caplog.text


def test_vllm_finds_the_plug_in():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    target = project["project"]["entry-points"]["vllm.general_plugins"]["h2okv"]
    module, _, name = target.partition(":")
    assert getattr(sys.modules[module], name) is vllm_plugin.register


def test_summary_has_policy_entries_bytes_and_requests():
    line = summary(CacheConfig(**SETTING, sink=4), 3042000, 351, 16)
    for text in ("h2o", "68 entries", "sink 4, heavy 32, recent 32", "3,042,000 bytes", "351"):
        assert text in line
    assert line.endswith("prefixes are not cached")
    by_head = CacheConfig(**SETTING, evict_every=64, layer_budgets=((0.5, 1.5),))
    line = summary(by_head, 3042000, 351, 16, True)
    assert "divided among the KV heads" in line and "prefixes are cached every 64 tokens" in line
