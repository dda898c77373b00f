"""What is asked of PyTorch's fused attention, by a stand-in that does what its page says."""

import functools

import pytest
import torch

from h2okv.ops import dispatch, flash, flash_varlen
from h2okv.ops.attention import Visibility, blockwise_attention_with_scores, expected_attention
from h2okv.ops.reference import AttentionSpec, attention_with_scores, causal


def hidden_keys(num_queries, num_keys):
    positions = torch.arange(num_keys - num_queries, num_keys).unsqueeze(1)
    return torch.arange(num_keys) > positions


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux, scale, window_size,
    enable_gqa,
):  # fmt: skip
    """Sequence by sequence; the causal diagonal ends in the last corner."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and return_aux == "lse"
    assert window_size == (-1, 0)
    assert enable_gqa or query.shape[1] == key.shape[1]
    outputs, limits = [], []
    for row in range(len(cu_seq_q) - 1):
        q = query[cu_seq_q[row] : cu_seq_q[row + 1]].transpose(0, 1)
        k, v = (
            tensor[cu_seq_k[row] : cu_seq_k[row + 1]].transpose(0, 1) for tensor in (key, value)
        )
        assert (q.shape[1], k.shape[1]) == (max_q, max_k)
        k, v = (tensor.repeat_interleave(len(q) // len(tensor), dim=0) for tensor in (k, v))
        hidden = hidden_keys(max_q, max_k)
        logits = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
        outputs.append((logits.softmax(dim=-1) @ v).transpose(0, 1))
        limits.append(logits.logsumexp(dim=-1))
    return torch.cat(outputs), torch.cat(limits, dim=1)


def older_varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux, scale, window_size
):  # fmt: skip
    """Attend as torch 2.11 does, which takes no groups of queries."""
    return varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=return_aux, scale=scale,
        window_size=window_size, enable_gqa=False,
    )  # fmt: skip


@pytest.mark.parametrize("attend", [varlen_attn, older_varlen_attn])
@pytest.mark.parametrize("past", [0, 20])
@pytest.mark.parametrize("groups", [1, 3])
def test_a_block_by_flash_and_sums(monkeypatch, past, groups, attend):
    monkeypatch.setattr(flash_varlen, "_varlen", lambda: (attend, "lse"))
    query = torch.randn(2, 50, 2 * groups, 16).transpose(1, 2)
    key, value = torch.randn(2, 2, past + 50, 16), torch.randn(2, 2, past + 50, 16)
    output, limits = flash_varlen.forward(query, key, value, 0.3)
    expected, sums = blockwise_attention_with_scores(
        query, key, value, Visibility(past), AttentionSpec(0.3)
    )
    torch.testing.assert_close(output, expected)
    keys = key.repeat_interleave(groups, dim=1)
    hidden = hidden_keys(50, past + 50)
    shares = (query @ keys.mT * 0.3 - limits.unsqueeze(-1)).exp().masked_fill(hidden, 0.0)
    flash_sums = shares.sum(dim=2).unflatten(1, (2, groups)).sum(dim=2)
    torch.testing.assert_close(flash_sums, sums, atol=1e-4, rtol=1e-4)


def test_a_cpu_has_no_flash():
    states = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)
    assert not flash_varlen.applies(states, states, Visibility(), AttentionSpec(0.25))


def test_this_release_of_pytorch_has_it():
    assert flash_varlen._varlen() is not None


def other_signature(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    raise AssertionError("whose arguments are others")


def test_flash_of_another_signature_is_left_out(monkeypatch):
    monkeypatch.setattr(flash_varlen, "_varlen", lambda: (other_signature, "lse"))
    monkeypatch.setattr(flash_varlen, "applies", lambda *_: True)
    case = torch.device("cpu"), torch.float32, 16, 16, 2, False
    assert dispatch._flash_agrees.__wrapped__(case) is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="the real one is tried on a GPU")
@pytest.mark.parametrize("fault", [0.0, 0.5])
def test_flash_is_tried_on_a_block_before_it_is_used(monkeypatch, fault):
    @functools.wraps(varlen_attn)
    def attend(*args, **options):
        output, limits = varlen_attn(*args, **options)
        return output + fault, limits

    monkeypatch.setattr(flash_varlen, "_varlen", lambda: (attend, "lse"))
    monkeypatch.setattr(flash_varlen, "applies", lambda *_: True)
    case = torch.device("cpu"), torch.float32, 16, 16, 2, False
    assert dispatch._flash_agrees.__wrapped__(case) is (not fault)


def draw_bf16(length, past, groups, size=64):
    """Query, key and value of one sequence, ``[1, HQ, T, D]`` and ``[1, 2, N, D]``."""
    query = torch.randn(1, length, 2 * groups, size).mul(2).bfloat16().transpose(1, 2)
    key = torch.randn(1, past + length, 2, size).mul(2).bfloat16().transpose(1, 2)
    return query, key, torch.randn(1, 2, past + length, size).bfloat16()


@pytest.mark.parametrize("past", [0, 29])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [16, 64, 128])
def test_keys_that_ask_back_find_their_sums(past, groups, weighted, size):
    query, key, value = draw_bf16(140, past, groups, size)
    weights = None
    if weighted:
        weights = 0.99 ** torch.arange(139, -1, -1.0)
        weights[:20] = 0
    spec = AttentionSpec(size**-0.5)
    grouped = query[0].unflatten(0, (2, groups))
    output, sums = flash.attention_with_sums(grouped, key[0], value[0], past, spec, weights)
    expected, expected_sums = attention_with_scores(
        query.double(), key.double(), value.double(), causal(query, key), spec,
        weights=None if weights is None else weights[None].double(),
    )  # fmt: skip
    assert output.dtype == torch.bfloat16 and sums.dtype == torch.float32
    output = output.flatten(0, 1)[None].double()
    torch.testing.assert_close(output, expected, atol=2e-2, rtol=2e-2)
    # As right as the kernel's exponentials, and far more than anything in bf16 (4e-3).
    torch.testing.assert_close(sums[None].double(), expected_sums, atol=1e-6, rtol=2e-4)


def test_keys_that_ask_back_find_the_squares():
    query, key, _ = draw_bf16(140, 0, 3)
    squares = flash.expected_squares(query[0].unflatten(0, (2, 3)), key[0], AttentionSpec(0.125))
    keys = key.repeat_interleave(3, 1).double()
    weights = (query.double() @ keys.mT * 0.125).softmax(-1)
    expected = weights.square().sum(2).unflatten(1, (2, 3)).sum(2)
    torch.testing.assert_close(squares[None].double(), expected, atol=1e-6, rtol=4e-4)


@pytest.fixture
def amx(monkeypatch):
    """Return a processor that has it, and what it was used for."""
    used = []

    def spy(name):
        function = getattr(flash, name)

        def call(*args):
            used.append(name)
            return function(*args)

        monkeypatch.setattr(flash, name, call)

    assert flash._sums_agree(64)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    spy("attention_with_sums")
    spy("expected_squares")
    return used


@torch.no_grad()
def test_a_padded_batch_takes_it_and_stays_itself(amx):
    query, key, value = draw_bf16(200, 0, 3)
    twice = [tensor.expand(2, -1, -1, -1).clone() for tensor in (query, key, value)]
    queries = torch.ones(2, 200, dtype=torch.bool)
    queries[1, :50] = False
    output, sums = blockwise_attention_with_scores(
        *twice, Visibility(queries=queries), AttentionSpec(0.125)
    )
    short = [tensor[:, :, 50:] for tensor in (query, key, value)]
    alone, own_sums = blockwise_attention_with_scores(*short, Visibility(), AttentionSpec(0.125))
    assert torch.equal(output[1:, :, 50:], alone) and torch.equal(sums[1:, :, 50:], own_sums)
    assert not output[1, :, :50].any() and not sums[1, :, :50].any()
    assert amx == ["attention_with_sums"] * 3


@torch.no_grad()
@pytest.mark.parametrize(
    "visibility, spec",
    [
        (Visibility(entries=torch.arange(400).view(1, 2, 200) % 3 > 0), AttentionSpec(0.125)),
        (Visibility(), AttentionSpec(0.125, window=150)),
        (Visibility(), AttentionSpec(0.125, 30.0)),
    ],
)
def test_what_the_kernel_does_not_know_goes_by_tiles(amx, visibility, spec):
    blockwise_attention_with_scores(*draw_bf16(200, 0, 3), visibility, spec)
    assert not amx


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_are_put_together_where_heads_hold_as_many(amx, dtype):
    query, key, value = (tensor.to(dtype) for tensor in draw_bf16(140, 60, 3))
    entries = torch.ones(1, 2, 200, dtype=torch.bool)
    for head, hidden in enumerate(([3, 59], [0, 17])):
        entries[0, head, hidden] = False
    visibility = Visibility(past=60, entries=entries)
    output, sums = blockwise_attention_with_scores(
        query, key, value, visibility, AttentionSpec(0.125)
    )
    visible = causal(query, key) & entries.unsqueeze(2)
    states = (tensor.double() for tensor in (query, key, value))
    expected, expected_sums = attention_with_scores(*states, visible, AttentionSpec(0.125))
    torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(sums.double(), expected_sums, atol=1e-6, rtol=2e-4)
    squares = expected_attention(query, key, entries, None, AttentionSpec(0.125))
    assert (squares[~entries] == 0).all() and (squares[entries] > 0).all()
    masked = (tensor.where(entries[..., None], torch.nan) for tensor in (key, value))
    again = blockwise_attention_with_scores(query, *masked, visibility, AttentionSpec(0.125))
    assert torch.equal(again[0], output) and torch.equal(again[1], sums)
    expected_squares = expected_attention(
        query.float(), key.float(), entries, None, AttentionSpec(0.125)
    )
    torch.testing.assert_close(squares, expected_squares, atol=1e-6, rtol=4e-4)
    on_amx = ["attention_with_sums", "expected_squares", "attention_with_sums"]
    assert amx == (on_amx if dtype == torch.bfloat16 else [])


def test_a_gradient_goes_by_tiles(amx):
    blockwise_attention_with_scores(*draw_bf16(200, 0, 3), Visibility(), AttentionSpec(0.125))
    assert not amx


@torch.no_grad()
def test_expected_attention_takes_it(amx):
    query, key, _ = draw_bf16(200, 0, 3)
    squares = expected_attention(query.float(), key, None, None, AttentionSpec(0.125))
    expected = expected_attention(query.float(), key.float(), None, None, AttentionSpec(0.125))
    torch.testing.assert_close(squares, expected, atol=1e-6, rtol=4e-4)
    assert amx == ["expected_squares"]


def test_the_kernel_is_tried_whatever_the_default_device():
    with torch.device("meta"):
        assert flash._sums_agree.__wrapped__(64)


@pytest.mark.parametrize("fault", ["raises", "is wrong"])
def test_a_kernel_that_does_something_else_is_left_out(monkeypatch, fault):
    def fused(query, *args):
        if fault == "raises":
            raise RuntimeError("no such operator")
        return torch.zeros_like(query), query.new_zeros(query.shape[:3], dtype=torch.float32)

    monkeypatch.setattr(flash, "_fused", fused)
    assert flash._sums_agree.__wrapped__(64) is False
