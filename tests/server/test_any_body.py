"""Bodies of any kind at the real engine: others are served, and nothing is an error of ours."""

import http.client
import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

import h2okv

OTHER = {"model": "tiny", "prompt": [5, 6, 7, 8, 9], "max_tokens": 8, "seed": 1}
ODD = st.sampled_from(
    [None, True, "1", "", [], {}, 0, 1, -1, 2, 2.5, 2**63, 10**400, 10**4299, 1e-45, 1e-40, 1e-38,
     1e5, 1e38, math.inf, math.nan, [5], ["a"], {"5": 3}, {"5": 1e9}, {"x": 1}, {"9" * 5000: 1},
     {"-1": 1}, {"heavy": 3, "recent": 2}, {"sink": 10**30}, "\ud800"]
)  # fmt: skip
FITTING = {
    "temperature": st.floats(0, 100) | st.sampled_from([1, 2, 1e-40]),
    "top_p": st.floats(0, 1, exclude_min=True), "top_k": st.integers(-1, 100),
    "min_p": st.floats(0, 1), "n": st.integers(1, 3), "seed": st.integers(),
    "stop": st.text(min_size=1, max_size=3), "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(1e-3, 1e6),
    "logit_bias": st.dictionaries(st.integers(0, 96).map(str), st.floats(-100, 100), max_size=3),
    "ignore_eos": st.booleans(), "stop_token_ids": st.lists(st.integers(0, 96), max_size=3),
    "logprobs": st.integers(0, 20), "echo": st.booleans(), "stream": st.booleans(),
}  # fmt: skip
NAMES = ["prompt", "max_tokens", "frequency_penalty", "best_of", "h2o", *FITTING]
BODIES = st.builds(
    lambda fitting, odd: fitting | odd,
    st.fixed_dictionaries(
        {
            "model": st.just("tiny"),
            "prompt": st.lists(st.integers(0, 96), min_size=1, max_size=30),
            "max_tokens": st.sampled_from([0, 1, 4]),
        },
        optional=FITTING,
    ),
    st.dictionaries(st.sampled_from(NAMES), ODD, max_size=1),
)


@pytest.fixture(scope="module")
def served(start, make_llama, bundled_tokenizer):
    engine = h2okv.AsyncLLM(
        make_llama(), bundled_tokenizer, heavy=0.2, recent=0.2, min_tokens=0, max_num_seqs=6
    )
    served = start(engine, model_name="tiny", max_new_tokens=32)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def ask(served):
    """Sends bodies at the same time; gives the status and the text of each answer."""

    def send(body):
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        head = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), head)
        answer = connection.getresponse()
        got = answer.status, answer.read().decode()
        connection.close()
        return got

    with ThreadPoolExecutor(8) as threads:
        yield lambda *bodies: list(threads.map(send, bodies))


@settings(max_examples=examples(40), deadline=None)
@given(bodies=st.lists(BODIES, min_size=1, max_size=3))
def test_any_body_leaves_other_requests_unchanged(served, ask, bodies):
    (alone,) = ask(OTHER)
    first, *answers, last = ask(OTHER, *bodies, OTHER)
    texts = [json.loads(text)["choices"][0]["text"] for _, text in (alone, first, last)]
    assert len(set(texts)) == 1
    for status, text in answers:
        if status != 200:
            error = json.loads(text)["error"]
            assert status == 400 or error["code"] == "request_failed", error
            assert len(error["message"]) < 6000 and error["message"].endswith("."), error
    assert served.engine.is_healthy
