"""The next token of each row, as the request of that row wants it."""

from __future__ import annotations

import math
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
from h2okv.engine.serving.errors import RequestFailedError
from h2okv.engine.serving.outputs import TokenLogprob
from h2okv.engine.serving.sampling_params import SamplingParams

_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
"""Processors for which a row's text so far makes no difference."""

_NOT_A_NUMBER = (
    "the model's output for this request is not a number (NaN); its data type may be too narrow"
)
_NOTHING_LEFT = (
    "no token can be chosen: temperature, penalties and biases leave no weight that is a number "
    "above 0; choose others."
)


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
        bias = params.logit_bias
        self._bias = torch.tensor(list(bias)), torch.tensor(list(bias.values()))
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
        if self.params.logit_bias:
            tokens, biases = self._bias
            logits[0, tokens] += biases
        return logits


def choose(
    rows: Sequence[RowSampler], texts: Sequence[Sequence[int]], logits: torch.Tensor
) -> list[int | Exception]:
    """Chooses a token for each row, whatever the others want.

    Args:
        rows: B of them; their generators are advanced.
        texts: Their new tokens so far.
        logits: ``[B, V]``, of any dtype, on any device.

    Returns:
        B tokens; what went wrong instead where a row has none, which does not touch the others.
    """
    # A NaN anywhere in a row is one in its sum; infinities of both signs are no use either.
    is_fine = ~torch.isnan(logits.float().sum(dim=-1))
    chosen: list[int | Exception] = list(logits.argmax(dim=-1).tolist())
    for row, fine in enumerate(is_fine.tolist()):
        if not fine:
            chosen[row] = RequestFailedError(_NOT_A_NUMBER)
    drawing: dict[Any, list[int]] = defaultdict(list)
    for row, sampler in enumerate(rows):
        if isinstance(chosen[row], Exception) or sampler.is_plain:
            continue
        if sampler.by_text or sampler.penalises:
            try:
                one = sampler.process(logits[row : row + 1].float().cpu(), texts[row])
                chosen[row] = _draw([sampler], one)[0]
            except Exception as error:  # a processor of the model's own may raise anything
                chosen[row] = error
        else:
            drawing[sampler.key].append(row)
    for group in drawing.values():
        samplers = [rows[row] for row in group]
        for row, token in zip(group, _draw(samplers, logits[group].float()), strict=True):
            chosen[row] = token
    return chosen


def _draw(samplers: list[RowSampler], logits: Any) -> list[int | Exception]:
    """Draws for rows with the same warpers, or takes the likeliest."""
    chosen: list[int | Exception] = []
    if samplers[0].generator is None:
        best = logits.max(dim=-1)
        for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            chosen.append(token if value > -math.inf else RequestFailedError(_NOTHING_LEFT))
        return chosen
    nothing: Any = None  # warpers do not look at the text
    weights = torch.softmax(samplers[0].warpers(nothing, logits), dim=-1).cpu()
    is_fine = torch.isfinite(weights.sum(dim=-1)).tolist()
    for row, sampler in enumerate(samplers):
        if is_fine[row]:
            drawn = torch.multinomial(weights[row : row + 1], 1, generator=sampler.generator)
            chosen.append(int(drawn))
        else:
            chosen.append(RequestFailedError(_NOTHING_LEFT))
    return chosen


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
