"""Pinned spans of a request's prompt: as in its own ``generate``, for any batch."""

import copy

import pytest

import h2okv
from h2okv.prompts.messages import read_conversation

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
        ("tool", r"pin 'tool' is unknown; did you mean tools\? choose from system, tools,"),
        ("system", "pin='system' finds no system message"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.chat(talk[1:], pin=[pin])


TOOL = {"name": "add", "description": "Add two numbers.", "parameters": {"type": "object"}}
TALK = [
    {"role": "system", "content": "Be a cat."},
    {"role": "user", "content": "Who are you, and what do you like to eat in the evening?"},
]
ENGINE = {"heavy": 300, "recent": 20, "evict_every": 16, "max_prompt_tokens": 900}


def test_a_pinned_beginning_is_read_once(make_llm, greedy):
    llms = [
        make_llm("bundled", pin=("system", "tools"), prefix_cache=size, **ENGINE)
        for size in (1 << 24, 0)
    ]
    talk = TALK
    for turn in range(3):
        fields = {"messages": talk, "tools": [{"type": "function", "function": TOOL}]}
        outputs = [
            llm.generate([llm.engine.encode(read_conversation(fields))], greedy(24))[0]
            for llm in llms
        ]
        assert outputs[0].completions[0].token_ids == outputs[1].completions[0].token_ids
        prompt = outputs[0].prompt
        assert (prompt.num_reused > len(prompt.token_ids) / 3) is (turn > 0)
        assert outputs[1].prompt.num_reused == 0
        question = {"role": "user", "content": "And what else?"}
        talk = [*talk, {"role": "assistant", "content": outputs[0].text.strip()}, question]
    # Of a chat without tools or a system message there is nothing to pin.
    assert llms[0].chat(TALK[1:], greedy(1))[0].prompt.num_reused == 0
    with pytest.raises(ValueError, match=r"pin='tools' finds no tools; leave it out, or give some"):
        llms[0].chat(TALK, pin=["tools"])


def test_pins_that_no_chat_can_have_are_refused_at_the_start(make_llm, tokenizer):
    hiding, strict = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
    turns = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    hiding.chat_template = turns
    strict.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + turns
    )
    model = make_llm("bundled").engine.model
    for reader, options, message in (
        (tokenizer, {"pin": ["systm"]}, "pin 'systm' is unknown; did you mean system"),
        (tokenizer, {"pin": "system"}, "pin must be a list of system, tools.*, got 'system'"),
        (tokenizer, {"pin": 3}, "pin must be a list of system, tools.*, got 3"),
        (hiding, {"pin": ["system"]}, "pin=system .*template changes the messages.*pin others"),
        (strict, {"pin": ["system"]}, "pin=system .*no system"),
        (tokenizer, {"pin": ["user"], "policy": "sink_recent"}, "keeps 0 heavy ones"),
        (tokenizer, {"pin": ["user"], "verify": 0.1, "agreement": 0.9}, "agreement lowers them"),
    ):
        with pytest.raises(ValueError, match=message):
            h2okv.LLM(model, reader, **ENGINE | options)


def test_half_of_the_budget_is_even_among_heads_that_have_pins(make_llm, greedy):
    model = make_llm("bundled").engine.model
    factors = [[0.1, 1.9]] * model.config.num_hidden_layers
    options = ENGINE | {"heavy": 80, "layer_budgets": factors}
    spans, prompt = [(2, 42)], list(range(2, 80))
    with pytest.raises(
        ValueError, match="keeps 8 heavy ones of this prompt in a head.*layers=even"
    ):
        make_llm(model, **options).generate([prompt], greedy(1), pins=[spans])
    pinned = make_llm(model, pin=["system"], **options)
    assert "44 tokens at most" in pinned.engine.describe()
    pinned.generate([prompt], greedy(9), pins=[spans])
    assert pinned.engine.config.cache.layer_budgets[0] == (0.55, 1.45)
    with pytest.raises(ValueError, match="45 tokens are pinned .* keeps 44 heavy"):
        pinned.generate([prompt], greedy(1), pins=[[(2, 47)]])
