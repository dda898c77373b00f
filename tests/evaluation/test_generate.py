from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

import h2okv
import h2okv.evaluation.generate as generating
from h2okv.config import CacheConfig
from h2okv.engine.sampling_params import SamplingParams
from h2okv.evaluation.generate import Prompt, answer_batch, answer_question, text_before

TIGHT = CacheConfig.from_budget(24)


@pytest.fixture(scope="module")
def ids(subject, novel):
    return subject.encode(novel)[:400]


def prompts(ids, lengths=(60, 23, 41), stops=(), most=12, temperature=0.0):
    return [
        asked(ids[n : n + n], most, stop=stops, seed=n, temperature=temperature) for n in lengths
    ]


def asked(ids, most=12, temperature=0.0, **options):
    return Prompt(ids, SamplingParams(max_tokens=most, temperature=temperature, **options))


def by_transformers(subject, ids, most, **options):
    inputs = torch.tensor([ids])
    written = subject.model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        past_key_values=DynamicCache(config=subject.config),
        max_new_tokens=most,
        do_sample=False,
        **options,
    )
    return subject.decode(written[0, len(ids) :])


def test_a_budget_of_everything_gives_the_model_s_own_text(subject, ids):
    wanted = [by_transformers(subject, p.ids, 12) for p in prompts(ids)]
    for config in (CacheConfig("full"), CacheConfig.from_budget(400)):
        assert [a.text for a in answer_batch(subject, config, prompts(ids))] == wanted


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prompt_gets_in_a_batch_what_it_gets_alone(subject, ids, temperature, chunk):
    config = CacheConfig.from_budget(24, prefill_chunk=chunk)
    batch = prompts(ids, temperature=temperature)
    together = answer_batch(subject, config, batch)
    alone = [answer_batch(subject, config, [p])[0] for p in batch]
    assert together == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_repetition_penalty_takes_no_padding_for_text(subject, ids, temperature):
    config = CacheConfig.from_budget(400)
    batch = prompts(ids, temperature=temperature)
    options = {"repetition_penalty": 1.5}
    batch = [replace(one, params=replace(one.params, **options)) for one in batch]
    together = answer_batch(subject, config, batch)
    assert together == [answer_batch(subject, config, [p])[0] for p in batch]
    if temperature == 0:
        wanted = [by_transformers(subject, p.ids, 12, **options) for p in batch]
        assert [answer.text for answer in together] == wanted
        assert together != answer_batch(subject, config, prompts(ids))


def test_a_stop_string_and_all_after_it_go_and_nothing_else_does(subject, ids):
    whole = answer_batch(subject, TIGHT, prompts(ids))
    stop = whole[0].text[5:8]
    stopped = answer_batch(subject, TIGHT, prompts(ids, stops=(stop,)))
    assert [a.text for a in stopped] == [text_before(a.text, [stop]) for a in whole]
    assert stopped[0].text == whole[0].text[: whole[0].text.find(stop)]
    # None of these stands in a text: nothing is lost, not the last character either.
    kept = answer_batch(subject, TIGHT, prompts(ids, stops=("\x00###",)))
    assert kept == whole


def test_each_sequence_has_its_own_length(subject, ids):
    long, short = prompts(ids)[0], asked(ids[:30], 3)
    answers = answer_batch(subject, TIGHT, [long, short])
    assert [a.tokens for a in answers] == [12, 3]


@pytest.mark.parametrize("query_aware", [True, False])
@pytest.mark.parametrize("chunk", [None, 32])
def test_a_question_on_everything_gives_the_model_s_own_answer(subject, ids, query_aware, chunk):
    config = CacheConfig.from_budget(500, prefill_chunk=chunk)
    [answer] = answer_question(subject, [config], ids[:90], asked(ids[90:110], 12), query_aware)
    assert answer.text == by_transformers(subject, ids[:110], 12)


def test_the_question_is_read_before_or_after_the_eviction(subject, ids, monkeypatch):
    read = []
    prefill = generating.h2okv.prefill

    def noted(model, input_ids, cache):
        before = cache.num_seen_tokens
        logits = prefill(model, input_ids, cache)
        read.append((before, cache.num_seen_tokens, cache.num_cached_tokens))
        return logits

    monkeypatch.setattr(generating.h2okv, "prefill", noted)
    for query_aware in (True, False):
        config = CacheConfig.from_budget(0.2)
        answer_question(subject, [config], ids[:90], asked(ids[90:100], 4), query_aware)
    # The budget is of text and question, whichever is read first: 20 of 100.
    assert read == [(0, 99, 20), (0, 90, 20), (90, 99, 20)]


@pytest.mark.parametrize("policy", [name for name in h2okv.policy_names() if name != "full"])
def test_every_policy_answers_padded_batches_and_questions(subject, ids, policy):
    config = CacheConfig.from_budget(24, policy=policy)
    together = answer_batch(subject, config, prompts(ids, most=4))
    alone = [answer_batch(subject, config, [p])[0] for p in prompts(ids, most=4)]
    assert together == alone
    [answer] = answer_question(subject, [config], ids[:60], asked(ids[60:70], 4), query_aware=False)
    assert 0 < answer.tokens <= 4
