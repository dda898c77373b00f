"""Every mode of ``generate`` in which the cache is promised to hold."""

import pytest
import torch
from oracle import cache_of
from transformers import DynamicCache

import h2okv
from h2okv.cache.argument import CACHE

PROMPT = 40
NEW = 12
SMALL = {"heavy": 5, "recent": 4}
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "beams-with-sampling": {"num_beams": 3, "do_sample": True},
    "several-samples": {"do_sample": True, "num_return_sequences": 3},
    "several-beams": {"num_beams": 4, "num_return_sequences": 2},
}
every_mode = pytest.mark.parametrize("options", MODES.values(), ids=MODES)


def _prompt(rows: int = 2, length: int = PROMPT, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def _generate(model, ids, cache, attention="h2o", **options) -> torch.Tensor:
    model.set_attn_implementation(attention)
    torch.manual_seed(5)
    options = {"do_sample": False, "max_new_tokens": NEW} | options
    return model.generate(ids, past_key_values=cache, **options)


def _padded() -> tuple[torch.Tensor, torch.Tensor]:
    ids = _prompt()
    mask = torch.ones_like(ids)
    ids[0, :13], mask[0, :13] = 0, 0
    return ids, mask


@every_mode
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
def test_a_large_budget_gives_the_full_cache(make_llama, options, is_padded):
    model = make_llama()
    ids, mask = _padded() if is_padded else (_prompt(), None)
    expected = _generate(model, ids, DynamicCache(), "sdpa", attention_mask=mask, **options)
    cache = cache_of(model.config, heavy=PROMPT, recent=PROMPT)
    output = _generate(model, ids, cache, attention_mask=mask, **options)
    cache.check_integrity()
    assert output.shape[0] == 2 * options.get("num_return_sequences", 1)
    assert torch.equal(output, expected)


@every_mode
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("positions", ["original", "rolling"])
def test_a_small_budget_gives_what_masking_gives(
    make_llama, kept_sets, options, is_padded, positions
):
    model = make_llama()
    ids, mask = _padded() if is_padded else (_prompt(), None)
    rules = SMALL | {"positions": positions, "evict_every": 16 if positions == "rolling" else None}
    dropping = cache_of(model.config, **rules)
    masking = cache_of(model.config, **rules, masks=True)
    output = _generate(model, ids, dropping, attention_mask=mask, **options)
    expected = _generate(model, ids, masking, attention_mask=mask, **options)
    dropping.check_integrity()
    assert torch.equal(output, expected)
    assert kept_sets(dropping) == kept_sets(masking)
    full = _generate(model, ids, DynamicCache(), "sdpa", attention_mask=mask, **options)
    assert not torch.equal(output, full), "nothing that mattered was evicted"


@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
def test_a_second_generate_continues_the_cache(make_llama, kept_sets, is_padded):
    model = make_llama()
    ids, mask = _padded() if is_padded else (_prompt(), torch.ones(2, PROMPT, dtype=torch.long))
    turns = {}
    caches = {
        "full": DynamicCache(),
        "large": cache_of(model.config, heavy=PROMPT, recent=PROMPT),
        "dropping": cache_of(model.config, **SMALL),
        "masking": cache_of(model.config, **SMALL, masks=True),
    }
    for name, cache in caches.items():
        attention = "sdpa" if name == "full" else "h2o"
        first = _generate(model, ids, cache, attention, attention_mask=mask)
        # The reply, and then a question of nine tokens.
        second = torch.cat([first, _prompt(length=9, seed=1)], dim=1)
        grown = torch.cat([mask, mask.new_ones(2, NEW + 9)], dim=1)
        turns[name] = _generate(model, second, cache, attention, attention_mask=grown)
        if name != "full":
            cache.check_integrity()
            assert cache.num_seen_tokens == PROMPT + NEW + 9 + NEW - 1
    assert torch.equal(turns["large"], turns["full"])
    assert torch.equal(turns["dropping"], turns["masking"])
    assert kept_sets(caches["dropping"]) == kept_sets(caches["masking"])


BY_HEAD = [[0.5, 1.0], [2.0, 0.5]]


@pytest.mark.parametrize(
    "options",
    [
        {}, {"heavy": PROMPT, "recent": PROMPT}, {"heavy": 0.3, "recent": 0.2, "min_tokens": 0},
        {"scoring": "expected"},
        {"scoring": "decay"}, {"policy": "keydiff"}, {"policy": "snapkv"}, {"policy": "full"},
        {"positions": "rolling"}, {"kv_bits": 8}, {"layer_budgets": BY_HEAD},
        {"layer_budgets": BY_HEAD, "kv_bits": 4, "policy": "best"}, {"evict_every": 1},
        {"evict_every": 8}, {"evict_every": 8, "scoring": "expected", "positions": "rolling"},
        {"evict_every": 8, "layer_budgets": BY_HEAD, "kv_bits": 8}, {"masks": True},
        *({"pins": [(2, 5)]} | more for more in ({}, {"evict_every": 8}, {"scoring": "expected"})),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    "mode",
    # The other ways of drafting are quick in cache/test_drafting.py, where it runs.
    ["assistant", *(pytest.param(mode, marks=[pytest.mark.slow] * (CACHE == "cache"))
                    for mode in ("itself", "early_exit", "lookup"))],
)  # fmt: skip
def test_drafted_tokens_give_the_text_and_the_state_of_plain_decoding(make_llama, mode, options):
    model = make_llama(sharpness=3.0).double()
    drafts = {
        "assistant": {"assistant_model": make_llama(seed=1).double()},
        "itself": {"assistant_model": model},
        "early_exit": {"assistant_early_exit": 1},
        "lookup": {"prompt_lookup_num_tokens": 4},
    }[mode]
    # A prompt that repeats itself, so that prompt lookup has something to propose.
    ids = _prompt(rows=1, length=10).repeat(1, 4)[:, :37]
    texts, caches, verified = [], [], []
    for extra in ({}, drafts):
        rules = {"heavy": 8, "recent": 6} | options
        pins = rules.pop("pins", [])
        cache = cache_of(model.config, **rules)
        cache.pin(pins)
        crop = cache.crop
        cache.crop = lambda count, crop=crop: (verified.append(count), crop(count))
        texts.append(_generate(model, ids, cache, max_new_tokens=30, **extra))
        cache.check_integrity()
        caches.append(cache)
    assert torch.equal(*texts)
    assert caches[0].num_seen_tokens == caches[1].num_seen_tokens
    for layer in range(len(model.model.layers)):
        entries = []
        for cache in caches:
            positions, scores = cache.kept_positions(layer), cache.scores(layer)
            positions, order = positions.sort(dim=-1)
            entries.append((positions, scores.gather(-1, order)))
        width = min(positions.shape[-1] for positions, _ in entries)
        (positions, scores), (others, their_scores) = (
            (p[..., -width:], s[..., -width:]) for p, s in entries
        )
        assert torch.equal(positions, others)
        assert all({*range(*pin)} <= {*head} for pin in pins for head in positions[0].tolist())
        if options.get("policy") != "keydiff":  # whose scores nothing reads
            torch.testing.assert_close(scores, their_scores, atol=1e-4, rtol=1e-4)
    assert verified
    if mode == "itself":
        assert len(verified) < 30  # forwards of the model for 30 tokens
    elif mode != "lookup":
        assert min(verified) < 0  # drafts were rejected


PAD_INSIDE = [{}, {"evict_every": 8}, {"positions": "rolling"}]


@pytest.mark.parametrize("options", PAD_INSIDE, ids=str)
@pytest.mark.parametrize("num_read", [0, 10, PROMPT - 1])
def test_padding_tokens_inside_a_prompt_are_read_as_by_the_full_cache(
    make_llama, options, num_read
):
    """transformers infers the mask of a prompt from the padding token; so does `prefill`."""
    model, ids = make_llama().double(), _prompt(rows=1)
    model.generation_config.pad_token_id = 0
    ids[0, [7, 8, 15]] = 0
    scores = {"output_logits": True, "return_dict_in_generate": True}
    expected = _generate(model, ids, DynamicCache(), "sdpa", **scores).logits
    cache = cache_of(model.config, PROMPT, PROMPT, **options)
    if num_read:
        h2okv.prefill(model, ids[:, :num_read], cache)
    with h2okv.enable(model):
        logits = _generate(model, ids, cache, **scores).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_padding_tokens_that_end_texts_are_text(make_llama):
    model, ids = make_llama(), _prompt(rows=1)
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = 0
    ids[0, 7] = 0
    cache = cache_of(model.config, PROMPT, PROMPT)
    logits = h2okv.prefill(model, ids, cache)
    torch.testing.assert_close(logits, model(ids).logits[:, -1], atol=1e-5, rtol=1e-5)
