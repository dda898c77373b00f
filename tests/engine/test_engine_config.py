"""Options are declared once: fields of the engine's config and of its cache's."""

import ast
from pathlib import Path

import pytest

import h2okv
from h2okv.config import CacheConfig
from h2okv.engine.config import EngineConfig

PACKAGE = Path(h2okv.__file__).parent


def test_options_reach_the_config_that_declares_them():
    config = EngineConfig.from_options(heavy=5, kv_bits=8, max_num_seqs=3)
    assert config == EngineConfig(cache=CacheConfig(heavy=5, kv_bits=8), max_num_seqs=3)
    changed = EngineConfig.from_options(config, recent=7)
    assert changed == EngineConfig(cache=CacheConfig(heavy=5, recent=7, kv_bits=8), max_num_seqs=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 3}, "'max_num_seq' is unknown; did you mean max_num_seqs"),
        ({"polcy": "h2o"}, "'polcy' is unknown; did you mean policy"),
        ({"zzz": 1}, "'zzz' is unknown; choose from cache, max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number of 1 or more, got 0"),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens must be a whole number of 1"),
        ({"max_waiting": -1}, "max_waiting must be a whole number of 0 or more, got -1"),
        ({"max_prefill_time_fraction": 1.0}, "max_prefill_time_fraction must be .* got 1.0"),
        ({"cache": {"heavy": 3}}, "cache must be a CacheConfig or a text .*, got {.heavy.: 3}"),
        ({"heavy": -1}, "heavy=-1 is negative"),
        ({"cache": "h2o:512", "policy": "best"}, "policy='best' contradicts cache='h2o:512'"),
        ({"memory": "8 GB"}, "memory must be bytes, such as 8589934592, got '8 GB'"),
    ],
    ids=str,
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_options(**options)


def test_final_assistant_message_is_continued(make_llm, tokenizer, greedy):
    llm = make_llm("bundled", max_prompt_tokens=100)
    question = {"role": "user", "content": "Once upon"}
    talk = [question, {"role": "assistant", "content": "A time"}]
    text = "User: Once upon\n\nAssistant: A time"
    (continued,) = llm.generate(text, greedy(4))
    for switches in ({}, {"continue_final_message": True}):
        assert llm.chat(talk, greedy(4), **switches) == [continued]
    (other,) = llm.generate(f"{text}\n\nAssistant:", greedy(4))
    assert llm.chat(talk, greedy(4), add_generation_prompt=True) == [other]
    with_parts = [
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
        question,
    ]
    system = {"role": "system", "content": "Be kind."}
    assert llm.chat(with_parts, greedy(4)) == llm.chat([system, question], greedy(4))
    for messages, words in (
        ([[]], r"messages\[0\] is empty"),
        ([{"role": "tool"}], "content is missing"),
    ):
        with pytest.raises(ValueError, match=words):
            llm.chat(messages)


@pytest.mark.parametrize("folder", ["engine", "offload"])
def test_no_getattr_on_layers_caches_or_pools(folder):
    asking = [
        f"{path.name}:{node.lineno}"
        for path in (PACKAGE / folder).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("getattr", "hasattr", "setattr")
        and any(word in ast.unparse(node.args[0]) for word in ("layer", "cache", "pool"))
    ]
    assert asking == []


def test_best_as_an_option_brings_its_sinks_and_scoring():
    cache = EngineConfig.from_options(policy="best", heavy=6).cache
    assert (cache.policy, cache.sink, cache.scoring) == ("h2o", 4, "expected")
    cache = EngineConfig.from_options(policy="best", sink=0, scoring="sum").cache
    assert (cache.sink, cache.scoring) == (0, "sum")
    config = EngineConfig.from_options(sink=7)
    assert EngineConfig.from_options(config, policy="best").cache.sink == 7
