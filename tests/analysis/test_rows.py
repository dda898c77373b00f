import numpy as np
import torch

import h2okv
from h2okv.analysis.attention_stats import Accumulation, Retention, Sinks, Sparsity, watch_rows


def test_sparsity_counts_what_the_whole_matrix_would(model, sample, attention):
    watcher = Sparsity(threshold=0.05)
    watch_rows(model, sample.input_ids, [watcher])
    length = sample.length
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    small = attention < 0.05 * attention.amax(dim=-1, keepdim=True)
    for row in watcher.rows():
        head = small[row["layer"], row["head"]]
        assert row["share"] == np.float64(head[visible].double().mean())
        assert np.isclose(row["share_square"], head.double().mean())
        late = visible[length // 2 :]
        assert np.isclose(row["share_late"], head[length // 2 :][late].double().mean())


def test_accumulated_scores_are_those_of_the_cache(model, sample):
    watcher = Accumulation()
    watch_rows(model, sample.input_ids, [watcher])
    cache = h2okv.H2OCache(model.config, policy="full")
    with h2okv.enable(model), torch.inference_mode():
        model(sample.input_ids, past_key_values=cache)
    for layer in range(2):
        positions = cache.kept_positions(layer)[0]
        scores = torch.zeros(2, sample.length)
        real = positions >= 0
        for head in range(2):
            places = positions[head][real[head]].long()
            scores[head, places] = cache.scores(layer)[0, head][real[head]]
        np.testing.assert_allclose(watcher.scores()[layer].sum(axis=1), scores, rtol=1e-4)


def test_sinks_are_the_columns_means(model, sample, attention):
    watcher = Sinks(counts=(1, 3), away=40)
    watch_rows(model, sample.input_ids, [watcher])
    for row in watcher.rows():
        part = attention[row["layer"], row["head"], 40:]
        assert np.isclose(row["first_1"], part[:, 0].mean(), rtol=1e-4)
        assert np.isclose(row["first_3"], part[:, :3].sum(dim=1).mean(), rtol=1e-4)
        assert np.isclose(row["even_first_1"], (1 / np.arange(41, 161)).mean())


def test_retention_adds_up_what_is_seen(model, sample, attention):
    length, first = sample.length, 80
    everything = np.full((2, 2, length), length + 1)
    window = np.tile(np.arange(length) + 10, (2, 2, 1))
    watcher = Retention({"all": everything, "window": window}, (0, 1), first)
    watch_rows(model, sample.input_ids, [watcher])
    shares = watcher.shares()
    banded = attention.tril().triu(-9)[:, :, first:].sum(dim=-1).mean(dim=(1, 2))
    for layer in range(2):
        assert np.isclose(shares["all", layer], 1, atol=1e-5)
        assert np.isclose(shares["window", layer], banded[layer], rtol=1e-4)
