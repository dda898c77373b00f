"""On a real model H2O at 20 % stays close to the full cache, and a recent window does not."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import h2okv
from h2okv.models.loading import resolve_model

ARTICLE = Path(h2okv.__file__).parent / "assets" / "article.txt"
PROMPT = 640

# Perplexity over the full cache's (23.8) on the rest of the article, 240 tokens, with 128 entries.
MEASURED = {"h2o": 1.10, "recent": 3.37}


@pytest.fixture(scope="module")
def smollm2():
    try:
        path = resolve_model("smollm2")
    except ValueError as error:
        pytest.skip(f"SmolLM2 is not here: {error}")
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="h2o"
    )
    ids = AutoTokenizer.from_pretrained(path)(ARTICLE.read_text(), return_tensors="pt").input_ids
    return model.eval(), ids


@torch.no_grad()
def perplexity(model, ids, **options) -> float:
    """Return the perplexity of the text after the prompt, on the compressed prompt."""
    cache = h2okv.H2OCache(model.config, **options)
    last = model(ids[:, :PROMPT], past_key_values=cache, logits_to_keep=1).logits
    following = model(ids[:, PROMPT:-1], past_key_values=cache).logits
    logits = torch.cat([last, following], dim=1).flatten(0, 1)
    return float(torch.nn.functional.cross_entropy(logits, ids[0, PROMPT:]).exp())


def test_h2o_perplexity_is_close_to_full_and_a_recent_window_is_not(smollm2):
    full = perplexity(*smollm2, policy="full")
    ratio = {
        policy: perplexity(*smollm2, policy=policy, heavy=64, recent=64) / full
        for policy in MEASURED
    }
    assert ratio["h2o"] == pytest.approx(MEASURED["h2o"], rel=0.05)
    assert ratio["recent"] > 2 * ratio["h2o"]
