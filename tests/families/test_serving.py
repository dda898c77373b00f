"""Every family of the support table behind the serving engine: each request as by itself.

An answer that is read again is compared with eager attention over the whole text.
"""

import pytest
from family_harness import generate, most_likely, tiny_model, tokens
from family_table import variant_id, variants
from transformers import AutoTokenizer

import h2okv
from h2okv.assets import bundled_model_path
from h2okv.cache.support import window_by_length

LENGTHS = (40, 9, 26)
NO_ROWS = {"llama4_text"}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled_model_path())


@pytest.mark.parametrize("variant", variants(), ids=variant_id, scope="module")
def test_requests_share_rows_and_give_what_generate_gives(variant, tokenizer):
    model = tiny_model(*variant)
    budget = {"heavy": 6, "recent": 4, "sink": 1}
    try:
        llm = h2okv.LLM(model, tokenizer, max_num_seqs=2, max_prefill_tokens=16, **budget)
    except ValueError as error:
        assert "not held in slots" in str(error)
        assert variant[0].model_type in NO_ROWS
        return
    assert variant[0].model_type not in NO_ROWS
    params = h2okv.SamplingParams(max_tokens=6, temperature=0)
    # A text that scales everybody's positions is not taken.
    limit = window_by_length(model.config)
    prompts = [
        tokens(1, length, seed)
        for seed, length in enumerate(LENGTHS)
        if limit is None or length + 6 <= limit
    ]
    assert prompts
    with llm:
        if limit is not None:
            with pytest.raises(ValueError, match=f"context of {limit} tokens, got {limit} and 1"):
                llm.generate([[5] * limit], params)
        outputs = llm.generate([ids[0].tolist() for ids in prompts], params, verify=True)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected, _ = generate(model, prompt, h2okv.H2OCache(model.config, **budget), "h2o")
        answer = output.completions[0].token_ids
        assert answer == expected[0].tolist()
        full = most_likely(model, prompt, answer)
        assert output.verified.agreed == sum(map(int.__eq__, answer, full)), output.verified
