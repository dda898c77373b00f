"""Each request equals its own ``generate``, whatever other sequences are in the batch."""

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Llama4ForCausalLM, Llama4TextConfig

import h2okv
from h2okv.cache.slot_pool import SlotPool

LENGTHS = [40, 3, 25, 1, 61, 8, 30, 17]
NEWS = [12, 20, 1, 15, 7, 18, 11, 9]


def token_ids(outputs):
    return [output.completions[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heavy": 5, "recent": 4},
        {"heavy": 0.0, "recent": 1},
        {"sink": 2},
        {"heavy": 1.0, "recent": 0.0},
        {"positions": "rolling"},
        {"positions": "rolling", "heavy": 6, "recent": 5},
        {"evict_every": 8},
        {"evict_every": "prompt+4"},
        {"scoring": "expected", "sink": 2, "evict_every": "prompt+3"},
        {"evict_every": 1},
        {"kv_bits": 8},
        {"kv_bits": 6},
        {"kv_bits": 4},
        {"kv_bits": 4, "evict_every": 8},
        {"kv_bits": 4, "layer_budgets": ((0.5, 1.5), (1.75, 0.25))},
        {"kv_bits": 4, "positions": "rolling"},
        {"scoring": "mean"},
        {"scoring": "decay", "decay": 0.9},
        {"scoring": "value_norm"},
        {"scoring": "expected"},
        {"policy": "recent"},
        {"policy": "sink_recent", "sink": 3},
        {"policy": "strided_heavy"},
        {"policy": "random"},
        {"layer_budgets": (1.5, 0.5)},
        {"layer_budgets": (0.4, 1.6), "heavy": 6, "recent": 3, "positions": "rolling"},
        {"layer_budgets": (1.25, 0.75), "scoring": "expected", "sink": 2, "evict_every": 8},
        {"layer_budgets": ((0.5, 1.5), (1.75, 0.25))},
        {"layer_budgets": ((0.5, 2.5), (0.0, 1.0)), "policy": "best", "heavy": 6, "recent": 3},
    ],
    ids=str,
)
def test_every_request_equals_generate(make_llama, make_llm, make_prompts, alone, greedy, options):
    model = make_llama()
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


@pytest.mark.parametrize(
    "options", [{}, {"heavy": 6, "recent": 3}, {"scoring": "expected", "sink": 4}], ids=str
)
def test_budgets_by_head_of_a_single_kv_head(
    make_llama, make_llm, make_prompts, alone, greedy, options
):
    model = make_llama(kv_heads=1)
    options = {"layer_budgets": ((0.5,), (1.5,)), **options}
    prompts = make_prompts(LENGTHS)
    llm = make_llm(model, max_prompt_tokens=64, **options)
    generated = token_ids(llm.generate(prompts, [greedy(new) for new in NEWS]))
    llm.close()
    pairs = zip(prompts, NEWS, strict=True)
    assert generated == [alone(model, prompt, new, **options) for prompt, new in pairs]


@pytest.mark.parametrize("factors", [None, (0.5, 1.5), ((0.5, 1.5), (0.5, 1.5))], ids=str)
def test_prefill_in_chunks_of_one_token_over_several_forwards(
    make_llama, make_llm, make_prompts, alone, greedy, kept_sets, factors
):
    """Fill each layer at another token; `generate` continues from a manual prefill."""
    model = make_llama()
    options = {"heavy": 4, "recent": 2, "evict_every": 1, "layer_budgets": factors}
    prompts = make_prompts([40, 33, 40, 50, 9, 40])
    llm = make_llm(model, max_num_seqs=6, max_prefill_tokens=16, max_prompt_tokens=64, **options)
    generated = token_ids(llm.generate(prompts, greedy(16)))
    llm.close()
    for prompt, tokens in zip(prompts, generated, strict=True):
        cache, in_chunks = (h2okv.H2OCache(model.config, **options) for _ in range(2))
        with torch.no_grad(), h2okv.enable(model):
            for chunk in torch.tensor([prompt[:-1]]).split(1, dim=1):
                model(chunk, past_key_values=cache)
            for chunk in torch.tensor([prompt[:-1]]).split(16, dim=1):
                model(chunk, past_key_values=in_chunks)
        in_chunks.check_integrity()
        assert kept_sets(in_chunks) == kept_sets(cache)
        assert tokens == alone(model, prompt, 16, cache=cache)


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


def test_nan_of_a_released_sequence_does_not_reach_the_next_one(make_llama, kept_sets):
    """Admit a sequence into slots that a sequence with NaN values has left."""
    model = make_llama()
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))

    def read(tokens, heavy):
        cache = h2okv.H2OCache(model.config, heavy, 2)
        model(tokens, past_key_values=cache, logits_to_keep=1)
        return cache

    with torch.no_grad():
        block = SlotPool(read(ids[:1, :4], 1), 2, (12, 12))
        broken = read(ids[:1], 10)
        for layer in broken.layers:
            layer.values.fill_(torch.nan)
        assert block.admit(broken) == 0
        assert block.release(0) is None
        fine = read(ids[1:, :30], 3)
        assert block.admit(fine) == 0
        for step in range(6):
            position = torch.tensor([[30 + step]])
            token = ids[1:, 30 + step : 31 + step]
            generated = model(token, position_ids=position, past_key_values=block.cache).logits
            expected = model(token, position_ids=position, past_key_values=fine).logits
            torch.testing.assert_close(generated, expected, atol=1e-5, rtol=1e-5)
            block.count_step()
    assert kept_sets(block.cache) == kept_sets(fine)
    block.cache.check_integrity()
    slots = 2 * 13
    masks = 2 * slots  # a byte for each head, for all layers alike
    assert abs(block.held_bytes - (block.nbytes - masks) * 5 / slots) <= 1
    assert block.full_bytes == block.full_bytes_of(36)


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


def test_sliding_window_layers_are_pooled(make_llm, make_prompts, alone, greedy):
    model = sliding_model()
    prompts = make_prompts([40, 3, 8, 7, 9, 25])
    llm = make_llm(model, max_prefill_tokens=11, heavy=5, recent=4)
    generated = token_ids(llm.generate(prompts, greedy(20)))
    reserved = llm.stats().reserved_bytes
    assert reserved == 3 * llm.engine.memory.sequence
    llm.close()
    assert generated == [alone(model, prompt, 20, heavy=5, recent=4) for prompt in prompts]


@pytest.mark.parametrize("factors", [(0.5, 1.5), ((0.5,), (1.5,))], ids=str)
def test_sliding_window_equal_to_a_layer_index_is_not_a_budget(
    make_llm, make_prompts, alone, greedy, factors
):
    layers = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    model = sliding_model(layers, window=3)
    options = {"heavy": 5, "recent": 4, "layer_budgets": factors}
    prompts = make_prompts([40, 3, 8, 25])
    llm = make_llm(model, **options)
    generated = token_ids(llm.generate(prompts, greedy(12)))
    llm.close()
    assert generated == [alone(model, prompt, 12, **options) for prompt in prompts]


def sliding_model(layers=("sliding_attention", "full_attention", "sliding_attention"), window=8):
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=len(layers), num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=97, sliding_window=window,
        layer_types=list(layers), initializer_range=0.4, eos_token_id=None,
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
