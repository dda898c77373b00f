import sys

import pytest
import torch

from h2okv.benchmarking.caches import CacheChoice, contestant_class, held_bytes
from h2okv.benchmarking.peak import prompt_ids

CONTEXT, BATCH = 100, 2
ENTRY = 2 * 2 * 2 * 16 * 4  # layers, KV heads, key and value, head size, fp32


def run(model, choice, steps=3, chunk=None):
    contestant = contestant_class(choice)(model, choice, chunk)
    ids = prompt_ids(model, BATCH, CONTEXT)
    contestant.prepare(CONTEXT)
    contestant.read(ids)
    with contestant.stepping():
        for _ in range(steps):
            contestant.step(ids[:, :1])
    return contestant


def test_the_full_cache_holds_everything(build):
    assert run(build(), CacheChoice("dynamic")).nbytes == BATCH * (CONTEXT + 3) * ENTRY


@pytest.mark.parametrize("chunk", [None, 32])
def test_h2o_holds_its_budget_of_the_whole_prompt(build, chunk):
    contestant = run(build(), CacheChoice("h2o", 0.2), chunk=chunk)
    assert contestant.cache.num_cached_tokens == 20
    assert contestant.cache.num_seen_tokens == CONTEXT + 3
    assert contestant.nbytes == contestant.cache.nbytes


def test_blocks_change_nothing_for_the_full_cache(build):
    whole, blocks = (run(build(), CacheChoice("dynamic"), chunk=chunk) for chunk in (None, 32))
    assert torch.allclose(whole.logits, blocks.logits, atol=1e-5)


def test_a_static_cache_stays_full_with_as_many_entries_as_h2o(build):
    contestant = run(build(), CacheChoice("static", 0.2))
    assert contestant.cache.layers[0].keys.shape[2] == 21
    assert contestant.cache.get_seq_length() == 21
    before = contestant.cache.layers[0].keys.clone()
    with contestant.stepping():
        contestant.step(torch.full((BATCH, 1), 7))
    changed = (contestant.cache.layers[0].keys != before).any(dim=-1).any(dim=0).any(dim=0)
    assert changed.nonzero().flatten().tolist() == [20]


def test_a_budget_of_everything_gives_the_full_caches_logits(build):
    full, own = (
        run(build(), choice) for choice in (CacheChoice("dynamic"), CacheChoice("h2o", 400))
    )
    assert torch.allclose(full.logits, own.logits, atol=1e-4)


def test_what_is_not_installed_says_so(monkeypatch):
    import h2okv.benchmarking.caches as module

    monkeypatch.setattr(module, "is_optimum_quanto_available", lambda: False)
    monkeypatch.setattr(module, "is_hqq_available", lambda: False)
    obstacle = contestant_class(CacheChoice("quantized")).obstacle()
    assert obstacle == "not installed (optimum-quanto or hqq)"
    monkeypatch.setitem(sys.modules, "kvpress", None)
    assert contestant_class(CacheChoice("kvpress", 0.2)).obstacle() == "not installed"


def test_packed_tensors_are_counted_in_tuples_and_dicts():
    class Layer:
        def __init__(self):
            self.keys = torch.zeros(10)
            self._quantized_keys = (torch.zeros(6, dtype=torch.uint8), {"scale": torch.zeros(2)})
            self.cumulative_length = torch.zeros(1000)

    class Cache:
        layers = [Layer()]

    assert held_bytes(Cache()) == 40 + 6 + 8
