"""Launches and waits of the package on a GPU, for each layer, counted on a pretended device."""

import pytest
import torch
from pretended_device import DEVICE, PretendedTensor, make_model, pretended_device

import h2okv
from h2okv.cache.argument import CACHE

pytest.importorskip("triton")

PROMPT, CUT = 24, 8
BUDGET = {"heavy": 8, "recent": 6, "sink": 2}
EXPECTED = BUDGET | {"scoring": "expected", "evict_every": None}
SPANS = {"evict_every": CUT}
BY_HEAD = [1.2, 0.8]  # factors of a layer's heads
OPTIONS = {
    "h2o": BUDGET,
    "expected": EXPECTED,
    "best by head": EXPECTED | {"layer_budgets": BY_HEAD},
    "best by head, whole prompts, spans": EXPECTED
    | {"layer_budgets": BY_HEAD, "evict_every": f"prompt+{CUT}"},
    "h2o, spans": BUDGET | SPANS,
    "expected, spans": EXPECTED | SPANS,
    "best by head, spans": EXPECTED | SPANS | {"layer_budgets": BY_HEAD},
}
# Launches and waits of a layer, and those of a forward beside its layers', as measured. They may
# only fall: who lowers one, lowers it here.
BOUNDS = {
    "h2o": {"prompt": (9, 0, 5, 1), "step": (2, 0, 0, 0)},
    "expected": {"prompt": (14, 0, 34, 1), "step": (2, 0, 0, 0)},
    "best by head": {"prompt": (14, 0, 34, 1), "step": (2, 0, 0, 0)},
    "best by head, whole prompts, spans": {
        "prompt": (16, 0, 34, 1), "step": (2, 0, 0, 0), "cut": (14, 0, 32, 0),
        "chunk": (0, 0, 0, 0),
    },
    "h2o, spans": {
        "prompt": (34, 0, 7, 1), "step": (2, 0, 0, 0), "cut": (5, 0, 0, 0), "chunk": (10, 0, 1, 0),
    },
    "expected, spans": {
        "prompt": (55, 0, 97, 1), "step": (2, 0, 0, 0), "cut": (13, 0, 31, 0),
        "chunk": (16, 0, 31, 0),
    },
    "best by head, spans": {
        "prompt": (55, 0, 97, 1), "step": (2, 0, 0, 0), "cut": (14, 0, 31, 0),
        "chunk": (16, 0, 31, 0),
    },
}  # fmt: skip


@pytest.fixture
def device(monkeypatch):
    with pretended_device(monkeypatch) as device:
        yield device


def test_the_counter_counts_launches_and_waits_and_nothing_else(monkeypatch):
    with pretended_device(monkeypatch, everywhere=True) as device:
        numbers = PretendedTensor(torch.tensor([3.0, -1.0, 2.0]))

        def counts(function):
            with device.count() as counted:
                result = function()
            return counted.num_launches, counted.num_waits, result

        free = counts(lambda: numbers.view(3, 1).expand(3, 4)[1:, None].transpose(0, 1).shape)
        assert free == (0, 0, (1, 2, 4))
        assert counts(lambda: torch.empty(2, device=DEVICE))[:2] == (0, 0)
        assert counts(lambda: (numbers + 1).mul_(2).cumsum(0))[:2] == (3, 0)
        assert counts(lambda: torch.zeros(2, device=DEVICE))[:2] == (1, 0)
        assert counts(lambda: numbers.new_tensor([1, 2]))[:2] == (1, 1)
        assert counts(lambda: torch.tensor([1, 2], device=DEVICE))[:2] == (1, 1)
        assert counts(lambda: torch.tensor([1, 2]).to(DEVICE, non_blocking=True))[:2] == (1, 0)
        assert counts(lambda: numbers.tolist()) == (1, 1, [3.0, -1.0, 2.0])
        assert counts(lambda: int(numbers.max())) == (1, 1, 3)
        assert counts(lambda: bool((numbers > 0).all())) == (2, 1, False)
        assert counts(lambda: numbers[numbers > 0].shape) == (2, 1, (2,))
        assert counts(lambda: (numbers > 0).nonzero().shape) == (2, 1, (2, 1))
        assert counts(lambda: numbers[numbers.long().clamp(0, 2)].shape) == (3, 0, (3,))
        assert counts(lambda: numbers.cpu().tolist())[1:] == (1, [3.0, -1.0, 2.0])
        assert counts(lambda: torch.ones(3).sum())[:2] == (0, 0)  # not on the device


def make_cache(model, name):
    options = dict(OPTIONS[name])
    if "layer_budgets" in options:
        options["layer_budgets"] = [options["layer_budgets"]] * model.config.num_hidden_layers
    return h2okv.H2OCache(model.config, **options)


def token_ids(length, batch=1):
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(1))


def measured(device, name, layers):
    """Return the counts of a prompt, a chunk of a longer one, a step, and one that ends a span."""
    model, counts = device.to(make_model(torch.float16, layers)), {}

    def read(cache, length):
        ids = token_ids(length).to(DEVICE)
        with torch.no_grad(), device.count() as counted:
            model(ids, logits_to_keep=1, **{CACHE: cache})
        return counted

    read(make_cache(model, name), PROMPT)  # what is learned of a model is known then
    cache = make_cache(model, name)
    counts["prompt"] = read(cache, PROMPT)
    read(cache, 1)
    counts["step"] = read(cache, 1)
    if "spans" in name:
        for _ in range(CUT - 3):
            read(cache, 1)
        counts["cut"] = read(cache, 1)
        longer = read(make_cache(model, name), PROMPT + CUT)
        counts["chunk"] = longer - counts["prompt"]
    return counts


@pytest.mark.parametrize("name", OPTIONS)
def test_a_layer_launches_and_waits_no_more_than_it_did(device, name):
    few, more = (measured(device, name, layers) for layers in (2, 3))
    for kind, counts in more.items():
        layer = counts - few[kind]
        once = few[kind] - layer - layer
        actual = layer.num_launches, layer.num_waits, once.num_launches, once.num_waits
        bounds = BOUNDS[name][kind]
        above = any(count > bound for count, bound in zip(actual, bounds, strict=True))
        assert not above, f"{name}, {kind}: {actual}, allowed {bounds}; a layer:\n{layer}\n{once}"


def continued(model, cache, ids, mask, steps):
    """Return the logits of a prompt's last token and of steps, and what each head keeps."""
    logits = []
    with torch.no_grad():
        for number in range(steps + 1):
            block = ids if number == 0 else ids[:, number : number + 1]
            options = {} if mask is None else {"attention_mask": mask}
            if mask is not None:
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
                options["position_ids"] = (mask.cumsum(1) - 1)[:, -1 - block.shape[1] : -1]
            logits.append(model(block, logits_to_keep=1, **options, **{CACHE: cache}).logits)
    layers = [cache.kept_positions(layer) for layer in range(model.config.num_hidden_layers)]
    cache.check_integrity()
    heads = [head for layer in layers for row in layer.tolist() for head in row]
    return logits, [{position for position in head if position >= 0} for head in heads]


@pytest.mark.parametrize("padding", (0, 5))
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "best by head")) for name in OPTIONS],
)
def test_the_way_for_gpus_gives_what_the_cpu_gives(monkeypatch, name, padding):
    model = make_model()
    ids, mask, steps = token_ids(PROMPT, 1 + bool(padding)), None, CUT + 2
    if padding:
        mask = torch.ones_like(ids)
        mask[1, :padding] = 0
    expected, expected_positions = continued(model, make_cache(model, name), ids, mask, steps)
    with pretended_device(monkeypatch, runs_kernels=True) as device:
        moved = None if mask is None else mask.to(DEVICE)
        cache = make_cache(model, name)
        actual, positions = continued(device.to(model), cache, ids.to(DEVICE), moved, steps)
        actual = [logits.numbers for logits in actual]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert positions == expected_positions
