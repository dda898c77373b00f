import pytest
from transformers import AutoTokenizer

pytestmark = pytest.mark.slow


def test_encode_puts_bos_first(tokenizer):
    ids = tokenizer.encode("Alice was beginning to get very tired.")
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in ids[1:]
    assert tokenizer.eos_token_id not in ids


def test_decode_gives_the_text_back(tokenizer):
    text = "“Well—” said he,\n\n  'no.'  Été 42 \N{SNOWMAN}"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_loads_again_with_transformers(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "The rabbit-hole went straight on."
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.bos_token == "<|bos|>"
    assert loaded.eos_token == "<|endoftext|>"


def test_pads_on_the_left(tokenizer):
    batch = tokenizer(["a", "a much longer text"], padding=True)
    assert batch["attention_mask"][0][0] == 0
    assert batch["input_ids"][0][-2] == tokenizer.bos_token_id
