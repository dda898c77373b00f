"""Scores under eviction: the batch against a row alone, the scan against token by token."""

import importlib
import sys

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import h2okv
from h2okv.cache.argument import cache_in
from h2okv.config import CacheConfig
from h2okv.integration.enable import read_blocks
from h2okv_lab.evaluation.lm_eval import check_arguments
from h2okv_lab.evaluation.lm_eval.scorer import Scorer, batches, split_settings

VOCAB = 97
TOLERANCE = 2e-5


def draw(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (length,), generator=generator).tolist()


def scorer(model, **options):
    options = {"heavy": 4, "recent": 3} | options
    return Scorer(model, CacheConfig(**options))


def in_order(scored):
    return [scores for _, scores in sorted(scored)]


def cut(text, count=None):
    """Split a text into its beginning and its scored tokens, by default all but the first."""
    split = 1 if count is None else len(text) - count
    return text[:split], text[split:]


def assert_as_alone(score, pairs, size=64):
    """Check that each pair has the same scores in a batch as alone."""
    results = in_order(score(pairs, size))
    assert len(results) == len(pairs)
    for pair, together in zip(pairs, results, strict=True):
        assert_equal(together, in_order(score([pair]))[0])
        assert len(together.log_probs) == len(pair[1])


def assert_equal(left, right):
    assert left.log_probs == pytest.approx(right.log_probs, abs=TOLERANCE)
    assert left.greedy == right.greedy


def log_prob(logits, token):
    return float(logits[0, -1].log_softmax(-1)[token])


@pytest.mark.parametrize("budget", [(4, 3), (0.2, 0.1)])
def test_the_scan_equals_token_by_token(make_llama, budget):
    model, text = make_llama(), draw(40, 1)
    amounts = {"heavy": budget[0], "recent": budget[1], "min_tokens": 0}
    cache = h2okv.H2OCache(model.config, **amounts)
    cache.expect(len(text) - 1)
    with torch.no_grad():
        expected = [
            log_prob(model(torch.tensor([[token]]), past_key_values=cache).logits, following)
            for token, following in zip(text, text[1:], strict=False)
        ]
    scanned = scorer(model, **amounts, evict_every=1).whole_texts([cut(text)])
    scanned = in_order(scanned)[0]
    assert scanned.log_probs == pytest.approx(expected, abs=TOLERANCE)
    full = in_order(scorer(model, policy="full").whole_texts([cut(text)]))[0]
    assert full.log_probs != pytest.approx(scanned.log_probs, abs=1e-3)  # eviction is felt


@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("policy", [p for p in h2okv.policy_names() if p != "snapkv"])
def test_texts_of_a_batch_are_scored_as_alone(make_llama, chunk, policy):
    options = {
        "heavy": 0.2, "recent": 0.2, "min_tokens": 0, "sink": 1, "policy": policy,
        "evict_every": chunk,
    }  # fmt: skip
    scoring = scorer(make_llama(), **options)
    lengths, counts = (33, 2, 17, 33), (5, 1, 16, 1)
    pairs = [cut(draw(n, n), count) for n, count in zip(lengths, counts, strict=True)]
    assert_as_alone(scoring.whole_texts, pairs)


def test_a_prompt_only_policy_is_refused_for_whole_texts(make_llama):
    with pytest.raises(ValueError, match="snapkv"):
        scorer(make_llama(), policy="snapkv", evict_every=1)


@pytest.mark.parametrize("policy", h2okv.policy_names())
def test_continuation_scores_in_a_batch_equal_those_alone_for_every_policy(make_llama, policy):
    scoring = scorer(make_llama(), policy=policy)
    first, second = draw(21, 1), draw(30, 2)
    pairs = [(first, draw(3, 3)), (first, draw(5, 4)), (second, draw(4, 5))]
    assert_as_alone(scoring.after_prompts, pairs)


@pytest.mark.parametrize("size", [64, 2])
@pytest.mark.parametrize("positions", ["original", "rolling"])
@pytest.mark.parametrize("chunk", [None, 1, 6])
def test_continuations_sharing_a_context_are_scored_as_alone(make_llama, size, positions, chunk):
    options = {"positions": positions, "evict_every": chunk}
    scoring = scorer(make_llama(), **options)
    contexts = [draw(21, 1), draw(30, 2), draw(1, 3), draw(2, 4)]
    continuations = [
        [draw(1, 5), draw(7, 6), draw(3, 7)], [draw(4, 8)], [draw(2, 9), draw(5, 10)], [draw(6, 11)]
    ]  # fmt: skip
    pairs = [(c, t) for c, tokens in zip(contexts, continuations, strict=True) for t in tokens]
    assert_as_alone(scoring.after_prompts, pairs, size)


def test_a_group_of_scorers_reads_a_context_once_and_scores_as_alone(make_llama):
    model = make_llama()
    configs = [
        CacheConfig("full"), CacheConfig("h2o", 4, 3), CacheConfig("h2o", 3, 2, scoring="decay"),
        CacheConfig("snapkv", 5, 4), CacheConfig("recent", 0.1, 0.1),
    ]  # fmt: skip
    first, second, short = draw(21, 1), draw(30, 2), draw(1, 3)
    pairs = [(first, draw(3, 3)), (first, draw(5, 4)), (second, draw(4, 5)), (short, draw(2, 6))]
    pairs.append(pairs[2])
    group = [Scorer(model, config) for config in configs]
    for member in group:
        member.group = group
    read = []
    hook = model.register_forward_pre_hook(
        lambda _, __, options: read.append(type(cache_in(options)).__name__), with_kwargs=True
    )
    by_member = [in_order(member.after_prompts(pairs)) for member in group]
    hook.remove()
    # Contexts with padding in one forward; then continuations, long and short contexts apart.
    assert read.count("SharedPrefill") == 1 and len(read) == 1 + 2 * len(configs)
    for config, results in zip(configs, by_member, strict=True):
        alone = in_order(Scorer(model, config).after_prompts(pairs))
        assert len(results) == len(alone) == len(pairs)
        for scores, expected in zip(results, alone, strict=True):
            assert_equal(scores, expected)


def test_a_continuation_follows_on_the_evicted_context(make_llama):
    model, context, continuation = make_llama(), draw(30, 1), draw(5, 2)
    cache = h2okv.H2OCache(model.config, heavy=4, recent=3)
    block = torch.tensor([[context[-1], *continuation[:-1]]])
    with torch.no_grad():
        model(torch.tensor([context[:-1]]), past_key_values=cache)
        assert cache.num_cached_tokens == 7
        logits = model(block, past_key_values=cache).logits[0].log_softmax(-1)
    scores = in_order(scorer(model).after_prompts([(context, continuation)]))[0]
    expected = [float(logits[index, token]) for index, token in enumerate(continuation)]
    assert scores.log_probs == pytest.approx(expected, abs=TOLERANCE)
    assert scores.total == pytest.approx(sum(expected), abs=1e-4)
    full = in_order(scorer(model, policy="full").after_prompts([(context, continuation)]))[0]
    # The first token of a continuation is predicted from the evicted cache too.
    assert abs(full.log_probs[0] - scores.log_probs[0]) > 1e-3


def test_a_budget_above_the_length_gives_the_full_scores(make_llama):
    model = make_llama()
    first, second = draw(20, 1), draw(9, 2)
    pairs = [(first, draw(4, 3)), (first, draw(2, 4)), (second, draw(1, 5))]
    expected = []
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        for context, tokens in pairs:
            logits = model(torch.tensor([context + tokens])).logits[0, -len(tokens) - 1 : -1]
            targets = torch.tensor(tokens).unsqueeze(1)
            expected.append(float(logits.log_softmax(-1).gather(1, targets).sum()))
    prompt = scorer(model, heavy=100, recent=100).after_prompts(pairs)
    assert [score.total for score in in_order(prompt)] == pytest.approx(expected, abs=1e-4)
    texts = scorer(model, heavy=100, recent=100, evict_every=1).whole_texts(pairs)
    assert [score.total for score in in_order(texts)] == pytest.approx(expected, abs=1e-4)


def test_layers_of_other_kinds_are_not_padded(make_llama):
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_sliding_window=True, sliding_window=8,
        max_window_layers=0, layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    model.set_attn_implementation("h2o")
    scoring = scorer(model)
    assert not scoring.takes_padding
    first, second = draw(20, 1), draw(9, 2)
    pairs = [(first, draw(4, 3)), (first, draw(2, 4)), (second, draw(3, 5))]
    assert_as_alone(scoring.after_prompts, pairs)
    assert_as_alone(scorer(model, evict_every=1).whole_texts, [cut(draw(20, 6)), cut(draw(12, 7))])


def test_a_model_without_h2o_attention_gets_it_for_the_call(make_llama):
    model = make_llama(attention="sdpa")
    list(scorer(model, evict_every=1).whole_texts([cut(draw(9, 1))]))
    assert model.config._attn_implementation == "sdpa"


def test_batches_have_every_text_once_and_similar_lengths():
    lengths = [3, 9, 1, 7, 5]
    assert list(batches(lengths, 2)) == [[1, 3], [4, 0], [2]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"polcy": "h2o"}, "perhaps 'policy' is meant"),
        ({"policy": "h2"}, "did you mean h2o"),
        ({"protocol": "paper"}, "prompt, whole"),
        ({"protocol": "whole"}, "evict_every=1"),
        ({"heavy": 0.7, "recent": 0.7, "min_tokens": 0}, "add up to"),
        ({"heavy": -1}, "heavy=-1"),
        ({"cache": "h2o:5%,bit=8"}, "did you mean bits"),
    ],
)
def test_invalid_settings_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        check_arguments(options)
        split_settings(options)


def test_evict_every_1_defaults_to_protocol_whole():
    assert split_settings(dict(evict_every=1))[1] == "whole"
    assert split_settings(dict(evict_every=8, protocol="whole"))[1] == "whole"
    assert split_settings(dict(evict_every=64))[1] == "prompt"
    assert split_settings(dict(evict_every=1, protocol="prompt"))[1] == "prompt"


def test_the_cache_may_be_a_text():
    config, protocol = split_settings({"cache": "h2o:64+32,every=1,bits=8", "sink": 2})
    assert config.spec == "h2o:64+32,sink=2,every=1,bits=8" and protocol == "whole"
    assert split_settings({"cache": "h2o:5%"})[0].min_tokens == 0


BUDGET = {"heavy": 4, "recent": 3}


@pytest.fixture
def text():
    return torch.randint(2, 97, (1, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def evicting(load_script):
    kind = load_script("examples/helm/evicting.py").EvictingModel
    return lambda model, **options: kind(model, CacheConfig(**BUDGET | options))


def test_it_generates_on_a_new_cache_each_time(make_llama, text, evicting):
    model = make_llama(attention="sdpa")
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    full = model.generate(text, **options)
    evicting_model = evicting(model)
    written = evicting_model.generate(input_ids=text, **options)
    cache = h2okv.H2OCache(model.config, **BUDGET)
    assert torch.equal(written, model.generate(text, past_key_values=cache, **options))
    assert torch.equal(written, evicting_model.generate(input_ids=text, **options))
    assert not torch.equal(written, full)


@pytest.mark.parametrize("chunk", [None, 1, 8])
def test_helm_scores_are_under_eviction(make_llama, text, evicting, chunk):
    model = make_llama()
    logits = evicting(model, evict_every=chunk)(text).logits
    cache = h2okv.H2OCache(model.config, **BUDGET)
    blocks = [block for _, block in read_blocks(model, text, cache, chunk or 1, all_logits=True)]
    assert torch.allclose(logits, torch.cat(blocks, dim=1), atol=2e-5)
    full = model(text).logits
    assert not torch.allclose(logits, full, atol=1e-2)


def test_a_model_that_is_not_supported_is_refused(evicting):
    from transformers import BertConfig, BertLMHeadModel

    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        vocab_size=97, is_decoder=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="encoder"):
        evicting(BertLMHeadModel(config))


def test_helm_needs_no_harness(monkeypatch):
    """The laboratory's modules are imported again, and those of before come back."""

    def laboratory():
        return {name for name in sys.modules if name.partition(".")[0] == "h2okv_lab"}

    for name in laboratory():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    try:
        scorer_again = importlib.import_module("h2okv_lab.evaluation.lm_eval.scorer")
    finally:
        for name in laboratory():
            del sys.modules[name]
    assert scorer_again.Scorer is not Scorer
