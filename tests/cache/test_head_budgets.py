"""Budgets that differ by head: slots that heads share, exact, saved, measured, and refused."""

from unittest import mock

import pytest
import torch
from oracle import cache_of
from reading import run, tokens

import h2okv
from h2okv.budget import TokenBudget
from h2okv.ops import append
from h2okv.ops.compaction import NO_HEAD, share_slots

FACTORS = ((0.25, 1.75), (1.5, 0.5), (0.0, 2.0))


def both(model, budget, input_ids, blocks, mask=None, **options):
    """Return the logits and caches of dropping and of masking."""
    results = []
    for masks in (False, True):
        cache = cache_of(model.config, *budget, layer_budgets=FACTORS, masks=masks, **options)
        results.append((run(model, cache, input_ids, blocks, mask), cache))
        cache.check_integrity()
    return results


class WideWindow(h2okv.Rule):
    """Protects a larger window where the budget is larger, so heads differ in it."""

    name = "wide"

    def allocate_budget(self, budget):
        recent = (budget.heavy + budget.recent) // 2
        return TokenBudget(budget.sink, budget.heavy + budget.recent - recent, recent)


@pytest.mark.parametrize("evict_every", [15, "prompt+8"])
def test_heads_that_read_alone_are_exact(make_llama, kept_sets, evict_every, monkeypatch):
    """As on a CPU where the products with others' slots would take longer."""
    attend = mock.Mock(wraps=append._attend_by_segments)
    monkeypatch.setattr(append, "_WASTED_PRODUCTS", -1)
    monkeypatch.setattr(append, "_attend_by_segments", attend)
    model, input_ids, blocks = make_llama(layers=3), tokens(1, 2, 60), [30, *[1] * 22, 8]
    options = {"scoring": "expected", "sink": 4, "evict_every": evict_every}
    (dropped, cache), (masked, simulated) = both(model, (0.2, 0.1), input_ids, blocks, **options)
    assert attend.call_count == 3 * 22  # each step of each layer
    assert kept_sets(cache) == kept_sets(simulated)
    torch.testing.assert_close(dropped, masked, atol=2e-4, rtol=1e-4)


def test_pins_fit_the_smallest_head(make_llama):
    model, input_ids = make_llama(layers=3), tokens(4, 1, 60)
    cache = cache_of(model.config, 8, 4, layer_budgets=((0.5, 1.5),) * 3)
    cache.pin([(3, 7)])
    run(model, cache, input_ids, [40, *[1] * 10])
    assert {3, 4, 5, 6} <= set(cache.kept_positions(0)[0, 0].tolist())
    cache.reset()
    cache.pin([(3, 8)])
    with pytest.raises(ValueError, match="5 tokens are pinned and policy='h2o' keeps 4 heavy"):
        run(model, cache, input_ids, [40])


def test_they_are_measured(make_llama):
    model = make_llama(layers=3)
    # A head without values changes nothing and needs nothing.
    attention = model.model.layers[1].self_attn
    attention.v_proj.weight.data[: attention.head_dim] *= 1e-4
    budgets = h2okv.measure_layer_budgets(model, tokens(3, 1, 200), 0.15, by_head=True)
    # The least share is a tenth of 25 entries: two.
    assert [len(heads) for heads in budgets] == [2, 2, 2] and budgets[1][0] == 0.08 < budgets[1][1]
    assert sum(map(sum, budgets)) / 6 == pytest.approx(1, abs=1e-3)
    cache_of(model.config, 0.15, 0.05, layer_budgets=budgets)


def test_slots_are_shared_by_budget():
    indices = torch.tensor([[[0, 1, 9], [3, 4, 5]], [[7, 8, 9], [2, 9, 9]]])
    is_kept = torch.tensor([[[True, True, False], [True] * 3], [[True] * 3, [True, False, False]]])
    total = torch.tensor([[[2], [3]], [[3], [1]]])
    chosen, stays, owner = share_slots(indices, is_kept, total, 7)
    assert owner[:, 0].tolist() == [[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, NO_HEAD]]
    slots = [row[mask].tolist() for row, mask in zip(chosen[:, 0], stays[:, 0], strict=True)]
    assert slots == [[0, 1, 3, 4, 5], [7, 8, 9, 2]]


@pytest.mark.parametrize(
    ("factors", "options", "message"),
    [
        (((1.0,),) * 3, {}, "lists of 1 factors, and layers of this model have 2 KV heads"),
        ((1.0, (1.0, 1.0), 1.0), {}, "must be numbers only or lists only, got both"),
        (((1.0, "much"),) * 3, {}, "layer_budgets must be a number for each layer, or a list"),
        (((1.0, 1.0),) * 2, {}, "layer_budgets has 2 factors, and the model 3 layers"),
        (FACTORS, {"positions": "rolling"}, "positions='rolling' needs heads with equal budgets"),
        (FACTORS, {"policy": WideWindow()}, "policy='wide' needs heads with equal budgets"),
        (FACTORS, {"policy": "snapkv"}, "policy='snapkv' needs heads with equal budgets"),
        (FACTORS, {"policy": "recent"}, "policy='recent' needs heads with equal budgets"),
    ],
)
def test_what_makes_no_sense_is_refused(make_llama, factors, options, message):
    with pytest.raises(ValueError, match=message):
        cache_of(make_llama(layers=3).config, layer_budgets=factors, **options)


@pytest.mark.parametrize("options", [{}, {"kv_bits": 8, "scoring": "expected", "sink": 4}], ids=str)
def test_slots_grow_with_the_text(make_llama, kept_sets, options):
    """A budget far above the text reserves what the text needs, and some more."""
    model, input_ids = make_llama(layers=3), tokens(6, 2, 260)
    blocks = [20, *[1] * 120, 10, *[1] * 110]
    (dropped, cache), (masked, simulated) = both(model, (100, 60), input_ids, blocks, **options)
    assert kept_sets(cache) == kept_sets(simulated)
    torch.testing.assert_close(dropped, masked, atol=2e-4, rtol=1e-4)
    cache = cache_of(model.config, 100, 60, layer_budgets=FACTORS, **options)
    run(model, cache, input_ids, [20])
    small = cache.nbytes
    run(model, cache, input_ids[:, 20:], [1] * 230)
    assert small < 0.7 * cache.nbytes  # with the queries of a span
    first, span = cache.layers[0], cache.cache_config.span
    assert (
        first.slots.is_full == (span == 1)
        and first.state.num_slots <= int(first.state.total.sum(dim=1).max()) + 2 * span
    )
