"""Pinned spans of a request's prompt: as in its own ``generate``, for any batch."""

import pytest

import h2okv

SPANS = [(3, 6), (20, 22)]


@pytest.fixture
def model(make_llama):
    return make_llama()


@pytest.mark.parametrize(
    "options", [{}, {"evict_every": 7}, {"evict_every": "prompt+5"}, {"scoring": "decay"}], ids=str
)
def test_request_with_pins_equals_generate(make_llm, make_prompts, alone, greedy, model, options):
    prompts = make_prompts([40, 33, 60])
    pins = [SPANS, (), [(0, 9)]]
    expected = []
    for prompt, spans in zip(prompts, pins, strict=True):
        cache = h2okv.H2OCache(model.config, 0.3, 0.1, **options)
        cache.pin(spans)
        expected.append(alone(model, prompt, 20, cache))
    llm = make_llm(model, heavy=0.3, recent=0.1, min_tokens=0, max_prompt_tokens=64, **options)
    outputs = llm.generate(prompts, greedy(20), pins=pins)
    assert [output.completions[0].token_ids for output in outputs] == expected


def test_invalid_pins_raise_before_generation(make_llm, make_prompts, greedy, model):
    llm, prompts = make_llm(model, max_prompt_tokens=64), make_prompts([40])
    for spans, message in (
        ([(30, 41)], "ends after the prompt of 40 tokens"),
        ([(0, 9)], "9 tokens are pinned and policy='h2o' keeps 8 heavy"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(prompts, greedy(4), pins=[spans])


@pytest.mark.parametrize(
    "pins",
    [[[(0, 4)]], [(), (), ()], [], [(0, 4), ()], [[4], ()], (3, 5), 5, "ab", [["ab"], ()]],
    ids=str,
)
def test_pins_must_be_a_list_of_spans_for_each_prompt(make_llm, make_prompts, greedy, model, pins):
    llm, prompts = make_llm(model, max_prompt_tokens=64), make_prompts([40, 40])
    with pytest.raises(ValueError, match=r"pins? .*(give|must be) (\(start, stop\)|\[)") as error:
        llm.generate(prompts, greedy(4), pins=pins)
    assert "zip" not in str(error.value)


def test_messages_are_pinned_by_role(make_llm, tokenizer, greedy):
    llm = make_llm("bundled", max_prompt_tokens=100, heavy=40, recent=20)
    talk = [
        {"role": "system", "content": "Be a cat."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Who?"},
    ]
    pins = []
    request = llm.engine.request
    llm.engine.request = lambda *args, **options: (
        pins.append(options["pins"]) or request(*args, **options)
    )
    (output,) = llm.chat(talk, greedy(4), pin=("system", "last_user"))
    shown = [tokenizer.decode(output.prompt.token_ids[start:stop]) for start, stop in pins[0]]
    assert [text.strip() for text in shown] == ["Be a cat.", "Who?"]
    llm.chat(talk, greedy(4), pin=["user"])
    assert len(pins[1]) == 2
    for pin, message in (
        ("tool", "pin 'tool' is unknown; choose from system, user, last_user"),
        ("system", "pin='system' finds no system message"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.chat(talk[1:], pin=[pin])
