"""Answers that a grammar masks: JSON of a schema, and tool calls that a request demands."""

import copy
import json
import re
import sys

import jsonschema
import openai
import pytest

import h2okv
from h2okv.engine.outputs import GrammarTooLargeError
from h2okv.engine.structured import GrammarCompiler, json_grammar
from h2okv.prompts.chat_template import call_form
from h2okv.server.errors import as_api_error
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
        client.compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
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
        "/completions", body={**options, "prompt": "Hi", "response_format": FORMAT}, cast_to=object
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


# What llguidance would weaken in silence, or not survive, in a property that every value has.
UNENFORCEABLE = {
    "empty": ({"type": "integer", "minimum": 3, "maximum": 2}, "Unsatisfiable schema"),
    "pattern": ({"type": "string", "pattern": "[^\\s\\S]"}, "unsatisfiable"),
    "minimum": ({"type": "integer", "minimum": 1e30}, "minimum must have numbers within"),
    "maximum": ({"type": "number", "maximum": 10**30}, "maximum must have numbers within"),
    "exclusive": ({"type": "integer", "exclusiveMinimum": 2**53 + 1}, "exactly"),
    "const": ({"const": -(2**63)}, "exactly, got -9223372036854775808"),
    "enum": ({"enum": [[2**53 + 1]]}, "exactly, got 9007199254740993"),
    "keyword": ({"type": "string", "maxlength": 5}, "did you mean maxLength?"),
    "nullable": ({"type": "string", "nullable": True}, "not a keyword of JSON Schema"),
    "multiple": ({"type": "integer", "multipleOf": 10**6 + 3}, "multipleOf must be at most 65536"),
    "negative": ({"type": "integer", "multipleOf": -5}, "multipleOf must be greater than 0"),
}


@pytest.mark.parametrize(("inner", "words"), UNENFORCEABLE.values(), ids=UNENFORCEABLE)
def test_schemas_that_would_be_weakened_are_refused(client, inner, words):
    schema = {
        "type": "object",
        "properties": {"a": inner},
        "required": ["a"],
        "$defs": {"n": inner},
    }
    function = {"name": "f", "parameters": schema, "strict": True}
    stated = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    changes = [
        {"response_format": stated},
        {"response_format": {"type": "json_object", "schema": schema}},
        {"tools": [{"type": "function", "function": function}]},
        {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
    ]
    for change in changes:
        with pytest.raises(openai.BadRequestError) as caught:
            complete(client, **change)
        assert words in caught.value.body["message"]
        assert caught.value.body["param"].startswith([*change][0])
    with pytest.raises(ValueError, match=re.escape(words)):
        GrammarCompiler.compile(client.compiler, json_grammar(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^([a-z0-9]{1,63}\\.){1,127}$"},  # a host's name
        {"type": "string", "pattern": "^[({5]{100000}[^]]{9}\\({9}$"},
        {"type": "string", "minLength": 10**6, "maxLength": 2**31 - 1},
        {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
        {"type": "integer", "format": "int32"},
        {"type": "string", "format": "password"},
        {"type": "number", "multipleOf": 0.00025},
        {"type": "integer", "multipleOf": 86_400_000},
    ],
)
def test_great_numbers_that_cost_nothing_are_taken(compiler, schema):
    compiler.compile(json_grammar(schema))


@pytest.mark.parametrize("count", [100, 999])
def test_a_grammar_that_grows_too_large_is_the_clients_error(compiler, bundled_tokenizer, count):
    letters = f"[a-z]{{0,{count}}}"
    schema = {"type": "string", "pattern": f"^(({letters}){{0,{count}}}){{0,{count}}}$"}
    token_ids = bundled_tokenizer('"' + "abcdefgh" * 40, add_special_tokens=False)["input_ids"]
    with pytest.raises(GrammarTooLargeError, match="give a simpler one") as caught:
        compiler.compile(json_grammar(schema)).mask(token_ids)
    assert as_api_error(caught.value).status == 400


@pytest.mark.parametrize(
    ("stated", "param", "words"),
    [
        ({"type": "xml"}, "response_format.type", "must be text, json_object or json_schema"),
        ("json", "response_format", "must be an object"),
        ({"type": "json_schema"}, "response_format.json_schema", "is missing"),
        ({"type": "json_schema", "json_schema": {"name": "a"}},
         "response_format.json_schema.schema", "is missing; give a JSON schema"),
        ({"type": "json_schema", "schema": SCHEMA}, "response_format.schema", "is not known"),
        ({"type": "json_object", "schema": "a"}, "response_format.schema", "must be a JSON schema"),
        ({"type": "text", "schema": SCHEMA}, "response_format.schema", "is not known"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "regex": "a"}},
         "response_format.json_schema.regex", "is not known"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": 1}},
         "response_format.json_schema.strict", "must be true or false"),
    ],
)  # fmt: skip
def test_bad_formats_are_refused(client, stated, param, words):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, response_format=stated)
    assert caught.value.body["param"] == param and words in caught.value.body["message"]
    if stated in ("json", {"type": "xml"}) or param == "response_format.json_schema":
        return
    flat = {"type": stated["type"], **stated.get("json_schema", stated)}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="fake", input="Hi", text={"format": {**flat, "regex": "a"}})
    assert caught.value.body["param"].startswith("text.format.")


def test_a_json_object_may_have_a_schema(client):
    stated = {"type": "json_object", "schema": SCHEMA}
    text = complete(client, response_format=stated).choices[0].message.content
    jsonschema.validate(json.loads(text), SCHEMA)


def test_remedy_without_the_package(client, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for change in ({"response_format": FORMAT}, {"tools": TOOLS, "tool_choice": "required"}):
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


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("form", WRITTEN)
def test_an_answer_may_end_after_each_call(compiler, bundled_tokenizer, form, is_parallel):
    """Whitespace promises no further call, which models would have to make for it."""
    first, second, separator = WRITTEN[form]
    for choice in ("required", {"name": "f"}):
        grammar = answer_grammar(None, TOOLS, choice, is_parallel, CallSyntax(form, {}))
        may_go_on = is_parallel and choice == "required"
        assert fits(compiler, bundled_tokenizer, grammar, first.removesuffix("\n</tool_call>"))
        for end in ("", "\n", " ", "\n\n"):
            assert fits(compiler, bundled_tokenizer, grammar, first + end)
            both = f"{first}{end or separator}{second}"
            assert fits(compiler, bundled_tokenizer, grammar, f"{both}\n") is may_go_on
        assert not fits(compiler, bundled_tokenizer, grammar, f"{first}\nAnd")


@pytest.mark.parametrize("is_special", [False, True])
def test_markers_that_are_tokens(bundled_tokenizer, is_special):
    tokenizer = copy.deepcopy(bundled_tokenizer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=is_special)
    syntax = CallSyntax.of(tokenizer)
    assert len(syntax.marker_tokens) == 2 and syntax.has_special_markers is is_special
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    grammar = answer_grammar(None, TOOLS, "required", True, syntax)
    assert fits(compiler, tokenizer, grammar, "\n".join(WRITTEN["hermes"][:2]))


def strict_tools(strict=True):
    return [{"type": "function", "function": {**TOOLS[0]["function"], "strict": strict}}, TOOLS[1]]


@pytest.fixture(scope="module", params=["text", "token", "special"])
def marked(request, bundled_tokenizer):
    """Return a tokenizer whose markers are texts, tokens, or special tokens."""
    tokenizer = copy.deepcopy(bundled_tokenizer)
    if request.param != "text":
        markers = ["<tool_call>", "</tool_call>", "<|python_tag|>"]
        tokenizer.add_tokens(markers, special_tokens=request.param == "special")
    return tokenizer, GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def check_request(marked, text, **fields):
    tokenizer, compiler = marked
    request = ChatRequest({"model": "fake", "messages": [USER], **fields})
    grammar = request.grammar(CallSyntax.of(tokenizer))
    return grammar is None or fits(compiler, tokenizer, grammar, text)


BARE = (
    '{"name": "f", "arguments": %s}', '{"name":"f","parameters":%s}',
    '\n```json\n{"name": "f", "arguments": %s}\n```', '[{"name": "f", "arguments": %s}]',
    '{"type": "function", "name": "f", "parameters": %s}',
    '<|python_tag|>{"name": "f", "arguments": %s}',
    '{"name": "the \\"g\\"", "arguments": {}}; {"name": "f", "arguments": %s}',
    '[{"name": "the \\"g\\"", "arguments": {}}, {"name": "f", "arguments": %s}]',
    '[{"name": "the \\"g\\"", "arguments": {}}]\n{"name": "f", "arguments": %s}',
    "<tool_call>\n{\"name\": \"f\", \"arguments\": %s}\n</tool_call>",
    "Well, {}:\n<tool_call>{\"name\": \"f\", \"arguments\": %s}</tool_call>",
    '<tool_call>{"name": "the \\"g\\"", "arguments": {}}</tool_call>{"name": "f", "arguments": %s}',
)  # fmt: skip


@pytest.mark.parametrize("form", BARE)
def test_strict_binds_the_arguments_of_every_form_of_call(marked, form):
    """What the parser reads as a call has arguments that fit, and may go on as without strict."""
    right, wrong = form % F, form % F.replace("22", "23")
    calls = [*(parser := ToolCallParser()).add(right), *parser.end()]
    assert ToolCall("f", F) in calls
    for end in ("", "\n", "\n\nThat is all.", f"\n{BARE[0] % F}"):
        assert check_request(marked, right + end, tools=strict_tools())
    for text in (wrong, f"{right}\n{wrong}", f"{right}\n{BARE[-3] % F.replace('22', '23')}"):
        assert not check_request(marked, text, tools=strict_tools())
        assert check_request(marked, text, tools=strict_tools(strict=False))
        assert check_request(marked, text, tools=strict_tools(), tool_choice="none")
    assert not check_request(
        marked, f"{right}\n{right}", tools=strict_tools(), parallel_tool_calls=False
    )


@pytest.mark.parametrize(
    "text",
    ["Hello.\n", "", '{"name": "f"}', '{"name": "f", "age": 5}', '{"name": "h", "arguments": 5}',
     'So {"name": "f", "arguments": 5}', "[1, 2]", "```json\n{}\n```", '{"city": "Paris"}',
     "<tool>", '<|python_tag|>search.call(query="a")'],
)  # fmt: skip
def test_strict_changes_no_text(marked, text):
    assert check_request(marked, text, tools=strict_tools())


UNBOUND = (
    '{"arguments": %s, "name": "f"}', '[{"parameters": %s, "name": "f"}]',
    '{"type": "function", "arguments": %s, "name": "f"}',
    '{"name": "the \\"g\\"", "arguments": {}}; {"arguments": %s, "name": "f"}',
    '{"name": "f", "age": 5, "arguments": %s}', '{"name": "f", "id": "1", "arguments": %s}',
    '{"type": "object", "name": "f", "arguments": %s}',
    '<|python_tag|>{"function": {"name": "f", "arguments": %s}}',
    '{"name": "h", "arguments": %s, "name": "f"}',
    '{"id": "1", "n\\u0061me": "f", "arguments": %s}',
    '{"name": "\\u0066", "arguments": %s}', '{"name": "f", "argument\\u0073": %s}',
    '<|python_tag|>{"function": {"name": "f", "arguments": {}}, "a": %s}',
)  # fmt: skip


@pytest.mark.parametrize("form", UNBOUND)
def test_what_strict_does_not_bind_is_no_call(marked, form):
    wrong = form % F.replace("22", "23")
    fields = {"messages": [USER], "model": "fake"}
    strict = ChatRequest({**fields, "tools": strict_tools()})
    free = ChatRequest({**fields, "tools": strict_tools(strict=False)})
    assert "f" in names_called(free, wrong)
    assert not check_request(marked, wrong, tools=strict_tools()) or (
        "f" not in names_called(strict, wrong)
    )
    # Beside a free format the grammar takes any object.
    for tools in (strict_tools(), strict_tools(strict=False)):
        fields |= {"response_format": {"type": "json_object"}, "tools": tools}
        called = names_called(ChatRequest(fields), wrong)
        assert "f" not in called or not tools[0]["function"]["strict"]
    if form.find("name") > form.find("%s"):  # the model has to write the name first
        assert not check_request(marked, wrong, tools=strict_tools())
    for written in BARE:
        assert "f" in names_called(strict, written % F)


def names_called(request, text):
    parser = ToolCallParser(**request.call_options)
    pieces = [*parser.add(text), *parser.end()]
    return [piece.name for piece in pieces if isinstance(piece, ToolCall)]


def test_a_marker_leads_to_a_call(marked):
    for text in ("<tool_call>", "<tool_call>\n{", "<tool_call>Hello"):
        assert not check_request(marked, text, tools=strict_tools())


def test_calls_beside_a_schema_need_no_marker(marked):
    """An answer and a call may begin alike, and only a tool's name makes it a call."""
    person = {
        "type": "object",
        "properties": {"name": {"$ref": "#/$defs/s"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
        "$defs": {"s": {"type": "string"}},
    }
    stated = {"type": "json_schema", "json_schema": {"name": "a", "schema": person}}
    tools, wrong = strict_tools(), F.replace("22", "23")
    bare, hermes = BARE[0], BARE[-3]
    for text in ('{"name": "Anna", "age": 31}', '{"name": "f", "age": 31}', bare % F, hermes % F):
        assert check_request(marked, text, tools=tools, response_format=stated)
        assert check_request(marked, text, tools=tools, response_format=stated) and not (
            check_request(marked, f"{text} And", tools=tools, response_format=stated)
        )
    for text in (bare % wrong, hermes % wrong):
        assert not check_request(marked, text, tools=tools, response_format=stated)
        free = {"tools": strict_tools(strict=False), "response_format": stated}
        assert check_request(marked, text, **free)
    for text in ("Hello", '{"name": "h", "arguments": {}}', '{"age": 31}'):
        assert not check_request(marked, text, tools=tools, response_format=stated)


@pytest.mark.parametrize("form", [BARE[0], BARE[1], BARE[0].replace("}", ', "id": 1}')])
def test_strict_beside_a_format_that_takes_every_object(marked, form):
    """What the format takes but the function's schema does not is an answer, not a call."""
    stated = {"tools": strict_tools(), "response_format": {"type": "json_object"}}
    request = ChatRequest({"model": "fake", "messages": [USER], **stated})
    wrong = F.replace("22", "23")
    for arguments, names in ((F, ["f"]), (wrong, []), ("{}", []), ('{"size": 22}', [])):
        assert check_request(marked, form % arguments, **stated)
        assert names_called(request, form % arguments) == names


ONE_OF = [
    ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"type": "null"}],
      "discriminator": {"propertyName": "kind"},
      "$defs": {name: {"type": "object", "required": ["kind"], "additionalProperties": False,
                       "properties": {"kind": {"const": name},
                                      name: {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}}
                for name in "ab"}},
     ['{"kind": "a"}', '{"kind": "b", "b": {"kind": "a", "a": null}}', "null"],
     ["{}", '{"kind": "a", "b": null}', '{"kind": "b", "b": {"kind": "b"}}']),
    ({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
      "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
     ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 1}'], ["{}", '{"c": 1}']),
    ({"type": "string", "oneOf": [{"const": "a", "title": "A"}, {"enum": ["b", "c"]}]},
     ['"a"', '"c"'], ['"d"']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), ONE_OF)
def test_one_of_is_any_of(compiler, bundled_tokenizer, schema, right, wrong):
    for text in right:
        assert fits(compiler, bundled_tokenizer, json_grammar(schema), text)
    for text in wrong:
        assert not fits(compiler, bundled_tokenizer, json_grammar(schema), text)


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
