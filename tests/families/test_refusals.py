"""Models that H2O would serve wrongly are refused: by name, or at the latest by their attention."""

import pytest
import torch
from family_harness import tokens
from family_table import FAMILIES, config_options
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

import h2okv
from h2okv.cache.support import REFUSED
from h2okv.integration.attention import h2o_attention

_SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 89, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_refused_by_name_with_the_reason(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {model_type}")
    config = AutoConfig.for_model(model_type)
    with pytest.raises(ValueError) as caught:
        h2okv.H2OCache(config)
    message = str(caught.value)
    assert "is not supported" in message and "use transformers' own cache" in message
    if not getattr(config, "is_encoder_decoder", False):
        assert repr(model_type) in message and REFUSED[model_type] in message
    with pytest.raises(ValueError, match="is not supported"):
        h2okv.check_model(config)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_family_of_the_table_is_refused(family):
    assert family.model_type not in REFUSED
    heads = family.kv_heads[0] if family.kv_heads else None
    h2okv.check_model(AutoConfig.for_model(family.model_type, **config_options(family, heads)))


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("gemma3n_text", {"num_kv_shared_layers": 15}, "keys of another layer"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "keys of another layer"),
        ("t5", {}, "encoder-decoder"),
        ("gpt_neox_japanese", {}, "computes attention itself"),
        ("llama", {"is_causal": False}, "is_causal=False"),
        ("mistral", {"sliding_window": 4096}, "no full-attention layer"),
        ("phi3", {"sliding_window": 2047}, "no full-attention layer"),
        ("mamba", {}, "no full-attention layer"),
        ("recurrent_gemma", {}, "no full-attention layer"),
        ("falcon_h1", {}, "caches attention and a linear state in one layer"),
    ],
)
def test_refused_by_the_config(model_type, options, reason):
    with pytest.raises(ValueError, match=reason):
        h2okv.H2OCache(AutoConfig.for_model(model_type, **options))


def test_indexed_layers_are_refused():
    if "indexed_attention" not in DYNAMIC_LAYER_TYPE_MAPPING:
        pytest.skip("this version of transformers has no indexed attention")
    config = AutoConfig.for_model("llama", num_hidden_layers=1, layer_types=["indexed_attention"])
    with pytest.raises(ValueError, match="indexer"):
        h2okv.H2OCache(config)


# Known reasons, checked on the model itself: each must fail loudly even if it was not listed.
_LOUD = [
    ("diffllama", {}, "attends twice"),
    ("jetmoe", {"num_local_experts": 2, "kv_channels": 8}, "attention is not 'h2o'"),
    ("bert", {"is_decoder": False}, "not causal"),
    ("doge", {"keep_window_size": 2}, "needs causal"),
]


@pytest.mark.parametrize(("model_type", "options", "message"), _LOUD, ids=[x[0] for x in _LOUD])
@torch.no_grad()
def test_an_unlisted_model_fails_loudly(model_type, options, message, monkeypatch):
    config = AutoConfig.for_model(model_type, **_SMALL | options)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.set_attn_implementation("h2o")
    monkeypatch.delitem(REFUSED, model_type)
    cache = h2okv.H2OCache(config, heavy=4, recent=4)
    with pytest.raises(ValueError, match=message):
        model(tokens(1, 20), past_key_values=cache)


def test_sinks_of_attention_that_is_not_causal_are_refused_without_a_cache_too():
    module = torch.nn.Module()
    module.is_causal = False
    states = torch.randn(3, 1, 2, 5, 8).unbind()
    with pytest.raises(ValueError, match="s_aux"):
        h2o_attention(module, *states, None, s_aux=torch.zeros(2))


@pytest.mark.parametrize(
    ("options", "mask", "message"),
    [
        ({"sliding_window": 4}, None, "sliding window in a layer"),
        ({"is_causal": False}, None, "not causal"),
        ({"position_bias": torch.zeros(1, 2, 5, 5)}, None, "position_bias"),
        ({"block_indices": torch.zeros(1)}, None, "block_indices"),
        ({}, torch.ones(1, 1, 5, 5, dtype=torch.bool), "needs causal"),
        ({}, torch.zeros(1, 1, 1, 5), "needs causal"),
        ({}, torch.full((1, 1, 1, 5), 4, dtype=torch.int32), "needs causal"),
    ],
    ids=["window", "bidirectional", "bias", "indexer", "dense", "additive", "window-mask"],
)
def test_the_attention_function_refuses(options, mask, message):
    cache = h2okv.H2OCache(AutoConfig.for_model("llama", **_SMALL), heavy=2, recent=2)
    query, key, value = torch.randn(3, 1, 2, 5, 8).unbind()
    key, value = cache.update(key, value, 0)
    with pytest.raises(ValueError, match=message):
        h2o_attention(torch.nn.Module(), query, key, value, mask, **options)
