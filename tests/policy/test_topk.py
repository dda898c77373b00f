"""The entries that each query attends to most, against the choice written down in loops."""

import pytest
import torch
from oracle import cache_of


def tokens(length, seed=0, batch=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 97, (batch, length), generator=generator)


@torch.no_grad()
def read(model, cache, ids, mask, blocks):
    logits, at = [], 0
    position_ids = (mask.cumsum(dim=1) - 1).clamp(min=0)
    for size in blocks:
        block = slice(at, at + size)
        out = model(
            ids[:, block],
            attention_mask=mask[:, : at + size],
            position_ids=position_ids[:, block],
            past_key_values=cache,
        )
        logits.append(out.logits)
        at += size
    return torch.cat(logits, dim=1)


def accumulated(query, key, blocks, sink, heavy, chosen):
    """Scores of one KV head's entries when every query head sees only what it may."""
    scores = [0.0] * query.shape[1]
    begin = 0
    for size in blocks:
        others = sorted(range(sink, begin), key=lambda p: (scores[p], p))
        always = {*range(min(sink, begin)), *others[max(0, len(others) - heavy) :]}
        added = list(scores)
        for i in range(begin, begin + size):
            for member in query:
                logits = member[i] @ key.T * 16**-0.5
                free = sorted(
                    (p for p in range(begin) if p not in always), key=lambda p: (logits[p], p)
                )
                seen = sorted(
                    always | set(free[max(0, len(free) - chosen) :]) | set(range(begin, i + 1))
                )
                shares = torch.softmax(logits[seen], dim=0).tolist()
                for position, share in zip(seen, shares, strict=True):
                    added[position] += share
        scores, begin = added, begin + size
    return torch.tensor(scores)


@pytest.mark.parametrize(("blocks", "chunk"), [([1] * 40, None), ([40], 1), ([25, 1, 6, 8], None)])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize(
    ("policy", "budget"),
    [("topk", (2, 0, 7)), ("topk_heavy", (2, 4, 3)), ("topk_heavy", (0, 4, 3))],
)
def test_each_query_sees_its_own(make_llama, first_layer, policy, budget, kv_heads, blocks, chunk):
    model, ids = make_llama(layers=1, kv_heads=kv_heads), tokens(40)
    cache = cache_of(model.config, 4, 3, budget[0], policy=policy, evict_every=chunk, masks=True)
    read(model, cache, ids, torch.ones_like(ids), blocks)
    cache.check_integrity()
    query, key = first_layer(model, ids)
    steps = [1] * 40 if chunk else blocks
    for head, queries in enumerate(query.unflatten(0, (kv_heads, -1))):
        expected = accumulated(queries, key[head], steps, *budget)
        torch.testing.assert_close(cache.scores(0)[0, head], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", ["topk", "topk_heavy"])
def test_a_padded_row_sees_what_it_sees_alone(make_llama, policy):
    model, ids, blocks = make_llama(), tokens(45, batch=3), [30, 1, 1, 6, 7]
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 7, 19)):
        mask[row, :pad] = 0
    mask[1, 33] = mask[2, 40] = 0
    together = cache_of(model.config, 0.2, 0.15, 1, policy=policy, masks=True)
    logits = read(model, together, ids, mask, blocks)
    for row in range(3):
        real = mask[row].bool()
        real_ids = ids[row : row + 1, real]
        own_blocks = [int(block.sum()) for block in real.split(blocks)]
        alone = cache_of(model.config, 0.2, 0.15, 1, policy=policy, masks=True)
        expected = read(model, alone, real_ids, torch.ones_like(real_ids), own_blocks)
        torch.testing.assert_close(logits[row, real], expected[0], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", ["topk", "topk_heavy"])
def test_room_for_all_is_full_attention(make_llama, policy):
    model, ids = make_llama(), tokens(40, batch=2)
    mask, blocks = torch.ones_like(ids), [25, 1, 1, 8, 1, 4]
    cache = cache_of(model.config, 20, 20, policy=policy, masks=True)
    full = cache_of(model.config, policy="full")
    actual, expected = (read(model, each, ids, mask, blocks) for each in (cache, full))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", ["topk", "topk_heavy"])
def test_it_cannot_drop_anything(make_llama, policy):
    config = make_llama().config
    with pytest.raises(ValueError, match=f"policy '{policy}' is unknown"):
        cache_of(config, policy=policy)
    with pytest.raises(ValueError, match="evicts nothing|rolling"):
        cache_of(config, policy=policy, masks=True, positions="rolling")
