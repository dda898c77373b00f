"""Padding that a cache has seen, and a later mask or position that takes it for text."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import h2okv
from h2okv.cache.argument import CACHE

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 512, "initializer_range": 0.35,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
SEEN, PADDING = 20, 6


def make(name, **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SIZES, **options)
    return AutoModelForCausalLM.from_config(config, attn_implementation="h2o").double().eval()


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request):
    windows = {"sliding_window": 9, "head_dim": 8, "num_key_value_heads": 2}
    return make(request.param, **(windows if request.param == "gemma2" else {}))


def tokens(length, rows=2, seed=0):
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded():
    ids = tokens(SEEN)
    mask = torch.ones_like(ids)
    ids[1, :PADDING] = mask[1, :PADDING] = 0
    return ids, mask


def prefilled(model, method="prefill", **options):
    """Return a cache of a padded batch that was read outside of generate."""
    cache = h2okv.H2OCache(model.config, 6, 4, **options)
    ids, mask = padded()
    if method == "prefill":
        h2okv.prefill(model, ids, cache, mask)
        return cache
    positions = {} if method == "columns" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        model(ids, attention_mask=mask, **{CACHE: cache}, **positions)
    return cache


@torch.no_grad()
def go_on(model, cache, method, length):
    """Read more tokens, all of whose mask is ones if there is one."""
    more, full_mask = tokens(length, seed=1), torch.ones(2, SEEN + length, dtype=torch.int64)
    if method == "generate":
        options = {"do_sample": False, "max_new_tokens": 3, CACHE: cache}
        return model.generate(more, attention_mask=full_mask, **options)
    if method == "whole text":
        options = {"do_sample": False, "max_new_tokens": 3, CACHE: cache}
        return model.generate(
            torch.cat([padded()[0], more], 1), attention_mask=full_mask, **options
        )
    if method == "prefill":
        return h2okv.prefill(model, more, cache, full_mask)
    mask = {} if method == "forward without a mask" else {"attention_mask": full_mask}
    return model(more, **mask, **{CACHE: cache}).logits[:, -1]


METHODS = ["generate", "whole text", "prefill", "forward", "forward without a mask"]


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("read_by", ["prefill", "forward"])
def test_padding_is_not_taken_for_text_later(model, read_by, method, length):
    cache = prefilled(model, read_by)
    before = copy.deepcopy(cache)
    with pytest.raises(ValueError, match=r"attention_mask \[batch, tokens seen \+ new tokens\]"):
        go_on(model, cache, method, length)
    # Nothing was read, so the right mask goes on.
    texts = [
        model.generate(
            **each.next_turn(tokens(length, seed=1)), **{CACHE: each}, max_new_tokens=3,
            do_sample=False,
        )
        for each in (cache, before)
    ]  # fmt: skip
    assert torch.equal(*texts)


@pytest.mark.parametrize("options", [{}, {"evict_every": 8}, {"positions": "rolling"}], ids=str)
@pytest.mark.parametrize("change", ["fork", "load", "deepcopy", "select", "steps"])
def test_copies_know_of_padding_too(options, change, tmp_path):
    model = make("llama")
    cache = prefilled(model, **options)
    if change == "fork":
        cache = cache.fork(1)
    elif change == "load":
        cache.save(tmp_path / "cache")
        cache = h2okv.H2OCache.load(tmp_path / "cache", model)
    elif change == "deepcopy":
        cache = copy.deepcopy(cache)
    elif change == "select":
        cache.reorder_cache(torch.tensor([1, 0]))
    else:
        turn = cache.next_turn(tokens(4, seed=3))
        model.generate(**turn, **{CACHE: cache}, max_new_tokens=3, do_sample=False)
    seen = cache.num_seen_tokens
    for length in (1, 5):
        full_mask = torch.ones(2, seen + length, dtype=torch.int64)
        with pytest.raises(ValueError, match="tokens of padding, so that a gap|others are padding"):
            model.generate(
                tokens(length), attention_mask=full_mask, **{CACHE: cache}, max_new_tokens=3
            )


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 5])
def test_positions_that_count_padding_from_the_start_go_on(model, length):
    """A bare forward of transformers counts columns."""
    cache, alone = prefilled(model, "columns"), h2okv.H2OCache(model.config, 6, 4)
    model(padded()[0][1:, PADDING:], **{CACHE: alone})
    for seed in range(3):
        more = tokens(length, seed=seed)
        mask = cache.next_turn(more)["attention_mask"]
        logits = model(more, attention_mask=mask, **{CACHE: cache}).logits[1]
        expected = model(more[1:], **{CACHE: alone}).logits[0]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    turn = cache.next_turn(tokens(2))
    with pytest.raises(ValueError, match="count its 6 tokens of padding"):
        model.generate(**turn, **{CACHE: cache}, max_new_tokens=3)


def test_a_mask_that_hides_text_seen_is_refused(model):
    cache = h2okv.H2OCache(model.config, 6, 4)
    h2okv.prefill(model, tokens(SEEN), cache)
    mask = torch.ones(2, SEEN + 1, dtype=torch.int64)
    mask[0, :3] = 0
    with pytest.raises(ValueError, match="marks 17 of the 20 tokens seen of sequence 0"):
        model(tokens(1), attention_mask=mask, **{CACHE: cache})


def test_a_compiled_step_is_checked_too(monkeypatch):
    model = make("llama")
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    with h2okv.enable(model, compile=True):
        for method in ("generate", "forward", "forward without a mask"):
            with pytest.raises(ValueError, match="tokens seen"):
                go_on(model, prefilled(model), method, 1)
