"""Automatic prefix caching: tokens equal those of an engine without it."""

import random

import pytest

import h2okv
from h2okv.engine.outputs import RequestFailedError
from h2okv.engine.prefix_cache import PrefixCache

BY_HEAD = [[0.5, 1.0], [2.0, 0.5]]
OPTIONS = [
    {},
    {"scoring": "expected", "sink": 4},
    {"policy": "best", "layer_budgets": BY_HEAD},
    {"kv_bits": 8},
    {"positions": "rolling"},
    {"scoring": "decay"},
]


@pytest.fixture(scope="module")
def double_model(make_llama):
    return make_llama().double()


def conversations(rng, texts):
    """Draw prompts that begin as earlier texts do, whole or cut, and go on in another way."""
    prompts = []
    for _ in range(rng.randint(1, 4)):
        prefix = []
        if texts and rng.random() < 0.8:
            prefix = list(rng.choice(texts))
            if rng.random() < 0.5:
                prefix = prefix[: rng.randint(1, len(prefix))]
        new = [rng.randrange(2, 97) for _ in range(rng.randint(1, 30))]
        prompts.append((prefix + new)[-110:] if rng.random() < 0.1 else (prefix + new)[:110])
    return prompts


# Some 2.5 conversations a round: 1,000 of all options together in the slow run.
@pytest.mark.parametrize("rounds", [6, pytest.param(70, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [*OPTIONS, "sliding"], ids=str)
def test_conversations_give_the_tokens_of_a_cold_engine(
    make_llm, double_model, gemma, greedy, options, rounds
):
    model = double_model
    if options == "sliding":
        model, options = gemma, {}
    options = {
        "heavy": 14, "recent": 6, "evict_every": 8, "max_prompt_tokens": 150, "max_num_seqs": 3,
        "max_prefill_tokens": 24,
    } | options  # fmt: skip
    warm = make_llm(model, prefix_cache=1 << 20, **options)
    cold = make_llm(model, prefix_cache=0, **options)
    rng, texts = random.Random(str(options)), []
    for _ in range(rounds):
        prompts, new = conversations(rng, texts), rng.randint(1, 25)
        if rng.random() < 0.2:
            for engine in (warm, cold):
                engine.generate(prompts, greedy(1))  # what is read now and continued later
        # Spans at the beginning, which states may have, and at the end.
        lengths = [len(prompt) for prompt in prompts]
        spans = [[[(0, 1)], [(n - 1, n)], [(0, 1), (n - 1, n)][: n - 1], []] for n in lengths]
        pins = [rng.choice(choices) for choices in spans]
        results = [engine.generate(prompts, greedy(new), pins=pins) for engine in (warm, cold)]
        tokens = [[list(r.completions[0].token_ids) for r in result] for result in results]
        assert tokens[0] == tokens[1]
        texts += [prompt + answer for prompt, answer in zip(prompts, tokens[0], strict=True)]
    stats = warm.stats()
    assert stats.prefix_hits > 0
    assert stats.prompt_tokens < cold.stats().prompt_tokens
    assert 0 < stats.prefix_bytes <= 1 << 20
    assert cold.stats().prefix_states == cold.stats().prefix_hits == 0


def test_pins_are_part_of_a_state(make_llm, double_model, greedy):
    llm = make_llm(double_model, heavy=8, recent=6, evict_every=8, max_prompt_tokens=200)

    def reused(tokens, *pins):
        return llm.generate([tokens], greedy(1), pins=[pins])[0].prompt.num_reused

    prompt = list(range(2, 42))
    assert reused(prompt, (3, 6)) == 0  # leaves states of 32 tokens
    longer = [*prompt, *range(50, 70)]
    for other in ([], [(3, 7)], [(2, 6)], [(3, 6), (30, 32)]):
        assert reused(longer, *other) == 0
    assert reused(longer, (3, 6), (32, 35)) == 32  # what is pinned behind it is still to be read
    assert reused(longer, (40, 43)) == 0  # leaves a state of the 40 tokens without pins
    assert reused(longer, (41, 44)) == 40
    keys = [
        llm.engine.prefix_cache.keys_of(longer, pins)
        for pins in ([], [(3, 6)], [(3, 10)], [(3, 8), (8, 10)])
    ]
    assert keys[2] == keys[3] and len({listed[0] for listed in keys}) == 3


def test_states_of_short_texts_are_small(make_llm, double_model, greedy):
    llm = make_llm(double_model, heavy=60, recent=60, evict_every=8, max_prompt_tokens=400)
    prompt = list(range(2, 19))
    text = prompt + list(llm.generate([prompt], greedy(16))[0].completions[0].token_ids)
    by_length = {cache.num_seen_tokens: cache.nbytes for cache in llm.engine.runner.states.values()}
    assert sorted(by_length) == [16, 32]
    assert by_length[32] < 3 * by_length[16]
    cold = make_llm(
        double_model, heavy=60, recent=60, evict_every=8, max_prompt_tokens=400, prefix_cache=0
    )
    for new in (1, 200):  # goes on to the budget and beyond
        first, second = (other.generate([[*text, 5]], greedy(new))[0] for other in (llm, cold))
        assert (first.prompt.num_reused, second.prompt.num_reused) == (32, 0)
        assert first.completions[0].token_ids == second.completions[0].token_ids


def test_requests_that_need_more_than_a_state_read_their_prompt(make_llm, double_model, greedy):
    llm = make_llm(double_model, heavy=8, recent=6, evict_every=8, max_prompt_tokens=200)
    prompt = list(range(2, 42))
    llm.generate([prompt], greedy(2))
    params = h2okv.SamplingParams(max_tokens=2, prompt_logprobs=0)
    assert llm.generate([prompt], params)[0].prompt.num_reused == 0
    pinned = llm.generate([prompt], greedy(2), pins=[[(0, 4)]])
    assert pinned[0].prompt.num_reused == 0
    other = llm.generate([prompt], greedy(2), budget=h2okv.Budget(heavy=4, recent=4))
    assert other[0].prompt.num_reused == 0
    assert llm.generate([prompt], greedy(2))[0].prompt.num_reused == 32


@pytest.mark.parametrize(
    "options",
    [{"heavy": 8, "recent": 6}, {"heavy": 0.1, "recent": 0.1, "min_tokens": 0, "evict_every": 8}],
    ids=["no evict_every", "fractions"],
)
def test_states_need_fixed_places_and_a_budget_in_tokens(make_llm, double_model, greedy, options):
    llm = make_llm(double_model, max_prompt_tokens=200, **options)
    for _ in range(2):
        result = llm.generate([list(range(2, 62))], greedy(2))[0]
        assert result.prompt.num_reused == 0
    assert llm.stats().prefix_states == 0
    with pytest.raises(ValueError, match="keeps none; give evict_every and a budget in tokens"):
        make_llm(double_model, max_prompt_tokens=200, prefix_cache=1 << 20, **options)


def test_a_small_limit_drops_the_state_that_was_used_least(make_llm, double_model, greedy):
    options = {"heavy": 8, "recent": 6, "evict_every": 8, "max_prompt_tokens": 200}
    probe = make_llm(double_model, **options)
    texts = [[first, *range(2, 42)] for first in (50, 51, 52)]
    probe.generate(texts[:1], greedy(1))
    size = probe.stats().prefix_bytes
    llm = make_llm(double_model, prefix_cache=2 * size, **options)
    for text in (texts[0], texts[1], texts[0], texts[2]):
        llm.generate([text], greedy(1))
    stats = llm.stats()
    assert (stats.prefix_states, stats.prefix_evictions) == (2, 1)
    assert len(llm.engine.runner.states) <= 3  # the dropped one goes with the next step
    reused = [llm.generate([text], greedy(1))[0].prompt.num_reused for text in texts]
    assert reused[0] and not reused[1]
    assert len(llm.engine.runner.states) <= 3


def test_a_limit_below_one_state_is_refused(make_llm, double_model):
    with pytest.raises(ValueError, match=r"^prefix_cache of 100 B has no room for a state of"):
        make_llm(double_model, heavy=8, recent=6, evict_every=8, prefix_cache=100)


def test_a_failed_request_resumes_from_its_states(make_llm, double_model, greedy, monkeypatch):
    llm = make_llm(double_model, heavy=8, recent=6, evict_every=8, max_prompt_tokens=200)
    cold = make_llm(
        double_model, heavy=8, recent=6, evict_every=8, max_prompt_tokens=200, prefix_cache=0
    )
    prompt = list(range(2, 42))
    expected = cold.generate([prompt], greedy(40))[0].completions[0].token_ids
    forward, steps = llm.engine.runner._forward, []

    def fail_at_the_end(tokens, *args, **options):
        steps.append(tokens)
        if len(steps) == 30:
            raise RuntimeError("the device is lost")
        return forward(tokens, *args, **options)

    monkeypatch.setattr(llm.engine.runner, "_forward", fail_at_the_end)
    with pytest.raises(RequestFailedError, match="the device is lost"):
        llm.generate([prompt], greedy(40))
    text = [*prompt, *expected[:27]]  # what a client has of it
    again = llm.generate([text], greedy(13))[0]
    assert again.prompt.num_reused == (len(text) - 1) // 8 * 8
    assert again.completions[0].token_ids == expected[27:]


def test_beginnings_of_other_prompts_get_a_state():
    cache = PrefixCache(4, 1000, {})
    shared = list(range(20))
    first, second, third = ([*shared, *[n] * 9] for n in (100, 101, 102))
    assert cache.match(first) == (0, None, {28: cache.keys_of(first)[6]})
    length, key, saves = cache.match(second)
    assert (length, key) == (0, None)
    assert sorted(saves) == [20, 28]  # the shared tokens, and the last multiple
    assert cache.add(saves[20], 10) == []
    length, key, saves = cache.match(third)
    assert (length, key) == (20, cache.keys_of(shared)[4])
    assert sorted(saves) == [28]


def test_keys_depend_on_tokens_and_identity():
    tokens = list(range(12))
    keys = PrefixCache(4, 1000, {"cache": 1}).keys_of(tokens)
    assert len(keys) == len(set(keys)) == 3
    assert PrefixCache(4, 1000, {"cache": 2}).keys_of(tokens)[0] != keys[0]
    other = PrefixCache(4, 1000, {"cache": 1}).keys_of([99, *tokens[1:]])
    assert not set(other) & set(keys)
    assert PrefixCache(4, 1000, {"cache": 1}).keys_of(tokens[:11]) == keys[:2]
