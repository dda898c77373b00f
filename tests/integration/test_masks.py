"""Masks of every width and padding, against SDPA on a `DynamicCache`, which shares no code."""

from functools import partial

import pytest
import torch
from oracle import cache_of
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    StaticCache,
)

import h2okv
from h2okv.cache.argument import CACHE

LENGTH, TOTAL = 20, 40
SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
# How many columns of zeros each row of the prompt has, and whether they are on the left of it, on
# its right, or one somewhere inside.
PADDINGS = {
    "left": ((0, 6, 13), "left"),
    "none": ((0, 0, 0), "left"),
    "all": ((3, 6, 13), "left"),
    "right": ((0, 4, 9), "right"),
    "inside": ((0, 1, 1), "inside"),
}
BIG, SMALL = {"heavy": 100, "recent": 100}, {"heavy": 4, "recent": 5}


@pytest.fixture(scope="module")
def models(make_llama):
    """Tiny models by family; Gemma 2 caps its logits, and every other layer slides."""
    torch.manual_seed(0)
    gemma = Gemma2Config(**SIZES, head_dim=16, sliding_window=8, attn_logit_softcapping=5.0)
    models_by_family = {
        "llama": make_llama(),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval(),
        "gemma2": Gemma2ForCausalLM(gemma).eval(),
    }
    for model in models_by_family.values():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.data *= 4
            layer.self_attn.k_proj.weight.data *= 4
    return models_by_family


def tokens(rows: int = 3) -> torch.Tensor:
    return torch.randint(3, 97, (rows, TOTAL), generator=torch.Generator().manual_seed(0))


def real_tokens(padding: str) -> torch.Tensor:
    """Marks the text of the prompt and of all that follows, ``[3, TOTAL]``."""
    counts, side = PADDINGS[padding]
    mask = torch.ones(3, TOTAL, dtype=torch.long)
    for row, count in enumerate(counts):
        start = {"left": 0, "right": LENGTH - count, "inside": 7 + row}[side]
        mask[row, start : start + count] = 0
    return mask


def widened(mask: torch.Tensor, read: int, width: str) -> torch.Tensor:
    """Masks of the text read so far, with columns behind it that mean nothing yet."""
    more = {"exact": 0, "+1": 1, "+many": 37}[width.split()[0]]
    ends = torch.full((3, more), 0 if "zeros" in width else 1)
    return torch.cat([mask[:, :read], ends], dim=1)


WIDTHS = ("exact", "+1 ones", "+1 zeros", "+many ones", "+many zeros")
PATTERNS = {"prompt and steps": (20, 1, 1, 1), "chunks": (14, 3, 3, 1), "turns": (20, 1, 7, 1, 5)}


@torch.no_grad()
def read(model, cache, mask, width, pattern, attention="h2o"):
    """Reads the text in blocks by hand; the logits of all real tokens."""
    model.set_attn_implementation(attention)
    ids, positions, logits, seen = tokens(), (mask.cumsum(dim=1) - 1).clamp(min=0), [], 0
    for size in PATTERNS[pattern]:
        block = slice(seen, seen := seen + size)
        kwargs = {"attention_mask": widened(mask, seen, width), "position_ids": positions[:, block]}
        logits.append(model(ids[:, block], **kwargs, **{CACHE: cache}).logits)
    return torch.cat(logits, dim=1)[mask[:, :seen].bool()]


def reference(model, mask, pattern):
    # SDPA has no caps on logits.
    attention = "eager" if model.config.model_type == "gemma2" else "sdpa"
    return read(model, DynamicCache(config=model.config), mask, "exact", pattern, attention)


@pytest.mark.parametrize(
    "padding",
    ["left", *(pytest.param(name, marks=pytest.mark.slow) for name in list(PADDINGS)[1:])],
)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_a_mask_of_any_width_equals_sdpa(models, family, pattern, padding):
    model, mask = models[family], real_tokens(padding)
    expected = reference(model, mask, pattern)
    caches = {
        "h2o": partial(cache_of, model.config, **BIG),
        "oracle": partial(cache_of, model.config, **BIG, masks=True),
        "dynamic": partial(DynamicCache, config=model.config),
        "static": partial(StaticCache, model.config, max_cache_len=TOTAL),
    }
    for name, make in caches.items():
        for width in WIDTHS:
            cache = make()
            logits = read(model, cache, mask, width, pattern)
            torch.testing.assert_close(
                logits, expected, atol=2e-4, rtol=1e-4, msg=f"{name} {width}"
            )
            if isinstance(cache, h2okv.H2OCache):
                cache.check_integrity()
                assert cache.num_seen_tokens == sum(PATTERNS[pattern])


def compiled(*quick):
    """Return cases of a width and a switch; others than these are slow, as each compiles."""
    cases = [(width, switch) for width in WIDTHS for switch in (False, True)]
    return [pytest.param(*case, marks=[pytest.mark.slow] * (case not in quick)) for case in cases]


@pytest.mark.parametrize(
    ("width", "by_place"), compiled(("exact", False), ("+many ones", False), ("+1 zeros", True))
)
def test_a_compiled_step_reads_its_own_column(models, monkeypatch, width, by_place):
    torch._dynamo.reset()
    counter, plain = CompileCounterWithBackend("eager"), torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda model, **compile_options: plain(model, backend=counter, **compile_options),
    )
    model, mask = models["llama"], real_tokens("left")
    expected = reference(model, mask, "prompt and steps")
    cache, ids, seen, logits = cache_of(model.config, **BIG), tokens(), 0, []
    positions = mask.cumsum(dim=1) - 1
    with h2okv.enable(model, compile=True), torch.no_grad():
        before = counter.frame_count
        for size in PATTERNS["prompt and steps"]:
            block = slice(seen, seen := seen + size)
            kwargs = widened(mask, seen, width), positions[:, block].clamp(min=0)
            if by_place:
                output = model(ids[:, block], *kwargs, cache)
            else:
                names = {"attention_mask": kwargs[0], "position_ids": kwargs[1], CACHE: cache}
                output = model(ids[:, block], **names)
            logits.append(output.logits)
        assert counter.frame_count - before == 1
        with pytest.raises(ValueError, match=r"attention_mask of shape \[3, 23\] must have"):
            model(ids[:, :1], attention_mask=mask[:, :seen], **{CACHE: cache})
    torch._dynamo.reset()
    actual = torch.cat(logits, dim=1)[mask[:, :seen].bool()]
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("cache", ["h2o", "oracle", "dynamic"])
@pytest.mark.parametrize("size", [1, 5])
def test_a_mask_that_ends_too_soon_is_refused(models, cache, size):
    """Pass the prompt's mask at the next token, or that of the new tokens alone."""
    model, mask, ids = models["llama"], real_tokens("left"), tokens()
    model.set_attn_implementation("h2o")
    cache = {
        "h2o": cache_of(model.config, **SMALL),
        "oracle": cache_of(model.config, **SMALL, masks=True),
        "dynamic": DynamicCache(config=model.config),
    }[cache]
    with torch.no_grad():
        model(ids[:, :LENGTH], attention_mask=mask[:, :LENGTH], **{CACHE: cache})
        for columns in (slice(0, LENGTH), slice(LENGTH, LENGTH + size), slice(1, LENGTH + size)):
            with pytest.raises(ValueError, match="the 20 tokens seen and the"):
                model(ids[:, :size], attention_mask=mask[:, columns], **{CACHE: cache})
        assert cache.get_seq_length() == LENGTH
        model(ids[:, :size], attention_mask=mask[:, : LENGTH + size], **{CACHE: cache})
    with pytest.raises(ValueError, match=r"\[3, 19\] must have a column for each of the 0 tokens"):
        model(ids[:, :LENGTH], attention_mask=mask[:, : LENGTH - 1], use_cache=False)


def test_a_mask_of_another_batch_is_refused(models):
    model, ids = models["llama"], tokens()
    model.set_attn_implementation("h2o")
    mask = real_tokens("left")[1:, :LENGTH]
    with pytest.raises(ValueError, match="for 20 new tokens of each of 3 sequences"):
        model(ids[:, :LENGTH], attention_mask=mask, **{CACHE: cache_of(model.config)})


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("width", WIDTHS)
def test_masks_without_a_cache(models, family, width):
    """transformers' own attention fails here, on shapes."""
    model, mask, ids = models[family], real_tokens("left")[:, :LENGTH], tokens()[:, :LENGTH]
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    expected = reference(model, real_tokens("left"), "prompt and steps")
    model.set_attn_implementation("h2o")
    with torch.no_grad():
        kwargs = {"attention_mask": widened(mask, LENGTH, width), "position_ids": positions}
        logits = model(ids, **kwargs, use_cache=False).logits
    count = int(mask[0].sum())
    torch.testing.assert_close(logits[0], expected[:count], atol=2e-4, rtol=1e-4)
    logits = logits[mask.bool()]
    real = real_tokens("left")[:, : sum(PATTERNS["prompt and steps"])]
    in_prompt = torch.arange(real.shape[1]).expand_as(real)[real.bool()] < LENGTH
    torch.testing.assert_close(logits, expected[in_prompt], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("chunk", [None, 4])
def test_prefill_takes_only_a_mask_of_the_full_text(models, is_padded, chunk):
    model, mask = models["llama"], real_tokens("left" if is_padded else "none")
    expected = reference(model, mask, "turns").split(mask[:, :34].sum(dim=1).tolist())
    expected = torch.stack([logits[-1] for logits in expected])  # of the last token of a turn
    cache = cache_of(model.config, **BIG | {"evict_every": chunk})
    h2okv.prefill(model, tokens()[:, :LENGTH], cache, mask[:, :LENGTH])
    turn = tokens()[:, LENGTH:34]
    for columns in (mask[:, :35], mask[:, LENGTH:34], mask[:, :33], mask[0, :34], mask[:2, :34]):
        with pytest.raises(ValueError, match=r"attention_mask of shape .* must be \[3, 34\]: a"):
            h2okv.prefill(model, turn, cache, columns)
    assert cache.num_seen_tokens == LENGTH
    last_logits = h2okv.prefill(model, turn, cache, mask[:, :34])
    torch.testing.assert_close(last_logits, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("width", ["exact", "+1 ones", "+many ones"])
@pytest.mark.parametrize("rows", [slice(0, 3), slice(1, 2)])
@pytest.mark.parametrize("options", [BIG, SMALL | {"evict_every": 4}], ids=["big", "chunks"])
def test_padded_batches_of_the_recipe(models, width, rows, options):
    """Check that a padded row in a batch alone is cut into chunks by its tokens, too."""
    model, mask = models["llama"], real_tokens("all")
    model.set_attn_implementation("h2o")
    recipe = {"custom_generate": str(h2okv.recipe_path()), "trust_remote_code": True, **options}
    new = {"max_new_tokens": 6, "do_sample": False}
    ids, kwargs = tokens()[rows, :LENGTH], widened(mask, LENGTH, width)[rows]
    output = model.generate(ids, attention_mask=kwargs, **recipe, **new)[:, LENGTH:]
    for row, count in list(enumerate(PADDINGS["all"][0]))[rows]:
        alone = model.generate(tokens()[row : row + 1, count:LENGTH], **recipe, **new)
        assert torch.equal(output[row - (rows.start or 0)], alone[0, LENGTH - count :])


@pytest.mark.parametrize(
    ("family", "padding"),
    # A sliding window of transformers is of columns, so that inner padding changes what it shows.
    [("llama", "right"), ("llama", "inside"), ("llama", "all"), ("gemma2", "right"),
     ("gemma2", "all")],
)  # fmt: skip
def test_prefill_gives_the_logits_of_each_last_token(models, family, padding):
    model, mask = models[family], real_tokens(padding)[:, :LENGTH]
    logits = h2okv.prefill(model, tokens()[:, :LENGTH], cache_of(model.config, **BIG), mask)
    for row, real in enumerate(mask.bool()):
        cache = cache_of(model.config, **BIG)
        alone = h2okv.prefill(model, tokens()[row : row + 1, :LENGTH][:, real], cache)
        torch.testing.assert_close(logits[row], alone[0], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 3])
def test_positions_of_other_tokens_are_refused(models, size):
    model, ids = models["llama"], tokens()
    model.set_attn_implementation("h2o")
    cache = cache_of(model.config, **SMALL)
    with torch.no_grad():
        model(ids[:, :LENGTH], **{CACHE: cache})
        positions = torch.arange(LENGTH + size).unsqueeze(0)
        if size == 1:  # more of them fit no shape in transformers
            with pytest.raises(ValueError, match="got positions of 21 tokens and 1 of text"):
                model(ids[:, :1], position_ids=positions, **{CACHE: cache})
        with pytest.raises(ValueError, match="does not go on from there"):
            model(ids[:, :3], position_ids=positions[:, :3], **{CACHE: cache})


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_turn_after_padding_behind_text(models, family):
    model, mask = models[family], torch.ones(3, TOTAL, dtype=torch.long)
    mask[1, 20:29] = mask[2, 3:5] = 0
    expected = reference(model, mask, "turns")
    last = mask[:, :34].sum(dim=1).cumsum(dim=0) - 1
    model.set_attn_implementation("h2o")
    cache, seen = cache_of(model.config, **BIG), 0
    for size in (20, 11):
        h2okv.prefill(model, tokens()[:, seen : seen + size], cache, mask[:, : seen + size])
        seen += size
    new = tokens()[:, seen:34]
    if family == "gemma2":  # a sliding layer reads the columns of its window
        for call in (cache.next_turn, lambda ids: h2okv.prefill(model, ids, cache)):
            with pytest.raises(ValueError, match="padding came behind text, and layers .* slide"):
                call(new)
        logits = h2okv.prefill(model, new, cache, mask[:, :34])
    else:
        logits = h2okv.prefill(model, new, cache)
    torch.testing.assert_close(logits, expected[last], atol=2e-4, rtol=1e-4)
    cache.reset()
    h2okv.prefill(model, tokens()[:, :LENGTH], cache, real_tokens("left")[:, :LENGTH])
    assert cache.next_turn(new)["attention_mask"][:, :LENGTH].tolist() == (
        real_tokens("left")[:, :LENGTH].tolist()
    )


@pytest.mark.parametrize(
    ("width", "is_compiled"), compiled(*((width, False) for width in WIDTHS), ("+many ones", True))
)
def test_positions_that_a_model_counts_in_its_mask(monkeypatch, width, is_compiled):
    """OPT does, and fails on shapes where a mask is wider, unless its positions are clamped."""
    torch._dynamo.reset()
    plain = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda model, **compile_options: plain(model, backend="eager", **compile_options),
    )
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=97, hidden_size=64, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=64, pad_token_id=0,
    )  # fmt: skip
    model, mask = OPTForCausalLM(config).eval(), real_tokens("left")
    expected = reference(model, mask, "turns")
    clamped = {} if width == "exact" else {"positions": "clamped"}
    cache, seen, logits = cache_of(config, **BIG, **clamped), 0, []
    with h2okv.enable(model, compile=is_compiled), torch.no_grad():
        for size in PATTERNS["turns"]:
            block = slice(seen, seen := seen + size)
            kwargs = {"attention_mask": widened(mask, seen, width), CACHE: cache}
            logits.append(model(tokens()[:, block], **kwargs).logits)
    torch._dynamo.reset()
    actual = torch.cat(logits, dim=1)[mask[:, :seen].bool()]
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)
