"""H2O on a server's blocks, against a separate `H2OCache` for each request."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import h2okv
from h2okv.cache.rope import Rotation
from h2okv.config import CacheConfig
from h2okv.ops.reference import AttentionSpec
from h2okv.vllm_plugin.batch import Batch
from h2okv.vllm_plugin.settings import tokens_to_run
from h2okv.vllm_plugin.state import LayerShape, StateLayer, StatePool, model_rotation

HEADS, GROUPS, SIZE, LAYER = 2, 3, 8, 1
NUM_BLOCKS = 9
POLICIES = ("h2o", "heavy", "recent", "sink_recent", "random", "strided", "fixed_heavy")
CASES = [{"policy": policy} for policy in POLICIES]
CASES += [{"scoring": scoring} for scoring in ("mean", "decay", "value_norm")]
CASES += [{"scoring": "expected"}, {"policy": "best"}]
CASES += [{"sink": 3}, {"policy": "random", "seed": 5}]
BY_HEAD = ((1.0, 1.0), (1.8, 0.4), (0.6, 1.2))
BY_LAYER = (1.0, 1.4, 0.6)
CASES += [{"layer_budgets": BY_HEAD}, {"policy": "best", "layer_budgets": BY_HEAD}]
CASES += [{"layer_budgets": BY_LAYER}, {"scoring": "value_norm", "layer_budgets": BY_HEAD}]
EVERY = [{"evict_every": 6}, {"evict_every": 6, "scoring": "value_norm", "sink": 2}]
EVERY += [{"evict_every": 6, "policy": "best"}, {"evict_every": 6, "layer_budgets": BY_HEAD}]
EVERY += [{"evict_every": 5, "policy": "best", "layer_budgets": BY_HEAD}]
EVERY += [{"evict_every": 5, "policy": "keydiff", "sink": 2}, {"evict_every": 1}]
CASES += EVERY


def config_of(**options) -> CacheConfig:
    """Return the options of `CacheConfig`, which are counted from the text's first token here."""
    return CacheConfig(**{"heavy": 5, "recent": 4, "layer_budgets": None} | options).with_cuts(None)


def shape(number=LAYER, dtype=torch.float32, **changes) -> LayerShape:
    return LayerShape(number, HEADS * GROUPS, HEADS, SIZE, dtype, **changes)


def make_layer(config: CacheConfig, dtype=torch.float32, scale=SIZE**-0.5, softcap=None):
    """Return a layer among others, and the memory with old contents, as a server allocates it."""
    spec = AttentionSpec(scale, softcap)
    layers = [StateLayer(config, shape(number, dtype), spec) for number in range(3)]
    pool = StatePool(layers)
    pages = torch.full((NUM_BLOCKS, pool.block_bytes), 0xFF, dtype=torch.uint8)  # NaN, and -1
    pool.bind(pages)
    for layer in layers:
        layer.rotates, layer.pool = rotation(config, dtype), pool
        layer.blocks["positions"].random_(0, 50)
    return pool, layers[LAYER]


MODEL = LlamaConfig(
    num_hidden_layers=3, hidden_size=48, num_attention_heads=6, num_key_value_heads=2
)


def rotation(config: CacheConfig, dtype: torch.dtype) -> Rotation | None:
    """Return the model's rotation, for scorings that re-evaluate queries further on."""
    if config.scoring != "expected":
        return None
    return model_rotation(MODEL, dtype, in_halves=True)


class Request:
    """One request's tokens, and an `H2OCache` of its own."""

    def __init__(self, config: CacheConfig, length: int, seed: int, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(seed)

        def states(heads: int, scale: float) -> torch.Tensor:
            tensor = torch.randn(length, heads, SIZE, generator=generator) * scale
            return tensor.to(dtype)

        self.query, self.key = states(HEADS * GROUPS, 3.0), states(HEADS, 1.0)
        self.value = states(HEADS, 1.0)
        self.cache = h2okv.H2OCache.from_config(MODEL, config)
        self.cache.layers[LAYER].learn_rotation(rotation(config, dtype))
        self.seen, self.block, self.table = 0, -1, None

    def next(self, count: int) -> tuple[torch.Tensor, ...]:
        span = slice(self.seen, self.seen + count)
        self.seen += count
        return self.query[span], self.key[span], self.value[span]

    def expected(self, *tokens: torch.Tensor) -> torch.Tensor:
        """Return the output of the request's own cache, ``[T, HQ, D]``."""
        query, key, value = (states.transpose(0, 1).unsqueeze(0) for states in tokens)
        layer = self.cache.layers[LAYER]
        layer.update(key, value)
        return layer.attend(query, key, value, None, AttentionSpec(SIZE**-0.5))[0].transpose(0, 1)

    def check_state(self, layer: StateLayer) -> None:
        state = self.cache.layers[LAYER].state
        layer.pool.end_spans()  # as the next step does
        index = torch.tensor([self.block])
        stored = layer._copies(index, torch.tensor([self.seen]))
        names = ("positions", "scores", "keys", "values")
        for head in range(HEADS):
            left, right = (
                [field[0, head] for field in some.by_head(*names)] for some in (stored, state)
            )
            left, right = (
                [field[fields[0].argsort()[(fields[0] < 0).sum() :]] for field in fields]
                for fields in (left, right)
            )
            assert left[0].tolist() == right[0].tolist()
            torch.testing.assert_close(left[1], right[1])
            assert left[2].equal(right[2]) and left[3].equal(right[3])


def run_batch(layer, pool, batch, extra=0, block_size=None):
    """Run a step of ``(request, count)``; compare each output with that of the request's cache."""
    states = [request.next(count) for request, count in batch]
    expected = [
        request.expected(*tokens) for (request, _), tokens in zip(batch, states, strict=True)
    ]
    counts = [count for _, count in batch]
    starts = [sum(counts[:index]) for index in range(len(counts) + 1)] + [sum(counts)] * extra
    tables = [request.table or [request.block] for request, _ in batch] + [[-1]] * extra
    columns = max(map(len, tables))
    table = torch.tensor([row + [0] * (columns - len(row)) for row in tables], dtype=torch.int32)
    lengths = [request.seen for request, _ in batch] + [0] * extra
    inputs = [torch.cat(tensors) for tensors in zip(*states, strict=True)]
    output = torch.full_like(inputs[0], torch.nan)
    step = Batch.of(starts, lengths, table, pool, block_size)
    for other in pool.layers if layer.span > 1 else [layer]:  # spans end in all layers
        step.run(other, *inputs, output if other is layer else torch.empty_like(output))
    exact = output.dtype == torch.float32
    tolerance = {"atol": 1e-5, "rtol": 1e-4} if exact else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(output, torch.cat(expected), **tolerance)
    return output


def run_requests(config: CacheConfig, dtype: torch.dtype, steps: int = 14) -> None:
    """Run requests of all lengths, in changing order, on blocks with old contents."""
    pool, layer = make_layer(config, dtype)
    order = torch.Generator().manual_seed(1)
    first = [Request(config, length + steps, length, dtype) for length in (23, 4, 9, 1)]
    for request, block in zip(first, (5, 1, 3, 4), strict=True):
        request.block = block
    run_batch(layer, pool, [(first[0], 23), (first[3], 1)])
    run_batch(layer, pool, [(first[1], 4), (first[0], 1), (first[2], 9), (first[3], 1)], extra=2)
    for _ in range(steps - 3):
        shuffled = torch.randperm(4, generator=order).tolist()
        run_batch(layer, pool, [(first[index], 1) for index in shuffled], extra=1)
    for request in first:
        request.check_state(layer)
    # A request that gets the block of a finished one does not see its entries.
    late = Request(config, 3 + steps, 77, dtype)
    late.block = first[0].block
    run_batch(layer, pool, [(first[1], 1), (late, 3)])
    for _ in range(steps):
        run_batch(layer, pool, [(late, 1)])
    late.check_state(layer)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_every_request_equals_a_separate_cache(options):
    run_requests(config_of(**options), torch.float32)


def test_model_rotation_equals_the_caches():
    model = LlamaForCausalLM(MODEL).eval()
    cache = h2okv.H2OCache(MODEL, 5, 4, scoring="expected")
    with h2okv.enable(model), torch.inference_mode():
        model(torch.randint(9, (1, 20)), past_key_values=cache)
    expected = cache.layers[LAYER].rotations.text
    rotation = model_rotation(MODEL, torch.float32, in_halves=True)
    assert (rotation.width, rotation.layout) == (expected.width, expected.layout)
    positions, end = torch.arange(20).unsqueeze(0), torch.tensor([[35]])
    assert rotation.moved(positions, end).equal(expected.moved(positions, end))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scoring", ["sum", "value_norm", "expected"])
def test_half_precision_requests(dtype, scoring):
    run_requests(config_of(scoring=scoring), dtype)


@pytest.mark.parametrize("scoring", ["decay", "expected"])
def test_a_prompt_in_chunks_is_a_cache_with_evict_every(scoring):
    in_chunks = config_of(scoring=scoring, evict_every=7)
    pool, layer = make_layer(in_chunks)
    reference, request = (Request(in_chunks, 40, 3, torch.float32) for _ in range(2))
    expected = reference.expected(*reference.next(36))
    request.block, outputs = 2, []
    while request.seen < 36:
        count = tokens_to_run(request.seen, min(20, 36 - request.seen), 36, in_chunks)
        outputs.append(run_batch(layer, pool, [(request, count)]))
    torch.testing.assert_close(torch.cat(outputs), expected, atol=1e-5, rtol=1e-4)
    request.check_state(layer)
    assert sum(map(len, outputs)) == 36 and [len(output) for output in outputs] == [7] * 5 + [1]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_chunks_of_the_same_length_are_read_together(options):
    config = config_of(**options)
    (pool, layer), sizes = make_layer(config), []
    run_block = layer.run_block
    layer.run_block = lambda *states: sizes.append(len(states[4])) or run_block(*states)
    a, b, c, d = requests = [Request(config, 13, seed, torch.float32) for seed in range(4)]
    for block, request in enumerate(requests, start=2):
        request.block = block
    run_batch(layer, pool, [(a, 3), (b, 3), (c, 1)])
    run_batch(layer, pool, [(a, 2), (b, 2), (c, 2), (d, 2)])
    run_batch(layer, pool, [(c, 2), (d, 2)])
    run_batch(layer, pool, [(request, 1) for request in requests])
    run_batch(layer, pool, [(d, 1)])
    for count in (4, 2, 1):
        run_batch(layer, pool, [(request, count) for request in requests])
    for request in requests:
        request.check_state(layer)
    assert sizes == [2, 3, 1, 2, 4, 4]


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if "layer_budgets" in case),
    ],
    ids=str,
)
def test_triton_on_indexed_blocks(options):
    config = config_of(**options)
    with h2okv.use_ops("triton"):
        run_requests(config, torch.float32, steps=4)


@pytest.mark.parametrize("options", EVERY[:-1], ids=str)
def test_a_request_goes_on_from_a_copy_of_another_s_state(options):
    """As vLLM's prefix caching has it: every c tokens a block, a copy of the last."""
    config = config_of(**options)
    (pool, layer), size = make_layer(config), config.evict_every
    first = Request(config, 60, 3, torch.float32)
    first.table = [1, 2, 3, 4, 5, 0, 0, 0, 0, 0]
    while first.seen < 3 * size:
        run_batch(layer, pool, [(first, size)], block_size=size)
    # The other has the same beginning; its own blocks follow that of the first's third multiple.
    second = Request(config, 60, 3, torch.float32)
    second.expected(*second.next(3 * size))
    second.table = [0, 0, 3, 6, 7, 8, 0, 0, 0, 0]
    for request in (first, second):
        request.key[3 * size :].mul_(-1 if request is second else 1)
    for step in range(size + 2):
        counts = (1, 3 if step == 0 else 1)
        run_batch(layer, pool, list(zip((first, second), counts, strict=True)), block_size=size)
    for request in (first, second):
        request.block = request.table[(request.seen - 1) // size]
        request.check_state(layer)
    third = Request(config, 60, 3, torch.float32)
    third.expected(*third.next(3 * size))
    third.block = 3
    third.check_state(layer)  # no one has written to what both began with


@pytest.mark.parametrize("options", EVERY[:-1], ids=str)
def test_a_state_whose_span_a_step_has_ended_is_read_in_the_next(options):
    """Its request is gone by then, and another one has the same beginning."""
    config = config_of(**options)
    (pool, layer), size = make_layer(config), config.evict_every
    first, second = (Request(config, 60, 3, torch.float32) for _ in range(2))
    first.table, second.table = [1, 2, 3, 4, 0, 0], [0, 0, 0, 4, 5, 6]
    for count in [size] * 3 + [1] * size:
        run_batch(layer, pool, [(first, count)], block_size=size)
        second.expected(*second.next(count))
    for count in (3, 1):
        run_batch(layer, pool, [(second, count)], block_size=size)
    second.block = second.table[4]
    second.check_state(layer)


@pytest.mark.parametrize("count", [1, 4], ids="{} tokens".format)
@pytest.mark.parametrize("options", EVERY[:-1], ids=str)
def test_a_block_of_a_request_that_has_ended_a_span_is_another_s_in_the_next_step(options, count):
    config = config_of(**options)
    pool, layer = make_layer(config)
    gone, other, new = (Request(config, 40, seed, torch.float32) for seed in range(3))
    gone.block, other.block, new.block = 2, 3, 2
    run_batch(layer, pool, [(gone, 2 * config.evict_every - 1), (other, 5)])
    run_batch(layer, pool, [(gone, 1), (other, 1)])
    assert pool.ended is not None  # the span of a request that is gone now
    for step in range(config.evict_every + 2):
        run_batch(layer, pool, [(other, 1), (new, 1 if step else count)])
    for request in (other, new):
        request.check_state(layer)


def test_ranks_whose_heads_need_less_have_slots_that_nobody_takes():
    config = config_of(policy="best", layer_budgets=BY_HEAD)
    sizes = [
        StatePool(
            [
                StateLayer(
                    config,
                    LayerShape(n, GROUPS, 1, SIZE, torch.float32, rank, 2),
                    AttentionSpec(1.0),
                )
                for n in range(3)
            ]
        ).block_bytes
        for rank in range(2)
    ]
    assert sizes[0] == sizes[1]
    layers = [
        StateLayer(
            config, LayerShape(LAYER, GROUPS, 1, SIZE, torch.float32, rank, 2), AttentionSpec(1.0)
        )
        for rank in range(2)
    ]
    assert layers[0].totals == [9 + 8] and layers[1].totals == [2 + 8]
    assert layers[0].num_slots == layers[1].num_slots == 18
    replicated = LayerShape(LAYER, GROUPS, 1, SIZE, torch.float32, 3, 4)  # more ranks than heads
    assert StateLayer(config, replicated, AttentionSpec(1.0)).totals == [2 + 8]


def decode(config: CacheConfig, batch: int, seen: int = 30):
    """Return a layer, the tensors of a decode step and blocks that hold prompts."""
    pool, layer = make_layer(config)
    index = torch.arange(batch) % NUM_BLOCKS
    for block in range(NUM_BLOCKS):
        request = Request(config, seen, block, torch.float32)
        layer.run_block(*request.next(seen), torch.tensor([0]), torch.tensor([block]), True)
    shapes = ((batch, heads, SIZE) for heads in (HEADS * GROUPS, HEADS, HEADS))
    return pool, layer, (*map(torch.randn, shapes), torch.full((batch,), seen), index)


COMPILED = [{}, {"policy": "best", "layer_budgets": BY_HEAD}, {"evict_every": 7}]


@pytest.mark.parametrize("options", COMPILED, ids=str)
def test_a_decode_step_is_traced_whole_and_once(options):
    """For batches of 2 to 64. A batch of one is another trace, as always."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    config = config_of(**options)
    step = torch.compile(
        decode(config, 5)[1].run_step, backend=backend, fullgraph=True, dynamic=True
    )
    for batch in (5, 2, 9, 64):
        _, _, inputs = decode(config, batch)
        output = step(*inputs)
        assert output.shape == inputs[0].shape
    assert len(graphs) == 1


@pytest.mark.parametrize("options", COMPILED, ids=str)
def test_a_traced_step_is_the_step(options):
    torch._dynamo.reset()
    config = config_of(**options)
    results = []
    for is_traced in (False, True):
        torch.manual_seed(0)
        _, layer, inputs = decode(config, NUM_BLOCKS)
        step = layer.run_step
        if is_traced:
            step = torch.compile(step, backend="eager", fullgraph=True, dynamic=True)
        results.append(
            [step(*inputs), *(layer.blocks[name].clone() for name in sorted(layer.blocks))]
        )
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4)


class Reads(TorchDispatchMode):
    """Counts what the host reads of tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.is_nonzero.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.equal.default,
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [*COMPILED, {"scoring": "mean"}, {"policy": "random"}], ids=str)
def test_a_decode_step_reads_nothing(options, monkeypatch):
    config = config_of(**options)
    pool, layer, (query, key, value, seen, _) = decode(config, 4)
    layer.run_step(query, key, value, seen, torch.arange(4))  # the first chooses operations
    table = torch.arange(4).unsqueeze(1)
    starts, lengths = list(range(5)), (seen + 2).tolist()
    output, lists = torch.empty_like(query), []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: lists.append(1) or original(self))
    with Reads() as reads:
        batch = Batch.of(starts, lengths, table, pool)
        num_before = len(lists)
        for other in pool.layers:
            batch.run(other, query, key, value, output)
    # A CPU, which waits for nothing, looks at the blocks' numbers once for all layers.
    assert (reads.count, num_before, len(lists)) == (0, 1, 1)
    assert int(seen[0]) == 30  # the mode does count
    with Reads() as reads:
        assert int(seen[0]) == 30
    assert reads.count == 1


def test_soft_cap_and_the_scale_reach_the_operations():
    config = config_of()
    query, key, value = (torch.randn(6, heads, SIZE) for heads in (HEADS * GROUPS, HEADS, HEADS))

    def first(scale: float, softcap: float | None) -> torch.Tensor:
        _, layer = make_layer(config, torch.float32, scale, softcap)
        return layer.run_block(query, key, value, torch.tensor([0]), torch.tensor([0]), True)

    plain = first(0.3, None)
    assert not torch.allclose(plain, first(0.6, None), atol=1e-3)
    assert not torch.allclose(plain, first(0.3, 0.5), atol=1e-3)
