"""Tool calls: parsed the same however the text is cut, and sent as OpenAI sends them."""

import copy
import json
import runpy
from pathlib import Path

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

import h2okv
from h2okv.engine.outputs import OutputDelta, PromptRead
from h2okv.server.tools import ToolCall, ToolCallParser

F = '{"name": "f", "arguments": {"a": "}\\"{ </tool_call>"}}'
G = '{"name": "g", "parameters": {}}'
CALL_F, CALL_G = ToolCall("f", '{"a": "}\\"{ </tool_call>"}'), ToolCall("g", "{}")
ANSWERS = [
    # Hermes and Qwen.
    (f"<tool_call>\n{F}\n</tool_call>", [CALL_F]),
    (f"Let me see.\n\n<tool_call>{F}</tool_call>", ["Let me see.", CALL_F]),
    (f"<tool_call>{F}</tool_call>\n<tool_call>\n{G}\n</tool_call>\n", [CALL_F, CALL_G]),
    (f"<tool_call>{F}\n{G}</tool_call>", [CALL_F, CALL_G]),
    (f"<tool_call>{F}", [CALL_F]),
    (f"<tool_call>{F}</tool_call>\nDone. ", [CALL_F, "Done."]),
    (f"See: <tool_call>{G}</tool_call>\nDone.", ["See:", CALL_G, " \nDone."]),
    # Llama 3.
    (G, [CALL_G]),
    (f"<|python_tag|>{G}", [CALL_G]),
    (f"<|python_tag|>{G}; {F}", [CALL_G, CALL_F]),
    (f"\n{G}\n{F}", [CALL_G, CALL_F]),
    (f"[{F}, {G}]", [CALL_F, CALL_G]),
    ('{"type": "function", "name": "g", "parameters": {}}', [CALL_G]),
    # Qwen2.5-Coder.
    (f"```json\n{F}\n```", [CALL_F]),
    (f"```json\n{F}\n```\n```json\n{G}\n```\nDone.", [CALL_F, CALL_G, "Done."]),
    # Arguments as JSON in a string; names that no tool has.
    ('<tool_call>{"name": "h", "arguments": "{\\"a\\": 5}"}</tool_call>',
     [ToolCall("h", '{"a": 5}')]),
    ('{"name": "ü", "arguments": {"a": "🙂"}}', [ToolCall("ü", '{"a": "🙂"}')]),
    ('{"name": "f", "arguments": {"a": "\\ud800"}}', [ToolCall("f", '{"a": "\\ud800"}')]),
    # What is no call is text, as it is.
    ("", []),
    ("  Hello, <tool> \n", ["  Hello, <tool> \n"]),
    ("Hello <tool_ca", ["Hello <tool_ca"]),
    ("<tool_call>", ["<tool_call>"]),
    ("<tool_call>{bad}</tool_call>", ["<tool_call>{bad}</tool_call>"]),
    (f"<tool_call>{F[:-3]}", [f"<tool_call>{F[:-3]}"]),
    (f"<tool_call>{F[:-3]}</tool_call> <tool_call>{G}</tool_call>",
     [f"<tool_call>{F[:-3]}</tool_call>", CALL_G]),
    (f'<tool_call>{{"a": "5" tall"}}</tool_call> <tool_call>{G}</tool_call>',
     ['<tool_call>{"a": "5" tall"}</tool_call>', CALL_G]),
    # Calls without arguments, with a marker.
    ('<tool_call>{"name": "f"}</tool_call>', [ToolCall("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [ToolCall("f", "{}")]),
    ('<|python_tag|>{"name": "f", "parameters": ""}', [ToolCall("f", "{}")]),
    ('{"name": "f"}', ['{"name": "f"}']),
    ('{"name": "f", "arguments": null}', ['{"name": "f", "arguments": null}']),
    # Line breaks as they are; functions as in OpenAI's messages.
    ('<tool_call>{"name": "f", "arguments": {"a": "x\ny\t"}}</tool_call>',
     [ToolCall("f", '{"a": "x\\ny\\t"}')]),
    ('<tool_call>{"type": "function", "function": {"name": "f", "arguments": "{}"}}</tool_call>',
     [ToolCall("f", "{}")]),
    ('{"type": "function", "function": {"name": "f"}}',
     ['{"type": "function", "function": {"name": "f"}}']),
    ('{"name": "f", "arguments": 5}', ['{"name": "f", "arguments": 5}']),
    ('{"name": "f", "arguments": {"a": NaN}}', ['{"name": "f", "arguments": {"a": NaN}}']),
    ('{"name": "f", "arguments": {"a": 1e999}}', ['{"name": "f", "arguments": {"a": 1e999}}']),
    ('{"name": "\\ud800", "arguments": {}}', ['{"name": "\\ud800", "arguments": {}}']),
    (f"[{F}, 5]", [f"[{F}, 5]"]),
    ('{"city": "Paris"}', ['{"city": "Paris"}']),
    ('```json\n{"city": "Paris"}\n```', ['```json\n{"city": "Paris"}\n```']),
    (f"So {G}", [f"So {G}"]),
    (f"{G}, as {G}", [CALL_G, f", as {G}"]),
    ('<|python_tag|>search.call(query="a")', ['<|python_tag|>search.call(query="a")']),
    (f"<tool_call>{'[' * 300}", [f"<tool_call>{'[' * 300}"]),
]  # fmt: skip


def read(text, cuts, is_cut=False, **options):
    parser, pieces = ToolCallParser(**options), []
    edges = [0, *sorted(cuts), len(text)]
    for start, stop in zip(edges, edges[1:], strict=False):
        pieces += parser.add(text[start:stop])
    pieces += parser.end(is_cut)
    joined = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


@pytest.mark.parametrize(("text", "expected"), ANSWERS, ids=[text[:40] for text, _ in ANSWERS])
def test_calls_are_the_same_at_any_cut(text, expected):
    assert read(text, []) == expected
    assert read(text, range(1, len(text))) == expected
    for cut in range(len(text)):
        assert read(text, [cut]) == expected


NAMED = {"names": ("f", "g"), "no_arguments": ("g",)}
CUT = [
    # Whatever the marker begins is no text; without a marker a tool's name decides.
    ("Well. <tool_call>\n", {}, ["Well."]),
    (f"Well.\n<tool_call>{F[:-3]}", {}, ["Well."]),
    (f"<tool_call>{F}</tool_c", {}, [CALL_F]),
    (f"<tool_call>{F}</tool_call>\n<tool_ca", {}, [CALL_F]),
    (f"<tool_call>{F}</tool_call>\n<tool_call>{F[:20]}", {}, [CALL_F]),
    (F[:-3], {}, [F[:-3]]),
    (F[:-3], NAMED, []),
    (f"```json\n{F[:30]}", NAMED, []),
    ('{"name": "f"', NAMED, []),
    ('{"name": "f"', NAMED | {"has_schema": True}, ['{"name": "f"']),
    ('{"name": "f", "a": {', NAMED | {"has_schema": True}, ['{"name": "f", "a": {']),
    ('{"name": "Anna", "ag', NAMED, ['{"name": "Anna", "ag']),
    ("Hello <", NAMED, ["Hello <"]),
    ('{"na', {"only_calls": True}, []),
    ("<tool_call>", {"only_calls": True}, []),
    (f'{G}; {{"na', {"only_calls": True}, [CALL_G]),
]


@pytest.mark.parametrize(("text", "options", "expected"), CUT)
def test_a_call_that_was_cut_is_no_text(text, options, expected):
    for cuts in ([], range(1, len(text)), *([cut] for cut in range(len(text)))):
        assert read(text, cuts, is_cut=True, **options) == expected


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ('{"name": "g"}', NAMED, [CALL_G]),
        ('{"name": "g", "arguments": null}', NAMED, [CALL_G]),
        ('{"name": "f"}', NAMED, ['{"name": "f"}']),
        ('{"name": "g"}', NAMED | {"has_schema": True}, ['{"name": "g"}']),
        ('{"name": "Anna", "arguments": {}}', NAMED | {"has_schema": True},
         ['{"name": "Anna", "arguments": {}}']),
        (G, NAMED | {"has_schema": True}, [CALL_G]),
    ],
)  # fmt: skip
def test_what_is_a_call_depends_on_the_tools(text, options, expected):
    for cuts in ([], range(1, len(text)), *([cut] for cut in range(len(text)))):
        assert read(text, cuts, **options) == expected


@given(st.data())
def test_any_pieces_of_any_text_give_the_same_calls(data):
    pieces = st.sampled_from(
        ["<tool_call>", "</tool_call>", "<|python_tag|>", "```json", "```", F, G, F[:30], G[9:],
         "{", "}", "[", '"', "\\", ";", ",", " ", "\n", "<", "Hello"]
    )  # fmt: skip
    text = "".join(data.draw(st.lists(pieces, max_size=8)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    expected = read(text, [])
    assert read(text, cuts) == expected == read(text, range(1, len(text)))
    # Nothing but whitespace and what belongs to calls is lost.
    if not any(isinstance(piece, ToolCall) for piece in expected):
        assert "".join(expected) == text


def test_text_is_not_held_back():
    parser = ToolCallParser()
    assert parser.add("{") == [] and parser.add('"city": 5') == ['{"city": 5']
    assert parser.add(" Hello") == [" Hello"] and parser.add(" <tool") == []
    assert parser.add("box>") == [" <toolbox>"]


USER = {"role": "user", "content": "Hi"}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "g"}},
]
CHAT = {"model": "fake", "messages": [USER], "tools": TOOLS}


@pytest.fixture
def scripted(served, fake):
    """Return a server whose answers are the text in ``script``, character by character."""

    async def pieces(prompt, params):
        script = fake.scripts.pop(0) if fake.scripts else fake.script
        for index in range(params.n):
            for at, letter in enumerate(script):
                is_last = at + 1 == len(script)
                reason = fake.ending if is_last else None
                start = PromptRead(prompt) if at == 0 else None
                yield OutputDelta(index, letter, (5,), finish_reason=reason, prompt=start)

    fake.script, fake.scripts, fake.ending, fake._pieces = "", [], "stop", pieces
    with served.client() as served.only_client:
        yield served


def complete(served, script, **options):
    served.engine.script = script
    return served.only_client.chat.completions.create(**{**CHAT, **options})


def accumulated(stream):
    """Put a stream together as OpenAI's guide for clients does."""
    content, calls, reasons = "", [], []
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                assert call.id.startswith("call_") and call.type == "function"
                assert call.function.name and call.function.arguments == ""
                calls.append([call.function.name, ""])
            else:
                assert call.id is None and call.function.name is None
                calls[call.index][1] += call.function.arguments
        if choice.finish_reason:
            reasons.append(choice.finish_reason)
    return content, [tuple(call) for call in calls], reasons


@pytest.mark.parametrize(
    ("script", "content", "calls"),
    [
        (f"<tool_call>\n{F}\n</tool_call>", None, [CALL_F]),
        (f"Well.\n<tool_call>{F}</tool_call>\n<tool_call>{G}</tool_call>", "Well.",
         [CALL_F, CALL_G]),
        (f"{G}; {F}", None, [CALL_G, CALL_F]),
        ("Hello.\n", "Hello.\n", []),
        # A name that no tool has is a call, which the client answers.
        ('<tool_call>{"name": "h", "arguments": {}}</tool_call>', None, [ToolCall("h", "{}")]),
        ('<|python_tag|>{"name": "h", "parameters": {}}', None, [ToolCall("h", "{}")]),
        # What does not parse is text, in either form.
        ("<tool_call>{bad}</tool_call>", "<tool_call>{bad}</tool_call>", []),
        (f"<tool_call>{F[:-3]}", f"<tool_call>{F[:-3]}", []),
        ('<tool_call>{"name": 5, "arguments": {}}</tool_call>',
         '<tool_call>{"name": 5, "arguments": {}}</tool_call>', []),
        (G[:-2], G[:-2], []),
        ('{"name": "f", "parameters": [5]}', '{"name": "f", "parameters": [5]}', []),
        ('<|python_tag|>{"name": "f", "parameters": {\'a\': 5}}',
         '<|python_tag|>{"name": "f", "parameters": {\'a\': 5}}', []),
    ],
)  # fmt: skip
def test_calls_complete_and_streamed(scripted, script, content, calls):
    (choice,) = complete(scripted, script).choices
    message, expected = choice.message, [(call.name, call.arguments) for call in calls]
    functions = [call.function for call in message.tool_calls or []]
    assert [(function.name, function.arguments) for function in functions] == expected
    assert message.content == content
    reason = "tool_calls" if calls else "stop"
    assert choice.finish_reason == reason
    stream = complete(scripted, script, stream=True)
    assert accumulated(stream) == (content or "", expected, [reason])


def test_only_the_first_of_calls_that_are_not_parallel(scripted):
    script = f"<tool_call>{F}</tool_call><tool_call>{G}</tool_call>"
    options = {"parallel_tool_calls": False}
    (call,) = complete(scripted, script, **options).choices[0].message.tool_calls
    assert call.function.name == "f"
    _, calls, _ = accumulated(complete(scripted, script, stream=True, **options))
    assert [name for name, _ in calls] == ["f"]


def test_text_is_as_it_is_without_tools(scripted):
    script = f"<tool_call>{F}</tool_call>"
    for options in ({"tools": None}, {"tool_choice": "none"}):
        (choice,) = complete(scripted, script, **options).choices
        assert choice.message.content == script and choice.message.tool_calls is None
        assert choice.finish_reason == "stop"


def test_length_ends_an_answer_with_calls_too(scripted):
    scripted.engine.ending = "length"
    (choice,) = complete(scripted, f"<tool_call>{G}</tool_call>\nSo").choices
    assert choice.finish_reason == "length" and len(choice.message.tool_calls) == 1


def test_half_a_call_is_not_in_the_content(scripted):
    scripted.engine.ending = "length"
    for script, content, number in (
        (f"Well. <tool_call>{F[:-3]}", "Well.", 0),
        (f"<tool_call>{G}</tool_call>\n<tool_call>\n", None, 1),
        (f"<tool_call>{G[:9]}", None, 0),
    ):
        (choice,) = complete(scripted, script).choices
        message = choice.message
        assert (choice.finish_reason, message.content) == ("length", content)
        assert len(message.tool_calls or ()) == number
        streamed = accumulated(complete(scripted, script, stream=True))
        assert (streamed[0], len(streamed[1])) == (content or "", number)
        response = respond(scripted, script)
        texts = [item for item in contents_of(response.output) if isinstance(item, str)]
        assert "".join(texts) == (content or "") and response.status == "incomplete"


def test_every_choice_has_its_calls(scripted):
    answer = complete(scripted, G, n=2)
    ids = {choice.message.tool_calls[0].id for choice in answer.choices}
    assert len(ids) == 2
    reasons = [chunk.choices[0].finish_reason for chunk in complete(scripted, G, n=2, stream=True)]
    assert reasons.count("tool_calls") == 2


def test_tools_are_in_the_prompt(scripted):
    complete(scripted, "Hello.")
    prompt = scripted.engine.tokenizer.decode(scripted.engine.requests[-1][0])
    assert json.dumps(TOOLS[1]) in prompt
    complete(scripted, "Hello.", tool_choice="none")
    assert "<tools>" not in scripted.engine.tokenizer.decode(scripted.engine.requests[-1][0])


def test_openai_parses_the_stream(scripted):
    scripted.engine.script = f"<tool_call>{F}</tool_call>"
    with scripted.only_client.chat.completions.stream(**CHAT) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", CALL_F.arguments)


FLAT = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]


def respond(scripted, script, **options):
    scripted.engine.script = script
    options = {"model": "fake", "input": "Hi", "tools": FLAT} | options
    return scripted.only_client.responses.create(**options)


def contents_of(items):
    return [
        (item.name, item.arguments) if item.type == "function_call" else item.content[0].text
        for item in items
    ]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"<tool_call>\n{F}\n</tool_call>", [CALL_F]),
        (f"Well.\n<tool_call>{F}</tool_call>\n<tool_call>{G}</tool_call>",
         ["Well.", CALL_F, CALL_G]),
        (f"{G}; {F}", [CALL_G, CALL_F]),
        (f"One <tool_call>{F}</tool_call> two", ["One", CALL_F, "two"]),
        ("Hello.\n", ["Hello.\n"]),
        ("<tool_call>{bad}</tool_call>", ["<tool_call>{bad}</tool_call>"]),
    ],
)  # fmt: skip
def test_calls_of_responses_complete_and_streamed(scripted, script, expected):
    expected = [(e.name, e.arguments) if isinstance(e, ToolCall) else e for e in expected]
    response = respond(scripted, script)
    assert contents_of(response.output) == expected
    assert all(item.status == "completed" for item in response.output)
    assert [tool.name for tool in response.tools] == ["f", "g"]
    events = list(respond(scripted, script, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert events[-1].type == "response.completed" and contents_of(last.output) == expected
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.item for event in done] == last.output
    assert [event.output_index for event in done] == list(range(len(expected)))
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    assert added == [item.id for item in last.output]
    pieces = {identifier: "" for identifier in added}
    for event in events:
        if event.type.endswith(".delta"):
            pieces[event.item_id] += event.delta
    assert list(pieces.values()) == [
        piece if isinstance(piece, str) else piece[1] for piece in expected
    ]
    scripted.engine.script = script  # the client's own bookkeeping
    options = {"model": "fake", "input": "Hi", "tools": FLAT}
    with scripted.only_client.responses.stream(**options) as stream:
        assert contents_of(stream.get_final_response().output) == expected


def test_an_answer_of_no_text_is_an_empty_message(scripted):
    scripted.engine.ending = "length"
    response = respond(scripted, "\n")
    assert contents_of(response.output) == [""] and response.status == "incomplete"
    assert response.output[0].status == "incomplete"


def test_calls_and_results_of_responses_are_read(scripted):
    call = f"Well. <tool_call>{F}</tool_call>\n<tool_call>{G}</tool_call>"
    response = respond(scripted, call)
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": output}
        for item, output in zip(
            response.output[1:], ["5", [{"type": "input_text", "text": "none"}]], strict=True
        )
    ]
    user = {"role": "user", "content": "Hi"}
    respond(scripted, "So.", input=[user, *response.output, *outputs])
    read = scripted.engine.requests[-1][0]
    calls = [
        {"id": f"call_{name}", "type": "function",
         "function": {"name": call.name, "arguments": call.arguments}}
        for name, call in (("a", CALL_F), ("b", CALL_G))
    ]  # fmt: skip
    chat = [
        user,
        {"role": "assistant", "content": "Well.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_a", "content": "5"},
        {"role": "tool", "tool_call_id": "call_b", "content": "none"},
    ]
    complete(scripted, "So.", messages=chat)
    assert scripted.engine.requests[-1][0] == read


def test_choices_of_responses(scripted):
    script = f"<tool_call>{F}</tool_call><tool_call>{G}</tool_call>"
    call = respond(scripted, script, parallel_tool_calls=False)
    assert [item.name for item in call.output] == ["f"] and call.parallel_tool_calls is False
    none = respond(scripted, script, tool_choice="none")
    assert none.output_text == script
    for choice in ("required", {"type": "function", "name": "f"}):
        response = respond(scripted, script, tool_choice=choice)
        assert scripted.engine.requests[-1][1].grammar and response.tool_choice
    loose = [{**tool, "strict": False} for tool in FLAT]
    assert respond(scripted, script, tools=loose)
    assert scripted.engine.requests[-1][1].grammar is None
    assert respond(scripted, script) and scripted.engine.requests[-1][1].grammar


EXAMPLE = Path(__file__).parents[2] / "examples" / "agent_loop.py"


def test_example_of_an_agent_calls_its_tools(scripted, capsys, monkeypatch):
    if not EXAMPLE.is_file():
        pytest.skip("the examples are not beside these tests")
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    weather = call % ("get_weather", '{"city": "Paris"}')
    both = "\n".join((call % ("add", '{"a": 2, "b": 3}'), call % ("subtract", "{}")))
    scripted.engine.scripts = [weather, both, "Rain, and five."]
    monkeypatch.setattr("sys.argv", [str(EXAMPLE), f"{scripted.address}/v1"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == [
        'get_weather({"city": "Paris"}) = Rain in Paris',
        'add({"a": 2, "b": 3}) = 5',
        "subtract({}) = error: KeyError('subtract')",
        "Rain, and five.",
    ]
    prompt = scripted.engine.tokenizer.decode(scripted.engine.requests[-1][0])
    assert f"{weather}" in prompt and both in prompt
    assert "<tool_response>\n5\n</tool_response>\n<tool_response>\nerror" in prompt
    assert len(EXAMPLE.read_text().splitlines()) < 40


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tool_choice": "any"}, "tool_choice", "must be auto, none, required or a function's"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}},
         "tool_choice.function.name", "must be one of the tools (f, g), got 'h'"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "must be function"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "must be function, got 'custom'"),
        ({"tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
         "tools[0].function.parameters.type", "arguments are an object"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "must be true or false"),
    ],
)  # fmt: skip
def test_bad_tools_are_refused(scripted, change, param, words):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(scripted, "Hello.", stream=stream, **change)
        assert caught.value.body["param"] == param and words in caught.value.body["message"]


def test_special_markers_stay_in_the_text(serve, make_fake, bundled_tokenizer):
    fake = make_fake()
    fake.tokenizer = copy.deepcopy(bundled_tokenizer)
    fake.tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    with serve(fake).client() as client:
        for options, skips in (({}, False), ({"tool_choice": "none"}, True)):
            client.chat.completions.create(**CHAT, max_tokens=1, **options)
            assert fake.requests[-1][1].skip_special_tokens is skips


def test_a_pinned_beginning_is_read_once_and_never_evicted(start):
    options = {"heavy": 400, "recent": 16, "evict_every": 16, "max_prompt_tokens": 900}
    engine = h2okv.AsyncLLM("bundled", pin=("system", "tools"), prefix_cache=1 << 24, **options)
    served = start(engine, model_name="bundled", pin=("system", "tools"))
    try:
        client = served.client()
        system = {"role": "system", "content": "Be brief."}
        fields = {"model": "bundled", "tools": TOOLS, "max_tokens": 8, "temperature": 0}
        texts, cached = [], []
        for messages in (
            [system, USER],
            [system, USER],
            [system, USER, {"role": "assistant", "content": "Yes."}, USER],
        ):
            reply = client.chat.completions.create(messages=messages, **fields)
            texts.append(reply.choices[0].message)
            cached.append(reply.usage.prompt_tokens_details.cached_tokens)
        assert cached[0] == 0 < cached[1] <= cached[2] and texts[0] == texts[1]
        system["content"] = "Be brief. " * 150
        with pytest.raises(openai.BadRequestError, match="tokens are pinned and policy='h2o'"):
            client.chat.completions.create(messages=[system, USER], **fields)
        assert "never evicted: system, tools" in engine.describe()
    finally:
        served.stop()
