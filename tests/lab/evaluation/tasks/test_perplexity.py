import math

import pytest
import torch

from h2okv.config import CacheConfig
from h2okv_lab.evaluation.tasks.perplexity import Perplexity


def run(subject, novel, config, **windows):
    task = Perplexity("novel", novel, **windows)
    task.prepare(subject, [config])
    results = {}
    for _, batch in task.run(subject, [config], task.samples, 0):
        results |= batch
    return task, results


def losses(subject, novel, length, count):
    ids = torch.tensor(subject.encode(novel)[: length * count]).reshape(count, length)
    with torch.no_grad():
        logits = subject.model(ids).logits[:, :-1].double()
    return -logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


@pytest.mark.parametrize(
    "config", [CacheConfig("full", evict_every=32), CacheConfig(budget=96, evict_every=32)]
)
def test_full_cache_perplexity_equals_the_model_s(subject, novel, config):
    task, results = run(subject, novel, config, length=96, windows=2, every=40)
    expected = losses(subject, novel, 96, 2)
    assert task.scores(results)["perplexity"].value == pytest.approx(
        math.exp(expected.mean()), rel=1e-4
    )
    rows = task.details(results)
    assert [row["position"] for row in rows] == [40, 80, 95]
    for row, chunk in zip(rows, expected.split([40, 40, 15], dim=1), strict=True):
        assert row["nll"] == pytest.approx(chunk.mean().item(), abs=1e-4)


def test_a_fraction_is_of_the_window_from_its_first_token_on(subject, novel):
    _, small = run(
        subject,
        novel,
        CacheConfig(budget=0.125, min_tokens=0, evict_every=1),
        length=64,
        windows=1,
    )
    _, tokens = run(subject, novel, CacheConfig(budget=6, evict_every=1), length=64, windows=1)
    # A window of 64 tokens is read but for its last one: a sixteenth of 63 are 3.
    assert small[0]["positions"] == tokens[0]["positions"] == [63]
    assert small[0]["nlls"][0] == pytest.approx(tokens[0]["nlls"][0], abs=1e-6)


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ({"length": 1}, "--length 1 is too few"),
        ({"length": 64, "windows": 0}, "--windows 0 is too few"),
        ({"length": 5000, "windows": 1}, "0 windows of 5000"),
        ({"length": 2049, "windows": 1}, "more than the model's context window of 2048"),
    ],
)
def test_what_cannot_be_read_is_refused(subject, novel, windows, message):
    text = novel if windows["length"] != 2049 else novel * 2
    with pytest.raises(ValueError, match=message):
        run(subject, text, CacheConfig(budget=64), **windows)


def test_a_window_that_evicts_nothing_is_refused(subject, novel):
    with pytest.raises(ValueError, match="--length 65 is read as one block of 64 tokens"):
        run(subject, novel, CacheConfig(budget=8), length=65, windows=1)
    run(subject, novel, CacheConfig("full"), length=65, windows=1)
    run(subject, novel, CacheConfig(budget=8), length=66, windows=1)
