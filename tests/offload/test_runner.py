"""What a sequence gives does not depend on who goes with it, nor in which order."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import h2okv
from h2okv.offload.batch_runner import Limits

sys.path.insert(0, str(Path(__file__).parent.parent / "families"))
from family_table import FAMILIES, config_options  # noqa: E402

LENGTHS = (23, 7, 40, 31, 12, 40, 2, 18, 29, 1)
LIMITS = {
    "one at a time": Limits(1, 1, 1),
    "all together": Limits(10, 1000, 10),
    "read apart, decoded together": Limits(10, 60, 10),
    "never together": Limits(10, 60, 1),
    "a few at a time": Limits(4, 60, 3),
}


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama()


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(
            model_limits, id=name, marks=() if name == "a few at a time" else pytest.mark.slow
        )
        for name, model_limits in LIMITS.items()
    ],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"heavy": 3, "recent": 2}, {"heavy": 0, "recent": 1}, {"policy": "full"},
     {"positions": "rolling", "heavy": 6, "recent": 4}, {"positions": "rolling"},
     {"evict_every": 5, "sink": 1}],
    ids=["fractions", "tokens", "budget of one", "full", "rolling", "rolling shares", "chunks"],
)  # fmt: skip
def test_tokens_equal_those_of_each_prompt_alone(
    model, make_sequences, run_engine, alone, limits, options
):
    rooms = [3, 9, 1, 9, 30, 9, 5, 9, 9, 40]
    sequences = make_sequences(LENGTHS, rooms)
    expected = alone(model, sequences, **options)
    assert run_engine(model, sequences, limits, **options) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"heavy": 0, "recent": 1}, {"heavy": 1, "recent": 0}, {"heavy": 3, "recent": 2, "kv_bits": 8},
     {"heavy": 3, "recent": 2, "kv_bits": 4}],
    ids=["the newest alone", "one heavy hitter", "8 bits", "4 bits"],
)  # fmt: skip
def test_tokens_equal_those_of_masking_a_full_cache(
    model, make_sequences, run_engine, alone, options
):
    # Not held to the same slots alone, but to another implementation; texts outgrow their prompts.
    sequences = make_sequences(LENGTHS, 45)
    expected = alone(model, sequences, **options, masks=True)
    for limits in (LIMITS["all together"], LIMITS["a few at a time"]):
        assert run_engine(model, make_sequences(LENGTHS, 45), limits, **options) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma 2", "Llama 4 (text)", "Qwen3-Next"])
def test_padding_is_seen_by_no_kind_of_layer(name, make_sequences, run_engine, alone):
    # Layers that keep transformers' own entries hold padding too, and need the mask at every step.
    (family,) = [candidate for candidate in FAMILIES if candidate.name == name]
    config = AutoConfig.for_model(family.model_type, **config_options(family, 2))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    lengths = (9, 3, 14, 1, 6)
    expected = alone(model, make_sequences(lengths, 20))
    assert run_engine(model, make_sequences(lengths, 20), Limits(5, 1000, 5)) == expected


@pytest.mark.slow
def test_texts_longer_than_the_growth_of_a_full_cache(model, make_sequences, run_engine, alone):
    # Rows joined at different times of their lives must all find a slot, hundreds of steps later.
    lengths, limits = (40, 5, 60, 3), Limits(4, 60, 4)
    sequences = make_sequences(lengths, [300, 280, 20, 300])
    expected = alone(model, sequences, policy="full")
    assert run_engine(model, sequences, limits, policy="full") == expected


def test_sampling_depends_on_the_prompt_alone(model, make_sequences, run_engine):
    def run(limits, reverse=False, seed=0):
        sequences = make_sequences(LENGTHS)
        params = h2okv.SamplingParams(temperature=0.9, top_p=0.8, seed=seed)
        return run_engine(model, sequences[:: -1 if reverse else 1], limits, params=params)

    first = run(Limits(1, 1, 1))
    assert run(Limits(10, 60, 10)) == first
    assert run(Limits(3, 1000, 3), reverse=True) == first
    assert run(Limits(1, 1, 1), seed=1) != first


@pytest.mark.slow
def test_sampling_draws_what_the_probabilities_say(model, make_sequences, run_engine):
    # Many ids with one prompt: the first tokens are spread as one softmax says.
    sequences = make_sequences([9] * 400, 1)
    for sequence in sequences:
        sequence.prompt = sequences[0].prompt
    limits = Limits(100, 10_000, 100)
    output = run_engine(model, sequences, limits, params=h2okv.SamplingParams())
    with torch.no_grad():
        logits = model(torch.tensor([sequences[0].prompt])).logits[0, -1]
    probabilities = torch.softmax(logits, dim=-1)
    counts = torch.bincount(torch.tensor([t[0] for t in output.values()]), minlength=97)
    distance = (counts / 400 - probabilities).abs().sum() / 2
    draws = torch.multinomial(probabilities, 400 * 200, replacement=True).view(200, 400)
    usual = torch.stack([(torch.bincount(d, minlength=97) / 400 - probabilities).abs().sum() / 2
                         for d in draws])  # fmt: skip
    assert distance <= usual.max() * 1.1


def test_processors_of_the_models_own_config(model, make_sequences, run_engine):
    sequences = make_sequences((20, 30), 12)
    before = model.generation_config.no_repeat_ngram_size
    model.generation_config.no_repeat_ngram_size = 1
    try:
        output = run_engine(model, sequences)
    finally:
        model.generation_config.no_repeat_ngram_size = before
    for sequence in sequences:
        tokens = sequence.prompt + output[sequence.id]
        assert len(set(output[sequence.id])) == len(output[sequence.id]), tokens


def test_end_tokens_finish_a_sequence(model, make_sequences, run_engine, alone):
    expected = alone(model, make_sequences(LENGTHS, 12))
    end = expected["s0"][4]
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [end]
    try:
        sequences = make_sequences(LENGTHS, 12)
        output = run_engine(model, sequences, Limits(4, 60, 4))
    finally:
        model.generation_config.eos_token_id = before
    for name, tokens in expected.items():
        cut = tokens.index(end) + 1 if end in tokens else len(tokens)
        assert output[name] == tokens[:cut]
    assert {sequence.finish_reason for sequence in sequences} <= {"eos", "length"}
    assert sequences[0].finish_reason == "eos"
