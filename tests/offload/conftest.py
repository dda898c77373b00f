"""Sequences for the runner, and what each of them gives alone."""

from dataclasses import replace

import pytest
import torch
from oracle import cache_of
from transformers import PreTrainedModel

import h2okv
from h2okv.config import CacheConfig
from h2okv.offload.batch_runner import BatchSequence as Sequence
from h2okv.offload.batch_runner import ForwardScheduler, Limits, Runner, sequence_seed

VOCABULARY = 89


@pytest.fixture(scope="session")
def make_sequences():
    """Random prompts of mixed lengths."""

    def make(lengths, room=8, seed=1) -> list[Sequence]:
        generator = torch.Generator().manual_seed(seed)
        return [
            Sequence(
                f"s{index}",
                torch.randint(3, VOCABULARY, (length,), generator=generator).tolist(),
                room if isinstance(room, int) else room[index],
                h2okv.SamplingParams(temperature=0),
            )
            for index, length in enumerate(lengths)
        ]

    return make


@pytest.fixture(scope="session")
def run_engine():
    """Runs sequences through the engine; gives the new tokens by id."""

    def run(model, sequences, limits=None, scheduler=None, params=None, **cache_options):
        options = {"heavy": 0.2, "recent": 0.2, "min_tokens": 0} | cache_options
        runner = Runner(
            model,
            scheduler or ForwardScheduler(),
            CacheConfig(**options),
            limits or Limits(batch_size=8, micro_batch_tokens=1000, decode_batch=8),
            torch.device("cpu"),
        )
        for sequence in sequences if params else ():
            seed = sequence_seed(params.seed, sequence.id)
            sequence.params = replace(params, seed=seed)
        with h2okv.enable(model):
            done = [sequence for group in runner.run(sequences) for sequence in group]
        assert len({sequence.id for sequence in done}) == len(done) == len(sequences)
        return {sequence.id: sequence.new_tokens for sequence in done}

    return run


@pytest.fixture(scope="session")
def alone():
    """Return the tokens of transformers' generate for each prompt alone."""

    def generate(model: PreTrainedModel, sequences, **cache_options):
        options = {"heavy": 0.2, "recent": 0.2, "min_tokens": 0} | cache_options
        texts = {}
        with h2okv.enable(model):
            for sequence in sequences:
                output = model.generate(
                    torch.tensor([sequence.prompt]),
                    past_key_values=cache_of(model, **options),
                    max_new_tokens=sequence.max_new_tokens,
                    do_sample=False,
                )
                texts[sequence.id] = output[0, len(sequence.prompt) :].tolist()
        return texts

    return generate
