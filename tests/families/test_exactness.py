"""Every family of the support table: what the contract promises, on a tiny random model."""

import pytest
import torch
from family_harness import (
    PROMPT,
    TOLERANCE,
    forced_logits,
    full_cache,
    generate,
    kept_sets,
    tiny_model,
    tokens,
)
from family_table import variant_id, variants
from oracle import cache_of

every_family = pytest.mark.parametrize("variant", variants(), ids=variant_id, scope="module")


@every_family
def test_generate_with_a_large_budget_gives_the_full_cache(variant):
    model = tiny_model(*variant)
    ids = tokens(2, PROMPT)
    expected, expected_logits = generate(
        model, ids, full_cache(model), "sdpa" if _has_sdpa(model) else "eager"
    )
    cache = cache_of(model.config, heavy=PROMPT, recent=PROMPT)
    generated, logits = generate(model, ids, cache, "h2o")
    cache.check_integrity()
    torch.testing.assert_close(logits, expected_logits, atol=TOLERANCE, rtol=0)
    assert torch.equal(generated, expected)


@every_family
def test_dropping_equals_masking(variant):
    model = tiny_model(*variant)
    budget = {"heavy": 6, "recent": 4, "sink": 1}
    dropping = cache_of(model.config, **budget)
    masking = cache_of(model.config, **budget, masks=True)
    logits = forced_logits(model, dropping, "h2o")
    expected = forced_logits(model, masking, "h2o")
    dropping.check_integrity()
    masking.check_integrity()
    assert kept_sets(dropping) == kept_sets(masking)
    assert dropping.num_cached_tokens == 11
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    # The test would be empty if nothing that mattered had been evicted.
    full_logits = forced_logits(model, full_cache(model), "eager")
    assert (logits - full_logits).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    "variant", [v for v in variants() if not v[0].padding], ids=variant_id, scope="module"
)
def test_a_padded_row_gives_what_it_gives_alone(variant):
    model = tiny_model(*variant)
    short, long = tokens(1, 27, seed=2), tokens(1, PROMPT, seed=3)
    padding = torch.zeros(1, PROMPT - 27, dtype=torch.long)
    batch = torch.cat([torch.cat([padding, short], dim=1), long])
    mask = torch.ones_like(batch)
    mask[0, : PROMPT - 27] = 0
    budget = {"heavy": 0.15, "recent": 0.1, "min_tokens": 0}
    together = cache_of(model.config, **budget)
    generated, logits = generate(model, batch, together, "h2o", attention_mask=mask)
    together.check_integrity()
    for row, ids in enumerate((short, long)):
        alone = cache_of(model.config, **budget)
        made_alone, logits_alone = generate(model, ids, alone, "h2o")
        torch.testing.assert_close(logits[row], logits_alone[0], atol=TOLERANCE, rtol=0)
        assert torch.equal(generated[row], made_alone[0])
        for layer, sets in kept_sets(alone).items():
            assert kept_sets(together)[layer][row] == sets[0]


def _has_sdpa(model) -> bool:
    # transformers runs Gemma 2 in eager mode, for SDPA has no soft cap, and models with sinks.
    has_softcap = getattr(model.config, "attn_logit_softcapping", None) is not None
    return model._supports_sdpa and not has_softcap
