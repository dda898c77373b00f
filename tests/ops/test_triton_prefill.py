"""The kernels of a block against attention in float64."""

import pytest
import torch

from h2okv.ops import triton_prefill
from h2okv.ops.attention import expected_attention
from h2okv.ops.reference import AttentionSpec, Visibility, attention_with_scores
from h2okv.ops.rope import rotate

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("garbage")]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SUMS = {torch.float32: 1e-4, torch.bfloat16: 2e-3, torch.float16: 1e-3}


def draw(device, batch, kv_heads, groups, past, length, size, value_size=None, dtype=None):
    def states(heads, count, width):
        tensor = torch.randn(batch, count, heads, width) * 1.5
        return tensor.to(device, dtype or torch.float32).transpose(1, 2)

    query = states(kv_heads * groups, length, size)
    key = states(kv_heads, past + length, size)
    return query, key, states(kv_heads, past + length, value_size or size)


def visible_of(visibility, shape, length, device):
    """Return the matrix of which query sees which key, bool ``[B, H, T, N]``."""
    positions = visibility.past + torch.arange(length, device=device).unsqueeze(1)
    columns = torch.arange(shape[2], device=device)
    seen = (columns <= positions).expand(*shape[:2], -1, -1).clone()
    if visibility.entries is not None:
        seen &= visibility.entries.unsqueeze(2)
    if visibility.queries is not None:
        real = visibility.queries
        seen &= real[:, None, :, None]
        before = real.new_ones(real.shape[0], visibility.past)
        seen &= torch.cat([before, real], dim=1)[:, None, None, :]
    return seen


def check(query, key, value, visibility, softcap=None, weights=None, dirty=None):
    spec = AttentionSpec(query.shape[-1] ** -0.5, softcap)
    visible = visible_of(visibility, key.shape, query.shape[2], key.device)
    wide = None if weights is None else weights.double()
    expected, expected_sums = attention_with_scores(
        query.double(), key.double(), value.double(), visible, spec, wide
    )
    query, key, value = dirty or (query, key, value)
    output, sums = triton_prefill.attention_with_scores(
        query, key, value, visibility, spec, weights
    )
    assert output.dtype == query.dtype and sums.dtype == torch.float32
    tolerance, dtype = TOLERANCE[query.dtype], query.dtype
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(sums.double(), expected_sums, atol=SUMS[dtype], rtol=SUMS[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("length", [1, 63, 111, 160])
def test_a_prompt(device, dtype, groups, length):
    check(*draw(device, 1, 2, groups, 0, length, 64, dtype=dtype), Visibility())


@pytest.mark.parametrize("size", [40, 80, 96, 128, 256])
def test_head_sizes(device, size):
    check(*draw(device, 1, 1, 2, 5, 63, size, 16), Visibility(past=5))
    check(*draw(device, 1, 1, 2, 0, 63, 16, size, torch.bfloat16), Visibility())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("softcap", [None, 7.0])
def test_a_turn_over_entries_with_holes(device, dtype, softcap):
    query, key, value = draw(device, 2, 2, 2, 70, 63, 32, dtype=dtype)
    entries = torch.rand(2, 2, 133, device=device) < 0.7
    entries[:, :, 70:] = True
    garbage = key.masked_fill(~entries.unsqueeze(-1), torch.nan)
    dirty = query, garbage, value.masked_fill(~entries.unsqueeze(-1), torch.inf)
    check(query, key, value, Visibility(70, entries), softcap, dirty=dirty)


@pytest.mark.parametrize("past", [0, 40])
def test_padding(device, past):
    query, key, value = draw(device, 3, 1, 2, past, 70, 32)
    real = torch.ones(3, 70, dtype=torch.bool, device=device)
    real[0, :66] = False
    real[1, 3:9] = False
    gone = ~torch.cat([real.new_ones(3, past), real], dim=1)[:, None, :, None]
    dirty = (
        query.masked_fill(~real[:, None, :, None], torch.nan),
        key.masked_fill(gone, torch.nan), value.masked_fill(gone, torch.nan),
    )  # fmt: skip
    check(query, key, value, Visibility(past, queries=real), dirty=dirty)


def test_queries_of_unequal_weight(device):
    weights = torch.rand(2, 111, device=device)
    check(*draw(device, 2, 2, 2, 0, 111, 32), Visibility(), weights=weights)


def test_nothing_to_see_gives_zeros(device):
    query, key, value = draw(device, 1, 2, 1, 0, 20, 16)
    entries = torch.zeros(1, 2, 20, dtype=torch.bool, device=device)
    output, sums = triton_prefill.attention_with_scores(
        query, key, value, Visibility(entries=entries), AttentionSpec(0.25)
    )
    assert (output == 0).all() and (sums == 0).all()


@pytest.mark.parametrize("softcap", [None, 7.0])
def test_all_at_once(device, softcap):
    real = torch.rand(2, 150, device=device) < 0.8
    weights = torch.rand(2, 150, device=device)
    visibility = Visibility(20, queries=real)
    check(*draw(device, 2, 2, 3, 20, 150, 32), visibility, softcap, weights)


def test_two_runs_are_equal_to_the_last_bit(device):
    query, key, value = draw(device, 1, 2, 4, 0, 200, 64, dtype=torch.bfloat16)
    first, second = (
        triton_prefill.attention_with_scores(query, key, value, Visibility(), AttentionSpec(0.125))
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_sums_that_nobody_looks_at_are_not_made(device):
    query, key, value = draw(device, 1, 2, 2, 5, 63, 32)
    options = Visibility(past=5), AttentionSpec(0.2)
    output, sums = triton_prefill.attention_with_scores(
        query, key, value, *options, needs_sums=False
    )
    assert torch.equal(output, triton_prefill.attention_with_scores(query, key, value, *options)[0])
    assert sums is None


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("softcap", [None, 7.0])
@pytest.mark.parametrize(("length", "past"), [(1, 70), (63, 0), (111, 20)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_expected_attention(device, dtype, softcap, length, past, has_sinks):
    query, key, _ = draw(device, 2, 2, 3, past, length, 32, dtype=dtype)
    entries = torch.rand(2, 2, past + length, device=device) < 0.7
    real = torch.rand(2, length, device=device) < 0.8
    sinks = torch.randn(6, device=device) if has_sinks else None
    spec = AttentionSpec(32**-0.5, softcap, sinks)
    wide = spec._replace(sinks=None if sinks is None else sinks.double())
    for hidden, padding in ((None, None), (entries, None), (entries, real)):
        expected = expected_attention(query.double(), key.double(), hidden, padding, wide)
        dirty = key if hidden is None else key.masked_fill(~hidden.unsqueeze(-1), torch.nan)
        queries = query.float()  # as rotations return them
        if padding is not None:
            queries = queries.masked_fill(~padding[:, None, :, None], torch.nan)
        norms = triton_prefill.expected_attention(queries, dirty, hidden, padding, spec)
        assert norms.dtype == torch.float32
        torch.testing.assert_close(norms, expected.float(), atol=SUMS[dtype], rtol=SUMS[dtype])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("width", [32, 24])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_queries_are_rotated_as_by_pytorch(device, layout, width, dtype):
    query, _, _ = draw(device, 2, 2, 1, 0, 45, 32, dtype=dtype)
    for shape in ((2, 1, 45, width // 2, 2), (1, 1, 45, 2, width // 2)):
        factors = torch.randn(shape, device=device)
        factors = factors if shape[-1] == 2 else factors.transpose(-1, -2)
        actual = triton_prefill.rotated(query, factors, layout, dtype)
        expected = rotate(query, factors, layout).to(dtype)
        assert actual.is_contiguous() and actual.dtype == dtype
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
