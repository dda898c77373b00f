import json

import pytest

from h2okv.evaluation.stream_data import (
    ConversationSource,
    Message,
    TextPiece,
    TextSource,
    chat_pieces,
)

VOCAB = 4096
TWO_TURNS = (Message("user", "one"), Message("user", " two "))
RECORDED = (
    Message("system", "be kind"),
    Message("user", "one"),
    Message("assistant", "yes"),
    Message("user", "two"),
    Message("user", "three"),
    Message("assistant", "no"),
)


def test_without_a_template(plain_tokenizer):
    assert chat_pieces(plain_tokenizer, TWO_TURNS) == [
        TextPiece("User: one\n\nAssistant:", True),
        TextPiece("\n\nUser:  two \n\nAssistant:", True),
    ]
    assert chat_pieces(plain_tokenizer, RECORDED) == [
        TextPiece("be kind\n\nUser: one\n\nAssistant: yes\n\nUser: two\n\nAssistant:", True),
        TextPiece("\n\nUser: three\n\nAssistant: no\n\n", False),
    ]


def test_pieces_and_answers_together_are_what_the_template_makes(chat_tokenizer):
    first, second = chat_pieces(chat_tokenizer, TWO_TURNS)
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "ANSWER"},
        {"role": "user", "content": " two "},
    ]
    whole = chat_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert f"{first.text}ANSWER{second.text}" == whole


def test_a_template_that_refuses_or_forgets(chat_tokenizer):
    chat_tokenizer.chat_template = "{{ raise_exception('no system messages here') }}"
    with pytest.raises(ValueError, match="refuses the conversation .*no system messages here"):
        chat_pieces(chat_tokenizer, RECORDED)
    chat_tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(ValueError, match="leaves out earlier answers"):
        chat_pieces(chat_tokenizer, TWO_TURNS)


@pytest.fixture
def conversations(tmp_path):
    path = tmp_path / "chats.jsonl"
    lines = [{"turns": ["one", "two"]}, {"turns": ["three"]}]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def test_special_tokens_stand_once_at_a_conversations_start(
    conversations, plain_tokenizer, chat_tokenizer
):
    bos = plain_tokenizer.bos_token_id
    source = ConversationSource(conversations, plain_tokenizer, VOCAB)
    found = [[piece.ids.tolist().count(bos) for piece in source[i]] for i in range(len(source))]
    assert found == [[1, 0], [1]]
    assert source[1][0].ids[0] == bos
    # A template writes them itself; this one marks each message's end.
    source = ConversationSource(conversations, chat_tokenizer, VOCAB)
    assert source[0][0].ids.tolist().count(bos) == 1
    assert source[0][0].ids[0] != bos
    assert source[0][0].answers


def test_the_content_decides_what_a_source_is(conversations, plain_tokenizer, tmp_path):
    one = ConversationSource(conversations, plain_tokenizer, VOCAB)
    other = tmp_path / "other.jsonl"
    other.write_text('{"turns": ["one", "three"]}', encoding="utf-8")
    assert one.digest != ConversationSource(other, plain_tokenizer, VOCAB).digest
    a, b, c = (TextSource.of_text(text, plain_tokenizer, VOCAB) for text in ("one", "one", "two"))
    assert a.digest == b.digest != c.digest


def test_a_text_begins_as_the_tokenizer_lets_it(plain_tokenizer):
    source = TextSource.of_text("It was late.", plain_tokenizer, VOCAB)
    assert source.ids[0] == plain_tokenizer.bos_token_id
    assert source.num_tokens == len(source.ids) - 1
    assert plain_tokenizer.decode(source.ids[1:].tolist()) == "It was late."


def test_a_tokenizer_of_another_model(plain_tokenizer):
    with pytest.raises(ValueError, match=r"the model knows only 50; get the model again"):
        TextSource.of_text("It was late.", plain_tokenizer, 50)
