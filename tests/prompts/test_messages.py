"""Messages as clients write them, and the texts that chat templates make of them."""

import copy

import pytest
from transformers import AutoTokenizer

from h2okv.assets import bundled_model_path
from h2okv.prompts.chat_template import ChatTemplateError, chat_text, encode, message_spans
from h2okv.prompts.messages import Conversation, read_conversation, read_messages, read_tool
from h2okv.prompts.readers import FieldError

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = {"role": "user", "content": "Hi"}
BEGUN = {"role": "assistant", "content": "The capital is"}
_DATA = "data:image/png;base64,iVBORw=="
_URL = "[0].content[0].image_url.url"
IMAGES = [
    (_URL, {"url": "http://example.org/a.png"}, "='http://example.org/a.png' is not a data URL"),
    (_URL, {"url": "file:///etc/passwd"}, "nothing is fetched; give data:image/png;base64"),
    (_URL, {"url": None}, "is missing; give data:"),
    (_URL, {"url": 5}, "=5 is not a data URL"),
    (_URL, {"url": "data:text/html;base64,AAAA"}, "is not an image in base64 (PNG, JPEG"),
    (_URL, {"url": "data:image/svg+xml;base64,AAAA"}, "is not an image in base64"),
    (_URL, {"url": "data:image/png,AAAA"}, "is not an image in base64"),
    (_URL, {"url": "data:image/png;base64,A*A"}, "is not base64"),
    (_URL, {"url": "data:image/png;base64," + "A" * (30 << 20)}, "at most 20,971,520 bytes"),
    ("[0].content[0].image_url", None, "is missing; give data:"),
    ("[0].content[0].image_url", ["a"], "=['a'] is not a data URL"),
]


@pytest.fixture(scope="module")
def plain():
    return AutoTokenizer.from_pretrained(bundled_model_path())


@pytest.fixture(scope="module")
def templated(plain):
    tokenizer = copy.deepcopy(plain)
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "developer", "content": "Hi"}, {"role": "system", "content": "Hi"}),
        ({"role": "user", "content": None}, {"role": "user", "content": ""}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": None, "refusal": "No."},
         {"role": "assistant", "content": "No."}),
        ({**USER, "name": "bob"}, {**USER, "name": "bob"}),
        ({**USER, "name": None, "tool_calls": None, "tool_call_id": "", "mood": None}, USER),
        ({**USER, "cache_control": {"type": "ephemeral"}, "annotations": [], "id": "m-1"}, USER),
        ({**BEGUN, "reasoning_content": None, "audio": None, "function_call": None}, BEGUN),
        ({**BEGUN, "reasoning_content": "Hm."}, {**BEGUN, "reasoning_content": "Hm."}),
        ({**BEGUN, "provider_specific_fields": {"refusal": None}}, BEGUN),
        ({"type": "message", "status": "completed", **BEGUN}, BEGUN),
        ({"role": "user", "content": [
            {"type": "text", "text": "H", "cache_control": {"type": "ephemeral"}, "mood": None},
            {"type": "input_text", "text": "i"}]}, USER),
        ({"role": "user", "content": ["H", {"type": "text", "text": "i"}]}, USER),
        ({"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "output_text", "text": "The capital is", "annotations": [], "logprobs": []}]},
         BEGUN),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
         {"role": "assistant", "content": "No."}),
    ],
)  # fmt: skip
def test_messages_that_are_read(message, expected):
    assert read_messages([message]) == [expected]


TOOLS = "calls are given as tool_calls, and results as messages of role tool"


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 5}'}}
READ_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 5}}}


def called(arguments):
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    (message,) = read_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    return message["tool_calls"][0]["function"]["arguments"]


def test_tool_calls_and_their_results_are_read():
    begun = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 0}]}
    answered = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "4"}]}
    assert read_messages([begun, answered]) == [
        {"role": "assistant", "content": "", "tool_calls": [READ_CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ]
    assert called("") == called(None) == called({}) == {}
    # What a model wrote badly is still its message.
    for text in ("{", "5", '{"a": NaN}', "[" * 100_000):
        assert called(text) == text


FUNCTION = {"name": "f", "description": "Add.", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


def test_tools_are_read_without_hints():
    tools = [{**TOOL, "function": {**FUNCTION, "strict": True}, "cache_control": {}}]
    fields = {"messages": [USER], "tools": tools}
    assert read_conversation(fields).tools == [TOOL]
    assert read_conversation({**fields, "tool_choice": "none"}).tools == []
    assert read_conversation({"messages": [USER], "tools": None}).tools == []


@pytest.mark.parametrize(
    ("tools", "path", "words"),
    [
        ({"a": 5}, "", "must be a list of functions, got {"),
        ([5], "[0]", " must be an object, got 5"),
        ([{"type": "web_search"}], "[0].type", "must be function, got 'web_search'"),
        ([{"type": "function"}], "[0].function", " is missing"),
        ([{"function": {"description": "a"}}], "[0].function.name", " is missing"),
        ([TOOL, {"function": {"name": ""}}], "[1].function.name", "not empty, got ''"),
        ([{"function": {**FUNCTION, "parameters": []}}], "[0].function.parameters", "JSON schema"),
        ([{"function": {**FUNCTION, "strict": 5}}], "[0].function.strict", "true or false"),
        (
            [{"function": {**FUNCTION, "description": "\ud800"}}],
            "[0].function.description",
            "half of a surrogate",
        ),
    ],
)
def test_tools_that_are_refused_by_their_place(tools, path, words):
    for choice in ("auto", "none"):
        with pytest.raises(FieldError) as caught:
            read_conversation({"messages": [USER], "tools": tools, "tool_choice": choice})
        assert caught.value.name == f"tools{path}" and words in str(caught.value)


TEMPLATE_OF_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.arguments.a }}){% endfor %}"
    "{% endfor %}<assistant>"
)
BEHIND = (
    "{% for m in messages %}<{{ m.role }}>{% if tools and loop.last %}{{ tools | tojson }}"
    "{% endif %}{{ m.content }}{% endfor %}<assistant>"
)
CHAT = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "4"}, {"role": "tool", "content": "7"}, USER]  # fmt: skip


def test_tools_go_to_a_template_that_takes_them(plain):
    tokenizer = copy.deepcopy(plain)
    tokenizer.chat_template = TEMPLATE_OF_TOOLS
    text = chat_text(tokenizer, read_conversation({"messages": CHAT, "tools": [TOOL]}))
    start = '[{"type": "function", "function": {"name": "f", "description": "Add.", "parameters":'
    assert text.startswith(start)
    assert text.endswith("<user>Hi<assistant>(5)<tool>4<tool>7<user>Hi<assistant>")


def test_tools_are_written_out_for_a_template_without_them(templated, plain):
    results = "<tool_response>\n4\n</tool_response>\n<tool_response>\n7\n</tool_response>\nHi"
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 5}}\n</tool_call>'
    chat = read_conversation({"messages": CHAT, "tools": [TOOL]})
    text = chat_text(templated, chat)
    assert text.startswith("<system>You may call functions") and str(FUNCTION["name"]) in text
    assert text.endswith(f"</s><user>Hi</s><assistant>{call}</s><user>{results}</s><assistant>")
    assert chat_text(plain, chat).endswith(
        f"\n\nUser: Hi\n\nAssistant: {call}\n\nUser: {results}\n\nAssistant:"
    )
    system = {"role": "system", "content": "Be brief."}
    text = chat_text(templated, read_conversation({"messages": [system, USER], "tools": [TOOL]}))
    assert text.startswith("<system>Be brief.\n\nYou may") and text.count("<system>") == 1


def test_no_message_is_continued_within_its_calls(templated):
    messages = [USER, {"role": "assistant", "content": "Well", "tool_calls": [CALL]}]
    assert chat_text(templated, read_conversation({"messages": messages})).endswith("<assistant>")
    with pytest.raises(FieldError, match="cannot continue a message with tool_calls"):
        read_conversation({"messages": messages, "continue_final_message": True})


@pytest.mark.parametrize(
    ("messages", "path", "words"),
    [
        ([], "", " is empty; give at least one"),
        ([{"type": "reasoning", "summary": []}], "", " is empty; give at least one"),
        (5, "", "must be a list of {"),
        (["Hi"], "[0]", "must be a message such as {"),
        ([USER, {"content": "Hi"}], "[1].role", " is missing"),
        ([{"role": "user"}], "[0].content", " is missing"),
        ([{"role": "robot", "content": "Hi"}], "[0].role", "assistant or tool, got 'robot'"),
        ([{"role": ["user"], "content": "Hi"}], "[0].role", "got ['user']"),
        ([USER, {"role": "tool", "tool_call_id": 4, "content": "4"}], "[1].tool_call_id", "got 4"),
        ([USER, {"role": "tool", "tool_call_id": "c"}], "[1].content", " is missing"),
        ([{**USER, "tool_call_id": "c"}], "[0].tool_call_id", "is for messages of role tool"),
        ([{**USER, "tool_calls": [CALL]}], "[0].tool_calls", "is for messages of role assistant"),
        ([{"role": "function", "name": "f", "content": "4"}], "[0].role", "got 'function'"),
        ([{**BEGUN, "tool_calls": [{"id": "c"}]}], "[0].tool_calls[0].function", " is missing"),
        ([{**BEGUN, "tool_calls": "f()"}], "[0].tool_calls", "must be a list of tool calls"),
        ([{**BEGUN, "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
         "[0].tool_calls[0].function.arguments", "must be JSON in a string, got 5"),
        ([{**BEGUN, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]}],
         "[0].tool_calls[0].function.arguments", "half of a surrogate pair"),
        ([{**BEGUN, "function_call": {"name": "f"}}], "[0].function_call", TOOLS),
        ([{"type": "image_generation"}], "[0].type", "must be message, function_call, "),
        ([{"type": "item_reference", "id": "m"}], "[0].type", "got 'item_reference'"),
        ([{"role": "user", "content": [{"type": "tool_result", "content": "4"}]}],
         "[0].content[0].type", "or image, got 'tool_result'"),
        ([{"role": "user", "content": 4}], "[0].content", "must be a text, or a list of parts"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}],
         "[0].content[0].type", "or image, got 'input_audio'"),
        ([{"role": "user", "content": [{"type": ["a"]}]}], "[0].content[0].type", "got ['a']"),
        *(
            ([{"role": "user", "content": [{"type": "image_url", "image_url": url}]}], path, words)
            for path, url, words in IMAGES
        ),
        ([{"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]}],
         "[0].content[0].image", "must be an image of Pillow"),
        ([{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}],
         "[0].content[0].file_id", "is not known; leave it out"),
        ([{**BEGUN, "content": [{"type": "image_url", "image_url": {"url": _DATA}}]}],
         "[0].content[0].image_url.url", "is for messages of role user, got role='assistant'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "[0].content[0].text", " is missing"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "mood": "good"}]}],
         "[0].content[0].mood", "is not known"),
        ([{**USER, "mood": "good"}], "[0].mood", "is not known; leave it out"),
        ([{**USER, "name": 4}], "[0].name", "must be a text, got 4"),
        ([{**BEGUN, "audio": {"id": "a"}}], "[0].audio", "only text is supported"),
        ([{"role": "user", "content": "\ud800"}], "[0].content", "half of a surrogate pair"),
    ],
)  # fmt: skip
def test_invalid_messages_are_refused_with_their_path(messages, path, words):
    with pytest.raises(FieldError) as caught:
        read_messages(messages)
    assert caught.value.name == path and words in str(caught.value)
    with pytest.raises(FieldError, match="messages") as caught:
        read_conversation({"messages": messages})
    assert caught.value.name == f"messages{path}"


SWITCHES = [
    ({}, "The capital is"),
    ({"continue_final_message": True}, "The capital is"),
    ({"continue_final_message": True, "add_generation_prompt": False}, "The capital is"),
    ({"add_generation_prompt": False}, "The capital is"),
    ({"chat_template_kwargs": {"continue_final_message": True}}, "The capital is"),
    ({"add_generation_prompt": True}, "The capital is</s><assistant>"),
    ({"continue_final_message": False}, "The capital is</s><assistant>"),
    ({"chat_template_kwargs": {"add_generation_prompt": True}}, "The capital is</s><assistant>"),
    ({"continue_final_message": False, "add_generation_prompt": False}, "The capital is</s>"),
]


@pytest.mark.parametrize(("switches", "end"), SWITCHES, ids=str)
def test_a_final_assistant_message_is_continued(templated, plain, switches, end):
    chat = read_conversation({"messages": [USER, BEGUN], **switches})
    assert chat_text(templated, chat) == f"<user>Hi</s><assistant>{end}"
    assert encode(templated, chat) == encode(
        templated, f"<user>Hi</s><assistant>{end}", None, False
    )
    end = end.replace("</s>", "\n\n").replace("<assistant>", "Assistant:")
    assert chat_text(plain, chat) == f"User: Hi\n\nAssistant: {end}"


def test_other_ends_of_a_chat(templated, plain):
    def both(*messages, **switches):
        chat = read_conversation({"messages": messages, **switches})
        return chat_text(templated, chat), chat_text(plain, chat)

    assert both(USER) == ("<user>Hi</s><assistant>", "User: Hi\n\nAssistant:")
    assert both(USER, add_generation_prompt=False) == ("<user>Hi</s>", "User: Hi\n\n")
    assert both(USER, continue_final_message=True) == ("<user>Hi", "User: Hi")
    # Nothing to continue is an answer that begins.
    empty = {"role": "assistant", "content": None}
    assert both(USER, empty) == ("<user>Hi</s><assistant>", "User: Hi\n\nAssistant:")
    # Messages that were not parsed are rendered alike, without switches.
    assert chat_text(templated, [USER, BEGUN]) == "<user>Hi</s><assistant>The capital is"
    assert chat_text(templated, [USER, BEGUN], to_answer=False).endswith("is</s>")


def test_switches_that_contradict_each_other():
    with pytest.raises(FieldError, match="continue_final_message=true contradicts"):
        read_conversation(
            {"messages": [USER], "add_generation_prompt": True, "continue_final_message": True}
        )
    with pytest.raises(FieldError, match="add_generation_prompt must be true or false, got 'yes'"):
        read_conversation({"messages": [USER], "add_generation_prompt": "yes"})


def test_variables_of_a_template(plain):
    tokenizer = copy.deepcopy(plain)
    tokenizer.chat_template = "{{ mood }}{{ reasoning_effort }}{{ messages[0].content }}"
    fields = {"chat_template_kwargs": {"mood": "good"}, "reasoning_effort": "low"}
    assert chat_text(tokenizer, read_conversation({"messages": [USER], **fields})) == "goodlowHi"
    assert chat_text(tokenizer, read_conversation({"messages": [USER]})) == "Hi"
    for name, words in [("tokenize", "not a template's variable"), ("tools", "a field")]:
        with pytest.raises(FieldError, match=words) as caught:
            read_conversation({"messages": [USER], "chat_template_kwargs": {name: [{}]}})
        assert caught.value.name == f"chat_template_kwargs.{name}"
    with pytest.raises(FieldError, match="chat_template_kwargs must be an object, got 5"):
        read_conversation({"messages": [USER], "chat_template_kwargs": 5})
    with pytest.raises(ChatTemplateError):
        chat_text(tokenizer, Conversation([USER], template_kwargs={"messages": []}))


def test_pins_of_a_chat_that_is_continued(templated):
    chat = read_conversation({"messages": [USER, BEGUN]})
    ((first, stop),) = message_spans(templated, chat, ["user"])
    assert templated.decode(encode(templated, chat)[first:stop]).strip() == "Hi"


def test_pins_of_a_chat_without_a_user(templated):
    system = {"role": "system", "content": "Be kind."}
    chat = [system]
    ((first, stop),) = message_spans(templated, chat, ["system"])
    assert templated.decode(encode(templated, chat)[first:stop]).strip() == "Be kind."
    with pytest.raises(ValueError, match="pin='last_user' finds no last_user message"):
        message_spans(templated, chat, ["system", "last_user"])


@pytest.mark.parametrize("template", [None, CHATML, TEMPLATE_OF_TOOLS, BEHIND])
def test_pins_of_tools(plain, template):
    tokenizer = copy.deepcopy(plain)
    tokenizer.chat_template = template
    system = {"role": "system", "content": "Add."}  # as the tool's description
    chat = read_conversation({"messages": [system, *CHAT], "tools": [TOOL]})
    ids = encode(tokenizer, chat)

    def texts(*pin, **options):
        spans = message_spans(tokenizer, chat, pin, **options)
        return [tokenizer.decode(ids[start:stop]).strip() for start, stop in spans]

    (tools,) = texts("tools")
    assert FUNCTION["name"] in tools and "Hi" not in tools and "<assistant>" not in tools
    assert set(texts("tools", "system")) == {"Add.", tools}
    chat = read_conversation({"messages": [USER]})
    ids = encode(tokenizer, chat)
    assert texts("system", "tools", "user", needs_all=False) == ["Hi"]
    with pytest.raises(ValueError, match=r"pin='tools' finds no tools; leave it out, or give some"):
        texts("tools")


def test_a_message_may_have_the_type_of_its_text():
    for kind in ("message", "text", "input_text", None):
        assert read_messages([{**USER, "type": kind}]) == read_messages([USER])


@pytest.mark.parametrize(
    ("tool", "path"),
    [
        ({"type": "function", "function": {"name": "f", "input_schema": {"type": "object"}}},
         "tools[0].function.input_schema"),
        ({"type": "function", "function": {"name": "f"}, "parameters": {"type": "object"}},
         "tools[0].parameters"),
    ],
)  # fmt: skip
def test_fields_of_tools_that_would_be_dropped_are_refused(tool, path):
    with pytest.raises(FieldError, match="is not known; leave it out") as caught:
        read_tool(tool, ("tools", 0))
    assert caught.value.name == path
