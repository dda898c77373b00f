"""Decode steps that are replayed from CUDA graphs, on the pretended device."""

import copy
import gc
import inspect
import warnings
import weakref
from collections import Counter

import pytest
import torch
from pretended_device import DEVICE, pretended_device
from pretended_device import make_model as make_tiny
from transformers import LlamaForCausalLM

import h2okv
from h2okv.cache.argument import CACHE
from h2okv.cache.h2o_cache import H2OCache
from h2okv.cache.slot_layer import SlotLayer
from h2okv.integration import graphs
from h2okv.integration.graphs import EAGER_STEPS, VARIABLE, DecodeGraphs
from h2okv.ops import dispatch

pytest.importorskip("triton")

LAYERS, PROMPT, NEW = 2, 24, 12
REPLAYED = 2 * (NEW - 1 - EAGER_STEPS) - 1  # in two turns; a model's first step changes it
BUDGET = {"heavy": 8, "recent": 6, "sink": 2}
BY_HEAD = BUDGET | {"scoring": "expected", "layer_budgets": [[1.2, 0.8]] * LAYERS}
OPTIONS = {
    "h2o": BUDGET | {"sink": 0}, "best by default": BY_HEAD,
    "best by head": BY_HEAD | {"evict_every": None}, "h2o, spans": BUDGET | {"evict_every": 7},
    "best by head, spans": BY_HEAD | {"evict_every": 7},
    "budget not reached": {"heavy": 20, "recent": 12}, "rolling": BUDGET | {"positions": "rolling"},
    "8 bits": BUDGET | {"kv_bits": 8}, "decay": BUDGET | {"scoring": "decay"},
    "value norm": BUDGET | {"scoring": "value_norm"},
}  # fmt: skip
FAST = "best by head"


@pytest.fixture
def device(monkeypatch):
    """Pretend a device that runs plain PyTorch, as Triton's interpreter takes seconds."""
    with pretended_device(monkeypatch, runs_kernels=True, everywhere=True) as device:
        monkeypatch.setenv(dispatch.VARIABLE, "plain")
        yield device


def make_model(device, **options):
    ends = {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1}
    return device.to(make_tiny(layers=LAYERS, attention="sdpa", **ends, **options))


def graphs_of(model):
    """Return what replaces a model's forward, or ``None``."""
    forward = vars(model).get("forward")
    return forward if isinstance(forward, DecodeGraphs) else None


def prompt(rows=1, padding=0):
    ids = torch.arange(3, 3 + PROMPT)[None] + 5 * torch.arange(rows)[:, None]
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.to(DEVICE)}


def host(cache):
    """Return what the host has counted."""
    return [
        (la.state.lengths(), la.num_columns, la.num_forwards, la.slots.counters())
        for la in cache.layers
    ]


def generate(model, cache, inputs, **options):
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    return model.generate(**inputs, **{CACHE: cache}, **options)


def two_turns(model, name, rows=1, padding=0):
    """Return the texts of two turns, what layers keep and what the host counts."""
    cache, results = h2okv.H2OCache(model.config, **OPTIONS[name]), []
    inputs = prompt(rows, padding)
    for _ in range(2):
        ids = generate(model, cache, inputs)
        cache.check_integrity()
        positions = [cache.kept_positions(layer).sort().values.tolist() for layer in range(LAYERS)]
        results.append((ids.tolist(), positions, host(cache)))
        inputs = cache.next_turn(torch.full((rows, 3), 9).to(DEVICE))
    return results


def compare(device, monkeypatch, name, ops="auto", **options):
    monkeypatch.setenv(dispatch.VARIABLE, ops)
    model, results, replays = make_model(device), [], []
    for setting in ("off", "auto"):
        monkeypatch.setenv(VARIABLE, setting)
        before = device.num_replays
        with h2okv.enable(model):
            results.append(two_turns(model, name, **options))
        assert graphs_of(model) is None
        replays.append(device.num_replays - before)
    assert results[0] == results[1]
    return replays


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != FAST)) for name in OPTIONS]
)
def test_replays_equal_eager_steps(device, monkeypatch, name):
    """In text, kept positions and what the host counts, over two turns."""
    num_eager, num_replays = compare(device, monkeypatch, name)
    assert num_eager == 0
    # A budget that is reached makes another step; so does the first one that needs a bias.
    assert num_replays >= (REPLAYED - 1 if name != "budget not reached" else REPLAYED // 2)


@pytest.mark.parametrize("ops", ["plain", pytest.param("auto", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["best by default", "best by head, spans", "h2o", "h2o, spans"])
def test_a_batch_with_padding(device, monkeypatch, name, ops):
    assert compare(device, monkeypatch, name, ops, rows=2, padding=5)[1] >= REPLAYED


def steps(model, cache, count, first=PROMPT):
    """Run steps as a loop of a user's does; return their logits."""
    logits = []
    for position in range(first, first + count):
        token = torch.tensor([[position % 90 + 3]]).to(DEVICE)
        position_ids = torch.tensor([[position]]).to(DEVICE)
        with torch.no_grad():
            output = model(token, position_ids=position_ids, logits_to_keep=1, **{CACHE: cache})
        assert getattr(output, CACHE) is cache
        logits.append(output.logits)
    return logits


def read_prompt(model):
    cache = h2okv.H2OCache(model.config, **OPTIONS[FAST])
    with torch.no_grad():
        model(**prompt(), **{CACHE: cache})
    return cache


RECORDED = EAGER_STEPS + 2  # steps of a new cache until one is replayed


def test_a_replayed_step_launches_nothing_of_the_layers(device):
    model = make_model(device)
    with h2okv.enable(model):
        cache = read_prompt(model)
        steps(model, cache, RECORDED)
        with device.count() as counts:
            first, second = steps(model, cache, 2, PROMPT + RECORDED)
    lines = {line for _, line in counts.launches if line is not None}
    assert all(line.startswith("h2okv.integration.graphs:") for line in lines), str(counts)
    ours = sum(count for (_, line), count in counts.launches.items() if line is not None)
    assert ours == 2 * 3, str(counts)  # token, position and logits are copied
    assert first.data_ptr() != second.data_ptr()


CUT = 3
CUTS = {
    "h2o": BUDGET | {"evict_every": CUT},
    "best by head": BY_HEAD | {"evict_every": CUT},
    "best by head, whole prompts": BY_HEAD | {"evict_every": f"prompt+{CUT}"},
    "best": BY_HEAD | {"evict_every": CUT, "layer_budgets": None},
    "value norm, whole prompts": BUDGET | {"scoring": "value_norm", "evict_every": f"prompt+{CUT}"},
    "7": BY_HEAD | {"evict_every": "prompt+7"}, "64": BUDGET | {"evict_every": 64},
    "fractions": BY_HEAD | {"heavy": 0.3, "recent": 0.2, "min_tokens": 0, "evict_every": CUT},
}  # fmt: skip
SLOW_CUTS = set(CUTS) - {"fractions", "best by head, whole prompts"}


@pytest.fixture
def cuts(monkeypatch):
    """Return what each cut of a cache was: recorded or not, and of how many sequences."""
    plain, calls = H2OCache.cut, []

    def cut(cache, ended, numbers=None, stores=True):
        if stores:
            calls.append((len(ended), "apart" if numbers is None else "inputs"))
        return plain(cache, ended, numbers, stores)

    monkeypatch.setattr(H2OCache, "cut", cut)
    return calls


def read_text(model, cache, paddings, num_steps):
    """Read a batch of texts, or a further turn, and steps; return the logits of these."""
    rows, seen, logits = len(paddings), cache.num_seen_tokens, []
    ids = prompt(rows)["input_ids"][:, : 3 if seen else PROMPT]
    mask = torch.ones(rows, seen + ids.shape[1], dtype=torch.int64)
    for row, padding in enumerate(paddings):
        mask[row, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, seen:].to(DEVICE)
    with torch.no_grad():
        options = {CACHE: cache, "logits_to_keep": 1}
        model(ids, attention_mask=mask.to(DEVICE), position_ids=positions, **options)
        for _ in range(num_steps):
            positions = positions[:, -1:] + 1
            output = model(7 * positions % 90 + 3, position_ids=positions, **options)
            logits.append(output.logits.numbers.clone())
    cache.check_integrity()
    return logits


def tensors_of(cache):
    return [
        {name: tensor.numbers for name, tensor in layer.state.tensors().items()}
        for layer in cache.layers
    ]


def same_entries(cache, other):
    """Compare all that entries have, bit for bit; empty slots may hold anything."""
    for state, expected in zip(tensors_of(cache), tensors_of(other), strict=True):
        assert state.keys() == expected.keys()
        is_entry = expected["positions"] >= 0
        for name, tensor in expected.items():
            actual = state[name]
            if tensor.shape[:3] == is_entry.shape:
                actual, tensor = actual[is_entry], tensor[is_entry]
            assert torch.equal(actual, tensor), name


@pytest.mark.parametrize("ops", ["plain", pytest.param("auto", marks=pytest.mark.slow)])
@pytest.mark.parametrize("paddings", [(0,), (0, 5, 1)], ids=["one", "three"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW_CUTS)) for n in CUTS]
)
def test_replayed_cuts_equal_eager_ones(device, monkeypatch, cuts, name, paddings, ops):
    """In every number of the layers, and in what the host counts, over two turns."""
    monkeypatch.setenv(dispatch.VARIABLE, ops)
    monkeypatch.setattr(graphs, "chunking_of", lambda *_: None)  # which round otherwise
    model, results = make_model(device), []
    num_steps, turns = {"7": 42, "64": 400}.get(name, 6 * CUT), 1 if name in ("7", "64") else 2
    for setting in ("off", "auto"):
        monkeypatch.setenv(VARIABLE, setting)
        cuts.clear()
        results.append([])
        with h2okv.enable(model):
            cache = h2okv.H2OCache(model.config, **CUTS[name])
            for _ in range(turns):
                logits = read_text(model, cache, paddings, num_steps)
                results[-1].append((logits, host(cache), copy.deepcopy(cache)))
    for (expected, counted, other), (logits, counts, cache) in zip(*results, strict=True):
        assert all(map(torch.equal, logits, expected))
        assert counts == counted
        same_entries(cache, other)
    # Those before one is recorded, and the recording; no other cut was done by the host. Kernels
    # fill the slots that are there, so that a turn moves nothing.
    assert len(cuts) == (turns if ops == "plain" else 1) * (EAGER_STEPS + 1)
    assert {kind for _, kind in cuts} == {"inputs"}


def test_a_replayed_cut_launches_one_graph(device):
    """And waits for nothing, where a step launches one too; all stays where it is."""
    model = make_model(device)
    with h2okv.enable(model):
        cache = h2okv.H2OCache(model.config, **CUTS["best by head, whole prompts"])
        read_text(model, cache, (0, 5), CUT * (EAGER_STEPS + 1) + CUT - 1)
        addresses = [t.data_ptr() for state in tensors_of(cache) for t in state.values()]
        before, options = device.num_replays, {"logits_to_keep": 1, CACHE: cache}
        token = torch.tensor([[5], [6]]).to(DEVICE)
        positions = torch.tensor([[[length]] for length in cache.layers[0].state.lengths()])
        options["position_ids"] = positions.view(2, 1).to(DEVICE)
        with torch.no_grad(), device.count() as counts:
            model(token, **options)
        assert device.num_replays == before + 2
    assert counts.num_waits == 0, str(counts)
    launches = Counter(line for (_, line), n in counts.launches.items() for _ in range(n) if line)
    # Token, position, logits, and the numbers of the sequences: to the device, and to their place.
    assert launches.total() == 5, str(counts)
    assert addresses == [t.data_ptr() for state in tensors_of(cache) for t in state.values()]


def both_ways(device, monkeypatch, options, num_steps=8 * CUT, change=lambda: None):
    """Compare a cache with graphs, after a change, to one without; return the number of replays."""
    model, results = make_model(device), []
    for setting in ("off", "auto"):
        monkeypatch.setenv(VARIABLE, setting)
        if setting == "auto":
            change()
        cache = h2okv.H2OCache(model.config, **options)
        with h2okv.enable(model):
            results.append((read_text(model, cache, (0, 5), num_steps), host(cache), cache))
    (expected, counted, other), (logits, counts, cache) = results
    assert all(map(torch.equal, logits, expected))
    assert counts == counted
    same_entries(cache, other)
    return device.num_replays


@pytest.mark.parametrize("error", [torch.nan, 3.0])
def test_a_replayed_cut_of_other_numbers_is_the_last(device, monkeypatch, cuts, error):
    """Its entries are put right; later cuts are launched, and steps are still replayed."""
    replay = graphs._Graph.replay

    def wrong(graph, inputs, cache):
        output = replay(graph, inputs, cache)
        for layer in cache.layers if "numbers" in inputs else ():
            layer.state.scores += error
        return output

    def change():
        monkeypatch.setattr(graphs._Graph, "replay", wrong)

    options = CUTS["best by head, whole prompts"]
    with pytest.warns(UserWarning, match="cuts run .*: its first replay's entries are off in"):
        assert both_ways(device, monkeypatch, options, change=change) > 4 * CUT
    assert cuts == [(2, "inputs")] * (EAGER_STEPS + 1) + [(2, "apart")] * 4


def fail_in_a_cut():
    assert not torch.cuda.is_current_stream_capturing(), "operation not permitted"


def wait_in_a_cut():
    torch.ones(1).to(DEVICE).tolist()


CUT_OBSTACLES = {
    r"could not be recorded \(operation not permitted": fail_in_a_cut,
    "a cut of this model and cache waits for the device": wait_in_a_cut,
}


@pytest.mark.parametrize("why", CUT_OBSTACLES)
def test_a_cut_that_cannot_be_recorded_says_why_once(device, monkeypatch, why):
    plain, options = SlotLayer._evict_ended, CUTS["h2o"]

    def evict(layer):
        CUT_OBSTACLES[why]()
        plain(layer)

    def change():
        monkeypatch.setattr(SlotLayer, "_evict_ended", evict)

    with pytest.warns(UserWarning, match=why) as caught:
        assert both_ways(device, monkeypatch, options, change=change) > 4 * CUT
    assert sum("CUDA graph" in str(warning.message) for warning in caught) == 1


LAUNCHED = {"8 bits": {"kv_bits": 8}, "rolling": {"positions": "rolling"}}


@pytest.mark.parametrize("name", LAUNCHED)
def test_other_cuts_are_launched_behind_replayed_steps(device, monkeypatch, cuts, name):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*CUDA graph")
        options = BUDGET | {"evict_every": CUT} | LAUNCHED[name]
        assert both_ways(device, monkeypatch, options, 5 * CUT) > 2 * CUT
    assert {kind for _, kind in cuts} == {"apart"}


@pytest.mark.slow
def test_drafts_between_replayed_cuts(device, monkeypatch):
    """What is taken back leaves spans of which only the device knows the queries."""
    model, texts = make_model(device), []
    for setting in ("off", "auto"):
        monkeypatch.setenv(VARIABLE, setting)
        cache, inputs = h2okv.H2OCache(model.config, **CUTS["best by head"]), prompt()
        texts.append([])
        with h2okv.enable(model):
            for options in ({}, {"prompt_lookup_num_tokens": 3}, {}):
                ids = generate(model, cache, inputs, max_new_tokens=8 * CUT, **options)
                texts[-1].append((ids.tolist(), host(cache)))
                inputs = cache.next_turn(torch.full((1, 3), 9).to(DEVICE))
    assert texts[0] == texts[1]


def test_graphs_die_with_their_cache(device):
    model = make_model(device)
    with h2okv.enable(model):
        cache = h2okv.H2OCache(model.config, **OPTIONS[FAST])
        generate(model, cache, prompt())
        forward = graphs_of(model)
        assert forward.num_graphs == 1
        death = weakref.ref(cache)
        del cache
        gc.collect()
        assert death() is None and forward.num_graphs == 0


def test_the_number_of_graphs_is_bounded(device, monkeypatch):
    monkeypatch.setattr("h2okv.integration.graphs.MOST_GRAPHS", 2)
    model, caches = make_model(device), []
    with h2okv.enable(model):
        for _ in range(3):
            caches.append(h2okv.H2OCache(model.config, **OPTIONS[FAST]))
            generate(model, caches[-1], prompt(), max_new_tokens=EAGER_STEPS + 3)
        assert graphs_of(model).num_graphs == 2


def test_short_answers_are_not_recorded(device):
    model = make_model(device)
    with h2okv.enable(model):
        cache = h2okv.H2OCache(model.config, **OPTIONS[FAST])
        generate(model, cache, prompt(), max_new_tokens=EAGER_STEPS + 1)
        assert graphs_of(model).num_graphs == device.num_replays == 0


def hook(model):
    model.model.layers[0].register_forward_hook(lambda *_: None)


def replace_forward(model):
    model.model.norm.forward = model.model.norm.forward


def fill_memory(model):
    model.patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 20, 1 << 36))
    model.patch.setattr(torch.cuda, "empty_cache", lambda: None)


def wait(model):
    plain = type(model.model.norm).forward
    model.patch.setattr(
        type(model.model.norm), "forward", lambda self, x: plain(self, x + 0 * x.max().item())
    )


def fail(model):
    plain = type(model.model.norm).forward

    def forward(self, states):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("operation not permitted")
        return plain(self, states)

    model.patch.setattr(type(model.model.norm), "forward", forward)


def fail_in_attention(model):
    plain = SlotLayer._evicting_step

    def step(self, *arguments):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("operation not supported")
        return plain(self, *arguments)

    model.patch.setattr(SlotLayer, "_evicting_step", step)


def train(model):
    model.model.layers[1].train()


OBSTACLES = {
    "model.layers.0 has hooks": hook,
    "the forward of model.norm is replaced": replace_forward,
    "model.layers.1 is in training mode": train,
    "256 MiB of the device's memory are free": fill_memory,
    "waits for the device": wait,
    r"could not be recorded \(operation not permitted\)": fail,
    "output_hidden_states is set": lambda model: setattr(
        model.config, "output_hidden_states", True
    ),
    r"could not be recorded \(operation not supported\)": fail_in_attention,
    "output_attentions is set": lambda model: setattr(
        model.generation_config, "output_attentions", True
    ),
}


@pytest.mark.parametrize("why", OBSTACLES)
def test_what_cannot_be_replayed_says_why_once(device, monkeypatch, why):
    monkeypatch.setenv(VARIABLE, "off")
    model, few = make_model(device), {"max_new_tokens": EAGER_STEPS + 4}
    cache = h2okv.H2OCache(model.config, **OPTIONS[FAST])
    with h2okv.enable(model):
        expected = generate(model, cache, prompt(), **few).tolist(), host(cache)
        monkeypatch.setenv(VARIABLE, "auto")
    vars(model)["patch"] = monkeypatch
    OBSTACLES[why](model)
    with h2okv.enable(model), pytest.warns(UserWarning, match=why) as caught:
        for _ in range(2):
            cache = h2okv.H2OCache(model.config, **OPTIONS[FAST])
            assert (generate(model, cache, prompt(), **few).tolist(), host(cache)) == expected
            cache.check_integrity()
    assert device.num_replays == 0
    assert sum("CUDA graph" in str(warning.message) for warning in caught) == 1


@pytest.mark.parametrize("error", [torch.nan, 3.0])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != FAST)) for name in OPTIONS]
)
def test_a_replay_of_other_numbers_is_the_last(device, monkeypatch, name, error):
    replay = graphs._Graph.replay

    def wrong(graph, inputs, cache):
        output = replay(graph, inputs, cache)
        output.logits += error
        return output

    monkeypatch.setattr(graphs._Graph, "replay", wrong)
    with pytest.warns(UserWarning, match="its first replay's logits are off by"):
        assert compare(device, monkeypatch, name)[1] == 1  # and texts and states are the same


def test_a_hook_that_comes_late_is_called(device):
    model, calls = make_model(device), []
    with h2okv.enable(model):
        cache = read_prompt(model)
        steps(model, cache, RECORDED)
        before = device.num_replays
        assert before > 0
        model.model.norm.register_forward_hook(lambda *_: calls.append(1))
        with pytest.warns(UserWarning, match=r"model\.norm has hooks"):
            steps(model, cache, 1, PROMPT + RECORDED)
    assert calls == [1] and device.num_replays == before


def test_an_interrupted_replay_is_noticed(device, monkeypatch):
    model = make_model(device)
    with h2okv.enable(model):
        cache = read_prompt(model)
        steps(model, cache, RECORDED)
        plain = torch.cuda.CUDAGraph.replay

        def replay(graph):
            plain(graph)
            raise KeyboardInterrupt

        monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay)
        with pytest.raises(KeyboardInterrupt):
            steps(model, cache, 1, PROMPT + RECORDED)
        with pytest.raises(ValueError, match="a forward was interrupted"):
            steps(model, cache, 1, PROMPT + RECORDED)


def test_weights_that_move_are_read(device):
    model = make_model(device)
    with h2okv.enable(model):
        cache, other = read_prompt(model), read_prompt(model)
        (expected,) = steps(model, other, RECORDED + 1)[-1:]
        steps(model, cache, RECORDED)
        before, weight = device.num_replays, model.lm_head.weight
        model.lm_head._parameters["weight"] = torch.nn.Parameter(-weight, requires_grad=False)
        (logits,) = steps(model, cache, 1, PROMPT + RECORDED)
    assert torch.equal(logits.numbers, -expected.numbers)
    assert device.num_replays == before


def test_gradients_are_not_lost(device):
    model = make_model(device)
    cache = h2okv.H2OCache(model.config, **OPTIONS[FAST])
    with h2okv.enable(model):
        model(prompt()["input_ids"], **{CACHE: cache})
        with pytest.warns(UserWarning, match="no_grad"):
            for _ in range(2):
                model(torch.tensor([[5]]).to(DEVICE), **{CACHE: cache})


@pytest.mark.parametrize(
    "options", [{"prompt_lookup_num_tokens": 3}, {"num_beams": 2}, {"use_cache": False}], ids=str
)
def test_drafts_beams_and_no_cache_run_as_they_are(device, monkeypatch, options):
    """Without a line: the next call may be replayed."""
    model, texts = make_model(device), []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*CUDA graph")
        for setting in ("off", "auto"):
            monkeypatch.setenv(VARIABLE, setting)
            cache = h2okv.H2OCache(model.config, **OPTIONS[FAST])
            inputs = prompt() if "use_cache" in options else {**prompt(), CACHE: cache}
            with h2okv.enable(model):
                text = model.generate(**inputs, **options, max_new_tokens=NEW, do_sample=False)
            texts.append(text.tolist())
    assert texts[0] == texts[1]
    assert device.num_replays == 0


def test_a_copy_of_a_model_runs_its_weights(device):
    model = make_model(device)
    with h2okv.enable(model):
        cache = h2okv.H2OCache(model.config, **OPTIONS[FAST])
        generate(model, cache, prompt())
        forward = graphs_of(model)
        duplicate = copy.copy(forward)
        assert duplicate.num_graphs == 0 and duplicate.model is model
        assert inspect.signature(forward) == inspect.signature(
            LlamaForCausalLM.forward.__get__(model)
        )


def test_a_word_that_is_no_setting_is_refused(device, monkeypatch):
    monkeypatch.setenv(VARIABLE, "on")
    with pytest.raises(ValueError, match="H2OKV_GRAPHS must be auto or off, got 'on'"):
        h2okv.enable(make_model(device))


def test_a_cpu_keeps_its_forward(make_llama):
    model = make_llama()
    with h2okv.enable(model):
        cache = h2okv.H2OCache(model.config, **OPTIONS[FAST] | {"layer_budgets": None})
        model.generate(torch.arange(3, 20)[None], **{CACHE: cache}, max_new_tokens=6)
        assert "forward" not in vars(model)
