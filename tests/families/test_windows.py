"""Sliding windows in O(T) memory: the same numbers as transformers' T x T mask."""

import pytest
import torch
from family_harness import TOLERANCE, tokens
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    StaticCache,
)
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from h2okv.integration.attention import REACH_DTYPE, WINDOW_DTYPE, h2o_mask, plain_attention
from h2okv.ops.attention import windowed_attention
from h2okv.ops.reference import AttentionSpec

SIZES = {"batch_size": 2, "device": torch.device("cpu")}


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[2]))


@pytest.mark.parametrize("softcap, sinks", [(None, None), (2.0, None), (None, [-2.0, 0.5, 2, 9])])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("past", [0, 5, 63])
@pytest.mark.parametrize("window", [1, 5, 64, 111, 500])
def test_equals_the_dense_mask(window, past, padded, softcap, sinks):
    length = 150
    total = past + length
    query, key, value = _random(2, 4, length, 8), _random(2, 2, total, 8), _random(2, 2, total, 6)
    real = torch.ones(2, total, dtype=torch.bool)
    if padded:
        real[0, : past + 70] = False
    sizes = {"q_length": length, "kv_length": total, "q_offset": past, "kv_offset": 0}
    pattern = {
        "mask_function": sliding_window_causal_mask_function(window),
        "local_size": window,
        "attention_mask": real,
    }
    mask = h2o_mask(**sizes, **pattern, **SIZES)
    dense = sdpa_mask(**sizes, **pattern, **SIZES, allow_is_causal_skip=False)
    assert mask is None or mask.shape[-2] == 1
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    options = {} if sinks is None else {"s_aux": torch.tensor(sinks)}
    output, _ = plain_attention(module, query, key, value, mask, 0.5, 0.0, softcap, options)
    logits = query.unflatten(1, (2, 2)) @ key.unsqueeze(2).transpose(-1, -2) * 0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~dense.unsqueeze(2), -torch.inf)
    column = torch.tensor([-torch.inf] * 4 if sinks is None else sinks).view(2, 2, 1, 1)
    column = column.expand(*logits.shape[:-1], 1)
    weights = torch.cat([logits, column], dim=-1).softmax(dim=-1)[..., :-1]
    expected = (weights @ value.unsqueeze(2)).flatten(1, 2).transpose(1, 2)
    seen = real[:, past:]
    torch.testing.assert_close(output[seen], expected[seen], atol=1e-5, rtol=0)


def test_gradients_pass():
    tensors = [_random(1, 2, 100, 8).requires_grad_() for _ in range(3)]
    windowed_attention(*tensors, None, AttentionSpec(0.3, window=7)).square().sum().backward()
    dense = sdpa_mask(
        batch_size=1,
        q_length=100,
        kv_length=100,
        mask_function=sliding_window_causal_mask_function(7),
        local_size=7,
    )
    copies = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = torch.nn.functional.scaled_dot_product_attention(*copies, attn_mask=dense, scale=0.3)
    output.square().sum().backward()
    for tensor, copy in zip(tensors, copies, strict=True):
        torch.testing.assert_close(tensor.grad, copy.grad, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        (chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.long)), {"local_size": 8}),
        (chunked_causal_mask_function(8, torch.tensor([3, 0])), {"local_size": 8}),
        (chunked_causal_mask_function(1, torch.zeros(2, dtype=torch.long)), {"local_size": 1}),
        (sliding_window_causal_mask_function(8), {"allow_is_causal_skip": False}),
        # What transformers does when it lays another pattern over the window.
        (sliding_window_causal_mask_function(8), {"local_size": 8, "allow_is_causal_skip": False}),
        (bidirectional_mask_function, {"allow_is_causal_skip": False}),
    ],
    ids=["chunked", "chunked-padded", "chunks-of-one", "unnamed", "overlaid", "bidirectional"],
)
def test_other_patterns_keep_their_dense_mask(pattern, options):
    sizes = {"q_length": 20, "kv_length": 20, "mask_function": pattern, **SIZES}
    mask = h2o_mask(**sizes, **options)
    dense = sdpa_mask(**sizes, **options)
    if options.get("local_size") == 1:
        # Chunks of one token and a window of one are the same pattern.
        assert mask.dtype == WINDOW_DTYPE
    elif pattern is bidirectional_mask_function:  # every token sees the last one
        assert mask.dtype == REACH_DTYPE and mask.unique().tolist() == [19]
    else:
        assert torch.equal(mask, dense)


def test_a_window_that_reaches_everything_is_causal():
    pattern = {"mask_function": sliding_window_causal_mask_function(20), "local_size": 20}
    assert h2o_mask(q_length=20, kv_length=20, **pattern, **SIZES) is None
    assert h2o_mask(q_length=20, kv_length=20, mask_function=causal_mask_function, **SIZES) is None


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gpt_oss"])
def test_training_passes_the_same_gradients(kind):
    """No cache, gradients on: what a user gets who fine-tunes with the attention left at h2o."""
    model = _model(kind)
    ids = tokens(2, 30)
    grads = []
    for attention in ("eager", "h2o"):
        model.set_attn_implementation(attention)
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        weights = [layer.self_attn.q_proj.weight for layer in model.model.layers]
        if kind == "gpt_oss":
            weights += [layer.self_attn.sinks for layer in model.model.layers]
        grads.append([weight.grad.clone() for weight in weights])
    for expected, grad in zip(*grads, strict=True):
        torch.testing.assert_close(grad, expected, atol=1e-5, rtol=0)
        assert expected.abs().max() > 1e-4


@pytest.mark.parametrize("cache_type", [DynamicCache, StaticCache])
@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gpt_oss"])
@torch.no_grad()
def test_h2o_attention_with_another_cache(kind, cache_type):
    """Turns and steps of a padded batch on transformers' own caches."""
    model = _model(kind)
    ids = tokens(2, 45)
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    logits = []
    for attention in ("eager", "h2o"):
        model.set_attn_implementation(attention)
        size = {"max_cache_len": 60} if cache_type is StaticCache else {}
        cache = cache_type(config=model.config, **size)
        turns = [
            model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits
            for start, stop in ((0, 30), (30, 42), (42, 43), (43, 44), (44, 45))
        ]
        logits.append(torch.cat(turns, dim=1))
    seen = mask.to(torch.bool)
    torch.testing.assert_close(logits[1][seen], logits[0][seen], atol=TOLERANCE, rtol=0)


def _model(kind: str):
    options = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 89,
        "sliding_window": 8, "initializer_range": 0.3,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "gpt_oss":
        config = GptOssConfig(**options, num_local_experts=4, num_experts_per_tok=2)
        return GptOssForCausalLM._from_config(config, attn_implementation="eager").eval()
    options["query_pre_attn_scalar"] = 4
    if kind == "gemma2":
        config = Gemma2Config(**options, attn_logit_softcapping=3.0)
        return Gemma2ForCausalLM._from_config(config, attn_implementation="eager").eval()
    config = Gemma3TextConfig(**options)
    return Gemma3ForCausalLM._from_config(config, attn_implementation="eager").eval()
