import base64
import gzip

import numpy as np
import pytest

from h2okv.analysis.eviction_trace import follow
from h2okv.analysis.viewer.reading import LOWEST_SCORE, pack_trace, quantise
from h2okv.config import TokenBudget


def unpack(blob, dtype):
    return np.frombuffer(gzip.decompress(base64.b64decode(blob)), dtype=dtype)


def test_levels_keep_a_score_to_within_a_few_percent():
    scores = np.geomspace(LOWEST_SCORE * 1.01, 8000, 1000)
    levels = quantise(scores, 8000.0)
    back = LOWEST_SCORE * (8000 / LOWEST_SCORE) ** ((levels.astype(float) - 1) / 254)
    assert np.abs(back / scores - 1).max() < 0.03
    assert quantise(np.array([0.0, LOWEST_SCORE, 1e9]), 8000.0).tolist() == [0, 0, 255]


def test_a_trace_comes_back_from_its_packing(model, sample):
    budget = TokenBudget(0, 12, 8)
    trace = follow(model, sample.input_ids, "h2o", budget, recorded=5)
    packed = pack_trace(trace, "h2o", budget, ("a",) * sample.length, 320.0)
    gone = unpack(packed["gone"], "<u2").reshape(2, 2, sample.length)
    np.testing.assert_array_equal(gone, trace.gone_at)
    for layer in range(2):
        levels = unpack(packed["scores"][layer], np.uint8)
        for step, scores in zip(packed["steps"], trace.scores, strict=True):
            part, levels = np.split(levels, [2 * (step + 1)])
            np.testing.assert_array_equal(part.reshape(2, -1), quantise(scores[layer], 320.0))
        assert levels.size == 0
    at = dict(packed["bytes"])
    assert at[packed["first"] - 1] == trace.held_bytes[packed["first"] - 1]
    assert packed["losses"][-1] == pytest.approx(float(trace.losses[-1]), abs=1e-3)
    assert packed["losses"][0] is None
