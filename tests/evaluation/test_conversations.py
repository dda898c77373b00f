import json

import pytest

from h2okv.evaluation.stream_data import Message, read_conversations
from h2okv.records import read_text_file

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


def test_mt_bench_as_it_is(shared):
    found = read_conversations(shared / "data" / "eval" / "mt_bench_question.jsonl")
    assert len(found) == 80
    assert {len(each) for each in found} == {2}
    assert found[0][0].content.startswith("Compose an engaging travel blog post")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"turns": ["a"', "is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[1, 2]", "is not a JSON object"),
        ('{"prompt": "a"}', "has neither turns nor messages"),
        ('{"turns": ["a"], "messages": []}', "has both turns and messages"),
        ('{"turns": []}', "turns is not a list with entries"),
        ('{"turns": "a"}', "turns is not a list with entries"),
        ('{"turns": ["a", 7]}', "turns[1] is not a text"),
        ('{"turns": ["a", "  "]}', "turns[1] is not a text"),
        ('{"turns": ["a\\ud800"]}', "turns[0] has half of a surrogate pair"),
        ('{"messages": ["a"]}', "messages[0] is not an object"),
        ('{"messages": [{"content": "a"}]}', "messages[0].role is None"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "messages[0].role is 'tool'"),
        ('{"messages": [{"role": "user"}]}', "messages[0].content is not a text"),
        ('{"messages": [{"role": "user", "content": [{}]}]}', "messages[0].content is not a text"),
        ('{"messages": [{"role": "system", "content": "a"}]}', "has no message of the user"),
        (
            '{"messages": [{"role": "assistant", "content": "a"}]}',
            "messages[0].role is 'assistant'",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}',
            "messages[1].role is 'system'",
        ),
    ],
)
def test_a_malformed_line_is_named(write, line, complaint):
    path = write(GOOD, "", line)
    with pytest.raises(ValueError) as error:
        read_conversations(path)
    assert str(error.value).startswith(f"line 3 of '{path}'")
    assert complaint in str(error.value)


def test_a_file_that_is_no_text(tmp_path, write):
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
