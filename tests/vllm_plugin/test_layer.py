"""What the plug-in declares to vLLM, with stand-ins for vLLM's classes."""

import enum
import importlib
import itertools
import sys
import types
from importlib.machinery import ModuleSpec

import pytest
import torch
from pretended_device import DEVICE, PretendedTensor, pretended_device
from transformers import LlamaConfig

import h2okv
from h2okv.config import CacheConfig
from h2okv.ops.reference import AttentionSpec
from h2okv.vllm_plugin.state import LayerShape, StateLayer, StatePool, model_rotation


class _Base:
    """Stands for any class of vLLM."""

    def __init__(self, *args, **options):
        pass

    def __class_getitem__(cls, item):
        return cls


class _Module(types.ModuleType):
    """Stands for any module of vLLM: has every class that is imported from it."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (_Base,), {}))
        return getattr(self, name)


class _Finder:
    def find_spec(self, name, path=None, target=None):
        is_wanted = name.partition(".")[0] == "vllm"
        return ModuleSpec(name, self, is_package=True) if is_wanted else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


@pytest.fixture
def layer(monkeypatch):
    """Yield the module of layers, imported with the stand-ins."""
    before = dict(sys.modules)
    for name in before:
        if name.partition(".")[0] == "vllm" or name == "h2okv.vllm_plugin.layer":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Finder(), *sys.meta_path])
    backend = importlib.import_module("vllm.v1.attention.backend")
    support = enum.Enum("AttentionCGSupport", "NEVER UNIFORM_SINGLE_TOKEN_DECODE")
    backend.AttentionCGSupport = support
    yield importlib.import_module("h2okv.vllm_plugin.layer")
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]


def test_a_batch_of_single_tokens_may_always_be_one_graph(layer):
    assert layer.MetadataBuilder._cudagraph_support.name == "UNIFORM_SINGLE_TOKEN_DECODE"


LAYERS, HEADS, GROUPS, SIZE, CUT, ROWS = 2, 2, 2, 16, 6, 4
BEST = {"policy": "best", "layer_budgets": ((1.4, 0.6), (0.8, 1.2))}
SETTINGS = {
    "h2o": {}, "h2o, spans": {"evict_every": CUT}, "best by head": BEST,
    "best by head, spans": BEST | {"evict_every": CUT}, "norms": {"scoring": "value_norm"},
}  # fmt: skip
PLAIN = {
    "mean": {"scoring": "mean"}, "decay, spans": {"scoring": "decay", "evict_every": CUT},
    "random": {"policy": "random"},
}  # fmt: skip
MODEL = LlamaConfig(
    num_hidden_layers=LAYERS, hidden_size=HEADS * GROUPS * SIZE, num_key_value_heads=HEADS,
    num_attention_heads=HEADS * GROUPS,
)  # fmt: skip


class Server:
    """The blocks of all requests on the pretended device, and what builds their steps."""

    def __init__(self, layer, options, dtype=torch.float32):
        defaults = {"heavy": 5, "recent": 4, "layer_budgets": None}
        config = CacheConfig(**defaults | options).with_cuts(None)
        spec = AttentionSpec(SIZE**-0.5)
        shapes = (LayerShape(n, HEADS * GROUPS, HEADS, SIZE, dtype) for n in range(LAYERS))
        self.layers = [StateLayer(config, shape, spec) for shape in shapes]
        for state in self.layers:
            if config.scoring == "expected":
                state.rotates = model_rotation(MODEL, dtype, in_halves=True)
        self.pool = StatePool(self.layers)
        size = (ROWS + 1, self.pool.block_bytes)
        self.pool.bind(PretendedTensor(torch.zeros(size, dtype=torch.uint8)))
        context = {"owner": types.SimpleNamespace(pool=self.pool)}
        vllm_config = types.SimpleNamespace(
            compilation_config=types.SimpleNamespace(static_forward_context=context),
            scheduler_config=types.SimpleNamespace(max_num_seqs=ROWS),
        )
        self.builder = layer.MetadataBuilder(
            types.SimpleNamespace(mamba_cache_mode="none"), ["owner"], vllm_config, DEVICE
        )
        self.builder.device = DEVICE

    def run(self, batch, states):
        """Run a step of states ``[T, ...]`` through all layers; give their outputs."""
        outputs = [torch.zeros_like(states[0]) for _ in self.layers]
        for state, output in zip(self.layers, outputs, strict=True):
            batch.run(state, *states, output)
        return outputs


def common(counts, lengths, blocks):
    """Return what vLLM gives for a step: new tokens, tokens with them, and blocks."""
    return types.SimpleNamespace(
        num_reqs=len(counts), query_start_loc_cpu=torch.tensor([0, *itertools.accumulate(counts)]),
        seq_lens_cpu_upper_bound=torch.tensor(lengths),
        block_table_tensor=PretendedTensor(torch.tensor(blocks, dtype=torch.int32).view(-1, 1)),
    )  # fmt: skip


def drawn(count, dtype=torch.float32):
    """Return queries, keys and values of tokens."""
    heads = HEADS * GROUPS, HEADS, HEADS
    return [PretendedTensor(torch.randn(count, n, SIZE).to(dtype)) for n in heads]


def replay_and_compare(layer, options, steps):
    """Replay a step, recorded once, beside the same steps one by one: all bits are the same.

    Return how many steps have ended spans.
    """
    eager, recorded = Server(layer, options), Server(layer, options)
    lengths, blocks = [4, 6, 3], [3, 1, 2]
    prompt, graph = drawn(sum(lengths)), torch.cuda.CUDAGraph()
    for server in (eager, recorded):
        server.run(server.builder.build(0, common(lengths, lengths, blocks)), prompt)
    inputs = drawn(ROWS)
    noted = recorded.pool.ended = [1], PretendedTensor(torch.tensor([1]))
    padding = recorded.builder.build_for_cudagraph_capture(types.SimpleNamespace(num_reqs=ROWS))
    assert recorded.pool.ended is noted, "to record a step evicts nothing"
    recorded.pool.ended = None
    with torch.cuda.graph(graph):
        outputs = recorded.run(padding, inputs)
    num_ends = 0
    for step in range(steps):
        order = [(step + row) % 3 for row in range(3)]
        lengths = [length + 1 for length in lengths]
        states = drawn(ROWS)
        for memory, new in zip(inputs, states, strict=True):
            memory.copy_(new)
        rows = [lengths[row] for row in order], [blocks[row] for row in order]
        expected = eager.run(
            eager.builder.build(0, common([1] * 3, *rows)), [state[:3] for state in states]
        )
        padded = common([1, 1, 1, 0], [*rows[0], 0], [*rows[1], 0])
        recorded.builder.build(0, padded)
        graph.replay()
        for left, right in zip(outputs, expected, strict=True):
            assert left.numbers[:3].equal(right.numbers)
        eager.pool.end_spans()  # at once, and not with the next step
        if recorded.pool.ended is None:
            assert recorded.pool.pages.numbers[1:4].equal(eager.pool.pages.numbers[1:4])
        num_ends += recorded.pool.ended is not None
    return num_ends


@pytest.mark.parametrize("name", SETTINGS)
def test_a_recorded_step_replayed_over_the_end_of_a_span_is_the_step(layer, monkeypatch, name):
    """Replays repeat launches on other numbers, and nothing of the host."""
    with pretended_device(monkeypatch, runs_kernels=True), torch.no_grad():
        num_ends = replay_and_compare(layer, SETTINGS[name], 8 if "spans" in name else 3)
        assert num_ends == 4 * ("spans" in name)


@pytest.mark.parametrize("name", [*SETTINGS, *PLAIN])
def test_the_same_of_operations_one_by_one(layer, monkeypatch, name):
    with (
        pretended_device(monkeypatch, runs_kernels=True), h2okv.use_ops("plain"), torch.no_grad(),
    ):  # fmt: skip
        assert bool(replay_and_compare(layer, (SETTINGS | PLAIN)[name], 16)) == ("spans" in name)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_layer_of_a_step_launches_its_two_kernels_and_nothing_else(layer, monkeypatch, name):
    with pretended_device(monkeypatch) as device, torch.no_grad():
        server, lengths = Server(layer, SETTINGS[name], torch.float16), [CUT - 3] * 3
        prompt = common(lengths, lengths, [1, 2, 3])
        server.run(server.builder.build(0, prompt), drawn(sum(lengths), torch.float16))
        for _ in range(5):
            lengths = [length + 1 for length in lengths]
            wide = PretendedTensor(torch.randn(3, (GROUPS + 2) * HEADS, SIZE).half())
            states = wide.split([GROUPS * HEADS, HEADS, HEADS], dim=1)  # as models have them
            output = torch.empty_like(states[0])
            is_cut = lengths[0] % CUT == 1 and "spans" in name
            with device.count() as built:
                batch = server.builder.build(0, common([1] * 3, lengths, [1, 2, 3]))
            with device.count() as counted:
                batch.run(server.layers[1], *states, output)
            assert {name for name, _ in counted.launches} == {
                "_attend",
                "_finish",
            } and counted.num_launches == 2, counted
            assert counted.num_waits == 0
            assert is_cut or (built.num_launches <= 10 and built.num_waits == 0), built
