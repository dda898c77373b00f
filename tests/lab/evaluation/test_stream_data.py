import json

import pytest

from h2okv.records import read_text_file
from h2okv_lab.evaluation.streaming import (
    ConversationSource,
    Message,
    TextSource,
    chat_segments,
    read_conversations,
)

VOCAB = 4096
TWO_TURNS = (Message("user", "one"), Message("user", " two "))
RECORDED = (
    Message("system", "be kind"), Message("user", "one"), Message("assistant", "yes"),
    Message("user", "two"), Message("user", "three"), Message("assistant", "no"),
)  # fmt: skip


def test_without_a_template(plain_tokenizer):
    assert chat_segments(plain_tokenizer, TWO_TURNS) == [
        ("User: one\n\nAssistant:", True),
        ("\n\nUser:  two \n\nAssistant:", True),
    ]
    assert chat_segments(plain_tokenizer, RECORDED) == [
        ("be kind\n\nUser: one\n\nAssistant: yes\n\nUser: two\n\nAssistant:", True),
        ("\n\nUser: three\n\nAssistant: no\n\n", False),
    ]


def test_segments_and_answers_together_are_what_the_template_makes(chat_tokenizer):
    first, second = chat_segments(chat_tokenizer, TWO_TURNS)
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "ANSWER"},
        {"role": "user", "content": " two "},
    ]
    expected = chat_tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert f"{first[0]}ANSWER{second[0]}" == expected


def test_a_chat_template_that_raises_or_drops_answers_is_refused(chat_tokenizer):
    chat_tokenizer.chat_template = "{{ raise_exception('no system messages here') }}"
    with pytest.raises(ValueError, match="does not take these messages .*no system messages here"):
        chat_segments(chat_tokenizer, RECORDED)
    chat_tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(ValueError, match="drops earlier answers"):
        chat_segments(chat_tokenizer, TWO_TURNS)


@pytest.fixture
def conversations(tmp_path):
    path = tmp_path / "chats.jsonl"
    lines = [{"turns": ["one", "two"]}, {"turns": ["three"]}]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def test_bos_appears_once_per_conversation(conversations, plain_tokenizer, chat_tokenizer):
    bos = plain_tokenizer.bos_token_id
    source = ConversationSource(conversations, plain_tokenizer, VOCAB)
    counts = [
        [segment.ids.tolist().count(bos) for segment in source[i]] for i in range(len(source))
    ]
    assert counts == [[1, 0], [1]]
    assert source[1][0].ids[0] == bos
    # A template writes them itself; this one marks each message's end.
    source = ConversationSource(conversations, chat_tokenizer, VOCAB)
    assert source[0][0].ids.tolist().count(bos) == 1
    assert source[0][0].ids[0] != bos
    assert source[0][0].answers


def test_a_text_begins_as_the_tokenizer_lets_it(plain_tokenizer):
    source = TextSource.of_text("It was late.", plain_tokenizer, VOCAB)
    assert source.ids[0] == plain_tokenizer.bos_token_id
    assert source.num_tokens == len(source.ids) - 1
    assert plain_tokenizer.decode(source.ids[1:].tolist()) == "It was late."


def test_a_tokenizer_of_another_model(plain_tokenizer):
    with pytest.raises(ValueError, match="token must be 0 to 49 for this model, got"):
        TextSource.of_text("It was late.", plain_tokenizer, 50)


GOOD = '{"turns": ["hello"]}'


@pytest.fixture
def write(tmp_path):
    def save(*lines):
        path = tmp_path / "chats.jsonl"
        path.write_text("\n".join(lines), encoding="utf-8")
        return path

    return save


def test_turns_and_messages(write):
    spoken = [("system", "be kind"), ("user", "one\u2028line"), ("assistant", "yes"), ("user", "?")]
    messages = [{"role": role, "content": content, "name": "x"} for role, content in spoken]
    path = write(
        json.dumps({"question_id": 81, "category": "writing", "turns": ["first", "second"]}),
        "",
        json.dumps({"messages": messages}, ensure_ascii=False),
        "",
    )
    turns, chat = read_conversations(path)
    assert turns == (Message("user", "first"), Message("user", "second"))
    assert chat == tuple(Message(*each) for each in spoken)


def test_mt_bench_is_read(shared):
    conversations = read_conversations(shared / "data" / "eval" / "mt_bench_question.jsonl")
    assert len(conversations) == 80
    assert {len(each) for each in conversations} == {2}
    assert conversations[0][0].content.startswith("Compose an engaging travel blog post")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"turns": ["a"', "is not JSON"), ("[" * 100_000, "nested too deeply"),
        ("[1, 2]", "is not a JSON object"), ('{"prompt": "a"}', "has neither turns nor messages"),
        ('{"turns": ["a"], "messages": []}', "has both turns and messages"),
        ('{"turns": []}', "turns must be a list with at least one entry"),
        ('{"turns": "a"}', "turns must be a list with at least one entry"),
        ('{"turns": ["a", 7]}', "turns[1] is not a text"),
        ('{"turns": ["a", "  "]}', "turns[1] is not a text"),
        ('{"turns": ["a\\ud800"]}', "turns[0] has half of a surrogate pair"),
        ('{"messages": ["a"]}', "messages[0] must be an object"),
        ('{"messages": [{"content": "a"}]}',
         "messages[0].role must be one of system, user, assistant, got None"),
        ('{"messages": [{"role": "tool", "content": "a"}]}',
         "messages[0].role must be one of system, user, assistant, got 'tool'"),
        ('{"messages": [{"role": "user"}]}', "messages[0].content is not a text"),
        ('{"messages": [{"role": "user", "content": [{}]}]}', "messages[0].content is not a text"),
        ('{"messages": [{"role": "system", "content": "a"}]}', "must have a message of the user"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}',
         "messages[0].role is 'assistant'"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}',
         "messages[1].role must not be 'system'"),
    ],
)  # fmt: skip
def test_a_malformed_line_is_named(write, line, complaint):
    path = write(GOOD, "", line)
    with pytest.raises(ValueError) as error:
        read_conversations(path)
    assert str(error.value).startswith(f"line 3 of '{path}'")
    assert complaint in str(error.value)


def test_a_binary_file_is_refused(tmp_path, write):
    with pytest.raises(ValueError, match="has no conversations|is empty"):
        read_conversations(write("", " "))
    with pytest.raises(ValueError, match="cannot be read"):
        read_text_file(tmp_path / "missing.txt")
    path = tmp_path / "latin.txt"
    path.write_bytes("abc ü".encode("latin-1"))
    with pytest.raises(ValueError, match=r"is not UTF-8 text \(byte 4\)"):
        read_text_file(path)
    path.write_bytes(b"\xef\xbb\xbfabc")
    assert read_text_file(path) == "abc"
