"""H2O on blocks that a server hands out, against a cache of each request's own."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import h2okv
from h2okv.cache.rope import Rotation
from h2okv.config import CacheConfig
from h2okv.ops.decode import decode_with_scores, write_slot
from h2okv.ops.indexed import Indexed
from h2okv.vllm_plugin.settings import tokens_to_run
from h2okv.vllm_plugin.state import StateLayer, block_bytes, model_rotation, state_spec

HEADS, GROUPS, SIZE, LAYER = 2, 3, 8, 1
NUM_BLOCKS = 6
POLICIES = ("h2o", "heavy", "recent", "sink_recent", "random", "strided", "fixed_heavy")
CASES = [{"policy": policy} for policy in POLICIES]
CASES += [{"scoring": scoring} for scoring in ("mean", "decay", "value_norm")]
CASES += [{"scoring": "expected"}, {"policy": "best"}]
CASES += [{"sink": 3}, {"policy": "random", "seed": 5}]


def config_of(**options) -> CacheConfig:
    return CacheConfig(**{"heavy": 5, "recent": 4} | options)


def dirty_pool(config: CacheConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All blocks as a server cuts them out of its memory, with what others have left there."""
    spec = state_spec(config, HEADS, SIZE, dtype)
    size = block_bytes(spec)
    pages = torch.full((NUM_BLOCKS, size), 0xFF, dtype=torch.uint8)  # NaN, and -1 as an int32
    pool, offset = {}, 0
    for name, (shape, kind) in spec.items():
        stop = offset + torch.Size(shape).numel() * kind.itemsize
        pool[name] = pages[:, offset:stop].view(kind).view(-1, *shape)
        offset = stop
    assert offset == size
    pool["positions"].random_(0, 50)
    return pool


def make_layer(config: CacheConfig, dtype=torch.float32, scale=SIZE**-0.5, softcap=None):
    layer = StateLayer(config, LAYER, scale, softcap)
    layer.blocks = pool = dirty_pool(config, dtype)
    layer.rotates = rotation(config, dtype)
    return pool, layer


MODEL = LlamaConfig(num_hidden_layers=LAYER + 1, hidden_size=48, num_attention_heads=6)


def rotation(config: CacheConfig, dtype: torch.dtype) -> Rotation | None:
    """How the model would rotate, where a scoring asks queries again further on."""
    if config.scoring != "expected":
        return None
    return model_rotation(MODEL, dtype, in_halves=True)


class Request:
    """One request's tokens, and what an `H2OCache` of its own makes of them."""

    def __init__(self, config: CacheConfig, length: int, seed: int, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(seed)

        def states(heads: int, scale: float) -> torch.Tensor:
            made = torch.randn(length, heads, SIZE, generator=generator) * scale
            return made.to(dtype)

        self.query, self.key = states(HEADS * GROUPS, 3.0), states(HEADS, 1.0)
        self.value = states(HEADS, 1.0)
        self.cache = h2okv.H2OCache.from_config(MODEL, config)
        self.cache.layers[LAYER].learn_rotation(rotation(config, dtype))
        self.seen, self.block = 0, -1

    def next(self, count: int) -> tuple[torch.Tensor, ...]:
        own = slice(self.seen, self.seen + count)
        self.seen += count
        return self.query[own], self.key[own], self.value[own]

    def expected(self, *tokens: torch.Tensor) -> torch.Tensor:
        """``[T, HQ, D]`` by the cache of its own."""
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in tokens)
        layer = self.cache.layers[LAYER]
        layer.update(key, value)
        return layer.attend(query, key, value, None, SIZE**-0.5)[0].transpose(0, 1)

    def check_held(self, pool: dict[str, torch.Tensor]) -> None:
        held = self.cache.layers[LAYER].state
        for head in range(HEADS):
            mine = pool["positions"][self.block, head]
            own = held.positions[0, head]
            order, own_order = mine.argsort()[(mine < 0).sum() :], own.argsort()[(own < 0).sum() :]
            assert mine[order].tolist() == own[own_order].tolist()
            torch.testing.assert_close(
                pool["scores"][self.block, head][order], held.scores[0, head][own_order]
            )
            for name in ("keys", "values"):
                mine_held = pool[name][self.block, head][order]
                assert mine_held.equal(getattr(held, name)[0, head][own_order])


def run_batch(layer, batch, extra=0):
    """Run a step of ``(request, count)``; compares the output of each with its own cache's."""
    parts = [request.next(count) for request, count in batch]
    wanted = [request.expected(*part) for (request, _), part in zip(batch, parts, strict=True)]
    counts = [count for _, count in batch]
    starts = [sum(counts[:place]) for place in range(len(counts) + 1)] + [sum(counts)] * extra
    index = [request.block for request, _ in batch] + [-1] * extra
    lengths = [request.seen for request, _ in batch] + [0] * extra
    tokens = (torch.cat(own) for own in zip(*parts, strict=True))
    output = layer.run(*tokens, starts, lengths, index)
    exact = output.dtype == torch.float32
    tolerance = {"atol": 1e-5, "rtol": 1e-4} if exact else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(output, torch.cat(wanted), **tolerance)
    return output


def run_requests(config: CacheConfig, dtype: torch.dtype, steps: int = 14) -> None:
    """Requests of all lengths come, go and come again on dirty blocks, in changing order."""
    pool, layer = make_layer(config, dtype)
    order = torch.Generator().manual_seed(1)
    first = [Request(config, length + steps, length, dtype) for length in (23, 4, 9, 1)]
    for request, block in zip(first, (5, 1, 3, 4), strict=True):
        request.block = block
    run_batch(layer, [(first[0], 23), (first[3], 1)])
    run_batch(layer, [(first[1], 4), (first[0], 1), (first[2], 9), (first[3], 1)], extra=2)
    for _ in range(steps - 3):
        shuffled = torch.randperm(4, generator=order).tolist()
        run_batch(layer, [(first[place], 1) for place in shuffled], extra=1)
    for request in first:
        request.check_held(pool)
    # A request that comes to the block of one that is gone finds nothing of it.
    late = Request(config, 3 + steps, 77, dtype)
    late.block = first[0].block
    run_batch(layer, [(first[1], 1), (late, 3)])
    for _ in range(steps):
        run_batch(layer, [(late, 1)])
    late.check_held(pool)


@pytest.mark.parametrize("options", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_every_request_gets_what_its_own_cache_gives(options):
    run_requests(config_of(**options), torch.float32)


def test_the_rotation_is_what_a_cache_finds_out_from_the_model():
    model = LlamaForCausalLM(MODEL).eval()
    cache = h2okv.H2OCache(MODEL, 5, 4, scoring="expected")
    with h2okv.enable(model), torch.inference_mode():
        model(torch.randint(9, (1, 20)), past_key_values=cache)
    found = cache.layers[LAYER].text_rotation
    made = model_rotation(MODEL, torch.float32, in_halves=True)
    assert (made.width, made.layout) == (found.width, found.layout)
    places, end = torch.arange(20).unsqueeze(0), torch.tensor([[35]])
    assert made.moved(places, end).equal(found.moved(places, end))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scoring", ["sum", "value_norm", "expected"])
def test_in_few_bits(dtype, scoring):
    run_requests(config_of(scoring=scoring), dtype)


@pytest.mark.parametrize("scoring", ["decay", "expected"])
def test_a_prompt_in_chunks_is_a_cache_with_prefill_chunk(scoring):
    config, chunk = config_of(scoring=scoring), 7
    in_chunks = config_of(scoring=scoring, prefill_chunk=chunk)
    pool, layer = make_layer(config)
    whole, again = (Request(in_chunks, 40, 3, torch.float32) for _ in range(2))
    expected = whole.expected(*whole.next(36))
    again.block, outputs = 2, []
    while again.seen < 36:
        count = tokens_to_run(again.seen, 20, 36, chunk)
        outputs.append(run_batch(layer, [(again, count)]))
    torch.testing.assert_close(torch.cat(outputs), expected, atol=1e-5, rtol=1e-4)
    again.check_held(pool)
    assert sum(map(len, outputs)) == 36 and [len(part) for part in outputs] == [7] * 5 + [1]


def test_triton_reads_and_writes_where_the_blocks_lie():
    config = config_of()
    with h2okv.use_ops("triton"):
        run_requests(config, torch.float32, steps=4)


def test_soft_cap_and_the_scale_reach_the_operations():
    config = config_of()
    query, key, value = (torch.randn(6, heads, SIZE) for heads in (HEADS * GROUPS, HEADS, HEADS))

    def first(scale: float, softcap: float | None) -> torch.Tensor:
        _, layer = make_layer(config, torch.float32, scale, softcap)
        return layer.run(query, key, value, [0, 6], [6], [0])

    plain = first(0.3, None)
    assert not torch.allclose(plain, first(0.6, None), atol=1e-3)
    assert not torch.allclose(plain, first(0.3, 0.5), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_indexed_entries_are_attended_to_where_they_lie(dtype):
    pages = torch.randn(5, 2 * HEADS * 7 * SIZE + 3).to(dtype)
    blocks = pages[:, : HEADS * 7 * SIZE].view(5, HEADS, 7, SIZE)
    index = torch.tensor([3, 0, 4])
    query = torch.randn(3, HEADS * GROUPS, 1, SIZE).to(dtype)
    entry, free = torch.randn(3, HEADS, 1, SIZE).to(dtype), torch.randint(7, (3, HEADS, 1))
    hidden = torch.rand(3, HEADS, 7) < 0.3
    copy = blocks[index].contiguous()
    before = pages.clone()
    write_slot(copy, free, entry)
    write_slot(Indexed(blocks, index), free, entry)
    assert copy.equal(blocks[index])
    assert (pages != before).sum() <= 3 * HEADS * SIZE
    own = Indexed(blocks, index)
    made = decode_with_scores(query, own, own, hidden, 0.3, softcap=2.0)
    expected = decode_with_scores(query, copy, copy, hidden, 0.3, softcap=2.0)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other)
