"""The rules that docs/results/quality.md weighs, against their definitions in loops."""

import sys
from types import SimpleNamespace

import pytest
import torch

import h2okv.policy
from h2okv.ops.reference import AttentionSpec

HEADS, GROUPS, LENGTH, SIZE = 2, 3, 40, 8


@pytest.fixture
def rules(import_benchmark):
    return import_benchmark("other_rules")


@pytest.fixture
def prompt(rules):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, HEADS * GROUPS, LENGTH, SIZE, generator=generator)
    key, value = torch.randn(2, 1, HEADS, LENGTH, SIZE, generator=generator)
    weight = torch.randn(24, HEADS * GROUPS * SIZE, generator=generator)
    module = SimpleNamespace(o_proj=SimpleNamespace(weight=weight))
    block = SimpleNamespace(
        query=query, key=key, value=value, spec=AttentionSpec(0.5), module=module
    )
    return rules.Prompt(block, heavy=11)


def softmax(prompt, head, group, row, left_out=None):
    logits = prompt.keys[head, 0, : row + 1] @ prompt.query[head, group, row]
    if left_out is not None:
        logits[left_out] = -torch.inf
    return logits.softmax(dim=0)


def of_queries(prompt, head, entry, measure):
    """Return a measure for each query that sees an entry, except those that see few keys."""
    rows = range(max(entry, sys.modules["other_rules"].FEW), LENGTH)
    return [measure(head, group, row) for group in range(GROUPS) for row in rows]


@pytest.mark.parametrize("head, entry", [(0, 0), (0, 17), (1, 38)])
def test_leave_one_out_scores_equal_the_change_of_outputs(prompt, head, entry):
    """Exact, not to first order: the softmax is taken again without the entry."""

    def moved(*query):
        values = prompt.values[head, : query[-1] + 1]
        change = softmax(prompt, *query) @ values - softmax(prompt, *query, entry) @ values
        return change.square().sum()

    expected = sum(of_queries(prompt, head, entry, moved))
    torch.testing.assert_close(prompt.leave_one_out()[head, entry], expected, rtol=1e-3, atol=1e-4)


def test_a_sum_and_a_largest_share(rules, prompt):
    def share(entry):
        return lambda *query: softmax(prompt, *query)[entry]

    largest = torch.tensor(
        [max(of_queries(prompt, 1, entry, share(entry))) for entry in range(LENGTH)]
    )
    torch.testing.assert_close(prompt.largest()[1], largest.clamp(min=largest.mean()))
    seen = [softmax(prompt, 1, group, row) for group in range(GROUPS) for row in range(LENGTH)]
    total = sum(torch.nn.functional.pad(row, (0, LENGTH - len(row))) for row in seen)
    torch.testing.assert_close(prompt.sums[1], total)


def test_a_mixture_of_two_scales(prompt):
    chosen = prompt.two_scales().topk(prompt.heavy, dim=-1).indices
    for head, first in enumerate(prompt.sums.topk(prompt.heavy // 2, dim=-1).indices):
        assert set(first.tolist()) < set(chosen[head].tolist())


def test_a_value_is_as_large_as_what_it_adds_to_the_stream(prompt):
    weight = prompt.module.o_proj.weight
    added = []
    for head in range(GROUPS, 2 * GROUPS):  # those of KV head 1
        values = torch.zeros(LENGTH, HEADS * GROUPS, SIZE)
        values[:, head] = prompt.values[1]
        added.append((values.flatten(1) @ weight.T).abs().sum(-1))
    torch.testing.assert_close(prompt.output_norms()[1], torch.stack(added).mean(0))


def test_a_formula_is_a_rule_of_a_cache(rules, make_llama, monkeypatch):
    monkeypatch.setattr(h2okv.policy, "_RULES", dict(h2okv.policy._RULES))
    rules.paper_rule("sum")
    model = make_llama()
    ids = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(3))
    caches = [h2okv.H2OCache(model.config, 8, 4, policy=name) for name in ("sum", "h2o")]
    for cache in caches:
        h2okv.prefill(model, ids, cache)
        cache.check_integrity()
    for layer in range(len(caches[0].layers)):
        positions = [cache.kept_positions(layer).sort(-1).values for cache in caches]
        assert torch.equal(*positions)
