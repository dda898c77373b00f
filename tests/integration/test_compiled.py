"""Decode steps through torch.compile inside `generate`."""

import pytest
import torch
from oracle import cache_of
from torch._dynamo.testing import CompileCounterWithBackend

import h2okv

pytestmark = pytest.mark.slow
NEW = 14


@pytest.fixture
def counter(monkeypatch):
    """Counts compiled graphs, without the compiler behind them."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    plain = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model, **options: plain(model, backend=counter, **options)
    )
    yield counter
    torch._dynamo.reset()


def prompt(rows=2, length=30):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, 97, (rows, length), generator=generator)


def run(model, compile, mask=None, ids=None, **options):
    ids = prompt() if ids is None else ids
    cache = cache_of(model.config, **{"heavy": 5, "recent": 6} | options)
    with h2okv.enable(model, compile=compile):
        output = model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=NEW, do_sample=False
        )
        cache.check_integrity()
        turn = cache.next_turn(output)
        output = model.generate(**turn, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    return output, cache


@pytest.mark.parametrize(
    "options", [{}, {"positions": "rolling"}, {"sink": 2, "heavy": 0.1, "min_tokens": 0}]
)
@pytest.mark.parametrize("is_padded", [False, True])
def test_generate_gives_the_same_text(make_llama, kept_sets, counter, options, is_padded):
    model = make_llama(attention="sdpa")
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, : 9 * is_padded] = 0
    expected, plain = run(model, False, mask, **options)
    ids, cache = run(model, True, mask, **options)
    assert torch.equal(ids, expected)
    assert kept_sets(cache) == kept_sets(plain)
    assert counter.frame_count >= 2  # the trial, and the step
    assert "forward" not in vars(model) and model.config._attn_implementation == "sdpa"


def test_one_graph_serves_all_steps_turns_and_caches(make_llama, counter):
    model = make_llama()
    with h2okv.enable(model, compile=True):
        trial = counter.frame_count
        for _ in range(3):
            cache = cache_of(model.config, heavy=5, recent=6)
            text = prompt()
            for _ in range(2):
                text = model.generate(
                    text, past_key_values=cache, max_new_tokens=NEW, do_sample=False
                )
    assert counter.frame_count - trial == 1


def test_a_cache_that_fills_costs_one_more_graph(make_llama, counter):
    model = make_llama()
    with h2okv.enable(model, compile=True):
        trial = counter.frame_count
        cache = cache_of(model.config, heavy=20, recent=20)
        model.generate(prompt(), past_key_values=cache, max_new_tokens=40, do_sample=False)
    assert all(layer.slots.is_full for layer in cache.layers)
    assert counter.frame_count - trial == 2


def test_what_cannot_be_compiled_runs_as_it_is(make_llama, counter):
    model = make_llama()
    for options in ({"policy": "full"}, {"masks": True}):
        expected, _ = run(model, False, **options)
        before = counter.frame_count
        ids, _ = run(model, True, **options)
        assert torch.equal(ids, expected)
        assert counter.frame_count - before <= 1  # at most the trial


def test_no_compiler_is_one_sentence(make_llama, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nand more")

    monkeypatch.setattr(torch, "compile", fail)
    model = make_llama(attention="sdpa")
    message = r"C\+\+ compiler found\); .* leave out compile=True"
    with pytest.raises(ValueError, match=message), h2okv.enable(model, compile=True):
        pass
    assert model.config._attn_implementation == "sdpa"
