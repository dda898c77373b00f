"""A cache that is copied, loaded, cut, padded, interrupted or misused, and then goes on."""

import gc
import io
import pickle
import warnings

import pytest
import torch
from oracle import cache_of
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM, StaticCache

import h2okv
import h2okv.cache.layer as cache_layer
from h2okv.policy import get_rule

SMALL = {"heavy": 5, "recent": 4}


def tokens(length: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(model, ids, cache, **options):
    return model(ids, past_key_values=cache, **options).logits


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama(layers=3)


def padded(short: int = 20, long: int = 45) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows, the second padded on the left, and their mask."""
    ids = tokens(long, rows=2)
    mask = torch.ones_like(ids)
    mask[1, : long - short] = 0
    return ids, mask


@pytest.mark.parametrize("masks", [False, True])
def test_the_length_is_a_number_that_stays(model, masks):
    cache = cache_of(model.config, **SMALL, masks=masks)
    read(model, tokens(20), cache)
    seen = cache.get_seq_length()
    read(model, tokens(1), cache)
    assert type(seen) is int and seen == 20 and cache.get_seq_length() == 21


def test_in_a_compiled_step_the_length_is_no_constant(model):
    cache = cache_of(model.config, **SMALL)
    read(model, tokens(20), cache)
    read(model, tokens(1), cache)
    counter = CompileCounter()
    seen = torch.compile(lambda: cache.get_seq_length() + 0, backend=counter, fullgraph=True)
    for length in (21, 22, 23):
        assert int(seen()) == length
        read(model, tokens(1), cache)
    assert counter.frame_count == 1


def test_rolling_holds_nothing_of_a_forward(make_llama):
    model = make_llama()
    gc.collect()
    gc.disable()
    try:
        cache = cache_of(model.config, **SMALL, positions="rolling")
        logits = read(model, tokens(301), cache)
        shape = logits.shape
        del logits, cache
        alive = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        assert not [each for each in alive if each.shape[:2] == shape[:2]]
    finally:
        gc.enable()


@pytest.mark.parametrize("method", ["next_turn", "prefill"])
@pytest.mark.parametrize("options", [{}, {"evict_every": 8}, {"positions": "rolling"}], ids=str)
def test_a_turn_after_a_padded_prompt(model, options, method):
    ids, mask = padded()
    more = tokens(6, rows=2, seed=1)
    budget = {"heavy": 0.2, "recent": 0.2, "min_tokens": 0} | options
    cache = cache_of(model.config, **budget)
    h2okv.prefill(model, ids, cache, mask)
    alone = cache_of(model.config, **budget)
    h2okv.prefill(model, ids[1:, 25:], alone)
    if method == "prefill":
        logits, expected = h2okv.prefill(model, more, cache), h2okv.prefill(model, more[1:], alone)
    else:
        turn = cache.next_turn(more)
        assert turn["attention_mask"].sum(dim=1).tolist() == [51, 26]
        logits, expected = (
            model.generate(
                **turn, past_key_values=continued, max_new_tokens=1, do_sample=False,
                output_logits=True, return_dict_in_generate=True,
            ).logits[0]
            for turn, continued in ((turn, cache), (alone.next_turn(more[1:]), alone))
        )  # fmt: skip
    torch.testing.assert_close(logits[1:], expected, atol=1e-4, rtol=1e-4)


def _copy(cache, method, path):
    if method == "pickle":
        return pickle.loads(pickle.dumps(cache))
    if method == "torch.save":
        file = io.BytesIO()
        torch.save(cache, file)
        file.seek(0)
        return torch.load(file, weights_only=False)
    if method == "fork":
        return cache.fork(1)
    cache.save(path / "cache")
    return h2okv.H2OCache.load(path / "cache")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", ["fork", "load", "pickle", "torch.save"])
@pytest.mark.parametrize(
    "options", [{}, {"positions": "rolling"}, {"kv_bits": 8}, {"masks": True}], ids=str
)
def test_a_copy_goes_on_as_the_cache_does(model, tmp_path, options, method, mode):
    if method == "load" and "masks" in options:
        with pytest.raises(ValueError, match="MaskedCache cannot be saved"):
            cache_of(model.config, masks=True).save(tmp_path / "c")
        return
    cache = cache_of(model.config, **SMALL, **options)
    read(model, tokens(30), cache)
    with mode():
        duplicate = _copy(cache, method, tmp_path)
    for at in range(3):
        ids = tokens(1, seed=at)
        assert torch.equal(read(model, ids, duplicate), read(model, ids, cache))
    duplicate.check_integrity()


def test_an_unpickled_cache_knows_its_weights(model, make_llama):
    cache = cache_of(model.config, **SMALL)
    read(model, tokens(30), cache)
    duplicate = pickle.loads(pickle.dumps(cache))
    with pytest.raises(ValueError, match="saved with other weights"):
        read(make_llama(layers=3, seed=1), tokens(1), duplicate)


@pytest.mark.parametrize(
    "options", [{}, {"masks": True}, {"kv_bits": 8}, {"positions": "rolling"}], ids=str
)
def test_rows_may_be_chosen_by_a_mask(model, kept_sets, options):
    logits = []
    for rows in (torch.tensor([True, False, True]), torch.tensor([0, 2])):
        cache = cache_of(model.config, **SMALL, **options)
        read(model, tokens(20, rows=3), cache)
        cache.batch_select_indices(rows)
        logits.append(read(model, tokens(1, rows=2), cache))
    assert torch.equal(*logits)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("layer", [1, 2])
def test_an_interrupted_forward_is_noticed(make_llama, layer, length):
    model = make_llama(layers=3)
    cache = cache_of(model.config, **SMALL)
    read(model, tokens(20), cache)

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[layer].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        read(model, tokens(1), cache)
    hook.remove()
    with pytest.raises(ValueError, match="interrupted"):
        cache.check_integrity()
    before = [int(cache_layer.cumulative_length) for cache_layer in cache.layers]
    with pytest.raises(ValueError, match=r"interrupted.*cache\.reset"):
        read(model, tokens(length), cache)
    assert [int(cache_layer.cumulative_length) for cache_layer in cache.layers] == before
    cache.reset()
    read(model, tokens(20), cache)
    cache.check_integrity()


def test_a_prompt_in_transformers_own_chunks_is_told(model):
    ids = tokens(60)
    options = {"max_new_tokens": 3, "do_sample": False, "prefill_chunk_size": 16}
    cache = cache_of(model.config, heavy=0.2, recent=0.2, min_tokens=0)
    with pytest.warns(UserWarning, match=r"first forward's 16 tokens.*cache\.expect"):
        model.generate(ids, past_key_values=cache, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        cache = cache_of(model.config, heavy=0.2, recent=0.2, min_tokens=0)
        cache.expect(60)
        model.generate(ids, past_key_values=cache, **options)
        assert cache.num_cached_tokens == 24
        model.generate(ids, past_key_values=cache_of(model.config, 20, 20), **options)


def test_what_a_failed_prefill_expected_is_forgotten(model, kept_sets):
    cache = cache_of(model.config, heavy=0.1, recent=0.1, min_tokens=0)
    with pytest.raises(IndexError):
        h2okv.prefill(model, torch.full((1, 300), 500), cache)
    read(model, tokens(30), cache)
    assert cache.num_cached_tokens == 6


@pytest.mark.parametrize("length", [-1, 0, 10.5, "a", True])
def test_an_expected_length_is_a_number_of_tokens(model, length):
    with pytest.raises(ValueError, match=f"length={length!r} is not a number of tokens"):
        cache_of(model.config, 4, 4).expect(length)


def test_a_soft_cap_on_a_static_cache():
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(
        Gemma2Config(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, intermediate_size=64, vocab_size=97, sliding_window=64,
            attn_logit_softcapping=1.0,
        )
    ).eval()  # fmt: skip
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 20
    logits = []
    for attention in ("eager", "h2o"):
        model.set_attn_implementation(attention)
        for cache in (StaticCache(model.config, max_cache_len=32), DynamicCache()):
            outputs = [read(model, chunk, cache) for chunk in tokens(9).split([7, 1, 1], dim=1)]
            logits.append(torch.cat(outputs, dim=1))
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], atol=1e-5, rtol=1e-5)


@pytest.fixture
def warned(caplog):
    """Return the text of transformers' warnings, each of which is given once."""
    import logging

    from h2okv.integration import attention as hf

    hf.logger.warning_once.cache_clear()
    loggers = (logging.getLogger("transformers"), hf.logger)
    for logger in loggers:
        logger.addHandler(caplog.handler)
    yield caplog
    for logger in loggers:
        logger.removeHandler(caplog.handler)


def test_attention_that_was_asked_for_is_missed_aloud(model, warned):
    read(model, tokens(9), cache_of(model.config, **SMALL), output_attentions=True)
    assert "output_attentions=True returns None" in warned.text


def test_training_through_a_cache_is_told(make_llama, warned):
    model = make_llama()
    for _ in range(2):  # inference with gradients on, and training without the cache, are fine
        model(tokens(9), past_key_values=cache_of(model.config, **SMALL))
        model.train()(tokens(9), use_cache=False)
        model.eval()
    assert "no gradient" not in warned.text
    model.train()(tokens(9), past_key_values=cache_of(model.config, **SMALL))
    assert "queries, keys and values get no gradient" in warned.text


def test_a_text_that_adds_nothing_is_refused(model):
    """transformers leaves no token of it, and would fail on an empty tensor."""
    cache = cache_of(model.config, **SMALL)
    options = {"past_key_values": cache, "max_new_tokens": 3, "do_sample": False}
    model.generate(tokens(20), **options)
    for length in (1, 10):
        with pytest.raises(ValueError, match=r"seen 22 tokens and got none.*cache\.reset"):
            model.generate(tokens(length, seed=1), **options)


@pytest.mark.parametrize("chunk", [None, 8])
def test_an_interruption_within_a_layer_is_noticed(make_llama, monkeypatch, chunk):
    """Of a single layer, whose counts of forwards tell nothing."""
    model = make_llama(layers=1)
    ids = torch.randint(2, 97, (1, 30), generator=torch.Generator().manual_seed(4))
    cache = cache_of(model.config, 4, 4, evict_every=chunk)
    h2okv.prefill(model, ids, cache)
    calls, keep = [], cache_layer.choose

    def interrupted(*args):
        calls.append(args)
        if len(calls) == (1 if chunk is None else 2):
            raise KeyboardInterrupt
        return keep(*args)

    with monkeypatch.context() as patch:
        patch.setattr(cache_layer, "choose", interrupted)
        with pytest.raises(KeyboardInterrupt):
            h2okv.prefill(model, ids, cache)
    with pytest.raises(ValueError, match=r"interrupted.*cache\.reset"):
        h2okv.prefill(model, ids, cache)
    cache.reset()
    h2okv.prefill(model, ids, cache)
    cache.check_integrity()


@pytest.mark.parametrize(
    "options, text",
    [
        ({"max_tokens": 2.5}, "max_tokens=2.5 is not a number of tokens"),
        ({"max_tokens": True}, "max_tokens=True is not a number of tokens"),
        ({"seed": "a"}, "seed must be an int below .*, got 'a'"),
        ({"seed": 2**60, "policy": "random"}, "seed must be an int below"),
        ({"seed": 1.5, "policy": "random"}, "seed must be an int below .*, got 1.5"),
        ({"seed": 3}, "seed=3 has no effect with policy='h2o'; leave it out"),
        ({"seed": 3, "policy": get_rule("random", 4)}, r"no effect with policy=Random\("),
    ],
)
def test_options_that_make_no_sense(model, options, text):
    with pytest.raises(ValueError, match=text):
        cache_of(model.config, **options)


def test_prefill_refuses_other_types(model):
    cache = cache_of(model.config)
    for ids in ([[1, 2]], torch.tensor([1, 2]), "text", None, torch.ones(1, 2)):
        for take in (cache.next_turn, lambda ids: h2okv.measure_layer_budgets(model, ids)):
            with pytest.raises(ValueError, match=r"must be an int tensor \[batch, tokens\], got"):
                take(ids)
        with pytest.raises(ValueError, match=r"must be an int tensor \[batch, tokens\], got"):
            h2okv.prefill(model, ids, cache)
    with pytest.raises(ValueError, match="cache must be an H2OCache, got DynamicCache"):
        h2okv.prefill(model, tokens(4), DynamicCache())
