"""What a CUDA graph of a step relies on: constant addresses, and nothing that the host asks for.

On the pretended device, of the whole forward, transformers' part included.
"""

import pytest
import torch
from pretended_device import DEVICE, PretendedTensor, make_model, pretended_device

import h2okv
from h2okv.cache.argument import CACHE
from h2okv.ops import dispatch

pytest.importorskip("triton")

SPAN, PROMPT, TURN, LAYERS = 64, 100, 9, 2
BUDGET = {"heavy": 8, "recent": 6, "sink": 2}
DEFAULT = BUDGET | {"scoring": "expected", "layer_budgets": [[1.2, 0.8]] * LAYERS}
BEST_BY_HEAD = DEFAULT | {"evict_every": None}
OPTIONS = {
    "h2o": BUDGET,
    "best by head": BEST_BY_HEAD,
    "best by default": DEFAULT,
    "h2o, spans": BUDGET | {"evict_every": SPAN},
    "best by head, spans": BEST_BY_HEAD | {"evict_every": SPAN},
}
# What a forward does that no graph can record, by the function that does it. A step does nothing of
# the kind, whether it ends a span or not. These may only fall: who lowers one, lowers it here.
TURN_HAZARDS = {
    ("item", "check_follows"): 1,  # whether what is read continues the last turn
    ("copy to the host", "check"): 1,  # whether attention is finite
}


def test_every_hazard_of_a_recording_is_counted(monkeypatch):
    with pretended_device(monkeypatch, everywhere=True) as device:
        numbers = PretendedTensor(torch.tensor([3.0, -1.0, 2.0]))

        def hazards(function):
            with device.count() as counts:
                function()
            return {hazard: count for (hazard, _), count in counts.hazards.items()}

        assert hazards(lambda: numbers.add_(1).view(3, 1).clone()) == {}
        assert hazards(lambda: numbers[numbers.long().clamp(0, 2)]) == {}
        assert hazards(lambda: numbers.repeat_interleave(2, output_size=6)) == {}
        assert hazards(lambda: torch.ones(3).nonzero()) == {}  # not on the device
        assert hazards(lambda: numbers.max().item()) == {"item": 1}
        assert hazards(lambda: bool(numbers.max() > 0)) == {"item": 1}
        assert hazards(lambda: numbers.nonzero()) == {"nonzero": 1}
        assert hazards(lambda: numbers[numbers > 0]) == {"nonzero": 1}
        assert hazards(lambda: numbers.masked_select(numbers > 0)) == {"unknown size": 1}
        assert hazards(lambda: numbers.unique()) == {"unknown size": 1}
        assert hazards(lambda: numbers.tolist()) == {"copy to the host": 1}
        assert hazards(lambda: torch.tensor([1], device=DEVICE)) == {"copy from the host": 1}
        host = torch.zeros(3)
        assert hazards(lambda: host.to(DEVICE, non_blocking=True)) == {"copy from the host": 1}
        assert hazards(lambda: host.copy_(numbers)) == {"copy to the host": 1}


class Reader:
    """A cache on a tiny model, with what its forwards do that a graph cannot record."""

    def __init__(self, device, name):
        self.model, self.device = device.to(make_model(torch.float16)), device
        self.cache = h2okv.H2OCache(self.model.config, **OPTIONS[name])

    def read(self, length):
        """Read tokens; return the hazards by kind and function, and all of it as a text."""
        ids = torch.full((1, length), 5).to(DEVICE)
        with torch.no_grad(), self.device.count() as counts:
            self.model(ids, logits_to_keep=1, **{CACHE: self.cache})
        hazards = {}
        for (kind, line), count in counts.hazards.items():
            key = kind, None if line is None else line.rpartition(" ")[2]
            hazards[key] = hazards.get(key, 0) + count
        return hazards, str(counts)

    def tensors(self):
        """Return what layers hold; a tensor that is kept here keeps its address from others."""
        return [
            layer.state.tensors() | {"cumulative_length": layer.cumulative_length}
            for layer in self.cache.layers
        ]

    def moved(self, before):
        """Return the names of tensors that are at other addresses than before."""
        return {
            name
            for layer, earlier in zip(self.tensors(), before, strict=True)
            for name in layer.keys() | earlier.keys()
            if name not in layer
            or name not in earlier
            or layer[name].data_ptr() != earlier[name].data_ptr()
        }


def check_hazards(counted, allowed):
    hazards, text = counted
    above = {key: count for key, count in hazards.items() if count > allowed.get(key, 0)}
    assert not above, f"{above}, allowed {allowed}\n{text}"


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_and_turns(monkeypatch, name):
    with pretended_device(monkeypatch, everywhere=True) as device:
        reader = Reader(device, name)
        reader.read(PROMPT)
        for turn in range(2):
            check_hazards(reader.read(1), {})
            before = reader.tensors()
            # Beyond the end of a span, so that a cut is among them.
            layer = reader.cache.layers[0]
            span = layer.spans.length if layer.spans else SPAN
            for _ in range(span - layer.state.phases(span)[0] + 2):
                check_hazards(reader.read(1), {})
            assert not reader.moved(before), f"turn {turn}: a step must move no tensor"
            before = reader.tensors()
            check_hazards(reader.read(TURN), TURN_HAZARDS)
            assert not reader.moved(before), f"turn {turn} must move no tensor"


def continued(model, name, is_recorded):
    """Return the logits of steps, eager or replayed from the third one on, and the positions."""
    cache, logits = h2okv.H2OCache(model.config, **OPTIONS[name]), []
    ids = torch.arange(3, 40)[None].to(DEVICE)
    token, position_ids = ids[:, :1].clone(), ids[:, :1].clone()

    def step():
        output = model(token, position_ids=position_ids, logits_to_keep=1, **{CACHE: cache})
        return output.logits

    with torch.no_grad():
        model(ids[:, :24], logits_to_keep=1, **{CACHE: cache})
        graph = torch.cuda.CUDAGraph()
        for number in range(24, 34):
            token.copy_(ids[:, number : number + 1])
            position_ids.fill_(number)
            if not is_recorded or number < 26:
                output = step()
            else:
                if number == 26:
                    with torch.cuda.graph(graph):
                        output = step()
                graph.replay()
            logits.append(output.numbers.clone())
    return torch.cat(logits), [layer.state.positions.numbers.tolist() for layer in cache.layers]


# Without kernels, the host counts the slots that spans of uniform heads take in their order.
@pytest.mark.parametrize(
    ("name", "ops"),
    [(name, "plain") for name in OPTIONS if name != "h2o, spans"]
    + [pytest.param(name, "auto", marks=pytest.mark.slow) for name in OPTIONS],
)
def test_replayed_steps_equal_eager_ones(monkeypatch, name, ops):
    """With its token and position as inputs, a step is a function of the device alone."""
    with pretended_device(monkeypatch, runs_kernels=True) as device:
        monkeypatch.setenv(dispatch.VARIABLE, ops)
        model = device.to(make_model(torch.float32))
        eager, replayed = (continued(model, name, is_recorded) for is_recorded in (False, True))
    assert torch.equal(replayed[0], eager[0])
    assert replayed[1] == eager[1]


def test_a_graph_refuses_what_it_cannot_record(monkeypatch):
    with pretended_device(monkeypatch):
        numbers, graph = PretendedTensor(torch.tensor([3.0, -1.0])), torch.cuda.CUDAGraph()
        with (
            pytest.raises(RuntimeError, match="cannot record index: nonzero"),
            torch.cuda.graph(graph),
        ):
            numbers[numbers > 0].sum()
        with torch.cuda.graph(graph):
            doubled = numbers * 2
        numbers.fill_(5.0)
        graph.replay()
        assert doubled.tolist() == [10.0, 10.0]
