import pytest
import torch

import h2okv
from h2okv.engine.chat import Level, kept_shares, render_kept

READ = 60


@pytest.fixture
def cache(make_llama):
    model = make_llama(layers=3)
    cache = h2okv.H2OCache(model.config, heavy=8, recent=6, sink=2)
    ids = torch.randint(2, 97, (1, READ), generator=torch.Generator().manual_seed(1))
    h2okv.prefill(model, ids, cache)
    return cache


def test_kept_shares_equal_kept_positions(cache, kept_sets):
    head_sets = [head for (heads,) in kept_sets(cache) for head in heads]
    assert len(head_sets) == 6
    expected = [sum(token in head for head in head_sets) / 6 for token in range(READ)]
    shares = kept_shares(cache)
    assert shares == pytest.approx(expected)
    assert shares[:2] == [1.0, 1.0] and shares[-6:] == [1.0] * 6
    assert 0.0 in shares and any(0 < share < 1 for share in shares)


def test_kept_shares_of_one_layer_and_one_head(cache, kept_sets):
    first, second = kept_sets(cache)[1][0]
    of_layer = [((token in first) + (token in second)) / 2 for token in range(READ)]
    assert kept_shares(cache, 1) == of_layer
    assert kept_shares(cache, 1, 1) == [float(token in second) for token in range(READ)]


@pytest.mark.parametrize(
    ("indices", "words"),
    [((3, None), "got 3"), ((-1, None), "got -1"), ((1, 2), "KV heads 0 to 1"),
     ((1, -1), "KV heads 0 to 1")],
)  # fmt: skip
def test_a_missing_layer_or_head_is_refused(cache, indices, words):
    with pytest.raises(ValueError, match=words):
        kept_shares(cache, *indices)


@pytest.mark.parametrize(
    ("shares", "level"),
    [([1.0], Level.ALL), ([1.0, 1.0], Level.ALL), ([0.99], Level.SOME), ([0.0, 1.0], Level.SOME),
     ([0.01], Level.SOME), ([0.0], Level.NONE), ([], Level.WAITING)],
)  # fmt: skip
def test_levels(shares, level):
    assert Level.of(shares) is level


def test_marks_and_colours_show_the_same_levels(tokenizer):
    words = ["the", " cat", " sat", " on", " the", " mat"]
    pieces = [tokenizer(word)["input_ids"] for word in words]
    levels = [1.0, 0.0, 0.0, 0.5, 0.1, 0.7]
    shares = [share for ids, share in zip(pieces, levels, strict=True) for _ in ids]
    tokens = [token for ids in pieces for token in ids]
    next_ids = tokenizer(" log")["input_ids"]
    chat = tokenizer, tokens + next_ids, shares
    legend, _, text = str(render_kept(*chat, with_marks=True)).partition("\n\n")
    assert text == "the[- cat sat-]{some: on the mat}{next: log}"
    evicted = len(pieces[1]) + len(pieces[2])
    assert f"[-evicted-]: {evicted}" in legend
    assert legend.startswith("kept by all: 1")
    colours = render_kept(*chat)
    assert colours.plain.endswith("\n\nthe cat sat on the mat log")
    struck = [span for span in colours.spans if span.style == "dim strike"]
    assert [colours.plain[span.start : span.end] for span in struck][1:] == [" cat sat"]


def marked(*chat):
    return str(render_kept(*chat, with_marks=True)).partition("\n\n")[2]


def test_a_character_of_several_tokens_is_one_span(tokenizer):
    ids = tokenizer("é漢a")["input_ids"]
    assert len(ids) == 6
    assert marked(tokenizer, ids, [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]) == "{some:é}[-漢-]a"


def test_invalid_utf8_bytes_are_shown(tokenizer):
    half = tokenizer("é")["input_ids"][:1]
    assert marked(tokenizer, half + tokenizer("a")["input_ids"], [0.0, 1.0]) == "[-\ufffd-]a"


def test_control_characters_do_not_reach_the_terminal(tokenizer):
    ids = tokenizer("a\x1b[2Jb")["input_ids"]
    assert marked(tokenizer, ids, [1.0] * len(ids)) == "a\u241b[2Jb"
