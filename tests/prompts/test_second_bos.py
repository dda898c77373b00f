"""A text that brings the token that all texts begin with gets no second one."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import h2okv
from h2okv.cli.app import run
from h2okv.engine.sampling_params import SamplingParams
from h2okv.models.loading import describe
from h2okv.offload.job import Prompt, TextCodec
from h2okv.prompts.chat_template import encode, message_spans
from h2okv.server.tokenization import PromptReader

WORDS = ["<unk>", "<s>", "</s>", "hello", "world"]


def make_tokenizer(template="<s> $A"):
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("<s>", 1), ("</s>", 2)]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@pytest.mark.parametrize(
    ("template", "text", "ids"),
    [
        ("<s> $A", "hello", [1, 3]),
        ("<s> $A", "<s>hello", [1, 3]),
        ("<s> $A", " <s> hello", [1, 3]),
        ("<s> $A", "<s><s>hello", [1, 1, 3]),  # its own second one is the writer's business
        ("<s> $A", "", [1]),
        ("<s> $A", "<s>", [1]),
        ("<s> $A </s>", "<s>hello", [1, 3, 2]),
        ("$A", "<s><s>hello", [1, 1, 3]),
        ("$A", "<s>hello", [1, 3]),
    ],
)
def test_a_second_bos_token_is_dropped(template, text, ids):
    tokenizer = make_tokenizer(template)
    assert encode(tokenizer, text) == ids
    expected_ids = [WORDS.index(word) for word in text.replace("<s>", "<s> ").split()]
    assert encode(tokenizer, text, special=False) == expected_ids


def test_pins_of_a_text_with_its_own():
    messages = [{"role": "system", "content": "<s>hello"}, {"role": "user", "content": "world"}]
    tokenizer = make_tokenizer()
    ids = encode(tokenizer, messages)  # in the plain form, which adds one
    ((start, stop),) = message_spans(tokenizer, messages, ["user"])
    assert (ids[:2], ids[start:stop]) == ([1, 3], [4])


@pytest.fixture
def folder(tmp_path):
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, max_position_embeddings=64, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_every_reader_of_text_drops_a_second_bos_token(folder: Path, capsys):
    described = describe(str(folder))
    assert described.encode("<s>hello") == [1, 3]
    prompt = Prompt(1, "<s>hello", "")
    assert TextCodec(described, is_raw=True).sequence(prompt, None).prompt == [1, 3]
    reader = PromptReader(described.tokenizer)
    assert reader.read("<s>hello").token_ids == (1, 3)
    with h2okv.LLM(str(folder), heavy=8, recent=8) as llm:
        request = llm.engine.request("<s>hello", SamplingParams(), lambda event: None)
        assert request.prompt == (1, 3)
    options = ["--model", str(folder), "--raw", "--json", "--max-new-tokens", "1"]
    assert run(["generate", *options, "<s>hello"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == 2
