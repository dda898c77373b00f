"""Autocast and default dtypes: as near to the truth as SDPA, and dropping is masking."""

from contextlib import nullcontext

import pytest
import torch
from oracle import cache_of
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM, OPTConfig, OPTForCausalLM

import h2okv

SIZES = (26, 1, 1, 1, 7, 1, 1, 2)
PROMPT = sum(SIZES)
BUDGETS = {"full slots": (5, 4), "empty slots": (PROMPT, PROMPT)}
HALVES = (torch.bfloat16, torch.float16)
SCOPES = {"everything": (True, True), "prompt": (True, False), "steps": (False, True)}


def tokens(length: int = PROMPT) -> torch.Tensor:
    return torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def forced(model, cache, dtype, scope="everything") -> torch.Tensor:
    """Logits of a prompt, single tokens and further turns; ``scope`` is under autocast."""
    ids, logits, start = tokens(), [], 0
    for size in SIZES:
        is_cast = dtype is not None and SCOPES[scope][start > 0]
        with torch.autocast("cpu", dtype=dtype) if is_cast else nullcontext():
            block = ids[:, start : start + size]
            logits.append(model(block, past_key_values=cache).logits.double())
        start += size
    return torch.cat(logits, dim=1)


@pytest.fixture(scope="module")
def models(make_llama):
    """Make models; autocast changes the dtype of OPT's keys, Gemma 2 caps and has windows."""
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
    torch.manual_seed(0)
    return {
        "llama": make_llama(),
        "mha": make_llama(heads=4, kv_heads=4),
        "opt": OPTForCausalLM(
            OPTConfig(**small, ffn_dim=64, word_embed_proj_dim=64, max_position_embeddings=128)
        ).eval(),
        "gemma2": Gemma2ForCausalLM(
            Gemma2Config(
                **small, intermediate_size=64, num_key_value_heads=2, head_dim=16, sliding_window=16
            )
        ).eval(),
    }


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["llama", "mha", "opt", "gemma2"])
def test_error_is_no_larger_than_that_of_sdpa(models, name, dtype, scope):
    model = models[name]
    # SDPA has no soft cap.
    model.set_attn_implementation("eager" if name == "gemma2" else "sdpa")
    truth = forced(model, DynamicCache(config=model.config), None)
    plain = forced(model, DynamicCache(config=model.config), dtype, scope)
    model.set_attn_implementation("h2o")
    for masks in (False, True):
        cache = cache_of(model.config, heavy=PROMPT, recent=PROMPT, masks=masks)
        error = (forced(model, cache, dtype, scope) - truth).abs().mean()
        cache.check_integrity()
        assert error <= 1.25 * (plain - truth).abs().mean()


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"positions": "rolling"}, {"evict_every": 9}, {"kv_bits": 8}, {"scoring": "value_norm"}],
    ids=str,
)
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_dropping_is_masking(models, kept_sets, budget, options, dtype, scope):
    model = models["llama"]
    model.set_attn_implementation("h2o")
    caches, logits = [], []
    with h2okv.enable(model):
        for masks in (False, True):
            cache = cache_of(model.config, *budget, masks=masks, **options)
            logits.append(forced(model, cache, dtype, scope))
            cache.check_integrity()
            caches.append(cache)
    assert kept_sets(caches[0]) == kept_sets(caches[1])
    torch.testing.assert_close(*logits, atol=0.05, rtol=0.02)
    for cache in caches:
        layer = cache.layers[0]
        assert layer.state.scores.dtype == torch.float32
        if "kv_bits" not in options:
            assert layer.keys.dtype == layer.values.dtype == layer.dtype


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_probabilities_are_not_rounded(models, dtype):
    model = models["llama"]
    model.set_attn_implementation("h2o")
    cache = cache_of(model.config, policy="full")
    forced(model, cache, dtype)
    for layer in range(2):
        # Each query head of each token gives away a probability of one.
        total = cache.scores(layer).double().sum(dim=-1)
        torch.testing.assert_close(total, torch.full_like(total, 2.0 * PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_generate(models, budget, dtype):
    model = models["llama"]
    texts = []
    with torch.autocast("cpu", dtype=dtype), h2okv.enable(model):
        for masks in (False, True):
            cache = cache_of(model.config, *budget, masks=masks)
            options = {"max_new_tokens": 12, "do_sample": False}
            texts.append(model.generate(tokens(20), past_key_values=cache, **options))
    assert torch.equal(*texts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"positions": "rolling", "sink": 2}, {"evict_every": 9}, {"kv_bits": 4},
     {"scoring": "decay"}, {"scoring": "value_norm"}, {"scoring": "mean"}, {"policy": "random"},
     {"masks": True}, {"policy": "snapkv"}],
    ids=str,
)  # fmt: skip
def test_the_default_dtype_makes_no_difference(models, kept_sets, options, dtype):
    model = models["llama"]
    outputs = []
    with h2okv.enable(model):
        for default in (torch.float32, dtype):
            torch.set_default_dtype(default)
            try:
                cache = cache_of(model.config, heavy=5, recent=4, **options)
                logits = forced(model, cache, None)
            finally:
                torch.set_default_dtype(torch.float32)
            cache.check_integrity()
            outputs.append((logits, kept_sets(cache), cache.scores(0)))
    assert torch.equal(outputs[0][0], outputs[1][0]) and outputs[0][1] == outputs[1][1]
    assert torch.equal(outputs[0][2], outputs[1][2]) and outputs[1][2].dtype == torch.float32
