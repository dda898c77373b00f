import numpy as np
import pytest

from training.data import TrainingWindows, fact_window, held_out_windows, plain_window
from training.text import HELD_OUT_BOOKS, read_held_out_book

pytestmark = pytest.mark.slow


def test_windows_begin_with_bos_and_have_their_length(corpus):
    windows = TrainingWindows(corpus, seed=3)
    for length in (128, 256, 1024):
        batch = windows.batch(10, 4, length)
        assert batch.shape == (4, length)
        assert (batch[:, 0] == corpus.tokenizer.bos_token_id).all()
        assert (batch[:, 1:] != corpus.tokenizer.bos_token_id).all()


def test_a_window_depends_on_seed_and_number_alone(corpus):
    windows, same = TrainingWindows(corpus, seed=3), TrainingWindows(corpus, seed=3)
    windows.batch(0, 7, 128)
    assert (windows.batch(5, 2, 256) == same.batch(5, 2, 256)).all()
    assert (windows.batch(5, 2, 256) != TrainingWindows(corpus, seed=4).batch(5, 2, 256)).any()


def test_plain_windows_begin_at_a_sentence(corpus):
    for at in (0.1, 0.5, 0.9):
        window = plain_window(corpus, at, 64)
        text = corpus.tokenizer.decode(window.tokens[1:])
        assert text[0] in " \n"
        assert not window.answers


def test_answers_stand_where_the_window_says(corpus):
    decode = corpus.tokenizer.decode
    for seed in range(30):
        window = fact_window(corpus, seed / 30, 512, np.random.default_rng(seed))
        assert len(window.tokens) == 512
        first: dict[int, str] = {}
        last: dict[int, int] = {}
        stated: dict[int, int] = {}
        for answer in window.answers:
            text = decode(window.tokens[answer.start : answer.stop]).strip()
            if answer.occurrence == 0:
                assert answer.kind == "statement"
                assert answer.distance == answer.gap == 0
                first[answer.fact], stated[answer.fact] = text, answer.start
            else:
                assert text == first[answer.fact]
                assert answer.distance == answer.start - stated[answer.fact]
                assert answer.gap == answer.start - last[answer.fact]
            last[answer.fact] = answer.start


def test_facts_leave_the_book_text_whole(corpus):
    window = fact_window(corpus, 0.3, 256, np.random.default_rng(0))
    woven = corpus.tokenizer.decode(window.tokens)
    first = window.answers[0]
    before = corpus.tokenizer.decode(window.tokens[1 : first.start]).strip()
    assert before
    assert woven.count("<|endoftext|>") == 0


def test_held_out_windows_repeat_and_ask_far_back(corpus):
    windows = held_out_windows(corpus, 12, 1024, seed=1, facts=True)
    again = held_out_windows(corpus, 12, 1024, seed=1, facts=True)
    assert all((a.tokens == b.tokens).all() for a, b in zip(windows, again, strict=True))
    distances = [a.distance for w in windows for a in w.answers if a.occurrence]
    assert min(distances) < 100
    assert max(distances) > 600


def test_a_training_book_is_not_a_held_out_book(tmp_path):
    with pytest.raises(ValueError, match="dracula"):
        read_held_out_book(tmp_path, "dracula.txt")
    assert len(HELD_OUT_BOOKS) == 7


def test_held_out_lines_are_joined(held_out_book):
    paragraphs = held_out_book.split("\n\n")
    assert max(len(paragraph) for paragraph in paragraphs) > 400
