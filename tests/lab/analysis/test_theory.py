"""The theorem on small matrices, checked exhaustively."""

import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from h2okv.budget import TokenBudget
from h2okv_lab.analysis.attention_stats import of_layers
from h2okv_lab.analysis.eviction_trace import entries_after, follow
from h2okv_lab.analysis.study import Study

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
pytest.importorskip("theory", reason="the benchmarks are not beside these tests")
from theory import (  # noqa: E402
    CONCAVE,
    FACTOR,
    OBJECTIVES,
    adversarial_cases,
    attention_rows,
    belady_sets,
    best_retained_mass,
    best_value,
    cache_sets,
    check_bound,
    draw,
    informed_sets,
    measure_long,
    measure_theory,
    real_cases,
    retained_mass,
    set_values,
    value_of_entries,
)


def random_logits(seed, size=9, group=2):
    return np.random.default_rng(seed).normal(0, 2, (group, size, size))


def paper_greedy(logits, capacity):
    """Algorithm 1 of the paper in a few plain lines, without a recent window."""
    size = logits.shape[-1]
    entries, scores, after = [], np.zeros(size), []
    for step in range(size):
        entries.append(step)
        weights = np.exp(logits[:, step, entries])
        scores[entries] += (weights / weights.sum(axis=-1, keepdims=True)).sum(axis=0)
        if len(entries) > capacity:
            entries.remove(min(entries, key=lambda token: (scores[token], token)))
        after.append(set(entries))
    return after


@pytest.mark.parametrize("group", (1, 2, 3))
@pytest.mark.parametrize("seed", range(5))
def test_the_cache_equals_the_papers_greedy_algorithm(seed, group):
    logits = random_logits(seed, group=group)
    entries = cache_sets(logits, "heavy", TokenBudget(0, 3, 0))
    assert [set(np.flatnonzero(row)) for row in entries] == paper_greedy(logits, 3)


def all_evictions(rows, capacity):
    """Return the retained attention of every sequence of evictions."""
    size = rows.shape[-1]
    mean = rows.mean(axis=0)

    def walk(step, entries, mass):
        if step == size:
            yield mass / size
            return
        seen = [*entries, step]
        gained = mass + mean[step, seen].sum()
        for result in combinations(seen, capacity) if len(seen) > capacity else [tuple(seen)]:
            yield from walk(step + 1, result, gained)

    return list(walk(0, (), 0.0))


@pytest.mark.parametrize("seed", range(3))
def test_best_retained_mass_is_the_maximum_over_all_evictions(seed):
    rows = attention_rows(random_logits(seed, size=7))
    best = best_retained_mass(rows, 3)
    assert best == pytest.approx(max(all_evictions(rows, 3)))
    for entries in (belady_sets(rows, 3), informed_sets(rows, 3, "tokens", "sqrt")):
        assert retained_mass(rows, entries) <= best + 1e-12


@pytest.mark.parametrize("objective", ["tokens", "total"])
@pytest.mark.parametrize("h", CONCAVE)
def test_the_best_set_of_an_additive_objective_has_the_highest_scores(objective, h):
    rows = attention_rows(random_logits(0))
    _, members = best_value(rows, 4, 8, objective, h)
    assert set(np.flatnonzero(members)) == set(np.argsort(-rows.sum(axis=(0, 1)))[:4])


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(OBJECTIVES), st.sampled_from(list(CONCAVE)))
def test_every_objective_grows_and_its_gains_shrink(seed, objective, h):
    generator = np.random.default_rng(seed)
    rows = attention_rows(random_logits(seed))
    small = generator.random(9) < 0.3
    large = small | (generator.random(9) < 0.4)
    new = generator.integers(9)
    small[new] = large[new] = False
    more_small, more_large = small.copy(), large.copy()
    more_small[new] = more_large[new] = True
    sets = np.stack([small, more_small, large, more_large])
    a, b, c, d = set_values(rows, sets, 8, objective, h)
    assert b >= a and d >= c and c >= a
    assert b - a >= d - c - 1e-12


def test_with_h_the_identity_all_objectives_are_the_accumulated_score():
    rows = attention_rows(random_logits(1))
    members = np.eye(9, dtype=bool)
    values = [set_values(rows, members, 6, objective, "identity") for objective in OBJECTIVES]
    np.testing.assert_allclose(values[0], rows[:, :7].sum(axis=(0, 1)))
    np.testing.assert_allclose(values[0], values[1])
    np.testing.assert_allclose(values[0], values[2])


def test_late_star_violates_the_bound_and_even_rows_satisfy_it():
    cases = {names["case"]: logits for names, logits in adversarial_cases(14, 4)}
    bounds = {}
    for name, logits in cases.items():
        entries = cache_sets(logits, "heavy", TokenBudget(0, 4, 0))
        _, bounds[name] = check_bound(attention_rows(logits), entries, 4, "tokens", "identity")
    assert bounds["late star"]["last_ratio"] < FACTOR and not bounds["late star"]["holds"]
    assert bounds["late star"]["lost"] == 0.25
    assert bounds["late star"]["alpha"] > 0
    assert bounds["even"]["lowest_ratio"] == pytest.approx(1) and bounds["even"]["holds"]
    assert bounds["even"]["alpha"] == bounds["even"]["beta"] == 0


def test_alpha_and_beta_are_what_the_bound_needs():
    rows = attention_rows(random_logits(3, size=10))
    entries = belady_sets(rows, 3)
    ratios, bound = check_bound(rows, entries, 3, "rows", "sqrt")
    tops = np.array([best_value(rows, 3, step, "rows", "sqrt")[0] for step in range(3, 10)])
    values = ratios * tops
    assert (values >= FACTOR * (1 - bound["alpha"]) * tops - 1e-9).all()
    assert (values >= FACTOR * tops - bound["beta"] * tops[-1] - 1e-9).all()
    assert bound["alpha"] > 0


def test_value_of_entries_equals_that_of_the_full_matrix(model, sample, attention):
    length, capacity = sample.length, 20
    gone = follow(model, sample.input_ids, "h2o", TokenBudget(0, 10, 10)).gone_at
    steps = [40, 159]
    values = of_layers(
        model,
        sample.input_ids,
        lambda layer: value_of_entries(layer, gone[layer.layer_idx], capacity, steps),
    )
    assert values.shape == (2, 2, 2)
    grouped = attention.double().unflatten(1, (2, 2)).sum(dim=2).numpy()
    for layer, ratios in enumerate(values):
        for step, heads in zip(steps, ratios, strict=True):
            for head, ratio in enumerate(heads):
                scores = grouped[layer, head, : step + 1, :length].sum(axis=0)
                mass = scores[: step + 1][entries_after(gone, step)[layer, head]].sum()
                assert ratio == pytest.approx(mass / np.sort(scores)[-capacity:].sum(), rel=1e-4)


def test_real_rows_are_the_models(model, sample, attention):
    cases = real_cases(model, sample.input_ids, size=10, excerpts=2)
    assert len(cases) == 2 * 2 * 2
    names = {"case": "real", "layer": 1, "head": 1, "excerpt": 0}
    (first,) = [logits for columns, logits in cases if columns == names]
    np.testing.assert_allclose(attention_rows(first), attention[1, 2:, :10, :10], atol=1e-5)


@pytest.mark.slow
def test_tables_are_drawn(model, sample, tmp_path):
    study = Study(model, sample)
    tables = measure_theory(study) | measure_long(study)
    draw(tables, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"theory.png", "theory_mass.png", "theory_long.png"}
