import base64
import gzip
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import h2okv
from h2okv.budget import TokenBudget
from h2okv_lab.analysis.eviction_trace import entries_after, follow
from h2okv_lab.analysis.viewer import (
    LOWEST_SCORE,
    Reader,
    Reading,
    pack_trace,
    quantise,
    tokens_a_step,
)
from h2okv_lab.cli.analyze import shown_cache


def unpack(blob, dtype):
    return np.frombuffer(gzip.decompress(base64.b64decode(blob)), dtype=dtype)


def test_levels_keep_a_score_to_within_a_few_percent():
    scores = np.geomspace(LOWEST_SCORE * 1.01, 8000, 1000)
    levels = quantise(scores, 8000.0)
    back = LOWEST_SCORE * (8000 / LOWEST_SCORE) ** ((levels.astype(float) - 1) / 254)
    assert np.abs(back / scores - 1).max() < 0.03
    assert quantise(np.array([0.0, LOWEST_SCORE, 1e9]), 8000.0).tolist() == [0, 0, 255]


def test_a_packed_trace_round_trips(model, sample):
    budget = TokenBudget(0, 12, 8)
    trace = follow(model, sample.input_ids, "h2o", budget, recorded=5)
    packed = pack_trace(trace, 320.0)
    gone = unpack(packed["gone"], "<u2").reshape(2, 2, sample.length)
    np.testing.assert_array_equal(gone, trace.gone_at)
    for layer in range(2):
        levels = unpack(packed["scores"][layer], np.uint8)
        for step, scores in zip(packed["steps"], trace.scores, strict=True):
            recorded, levels = np.split(levels, [2 * (step + 1)])
            np.testing.assert_array_equal(recorded.reshape(2, -1), quantise(scores[layer], 320.0))
        assert levels.size == 0
    at = dict(packed["bytes"])
    assert at[packed["first"] - 1] == trace.cache_bytes[packed["first"] - 1]
    assert packed["losses"][-1] == pytest.approx(float(trace.losses[-1]), abs=1e-3)
    assert packed["losses"][0] is None


@pytest.mark.parametrize(
    ("length", "tokens"),
    [(8, 1), (256, 1), (257, 3), (1024, 8), (2048, 32), (4096, 128), (8192, 256), (65_000, 256)],
)
def test_long_texts_take_few_steps_and_never_many_tokens_at_once(length, tokens):
    assert tokens_a_step(length) == tokens


def test_a_long_text_s_trace_equals_the_cache(model, kept_sets):
    ids = torch.randint(2, 97, (1, 1100), generator=torch.Generator().manual_seed(0))
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "a" * len(ids))
    described = SimpleNamespace(tokenizer=tokenizer, name="tiny", context=None)
    reading = Reading(Reader(model, described, 2000, shown_cache), ids, 1100)
    blocks = []
    hook = model.register_forward_pre_hook(
        lambda _, __, options: blocks.append(options["logits_to_keep"]), with_kwargs=True
    )
    trace = reading.trace("h2o", "20%")
    hook.remove()
    ends = [*range(64, 1100, 10), 1100]
    assert trace["block"] == 10 and blocks == [1, *[10] * (len(ends) - 2), 6]
    gone = unpack(trace["gone"], "<u2").reshape(2, 2, -1)
    cache = h2okv.H2OCache(model.config, 110, 110)
    with h2okv.enable(model), torch.inference_mode():
        for begin, end in pairwise([0, *ends]):
            model(ids[:, begin:end], past_key_values=cache)
            entries = entries_after(gone, end - 1)
            for layer, rows in enumerate(kept_sets(cache)):
                assert [set(np.flatnonzero(row)) for row in entries[layer]] == rows[0]
            sizes = [size for step, size in trace["bytes"] if step < end]
            assert sizes[-1] == cache.nbytes
