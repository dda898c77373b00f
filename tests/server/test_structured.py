"""Answers that a grammar masks: JSON of a schema, and tool calls that a request demands."""

import copy
import json
import sys

import jsonschema
import openai
import pytest

import h2okv
from h2okv.engine.structured import GrammarCompiler, json_grammar
from h2okv.integration.tool_messages import call_form
from h2okv.server.protocol import ChatRequest
from h2okv.server.structured import CallSyntax, answer_grammar
from h2okv.server.tools import ToolCall, ToolCallParser

USER = {"role": "user", "content": "Hi"}
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": [1, 22, "ü"]}, "ok": {"type": "boolean"}},
    "required": ["size", "ok"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": 'the "g"'}},
]
CHAT = {"model": "fake", "messages": [USER], "max_tokens": 200, "seed": 5}


@pytest.fixture(scope="module")
def client(start, make_llama, bundled_tokenizer):
    """Start a server with a model of random weights, which writes anything that it may."""
    tokenizer = bundled_tokenizer
    model = make_llama()
    model.resize_token_embeddings(len(tokenizer))
    model.config.max_position_embeddings = 2048
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    engine = h2okv.AsyncLLM(model, tokenizer, heavy=64, recent=64, max_num_seqs=4)
    served = start(engine)
    with served.client() as client:
        yield client
    served.stop()


def complete(client, **options):
    return client.chat.completions.create(**{**CHAT, **options})


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_answers_fit_their_schema(client, temperature):
    options = {"temperature": temperature, "response_format": FORMAT, "n": 3}
    for choice in complete(client, **options).choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    texts = ["", "", ""]
    for chunk in complete(client, stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_no_bias_leaves_the_schema(client, bundled_tokenizer):
    (token,) = bundled_tokenizer("x", add_special_tokens=False)["input_ids"][-1:]
    biased = {"logit_bias": {str(token): 100}, "frequency_penalty": 1}
    (choice,) = complete(client, response_format=FORMAT, **biased).choices
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_any_json_object(client):
    schema_free = {"response_format": {"type": "json_object"}, "max_tokens": 40}
    text = complete(client, **schema_free).choices[0].message.content
    assert text.startswith("{")
    if not text.endswith("}"):  # as long as it may be, and still the beginning of an object
        with pytest.raises(json.JSONDecodeError):
            json.loads(text)


def test_other_routes_take_formats_too(client):
    options = {"model": "fake", "max_tokens": 200, "seed": 5}
    text = client.post(
        "/completions",
        body={**options, "prompt": "Hi", "response_format": FORMAT},
        cast_to=object,
    )["choices"][0]["text"]
    jsonschema.validate(json.loads(text), SCHEMA)
    response = client.responses.create(
        model="fake",
        input="Hi",
        max_output_tokens=200,
        text={"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    )
    jsonschema.validate(json.loads(response.output_text), SCHEMA)
    assert response.text.format.name == "a"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_demanded_calls_fit_their_tool(client, choice):
    for seed in range(4):
        answer = complete(client, tools=TOOLS, tool_choice=choice, seed=seed).choices[0]
        calls = answer.message.tool_calls
        assert calls and answer.message.content is None
        for call in calls if answer.finish_reason == "tool_calls" else ():
            arguments = json.loads(call.function.arguments)
            if call.function.name == "f":
                jsonschema.validate(arguments, SCHEMA)
            else:
                assert call.function.name == 'the "g"' and arguments == {}
        if choice != "required":
            assert [call.function.name for call in calls] == ["f"]
            assert answer.finish_reason == "tool_calls"


def test_one_demanded_call(client):
    options = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    for seed in range(4):
        answer = complete(client, seed=seed, **options).choices[0]
        assert len(answer.message.tool_calls) == 1 and answer.finish_reason == "tool_calls"


REFUSED = {
    "not": ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
    "ref": ({"$ref": "#/$defs/a"}, "Pointer '/$defs/a' does not exist"),
    "type": ({"type": "text"}, "Invalid type: text"),
    "pattern": ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
}


@pytest.mark.parametrize(("schema", "words"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_unsupported_schemas_are_refused_with_the_reason(client, schema, words, stream):
    schema = {"type": "object", "properties": {"a": schema}}
    stated = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for param, change in (
        ("response_format", {"response_format": stated}),
        ("tools", {"tools": [tool], "tool_choice": "required"}),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(client, stream=stream, **change)
        message = caught.value.body["message"]
        assert caught.value.body["param"] == param and message.startswith(f"{param}: ")
        assert words in message
    # Only a demanded call needs the schema.
    complete(client, tools=[tool], max_tokens=1)


@pytest.mark.parametrize(
    ("stated", "param", "words"),
    [
        ({"type": "xml"}, "response_format", "give a type of text, json_object, json_schema"),
        ("json", "response_format", "does not fit"),
        ({"type": "json_schema"}, "response_format.json_schema", "=None does not fit"),
        ({"type": "json_schema", "json_schema": {"name": "a"}},
         "response_format.json_schema.schema", "give a JSON schema"),
    ],
)  # fmt: skip
def test_bad_formats_are_refused(client, stated, param, words):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, response_format=stated)
    assert caught.value.body["param"] == param and words in caught.value.body["message"]


def test_remedy_without_the_package(client, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for change in (
        {"response_format": FORMAT},
        {"tools": TOOLS, "tool_choice": "required"},
    ):
        with pytest.raises(openai.BadRequestError, match=r"llguidance is not installed.*\[serve\]"):
            complete(client, **change)
    complete(client, tools=TOOLS, max_tokens=1)


def fits(compiler, tokenizer, grammar, text):
    mask = compiler.compile(grammar)
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for at, token in enumerate(token_ids):
        if not mask.mask(token_ids[:at])[token]:
            return False
    return bool(mask.mask(token_ids)[tokenizer.eos_token_id])


@pytest.fixture(scope="module")
def compiler(bundled_tokenizer):
    size, eos = len(bundled_tokenizer), bundled_tokenizer.eos_token_id
    return GrammarCompiler(bundled_tokenizer, size, [eos])


F, G = '{"size": 22, "ok": true}', "{}"
WRITTEN = {
    "hermes": (
        f'<tool_call>\n{{"name": "f", "arguments": {F}}}\n</tool_call>',
        '<tool_call>\n{"name": "the \\"g\\"", "arguments": {}}\n</tool_call>',
        "\n",
    ),
    "llama": (
        f'{{"name": "f", "parameters": {F}}}',
        '{"name": "the \\"g\\"", "parameters": {}}',
        "; ",
    ),
}


@pytest.mark.parametrize("form", WRITTEN)
def test_grammars_of_calls_take_what_the_parser_reads(compiler, bundled_tokenizer, form):
    syntax, tools = CallSyntax(form, {}), TOOLS
    first, second, separator = WRITTEN[form]
    both = f"{first}{separator}{second}"

    def check(text, schema=None, choice="required", is_parallel=True):
        grammar = answer_grammar(schema, tools, choice, is_parallel, syntax)
        return fits(compiler, bundled_tokenizer, grammar, text)

    assert check(first) and check(second) and check(both)
    assert not check(first.replace("22", "23")) and not check("Hello") and not check(F)
    assert not check(both, is_parallel=False) and check(first, is_parallel=False)
    assert check(first, choice={"name": "f"}) and not check(second, choice={"name": "f"})
    # A format and tools: one or the other.
    assert check(F, SCHEMA, "auto") and check(second, SCHEMA, "auto")
    assert not check("Hello", SCHEMA, "auto") and not check('{"size": 5}', SCHEMA, "auto")
    assert answer_grammar(None, tools, "auto", True, syntax) is None
    parser = ToolCallParser()
    calls = [ToolCall("f", F), ToolCall('the "g"', G)]
    assert [*parser.add(both), *parser.end()] == calls


@pytest.mark.parametrize("is_special", [False, True])
def test_markers_that_are_tokens(bundled_tokenizer, is_special):
    tokenizer = copy.deepcopy(bundled_tokenizer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=is_special)
    syntax = CallSyntax.of(tokenizer)
    assert len(syntax.marker_tokens) == 2 and syntax.has_special_markers is is_special
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    grammar = answer_grammar(None, TOOLS, "required", True, syntax)
    assert fits(compiler, tokenizer, grammar, "\n".join(WRITTEN["hermes"][:2]))


@pytest.mark.parametrize("is_special", [False, True])
def test_strict_arguments_of_calls_that_are_free(bundled_tokenizer, is_special):
    """Any text, and then calls, of which those to strict tools fit their schemas."""
    tokenizer = copy.deepcopy(bundled_tokenizer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=is_special)
    syntax = CallSyntax.of(tokenizer)
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    first, second, _ = WRITTEN["hermes"]
    body = {"model": "fake", "messages": [USER]}

    def check(text, strict=True, schema=None, **fields):
        tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": strict}}]
        request = ChatRequest(**body, tools=[*tools, TOOLS[1]], response_format=schema, **fields)
        grammar = request.grammar(syntax)
        return grammar is None or fits(compiler, tokenizer, grammar, text)

    wrong = first.replace("22", "23")
    assert check(wrong, strict=False) and check(wrong, tool_choice="none")
    for before in ("", "Well, {}:\n<tool\n"):
        assert check(f"{before}{first}") and check(f"{before}{first}\n{second}")
        assert check(f"{before}{second.replace('{}', '{1: 2}'.replace('1', chr(34) * 2))}")
        assert not check(f"{before}{wrong}") and not check(f"{before}{first}\n{wrong}")
        assert not check(f"{before}<tool_call>\n{{") and not check(f"{before}{first} And")
    assert check("Hello.\n") and check('{"name": "f"}')
    assert check(first, schema=FORMAT) and check(F, schema=FORMAT)
    assert not check(wrong, schema=FORMAT) and check(wrong, False, FORMAT)
    assert not check(f"{first}\n{second}", parallel_tool_calls=False)
    # JSON without a marker, which the grammar takes for text, is not a call.
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    request = ChatRequest(**body, tools=tools)
    assert not request.only_marked and request.grammar(syntax) and request.only_marked
    parser, text = ToolCallParser(only_marked=True), '{"name": "f", "arguments": {}}\n'
    segments = [*parser.add(text), *parser.add(first), *parser.end()]
    assert segments == [text.rstrip(), ToolCall("f", F)]
    # Without tokens of their own, a marker is text like any other.
    plain = CallSyntax.of(bundled_tokenizer)
    function = {**TOOLS[0]["function"], "strict": True}
    request = ChatRequest(**body, tools=[{"type": "function", "function": function}])
    assert request.grammar(plain) is None


def test_json_may_be_indented_but_not_padded(compiler, bundled_tokenizer):
    grammar = json_grammar(SCHEMA)
    for indent in (None, 2, 4, "\t"):
        text = json.dumps(json.loads(F), indent=indent)
        assert fits(compiler, bundled_tokenizer, grammar, text)
    assert fits(compiler, bundled_tokenizer, grammar, F.replace(" ", ""))
    assert not fits(compiler, bundled_tokenizer, grammar, F.replace(" ", "  "))


def test_a_mask_follows_rejected_tokens_back(compiler, bundled_tokenizer):
    tokenizer = bundled_tokenizer
    token_ids = tokenizer(F, add_special_tokens=False)["input_ids"]
    mask = compiler.compile(json_grammar(SCHEMA))
    masks = [mask.mask(token_ids[:at]) for at in range(len(token_ids) + 1)]
    assert mask.mask(token_ids[:2]).equal(masks[2])
    assert mask.copy().mask([]).equal(masks[0]) and mask.mask(token_ids).equal(masks[-1])
    # After its end there is nothing but the end.
    end = tokenizer.eos_token_id
    assert masks[-1].nonzero().flatten().tolist() == [end]
    assert mask.mask([*token_ids, end, end]).equal(masks[-1])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% for tool in tools %}<tool_call>{% endfor %}", "hermes"),
        ('{{ \'{"name": "\' + name + \'", "parameters": \' }}{{ tools }}', "llama"),
        ('Answer in the form {"name": name, "parameters": {}}. {{ tools }}', "llama"),
        ("{{ tools }}", "hermes"),
        (None, "hermes"),
    ],
)
def test_form_of_calls_is_that_of_the_template(bundled_tokenizer, template, form):
    tokenizer = copy.deepcopy(bundled_tokenizer)
    tokenizer.chat_template = template
    assert call_form(tokenizer) == form
