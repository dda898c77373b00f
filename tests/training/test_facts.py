import numpy as np
import pytest

from training.facts import ANSWERS, KINDS, Fact, draw_facts

pytestmark = pytest.mark.slow


def test_every_sentence_asks_before_it_answers():
    fact = Fact("Maria", "city", "Vienna")
    for templates in KINDS.values():
        for template in templates:
            head, answer, tail = fact.sentence(template)
            assert "Maria" in head
            assert "city" in head
            assert answer.strip() == "Vienna"
            assert head + answer + tail == template.format(r="city", n="Maria", a="Vienna")


def test_training_and_evaluation_share_no_pair():
    rng = np.random.default_rng(0)
    training = {(f.name, f.answer) for _ in range(200) for f in draw_facts(rng, 4, False)}
    held_out = {(f.name, f.answer) for _ in range(200) for f in draw_facts(rng, 4, True)}
    assert len(training) > 500
    assert len(held_out) > 500
    assert not training & held_out


def test_facts_of_a_window_differ_in_their_question():
    rng = np.random.default_rng(1)
    for _ in range(100):
        facts = draw_facts(rng, 6, False)
        assert len({(fact.name, fact.relation) for fact in facts}) == 6


def test_chance_is_low():
    for pool in ANSWERS.values():
        assert pool is None or len(pool) >= 40
    assert sum(len(pool or ()) for pool in ANSWERS.values()) > 1000
