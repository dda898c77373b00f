"""Entries in 8 and 4 bits: the bound on what is lost, outliers, and products with them."""

import pytest
import torch

from h2okv.ops import dispatch
from h2okv.ops.decode import decode_with_scores, write_slot
from h2okv.ops.quant import (
    Packed,
    _fused_logits,
    _fused_output,
    group_size,
    pack,
    packed_bytes,
    scales_and_lows,
    unpack,
)
from h2okv.ops.reference import AttentionSpec

BITS = (8, 4)
SIZES = [1, 7, 16, 40, 45, 64, 80, 96, 128, 256]


def rounded(entries, bits):
    """Return entries after packing and unpacking."""
    return unpack(pack(entries, bits)).to(entries.dtype)


def within_half_a_step(entries, packed):
    scale, _ = scales_and_lows(packed)
    numbers = entries.double().unflatten(-1, (-1, packed.group))
    error = (unpack(packed).double().unflatten(-1, (-1, packed.group)) - numbers).abs()
    # fp32 sums of what is much larger than a step are not exact.
    slack = 2e-7 * numbers.abs().amax(dim=-1, keepdim=True)
    return bool((error <= scale.double().unsqueeze(-1) / 2 * (1 + 1e-6) + slack).all())


@pytest.mark.parametrize(
    ("size", "group"), [(40, 40), (64, 64), (80, 40), (96, 48), (128, 64), (256, 64), (45, 45)]
)
def test_groups_divide_the_head(size, group):
    assert group_size(size) == group


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_no_number_moves_by_more_than_half_a_step(bits, size, dtype):
    entries = (torch.randn(2, 3, 5, size) * torch.rand(2, 3, 5, 1) * 9 + torch.randn(5, size)).to(
        dtype
    )
    packed = pack(entries, bits)
    assert packed.shape == entries.shape and packed.codes.dtype == torch.uint8
    assert within_half_a_step(entries, packed)
    # The grid is no wider than it must be: 2^-7 of what is largest, for two roundings to bf16.
    numbers = entries.float().unflatten(-1, (-1, packed.group))
    low, high = numbers.aminmax(dim=-1)
    scale, _ = scales_and_lows(packed)
    largest = torch.maximum(low.abs(), high.abs())
    assert (scale * (2**bits - 1) <= (high - low) * 1.009 + largest * 2**-7 * 1.01 + 1e-30).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("factor", [1e-30, 1e-6, 1e4, 7e4, 1e20, 1e38])
def test_outliers_neither_overflow_nor_spoil_other_groups(bits, factor):
    entries = torch.randn(4, 6, 128).clamp(-1.5, 1.5)
    wild = entries.clone()
    wild[..., 3] *= factor
    packed = pack(wild, bits)
    assert unpack(packed).isfinite().all() and within_half_a_step(wild, packed)
    assert torch.equal(unpack(packed)[..., 64:], rounded(entries, bits)[..., 64:])


@pytest.mark.parametrize("bits", BITS)
def test_constant_groups_stay(bits):
    for dtype, exact in ((torch.bfloat16, True), (torch.float32, False)):
        entries = torch.randn(9, 2, 1).expand(9, 2, 64).to(dtype).flatten(1)
        entries[0] = 0.0
        left = rounded(entries, bits)
        assert torch.equal(left, entries) if exact else torch.allclose(left, entries, rtol=6e-3)
        assert (left[0] == 0).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_does_not_become_a_number(bits, wrong):
    entries = torch.randn(1, 128)
    entries[0, 5] = wrong
    left = rounded(entries, bits)
    assert not left[0, 5].isfinite() and left[0, 64:].isfinite().all()


@pytest.mark.parametrize("bits", BITS)
def test_ends_and_order_of_a_group_are_exact(bits):
    entries = torch.randn(20, 64).bfloat16().sort(dim=-1).values
    left = rounded(entries, bits)
    assert torch.equal(left[:, 0], entries[:, 0]) and (left.diff(dim=-1) >= 0).all()


def test_bytes_at_a_head_of_128():
    assert packed_bytes(128, 8) == 136 and packed_bytes(128, 4) == 72
    for bits in BITS:
        for size in SIZES:
            packed = pack(torch.randn(3, size), bits)
            assert packed.codes.nbytes + packed.grid.nbytes == 3 * packed_bytes(size, bits)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1, 40, 45, 128])
def test_writing_packs_one_slot_and_leaves_the_others(bits, size):
    slots = pack(torch.randn(3, 2, 11, size), bits)
    free = torch.randint(0, 11, (3, 2, 1))
    entry = torch.randn(3, 1, 2, size).transpose(1, 2)
    expected, new_entry = unpack(slots), rounded(entry, bits)
    for row in range(3):
        for head in range(2):
            expected[row, head, free[row, head, 0]] = new_entry[row, head, 0]
    write_slot(slots, free, entry)
    assert torch.equal(unpack(slots), expected)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("groups", [1, 3])
def test_decoding_is_that_of_the_unpacked(bits, size, groups, monkeypatch):
    monkeypatch.setattr("h2okv.ops.quant._PIECE", {"cpu": 40 * size})
    query = torch.randn(2, 3 * groups, 1, size)
    keys, values = (pack(torch.randn(2, 3, 19, width), bits) for width in (size, 2 * size))
    hidden = torch.rand(2, 3, 19) < 0.3
    output = decode_with_scores(query, keys, values, hidden, AttentionSpec(0.5))
    expected = decode_with_scores(query, unpack(keys), unpack(values), hidden, AttentionSpec(0.5))
    torch.testing.assert_close(output, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", SIZES)
def test_what_a_compiler_gets_is_the_same(bits, size):
    packed = pack(torch.randn(5, 19, size) + 1, bits)
    query, weights = torch.randn(5, 3, size), torch.rand(5, 3, 19)
    numbers = unpack(packed).double()
    for result, expected in (
        (_fused_logits(query, packed), query.double() @ numbers.transpose(1, 2)),
        (_fused_output(weights, packed), weights.double() @ numbers),
    ):
        torch.testing.assert_close(result.double(), expected, atol=1e-4, rtol=1e-5)


def test_a_packed_entry_is_read_through_views():
    packed = pack(torch.randn(4, 6, 128), 4)
    view = packed._replace(codes=packed.codes[1:3], grid=packed.grid[1:3])
    assert isinstance(view, Packed) and torch.equal(unpack(view), unpack(packed)[1:3])


def test_the_gpu_kernels_leave_packed_slots_to_pytorch():
    arguments = torch.device("cpu"), torch.float32, 16, 16, 1, True
    with dispatch.use("triton"), pytest.raises(ValueError, match=r"packed slots.*or kv_bits out"):
        dispatch.operations(*arguments)
    with dispatch.use("plain"):
        assert dispatch.operations(*arguments).name == "plain"
