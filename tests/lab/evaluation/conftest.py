"""Sources of tokens that need no tokenizer, for the tiny random models of tests/conftest.py."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from h2okv.assets import bundled_model_path, sample_prompt
from h2okv_lab.evaluation.model import ModelUnderTest
from h2okv_lab.evaluation.streaming import Segment, TextSource

VOCAB = 97
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|bos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class SegmentSource:
    """Samples that are lists of (tokens, whether the model answers)."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, sample):
        return [Segment(torch.tensor(ids), answers) for ids, answers in self.samples[sample]]


def draw(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (length,), generator=generator)


@pytest.fixture
def segments():
    return SegmentSource


@pytest.fixture
def text_source():
    return TextSource(draw(331))


@pytest.fixture
def chat_source():
    """Return two answered questions; then a question with a given answer and an open one."""
    lengths = [[(19, True), (7, True)], [(30, False)], [(1, True), (11, False), (12, True)]]
    return SegmentSource(
        [
            [(draw(n, 100 * i + j).tolist(), answers) for j, (n, answers) in enumerate(sample)]
            for i, sample in enumerate(lengths)
        ]
    )


@pytest.fixture(scope="session")
def plain_tokenizer():
    return AutoTokenizer.from_pretrained(bundled_model_path())


@pytest.fixture
def chat_tokenizer():
    """Return a tokenizer whose template trims and ends messages with a special token and a line."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def under_test(tokenizer, layers, dtype):
    path = bundled_model_path()
    model = AutoModelForCausalLM.from_pretrained(path, num_hidden_layers=layers, dtype=dtype)
    return ModelUnderTest(model.eval, model.config, tokenizer, "bundled", 2048)


@pytest.fixture(scope="session")
def subject(plain_tokenizer):
    """Return the bundled model as a model under test."""
    return under_test(plain_tokenizer, 6, torch.float32)


@pytest.fixture(scope="session")
def short_subject(plain_tokenizer):
    """Return its first layers in float64: other shapes of products flip no code and no choice."""
    return under_test(plain_tokenizer, 2, torch.float64)


@pytest.fixture(scope="session")
def novel():
    return sample_prompt()
