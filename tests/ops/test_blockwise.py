"""The tiled attention against the plain one in float64, on fresh random inputs."""

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

from h2okv.ops import attention as blockwise
from h2okv.ops.attention import blockwise_attention_with_scores
from h2okv.ops.reference import AttentionSpec, Visibility, attention_with_scores

TOLERANCE = {
    torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3
}  # fmt: skip


def draw(batch, kv_heads, groups, length, past, size, dtype=torch.float32, value_size=None):
    """Random queries, keys and values; sharp enough that the weights are far from uniform."""
    query = torch.randn(batch, length, kv_heads * groups, size).mul(2).to(dtype).transpose(1, 2)
    key = torch.randn(batch, past + length, kv_heads, size).mul(2).to(dtype).transpose(1, 2)
    value = torch.randn(batch, kv_heads, past + length, value_size or size).to(dtype)
    return query, key, value


def visible_matrix(length, past, entries=None, queries=None, window=None):
    """Return the T x N matrix that a `Visibility` stands for."""
    visible = torch.ones(length, past + length, dtype=torch.bool).tril(past)
    if window is not None:
        visible &= ~visible.tril(past - window)
    visible = visible[None, None]
    if entries is not None:
        visible = visible & entries.unsqueeze(-2)
    if queries is not None:
        visible = visible & queries[:, None, :, None]
    return visible


def compare(query, key, value, visibility, softcap=None, **matrix):
    """Compare with the plain one, by the products of either kind of CPU."""
    spec = AttentionSpec(query.shape[-1] ** -0.5, softcap, window=matrix.get("window"))
    length = query.shape[2]
    visible = visible_matrix(length, visibility.past, **matrix)
    expected, expected_sums = attention_with_scores(
        query.double(), key.double(), value.double(), visible, spec
    )
    tolerance = TOLERANCE[query.dtype]
    for is_amd in (False, True):
        few = mock.patch.object(blockwise, "_FEW_LOGITS", -1)
        with mock.patch.object(blockwise.flash, "IS_AMD", is_amd), few, torch.no_grad():
            output, sums = blockwise_attention_with_scores(query, key, value, visibility, spec)
        assert output.dtype == query.dtype and sums.dtype == torch.float32
        torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
        # The sums are fp32 whatever the dtype of the inputs, the same numbers here and there.
        torch.testing.assert_close(sums.double(), expected_sums, atol=5e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("groups", [1, 2, 4, 7])
@pytest.mark.parametrize("length", [1, 63, 111, 300])
def test_a_block_over_itself(dtype, groups, length):
    compare(*draw(2, 3, groups, length, 0, 64, dtype), Visibility())


@pytest.mark.parametrize("size", [40, 80, 96, 128, 256])
def test_head_sizes(size):
    compare(*draw(1, 2, 2, 63, 0, size), Visibility())


def test_values_of_another_size():
    compare(*draw(1, 2, 2, 63, 5, 48, value_size=32), Visibility(past=5))


@pytest.mark.parametrize("rows, keys", [(1, 1), (16, 7), (64, 64), (50, 33)])
@pytest.mark.parametrize("past", [0, 29])
def test_any_tile_size_gives_the_same(monkeypatch, rows, keys, past):
    monkeypatch.setattr(blockwise, "_TILE_ROWS", rows)
    monkeypatch.setattr(blockwise, "_TILE_KEYS", keys)
    compare(*draw(1, 2, 2, 111, past, 16), Visibility(past=past))


def test_little_scratch_means_fewer_rows(monkeypatch):
    monkeypatch.setattr(blockwise, "_SCRATCH_ELEMENTS", 1)
    compare(*draw(1, 2, 2, 63, 0, 16), Visibility())


@pytest.fixture(params=[2, 3, 4])
def apart(request, monkeypatch):
    """Run as many threads, each with tiles of its own, whatever the length."""
    before = torch.get_num_threads()
    monkeypatch.setattr(blockwise, "_MANY_LOGITS", 0)
    monkeypatch.setattr(blockwise, "_TILE_ROWS", 16)
    torch.set_num_threads(request.param)
    with torch.no_grad():
        yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("past, window", [(0, None), (29, None), (29, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_of_their_own_give_the_same(apart, past, window, softcap, dtype):
    inputs = draw(2, 3, 2, 111, past, 16, dtype)
    compare(*inputs, Visibility(past=past), softcap, window=window)
    options = Visibility(past=past), AttentionSpec(0.25)
    first, second = (blockwise_attention_with_scores(*inputs, *options) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_threads_of_their_own_know_padding_and_inference_mode(apart):
    real = torch.ones(2, 63, dtype=torch.bool)
    real[1, :20] = False
    with torch.inference_mode():
        query, key, value = draw(2, 3, 2, 63, 5, 16)
        visibility = Visibility(past=5, queries=real)
        output, sums = blockwise_attention_with_scores(
            query, key, value, visibility, AttentionSpec(0.25)
        )
        torch.set_num_threads(1)
        alone = blockwise_attention_with_scores(query, key, value, visibility, AttentionSpec(0.25))
    assert output.is_inference()
    torch.testing.assert_close((output, sums), alone)


def test_threads_of_their_own_leave_the_others_theirs(apart):
    blockwise_attention_with_scores(*draw(1, 3, 2, 63, 0, 16), Visibility(), AttentionSpec(0.25))
    assert torch.get_num_threads() == apart
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == apart


@pytest.mark.parametrize("side", ["left", "right", "scattered"])
@pytest.mark.parametrize("past", [0, 12])
def test_padding_is_neither_query_nor_entry(side, past):
    length = 40
    real = torch.rand(4, length) < 0.6
    if side != "scattered":
        counts = torch.tensor([40, 1, 0, 17])
        real = torch.arange(length) < counts.unsqueeze(1)
        real = real.flip(1) if side == "left" else real
    is_kept = torch.rand(4, 2, past) < 0.8
    entries = torch.cat([is_kept, real[:, None].expand(4, 2, length)], dim=2)
    query, key, value = draw(4, 2, 2, length, past, 16)
    visibility = Visibility(past=past, entries=entries, queries=real)
    compare(query, key, value, visibility, entries=entries, queries=real)


@pytest.mark.parametrize("is_padding", [False, True])
def test_garbage_in_padding_and_stale_entries_do_not_leak(is_padding):
    """Padding may hold anything, slots without an entry any finite number."""
    query, key, value = draw(2, 2, 2, 20, 10, 16)
    entries, queries = torch.ones(2, 2, 30, dtype=torch.bool), None
    if is_padding:
        queries = torch.ones(2, 20, dtype=torch.bool)
        queries[1, :8] = entries[1, :, 10:18] = False
    else:
        entries[..., 4:9] = False
    case = Visibility(past=10, entries=entries, queries=queries), AttentionSpec(0.25)
    expected = blockwise_attention_with_scores(query, key, value, *case)
    if is_padding:
        query[1, :, :8] = key[1, :, 10:18] = value[1, :, 10:18] = torch.nan
    else:
        key[:, :, 4:9], value[:, :, 4:9] = 1e4, -1e4
    torch.testing.assert_close(blockwise_attention_with_scores(query, key, value, *case), expected)


@pytest.mark.parametrize("window", [1, 7, 40, 200])
@pytest.mark.parametrize("past, softcap", [(0, None), (25, None), (25, 3.0)])
def test_windows(monkeypatch, window, past, softcap):
    monkeypatch.setattr(blockwise, "_TILE_KEYS", 32)
    inputs = draw(2, 2, 2, 111, past, 16)
    compare(*inputs, Visibility(past=past), softcap, window=window)


@pytest.mark.parametrize("window", [None, 9])
def test_what_is_kept_of_a_block_serves_every_mode(monkeypatch, window):
    monkeypatch.setattr(blockwise.flash, "IS_AMD", False)  # its products have no gradients
    case, visibility = draw(1, 2, 2, 40, 5, 16), Visibility(5)
    spec = AttentionSpec(0.25, window=window)
    blockwise._kept_unseen.cache_clear()
    with torch.inference_mode():
        expected = blockwise_attention_with_scores(*case, visibility, spec)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            results = blockwise_attention_with_scores(*case, visibility, spec)
        assert all(
            torch.equal(result, other) for result, other in zip(results, expected, strict=True)
        )
    assert blockwise._kept_unseen.cache_info().hits
    compare(*case, visibility, window=window)


@pytest.mark.parametrize("softcap", [None, 1000.0])
@pytest.mark.parametrize("past", [0, 29])
def test_logits_beyond_what_powers_of_two_can_hold(monkeypatch, past, softcap):
    """Such rows are done again relative to their maximum."""
    seen, look = [], blockwise._in_range
    monkeypatch.setattr(blockwise, "_in_range", lambda *args: seen.append(look(*args)) or seen[-1])
    query, key, value = draw(1, 2, 2, 70, past, 16)
    # Each key is far more like the next query than like its own.
    query, key = query.sign() * 8, key.sign() * 8
    query[:, :, 1:] = key[:, :, past : past + 69].repeat_interleave(2, dim=1) * 4
    compare(query, key, value, Visibility(past=past), softcap)
    assert not all(seen)


@pytest.mark.parametrize("sharpness", [1e-3, 30.0])
def test_flat_and_sharp_logits(sharpness):
    query, key, value = draw(1, 2, 1, 200, 0, 64)
    query = query * sharpness
    spec = AttentionSpec(0.125)
    visible = visible_matrix(200, 0)
    _, expected = attention_with_scores(query.double(), key.double(), value.double(), visible, spec)
    _, sums = blockwise_attention_with_scores(query, key, value, Visibility(), spec)
    torch.testing.assert_close(sums.double(), expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("kernels", ["16", "1024", "many"])
def test_values_of_bf16_are_multiplied_as_such_where_kernels_are_kept(monkeypatch, kernels):
    monkeypatch.setattr(blockwise, "_MULTIPLIES_BF16", True)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", kernels)
    products = []
    bmm = torch.bmm

    def noted(first, second, **options):
        products.append(second.dtype)
        return bmm(first, second, **options)

    monkeypatch.setattr(torch, "bmm", noted)
    compare(*draw(2, 3, 2, 111, 29, 16, torch.bfloat16), Visibility(past=29), None)
    assert (torch.bfloat16 in products) == (kernels != "16")


def test_rows_of_the_matrix_sum_to_one():
    query, key, value = draw(1, 2, 3, 111, 0, 64, torch.bfloat16)
    _, sums = blockwise_attention_with_scores(query, key, value, Visibility(), AttentionSpec(0.125))
    torch.testing.assert_close(sums.sum(dim=-1), torch.full((1, 2), 3 * 111.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_shows_in_the_sums(poison):
    query, key, value = draw(1, 2, 1, 20, 0, 16)
    key[0, 0, 3, 0] = poison
    _, sums = blockwise_attention_with_scores(query, key, value, Visibility(), AttentionSpec(0.25))
    assert not torch.isfinite(sums[0, 0]).all()
    assert torch.isfinite(sums[0, 1]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_needs_sums_false_computes_no_sums(dtype):
    torch.manual_seed(0)  # two kernels round bf16 weights differently; rare draws pass the bound
    inputs = draw(1, 2, 2, 150, 20, 16, dtype)
    with torch.no_grad():
        output, sums = blockwise_attention_with_scores(
            *inputs, Visibility(past=20), AttentionSpec(0.25), needs_sums=False
        )
        expected, _ = blockwise_attention_with_scores(
            *inputs, Visibility(past=20), AttentionSpec(0.25)
        )
    # By another kernel where that is faster, which in bf16 may round the weights.
    atol, rtol = (1e-5, 1.3e-6) if dtype == torch.float32 else (5e-3, 1.6e-2)
    torch.testing.assert_close(output, expected, atol=atol, rtol=rtol)
    assert not sums.any()


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_tokens_of_an_image_see_each_other(softcap):
    """Against a softmax by loops: images of 5 and 300 tokens, a past, padding on the left."""
    generator = torch.Generator().manual_seed(0)
    past, length, pad = 7, 320, 3
    query, key, value = (
        torch.randn(2, heads, count, 8, generator=generator)
        for heads, count in ((2, length), (1, past + length), (1, past + length))
    )
    real = torch.ones(2, length, dtype=torch.bool)
    real[1, :pad] = False
    reach = torch.arange(length).repeat(2, 1)
    reach[:, 4:9], reach[:, 12:312] = 8, 311
    entries = torch.cat([torch.ones(2, past, dtype=torch.bool), real], dim=1)[:, None]
    visibility, spec = Visibility(past, entries, real), AttentionSpec(0.35, softcap, reach=reach)
    output, sums = blockwise_attention_with_scores(query, key, value, visibility, spec)
    expected = torch.zeros(2, past + length)
    for row in range(2):
        for token in range(pad * row, length):
            seen = [*range(past), *range(past + pad * row, past + int(reach[row, token]) + 1)]
            for head in range(2):
                logits = key[row, 0, seen] @ query[row, head, token] * 0.35
                if softcap is not None:
                    logits = softcap * (logits / softcap).tanh()
                probabilities = logits.softmax(dim=0)
                expected[row, seen] += probabilities
                result = output[row, head, token]
                torch.testing.assert_close(result, probabilities @ value[row, 0, seen])
    torch.testing.assert_close(sums[:, 0], expected)
