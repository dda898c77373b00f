import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from h2okv.engine.detokenizer import Detokenizer


def stream(tokenizer, prompt_ids, new_ids):
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    pieces = [detokenizer.add([token]) for token in new_ids]
    pieces.append(detokenizer.end())
    assert detokenizer.token_ids == list(new_ids)
    return [piece for piece in pieces if piece]


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level, with some whole words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog on the log "], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def metaspace_tokenizer(words):
    """Like a sentencepiece model: the decoder drops the space at the start of a text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(words, trainer=trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


class TestByteLevel:
    @settings(deadline=None)
    @example("über naïve 漢字 🤖🏽‍🚀 é")
    @example("\ufffd broken \ufffd")
    @given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
    def test_pieces_join_to_the_text_without_partial_characters(self, tokenizer, text):
        ids = tokenizer(text)["input_ids"]
        pieces = stream(tokenizer, tokenizer("a cat")["input_ids"], ids)
        assert "".join(pieces) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)

    def test_complete_words_are_emitted_at_once(self, tokenizer):
        ids = tokenizer("mat and log")["input_ids"]
        assert stream(tokenizer, [5], ids) == [tokenizer.decode([token]) for token in ids]

    def test_incomplete_character_is_emitted_at_the_end(self, tokenizer):
        half = tokenizer("é")["input_ids"][:1]
        assert stream(tokenizer, [5], half) == ["\ufffd"]

    def test_invalid_bytes_do_not_delay_later_text(self, tokenizer):
        broken = [tokenizer("é")["input_ids"][0], *tokenizer("cat")["input_ids"]]
        assert "".join(stream(tokenizer, [5], broken)) == "\ufffdcat"

    def test_special_tokens_are_skipped(self, tokenizer):
        ids = [*tokenizer("cat")["input_ids"], tokenizer.eos_token_id]
        assert "".join(stream(tokenizer, [5], ids)) == "cat"

    def test_no_tokens_give_no_text(self, tokenizer):
        assert stream(tokenizer, [5], []) == []


def test_spaces_with_a_decoder_that_drops_the_leading_one():
    text = "the cat sat on the mat and the dog sat on the log"
    tokenizer = metaspace_tokenizer([text] * 4)
    ids = tokenizer(text)["input_ids"]
    for split in range(1, len(ids)):
        shown = tokenizer.decode(ids[:split])
        assert shown + "".join(stream(tokenizer, ids[:split], ids[split:])) == text
