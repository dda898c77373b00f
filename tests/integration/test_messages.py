"""Messages as clients write them, and the texts that chat templates make of them."""

import copy

import pytest
from transformers import AutoTokenizer

from h2okv.assets import bundled_model_path
from h2okv.integration.chat_template import ChatTemplateError, chat_text, encode, message_spans
from h2okv.integration.messages import Conversation, FieldError, read_conversation, read_messages

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = {"role": "user", "content": "Hi"}
BEGUN = {"role": "assistant", "content": "The capital is"}


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


TOOLS = "tools are not supported yet"


@pytest.mark.parametrize(
    ("messages", "path", "words"),
    [
        ([], "", " is empty; give at least one"),
        ([{"type": "reasoning", "summary": []}], "", " is empty; give at least one"),
        ("Hi", "", "='Hi' does not fit; give a list"),
        (["Hi"], "[0]", "='Hi' is not a message"),
        ([USER, {"content": "Hi"}], "[1].role", " is missing"),
        ([{"role": "user"}], "[0].content", " is missing"),
        ([{"role": "robot", "content": "Hi"}], "[0].role", "='robot' does not fit; give one of"),
        ([{"role": ["user"], "content": "Hi"}], "[0].role", "does not fit"),
        ([USER, {"role": "tool", "tool_call_id": "c", "content": "4"}], "[1].role", TOOLS),
        ([{"role": "function", "name": "f", "content": "4"}], "[0].role", TOOLS),
        ([{**BEGUN, "tool_calls": [{"id": "c"}]}], "[0].tool_calls", TOOLS),
        ([{**BEGUN, "content": None, "function_call": {}, "tool_calls": [{}]}],
         "[0].tool_calls", TOOLS),
        ([{"type": "function_call", "call_id": "c", "name": "f"}], "[0]", TOOLS),
        ([{"type": "function_call_output", "output": "4"}], "[0]", TOOLS),
        ([{"type": "item_reference", "id": "m"}], "[0]", "only messages are supported"),
        ([{"role": "user", "content": [{"type": "tool_result", "content": "4"}]}],
         "[0].content", TOOLS),
        ([{"role": "user", "content": 4}], "[0].content", "=4 does not fit; give a text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}],
         "[0].content", "part of type 'image_url'; only text is supported"),
        ([{"role": "user", "content": [{"type": "text"}]}], "[0].content[0].text", "=None does"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "mood": "good"}]}],
         "[0].content[0].mood", "is not known"),
        ([{**USER, "mood": "good"}], "[0].mood", "is not known; leave it out"),
        ([{**USER, "name": 4}], "[0].name", "=4 does not fit"),
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
    with pytest.raises(FieldError, match="add_generation_prompt='yes' does not fit"):
        read_conversation({"messages": [USER], "add_generation_prompt": "yes"})


def test_variables_of_a_template(plain):
    tokenizer = copy.deepcopy(plain)
    tokenizer.chat_template = "{{ mood }}{{ reasoning_effort }}{{ messages[0].content }}"
    fields = {"chat_template_kwargs": {"mood": "good"}, "reasoning_effort": "low"}
    assert chat_text(tokenizer, read_conversation({"messages": [USER], **fields})) == "goodlowHi"
    assert chat_text(tokenizer, read_conversation({"messages": [USER]})) == "Hi"
    for name, words in [("tokenize", "not a template's variable"), ("tools", TOOLS)]:
        with pytest.raises(FieldError, match=words) as caught:
            read_conversation({"messages": [USER], "chat_template_kwargs": {name: [{}]}})
        assert caught.value.name == f"chat_template_kwargs.{name}"
    with pytest.raises(FieldError, match="chat_template_kwargs=5 does not fit"):
        read_conversation({"messages": [USER], "chat_template_kwargs": 5})
    with pytest.raises(ChatTemplateError):
        chat_text(tokenizer, Conversation([USER], template_kwargs={"messages": []}))


def test_pins_of_a_chat_that_is_continued(templated):
    chat = read_conversation({"messages": [USER, BEGUN]})
    ((first, stop),) = message_spans(templated, chat, ["user"])
    assert templated.decode(encode(templated, chat)[first:stop]).strip() == "Hi"
