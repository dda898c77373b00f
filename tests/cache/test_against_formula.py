"""The cache against the contract in loops (`naive_h2o.py`), by every pair of options.

Slots and the masking oracle share a front door, so that what is wrong there is wrong in both. Here
a whole model is computed twice, from its weights alone.
"""

import itertools
import math
import random

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from naive_h2o import NaiveH2O, NearTieError
from oracle import cache_of

import h2okv
from h2okv.calibration.key_transforms import transforms_of_model
from h2okv_lab.masking import ValueExtremes

HEADS = 4
DEFAULTS = {
    "heavy": 6, "recent": 4, "sink": 0, "policy": "h2o", "scoring": "sum", "decay": None,
    "positions": "original", "evict_every": None, "whole_prompts": False, "min_tokens": 0,
    "kv_bits": None, "layer_budgets": None, "masks": False, "pins": (), "grows": False,
}  # fmt: skip
WITHOUT_SCORES = (
    "recent", "sink_recent", "strided", "fixed", "keydiff", "snapkv", "random", "value_extremes",
)  # fmt: skip
BUDGETS = [(2, 1), (9, 0), (0, 5), (1, 8), (0.2, 0.1), (0.3, 0.3), (0.5, 4), (5, 0.25), (40, 40)]
CHOICES = {
    "budget": BUDGETS,
    "sink": [1, 5, 1.0, 0.3],
    "policy": [
        "heavy", "recent", "sink_recent", "full", "keydiff", "strided", "strided_heavy", "fixed",
        "fixed_heavy", "snapkv", "random", "value_extremes",
    ],
    "scoring": [
        ("mean", None), ("decay", None), ("decay", 0.7), ("last", None), ("value_norm", None),
        ("value_norm", 0.9), ("expected", None),
    ],
    "positions": ["rolling"],
    "evict_every": [1, 2, 5, 6, 16, "prompt+2", "prompt+5"],
    "min_tokens": [3],
    "kv_bits": [8, 6, 4],
    "from_config": [True],
    "by_layer": [(0.5, 1.5), (1.25, 0.75), (0.0, 2.0)],
    # Of one layer's heads, which the other layer has the other way round.
    "by_head": [(0.5, 1.5, 1.0, 1.0), (1.5, 0.5, 0.0, 2.0), (0.25, 1.75, 1, 1)],
    "masks": [True],
    "pins": [((3, 5),), ((1, 2), (6, 8))],
    "learned_sinks": [True],
    "grows": [True],
}  # fmt: skip


def compatible(drawn, kv_heads):
    """Options of which a few are not as usual, without what is refused in words; and layers."""
    options = DEFAULTS | {name: value for name, value in drawn.items() if name in DEFAULTS}
    options["heavy"], options["recent"] = drawn.get("budget", (6, 4))
    options["scoring"], options["decay"] = drawn.get("scoring", ("sum", None))
    policy = options["policy"]
    if policy in WITHOUT_SCORES:
        options["scoring"], options["decay"] = "sum", None
    if policy not in ("h2o", "heavy") or options["heavy"] < 4:
        options["pins"] = ()
    if policy in ("full", "keydiff", "snapkv"):
        options["positions"] = "original"
    if policy == "snapkv":
        options["evict_every"] = None
    if isinstance(options["evict_every"], str):
        options["evict_every"] = int(options["evict_every"].removeprefix("prompt+"))
        options["whole_prompts"] = True
    if policy in ("full", "snapkv") or options["positions"] == "rolling":
        options["grows"] = False
    if options["grows"]:
        if not any(isinstance(options[name], float) for name in ("heavy", "recent")):
            options["heavy"], options["recent"] = 0.3, 0.2
        options["sink"] = 0 if options["sink"] == 0.3 else options["sink"]
        if options["evict_every"] and not options["whole_prompts"]:
            options["pins"] = ()
    # Of a second layer's keys rounding would decide more codes than could be compared.
    layers = 1 if options["kv_bits"] else 2
    may_have_none = options["recent"] == 0 or "min_tokens" in drawn  # which raises no part of 0
    factors = list(drawn.get("by_head", ())[:kv_heads])
    if factors and policy in ("h2o", "heavy") and options["positions"] == "original":
        options["layer_budgets"] = [factors, factors[::-1]][:layers]
        if kv_heads == 1:
            options["layer_budgets"] = [[0.5], [1.5]] if layers == 2 else [[1.0]]
    elif "by_layer" in drawn and layers == 2:
        options["layer_budgets"] = list(drawn["by_layer"])
    if may_have_none and 0.0 in _flat(options["layer_budgets"]):
        options["layer_budgets"] = None
    if options["layer_budgets"] is not None:
        options["pins"] = ()
    return options, layers


def _flat(factors):
    return [] if factors is None else list(torch.tensor(factors).flatten().tolist())


READS = [("read", size) for size in (1, 1, 1, 2, 5, 9)]
OTHERS = [("fork", 2), ("reverse", 0), ("keep first", 0), ("save", 0), ("forget", 3)]


@settings(max_examples=examples(500, quick=160), deadline=None, derandomize=True)
@given(data=st.data())
def test_the_cache_does_what_the_contract_says(make_llama, tmp_path_factory, data):
    names = data.draw(
        st.lists(st.sampled_from(sorted(CHOICES)), min_size=1, max_size=5, unique=True)
    )
    values = {name: data.draw(st.sampled_from(CHOICES[name])) for name in names}
    text = {
        "pads": data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)),
        "prompt": data.draw(st.one_of(st.integers(12, 26), st.integers(1, 11))),
        "events": data.draw(st.lists(st.sampled_from(READS + OTHERS), min_size=1, max_size=7)),
        "holes": data.draw(st.sampled_from([0.0, 0.0, 0.4])),
        "seed": data.draw(st.integers(0, 10**6)),
    }
    kv_heads = data.draw(st.sampled_from([1, 2, 4]))
    if not agrees(make_llama, tmp_path_factory, values, kv_heads, **text):
        event("near tie")


@pytest.mark.slow
@pytest.mark.parametrize("names", list(itertools.combinations(CHOICES, 2)), ids="-".join)
def test_every_pair_of_options(make_llama, tmp_path_factory, names):
    """All values of two options together, on padded texts of several turns."""
    draw = random.Random("-".join(names))
    for pair in itertools.product(*(CHOICES[name] for name in names)):
        for _ in range(10):  # of texts in which fp32 may decide either way
            events = draw.sample(READS + OTHERS, 5) + [("read", 2), ("read", 1)]
            text = {
                "pads": [0, draw.randrange(8)],
                "prompt": draw.randrange(16, 26),
                "events": events,
                "holes": draw.choice([0.0, 0.4]),
                "seed": draw.randrange(10**6),
            }
            values, kv_heads = dict(zip(names, pair, strict=True)), draw.choice([1, 2, 4])
            if agrees(make_llama, tmp_path_factory, values, kv_heads, **text):
                break
        else:
            pytest.fail(f"every text is near a tie: {values}")


def agrees(make_llama, tmp_path_factory, values, kv_heads, *, pads, prompt, events, holes, seed):
    """Compare logits, entries and scores after every event; False if a near tie ends it."""
    options, layers = compatible(values, kv_heads)
    pads = [min(pad, prompt - 1) for pad in pads]
    if prompt - max(pads) < 8:
        options["pins"] = ()
    model = make_llama(heads=HEADS, kv_heads=kv_heads, layers=layers, seed=seed % 7, sharpness=4.0)
    if values.get("learned_sinks"):
        give_sinks(model)
    model = model.double()
    source, transforms = model.config, None
    if options["positions"] != "rolling" and "from_config" not in values:
        source = model
    if source is model and options["kv_bits"] == 4:
        by_layer = transforms_of_model(model)
        transforms = [
            [getattr(by_layer[layer], name)[0, :, 0].double().numpy() for layer in range(layers)]
            for name in ("center", "scale")
        ]
    naive = NaiveH2O(
        {name: tensor.numpy() for name, tensor in model.state_dict().items()},
        {
            "layers": layers, "kv_heads": kv_heads, "head_dim": 16, "theta": 10_000.0,
            "eps": model.config.rms_norm_eps, "vocabulary": 97,
        },
        options, transforms,
    )  # fmt: skip
    given_options = {name: value for name, value in options.items() if name != "pins"}
    if options["policy"] == "value_extremes":
        given_options["policy"] = ValueExtremes()
    cache = cache_of(source, **given_options)
    cache.pin(options["pins"])
    generator = torch.Generator().manual_seed(seed)
    sequences = [naive.begin() for _ in pads]
    mask = torch.ones(len(pads), 0, dtype=torch.long)
    for kind, size in [("read", prompt), *events]:
        if kind == "read":
            ids = torch.randint(2, 97, (len(sequences), size), generator=generator)
            real = torch.rand(ids.shape, generator=generator) >= holes
            if not mask.shape[1]:
                real = torch.arange(size) >= torch.tensor(pads).unsqueeze(1)
            mask = torch.cat([mask, real.long()], dim=1)
            try:
                expected = [
                    naive.read(sequence, row[columns].tolist())
                    for sequence, row, columns in zip(sequences, ids, real, strict=True)
                ]
            except NearTieError:
                return False
            inputs = {"past_key_values": cache}
            if not mask.all():
                position_ids = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -size:]
                inputs |= {"attention_mask": mask, "position_ids": position_ids}
            with torch.no_grad():
                logits = model(ids, **inputs).logits
            for row, row_logits in enumerate(expected):
                torch.testing.assert_close(
                    logits[row, real[row]], torch.from_numpy(row_logits), atol=2e-4, rtol=1e-3
                )
        elif kind == "fork" and len(sequences) <= 2:
            cache = cache.fork(size)
            sequences = [sequence.fork() for sequence in sequences for _ in range(size)]
            mask = mask.repeat_interleave(size, dim=0)
        elif kind == "reverse":
            cache.reorder_cache(torch.arange(len(sequences)).flip(0))
            sequences, mask = sequences[::-1], mask.flip(0)
        elif kind == "keep first":
            cache.batch_select_indices(torch.tensor([0]))
            sequences, mask = sequences[:1], mask[:1]
        elif kind == "forget" and not (options["positions"] == "rolling" or options["masks"]):
            stop = int(mask.sum(dim=1).min()) - seed % 4
            sinks = max(naive.budget(sequence, 0, 0)[0] for sequence in sequences)
            start = max(stop - size - seed % 5, sinks)
            if start < stop:
                cache.forget([(start, stop)])
                for sequence in sequences:
                    naive.forget(sequence, start, stop)
        elif kind == "save" and not options["masks"]:
            path = tmp_path_factory.mktemp("saved") / "cache"
            cache.save(path)
            is_rule = isinstance(given_options["policy"], ValueExtremes)
            cache = h2okv.H2OCache.load(path, model, ValueExtremes() if is_rule else None)
        cache.check_integrity()
        check_entries(cache, naive, sequences, options, layers)
    return True


def give_sinks(model):
    """Give each head one more logit, as gpt-oss passes it to its attention."""

    def pass_sinks(module, args, options):
        return args, options | {"s_aux": module.sinks}

    for layer in model.model.layers:
        layer.self_attn.sinks = torch.nn.Parameter(torch.linspace(-2.0, 4.0, HEADS))
        layer.self_attn.register_forward_pre_hook(pass_sinks, with_kwargs=True)


def check_entries(cache, naive, sequences, options, layers):
    """Positions and scores of all layers, sequences and heads."""
    for layer in range(layers):
        positions, scores = cache.kept_positions(layer), cache.scores(layer)
        for row, sequence in enumerate(sequences):
            for head, numbers in enumerate(positions[row].tolist()):
                entries = dict(zip(numbers, scores[row, head].tolist(), strict=True))
                entries.pop(-1, None)
                expected = naive.scores_by_position(sequence, layer, head)
                assert entries.keys() == expected.keys(), (layer, row, head)
                if options["policy"] in WITHOUT_SCORES:
                    continue
                for position, score in expected.items():
                    assert math.isclose(entries[position], score, rel_tol=2e-3, abs_tol=2e-4)
