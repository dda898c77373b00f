"""Drawing tokens so that a sample's text depends on its own seed alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import cast

import torch
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper


class SeededSampling(LogitsProcessor):
    """Adds noise to the logits, so that the likeliest token is a draw from their distribution.

    The maximum of log-probabilities with independent Gumbel noise is distributed as they say
    (Gumbel 1954; Maddison et al., arXiv 1411.0030, section 2). Each row of a batch has a random
    generator of its own: what it draws does not depend on the rows beside it, nor on what an
    interrupted run has finished before.
    """

    def __init__(self, seeds: Sequence[int], temperature: float, top_p: float) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(temperature)]
        if top_p < 1:
            self._warpers.append(TopPLogitsWarper(top_p))

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Returns the logits with noise, fp32 ``[B, V]``.

        Args:
            input_ids: int64 ``[B, T]``.
            scores: Logits, ``[B, V]``.
        """
        noisy = cast(torch.FloatTensor, scores.float())
        for warper in self._warpers:
            noisy = warper(input_ids, noisy)
        size = noisy.shape[1]
        noise = torch.stack(
            [-torch.empty(size).exponential_(generator=g).log() for g in self._generators]
        )
        return cast(torch.FloatTensor, noisy + noise.to(noisy.device))


def sample_seed(seed: int, sample: int) -> int:
    """Makes the seed of one sample."""
    digest = hashlib.sha256(f"{seed} {sample}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
