"""Explanations against kept sets and scores, in loops."""

import pytest
import torch
from oracle import cache_of

from h2okv.cache.argument import CACHE

BY_HEAD = [[0.5, 1.5], [1.25, 0.75]]
OPTIONS = [
    {}, {"sink": 2}, {"evict_every": 8},
    {"evict_every": 8, "scoring": "expected", "layer_budgets": BY_HEAD, "sink": 1},
    {"layer_budgets": BY_HEAD, "scoring": "value_norm"}, {"masks": True},
    {"policy": "sink_recent", "sink": 2}, {"policy": "full"},
]  # fmt: skip


def read(model, options, steps=20, record=True):
    """Return a cache and, for each number of tokens read, what each head of each layer kept."""
    cache = cache_of(model.config, 6, 4, **options)
    if record:
        cache.record_evictions()
    ids = torch.randint(2, 97, (2, 24 + steps), generator=torch.Generator().manual_seed(1))
    history = {}
    with torch.no_grad():
        for block in ids.split([24, *[1] * steps], dim=1):
            model(block, **{CACHE: cache})
            history[cache.num_seen_tokens] = [
                [[set(head.tolist()) for head in row] for row in cache.kept_positions(layer)]
                for layer in range(2)
            ]
    return cache, history


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_explanation_says_what_scores_and_kept_sets_say(make_llama, options):
    cache, history = read(make_llama(), options)
    seen, sink = cache.num_seen_tokens, options.get("sink", 0)
    for layer in range(2):
        positions, scores = cache.kept_positions(layer), cache.scores(layer)
        for row in range(2):
            for head in range(2):
                scored = zip(positions[row, head].tolist(), scores[row, head].tolist(), strict=True)
                score_of = {position: score for position, score in scored if position >= 0}
                recent = 0 if options.get("policy") == "full" else 4
                if options.get("policy") == "sink_recent":
                    recent = 10
                ranked = {
                    position: score
                    for position, score in score_of.items()
                    if sink <= position < seen - recent
                }
                order = sorted(ranked, key=lambda position: (ranked[position], position))
                for position in range(seen):
                    explanation = cache.explain(layer, head, position, row)
                    assert explanation.is_cached == (position in score_of)
                    if position not in score_of:
                        times = [time for time in history if time > position]
                        left = [t for t in times if position not in history[t][layer][row][head]]
                        # The prompt's block may have had several cuts.
                        first = explanation.left_at
                        assert first == left[0] or (left[0] == 24 and first < 24)
                        assert str(explanation).endswith(f"when {first} tokens had been read")
                        continue
                    if position in ranked and options.get("policy") != "sink_recent":
                        assert explanation.score == pytest.approx(ranked[position], rel=1e-5)
                        assert explanation.rank == 1 + order.index(position)
                        assert explanation.num_ranked == len(order)
                        assert f"{explanation.rank} of {len(order)}" in str(explanation)
                    elif position not in ranked:
                        expected = "sink" if position < sink else "recent"
                        assert explanation.protected_by == expected
                        assert expected in str(explanation)


def test_the_threshold_is_the_lowest_score_that_a_cut_now_keeps(make_llama):
    cache, _ = read(make_llama(), {"evict_every": 8}, steps=13)  # five tokens after a cut
    for head in range(2):
        standing = [cache.explain(0, head, position) for position in range(37)]
        ranked = sorted(e.score for e in standing if e.rank is not None)
        assert len(ranked) == 6 + 5
        assert {e.threshold for e in standing if e.is_cached} == {ranked[-6]}


def test_pins_and_unrecorded_evictions(make_llama):
    model = make_llama()
    cache = cache_of(model.config, 6, 4)
    cache.pin([(2, 4)])
    with torch.no_grad():
        model(torch.randint(2, 97, (1, 30)), **{CACHE: cache})
    assert cache.explain(0, 1, 3).protected_by == "pinned"
    explanations = [cache.explain(0, 0, position) for position in range(30)]
    gone = [explanation for explanation in explanations if not explanation.is_cached]
    assert len(gone) == 20 and {explanation.left_at for explanation in gone} == {None}
    assert str(gone[0]) == f"token {gone[0].position} was evicted"


def test_tokens_taken_back_have_not_left(make_llama):
    model = make_llama()
    cache = cache_of(model.config, 6, 4)
    cache.record_evictions()
    ids = torch.randint(2, 97, (1, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        model(ids[:, :30], **{CACHE: cache})
        cache.activate_past_recording()
        model(ids[:, 30:34], **{CACHE: cache})
        cache.crop(-3)
        model(ids[:, 34:35], **{CACHE: cache})
    times = [cache.explain(0, 0, position).left_at for position in range(32)]
    assert max(time or 0 for time in times) <= 32
    assert sum(time is not None for time in times) == 32 - 10


def departures(cache):
    return [
        [cache.explain(0, 1, position, row).left_at for position in range(40)]
        for row in range(cache.layers[0].batch_size)
    ]


def test_a_record_follows_sequences_and_ends_with_the_text(make_llama):
    model = make_llama()
    cache, _ = read(model, {}, steps=16)
    first, second = departures(cache)
    assert first != second
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    assert departures(cache) == [second, first, second]
    cache.reset()
    ids = torch.randint(2, 97, (3, 40), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        for block in ids.split([39, 1], dim=1):
            model(block, **{CACHE: cache})
    assert all(left_at in (None, 39, 40) for row in departures(cache) for left_at in row)


def test_a_pattern_is_named(make_llama):
    cache, _ = read(make_llama(), {"policy": "strided", "sink": 1})
    names = {cache.explain(0, 0, position).protected_by for position in range(44)}
    assert "pattern" in names and "pinned" not in names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 0, 0), "layer_idx must be"),
        ((0, 2, 0), "head must be from 0 to 1, got 2"),
        ((0, 0, 44), "position must be from 0 to 43, got 44"),
        ((0, 0, "a"), "position must be from 0 to 43, got 'a'"),
        ((0, "a", 0), "head must be from 0 to 1, got 'a'"),
        ((0, 0, 0, 2), "sequence must be from 0 to 1, got 2"),
    ],
)
def test_what_is_not_there_is_refused(make_llama, arguments, message):
    cache, _ = read(make_llama(), {}, record=False)
    with pytest.raises(ValueError, match=message):
        cache.explain(*arguments)
