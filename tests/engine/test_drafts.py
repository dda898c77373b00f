"""Speculation in the engine: the same outputs from fewer forwards, and only where it pays."""

import json
import random

import pytest
import torch

import h2okv
from h2okv.engine.drafts import DraftGain, PromptLookup
from h2okv.engine.structured import json_grammar

BY_HEAD = [[0.5, 1.0], [2.0, 0.5]]
OPTIONS = [
    {}, {"scoring": "expected"}, {"kv_bits": 8}, {"positions": "rolling"}, {"scoring": "decay"},
    {"layer_budgets": BY_HEAD, "policy": "best"}, {"evict_every": 8},
    {"evict_every": "prompt+4"}, {"layer_budgets": BY_HEAD, "policy": "best", "evict_every": 3},
    {"layer_budgets": BY_HEAD, "policy": "best", "evict_every": "prompt+8"},
    {"layer_budgets": BY_HEAD, "policy": "best", "evict_every": "prompt+3"},
    {"evict_every": 8, "layer_budgets": BY_HEAD, "policy": "best"},
    {"heavy": 0.2, "recent": 0.2, "min_tokens": 0},
]  # fmt: skip


@pytest.fixture(scope="module")
def double_model(make_llama):
    return make_llama(sharpness=3.0).double()


@pytest.fixture
def always(monkeypatch):
    """Draft in every step, whatever it takes."""
    monkeypatch.setattr(DraftGain, "is_open", True)


@pytest.mark.parametrize("rounds", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [*OPTIONS, "sliding"], ids=str)
def test_outputs_are_those_without_drafts(
    make_llm, double_model, gemma, greedy, always, options, rounds
):
    """Of one request, of one whose neighbour ends early, and of a batch, one of which is drawn."""
    model = double_model
    if options == "sliding":
        model, options = gemma, {"evict_every": 8}
    options = {"heavy": 8, "recent": 6, "max_prompt_tokens": 200, "max_num_seqs": 4} | options
    plain, drafting = (make_llm(model, speculate=n, **options) for n in (0, 4))
    rng, drawn = random.Random(2), {"temperature": 0.7, "seed": 5, "frequency_penalty": 0.2}
    for _ in range(rounds):
        bases = [[rng.randrange(2, 97) for _ in range(rng.randint(3, 9))] for _ in range(5)]
        texts = [(base * 12)[: rng.randint(12, 50)] for base in bases]
        other = [rng.randrange(2, 97) for _ in range(20)]
        params = [greedy(rng.randint(5, 60)) for _ in range(3)]
        params += [h2okv.SamplingParams(max_tokens=40, ignore_eos=True, **drawn)]
        calls = [(texts[:1], [greedy(50)]), ([texts[0], other], [greedy(50), greedy(5)])]
        for call in (*calls, (texts[1:], params)):
            tokens = [
                [list(r.completions[0].token_ids) for r in llm.generate(*call)]
                for llm in (plain, drafting)
            ]
            assert tokens[0] == tokens[1]
    stats, expected = drafting.stats(), plain.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.steps < expected.steps
    assert stats.new_tokens == expected.new_tokens
    for layer in drafting.engine.runner.pool.slot_layers:
        assert layer.log is None or len(layer.log) <= 5


def entries_by_length(llm, prompts):
    """Decode prompts together; return what each holds after its tokens, by their number."""
    engine, lengths = llm.engine, {}
    params = h2okv.SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    for prompt in prompts:
        engine.scheduler.submit(engine.request(prompt, params, lambda event: None))
    while engine.step():
        if engine.scheduler.accepted is not None:
            continue  # tokens are yet to be taken back
        layers = [layer.state for layer in engine.runner.pool.slot_layers]
        for row, output in enumerate(engine.scheduler.running[: layers[0].batch_size]):
            if output.is_finished or len(output.tokens) == 1:  # not admitted, or to be released
                continue
            key = output.request.prompt, int(layers[0].num_real_tokens[row])
            lengths[key] = [
                (positions[row] + 1, scores[row].clone())
                for positions, scores in (state.by_head("positions", "scores") for state in layers)
            ]
    return lengths


def in_order(positions, scores):
    order = positions.argsort(dim=-1)
    positions, scores = positions.gather(-1, order), scores.gather(-1, order)
    return positions, scores.masked_fill(positions == 0, 0.0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_batch_holds_what_it_holds_without_drafts(make_llm, double_model, always, options):
    options = {"heavy": 8, "recent": 6, "max_prompt_tokens": 200, "max_num_seqs": 3} | options
    prompts = [list(range(2 + seed, 9 + seed)) * (4 + seed) for seed in range(3)]
    plain, drafting = (
        entries_by_length(make_llm(double_model, speculate=n, **options), prompts) for n in (0, 4)
    )
    common = plain.keys() & drafting.keys()
    assert len(common) > 5
    for key in common:
        for expected, layer in zip(plain[key], drafting[key], strict=True):
            torch.testing.assert_close(in_order(*layer), in_order(*expected))


def test_states_of_prefixes_are_saved_between_drafts(make_llm, double_model, greedy, always):
    llm = make_llm(
        double_model, speculate=4, heavy=8, recent=6, evict_every=8, max_prompt_tokens=200
    )
    prompt = list(range(2, 12)) * 4
    first = llm.generate([prompt], greedy(50))[0]
    text = prompt + list(first.completions[0].token_ids)
    second = llm.generate([[*text, 7]], greedy(3))[0]
    assert second.prompt.num_reused == (len(text) - 1) // 8 * 8


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_grammars_mask_drafts_too(make_llm, make_llama, tokenizer, always, temperature):
    """Drafts that a grammar forbids are rejected, and tokens are those without drafts."""
    model = make_llama(sharpness=3.0).double()
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    entry = {
        "type": "object",
        "properties": {"name": {"enum": ["heron", "fox"]}, "legs": {"enum": [2, 4]}},
        "required": ["name", "legs"],
        "additionalProperties": False,
    }
    schema = {"type": "array", "items": entry, "minItems": 4, "maxItems": 6}
    params = h2okv.SamplingParams(
        max_tokens=200, temperature=temperature, seed=3, grammar=json_grammar(schema)
    )
    prompt = 'Zoo: [{"name": "heron", "legs": 2}, {"name": "heron", "wings": 2}]\n' * 2
    llms = [
        make_llm(model, speculate=n, heavy=16, recent=16, max_prompt_tokens=400) for n in (0, 4)
    ]
    texts = []
    for llm in llms:
        outputs = [llm.generate([prompt], params)[0].completions[0] for _ in range(2)]
        assert outputs[0].token_ids == outputs[1].token_ids  # nothing is left of a grammar
        assert outputs[0].finish_reason == "stop"
        texts.append(outputs[0])
    assert texts[0].token_ids == texts[1].token_ids
    assert 4 <= len(json.loads(texts[1].text)) <= 6
    stats = llms[1].stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.steps < llms[0].stats().steps


def test_a_stop_text_within_drafts_ends_the_output(make_llm, double_model, greedy, always):
    llms = [
        make_llm(double_model, speculate=n, heavy=8, recent=6, max_prompt_tokens=200)
        for n in (0, 4)
    ]
    prompt = list(range(2, 12)) * 4
    tokens = llms[0].generate([prompt], greedy(40))[0].completions[0].token_ids
    params = h2okv.SamplingParams(
        max_tokens=40, temperature=0, ignore_eos=True, stop_token_ids=(tokens[25],)
    )
    for llm in llms:
        completion = llm.generate([prompt], params)[0].completions[0]
        assert completion.finish_reason == "stop"
        assert list(completion.token_ids) == list(tokens[: tokens.index(tokens[25]) + 1])
        again = llm.generate([prompt], greedy(40))[0].completions[0]  # nothing is left of it
        assert again.token_ids == tokens


def test_lookup_continues_the_longest_repetition():
    lookup = PromptLookup()
    assert lookup.draft([1, 2, 3, 4], 3) == ()
    assert lookup.draft([1, 2, 3, 4, 1, 2], 3) == (3, 4, 1)
    assert lookup.draft([1, 2, 3, 4, 1, 2, 9, 9, 3, 4, 1, 2], 2) == (9, 9)
    assert lookup.draft([1, 2, 3, 4, 1, 2, 9, 9, 3, 4, 1, 2, 8], 2) == ()


@pytest.mark.parametrize("seconds", [1.0, 1.3, 2.0, 6.0])
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.8])
def test_drafts_never_cost_more_than_a_small_share(seconds, chance):
    """A thousand tokens after a text that drafts were good for."""
    gain, rng = DraftGain(), random.Random(0)
    assert not gain.is_open  # no plain step was measured yet
    for _ in range(5):
        gain.record(1.0, 1, False)
    for _ in range(50):
        gain.record(1.0, 5, True)
    total = tokens = drafts = 0
    while tokens < 1000:
        if not gain.is_open:
            gain.record(1.0, 1, False)
            total, tokens = total + 1.0, tokens + 1
            continue
        count = 1
        while count < 5 and rng.random() < chance:
            count += 1
        gain.record(seconds - 0.1, count, True)
        gain.spend(0.1)
        total, tokens, drafts = total + seconds, tokens + count, drafts + 1
    assert total <= tokens / 0.95
    assert drafts > 1  # they are tried again and again
    if seconds < 2 and chance == 0.8:
        assert total < 0.6 * tokens


def test_one_slow_step_does_not_open_drafts():
    gain = DraftGain()
    for seconds in (1.0, 1.0, 30.0, 1.0):
        gain.record(seconds, 1, False)
    for _ in range(4):
        gain.record(3.0, 1, True)
    assert not gain.is_open
