"""A tiny model with a byte-level tokenizer in a folder, and the command run on it."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from h2okv.cli.app import run

PROMPT = "the cat sat on the mat and the dog sat on the log, " * 4
CONTEXT = 256


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def write_prompts(path: Path, count: int, more: dict | None = None) -> Path:
    """Write a batch job's prompts of random words, and others by their ids."""
    generator, words = random.Random(0), PROMPT.split()[:13]
    texts = {f"p{n}": " ".join(generator.choices(words, k=generator.randint(1, 40)))
             for n in range(count)}  # fmt: skip
    lines = [json.dumps({"id": n, "prompt": text}) for n, text in (texts | (more or {})).items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def make_tokenizer(*turn_tokens: str, **options) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<bos>", "<eos>", *turn_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([PROMPT], trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        **{"eos_token": "<eos>"} | options,
        clean_up_tokenization_spaces=False,
    )


def make_model(context: int = CONTEXT, eos: int | None = None, **options) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=300, max_position_embeddings=context, bos_token_id=0,
        eos_token_id=eos, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_chat_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    return make_tokenizer(
        "<|im_start|>", "<|im_end|>", eos_token="<|im_end|>", chat_template=template
    )


@pytest.fixture(scope="session")
def chat_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Return a function that makes a tokenizer with a chat template, by default ChatML."""
    return make_chat_tokenizer


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory) -> Path:
    """Return the folder of a model with a chat template; tests must not change it."""
    folder = tmp_path_factory.mktemp("chat_model")
    make_chat_tokenizer().save_pretrained(folder)
    make_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def save_model(tmp_path_factory) -> Callable[..., Path]:
    def save(**options) -> Path:
        folder = tmp_path_factory.mktemp("model")
        make_tokenizer().save_pretrained(folder)
        make_model(**options).save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def model_folder(save_model) -> Path:
    """Return the folder of the model that tests share and must not change."""
    return save_model()


@pytest.fixture
def h2okv_command(capsys, monkeypatch) -> Callable[..., Outcome]:
    # The environment variable is read once, long before a test could set it.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def call(*args: object) -> Outcome:
        capsys.readouterr()
        code = run([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def prompt() -> str:
    return PROMPT


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()
