"""The memory model equals the allocated bytes."""

import re
from itertools import product

import pytest
import torch

import h2okv
from h2okv.cache.slot_pool import SlotPool
from h2okv.engine.memory import (
    MemoryModel,
    available_bytes,
    data_bytes,
    peak_resident_bytes,
    resident_bytes,
)

OPTIONS = [
    {"positions": positions, "scoring": scoring, "kv_bits": kv_bits}
    for positions, scoring, kv_bits in product(
        ("original", "rolling"), ("sum", "value_norm"), (None, 8, 6, 4)
    )
]
BATCH, LENGTH = 3, 40


def held_bytes(layer):
    return sum(tensor.nbytes for tensor in layer.state.tensors().values())


@pytest.mark.parametrize(
    "options",
    [
        *OPTIONS,
        {"policy": "strided_heavy"},
        {"layer_budgets": (1.5, 0.5)},
        {"layer_budgets": ((0.5, 1.5), (1.5, 0.5))},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pool_bytes_equal_the_memory_model(make_llama, options, dtype):
    model = make_llama().to(dtype)
    cache = h2okv.H2OCache(model, 1, 1, **options)
    budgets = (37, 21) if "layer_budgets" in options else (37, 37)
    sizes = MemoryModel(model.config, cache, dtype).serving(budgets, 100, 50)
    with torch.no_grad():
        model(torch.tensor([[5]]), past_key_values=cache)
    assert SlotPool(cache, 5, budgets).nbytes == 5 * sizes.sequence


@pytest.mark.parametrize(
    "options",
    [{}, {"positions": "rolling"}, {"scoring": "expected", "evict_every": 4}, {"kv_bits": 8},
     {"scoring": "expected"},
     {"layer_budgets": ((0.5, 1.5), (1.0, 1.0)), "scoring": "expected", "evict_every": 4}],
    ids=str,
)  # fmt: skip
def test_slots_are_allocated_as_sequences_come(make_llama, make_llm, make_prompts, options):
    """Without a memory limit on a CPU: for 1, 2, 4 and 5 sequences; the outputs are the same."""
    model = make_llama()
    prompts = make_prompts([30, 7, 21, 12, 16])
    params = h2okv.SamplingParams(max_tokens=20, temperature=0.0)
    options = {"heavy": 6, "recent": 4, "max_num_seqs": 5, **options}
    llm = make_llm(model, **options)
    sequence, reserved = llm.engine.memory.sequence, [llm.stats().reserved_bytes]
    assert "at most, allocated as requests come" in llm.engine.describe()
    alone = [llm.generate([prompt], params)[0].completions[0].token_ids for prompt in prompts]
    reserved.append(llm.stats().reserved_bytes)
    together = llm.generate(prompts, params)
    reserved.append(llm.stats().reserved_bytes)
    assert reserved == [sequence, sequence, 5 * sequence]
    assert [output.completions[0].token_ids for output in together] == alone
    limited = make_llm(model, memory=data_bytes() + (256 << 20), **options)
    assert limited.stats().reserved_bytes == 5 * sequence
    assert "MiB together" in limited.engine.describe()


@pytest.mark.parametrize("budget", [(0.2, 0.3), (5, 9)], ids=str)
@pytest.mark.parametrize("options", [*OPTIONS, {"policy": "strided_heavy"}], ids=str)
def test_cache_bytes_equal_the_memory_model(make_llama, options, budget):
    model = make_llama()
    cache = h2okv.H2OCache(model, *budget, **options)
    memory = MemoryModel(model.config, cache, model.dtype)
    slots = cache.slots_for(LENGTH, 10)
    ids = torch.randint(3, 90, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), h2okv.enable(model):
        model(ids, past_key_values=cache)
    for layer in cache.layers:
        layer_bytes = held_bytes(layer)
        assert layer_bytes == BATCH * memory.slots.total(slots)
        # Budgets of a batch may differ, which takes one byte of mask for each slot.
        marks = slots * memory.num_kv_heads
        assert memory.layer_bytes(slots) == memory.slots.total(slots) + marks
    assert memory.sequence_bytes(slots, LENGTH + 10) == memory.num_slot_layers * memory.layer_bytes(
        slots
    )


@pytest.mark.parametrize("lengths", [(40, 23, 9), (40, 40, 40)], ids=str)
def test_padding_and_growth_stay_within_the_memory_model(make_llama, lengths):
    model = make_llama()
    for options in ({}, {"policy": "full"}, {"positions": "rolling", "scoring": "value_norm"}):
        cache = h2okv.H2OCache(model.config, 0.2, 0.2, **options)
        memory = MemoryModel(model.config, cache, model.dtype)
        mask = torch.tensor([[0] * (LENGTH - n) + [1] * n for n in lengths])
        with h2okv.enable(model):
            model.generate(
                torch.full((BATCH, LENGTH), 7), attention_mask=mask, past_key_values=cache,
                max_new_tokens=120, min_new_tokens=120,
            )  # fmt: skip
        counted = BATCH * memory.layer_bytes(cache.slots_for(LENGTH, 120))
        for layer in cache.layers:
            layer_bytes = held_bytes(layer)
            assert 0.4 * counted < layer_bytes <= counted


def test_number_of_sequences_that_fit_into_memory(make_llama):
    model = make_llama()
    cache = h2okv.H2OCache(model.config)
    sizes = MemoryModel(model.config, cache, model.dtype).serving((37, 37), 100, 50)
    assert sizes.num_seqs(sizes.minimum) == 1
    assert sizes.num_seqs(sizes.minimum - 1) == 0
    assert sizes.num_seqs(sizes.minimum + 9 * (sizes.sequence + sizes.step)) == 10


def test_too_little_memory_raises_with_the_minimum(make_llama, make_llm):
    with pytest.raises(ValueError, match=r"no room for a single sequence; give \d+ MiB"):
        make_llm(make_llama(), max_num_seqs=None, memory=1 << 20)


@pytest.mark.parametrize("memory", [None, 1 << 40])
def test_more_sequences_than_fit_are_refused(make_llama, make_llm, monkeypatch, memory):
    """The message has the largest number that is accepted."""
    monkeypatch.setattr("h2okv.engine.serving.available_bytes", lambda device: 1 << 32)
    options = {"memory": memory, "max_prompt_tokens": 40, "max_prefill_tokens": 40}
    words = r"^max_num_seqs=1000000000 needs [\d.]+ TiB, and memory has room for ([\d,]+); give no"
    with pytest.raises(ValueError, match=words) as caught:
        make_llm(make_llama(), max_num_seqs=10**9, **options)
    largest = int(re.search(words, str(caught.value))[1].replace(",", ""))
    with pytest.raises(ValueError, match="more"):
        make_llm(make_llama(), max_num_seqs=largest + 10**6, **options)
    if memory is None:  # whose slots come with requests
        llm = make_llm(make_llama(), max_num_seqs=largest, **options)
        assert llm.engine.max_num_seqs == largest
        monkeypatch.setattr("h2okv.engine.serving.available_bytes", lambda device: None)
        llm = make_llm(make_llama(), max_num_seqs=10**6, **options)
        assert llm.engine.max_num_seqs == 10**6  # what is free is unknown


def test_number_of_sequences_by_free_memory(make_llama, make_llm):
    model = make_llama()
    llm = make_llm(model, max_num_seqs=None)
    assert llm.engine.max_num_seqs == 64
    description = llm.describe()
    assert "64 sequences of" in description
    assert "times as much" in description


def test_unused_memory_is_returned_only_with_a_memory_limit(make_llama, make_llm, monkeypatch):
    calls = []
    monkeypatch.setattr("h2okv.engine.serving.give_memory_back", lambda: calls.append(1))
    make_llm(make_llama(), max_num_seqs=None)
    assert not calls  # it would double the time of a prompt
    if data_bytes() is not None:
        make_llm(make_llama(), max_num_seqs=None, memory=data_bytes() + (128 << 20))
        assert calls == [1]


def test_resident_memory_of_the_process():
    resident = resident_bytes()
    if resident is None:
        pytest.skip("this system has no /proc")
    assert 0 < resident <= peak_resident_bytes()
    assert available_bytes(torch.device("cpu")) > 0


def test_budgets_by_layer_are_counted_and_checked_by_layer(make_llama, make_llm):
    """Check capacities of 8 x 0.5, 8 x 1.5 and 8 x 1 entries, each with 4 recent ones."""
    model = make_llama(layers=3)
    llm = make_llm(model, heavy=8, recent=4, layer_budgets=(0.5, 1.5, 1.0))
    llm.generate([[5] * 40], h2okv.SamplingParams(max_tokens=6))
    pool, stats = llm.engine.runner.pool, llm.stats()
    assert [layer.slots.capacity - 1 for layer in pool.cache.layers] == [8, 16, 12]
    assert stats.reserved_bytes == llm.engine.memory.sequence
    # The last token is not fed back, so 45 are seen.
    assert stats.evictions == (3 * 45 - 8 - 16 - 12) * pool.num_heads // 3
    # The same total, but more than the slots of the layer with the largest factor.
    with pytest.raises(ValueError, match="budget of 17 entries is larger than the 16"):
        llm.generate([[5] * 40], budget=h2okv.Budget(heavy=10, recent=2))
