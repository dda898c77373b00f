import numpy as np
import torch

import h2okv
from h2okv_lab.analysis.attention_stats import (
    accumulated,
    of_layers,
    retained,
    sink_mass,
    small_entries,
)
from h2okv_lab.analysis.measurements import measure_sinks, measure_sparsity
from h2okv_lab.analysis.study import Study


def test_sparsity_equals_that_of_the_full_matrix(model, sample, attention):
    by_layer = of_layers(model, sample.input_ids, lambda layer: small_entries(layer, 0.05))
    visible = torch.ones(sample.length, sample.length, dtype=torch.bool).tril()
    small = (attention < 0.05 * attention.amax(dim=-1, keepdim=True)) & visible
    for layer, counts in enumerate(by_layer):
        np.testing.assert_array_equal(counts, small[layer].sum(dim=-1))


def test_shares_of_small_entries_are_those_of_the_matrix(model, sample, attention):
    length, half = sample.length, sample.length // 2
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    small = attention < 0.01 * attention.amax(dim=-1, keepdim=True)
    for row in measure_sparsity(Study(model, sample))["sparsity"]:
        head = small[row["layer"], row["head"]]
        assert row["share"] == np.float64(head[visible].double().mean())
        assert np.isclose(row["share_square"], head.double().mean())
        assert np.isclose(row["share_late"], head[half:][visible[half:]].double().mean())
        assert row["kv_head"] == row["head"] // 2


def test_accumulated_scores_are_those_of_the_cache(model, sample):
    received = of_layers(model, sample.input_ids, accumulated)
    cache = h2okv.H2OCache(model.config, policy="full")
    with h2okv.enable(model), torch.inference_mode():
        model(sample.input_ids, past_key_values=cache)
    for layer in range(2):
        slot_positions = cache.kept_positions(layer)[0]
        scores = torch.zeros(2, sample.length)
        real = slot_positions >= 0
        for head in range(2):
            positions = slot_positions[head][real[head]].long()
            scores[head, positions] = cache.scores(layer)[0, head][real[head]]
        np.testing.assert_allclose(received[layer].sum(axis=1), scores, rtol=1e-4)


def test_sinks_are_the_columns_means(model, sample, attention):
    masses = of_layers(model, sample.input_ids, lambda layer: sink_mass(layer, (1, 3), 40))
    late = attention[:, :, 40:]
    for layer, mass in enumerate(masses):
        np.testing.assert_allclose(mass[:, 0], late[layer, :, :, 0].mean(dim=1), rtol=1e-4)
        np.testing.assert_allclose(mass[:, 1], late[layer, ..., :3].sum(-1).mean(1), rtol=1e-4)
    rows = measure_sinks(Study(model, sample))["sinks"]
    assert {round(row["even_first_1"], 9) for row in rows} == {
        round((1 / np.arange(65, 161)).mean(), 9)
    }


def test_retention_sums_the_visible_attention(model, sample, attention):
    length, first = sample.length, 80
    everything = np.full((2, length), length + 1)
    window = np.tile(np.arange(length) + 10, (2, 1))
    gone = np.stack([everything, window])
    fractions = of_layers(model, sample.input_ids, lambda layer: retained(layer, gone, first))
    banded = attention.tril().triu(-9)[:, :, first:].sum(dim=-1).mean(dim=(1, 2))
    for layer, (full, partial) in enumerate(fractions):
        assert np.isclose(full, 1, atol=1e-5)
        assert np.isclose(partial, banded[layer], rtol=1e-4)
