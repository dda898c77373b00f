"""The model in HELM's server: every call on an evicting cache of its own. Needs no HELM."""

import pytest
import torch

import h2okv
from h2okv.evaluation.helm.evicting_model import EvictingModel
from h2okv.evaluation.lm_eval.scoring import EvictionSettings
from h2okv.integration.prefill import read_blocks

BUDGET = {"heavy": 4, "recent": 3}


@pytest.fixture
def text():
    return torch.randint(2, 97, (1, 40), generator=torch.Generator().manual_seed(1))


def evicting(model, **options):
    return EvictingModel(model, EvictionSettings(**BUDGET | options))


def test_it_generates_on_a_new_cache_each_time(make_llama, text):
    model = make_llama(attention="sdpa")
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    full = model.generate(text, **options)
    subject = evicting(model)
    written = subject.generate(input_ids=text, **options)
    cache = h2okv.H2OCache(model.config, **BUDGET)
    assert torch.equal(written, model.generate(text, past_key_values=cache, **options))
    assert torch.equal(written, subject.generate(input_ids=text, **options))
    assert not torch.equal(written, full)


@pytest.mark.parametrize("chunk", [None, 1, 8])
def test_the_scores_of_a_text_are_evicted_before_they_are_made(make_llama, text, chunk):
    model = make_llama()
    logits = evicting(model, prefill_chunk=chunk)(text).logits
    cache = h2okv.H2OCache(model.config, **BUDGET)
    blocks = [block for _, block in read_blocks(model, text, cache, chunk or 1, all_logits=True)]
    assert torch.allclose(logits, torch.cat(blocks, dim=1), atol=2e-5)
    full = model(text).logits
    assert not torch.allclose(logits, full, atol=1e-2)


def test_a_model_that_is_not_supported_is_refused():
    from transformers import BertConfig, BertLMHeadModel

    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        vocab_size=97, is_decoder=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="encoder"):
        evicting(BertLMHeadModel(config))
