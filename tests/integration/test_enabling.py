import inspect

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import h2okv
from h2okv.integration.attention import h2o_attention


@pytest.fixture
def model(make_llama):
    return make_llama(attention="sdpa")


def test_attention_is_restored_after_an_error(model):
    with pytest.raises(RuntimeError), h2okv.enable(model):
        assert model.config._attn_implementation == "h2o"
        raise RuntimeError
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks


def test_unsupported_model_is_refused_by_name():
    config = BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=50)
    for make in (h2okv.H2OCache, h2okv.check_model):
        with pytest.raises(ValueError, match="'bloom' is not supported.*ALiBi"):
            make(config)
    with (
        pytest.raises(ValueError, match="'bloom' is not supported"),
        h2okv.enable(BloomForCausalLM(config)),
    ):
        pass


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mask", ["none", "ones"])
def test_padded_batch_without_a_mask_is_refused(model, side, mask):
    input_ids = torch.randint(2, 97, (2, 12))
    input_ids[1, slice(0, 4) if side == "left" else slice(8, 12)] = model.config.pad_token_id
    attention_mask = None if mask == "none" else torch.ones_like(input_ids)
    with (
        h2okv.enable(model),
        pytest.raises(ValueError, match=f"row 1 of the batch is padded on the {side}"),
    ):
        model(
            input_ids,
            attention_mask=attention_mask,
            past_key_values=h2okv.H2OCache(model.config),
        )


def test_padded_batch_with_a_mask_passes(model):
    input_ids = torch.randint(2, 97, (2, 12))
    input_ids[1, :4] = model.config.pad_token_id
    mask = (input_ids != model.config.pad_token_id).long()
    cache = h2okv.H2OCache(model.config, heavy=3, recent=3)
    with h2okv.enable(model):
        model.generate(
            input_ids, attention_mask=mask, past_key_values=cache, max_new_tokens=5, do_sample=False
        )
    cache.check_integrity()


def test_attention_takes_its_arguments_in_the_order_of_transformers():
    """Packages that wrap all registered functions pass them by place."""
    own = list(inspect.signature(h2o_attention).parameters)
    theirs = list(inspect.signature(sdpa_attention_forward).parameters)
    assert own[:7] == theirs[:7]
