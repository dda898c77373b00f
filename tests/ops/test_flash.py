"""What is asked of PyTorch's fused attention, by a stand-in that does what its page says."""

import pytest
import torch

from h2okv.ops import attention as flash
from h2okv.ops import dispatch
from h2okv.ops.attention import Visibility, blockwise_attention_with_scores


def hidden_keys(num_queries, num_keys):
    own = torch.arange(num_keys - num_queries, num_keys).unsqueeze(1)
    return torch.arange(num_keys) > own


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
        k, v = (part[cu_seq_k[row] : cu_seq_k[row + 1]].transpose(0, 1) for part in (key, value))
        assert (q.shape[1], k.shape[1]) == (max_q, max_k)
        k, v = (part.repeat_interleave(len(q) // len(part), dim=0) for part in (k, v))
        hidden = hidden_keys(max_q, max_k)
        logits = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
        outputs.append((logits.softmax(dim=-1) @ v).transpose(0, 1))
        limits.append(logits.logsumexp(dim=-1))
    return torch.cat(outputs), torch.cat(limits, dim=1)


@pytest.mark.parametrize("past", [0, 20])
@pytest.mark.parametrize("groups", [1, 3])
def test_a_block_by_flash_and_sums(monkeypatch, past, groups):
    monkeypatch.setattr(flash, "_varlen", lambda: (varlen_attn, "lse"))
    query = torch.randn(2, 50, 2 * groups, 16).transpose(1, 2)
    key, value = torch.randn(2, 2, past + 50, 16), torch.randn(2, 2, past + 50, 16)
    output, limits = flash.forward(query, key, value, 0.3)
    expected, sums = blockwise_attention_with_scores(query, key, value, Visibility(past), 0.3)
    torch.testing.assert_close(output, expected)
    keys = key.repeat_interleave(groups, dim=1)
    hidden = hidden_keys(50, past + 50)
    shares = (query @ keys.mT * 0.3 - limits.unsqueeze(-1)).exp().masked_fill(hidden, 0.0)
    made = shares.sum(dim=2).unflatten(1, (2, groups)).sum(dim=2)
    torch.testing.assert_close(made, sums, atol=1e-4, rtol=1e-4)


def test_a_cpu_has_no_flash():
    states = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)
    assert not flash.applies(states, states, Visibility(), None)


def test_this_release_of_pytorch_has_it():
    assert flash._varlen() is not None


def other_signature(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    raise AssertionError("whose arguments are others")


def test_flash_of_another_signature_is_left_out(monkeypatch):
    monkeypatch.setattr(flash, "_varlen", lambda: (other_signature, "lse"))
    monkeypatch.setattr(flash, "applies", lambda *_: True)
    case = torch.device("cpu"), torch.float32, 16, 16, 2
    assert dispatch._flash_agrees.__wrapped__(case) is False


@pytest.mark.parametrize("fault", [0.0, 0.5])
def test_flash_is_tried_on_a_block_before_it_is_used(monkeypatch, fault):
    def attend(*args, **options):
        output, limits = varlen_attn(*args, **options)
        return output + fault, limits

    monkeypatch.setattr(flash, "_varlen", lambda: (attend, "lse"))
    monkeypatch.setattr(flash, "applies", lambda *_: True)
    case = torch.device("cpu"), torch.float32, 16, 16, 2
    assert dispatch._flash_agrees.__wrapped__(case) is (not fault)
