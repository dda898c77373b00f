"""Texts read in blocks by a cache, compared with masking and with a row that is alone."""

import torch
from hypothesis import strategies as st

BUDGETS = st.one_of(
    st.tuples(st.integers(0, 12), st.integers(1, 12)),
    st.tuples(st.floats(0.05, 0.5), st.floats(0.05, 0.5)),
)
# Of a padded batch: what `same_as_masking` takes.
BATCHES = {
    "pads": st.lists(st.integers(0, 9), min_size=1, max_size=3),
    "blocks": st.lists(st.sampled_from([1, 1, 1, 2, 7, 16]), max_size=8),
    "prompt": st.integers(10, 40),
    "holes": st.sampled_from([0.0, 0.0, 0.3]),
    "seed": st.integers(0, 10**6),
}


def tokens(seed, batch, length):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 97, (batch, length), generator=generator)


def padding(pads, blocks, holes=0.0, seed=0):
    """Left padding of the prompt, and holes anywhere in the later blocks."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(len(pads), sum(blocks), generator=generator) >= holes).long()
    mask[:, : blocks[0]] = 1
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    return mask


@torch.no_grad()
def run(model, cache, input_ids, blocks, mask=None):
    """Feeds the tokens in blocks; returns the logits of all, ``[B, T, V]``."""
    logits, at, options = [], 0, {}
    for size in blocks:
        block = slice(at, at + size)
        if mask is not None:
            position_ids = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, block]
            options = {"attention_mask": mask[:, : at + size], "position_ids": position_ids}
        logits.append(model(input_ids[:, block], past_key_values=cache, **options).logits)
        at += size
    return torch.cat(logits, dim=1)


def held_scores(cache, layer, row):
    """Scores of what a row holds, by head and ascending position, ``[H, entries]``."""
    positions, scores = cache.kept_positions(layer)[row], cache.scores(layer)[row]
    return torch.stack(
        [s[p.argsort()][(p.sort().values >= 0)] for p, s in zip(positions, scores, strict=True)]
    )


def same_as_masking(kept_sets, model, make_cache, pads, blocks, prompt, holes, seed, scores=True):
    """Compare a cache that drops with one that masks, in logits, what is kept and its scores.

    Args:
        make_cache: returns a cache, called with ``masks``.
        scores: whether they are compared, which heads of different sizes do not allow.

    Returns:
        The positions that are kept, as `kept_sets` lists them.
    """
    blocks = [prompt, *blocks, 1]
    mask = padding(pads, blocks, holes, seed)
    input_ids = tokens(seed, len(pads), sum(blocks))
    results, last = [], model.config.num_hidden_layers - 1
    for masks in (False, True):
        cache = make_cache(masks=masks)
        logits = run(model, cache, input_ids, blocks, mask)
        cache.check_integrity()
        received = [held_scores(cache, last, row) for row in range(len(pads) * scores)]
        results.append((logits[mask.bool()], kept_sets(cache), received))
    (dropped, remaining, received), (masked, alive, expected) = results
    assert remaining == alive
    torch.testing.assert_close(received, expected, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(dropped, masked, atol=2e-4, rtol=1e-4)
    return remaining


def same_alone(kept_sets, model, make_cache, pads, blocks, holes, seed):
    """Compare the rows of a padded batch with the same texts alone."""
    mask = padding(pads, blocks, holes, seed)
    input_ids = tokens(seed, len(pads), sum(blocks))
    together, last = make_cache(), model.config.num_hidden_layers - 1
    logits = run(model, together, input_ids, blocks, mask)
    for row in range(len(pads)):
        alone, real = make_cache(), mask[row].bool()
        row_blocks = [int(cut.sum()) for cut in real.split(blocks) if cut.any()]
        expected = run(model, alone, input_ids[row : row + 1, real], row_blocks)
        assert [layer[0] for layer in kept_sets(alone)] == [
            layer[row] for layer in kept_sets(together)
        ]
        torch.testing.assert_close(
            held_scores(together, last, row), held_scores(alone, last, 0), atol=1e-3, rtol=1e-4
        )
        torch.testing.assert_close(logits[row, real], expected[0], atol=2e-4, rtol=1e-4)
