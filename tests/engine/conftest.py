"""Fixtures of the engine's tests: tiny models, and the tokens of a prompt generated alone."""

import pytest
import torch
from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

import h2okv
from h2okv.assets import bundled_model_path

VOCABULARY = 97


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled_model_path())


@pytest.fixture(scope="session")
def gemma():
    """Make a model of which every second layer slides."""
    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
        sliding_window=12, layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return Gemma3ForCausalLM(config).eval().double()


@pytest.fixture(scope="session")
def make_prompts():
    """Return random token lists of the given lengths."""

    def make(lengths, seed=1):
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
            for length in lengths
        ]

    return make


@pytest.fixture(scope="session")
def alone():
    """Generate the new tokens of one prompt with transformers' ``generate``."""

    def generate(model, prompt, new, cache=None, **options):
        if cache is None:
            cache = h2okv.H2OCache(
                model, **({"heavy": 0.2, "recent": 0.2, "min_tokens": 0} | options)
            )
        ids = torch.tensor([prompt])
        with h2okv.enable(model):
            generated = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=new,
                do_sample=False,
            )
        return generated[0, len(prompt) :].tolist()

    return generate


USUAL = {"heavy": 0.2, "recent": 0.2, "min_tokens": 0, "max_num_seqs": 3}


@pytest.fixture
def make_async(make_llama, tokenizer):
    """Create an engine in a thread, which the caller closes."""
    return lambda **settings: h2okv.AsyncLLM(make_llama(), tokenizer, **(USUAL | settings))


@pytest.fixture
def make_llm(tokenizer):
    """Create an engine on a loaded model, closed at the end of the test."""
    llms = []

    def make(model, **settings):
        llms.append(h2okv.LLM(model, tokenizer, **(USUAL | settings)))
        return llms[-1]

    yield make
    for llm in llms:
        llm.close()


@pytest.fixture(scope="session")
def greedy():
    """Return parameters of greedy decoding for a number of new tokens."""

    def make(new, **options):
        return h2okv.SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, **options)

    return make
