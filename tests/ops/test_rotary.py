"""Rotating queries and keys, against transformers' own functions and float64."""

import pytest
import torch
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as half

from h2okv.ops import decode
from h2okv.ops.decode import Ranks, decode_with_scores
from h2okv.ops.reference import AttentionSpec, attention_with_scores
from h2okv.ops.rope import interleave_pairs, inverse, rotate

TOLERANCE = {
    torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3
}  # fmt: skip


def factors_of(length, width, scale=1.0):
    angles = torch.arange(length)[:, None] * 100.0 ** -(torch.arange(width // 2) / width)
    return torch.stack([angles.cos() * scale, angles.sin() * scale], dim=-1)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_a_rotation_is_the_models_own(layout):
    query, key = torch.randn(2, 3, 9, 16), torch.randn(2, 3, 9, 16)
    factors = factors_of(9, 16)
    cos, sin = factors.unbind(-1)
    if layout == "half":
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
        expected = half(query, key, cos[None], sin[None])
    else:
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        expected = interleaved(query, key, cos[None], sin[None])
    for states, reference in zip((query, key), expected, strict=True):
        rotated = rotate(interleave_pairs(states, 16, layout), factors)
        torch.testing.assert_close(
            rotated, interleave_pairs(reference, 16, layout), atol=1e-6, rtol=1e-5
        )
        in_place = rotate(states, factors, layout)
        torch.testing.assert_close(in_place, reference, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("width", [16, 12, 4])
def test_only_the_first_numbers_of_a_head_are_rotated(layout, width):
    states = torch.randn(1, 2, 5, 16)
    rotated = rotate(interleave_pairs(states, width, layout), factors_of(5, width))
    assert torch.equal(rotated[..., width:], states[..., width:])
    assert not torch.allclose(rotated[:, :, 1:, :width], states[:, :, 1:, :width])
    in_place = rotate(states, factors_of(5, width), layout)
    torch.testing.assert_close(interleave_pairs(in_place, width, layout), rotated)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_factors_may_have_any_strides(layout):
    states, factors = torch.randn(2, 3, 9, 16), factors_of(9, 12)
    planar = factors.movedim(-1, 0).contiguous().movedim(0, -1)
    assert planar.stride(-1) != 1
    for strided in (planar, factors.repeat(2, 1, 1)[::2], factors.expand(2, 1, -1, -1, -1)):
        expected = rotate(states, strided.clone(memory_format=torch.contiguous_format), layout)
        assert torch.equal(rotate(states, strided, layout), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_inverse_undoes_scale_and_rounding(dtype):
    states = torch.randn(1, 2, 50, 16)
    factors = factors_of(50, 16, scale=1.3).to(dtype)
    rotated = rotate(states, factors.float())
    torch.testing.assert_close(rotate(rotated, inverse(factors)), states, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [32, 24])
@pytest.mark.parametrize("elements", [1, 3000, 1 << 20])
def test_a_step_rotates_each_key_to_its_rank(monkeypatch, dtype, width, elements):
    monkeypatch.setattr(decode, "_ROTATE_ELEMENTS", elements)  # row by row, some rows, all at once
    batch, heads, groups, slots, size = 2, 3, 2, 41, 32
    query = torch.randn(batch, heads * groups, 1, size).to(dtype)
    keys, values = torch.randn(2, batch, heads, slots, size).to(dtype)
    ranks = torch.rand(batch, heads, slots).argsort(dim=-1).to(torch.int32)
    hidden = torch.rand(batch, heads, slots) < 0.2
    factors = factors_of(slots, width)
    rotated = rotate(keys, factors[ranks.long()])
    spec = AttentionSpec(0.3)
    expected, expected_sums = attention_with_scores(
        query.double(), rotated.double(), values.double(), ~hidden.unsqueeze(2), spec
    )
    output, sums = decode_with_scores(query, keys, values, hidden, spec, Ranks(factors, ranks))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(sums.double(), expected_sums, atol=1e-5, rtol=1e-5)
