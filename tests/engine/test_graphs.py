"""The engine's steps replayed from CUDA graphs, on the pretended device."""

import pytest
from pretended_device import make_model, pretended_device

import h2okv
from h2okv.integration.graphs import EAGER_STEPS, VARIABLE
from h2okv.ops import dispatch

pytest.importorskip("triton")

LAYERS = 2
BUDGET = {"heavy": 8, "recent": 6}
BY_HEAD = BUDGET | {"sink": 2, "scoring": "expected", "layer_budgets": [[1.2, 0.8]] * LAYERS}
OPTIONS = {
    "best by head": BY_HEAD | {"evict_every": None},
    "best by head, spans": BY_HEAD | {"evict_every": 7},
    "h2o": BUDGET,
}


@pytest.fixture
def generated(monkeypatch, tokenizer):
    """Return tokens of requests and the number of replays, without graphs and with them."""

    def call(requests, new_tokens, ops, **options):
        params = h2okv.SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=0)
        texts, num_replays = {}, {}
        for setting in ("off", "auto"):
            monkeypatch.setenv(VARIABLE, setting)
            with pretended_device(monkeypatch, runs_kernels=True) as device:
                monkeypatch.setenv(dispatch.VARIABLE, ops)
                model = device.to(make_model(layers=LAYERS, attention="sdpa", eos_token_id=None))
                with h2okv.LLM(model, tokenizer, prefix_cache=0, **options) as llm:
                    results = llm.generate(requests, params, show_progress=False)
                texts[setting] = [result.completions[0].token_ids for result in results]
                num_replays[setting] = device.num_replays
        return texts, num_replays

    return call


def prompt(length):
    return [(7 * i + length) % 90 + 3 for i in range(length)]


# In the slow run the kernels of the GPU do the steps, in Triton's interpreter.
all_ops = pytest.mark.parametrize("ops", ["plain", pytest.param("auto", marks=pytest.mark.slow)])


@all_ops
# The others are quick in test_buckets.py.
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in ("h2o", "best by head, spans")))
     for n in OPTIONS],
)  # fmt: skip
def test_requests_that_come_and_go(generated, name, ops):
    """Batches of each size have graphs, and give the same tokens as without."""
    requests = [prompt(length) for length in (40, 9, 33, 51)]
    texts, num_replays = generated(requests, 14, ops, max_num_seqs=3, **OPTIONS[name])
    assert texts["auto"] == texts["off"]
    assert num_replays["off"] == 0
    assert num_replays["auto"] >= 10


@all_ops
def test_a_request_with_larger_heads_is_replayed(generated, ops):
    """A step is recorded for the heads of the longest prompt: one graph does for all lengths."""
    options = {"heavy": 0.8, "recent": 0.1, "layer_budgets": [[1.1, 0.9]] * LAYERS}
    requests = [prompt(20), prompt(150), prompt(90)]
    options |= {"max_num_seqs": 1, "max_prompt_tokens": 150, "min_tokens": 0}
    texts, num_replays = generated(requests, 10, ops, **options)
    assert num_replays["auto"] > 3 * (9 - EAGER_STEPS)  # as many if each was recorded
    assert texts["auto"] == texts["off"]
