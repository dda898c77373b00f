"""HELM's client class, in an environment that has HELM (examples/helm/README.md)."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import h2okv
from h2okv.assets import bundled_model_path

pytest.importorskip(
    "helm.clients", reason="HELM is not installed; it has an environment of its own"
)

from helm.common.cache import BlackHoleCacheConfig, SqliteCacheConfig  # noqa: E402
from helm.common.request import Request  # noqa: E402
from helm.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "helm"))
H2OClient = pytest.importorskip("h2okv_helm", reason="the examples are not here").H2OClient

PROMPT = "It was a dark and stormy night, and the old captain said to the mate: " * 3
BUDGET = {"heavy": 0.1, "recent": 0.1}


@pytest.fixture(scope="module")
def tokenizer():
    path = str(bundled_model_path())
    return HuggingFaceTokenizer(BlackHoleCacheConfig(), "h2okv/test", path)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(
        bundled_model_path(), dtype=torch.float32, attn_implementation="h2o"
    ).eval()


@pytest.fixture
def client(tokenizer):
    def make(config=None, **options):
        settings = {"pretrained_model_name_or_path": "bundled", "dtype": "float32"} | options
        return H2OClient(config or BlackHoleCacheConfig(), tokenizer, **settings)

    return make


def ask(client, **more):
    request = Request(
        model="h2okv/books", model_deployment="h2okv/books", prompt=PROMPT, temperature=0, **more
    )
    result = client.make_request(request)
    assert result.success, result.error
    return result.completions[0]


def test_helm_generates_the_same_text_as_the_cache(client, model):
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    inputs = tokenizer(PROMPT, return_tensors="pt")
    cache = h2okv.H2OCache(model.config, **BUDGET)
    written = model.generate(**inputs, past_key_values=cache, max_new_tokens=15, do_sample=False)
    expected = tokenizer.decode(written[0, inputs.input_ids.shape[1] :])
    assert ask(client(**BUDGET), max_tokens=15).text == expected
    assert ask(client(policy="full"), max_tokens=15).text != expected


def test_log_probabilities_of_a_prompt_are_under_eviction(client, model):
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    cache = h2okv.H2OCache(model.config, **BUDGET)
    cache.expect(ids.shape[1])
    expected = []
    with torch.no_grad():
        for index in range(ids.shape[1] - 1):
            logits = model(ids[:, index : index + 1], past_key_values=cache).logits[0, -1]
            expected.append(float(logits.log_softmax(-1)[ids[0, index + 1]]))
    scored = ask(client(**BUDGET), max_tokens=0, echo_prompt=True)
    assert [token.logprob for token in scored.tokens[1:]] == pytest.approx(expected, abs=1e-4)
    full = ask(client(policy="full"), max_tokens=0, echo_prompt=True)
    assert abs(full.logprob - scored.logprob) > 0.1


def test_two_budgets_never_share_a_stored_answer(client, tmp_path):
    config = SqliteCacheConfig(str(tmp_path / "answers.sqlite"))
    request = {"max_tokens": 0, "echo_prompt": True}
    first = ask(client(config, **BUDGET), **request)
    second = ask(client(config, heavy=0.4, recent=0.4, min_tokens=0), **request)
    assert first.logprob != second.logprob
    assert ask(client(config, **BUDGET), **request).logprob == first.logprob


def test_a_run_records_settings_and_versions(client, tmp_path):
    record = tmp_path / "out" / "record.json"
    ask(client(**BUDGET, policy="random", seed=7, record=str(record)), max_tokens=1)
    content = json.loads(record.read_text())
    assert content["cache"]["heavy"] == 0.1 and content["cache"]["seed"] == 7
    assert "crfm-helm" in content["versions"] and len(content["weights"]) == 64


def test_a_misspelt_setting_is_refused(client):
    with pytest.raises(ValueError, match="perhaps 'recent'"):
        client(recnt=0.1)
