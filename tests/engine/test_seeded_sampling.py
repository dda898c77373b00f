import torch

from h2okv.engine.sampler import SeededSampling, sample_seed
from h2okv.engine.sampling_params import SamplingParams

LOGITS = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])


def draws(count, temperature=1.0, top_p=1.0):
    sampling = SeededSampling(
        [
            SamplingParams(temperature=temperature, top_p=top_p, seed=sample_seed(0, n))
            for n in range(count)
        ]
    )
    return sampling(None, LOGITS.expand(count, -1)).argmax(dim=-1)


def test_samples_follow_the_distribution_of_the_logits():
    shares = torch.bincount(draws(20_000, temperature=0.7), minlength=5) / 20_000
    assert torch.allclose(shares, (LOGITS / 0.7).softmax(dim=0), atol=0.012)


def test_top_p_excludes_unlikely_tokens():
    # The two likeliest hold 0.79 of the probability, the next one brings it to 0.91.
    assert set(draws(3_000, top_p=0.85).tolist()) == {1, 2, 4}


def test_samples_of_a_sequence_do_not_depend_on_the_batch():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    together = SeededSampling([SamplingParams(seed=seed) for seed in (5, 6, 7)])
    alone = SeededSampling([SamplingParams(seed=6)])
    for _ in range(3):
        assert torch.equal(together(None, logits)[1:2], alone(None, logits[1:2]))


def test_seeds_of_samples_and_runs_differ():
    assert len({sample_seed(seed, n) for seed in range(10) for n in range(100)}) == 1000
