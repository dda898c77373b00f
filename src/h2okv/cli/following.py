"""What a cache would say next, token after token, along a text that is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import LogitsProcessor
from transformers.cache_utils import Cache

from h2okv.cli.generation import Job, generate_once
from h2okv.cli.options import Sampling
from h2okv.cli.output import discard


class _Follow(LogitsProcessor):
    """Notes which token would be the next, and then takes the given one."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self.choices: list[int] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        given = self._token_ids[len(self.choices)]
        self.choices.append(int(scores.argmax()))
        scores.fill_(-torch.inf)
        scores[:, given] = 0.0
        return scores


def count_same_choices(job: Job, cache: Cache, token_ids: Sequence[int]) -> int | None:
    """Counts how often the likeliest next token is the given one, the text before it given too.

    Two texts that part at one token have little in common from there on, however good both are.
    This asks at every token anew, so it tells how much the cache lost.

    Args:
        job: What was generated.
        cache: An empty cache.
        token_ids: The text to follow.

    Returns:
        The count; None if there is nothing to follow.

    Raises:
        KeyboardInterrupt: If Ctrl-C came meanwhile.
    """
    if not token_ids:
        return None
    follow = _Follow(token_ids)
    forced = replace(job, sampling=Sampling(max_new_tokens=len(token_ids)))
    run = generate_once(forced, cache, discard, processors=[follow])
    if run.interrupted:
        raise KeyboardInterrupt
    return sum(a == b for a, b in zip(follow.choices, token_ids, strict=True))
