import pytest
import torch
from transformers import DynamicCache

import h2okv
import h2okv.evaluation.generate as answering
from h2okv.evaluation.cache_setting import CacheSetting
from h2okv.evaluation.decoding import Decoding, text_before
from h2okv.evaluation.generate import Prompt, answer_batch, answer_question

TIGHT = CacheSetting("h2o", 24)


@pytest.fixture(scope="module")
def ids(subject, novel):
    return subject.encode(novel)[:400]


def prompts(ids, lengths=(60, 23, 41), stops=(), most=12):
    return [Prompt(ids[n : n + n], most, stops, seed=n) for n in lengths]


def by_transformers(subject, ids, most):
    inputs = torch.tensor([ids])
    written = subject.model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        past_key_values=DynamicCache(config=subject.config),
        max_new_tokens=most,
        do_sample=False,
    )
    return subject.decode(written[0, len(ids) :])


def test_a_budget_of_everything_gives_the_model_s_own_text(subject, ids):
    wanted = [by_transformers(subject, p.ids, 12) for p in prompts(ids)]
    for setting in (CacheSetting(), CacheSetting("h2o", 400)):
        assert [a.text for a in answer_batch(subject, setting, prompts(ids), Decoding())] == wanted


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prompt_gets_in_a_batch_what_it_gets_alone(subject, ids, temperature, chunk):
    setting = CacheSetting("h2o", 24, prefill_chunk=chunk)
    decoding = Decoding(temperature)
    together = answer_batch(subject, setting, prompts(ids), decoding)
    alone = [answer_batch(subject, setting, [p], decoding)[0] for p in prompts(ids)]
    assert together == alone


def test_a_stop_string_and_all_after_it_go_and_nothing_else_does(subject, ids):
    whole = answer_batch(subject, TIGHT, prompts(ids), Decoding())
    stop = whole[0].text[5:8]
    stopped = answer_batch(subject, TIGHT, prompts(ids, stops=(stop,)), Decoding())
    assert [a.text for a in stopped] == [text_before(a.text, [stop]) for a in whole]
    assert stopped[0].text == whole[0].text[: whole[0].text.find(stop)]
    # None of these stands in a text: nothing is lost, not the last character either.
    kept = answer_batch(subject, TIGHT, prompts(ids, stops=("\x00###",)), Decoding())
    assert kept == whole


def test_each_row_has_its_own_length(subject, ids):
    long, short = prompts(ids)[0], Prompt(ids[:30], 3)
    answers = answer_batch(subject, TIGHT, [long, short], Decoding())
    assert [a.tokens for a in answers] == [12, 3]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("chunk", [None, 32])
def test_a_question_on_everything_gives_the_model_s_own_answer(subject, ids, known, chunk):
    setting = CacheSetting("h2o", 500, prefill_chunk=chunk)
    answer = answer_question(subject, setting, ids[:90], Prompt(ids[90:110], 12), known)
    assert answer.text == by_transformers(subject, ids[:110], 12)


def test_the_question_is_read_before_or_after_the_eviction(subject, ids, monkeypatch):
    read = []
    prefill = answering.h2okv.prefill

    def noted(model, input_ids, cache):
        before = cache.num_seen_tokens
        logits = prefill(model, input_ids, cache)
        read.append((before, cache.num_seen_tokens, cache.num_cached_tokens))
        return logits

    monkeypatch.setattr(answering.h2okv, "prefill", noted)
    for known in (True, False):
        setting = CacheSetting("h2o", 0.2)
        answer_question(subject, setting, ids[:90], Prompt(ids[90:100], 4), known)
    # The budget is of text and question, whichever is read first: 20 of 100.
    assert read == [(0, 99, 20), (0, 90, 20), (90, 99, 20)]


@pytest.mark.parametrize("policy", [name for name in h2okv.policy_names() if name != "full"])
def test_every_policy_answers_padded_batches_and_questions(subject, ids, policy):
    setting = CacheSetting(policy, 24)
    together = answer_batch(subject, setting, prompts(ids, most=4), Decoding())
    alone = [answer_batch(subject, setting, [p], Decoding())[0] for p in prompts(ids, most=4)]
    assert together == alone
    answer = answer_question(subject, setting, ids[:60], Prompt(ids[60:70], 4), known=False)
    assert 0 < answer.tokens <= 4
