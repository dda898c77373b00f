import numpy as np
import pytest
from scipy import stats

from h2okv_lab.analysis.attention_stats import cost
from h2okv_lab.analysis.eviction_trace import chance_similarity, durations, overlap, similarity
from h2okv_lab.analysis.score_stats import by_word, count_words, fit_power_law, spearman


def test_a_power_law_is_recovered_and_not_rejected():
    samples = (1 - np.random.default_rng(0).random(3000)) ** (-1 / 1.5)
    law = fit_power_law(samples, draws=50)
    assert law["exponent"] == pytest.approx(2.5, abs=4 * law["exponent_error"])
    assert law["exponent_error"] < 0.2
    assert law["p_value"] > 0.1
    assert law["log_ratio_p"] > 0.05 or law["log_ratio"] > 0


def test_a_log_normal_is_distinguished_from_a_power_law():
    samples = np.random.default_rng(0).lognormal(0, 0.4, 3000)
    body = fit_power_law(np.concatenate([samples, samples * 1.0001]), draws=0)
    assert body["log_ratio"] < 0
    exponential = np.random.default_rng(1).exponential(size=3000) + 1
    assert fit_power_law(exponential, draws=50)["tail"] < 3000


def test_too_few_values_are_refused():
    with pytest.raises(ValueError, match="needs at least 60 positive values, got 20"):
        fit_power_law(np.ones(20))


def test_word_counts_and_cooccurrences():
    words = count_words(np.array([5, 7, 5, 9]), reach=1)
    assert words.token_ids.tolist() == [5, 7, 9]
    assert words.count.tolist() == [2, 1, 1]
    assert words.together.tolist() == [3, 2, 1]
    assert words.neighbours.tolist() == [2, 1, 1]
    sums = by_word(np.array([[1.0, 2.0, 4.0, 8.0]]), words)
    assert sums.tolist() == [[5.0, 2.0, 8.0]]


def test_rank_correlation_is_scipys_and_lies_in_its_interval():
    generator = np.random.default_rng(0)
    first = generator.integers(0, 20, 300).astype(float)
    second = first + generator.normal(0, 8, 300)
    result = spearman(first, second)
    assert result["rho"] == pytest.approx(stats.spearmanr(first, second).statistic)
    assert result["low"] < result["rho"] < result["high"]
    assert spearman(first, np.ones(300))["rho"] == 0


def test_the_interval_of_a_cost_covers_the_truth():
    generator = np.random.default_rng(0)
    base = generator.normal(3, 1, 2048)
    covered = 0
    for seed in range(100):
        noise = np.random.default_rng(seed).normal(0.1, 0.5, 2048)
        result = cost(base + noise, base, first=0, seed=seed)
        covered += result["low"] < np.exp(0.1) < result["high"]
    assert covered >= 86
    assert cost(base, base)["ratio"] == 1


def test_similarity_of_sets():
    sets = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]], dtype=bool)
    assert np.allclose(similarity(sets), [[1, 1 / 3, 0], [1 / 3, 1, 1 / 3], [0, 1 / 3, 1]])
    assert overlap(sets[:1], sets[1:2]).tolist() == [0.5]
    generator = np.random.default_rng(0)
    random_sets = np.argsort(generator.random((200, 400)), axis=1) < 80
    pairs = similarity(random_sets)[~np.eye(200, dtype=bool)]
    assert chance_similarity(80, 400) == pytest.approx(pairs.mean(), abs=0.005)


def test_durations_count_from_the_end_of_the_recent_window():
    # Six tokens, a window of 2: token 0 can go at step 2 and goes there, token 1 at step 3 and
    # goes at step 4, token 2 stays to the end.
    gone = np.array([[[3, 5, 7, 7, 7, 7]]])
    assert durations(gone, recent=2, first=1).tolist() == [[[0, 1, 1, 0]]]
