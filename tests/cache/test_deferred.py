"""Steps that the last layer of a cache ends for all: as if every layer had ended its own."""

import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

import h2okv
import h2okv.cache.deferred_steps as deferred_steps
from h2okv.cache.layer import CacheLayer
from h2okv.config import TokenBudget
from h2okv.policy import Policy

LENGTH, STEPS = 24, 12


def _state(cache):
    return [
        (cache.kept_positions(index), cache.scores(index), cache.layers[index].state.free_slot)
        for index in range(len(cache.layers))
    ]


def _read(model, ids, **options):
    cache = h2okv.H2OCache(model.config, 6, 5, **options)
    with torch.no_grad():
        chunks = (ids[:, :LENGTH], *ids[:, LENGTH:].split(1, dim=1))
        logits = [model(chunk, past_key_values=cache, logits_to_keep=1).logits for chunk in chunks]
    return cache, torch.cat(logits, dim=1)


def _same(cache, other):
    return all(
        torch.equal(tensor, expected)
        for states in zip(_state(cache), _state(other), strict=True)
        for tensor, expected in zip(*states, strict=True)
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sink": 2},
        {"scoring": "decay"},
        {"kv_bits": 8},
        {"layer_budgets": [0.5, 1.5, 1.0]},
        {"layer_budgets": [0.5, 1.5, 1.0], "policy": "best"},
        {"layer_budgets": [[0.5, 1.0], [2.0, 0.5], [1.5, 0.5]]},
        {"layer_budgets": [[0.5, 1.0], [2.0, 0.5], [1.5, 0.5]], "policy": "best"},
        {"layer_budgets": [[0.5, 1.0], [2.0, 0.5], [1.5, 0.5]], "scoring": "decay", "sink": 2},
        {"scoring": "value_norm"},
        {"scoring": "mean"},
        {"scoring": "expected", "sink": 4},
        {"policy": "random"},  # which does not rank by scores, and is never deferred
    ],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_deferred_steps_equal_steps_ended_layer_by_layer(make_llama, monkeypatch, options, batch):
    model = make_llama(layers=3)
    ids = torch.randint(3, 97, (batch, LENGTH + STEPS), generator=torch.Generator().manual_seed(1))
    ended, end = [], deferred_steps.DeferredSteps._end_alike
    monkeypatch.setattr(
        deferred_steps.DeferredSteps,
        "_end_alike",
        lambda steps, *args: (ended.append(args), end(steps, *args)),
    )
    together, logits = _read(model, ids, **options)
    assert ended or options == {"policy": "random"}
    monkeypatch.setattr(deferred_steps, "_LARGEST", 0)
    count = len(ended)
    alone, expected = _read(model, ids, **options)
    assert len(ended) == count
    assert torch.equal(logits, expected)
    assert _same(together, alone)
    together.check_integrity()


class ByBudget(Policy):
    """Protects a larger window where the budget is larger."""

    name = "by_budget"

    def allocate_budget(self, budget):
        return TokenBudget(min(budget.sink, budget.heavy // 4), 2, budget.total - 2 - budget.sink)


BY_HEAD = [[0.5, 1.0], [2.0, 0.5], [1.5, 0.5]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layer_budgets": [0.5, 1.5, 1.0]},
        {"layer_budgets": [0.0, 2.0, 1.0], "heavy": 1, "recent": 1},
        {"layer_budgets": [0.5, 1.5, 1.0], "policy": "best"},
        {"layer_budgets": [0.5, 1.5, 1.0], "policy": ByBudget(), "heavy": 8, "sink": 1},
        {"layer_budgets": BY_HEAD, "scoring": "mean"},
        {"layer_budgets": BY_HEAD, "kv_bits": 8},
        {"layer_budgets": BY_HEAD, "policy": "best", "heavy": 0.25, "recent": 0.1, "min_tokens": 0},
    ],
    # The address of an object would differ between worker processes.
    ids=lambda options: str({key: getattr(value, "name", value) for key, value in options.items()}),
)
@pytest.mark.parametrize("chunk", [1, 3])
def test_each_layer_does_what_it_does_alone(make_llama, monkeypatch, options, chunk):
    """Whatever a forward brings and wherever the layers of a cache are full."""
    model = make_llama(layers=3)
    ids = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(5))
    options = {"heavy": 6, "recent": 5, "prefill_chunk": chunk} | options
    together, *alone = (h2okv.H2OCache(model.config, **options) for _ in range(4))
    attend, read = CacheLayer.attend, []

    def listen(layer, *args):
        output = attend(layer, *args)
        if not layer.awaits_attention:
            read.append((layer.layer_idx, args, output))
        return output

    monkeypatch.setattr(CacheLayer, "attend", listen)
    with torch.no_grad():
        for block in ids.split([11, 4, 1, 1, 6, 1, 9, 1, 1, 5], dim=1):
            model(block, past_key_values=together)
            together.check_integrity()
    monkeypatch.setattr(CacheLayer, "attend", attend)
    for index, args, expected in read:
        layer = alone[index].layers[index]
        if not layer.is_initialized:
            layer.learn_rotation(together.layers[index].rotations.text)
            layer.lazy_initialization(*args[1:3])
        assert torch.equal(attend(layer, *args), expected)
    for index, cache in enumerate(alone):
        assert torch.equal(cache.kept_positions(index), together.kept_positions(index))
        assert torch.equal(cache.scores(index), together.scores(index))


def test_a_copy_in_the_middle_of_a_forward_has_ended_steps(make_llama, monkeypatch):
    model = make_llama(layers=3)
    ids = torch.randint(3, 97, (1, LENGTH + STEPS), generator=torch.Generator().manual_seed(2))
    cache, _ = _read(model, ids[:, :-1])
    layer, seen = cache.layers[1], {}

    def look(*_):
        assert layer.deferred._pending
        seen["copy"] = pickle.loads(pickle.dumps(layer)).state.positions
        seen["state"] = layer.state.positions.clone()
        assert not layer.deferred._pending

    hook = model.model.layers[1].register_forward_hook(look)
    with torch.no_grad():
        model(ids[:, -1:], past_key_values=cache)
    hook.remove()
    monkeypatch.setattr(deferred_steps, "_LARGEST", 0)
    alone, _ = _read(model, ids)
    assert _same(cache, alone)
    assert torch.equal(seen["state"], seen["copy"])
    assert int(seen["state"].max()) == LENGTH + STEPS - 1


def test_an_interrupted_step_is_refused_and_then_forgotten(make_llama):
    model = make_llama(layers=3)
    ids = torch.randint(3, 97, (1, LENGTH + STEPS), generator=torch.Generator().manual_seed(3))
    cache, logits = _read(model, ids)

    def stop(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[2].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(ids[:, :1], past_key_values=cache)
    hook.remove()
    with pytest.raises(ValueError, match="interrupted"), torch.no_grad():
        model(ids[:, :1], past_key_values=cache)
    cache.reset()
    with torch.no_grad():
        first = model(ids[:, :LENGTH], past_key_values=cache, logits_to_keep=1).logits
    assert torch.equal(first, logits[:, :1])


_VIEWS = {
    "view", "_unsafe_view", "transpose", "unsqueeze", "expand", "slice", "t", "detach", "alias",
    "permute", "select", "split", "squeeze", "unbind",
}  # fmt: skip


class _Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += operation.overloadpacket.__name__ not in _VIEWS
        return operation(*args, **(kwargs or {}))


def _operations_of_a_step(model, cache):
    ids = torch.randint(3, 97, (1, LENGTH + STEPS), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        for chunk in (ids[:, :LENGTH], *ids[:, LENGTH:].split(1, dim=1)):
            with _Operations() as operations:
                model(chunk, past_key_values=cache)
    return operations.count


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2), (torch.bfloat16, 5)])
def test_a_step_has_few_more_operations_a_layer_than_a_static_cache(make_llama, dtype, limit):
    """A step of a small model takes as long as the number of its operations lets it."""
    evicting, static = [], []
    for layers in (2, 3):
        model = make_llama(layers=layers).to(dtype)
        evicting.append(_operations_of_a_step(model, h2okv.H2OCache(model.config, 6, 5)))
        model.set_attn_implementation("sdpa")
        cache = StaticCache(model.config, max_cache_len=LENGTH + STEPS)
        static.append(_operations_of_a_step(model, cache))
    assert (evicting[1] - evicting[0]) - (static[1] - static[0]) <= limit, (evicting, static)


@pytest.mark.parametrize(
    ("scoring", "is_by_head", "limit"),
    [("sum", False, 7), ("expected", False, 9), ("expected", True, 10)],
)
def test_a_step_between_cuts_has_few_more_operations_a_layer_than_a_full_cache(
    make_llama, scoring, is_by_head, limit
):
    evicting, full = [], []
    for layers in (2, 3):
        model = make_llama(layers=layers).float()
        budgets = [[0.5, 1.5]] * layers if is_by_head else None
        cache = h2okv.H2OCache(
            model.config, 6, 5, 2, evict_every=16, scoring=scoring, layer_budgets=budgets
        )
        evicting.append(_operations_of_a_step(model, cache))
        model.set_attn_implementation("sdpa")
        full.append(_operations_of_a_step(model, DynamicCache(config=model.config)))
    assert (evicting[1] - evicting[0]) - (full[1] - full[0]) <= limit, (evicting, full)
