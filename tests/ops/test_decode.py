"""The decode step's attention against the plain one in float64."""

import pytest
import torch

from h2okv.ops.decode import decode_with_scores, write_slot
from h2okv.ops.reference import AttentionSpec, attention_with_scores

TOLERANCE = {
    torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3
}  # fmt: skip


def draw(batch, kv_heads, groups, slots, size, dtype=torch.float32):
    query = torch.randn(batch, 1, kv_heads * groups, size).mul(2).to(dtype).transpose(1, 2)
    keys = torch.randn(batch, kv_heads, slots, size).mul(2).to(dtype)
    return query, keys, torch.randn(batch, kv_heads, slots, size).to(dtype)


def compare(query, keys, values, hidden, softcap=None):
    spec = AttentionSpec(query.shape[-1] ** -0.5, softcap)
    visible = torch.ones(keys.shape[:3], dtype=torch.bool) if hidden is None else ~hidden
    expected, expected_sums = attention_with_scores(
        query.double(), keys.double(), values.double(), visible.unsqueeze(2), spec
    )
    output, sums = decode_with_scores(query, keys, values, hidden, spec)
    tolerance = TOLERANCE[query.dtype]
    assert output.dtype == query.dtype and sums.dtype == torch.float32
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(sums.double(), expected_sums, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("groups", [1, 2, 4, 7])
@pytest.mark.parametrize("slots", [1, 63, 111])
def test_all_slots_taken(dtype, groups, slots):
    compare(*draw(2, 3, groups, slots, 64, dtype), None)


@pytest.mark.parametrize("size", [40, 80, 96, 128, 256])
def test_head_sizes(size):
    compare(*draw(1, 2, 2, 63, size), None)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("groups", [1, 4])
def test_hidden_slots(groups, softcap, dtype):
    hidden = torch.rand(2, 3, 63) < 0.4
    compare(*draw(2, 3, groups, 63, 16, dtype), hidden, softcap)


def test_garbage_in_hidden_slots_does_not_leak():
    # Keys may be anything, values anything finite: see the argument's contract.
    query, keys, values = draw(2, 2, 2, 20, 16)
    hidden = torch.rand(2, 2, 20) < 0.5
    hidden[..., 0] = False
    expected = decode_with_scores(query, keys, values, hidden, AttentionSpec(0.25))
    keys[hidden], values[hidden] = torch.nan, 1e30
    for clean, dirty in zip(
        expected, decode_with_scores(query, keys, values, hidden, AttentionSpec(0.25)), strict=True
    ):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("size", [1, 40, 64])
def test_writing_takes_the_free_slot_and_no_other(size):
    slots = torch.randn(3, 2, 11, size)
    free = torch.randint(0, 11, (3, 2, 1))
    entry = torch.randn(3, 1, 2, size).transpose(1, 2)
    expected = slots.clone()
    for row in range(3):
        for head in range(2):
            expected[row, head, free[row, head, 0]] = entry[row, head, 0]
    write_slot(slots, free, entry)
    assert torch.equal(slots, expected)
