"""Each request equals its own ``generate``, whatever other sequences are in the batch."""

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Llama4ForCausalLM, Llama4TextConfig

import h2okv

LENGTHS = [40, 3, 25, 1, 61, 8, 30, 17]
NEWS = [12, 20, 1, 15, 7, 18, 11, 9]
BY_HEAD = ((0.5, 1.5), (1.75, 0.25))
OF_ONE_HEAD = {"kv_heads": 1, "layer_budgets": ((0.5,), (1.5,))}


def token_ids(outputs):
    return [output.completions[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {}, {"heavy": 5, "recent": 4}, {"heavy": 0.0, "recent": 1}, {"sink": 2},
        {"heavy": 1.0, "recent": 0.0}, {"positions": "rolling"},
        {"positions": "rolling", "heavy": 6, "recent": 5}, {"evict_every": 8},
        {"evict_every": "prompt+4"}, {"scoring": "expected", "sink": 2, "evict_every": "prompt+3"},
        {"evict_every": 1}, {"kv_bits": 8}, {"kv_bits": 6}, {"kv_bits": 4},
        {"kv_bits": 4, "evict_every": 8}, {"kv_bits": 4, "layer_budgets": BY_HEAD},
        {"kv_bits": 4, "positions": "rolling"}, {"scoring": "mean"},
        {"scoring": "decay", "decay": 0.9}, {"scoring": "value_norm"}, {"scoring": "expected"},
        {"policy": "recent"}, {"policy": "sink_recent", "sink": 3}, {"policy": "strided_heavy"},
        {"policy": "random"}, {"layer_budgets": (1.5, 0.5)},
        {"layer_budgets": (0.4, 1.6), "heavy": 6, "recent": 3, "positions": "rolling"},
        {"layer_budgets": (1.25, 0.75), "scoring": "expected", "sink": 2, "evict_every": 8},
        {"layer_budgets": BY_HEAD}, OF_ONE_HEAD, OF_ONE_HEAD | {"heavy": 6, "recent": 3},
        OF_ONE_HEAD | {"scoring": "expected", "sink": 4},
        {"layer_budgets": ((0.5, 2.5), (0.0, 1.0)), "policy": "best", "heavy": 6, "recent": 3},
    ],
    ids=str,
)  # fmt: skip
def test_every_request_equals_generate(make_llama, make_llm, make_prompts, alone, greedy, options):
    options = dict(options)
    model = make_llama(kv_heads=options.pop("kv_heads", 2))
    prompts = make_prompts(LENGTHS)
    expected = [
        alone(model, prompt, new, **options) for prompt, new in zip(prompts, NEWS, strict=True)
    ]
    for chunk in (7, 512):
        llm = make_llm(model, max_prefill_tokens=chunk, max_prompt_tokens=64, **options)
        generated = token_ids(llm.generate(prompts, [greedy(new) for new in NEWS]))
        llm.close()
        assert generated == expected, f"max_prefill_tokens={chunk}"
        stats = llm.stats()
        assert (stats.finished, stats.running, stats.waiting) == (len(prompts), 0, 0)
        assert stats.new_tokens == sum(NEWS)
        assert stats.prompt_tokens == sum(LENGTHS)


def test_request_with_a_different_budget(make_llama, make_llm, make_prompts, alone, greedy):
    model = make_llama()
    prompts = make_prompts([40, 33, 50])
    llm = make_llm(model, heavy=10, recent=10)
    small = llm.engine.request(prompts[0], greedy(20), lambda event: None, h2okv.Budget(3, 2, 1))
    scheduler = llm.engine.scheduler
    scheduler.submit(small)
    generated = token_ids(llm.generate(prompts[1:], greedy(30)))
    llm.close()
    assert small.is_over
    assert small.outputs[0].tokens == alone(model, prompts[0], 20, heavy=3, recent=2, sink=1)
    assert generated == [alone(model, prompt, 30, heavy=10, recent=10) for prompt in prompts[1:]]


def test_best_measures_the_model(
    make_llama, make_llm, make_prompts, alone, greedy, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    best = {"policy": "best", "heavy": 0.17, "recent": 0.03}
    model = make_llama()
    model.resize_token_embeddings(4096)  # the tokenizer's
    llm = make_llm(model, **best)
    factors = llm.engine.config.cache.layer_budgets
    prompts = make_prompts([40, 33])
    generated = token_ids(llm.generate(prompts, greedy(20)))
    llm.close()
    assert len(list((tmp_path / "h2okv" / "layer-budgets").iterdir())) == 1
    assert isinstance(factors[0], tuple)
    assert generated == [
        alone(model, prompt, 20, layer_budgets=factors, **best) for prompt in prompts
    ]
    assert llm.engine.config.cache.label == "best-v5:20%"


def test_caches_that_cannot_be_pooled_raise(make_llama, make_llm, tokenizer):
    for policy in ("full", "snapkv"):
        with pytest.raises(ValueError, match=f"policy='{policy}' evicts nothing while") as refused:
            make_llm(make_llama(), policy=policy)
    # The remedy for a full cache holds the longest text.
    remedy = str(refused.value).rpartition(", ")[2].strip("'.")
    with h2okv.LLM(make_llama(), tokenizer, cache=remedy) as llm:
        assert llm.max_budget == 512
    with pytest.raises(ValueError, match="not held in slots; use h2okv batch"):
        make_llm(chunked_model())


@pytest.mark.parametrize(
    ("layers", "window", "factors"),
    [("sfs", 8, None), ("sfsf", 3, (0.5, 1.5)), ("sfsf", 3, ((0.5,), (1.5,)))],
    ids=str,
)
def test_sliding_window_layers_are_pooled(
    make_llm, make_prompts, alone, greedy, layers, window, factors
):
    """A window that is the index of a layer is not taken for its budget."""
    model = sliding_model(layers, window)
    prompts, options = make_prompts([40, 3, 8, 7, 9, 25]), {"heavy": 5, "recent": 4}
    options["layer_budgets"] = factors
    llm = make_llm(model, max_prefill_tokens=11, **options)
    generated = token_ids(llm.generate(prompts, greedy(20)))
    assert llm.stats().reserved_bytes == 3 * llm.engine.memory.sequence
    llm.close()
    assert generated == [alone(model, prompt, 20, **options) for prompt in prompts]


def sliding_model(layers, window):
    torch.manual_seed(0)
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    config = Gemma3TextConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=len(layers), num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=97, sliding_window=window,
        layer_types=[kinds[kind] for kind in layers], initializer_range=0.4, eos_token_id=None,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval().double()


def chunked_model():
    torch.manual_seed(0)
    config = Llama4TextConfig(
        hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=97,
        num_local_experts=2, layer_types=["chunked_attention", "full_attention"],
        attention_chunk_size=8, no_rope_layers=[1, 0],
    )  # fmt: skip
    return Llama4ForCausalLM(config).eval()
