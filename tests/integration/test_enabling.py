import gc
import inspect
import weakref

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
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
def test_padded_batch_without_a_mask_is_refused(model, side):
    input_ids = torch.randint(2, 97, (2, 12))
    input_ids[1, slice(0, 4) if side == "left" else slice(8, 12)] = model.config.pad_token_id
    for arguments in ((), (None,)):
        with (
            h2okv.enable(model),
            pytest.raises(ValueError, match=f"row 1 of the batch is padded on the {side}"),
        ):
            model(input_ids, *arguments, past_key_values=h2okv.H2OCache(model.config))


def test_an_explicit_mask_is_trusted(model):
    """Read the padding token as text, which it also begins or ends in SmolLM2 and Granite."""
    ids, mask = torch.randint(2, 97, (3, 12)), torch.ones(3, 12, dtype=torch.long)
    ids[0, -1] = ids[1, 0] = ids[2, :5] = model.config.pad_token_id
    mask[2, :4] = 0  # and the fifth is text
    options = {"max_new_tokens": 5, "do_sample": False}
    recipe = {"custom_generate": str(h2okv.recipe_path()), "trust_remote_code": True}
    expected = model.generate(ids, attention_mask=mask, **options)
    cache = h2okv.H2OCache(model, heavy=20, recent=20)
    with h2okv.enable(model):
        output = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    assert torch.equal(output, expected)
    output = model.generate(ids, attention_mask=mask, heavy=20, recent=20, **options, **recipe)
    assert torch.equal(output, expected)
    logits = h2okv.prefill(model, ids, h2okv.H2OCache(model, 20, 20), mask)
    torch.testing.assert_close(logits, model(ids, attention_mask=mask).logits[:, -1])
    unpadded = ids[:2], mask[:2]
    expected = model.generate(unpadded[0], attention_mask=unpadded[1], **options)
    cache = h2okv.H2OCache(model, heavy=20, recent=20)
    with h2okv.enable(model):  # generate drops a mask of ones
        output = model.generate(
            unpadded[0], attention_mask=unpadded[1], past_key_values=cache, **options
        )
    assert torch.equal(output, expected)
    logits = h2okv.prefill(model, ids[:2], h2okv.H2OCache(model, 20, 20, evict_every=5), mask[:2])
    assert logits.shape == (2, 97)
    torch.testing.assert_close(logits, model(*unpadded).logits[:, -1], atol=1e-4, rtol=1e-4)


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


def is_enabled(model):
    hooks = len(model._forward_pre_hooks)
    assert hooks == (2 if model.config._attn_implementation == "h2o" else 0)
    return bool(hooks)


def test_a_call_switches_the_model_until_it_is_disabled(model):
    ids = torch.randint(2, 97, (1, 30))
    h2okv.enable(model)
    assert is_enabled(model)
    model(ids, past_key_values=h2okv.H2OCache(model, 6, 6))
    h2okv.enable(model)  # a cell of a notebook that runs again
    with h2okv.enable(model) as inner:
        assert inner is model
    assert is_enabled(model)
    h2okv.disable(model)
    assert not is_enabled(model)
    h2okv.disable(model)  # without effect
    with pytest.raises(ValueError, match=r"call h2okv\.enable\(model\), then cache\.reset\(\)"):
        model.generate(ids, past_key_values=h2okv.H2OCache(model, 6, 6), max_new_tokens=3)


def test_what_enable_returns_is_used_like_the_model(model):
    ids = torch.randint(2, 97, (1, 30))
    options = {"max_new_tokens": 5, "do_sample": False}
    enabled = h2okv.enable(model)
    output = enabled.generate(ids, past_key_values=h2okv.H2OCache(enabled, 6, 6), **options)
    assert torch.equal(
        output, model.generate(ids, past_key_values=h2okv.H2OCache(model, 6, 6), **options)
    )
    logits = enabled(ids, past_key_values=h2okv.H2OCache(model, 6, 6)).logits
    assert enabled.config is model.config and logits.shape == (1, 30, 97)
    with enabled:
        pass
    assert not is_enabled(model)  # the block took over what the call began


def test_an_open_block_outlives_disable(model):
    with h2okv.enable(model):
        h2okv.enable(model)
        h2okv.disable(model)
        assert is_enabled(model)
    assert not is_enabled(model)


def test_an_enabled_model_can_be_freed(make_llama):
    model = make_llama(attention="sdpa")
    h2okv.enable(model)
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None


def test_blocks_may_be_nested(model):
    with h2okv.enable(model):
        with h2okv.enable(model):
            pass
        assert model.config._attn_implementation == "h2o"
        assert len(model._forward_pre_hooks) == 2
    assert model.config._attn_implementation == "sdpa" and not model._forward_pre_hooks


def test_blocks_may_overlap(model):
    """End blocks in the order they began, as threads may: the last one restores the model."""
    first, second = h2okv.enable(model), h2okv.enable(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert model.config._attn_implementation == "h2o"
    second.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa" and not model._forward_pre_hooks


def test_each_part_of_a_composite_model_gets_its_own_attention_back():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, num_hidden_layers=1, image_size=8, patch_size=4),
        text_config=LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=50),
    )
    model = LlavaForConditionalGeneration(config).eval()
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})

    def attention():
        outer_config = model.config
        sizes = (outer_config, outer_config.text_config, outer_config.vision_config)
        return [subconfig._attn_implementation for subconfig in sizes]

    before = attention()
    with h2okv.enable(model):
        assert attention()[1] == "h2o"
    assert attention() == before and before[1:] == ["eager", "sdpa"]


@pytest.mark.slow
def test_a_compiled_model_is_unwrapped(model):
    compiled = torch.compile(model, backend="eager")
    h2okv.check_model(compiled)
    ids = torch.randint(2, 97, (1, 30))
    with h2okv.enable(model):
        expected = model(ids, past_key_values=h2okv.H2OCache(model.config, 3, 3)).logits
    with h2okv.enable(compiled) as enabled:
        assert enabled is compiled and model.config._attn_implementation == "h2o"
        logits = compiled(ids, past_key_values=h2okv.H2OCache(compiled, 3, 3)).logits
    torch.testing.assert_close(logits, expected)
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks and not compiled._forward_pre_hooks


@pytest.mark.parametrize("call", [h2okv.H2OCache, h2okv.check_model])
def test_enable_refuses_other_types(call):
    with pytest.raises(ValueError, match="model=Linear is not a model of transformers"):
        call(torch.nn.Linear(2, 2))


def test_attention_takes_its_arguments_in_the_order_of_transformers():
    """Packages that wrap all registered functions pass them by place."""
    names = list(inspect.signature(h2o_attention).parameters)
    expected = list(inspect.signature(sdpa_attention_forward).parameters)
    assert names[:7] == expected[:7]
