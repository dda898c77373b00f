"""The next token of each row, as the request of that row wants it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from h2okv.engine.processors import processors_of, settled_config
from h2okv.engine.serving.outputs import TokenLogprob
from h2okv.engine.serving.sampling_params import SamplingParams

_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
"""Processors for which a row's text so far makes no difference."""


class RowSampler:
    """What choosing the tokens of one output needs.

    Args:
        model: Its generation config adds processors of its own; unchanged.
        params: What is asked for.
        prompt: The prompt's tokens.
        index: Which of the ``n`` outputs.
    """

    def __init__(
        self, model: PreTrainedModel, params: SamplingParams, prompt: Sequence[int], index: int
    ) -> None:
        penalty = None if params.repetition_penalty == 1 else params.repetition_penalty
        config = settled_config(
            model, params.temperature, params.top_p, params.top_k, params.min_p, penalty
        )
        processors = processors_of(model, config, len(prompt))
        self.params = params
        self.prompt = prompt
        own = [part for part in processors if not isinstance(part, _WARPERS)]
        warpers = [part for part in processors if isinstance(part, _WARPERS)]
        self.by_text = LogitsProcessorList(own)
        """Those that look at the text so far."""
        self.warpers = LogitsProcessorList(warpers)
        self.penalises = bool(
            params.presence_penalty or params.frequency_penalty or params.logit_bias
        )
        self.is_plain = params.is_greedy and not self.by_text and not self.penalises
        self.key = (params.temperature, params.top_p, params.top_k, params.min_p)
        self.generator: torch.Generator | None = None
        if not params.is_greedy:
            self.generator = torch.Generator()
            if params.seed is None:
                self.generator.seed()
            else:
                self.generator.manual_seed((params.seed + index) % 2**63)

    def process(self, logits: Any, text: Sequence[int]) -> torch.Tensor:
        """Does to a row's logits what its text so far asks for.

        Args:
            logits: fp32 ``[1, V]`` on the CPU; unchanged.
            text: New tokens so far.

        Returns:
            fp32 ``[1, V]``.
        """
        if self.penalises:
            logits = self._penalised(logits, text)
        if self.by_text:
            tokens: Any = torch.tensor([[*self.prompt, *text]])
            logits = self.by_text(tokens, logits)
        processed: torch.Tensor = logits
        return processed

    def _penalised(self, logits: torch.Tensor, text: Sequence[int]) -> torch.Tensor:
        logits = logits.clone()
        for token, times in Counter(text).items():
            taken = self.params.presence_penalty + self.params.frequency_penalty * times
            logits[0, token] -= taken
        for token, bias in self.params.logit_bias.items():
            if 0 <= token < logits.shape[1]:
                logits[0, token] += bias
        return logits


def choose(
    rows: Sequence[RowSampler], texts: Sequence[Sequence[int]], logits: torch.Tensor
) -> list[int | None]:
    """Chooses a token for each row, whatever the others want.

    Args:
        rows: B of them; their generators are advanced.
        texts: Their new tokens so far.
        logits: ``[B, V]``, of any dtype, on any device.

    Returns:
        B tokens; ``None`` where the logits are not numbers.
    """
    # A NaN anywhere in a row is one in its sum; infinities of both signs are no use either.
    is_fine = ~torch.isnan(logits.float().sum(dim=-1))
    chosen: list[int | None] = list(logits.argmax(dim=-1).tolist())
    for row, fine in enumerate(is_fine.tolist()):
        if not fine:
            chosen[row] = None
    drawing: dict[Any, list[int]] = defaultdict(list)
    for row, sampler in enumerate(rows):
        if chosen[row] is None or sampler.is_plain:
            continue
        if sampler.by_text or sampler.penalises:
            one = sampler.process(logits[row : row + 1].float().cpu(), texts[row])
            chosen[row] = _draw([sampler], one)[0]
        else:
            drawing[sampler.key].append(row)
    for group in drawing.values():
        samplers = [rows[row] for row in group]
        for row, token in zip(group, _draw(samplers, logits[group].float()), strict=True):
            chosen[row] = token
    return chosen


def _draw(samplers: list[RowSampler], logits: Any) -> list[int]:
    """Draws for rows with the same warpers, or takes the likeliest."""
    if samplers[0].generator is None:
        return list(logits.argmax(dim=-1).tolist())
    nothing: Any = None  # warpers do not look at the text
    weights = torch.softmax(samplers[0].warpers(nothing, logits), dim=-1).cpu()
    return [
        int(torch.multinomial(weights[row : row + 1], 1, generator=sampler.generator))
        for row, sampler in enumerate(samplers)
    ]


def logprobs_of(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Tells how likely tokens were.

    Args:
        logits: ``[n, V]``, as the model gave them.
        tokens: n of them.
        count: How many of the likeliest tokens to tell with each.

    Returns:
        n of them.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
    values, indices = logprobs.topk(min(count, logits.shape[1]), dim=-1)
    return [
        TokenLogprob(token, value[0], tuple(zip(places, best, strict=True)))
        for token, value, places, best in zip(
            tokens, own.tolist(), indices.tolist(), values.tolist(), strict=True
        )
    ]
