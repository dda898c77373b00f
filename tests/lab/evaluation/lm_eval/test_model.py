"""The harness's model class: its own scores with a large budget, and what it refuses."""

import pytest
import torch
from sqlitedict import SqliteDict
from transformers import AutoTokenizer

import h2okv
from h2okv.assets import bundled_model_path

pytestmark = pytest.mark.slow

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (h2okv[eval])")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.model import CacheHook  # noqa: E402

LARGE = {"heavy": 0.9, "recent": 0.1, "sink": 2}  # the sinks make up for what is rounded off
SMALL = {"heavy": 0.1, "recent": 0.1}
STORY = "It was a dark and stormy night, and the old captain said to the mate: "


def instances(kind, *arguments):
    return [Instance(kind, {}, argument, i) for i, argument in enumerate(arguments)]


PAIRS = [
    (STORY, "bring me the chart"),
    (STORY, "no"),
    ("", "Call me"),
    ("The king and the queen", " went to the castle in the evening"),
]


def close(left, right, tolerance=1e-3):
    return [a[0] for a in left] == pytest.approx([b[0] for b in right], abs=tolerance) and [
        a[1] for a in left
    ] == [b[1] for b in right]


def test_a_large_budget_gives_the_harness_s_scores(harness_model, evaluate, published_data):
    plain, expected = evaluate(harness_model(is_plain=True), published_data, shots=1, limit=1)
    for options in (LARGE, LARGE | {"evict_every": 1}, {"heavy": 512, "evict_every": 64}):
        results, scores = evaluate(harness_model(**options), published_data, shots=1, limit=1)
        assert scores.keys() == expected.keys() and len(scores) == 6
        for key, values in expected.items():
            assert scores[key] == pytest.approx(values, abs=1e-3), key
        for task, figures in plain["results"].items():
            assert results["results"][task]["acc,none"] == figures["acc,none"]


def test_requests_without_context_and_of_one_context(harness_model):
    requests = instances("loglikelihood", *PAIRS)
    expected = harness_model(is_plain=True).loglikelihood(requests)
    assert close(harness_model(**LARGE).loglikelihood(requests), expected)
    assert close(harness_model(**LARGE, evict_every=1).loglikelihood(requests), expected)
    evicted = harness_model(**SMALL).loglikelihood(requests)
    assert not close(evicted, expected, 1e-2)
    assert not close(harness_model(**SMALL, evict_every=1).loglikelihood(requests), evicted, 1e-2)


def test_rolling_scores_need_a_text_that_is_evicted(harness_model):
    requests = instances("loglikelihood_rolling", (STORY * 3,))
    expected = harness_model(is_plain=True).loglikelihood_rolling(requests)
    full = harness_model(**LARGE, evict_every=1)
    assert full.loglikelihood_rolling(requests) == pytest.approx(expected, abs=1e-3)
    evicted = harness_model(**SMALL, evict_every=1).loglikelihood_rolling(requests)
    assert abs(evicted[0] - expected[0]) > 1e-2
    with pytest.raises(ValueError, match="evict_every=1"):
        harness_model(**SMALL).loglikelihood_rolling(requests)


def test_generation_is_that_of_the_cache(harness_model, bundled):
    model, tokenizer = bundled
    texts = [STORY * 2, "The sea was calm and"]
    options = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    requests = instances("generate_until", *[(text, dict(options)) for text in texts])
    expected = harness_model(is_plain=True).generate_until(requests)
    assert harness_model(heavy=64, recent=64).generate_until(requests) == expected
    answers = harness_model(**SMALL).generate_until(requests)
    for text, answer in zip(texts, answers, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        cache = h2okv.H2OCache(model.config, **SMALL, min_tokens=0)  # as the harness measures
        written = model.generate(
            **inputs, past_key_values=cache, max_new_tokens=12, do_sample=False
        )
        alone = tokenizer.decode(written[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        assert answer == alone.split("\n\n")[0]


def test_two_runs_with_one_seed_agree_and_another_seed_does_not(harness_model):
    requests = instances("loglikelihood", *PAIRS)
    options = {"policy": "random", "heavy": 4, "recent": 2}
    first = harness_model(**options, seed=3).loglikelihood(requests)
    assert harness_model(**options, seed=3).loglikelihood(requests) == first
    assert harness_model(**options, seed=4).loglikelihood(requests) != first


def test_the_batch_size_changes_nothing(harness_model):
    requests = instances("loglikelihood", *PAIRS)
    model = harness_model(**SMALL)
    expected = model.loglikelihood(requests)
    for size in (1, 3, "auto"):
        model.batch_size_per_gpu, model.max_batch_size = size, 2
        assert close(model.loglikelihood(requests), expected, 1e-4)


def test_a_text_longer_than_the_window_is_refused_before_anything_is_computed(harness_model):
    requests = instances("loglikelihood", ("ox and", " yes"), ("a " * 90, "yes it is"))
    with pytest.raises(ValueError, match="request 1 .*window has room for 64.*truncation"):
        harness_model(**SMALL, max_length=64).loglikelihood(requests)
    expected = harness_model(is_plain=True, max_length=64).loglikelihood(requests)
    cut = harness_model(**LARGE, max_length=64, truncation=True).loglikelihood(requests)
    assert close(cut, expected)
    prompt = instances("generate_until", ("a " * 90, {"until": [], "max_gen_toks": 5}))
    with pytest.raises(ValueError, match="request 0 .*window has room for 59"):
        harness_model(**SMALL, max_length=64).generate_until(prompt)


def test_a_text_of_any_length_is_scored_where_positions_roll(harness_model):
    options = {"heavy": 64, "recent": 64, "positions": "rolling", "evict_every": 512}
    model = harness_model(**options)
    answers = model.loglikelihood(instances("loglikelihood", (STORY * 150, " and then")))
    assert len(model.tok_encode(STORY * 150)) > 2048
    assert -100 < answers[0][0] < 0


def test_an_empty_continuation_is_named(harness_model):
    with pytest.raises(ValueError, match="request 1 .*without tokens"):
        harness_model(**SMALL).loglikelihood(instances("loglikelihood", ("a", " b"), ("a", "")))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"positions": "roling"}, "original, rolling"),
        ({"positions": "rolling", "batch_size": "auto"}, "batch_size=auto"),
    ],
)
def test_invalid_model_arguments_are_refused(options, words):
    from h2okv_lab.evaluation.lm_eval.model import H2OLM

    with pytest.raises(ValueError, match=words):
        H2OLM("bundled", **options)


def test_stored_answers_of_other_settings_are_refused(harness_model, tmp_path):
    class Store:
        """What the harness hands to a model with --use_cache."""

        def __init__(self, path):
            self.dbdict = SqliteDict(str(path), autocommit=True)

    requests = instances("loglikelihood", *PAIRS[:2])
    model = harness_model(**SMALL)
    hook = CacheHook(Store(tmp_path / "answers.db"))
    model.set_cache_hook(hook)
    answers = model.loglikelihood(requests)
    stored = [value for value in hook.dbdict.values() if not isinstance(value, str)]
    assert sorted(stored) == sorted(answers)
    harness_model(**SMALL).set_cache_hook(hook)
    with pytest.raises(ValueError, match="give another path"):
        harness_model(**SMALL, evict_every=1).set_cache_hook(hook)
    other = SqliteDict(str(tmp_path / "other.db"), autocommit=True)
    other["x"] = 1
    hook.dbdict = other
    with pytest.raises(ValueError, match="not of this model type"):
        harness_model(**SMALL).set_cache_hook(hook)


def test_a_run_records_settings_and_versions(harness_model, evaluate, tiny_data):
    model = harness_model(**SMALL, policy="random", seed=5)
    results, _ = evaluate(model, tiny_data, tasks=["copa"])
    record = results["config"]["h2okv"]
    assert (
        record["cache"] | SMALL | {"policy": "random", "seed": 5, "protocol": "prompt"}
        == (record["cache"])
    )
    assert record["model"] == str(bundled_model_path())
    assert len(record["weights"]) == 64
    assert {"h2okv", "torch", "transformers", "lm_eval", "python"} <= record["versions"].keys()
    assert record["versions"]["torch"] == torch.__version__
    assert "commit" in record and "revision" in record


def test_the_model_type_is_found_by_its_entry_point():
    from importlib.metadata import entry_points

    points = [point for point in entry_points(group="lm_eval.models") if point.name == "h2okv"]
    if not points:
        pytest.skip("the package is not installed, so it has no entry points")
    from h2okv_lab.evaluation.lm_eval.model import H2OLM

    assert points[0].load() is H2OLM


def test_a_name_loads_the_bundled_model():
    from h2okv_lab.evaluation.lm_eval.model import H2OLM

    model = H2OLM("bundled", heavy=64, recent=64, device="cpu", batch_size=2)
    assert model.model.dtype == torch.float32
    assert model.name == "bundled"
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    assert model.tok_encode("a captain") == tokenizer("a captain").input_ids
