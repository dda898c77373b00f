"""Attention of queries that see every entry, against the whole matrix."""

import pytest
import torch

from h2okv.ops import attention as expected
from h2okv.ops.reference import AttentionSpec


@pytest.mark.parametrize("softcap", [None, 60.0])
@pytest.mark.parametrize("seed", range(5))
@torch.no_grad()
def test_logits_whose_squares_would_leave_fp32(monkeypatch, softcap, seed):
    """Such rows are done again relative to their maximum; keys that are no entries stay hidden."""
    seen, look = [], expected._in_range
    monkeypatch.setattr(expected, "_in_range", lambda *args: seen.append(look(*args)) or seen[-1])
    generator = torch.Generator().manual_seed(seed)
    # Whole numbers and a power of two: both sides have the same logits.
    query = torch.randn(1, 4, 40, 16, generator=generator).mul(8).round()
    key = torch.randn(1, 2, 60, 16, generator=generator).mul(2).round()
    entries = torch.rand(1, 2, 60, generator=generator) < 0.7
    spec = AttentionSpec(0.5, softcap)
    squares = expected.expected_attention(query, key, entries, None, spec)
    logits = query.double().unflatten(1, (2, 2)) @ key.double()[:, :, None].mT * 0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    weights = logits.masked_fill(~entries[:, :, None, None], -torch.inf).softmax(-1)
    reference = weights.square().sum(dim=(2, 3)).sqrt()
    torch.testing.assert_close(squares.double(), reference, atol=1e-5, rtol=1e-4)
    assert seen and not all(seen)


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_threads_share_heads_and_their_queries(monkeypatch, threads):
    monkeypatch.setattr(expected, "_TILE_ELEMENTS", 200)  # tiles of 5 queries
    jobs, spread = [], expected.run_apart
    monkeypatch.setattr(expected, "run_apart", lambda some: jobs.append(len(some)) or spread(some))
    generator = torch.Generator().manual_seed(threads)
    query = torch.randn(1, 6, 23, 8, generator=generator)
    key = torch.randn(1, 3, 40, 8, generator=generator)
    reference = expected.expected_attention(query, key, None, None, AttentionSpec(0.5))
    monkeypatch.setattr(expected, "_MANY_LOGITS", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            squares = expected.expected_attention(query, key, None, None, AttentionSpec(0.5))
    finally:
        torch.set_num_threads(before)
    assert jobs == [{2: 6, 3: 3, 4: 12}[threads]]
    torch.testing.assert_close(squares, reference)


def test_a_batch_of_none_is_zero():
    squares = expected.expected_attention(
        torch.ones(1, 2, 3, 4),
        torch.ones(1, 1, 5, 4),
        None,
        torch.zeros(1, 3).bool(),
        AttentionSpec(1.0),
    )
    assert not squares.any()
