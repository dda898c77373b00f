"""Packed linear layers against those of torch: the same numbers, and nothing held twice."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import h2okv
from h2okv.cache.argument import CACHE
from h2okv.integration import packed_linear
from h2okv.integration.packed_linear import PackedLinear, pack_linear_layers
from h2okv.provenance import fingerprint

pytestmark = pytest.mark.skipif(
    pack_linear_layers(nn.Linear(8, 8)) == 0, reason="this processor's layers are not packed"
)
DTYPES = [torch.float32, torch.bfloat16]


def close(found, expected):
    assert found.dtype == expected.dtype
    # In bf16 both round fp32 sums, which may be of another order.
    atol = 1e-5 if found.dtype == torch.float32 else 0.02
    torch.testing.assert_close(found, expected, atol=atol, rtol=atol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_the_layer(dtype, bias):
    torch.manual_seed(0)
    layer = nn.Linear(48, 80, bias=bias, dtype=dtype)
    states = torch.randn(3, 65, 48, dtype=dtype)
    inputs = [
        states, states[:, -1:], states[0], states[0, 0], states[:, :0],
        states[:1].expand(4, -1, -1), states.transpose(0, 1),
        torch.randn(65, 96, dtype=dtype)[:, ::2],
    ]  # fmt: skip
    expected = [layer(own) for own in inputs]
    weight = layer.weight.detach().clone()
    assert pack_linear_layers(layer) == 1
    assert torch.equal(layer.weight.to_dense(), weight)
    assert layer.weight.nbytes == weight.nbytes
    for own, right in zip(inputs, expected, strict=True):
        close(layer(own), right)


def make(tied, dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, vocab_size=97, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_left_as_it_is(tied):
    model = make(tied)
    before = sum(parameter.nbytes for parameter in model.parameters())
    assert pack_linear_layers(model) == 2 * 7 + (not tied)
    assert isinstance(model.lm_head, PackedLinear) is not tied
    assert sum(parameter.nbytes for parameter in model.parameters()) == before
    assert pack_linear_layers(model) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_text_and_saved_caches_are_the_same(dtype, tmp_path):
    model = make(True, dtype)
    ids = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    print_before = fingerprint(model)

    def answer():
        cache = h2okv.H2OCache(model.config, heavy=6, recent=6)
        with h2okv.enable(model):
            made = model.generate(ids, **{CACHE: cache}, max_new_tokens=8, do_sample=False)
        return made, cache

    expected, cache = answer()
    cache.save(tmp_path / "cache.safetensors")
    pack_linear_layers(model)
    assert fingerprint(model) == print_before
    assert torch.equal(answer()[0], expected)
    h2okv.H2OCache.load(tmp_path / "cache.safetensors", model)


def test_where_it_was_not_measured_nothing_is_packed(monkeypatch):
    monkeypatch.setattr(packed_linear.platform, "machine", lambda: "aarch64")
    assert pack_linear_layers(nn.Linear(8, 8)) == 0
    monkeypatch.undo()
    assert pack_linear_layers(nn.Linear(8, 8, dtype=torch.float64)) == 0
    assert pack_linear_layers(nn.Linear(8, 8, device="meta")) == 0
