"""A text ends at every token that ends a text, a turn, or a part that is filled in."""

import json

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import h2okv
from h2okv.cli.app import run
from h2okv.models.loading import describe
from h2okv.models.tokenization import add_end_tokens, end_token_ids
from h2okv.offload.offload_engine import OffloadRequest, open_model

WORDS = ["<unk>", "hello", "world", "</s>", "<|endoftext|>", "<s>"]


def make_tokenizer(added=(), words=WORDS, eos="<|endoftext|>"):
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token=eos
    )
    tokenizer.add_tokens([AddedToken(text, special=special) for text, special in added])
    return tokenizer


def ends(added, **options):
    tokenizer = make_tokenizer(added, **options)
    return set(tokenizer.convert_ids_to_tokens(sorted(end_token_ids(tokenizer, 1000))))


@pytest.mark.parametrize(
    "text",
    [
        "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>",
        "<EOT>", "<|file_sep|>", "<|fim_pad|>", "<|repo_name|>", "<reponame>",
        "<｜end▁of▁sentence｜>", "<turn|>", "<end_of_utterance>", "<|return|>", "[EOT]", "<eos>",
    ],
)  # fmt: skip
def test_end_tokens_are_found_by_their_text(text):
    assert ends([(text, True)]) == {"<|endoftext|>", text}


def test_other_special_tokens_and_words_are_not_end_tokens():
    # "</s>" is a word here, and "<fim_pad>" one that its tokenizer shows.
    assert ends([("<|im_start|>", True), ("<fim_pad>", False)]) == {"<|endoftext|>"}
    assert ends([("<|file_sep|>", False)]) == {"<|endoftext|>", "<|file_sep|>"}
    assert end_token_ids(make_tokenizer([("<|im_end|>", True)]), vocab_size=6) == {4}
    assert end_token_ids(make_tokenizer(), vocab_size=4) == set()


def test_tokens_inside_a_turn_are_not_end_tokens():
    harmony = [("<|end|>", True), ("<|return|>", True), ("<|call|>", True)]
    assert ends(harmony) == {"<|endoftext|>", "<|return|>", "<|call|>"}
    assert ends(harmony[:2]) == {"<|endoftext|>", "<|end|>", "<|return|>"}
    words = [word for word in WORDS if word != "</s>"]
    html = [("</s>", True), ("<|tool_response>", True)]
    assert ends(html, words=words) == {"<|endoftext|>", "<|tool_response>"}
    assert ends(html[:1], words=words) == {"<|endoftext|>", "</s>"}


@pytest.mark.parametrize(
    ("before", "after"), [(None, [4, 6]), (6, [6, 4]), ([2], [2, 4, 6]), ([6, 4], [6, 4])]
)
def test_end_tokens_are_added_after_those_of_the_checkpoint(before, after):
    config = GenerationConfig(eos_token_id=before)
    add_end_tokens(config, make_tokenizer([("<|im_end|>", True)]), 7)
    assert config.eos_token_id == after


@pytest.fixture
def folder(tmp_path):
    """Save a model that says "hello world" and a turn's end that its generation_config lacks."""
    tokenizer = make_tokenizer([("<|im_end|>", True), ("<|fim_pad|>", False)])
    size = len(tokenizer)
    config = LlamaConfig(
        vocab_size=size, hidden_size=size, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, head_dim=8, max_position_embeddings=64, eos_token_id=4,
        bos_token_id=5,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    following = {1: 2, 2: 6, 6: 1, 3: 7, 7: 1}  # of each token, the next
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        for token, next_token in following.items():
            model.lm_head.weight[next_token, token] = 1
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_every_command_stops_at_end_tokens(folder, tmp_path, capsys):
    options = ["--model", folder, "--max-new-tokens", "9", "--budget", "8+8", "--raw"]
    assert run(["generate", *options, "--json", "hello"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["text"].strip(), result["finish_reason"]) == ("world", "eos")
    # A token that its tokenizer shows is no part of the text either.
    assert run(["generate", *options, "--json", "hello </s>"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == ""
    prompts, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"id": 1, "prompt": "hello"}\n{"id": 2, "prompt": "hello </s>"}\n')
    files = ["--input", str(prompts), "--output", str(results), "--weights", "device"]
    assert run(["batch", *options, *files]) == 0
    records = {line["id"]: line for line in map(json.loads, results.read_text().splitlines())}
    assert [records[n]["finish_reason"] for n in (1, 2)] == ["eos", "eos"]
    assert [records[n]["text"].strip() for n in (1, 2)] == ["world", ""]
    request = OffloadRequest(model=folder, device=torch.device("cpu"))
    streamed, _ = open_model(request, describe(folder))
    assert streamed.model.generation_config.eos_token_id == [4, 6, 7]
    with h2okv.LLM(folder, heavy=8, recent=8) as llm:
        params = h2okv.SamplingParams(max_tokens=9, temperature=0.0)
        for prompt, text in (("hello", "world"), ("hello </s>", "")):
            (output,) = llm.generate(prompt, params, show_progress=False)
            assert (output.text.strip(), output.completions[0].finish_reason) == (text, "stop")
