"""The matrix that every policy passes, one added by a user too."""

import re
from pathlib import Path

import pytest
import torch
from oracle import cache_of

import h2okv
from h2okv import config
from h2okv.budget import TokenBudget
from h2okv.policy import get_rule
from h2okv_lab.masking import PER_QUERY


class Oldest(h2okv.Policy):
    """The recipe of docs/rules.md: evict the newest of the unprotected, keep the oldest."""

    name = "oldest"

    def priority(self, scores, positions, newest, layer_idx):
        return -positions.float()


POLICIES = [*h2okv.policy_names(), *PER_QUERY, Oldest()]
KEEPS_MORE = {"full": 59, "snapkv": 29, "topk": 59, "topk_heavy": 59}
"""Entries after a prompt of 40 and 20 tokens, of which the last is never read, where not 10."""


def name_of(policy):
    return policy if isinstance(policy, str) else policy.name


def rule_of(policy):
    return PER_QUERY[policy]() if name_of(policy) in PER_QUERY else get_rule(policy)


@pytest.fixture(params=POLICIES, ids=name_of)
def policy(request):
    return request.param


def generate(model, policy, batch=1, length=40, **options):
    options.setdefault("masks", name_of(policy) in PER_QUERY)
    cache = cache_of(model.config, heavy=5, recent=5, policy=policy, **options)
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(2, 97, (batch, length), generator=generator)
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        past_key_values=cache,
        max_new_tokens=20,
        do_sample=False,
    )
    return output[:, length:], cache


def test_generates_within_the_budget(make_llama, policy):
    tokens, cache = generate(make_llama(), policy, batch=2)
    assert tokens.shape == (2, 20)
    cache.check_integrity()
    assert cache.num_cached_tokens == KEEPS_MORE.get(name_of(policy), 10)


def test_equals_the_simulation(make_llama, kept_sets, policy):
    model = make_llama()
    tokens, cache = generate(model, policy)
    simulated_tokens, simulation = generate(model, policy, masks=True)
    assert torch.equal(tokens, simulated_tokens)
    assert kept_sets(cache) == kept_sets(simulation)


def test_allocates_the_whole_budget(policy):
    budget = TokenBudget(sink=2, heavy=5, recent=7)
    assert rule_of(policy).allocate_budget(budget).total == budget.total


def test_priority_is_elementwise_over_rows(policy):
    policy = rule_of(policy)
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(3, 2, 9, generator=generator)
    positions = torch.randint(0, 50, (3, 2, 9), generator=generator, dtype=torch.int32)
    newest = torch.tensor([50, 51, 60]).view(3, 1, 1)
    together = policy.priority(scores, positions, newest, 1)
    assert together.shape == scores.shape and bool(torch.isfinite(together).all())
    for row in range(3):
        single = slice(row, row + 1)
        alone = policy.priority(scores[single], positions[single], newest[single], 1)
        assert torch.equal(alone, together[single])


def read_prompt(model, policy, **options):
    cache = cache_of(model.config, policy=policy, **options)
    with torch.no_grad():
        model(torch.arange(2, 42)[None], past_key_values=cache)
    positions = cache.kept_positions(0)[0]
    return [{p for p in head if p >= 0} for head in positions.tolist()], cache


def test_random_depends_on_the_seed_and_on_nothing_else(make_llama):
    model = make_llama()
    first, _ = read_prompt(model, "random", heavy=8, recent=4, seed=1)
    again, _ = read_prompt(model, "random", heavy=8, recent=4, seed=1)
    other, _ = read_prompt(model, "random", heavy=8, recent=4, seed=2)
    assert first == again != other
    assert first[0] != first[1]
    assert all(set(range(36, 40)) <= head for head in first)


def test_random_is_uniform():
    """Each of 1,000 entries is among the lowest tenth about a tenth of the time."""
    policy = get_rule("random")
    positions = torch.arange(1000, dtype=torch.int32).view(1, 1, -1)
    draws = torch.stack(
        [
            policy.priority(positions.float(), positions, torch.tensor([[[step]]]), 0)[0, 0]
            for step in range(1000, 3000)
        ]
    )
    assert abs(float(draws.mean()) - 0.5) < 0.002
    assert abs(float((draws < 0.1).float().mean()) - 0.1) < 0.002
    per_entry = (draws < 0.1).float().mean(dim=0)
    assert float(per_entry.std()) < 0.01  # binomial: 0.0067


def test_unknown_policy_names_the_nearest(make_llama):
    with pytest.raises(ValueError, match="policy 'h20' is unknown; did you mean h2o"):
        cache_of(make_llama().config, policy="h20")


def test_a_registered_policy_has_a_name_of_its_own():
    class Impostor(Oldest):
        name = "h2o"

    with pytest.raises(ValueError, match="'h2o' is taken by H2O"):
        h2okv.register_policy(Impostor)


def test_pages_and_messages_list_every_policy():
    names = {*config.POLICIES, *PER_QUERY}
    root = Path(__file__).parents[2]
    table = (root / "docs" / "policies.md").read_text(encoding="utf-8").partition("\n## ")[0]
    rows = "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)`", rows)) == names
    with pytest.raises(ValueError, match="policy 'h20' is unknown") as refused:
        get_rule("h20")
    listed = str(refused.value).partition("choose from")[2]
    assert {*config.POLICIES} <= set(re.findall(r"\w+", listed))
