"""The cache object in a user's hands: what it reports and what it refuses."""

import copy

import pytest
import torch
from oracle import cache_of
from transformers import DynamicCache

import h2okv
from h2okv.cache.argument import CACHE


@pytest.fixture
def model(make_llama):
    return make_llama()


def read(model, cache, length=32, batch=1, seed=0):
    input_ids = torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return model(input_ids, past_key_values=cache).logits


def test_reports_what_it_holds(model):
    cache = cache_of(model.config, heavy=4, recent=6)
    assert (cache.nbytes, cache.full_nbytes, cache.num_seen_tokens) == (0, 0, 0)
    read(model, cache, batch=3)
    assert cache.num_seen_tokens == 32
    assert cache.num_cached_tokens == 10
    positions, scores = cache.kept_positions(0), cache.scores(1)
    assert positions.shape == scores.shape == (3, 2, 11)
    assert scores.dtype == torch.float32 and not positions.is_floating_point()
    # 2 layers, 3 rows, 2 KV heads, 11 slots of 16 + 16 fp64 numbers, a score and a position.
    assert cache.nbytes == 2 * 3 * 2 * 11 * (32 * 8 + 4 + 4)
    assert cache.full_nbytes == 2 * 3 * 2 * 32 * 32 * 8


def test_what_it_returns_is_a_copy(model):
    cache = cache_of(model.config, heavy=4, recent=6)
    read(model, cache)
    cache.kept_positions(0).fill_(7)
    cache.scores(0).fill_(-1)
    cache.check_integrity()


def test_scores_of_a_head_add_up_to_the_queries_when_nothing_is_evicted(model):
    cache = cache_of(model.config, heavy=20, recent=20)
    read(model, cache, length=32)
    # Two query heads share a KV head, and every query gives out a probability of 1.
    torch.testing.assert_close(cache.scores(0).sum(-1), torch.full((1, 2), 64.0))


def test_reset_starts_again(model):
    cache = cache_of(model.config, heavy=4, recent=6)
    first = read(model, cache)
    read(model, cache, length=1)
    cache.reset()
    assert cache.num_seen_tokens == 0
    assert torch.equal(read(model, cache), first)
    cache.reset()
    read(model, cache, batch=4)  # another batch size is fine on an empty cache


def test_without_an_h2o_cache_the_attention_is_plain(make_llama):
    model, reference = make_llama(), make_llama(attention="sdpa")
    input_ids = torch.randint(2, 97, (2, 20))
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad():
        for own_mask in (None, mask):
            caches = DynamicCache(), DynamicCache()
            for tokens, seen in ((input_ids, 20), (input_ids[:, :3], 23), (input_ids[:, :1], 24)):
                seen_mask = None if own_mask is None else own_mask[:, :seen]
                logits = [
                    each(tokens, attention_mask=seen_mask, past_key_values=cache).logits
                    for each, cache in zip((model, reference), caches, strict=True)
                ]
                keep = slice(None) if own_mask is None or seen > 20 else mask[:, :20].bool()
                torch.testing.assert_close(logits[0][keep], logits[1][keep], atol=1e-5, rtol=1e-5)
        assert torch.equal(model(input_ids).logits, reference(input_ids).logits)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_model_without_h2o_attention_is_refused(make_llama, layers):
    model = make_llama(layers=layers, attention="sdpa")
    cache = cache_of(model.config)
    with pytest.raises(ValueError, match=r"call h2okv.enable\(model\), then cache.reset"):
        model.generate(torch.randint(2, 97, (1, 8)), past_key_values=cache, max_new_tokens=3)


def test_another_batch_size_is_refused(model):
    cache = cache_of(model.config, heavy=4, recent=4)
    read(model, cache, batch=2)
    with pytest.raises(ValueError, match="batch of 2 and got a batch of 3"):
        read(model, cache, batch=3)


def test_another_model_is_refused(make_llama, model):
    cache = cache_of(model.config, heavy=4, recent=4)
    read(model, cache)
    with pytest.raises(ValueError, match="another model"):
        read(make_llama(seed=9), cache, length=1)
    with pytest.raises(ValueError, match=r"another model: .*\(4, 16, torch.float64\)"):
        read(make_llama(kv_heads=4), cache)
    with pytest.raises(ValueError, match=r"another model: .*bfloat16"):
        read(copy.deepcopy(model).bfloat16(), cache)


@pytest.mark.parametrize(("layers", "problem"), [(1, "this one has more"), (3, "fewer layers")])
def test_a_model_of_another_depth_is_refused(make_llama, model, layers, problem):
    cache = cache_of(make_llama(layers=layers).config, heavy=4, recent=4)
    with pytest.raises(ValueError, match=problem):
        model.generate(torch.randint(2, 97, (1, 8)), past_key_values=cache, max_new_tokens=3)


def test_a_text_read_anew_is_refused(model):
    """Without use_cache, generate feeds the whole text again at every step."""
    input_ids = torch.randint(2, 97, (1, 8))
    words = r"seen 8 tokens .*got 9 more [^;]*; leave out use_cache=False, [^;]* at every step\.$"
    for mask in (torch.ones_like(input_ids), None):
        cache = cache_of(model.config)
        with pytest.raises(ValueError, match=words):
            model.generate(
                input_ids, attention_mask=mask, **{CACHE: cache}, use_cache=False, max_new_tokens=3
            )
    for again, words in (
        (input_ids[:, :5], "next_turn.* for another text .*needs position_ids 8 to 12"),
        (torch.cat([input_ids] * 2, 1), r"for another text cache.reset\(\) first; a model"),
    ):
        cache = cache_of(model.config)
        model(input_ids, past_key_values=cache)
        positions = torch.arange(again.shape[1])[None]
        with pytest.raises(ValueError, match=words) as caught:
            model(again, position_ids=positions, past_key_values=cache)
        assert "use_cache" not in str(caught.value)


def test_nan_is_refused(model):
    broken = copy.deepcopy(model)
    broken.model.layers[0].mlp.up_proj.weight.data[3, 3] = torch.nan
    with pytest.raises(ValueError, match="layer 1 is not finite"):
        read(broken, cache_of(broken.config))


def test_a_row_of_padding_is_refused(model):
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1] = 0
    cache = cache_of(model.config)
    with pytest.raises(ValueError, match="sequence 1 of the batch is all padding"), torch.no_grad():
        model(torch.randint(2, 97, (2, 8)), attention_mask=mask, past_key_values=cache)


def test_a_mask_that_is_not_causal_is_refused(model):
    mask = torch.zeros(1, 1, 8, 8)
    cache = cache_of(model.config)
    with pytest.raises(ValueError, match="takes a 2D mask"), torch.no_grad():
        model(torch.randint(2, 97, (1, 8)), attention_mask=mask, past_key_values=cache)


def test_crop_needs_a_recorded_past(model):
    cache = cache_of(model.config)
    read(model, cache)
    cache.crop(0)
    with pytest.raises(ValueError, match="call cache.activate_past_recording"):
        cache.crop(-1)
    cache.activate_past_recording()
    read(model, cache, length=5)
    cache.crop(-3)
    assert cache.num_seen_tokens == 34
    for count, message in ((-3, "can take back its last 0 tokens"), (3, "0 or minus a number")):
        with pytest.raises(ValueError, match=message):
            cache.crop(count)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda layer: layer.state.positions[0, 0].fill_(-1), "another number of entries"),
        (lambda layer: layer.state.positions[0, 0, :2].fill_(30), "twice"),
        (lambda layer: layer.state.scores[0, 0].fill_(-1.0), "negative"),
        (lambda layer: layer.state.scores[0, 0].fill_(torch.nan), "not a number"),
        (lambda layer: layer.state.positions[0, 0, :1].fill_(99), "has not seen"),
        (lambda layer: layer.state.ranks[0, 0, :2].fill_(0), "another place than its rank"),
    ],
)
def test_check_integrity_finds_damage(model, break_it, message):
    cache = cache_of(model.config, heavy=4, recent=4, positions="rolling")
    read(model, cache)
    cache.check_integrity()
    break_it(cache.layers[1])
    with pytest.raises(ValueError, match=message):
        cache.check_integrity()


def test_layer_index_and_empty_cache_are_checked(model):
    cache = cache_of(model.config)
    with pytest.raises(ValueError, match="cache is empty"):
        cache.scores(0)
    with pytest.raises(ValueError, match=r"one of \[0, 1\], got 5"):
        cache.kept_positions(5)


def test_decode_keeps_its_tensors(model):
    """Static shapes: a step changes no shape and moves no entry."""
    cache = cache_of(model.config, heavy=4, recent=4)
    read(model, cache)
    layer = cache.layers[0]
    before = (layer.keys.data_ptr(), layer.values.data_ptr(), layer.state.scores.data_ptr())
    positions = layer.state.positions.clone()
    read(model, cache, length=1)
    assert before == (layer.keys.data_ptr(), layer.values.data_ptr(), layer.state.scores.data_ptr())
    assert (
        int((layer.state.positions != positions).sum(-1).max()) <= 2
    )  # the written and the freed slot


@pytest.mark.parametrize("positions", ["original", "rolling"])
def test_a_cache_that_fills_while_decoding_is_known_to_be_full(model, positions):
    cache = cache_of(model.config, heavy=4, recent=5, positions=positions)
    mask = torch.ones(1, 20, dtype=torch.long)
    read(model, cache, length=3)
    for step in range(3, 14):
        assert [layer.slots.is_full for layer in cache.layers] == [step > 10] * len(cache.layers)
        if step == 5:
            mask[:, step] = 0  # a step that adds nothing
        with torch.no_grad():
            seen_mask = mask[:, : step + 1]
            model(torch.full((1, 1), 7), attention_mask=seen_mask, past_key_values=cache)
        cache.check_integrity()


class Equal(h2okv.Rule):
    """Ranks all entries alike."""

    name = "equal"

    def priority(self, scores, positions, newest, layer_idx):
        return torch.zeros_like(scores)


@pytest.mark.parametrize("evict_every", [None, 4])
def test_of_equal_entries_the_oldest_leave_whatever_the_order_of_slots(make_llama, evict_every):
    """After steps that evict, slots are not in the order of the text."""
    model = make_llama()
    cache = h2okv.H2OCache(model.config, 6, 2, policy=Equal(), evict_every=evict_every)
    ids, read = torch.arange(20)[None], 0
    with torch.no_grad():
        for length in (13, 1, 1, 1, 1, 3):
            model(ids[:, read : read + length], **{CACHE: cache})
            read += length
    for layer in range(model.config.num_hidden_layers):
        for head in cache.kept_positions(layer)[0].tolist():
            assert sorted(p for p in head if p >= 0) == list(range(12, 20))
