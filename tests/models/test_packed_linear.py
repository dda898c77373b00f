"""Packed linear layers against those of torch: the same numbers, and nothing held twice."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import h2okv
from h2okv.cache.argument import CACHE
from h2okv.models import packed_linear
from h2okv.models.packed_linear import (
    Int4Linear,
    PackedLinear,
    check_weight_bits,
    pack_linear_layers,
)
from h2okv.provenance import fingerprint

pytestmark = pytest.mark.skipif(
    pack_linear_layers(nn.Linear(8, 8, dtype=torch.bfloat16)) == 0,
    reason="this processor's layers are not packed, or not in bf16",
)
DTYPES = [torch.float32, torch.bfloat16]


def close(actual, expected):
    assert actual.dtype == expected.dtype
    # In bf16 both round fp32 sums, which may be of another order.
    atol = 1e-5 if actual.dtype == torch.float32 else 0.02
    torch.testing.assert_close(actual, expected, atol=atol, rtol=atol)


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
    expected = [layer(sample) for sample in inputs]
    weight = layer.weight.detach().clone()
    assert pack_linear_layers(layer) == 1
    assert torch.equal(layer.weight.to_dense(), weight)
    assert layer.weight.nbytes == weight.nbytes
    for sample, right in zip(inputs, expected, strict=True):
        close(layer(sample), right)


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
            output = model.generate(ids, **{CACHE: cache}, max_new_tokens=8, do_sample=False)
        return output, cache

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


def on_a_grid(outputs, inputs):
    """Make a weight whose groups of 32 have 16 values each, with steps that bf16 holds."""
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (outputs, inputs // 32, 32), generator=generator)
    codes[..., 0], codes[..., 1] = 0, 15  # both ends are there
    steps = 2.0 ** torch.randint(-9, -4, (outputs, inputs // 32, 1), generator=generator)
    return ((codes - 8) * steps).view(outputs, inputs).bfloat16()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(16, 32), (80, 64), (576, 1536)], ids=str)
def test_weights_that_were_of_4_bits_stay_what_they_were(shape, bias):
    outputs, inputs = shape
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16)
    layer.weight.data = on_a_grid(outputs, inputs)
    states = torch.randn(2, 9, inputs, dtype=torch.bfloat16)
    rows = [states[:1, :1], states[:, :1], states[:, :2], states[0, 0], states, states[:, :0]]
    expected = [layer(sample) for sample in rows]
    weight = layer.weight.detach().clone()
    assert pack_linear_layers(layer, 4) == 1
    assert type(layer) is Int4Linear
    assert torch.equal(layer.weight.to_dense(), weight)
    for sample, right in zip(rows, expected, strict=True):
        torch.testing.assert_close(layer(sample), right, atol=0.01, rtol=0.02)


def test_any_weights_are_rounded_and_all_rows_see_the_same():
    torch.manual_seed(3)
    layer = nn.Linear(128, 96, dtype=torch.bfloat16)
    layer.weight.data[5] = 0.25  # a row of one value has no step
    before = layer.weight.detach().float()
    states = torch.randn(5, 128, dtype=torch.bfloat16)
    pack_linear_layers(layer, 4)
    after = layer.weight.to_dense().float()
    # At most half a step of 1/15 of the range, and what bf16 rounds.
    span = before.view(96, 4, 32).aminmax(dim=-1)
    step = (span.max - span.min).repeat_interleave(32, 1) / 15
    assert ((after - before).abs() <= 0.55 * step + 0.01 * before.abs()).all()
    assert 0.01 < (after - before).norm() / before.norm() < 0.1
    assert torch.equal(after[5], before[5])
    torch.testing.assert_close(layer(states[:2]), layer(states)[:2], atol=0.01, rtol=0.02)


def test_sizes_that_do_not_fit_are_packed_only():
    for sizes in ((48, 32), (64, 40)):
        fitting = nn.Linear(32, 16, dtype=torch.bfloat16)
        layers = nn.Sequential(nn.Linear(*sizes, dtype=torch.bfloat16), fitting)
        assert pack_linear_layers(layers, 4) == 2
        assert [type(layer) for layer in layers] == [PackedLinear, Int4Linear]


def test_a_model_without_layers_that_fit_is_refused():
    with pytest.raises(ValueError, match="weight_bits=4: .*Linear has no linear layers.*leave it"):
        pack_linear_layers(nn.Linear(48, 32, dtype=torch.bfloat16), 4)


@pytest.mark.parametrize(
    ("bits", "dtype", "device", "words"),
    [
        (8, None, "cpu", "^weight_bits=8 is not known .*give 4"),
        (4, torch.float32, "cpu", "not in float32; give dtype bfloat16"),
        (4, None, "cuda", "not for cuda; .*leave it out"),
    ],
)
def test_where_few_bits_do_not_pay_they_are_refused(bits, dtype, device, words):
    with pytest.raises(ValueError, match=words):
        check_weight_bits(bits, dtype, torch.device(device))


def test_the_engine_loads_them():
    params = h2okv.SamplingParams(max_tokens=6, temperature=0.0)
    prompts = [[5, 6, 7], [8, 9]]
    llm = h2okv.LLM("bundled", weight_bits=4, max_num_seqs=2)
    layers = [output for output in llm.engine.model.modules() if isinstance(output, Int4Linear)]
    assert llm.engine.model.dtype == torch.bfloat16
    assert len(layers) > 0
    assert "bundled in bfloat16 and 4-bit weights on cpu" in llm.describe()
    assert all(
        len(output.completions[0].token_ids) == 6 for output in llm.generate(prompts, params)
    )
    with pytest.raises(ValueError, match="weight_bits=4 is for a model that is loaded here"):
        h2okv.LLM(llm.engine.model, weight_bits=4)
    with pytest.raises(ValueError, match="exclude each other"):
        h2okv.LLM("bundled", weight_bits=4, tensor_parallel=True)


def test_a_cpu_without_bf16_is_refused(monkeypatch):
    monkeypatch.setattr(packed_linear, "_multiplies", lambda dtype: dtype == torch.float32)
    assert pack_linear_layers(nn.Linear(32, 16, dtype=torch.bfloat16)) == 0
    with pytest.raises(ValueError, match="needs a CPU that multiplies bfloat16"):
        check_weight_bits(4, None, torch.device("cpu"))


def test_settings_of_the_libraries_kernels_stay(monkeypatch):
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "77")
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    pack_linear_layers(nn.Linear(8, 8, dtype=torch.bfloat16))
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "77"
    assert os.environ["LRU_CACHE_CAPACITY"] == "128"


LENGTHS = """
import torch
from torch import nn
from h2okv.engine.memory import resident_bytes
from h2okv.models.packed_linear import pack_linear_layers

layers = [nn.Linear(896, size, dtype=torch.bfloat16) for size in (128, 896, 1792, 4864)]
for layer in layers:
    pack_linear_layers(layer)
states = torch.randn(320, 896, dtype=torch.bfloat16)
with torch.no_grad():
    for length in range(320, 120, -1):
        for layer in layers:
            layer(states[:length])
        if length == 261:  # 240 kernels
            before = resident_bytes()
print((resident_bytes() - before) >> 20)
"""


@pytest.mark.slow
def test_prompts_of_many_lengths_take_no_more_memory():
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", LENGTHS]
    options = {"check": True, "capture_output": True, "text": True, "env": environ}
    assert int(subprocess.run(command, **options).stdout) < 50  # 400 with a kernel for each
