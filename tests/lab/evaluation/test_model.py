from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

import h2okv
from h2okv.config import CacheConfig
from h2okv.engine.sampling_params import SamplingParams
from h2okv_lab.evaluation.model import (
    ModelUnderTest,
    Prompt,
    answer_batch,
    answer_question,
    make_cache,
    resolve_config,
)
from h2okv_lab.evaluation.task import sample_seed
from h2okv_lab.masking import MaskedCache


@pytest.fixture(scope="module")
def subject(short_subject):
    return short_subject


def budget(amount, **options):
    return CacheConfig(budget=amount, **options)


@pytest.mark.parametrize("config", [CacheConfig("full"), budget(1.0), budget("full", policy="h2o")])
def test_a_budget_of_100_percent_is_the_full_cache(config, subject):
    assert config.label == "full"
    assert not make_cache(config, subject.config).rule.evicts


def test_full_caches_have_one_identity_for_all_options(subject):
    plain = CacheConfig("full", min_tokens=0)
    other = budget(1.0, policy="recent", sink=4, positions="rolling")
    assert plain.identity() == other.identity()
    assert resolve_config(other, subject.config) == plain


def test_top_k_is_masked_because_it_cannot_drop(subject):
    kinds = [make_cache(budget(0.2, policy=p), subject.config) for p in ("topk", "h2o")]
    assert [isinstance(cache, MaskedCache) for cache in kinds] == [True, False]


def test_rolling_positions_are_read_in_blocks(subject):
    rolling = budget(64, positions="rolling")
    assert resolve_config(rolling, subject.config).evict_every == 64
    assert resolve_config(budget(64), subject.config).evict_every is None
    chunked = budget(64, positions="rolling", evict_every=100)
    assert resolve_config(chunked, subject.config).evict_every == 100


def test_a_seed_reaches_the_cache(subject):
    config = CacheConfig("random", 4, 4)
    assert make_cache(config, subject.config, 7).rule.seed == 7


def test_weights_are_loaded_when_they_are_needed(subject):
    loads = []

    def load():
        loads.append(1)
        return subject.model

    model = ModelUnderTest(load, subject.config, subject.tokenizer, "x", 2048)
    assert model.decode(model.encode("It was late.")) == "It was late."
    assert model.too_long(CacheConfig("full"), 10) is None and not loads
    assert model.identity()["revision"].startswith("weights-")
    assert model.model is subject.model and loads == [1]


def test_longer_than_the_window_needs_rolling_or_chunks(subject):
    assert subject.too_long(budget(64), 2048) is None
    assert subject.too_long(budget(64), 2049).endswith("; add --cache positions=rolling,every=64")
    assert "cache of fixed size" in subject.too_long(CacheConfig("full"), 2049)
    assert subject.too_long(budget(64, positions="rolling"), 10**6) is None
    assert subject.too_long(budget(64, evict_every=64), 10**6) is None


def test_a_rolling_budget_must_leave_room_for_a_block(subject):
    config = budget(0.5, positions="rolling")
    assert subject.too_long(config, 2048) is None
    assert "lower the budget" in subject.too_long(config, 4000)


TIGHT = CacheConfig(budget=24)


@pytest.fixture(scope="module")
def ids(subject, novel):
    return subject.encode(novel)[:400]


def prompts(ids, lengths=(60, 23, 41), stops=(), max_tokens=12, temperature=0.0):
    return [
        make_prompt(ids[n : n + n], max_tokens, stop=stops, seed=n, temperature=temperature)
        for n in lengths
    ]


def answers_of(subject, config, batch):
    return answer_batch(subject, [config], batch)[0]


def make_prompt(ids, max_tokens=12, temperature=0.0, **options):
    return Prompt(ids, SamplingParams(max_tokens=max_tokens, temperature=temperature, **options))


def by_transformers(subject, ids, max_tokens, **options):
    inputs = torch.tensor([ids])
    written = subject.model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        past_key_values=DynamicCache(config=subject.config),
        max_new_tokens=max_tokens,
        do_sample=False,
        **options,
    )
    return subject.decode(written[0, len(ids) :])


def test_a_budget_above_the_text_gives_the_model_s_text(subject, ids):
    expected = [by_transformers(subject, p.ids, 12) for p in prompts(ids)]
    for config in (CacheConfig("full"), CacheConfig(budget=400)):
        assert [a.text for a in answers_of(subject, config, prompts(ids))] == expected


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_in_a_batch_equal_answers_alone(subject, ids, temperature, chunk):
    config = CacheConfig(budget=24, evict_every=chunk)
    batch = prompts(ids, temperature=temperature)
    together = answers_of(subject, config, batch)
    alone = [answers_of(subject, config, [p])[0] for p in batch]
    assert together == alone


SEVERAL = [
    TIGHT, CacheConfig("full"), CacheConfig(budget=24, evict_every=16),
    CacheConfig(budget=0.2, min_tokens=0, policy="snapkv"),
    CacheConfig(budget=24, policy="topk"),
    CacheConfig(budget=24, kv_bits=8), CacheConfig(budget=24, evict_every=8),
]  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("max_tokens", [1, 2, 12])
def test_answers_of_several_caches_equal_those_of_each_alone(subject, ids, temperature, max_tokens):
    batch = prompts(ids, max_tokens=max_tokens, temperature=temperature)
    together = answer_batch(subject, SEVERAL, batch)
    assert together == [answers_of(subject, config, batch) for config in SEVERAL]


@pytest.mark.parametrize("index", [0, 1, 3])
def test_stop_strings_and_eos_with_shared_prompts(subject, ids, monkeypatch, index):
    text = answers_of(subject, TIGHT, prompts(ids))[0].text
    for stops in ((text[index],), ()):
        batch = prompts(ids, stops=stops, max_tokens=6)
        together = answer_batch(subject, SEVERAL, batch)
        assert together == [answers_of(subject, config, batch) for config in SEVERAL]
        ending = subject.encode(text, special=False)[index]
        monkeypatch.setattr(subject.model.generation_config, "eos_token_id", ending)


def test_a_prompt_is_read_once_for_the_caches_that_can_share_it(subject, ids):
    batch, read = prompts(ids), []
    width = max(len(prompt.ids) for prompt in batch)

    def note(module, args, options):
        read.append(options["input_ids"].shape[1])

    hook = subject.model.register_forward_pre_hook(note, with_kwargs=True)
    answer_batch(subject, [TIGHT, CacheConfig("full"), *SEVERAL[3:6]], batch)
    hook.remove()
    assert read.count(width) == 1 and set(read) == {1, width}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_repetition_penalty_ignores_padding(subject, ids, temperature):
    config = CacheConfig(budget=400)
    batch = prompts(ids, temperature=temperature)
    options = {"repetition_penalty": 1.5}
    batch = [prompt._replace(params=replace(prompt.params, **options)) for prompt in batch]
    together = answers_of(subject, config, batch)
    assert together == [answers_of(subject, config, [p])[0] for p in batch]
    if temperature == 0:
        expected = [by_transformers(subject, p.ids, 12, **options) for p in batch]
        assert [answer.text for answer in together] == expected
        assert together != answers_of(subject, config, prompts(ids))


def test_answers_are_cut_exactly_at_a_stop_string(subject, ids):
    unstopped = answers_of(subject, TIGHT, prompts(ids))
    stop = unstopped[0].text[5:8]
    stopped = answers_of(subject, TIGHT, prompts(ids, stops=(stop,)))
    assert [a.text for a in stopped] == [a.text.partition(stop)[0] for a in unstopped]
    assert stopped[0].text == unstopped[0].text[: unstopped[0].text.find(stop)]
    # None of these stands in a text: nothing is lost, not the last character either.
    unmatched = answers_of(subject, TIGHT, prompts(ids, stops=("\x00###",)))
    assert unmatched == unstopped


def test_each_sequence_has_its_own_length(subject, ids):
    long, short = prompts(ids)[0], make_prompt(ids[:30], 3)
    answers = answers_of(subject, TIGHT, [long, short])
    assert [a.tokens for a in answers] == [12, 3]


@pytest.mark.parametrize("query_aware", [True, False])
@pytest.mark.parametrize("chunk", [None, 32])
def test_a_question_on_a_full_budget_gives_the_model_s_answer(subject, ids, query_aware, chunk):
    config = CacheConfig(budget=500, evict_every=chunk)
    [answer] = answer_question(
        subject, [config], ids[:90], make_prompt(ids[90:110], 12), query_aware
    )
    assert answer.text == by_transformers(subject, ids[:110], 12)


def test_the_question_is_read_before_or_after_the_eviction(subject, ids, monkeypatch):
    read = []
    prefill = h2okv.prefill

    def noted(model, input_ids, cache, mask):
        before = cache.num_seen_tokens
        logits = prefill(model, input_ids, cache, mask)
        read.append((before, cache.num_seen_tokens, cache.num_cached_tokens))
        return logits

    monkeypatch.setattr(h2okv, "prefill", noted)
    for query_aware in (True, False):
        config = CacheConfig(budget=0.2, min_tokens=0)
        answer_question(subject, [config], ids[:90], make_prompt(ids[90:100], 4), query_aware)
    # The budget is of text and question, whichever is read first: 20 of 100.
    assert read == [(0, 99, 20), (0, 90, 20), (90, 99, 20)]


@pytest.mark.parametrize("policy", [name for name in h2okv.policy_names() if name != "full"])
def test_every_policy_answers_padded_batches_and_questions(subject, ids, policy):
    config = CacheConfig(budget=24, policy=policy)
    together = answers_of(subject, config, prompts(ids, max_tokens=4))
    alone = [answers_of(subject, config, [p])[0] for p in prompts(ids, max_tokens=4)]
    assert together == alone
    [answer] = answer_question(
        subject, [config], ids[:60], make_prompt(ids[60:70], 4), query_aware=False
    )
    assert 0 < answer.tokens <= 4


def test_seeds_of_samples_and_runs_differ():
    assert len({sample_seed(seed, n) for seed in range(10) for n in range(100)}) == 1000
